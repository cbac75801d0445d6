"""``kvmnn store --model``: folders of ONNX models and names of pulled ones, with the fingerprint of ``generate``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.cli.commands.store import _choose_fingerprint_method
from kvmnn.lm import compute_fingerprint
from kvmnn.lm.importer import catalog
from kvmnn.lm.tokenizer import Tokenizer, encode_prompt
from kvmnn.store import PrefixStore, fingerprints

pytest.importorskip("onnx")

FIXTURE = FIXTURES / "lm"
NAME = "smollm2-135m"
NUM_LAYERS = 6


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """K and V of the text prompt.txt, which a longer text begins with."""
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("def read_file(path):")
    Path("longer.txt").write_text("def read_file(path):\n    return open(")
    tokens = len(encode_prompt(Tokenizer.open_for_model(FIXTURE), "def read_file(path):"))
    rows = np.arange(2 * tokens * 16, dtype=np.float32).reshape(2, tokens, 16)
    save_layers(rows, NUM_LAYERS)
    return Path("kv.npz")


def save_layers(rows: np.ndarray, num_layers: int) -> None:
    parts = {"key": rows, "value": rows + 1}
    np.savez("kv.npz", **{f"layer_{layer}.{part}": parts[part] for layer in range(num_layers) for part in parts})


def pull_fixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fixture where the pulled model is: nothing is downloaded."""
    monkeypatch.setenv("KVMNN_MODELS", str(folder))
    shutil.copytree(FIXTURE, folder / NAME)
    monkeypatch.setattr(catalog, "read_import_result", lambda path: path if path.exists() else None)


@pytest.mark.parametrize("form", ["folder", "name"])
def test_store_commands_take_an_onnx_model(
    form: str, cache: Path, run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull_fixture(Path("models").absolute(), monkeypatch)
    model = ("--model", FIXTURE if form == "folder" else NAME)
    run("store", "put", "s", cache, "--text", "prompt.txt", *model)
    with PrefixStore("s") as store:
        assert store.models == (compute_fingerprint(FIXTURE),)
        (entry,) = store.ls().texts
    assert entry.label == "def read_file(path):"
    assert int(run("store", "match", "s", "--text", "longer.txt", *model).out) >= entry.tokens - 1
    assert run("store", "match", "s", "--text", "prompt.txt", *model).out.strip() == str(entry.tokens)
    assert (
        f"{entry.tokens} of {entry.tokens} tokens"
        in run("store", "get", "s", "--text", "prompt.txt", *model, "-o", "got.npz").out
    )
    assert np.array_equal(np.load("got.npz")["layer_0.key"], np.load(cache)["layer_0.key"])
    assert "removed 1 unit" in run("store", "rm", "s", "--text", "prompt.txt", *model).out


@pytest.mark.parametrize("num_layers", [NUM_LAYERS - 1, NUM_LAYERS + 1])
def test_store_put_of_cache_with_other_layers_than_the_model_is_refused(
    num_layers: int, cache: Path, run: Callable[..., SimpleNamespace]
) -> None:
    words = ("store", "put", "s", cache, "--text", "prompt.txt", "--model", FIXTURE)
    rows = np.load(cache)["layer_0.key"]
    save_layers(rows, num_layers)
    error = run(*words, code=2).err
    assert f"kv.npz: has K and V of {num_layers} layers (layers 0 to {num_layers - 1}): expected 6, which" in error
    assert not Path("s").exists()
    run(*words, "--force")
    save_layers(rows, NUM_LAYERS)
    run("store", "put", "t", cache, "--text", "prompt.txt", "--model", FIXTURE)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_nums": 2},
        {"num_hidden_layers": 2},
        {"text_config": {"num_hidden_layers": 2}, "model_type": "gemma3"},
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "num_kv_shared_layers": 1},
    ],
)
def test_store_put_takes_the_number_of_layers_with_k_and_v_from_settings(
    fields: dict[str, object], cache: Path, run: Callable[..., SimpleNamespace]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(fields))
    rows = np.load(cache)["layer_0.key"]
    ids = ",".join(map(str, range(rows.shape[1])))
    words = ("store", "put", "s", cache, "--token-ids", ids, "--model", "model", "--fingerprint", "m")
    save_layers(rows, 1)
    assert "has K and V of 1 layer (layer 0): expected 2, which the model in model has" in run(*words, code=2).err
    save_layers(rows, 2)
    run(*words)


def test_store_put_model_not_pulled_names_the_command(
    cache: Path, run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMNN_MODELS", "none")
    error = run("store", "put", "s", cache, "--text", "prompt.txt", "--model", NAME, code=1).err
    assert f"kvmnn model pull {NAME}" in error
    assert not Path("s").exists()


def test_encode_model_by_name_is_its_folder(
    cache: Path, run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMNN_MODELS", "none")
    words = ("encode", cache, "--codec", "dense", "-o", "out/", "--model", NAME)
    assert f"kvmnn model pull {NAME}" in run(*words, code=1).err
    assert not Path("out").exists()
    models = Path("models").absolute()
    pull_fixture(models, monkeypatch)
    assert f"as {models / NAME} says" in run(*words).err


def test_remembered_fingerprint_of_an_onnx_model_needs_no_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    monkeypatch.setattr(fingerprints, "_MIN_AGE_SECONDS", -60.0)
    model, store = tmp_path / "model", tmp_path / "S"
    model.mkdir()
    graph = onnx.load(str(next(FIXTURE.glob("*.onnx"))))
    onnx.save(graph, str(model / "model.onnx"), save_as_external_data=True, location="weights", size_threshold=0)
    (model / "weights").rename(model / "blob")
    (model / "weights").symlink_to("blob")
    PrefixStore(store).close()

    def read() -> str:
        return fingerprints.read_or_compute_fingerprint(
            str(model), store, method=_choose_fingerprint_method(str(model))
        )

    first = read()
    assert first == compute_fingerprint(model)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)
        assert read() == first
    (model / "other").write_bytes((model / "blob").read_bytes()[::-1])
    (model / "weights").unlink()
    (model / "weights").symlink_to("other")  # the same graph leads to other weights
    assert read() == compute_fingerprint(model) != first
