"""Initial caches whose K and V are in another order than the model's: refused before measuring, or inverted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import saved_starts
from repository import FIXTURES

from kvmnn.cli.entry_point import main
from kvmnn.errors import KvmnnError, OptionError, SourceError
from kvmnn.evaluation import EvaluationResult, EvaluationSettings, evaluate
from kvmnn.lm import RunOptions, dump_kv, read_initial_cache
from kvmnn.lm.warm_start import REVERSED_K_ORDER, invert_named_transforms, read_model_interface
from kvmnn.policies import create_policy

MODEL = FIXTURES / "lm"
TEXT = MODEL / "texts" / "trace.py.txt"
TOKENS, CHUNK = 90, 10
SETTINGS = EvaluationSettings(tokens=110, chunk=CHUNK, timing=False, threads=1)
Layers = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order") / "kv"
    dump_kv(MODEL, TEXT, path, tokens=TOKENS, options=RunOptions(chunk=CHUNK))
    return path


@pytest.fixture(scope="module")
def layers(dump: Path) -> Layers:
    return [tuple(np.load(dump / f"layer_{n}.{part}.npy") for part in ("key", "value")) for n in range(6)]


@pytest.fixture(scope="module")
def ids(dump: Path) -> list[int]:
    return json.loads((dump / "token_ids.json").read_text())


def session(path: Path, layers: Layers, ids: Sequence[int], *names: str, kind: str = "f32") -> Path:
    """A session whose K and V are those of the model after what `names` undo was done to them."""
    done = []
    for keys, values in layers:
        dims = keys.shape[-1]
        if "k-order" in names:
            keys = keys[..., [place // 2 + place % 2 * (dims // 2) for place in range(dims)]]
        if REVERSED_K_ORDER in names:
            keys = keys[..., [2 * place % dims + 2 * place // dims for place in range(dims)]]
        size = {"k-rotation": dims & -dims, "v-rotation": 64}
        pair = []
        for name, words in (("k-rotation", keys), ("v-rotation", values)):
            if name in names:
                signs = [[(-1) ** (i & j).bit_count() for j in range(size[name])] for i in range(size[name])]
                blocks = words.reshape(*words.shape[:-1], -1, size[name])
                words = (blocks @ np.array(signs) / size[name] ** 0.5).reshape(words.shape).astype(np.float32)
            pair.append(words)
        done.append((pair[0], pair[1]))
    return saved_starts.llama(path, done, ids, kind)


def measured(path: Path, undo: Sequence[str] = (), **more: object) -> EvaluationResult:
    with read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=undo) as start:
        return evaluate(MODEL, TEXT, initial_source=start, **{"settings": SETTINGS, "jobs": 0} | more)


DONE = [("k-order",), ("k-rotation",), ("v-rotation",), ("k-rotation", "v-rotation"),
        ("k-rotation", "v-rotation", "k-order")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("names", DONE, ids="+".join)
def test_initial_cache_llama_cpp_order_is_refused_or_inverted(
    names: tuple[str, ...], layers: Layers, ids: list[int], tmp_path: Path
) -> None:
    path = session(tmp_path / "a.session", layers, ids, *names)
    cells = tmp_path / "cells"
    with pytest.raises(
        OptionError, match=r"a\.session: compared on the first 64 tokens its .*lies? otherwise"
    ) as caught:
        measured(path, store=cells)
    assert not cells.exists() or not cells.read_bytes()
    said = str(caught.value).partition("expected --invert ")[2].partition(", or --invert auto")[0]
    assert set(said.split(",")) == set(names)
    auto, told = measured(path, ["auto"]), measured(path, said.split(","))
    assert auto.rows[1].nll == told.rows[1].nll and auto.start.sha256 == told.start.sha256
    assert auto.rows[1].versus_full.nll == pytest.approx(0, abs=1e-4)
    note = next(note for note in auto.notes if note.startswith("Undone in a.session: "))
    assert set(note.partition(": ")[2].partition(". ")[0].split(", ")) == set(names)
    assert auto.start.about.endswith(f"undone: {', '.join(said.split(','))}")


@pytest.mark.slow
def test_initial_cache_neighbour_order_is_inverted_by_auto(layers: Layers, ids: list[int], tmp_path: Path) -> None:
    words = layers[0][0]
    assert np.array_equal(
        invert_named_transforms(invert_named_transforms(words, "key", [REVERSED_K_ORDER]), "key", ["k-order"]), words
    )
    path = session(tmp_path / "a.session", layers, ids, REVERSED_K_ORDER)
    with pytest.raises(
        OptionError, match=r"lies otherwise than this model's .*: expected --invert auto, which finds it"
    ):
        measured(path)
    auto = measured(path, ["auto"])
    assert auto.rows[1].versus_full.nll == 0 and auto.start.about.endswith(f"undone: {REVERSED_K_ORDER}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_initial_cache_quantised_in_order_needs_no_inversion(
    kind: str, layers: Layers, ids: list[int], tmp_path: Path
) -> None:
    path = session(tmp_path / "a.session", layers, ids, kind=kind)
    plain, auto = measured(path), measured(path, ["auto"])
    assert plain.rows[1].nll == auto.rows[1].nll and plain.start.sha256 == auto.start.sha256
    assert not any(note.startswith("Undone in") for note in auto.notes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_initial_cache_rotated_blocks_are_inverted_by_auto(
    kind: str, layers: Layers, ids: list[int], tmp_path: Path
) -> None:
    names = ("k-rotation", "v-rotation", "k-order")
    auto = measured(session(tmp_path / "a.session", layers, ids, *names, kind=kind), ["auto"])
    assert max(each.relative_distance for each in auto.start.distances) < 0.2 and auto.rows[1].kind == "LOSSY"


@pytest.mark.slow
def test_initial_cache_wrong_inversion_is_refused(layers: Layers, ids: list[int], tmp_path: Path) -> None:
    path = session(tmp_path / "a.session", layers, ids)
    with pytest.raises(
        OptionError, match=r"lies otherwise than this model's after --invert k-order .*: expected --invert auto"
    ):
        measured(path, ["k-order"])
    assert measured(path, ["none"]).rows[1].versus_full.nll == 0


@pytest.mark.slow
@pytest.mark.parametrize("undo", [[], ["auto"], ["k-order"]])
def test_initial_cache_of_other_model_is_refused(
    undo: list[str], layers: Layers, ids: list[int], tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    other = [tuple(rng.standard_normal(part.shape).astype(np.float32) for part in pair) for pair in layers]
    path = session(tmp_path / "a.session", other, ids)  # type: ignore[arg-type]
    with pytest.raises(
        SourceError, match=r"its K and V are no roundings of this model's .*: expected a cache of the same"
    ):
        measured(path, undo)
    assert any("no roundings of this model's" in note for note in measured(path, ["none"]).notes)


@pytest.mark.slow
def test_initial_cache_cut_cache_is_compared_on_its_tokens(tmp_path: Path) -> None:
    """The first tokens are gone, and in another one each head has its own."""
    for policy in (create_policy("recent_only", budget=20, skip_layers=()), create_policy("knorm", budget=30)):
        path = tmp_path / policy.name
        dump_kv(MODEL, TEXT, path, policy, tokens=TOKENS, options=RunOptions(chunk=None))
        for undo in ((), ("auto",)):
            assert measured(path, undo).start.tokens_seen == TOKENS


def test_initial_cache_inversion_copies_and_cleans_up(layers: Layers, ids: list[int], tmp_path: Path) -> None:
    path = session(tmp_path / "a.session", layers, ids, "k-order")
    with read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=["auto"]) as start:
        before = [layer.keys.copy() for layer in start.load_layers()]
        with start.with_transforms_inverted(["k-order"]) as settled:
            directory = settled.directory
            assert directory.is_dir() and settled.sha256 != start.sha256
        assert not directory.exists()
        assert all(np.array_equal(one, two.keys) for one, two in zip(before, start.load_layers(), strict=True))
    with pytest.raises(KvmnnError, match="undo 'auto': expected k-rotation"):
        read_initial_cache(path, read_model_interface(MODEL), inverted_transforms=["auto", "k-order"])


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_command_refuses_or_inverts_initial_cache(
    layers: Layers, ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = session(tmp_path / "a.session", layers, ids, "k-order")
    asked = [
        "eval",
        str(MODEL),
        "--text",
        str(TEXT),
        "--max-tokens",
        "100",
        "--chunk",
        "10",
        "--initial-cache",
        str(path),
    ]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "expected --invert k-order, or --invert auto, which finds it" in err
    assert main([*asked, "--invert", "auto"]) == 0
    assert "Undone in a.session: k-order." in capsys.readouterr().out
    assert main(["eval", str(MODEL), "--text", str(TEXT), "--invert", "auto"]) == 2
    assert "--invert is about the cache of --initial-cache" in capsys.readouterr().err
