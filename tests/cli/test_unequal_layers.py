"""Layers with unequal heads and head sizes, V unlike K, and K alone: in all verbs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import hf_files
import llama_files
import numpy as np
import pytest
from repository import FIXTURES

import kvmnn
from kvmnn.cli.entry_point import main

SHAPES = ((2, 32), (4, 32), (1, 64), (3, 16))
TOKENS = 150
IDS = np.random.default_rng(1).integers(0, 40, TOKENS).tolist()


def layers(dtype: str = "f2") -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of layers, ``[batch, kv_head, token, head_dim]``; rows come again where tokens do."""
    rng = np.random.default_rng(2)
    rows = [[rng.standard_normal((1, heads, 40, dims))[:, :, IDS] for _ in range(2)] for heads, dims in SHAPES]
    return [tuple(np.ascontiguousarray(part, dtype) for part in pair) for pair in rows]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of one cache, each with what kvmnn calls its inputs."""
    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text(json.dumps(IDS))
    hf_files.save(tmp_path / "c.pt", hf_files.dynamic_cache(layers()))
    parts = [(n, number) for n in range(len(SHAPES)) for number in range(2)]
    np.savez("c.npz", **{f"layer_{n}.{('key', 'value')[number]}": layers()[n][number] for n, number in parts})
    shape = llama_files.Shape(layers=3, layer_heads=(2, 4, 1))
    Path("c.session").write_bytes(llama_files.state(Random(3), shape, [TOKENS], architecture="deci")[0])
    heads = {"attention__head_count_kv": [2, 4, 1], "attention__head_count": [8, 8, 8], "attention__key_length": 32}
    Path("m.gguf").write_bytes(llama_files.gguf("deci", **heads, block_count=3))
    return tmp_path


FILES = {"c.pt": [], "c.npz": [], "c.session": ["--model", "m.gguf"]}


@pytest.mark.parametrize("codec", ["dense", "mnn"])
@pytest.mark.parametrize("name", FILES)
def test_store_unequal_layers_round_trip(here: Path, run, name: str, codec: str) -> None:
    """The whole text and a beginning, through export and import as well."""
    ids = [] if name == "c.session" else ["--token-ids", "ids.json", "--fingerprint", "x"]
    run("store", "put", "s", name, *FILES[name], *ids, "--codec", codec, "--block-tokens", 16)
    run("store", "verify", "s")
    ids = "ids.json"
    if name == "c.session":
        Path("own.json").write_text(
            json.dumps(json.loads(run("inspect", name, "--json").out)["inputs"][0]["engine_cache"]["token_ids"])
        )
        ids = "own.json"
    run("store", "get", "s", "--token-ids", ids, "-o", "got.npz")
    assert "equal" in run("diff", "got.npz", name, *FILES[name]).out
    run("store", "export", "s", "--token-ids", ids, "-o", "moved")
    run("store", "import", "t", "moved", "--block-tokens", 64)
    Path("first.json").write_text(json.dumps(json.loads(Path(ids).read_text())[:77]))
    run("store", "get", "t", "--token-ids", "first.json", "-o", "first.npz")
    with np.load("got.npz") as whole, np.load("first.npz") as first:
        assert all(first[part].tobytes() == whole[part][:, :77].tobytes() for part in whole)
    assert (
        "expected one geometry" in run("store", "get", "s", "--token-ids", ids, "--name", "p", "-o", "p/", code=1).err
    )


def test_unequal_heads_are_kept_in_frames_and_arrays(here: Path, run) -> None:
    """The model's header lists the heads of each layer; frames and plain arrays keep them."""
    run("encode", "c.session", "--model", "m.gguf", "-o", "f/")
    run("mnn", "unpack", "c.session", "--model", "m.gguf", "-o", "u.npz")
    for name, options in (("c.session", FILES["c.session"]), ("f", []), ("u.npz", [])):
        said = kvmnn.open(name, model=options[1] if options else None).engine_cache
        assert said is not None and said.layer_kv_heads == (2, 4, 1) and "3 layers, 1 to 4 kv heads of 32" in str(said)
    assert kvmnn.open("c.pt").engine_cache.layer_kv_heads == (2, 4, 1, 3)
    assert "1 to 4 kv heads" in run("inspect", "u.npz").out


def test_store_unequal_layers_grow_by_another_put(here: Path, run) -> None:
    """Streams of a unit refer to earlier rows, in each layer to its own."""
    said = ("--fingerprint", "x", "--block-tokens", 16)
    with np.load("c.npz") as words:
        np.savez("first.npz", **{name: words[name][:, :, :100] for name in words})
    Path("first.json").write_text(json.dumps(IDS[:100]))
    run("store", "put", "s", "first.npz", "--token-ids", "first.json", *said)
    assert "150 tokens, 50 of them new" in run("store", "put", "s", "c.pt", "--token-ids", "ids.json", *said[:2]).out
    run("store", "get", "s", "--token-ids", "ids.json", "-o", "got.npz")
    assert "equal" in run("diff", "got.npz", "c.pt").out


@pytest.mark.parametrize("name", FILES)
def test_unequal_layers_pass_all_verbs(here: Path, run, name: str) -> None:
    run("encode", name, "-o", "x.frames")
    run("verify", "x.frames", "--against", name)
    assert "equal" in run("diff", name, "x.frames", *FILES[name]).out
    run("mnn", "unpack", name, *FILES[name], "-o", "x.safetensors")
    assert "equal" in run("diff", name, "x.safetensors", *FILES[name]).out
    run("encode", "x.safetensors", "--codec", "dense", "-o", "dense")
    run("verify", "dense", "--against", "x.safetensors")
    assert json.loads(run("measure", name, "--json").out)["breakdown"]["found_layers"] == len(SHAPES) - (
        name == "c.session"
    )


def test_pack_and_replay_name_unequal_layers(here: Path, run) -> None:
    wanted = (
        "c.pt: layer 0 has 2 kv heads x 32 dims of fp16, layer 1 has 4 kv heads x 32 dims of fp16, "
        "layer 2 has 1 kv head x 64 dims of fp16, layer 3 has 3 kv heads x 16 dims of fp16: expected one geometry"
    )
    Path("config.json").write_text("{}")
    pack = ("mnn", "pack", "c.pt", "--backend", "arm64-fp16", "--name", "s", "-o", "q/")
    for words in (pack, ("mnn", "replay", "c.pt", "--engine-config", "config.json")):
        assert wanted in run(*words, code=1).err
    heads = (2, 2, 2, 4, 2, 1)
    parts = [(number, part) for number in range(len(heads)) for part in ("key", "value")]
    np.savez("more.npz", **{f"layer_{n}.{part}": np.ones((heads[n], 8, 8), np.float16) for n, part in parts})
    said = run("mnn", "pack", "more.npz", *pack[3:], code=1).err
    assert "more.npz: layers 0 to 2, 4 have 2 kv heads x 8 dims of fp16, layer 3 has 4 kv heads" in said


def test_eval_initial_cache_names_layers_unlike_the_model(here: Path, run) -> None:
    model = FIXTURES / "lm"
    shapes = ((4, 64), (2, 64), (4, 64), (4, 64), (4, 64), (4, 64))
    parts = [(n, part) for n in range(len(shapes)) for part in ("key", "value")]
    words = {f"layer_{n}.{part}": np.ones((shapes[n][0], 40, shapes[n][1]), np.float16) for n, part in parts}
    np.savez("six.npz", **words)
    asked = (
        "--text",
        model / "texts" / "trace.py.txt",
        "--max-tokens",
        56,
        "--initial-cache",
        "six.npz",
        "--token-ids",
        "0,1",
    )
    said = run("eval", model, *asked, code=2).err
    assert "six.npz: key of layer 1 is of 2 kv heads x 64" in said


def test_store_put_unequal_types_of_k_and_v(here: Path, run) -> None:
    """As with llama.cpp's -ctk q8_0 alone; fp32 represents every number of both."""
    shape = llama_files.Shape(k_type="q8_0", v_type="f16")
    Path("q.session").write_bytes(llama_files.state(Random(3), shape, [40], architecture="qwen2")[0])
    put = run("store", "put", "s", "q.session", "--kv-heads", 2, "--fingerprint", "x")
    said = " ".join(put.err.split())
    assert "the arrays are fp16 and fp32: put as fp32, which has every number of them" in said
    assert "K and V were dequantised from q8_0: the store takes them for this model's own" in said
    ids = json.loads(run("inspect", "q.session", "--json").out)["inputs"][0]["engine_cache"]["token_ids"]
    Path("own.json").write_text(json.dumps(ids))
    run("store", "get", "s", "--token-ids", "own.json", "-o", "got.npz")
    run("mnn", "unpack", "q.session", "--kv-heads", 2, "-o", "plain.npz")
    with np.load("got.npz") as got, np.load("plain.npz") as plain:
        assert {str(words.dtype) for words in got.values()} == {"float32"}
        with np.errstate(invalid="ignore"):
            assert all(np.array_equal(got[name], plain[name].astype("f4"), equal_nan=True) for name in plain)


def test_measure_unequal_head_sizes_of_k_and_v(here: Path, run) -> None:
    """As in DeepSeek's caches in transformers; K and V each measure as in uniform caches."""
    rng = np.random.default_rng(4)
    rows = {"key": 96, "value": 64}
    words = {part: rng.standard_normal((2, 40, dims))[:, IDS[:60]].astype("f4") for part, dims in rows.items()}
    files = {"both": ("key", "value"), "keys": ("key", "key"), "values": ("value", "value")}
    found = {}
    for name, (keys, values) in files.items():
        np.savez(f"{name}.npz", **{"layer_0.key": words[keys], "layer_0.value": words[values]})
        measured = run("measure", f"{name}.npz", "--encode", "--fp32", "--json").out
        found[name] = json.loads(measured)["breakdown"]["overall"]
    assert (found["both"]["k"], found["both"]["v"]) == (found["keys"]["k"], found["values"]["v"])
    assert found["both"]["k"]["raw_bytes"] == 4 * 2 * 60 * 96 and found["both"]["v"]["raw_bytes"] == 4 * 2 * 60 * 64
    run("encode", "both.npz", "-o", "both.frames")
    assert "equal" in run("diff", "both.npz", "both.frames").out
    said = run("mnn", "pack", "both.npz", "--backend", "arm64-fp16", "--name", "s", "-o", "q/", code=1).err.replace(
        "\n", " "
    )
    assert "both.npz: layer 0: keys are [2, 60, 96] and values [2, 60, 64]: expected the same" in said


@pytest.mark.parametrize("codec", ["dense", "mnn"])
def test_store_put_unequal_head_sizes_of_k_and_v(here: Path, run, codec: str) -> None:
    """Grown by another put, cut, exported and imported, next to layers of equal sizes."""
    rng = np.random.default_rng(4)
    dims = {(0, "key"): 96, (0, "value"): 64, (1, "key"): 32, (1, "value"): 32, (2, "key"): 8, (2, "value"): 24}
    words = {
        f"layer_{n}.{part}": rng.standard_normal((2, 40, size))[:, IDS].astype("f2") for (n, part), size in dims.items()
    }
    for name, end in (("first", 100), ("whole", TOKENS)):
        np.savez(f"{name}.npz", **{each: rows[:, :end] for each, rows in words.items()})
        Path(f"{name}.json").write_text(json.dumps(IDS[:end]))
    how = ("--fingerprint", "x", "--codec", codec, "--block-tokens", 16)
    run("store", "put", "s", "first.npz", "--token-ids", "first.json", *how)
    assert "50 of them new" in run("store", "put", "s", "whole.npz", "--token-ids", "whole.json", *how).out
    wrong = ("store", "put", "s", "whole.npz", "--token-ids", "whole.json", "--fingerprint", "y")
    assert "holds prefixes of the model x" in run(*wrong, code=2).err
    run("store", "verify", "s")
    run("store", "export", "s", "--token-ids", "whole.json", "-o", "moved")
    run("store", "import", "t", "moved", "--block-tokens", 64)
    Path("part.json").write_text(json.dumps(IDS[:77]))
    for store, ids, end in (("s", "whole.json", TOKENS), ("t", "part.json", 77)):
        run("store", "get", store, "--token-ids", ids, "-o", f"{store}.npz")
        with np.load(f"{store}.npz") as got:
            assert {name: rows.tobytes() for name, rows in got.items()} == {
                name: rows[:, :end].tobytes() for name, rows in words.items()
            }


def test_store_put_unequal_heads_or_tokens_of_k_and_v_is_refused(here: Path, run) -> None:
    for values in ((3, 60, 64), (2, 59, 64)):
        np.savez("both.npz", **{"layer_0.key": np.ones((2, 60, 96), "f2"), "layer_0.value": np.ones(values, "f2")})
        put = ("store", "put", "s", "both.npz", "--token-ids", "ids.json", "--fingerprint", "x")
        said = run(*put, code=1).err.replace("\n", " ")
        assert f"keys are [2, 60, 96] and values {list(values)}: expected the same heads and tokens" in said


def test_measure_keys_alone(here: Path, run) -> None:
    """Latent attention as llama.cpp stores it; K measures as in a cache with V."""
    said = {}
    for name, has_v in (("both", True), ("alone", False)):
        shape = llama_files.Shape(heads=1, dims=64, value_dims=64, k_type="f32", v_type="f32", has_v=has_v)
        Path(f"{name}.session").write_bytes(llama_files.state(Random(3), shape, [20], architecture="deepseek2")[0])
        said[name] = json.loads(run("measure", f"{name}.session", "--encode", "--fp32", "--json").out)
    for what in ("overall", "fp32"):
        both, alone = (said[name]["breakdown"] for name in ("both", "alone"))
        both, alone = (each[what] if what == "overall" else each[what]["overall"] for each in (both, alone))
        assert alone["k"] == both["k"] and alone["v"]["raw_bytes"] == 0
    text = run("measure", "alone.session", "--fp32").out
    assert "  K  " in text and "  V  " not in text and "of K alone: nothing is stored as V" in text


def test_store_keys_alone(here: Path, run) -> None:
    shape = llama_files.Shape(heads=1, dims=96, has_v=False)
    Path("alone.session").write_bytes(llama_files.state(Random(3), shape, [40], architecture="deepseek2")[0])
    said = run("store", "put", "s", "alone.session", "--kv-heads", "1", "--fingerprint", "x").out
    assert said.startswith("40 tokens, 40 of them new: 15,360 -> ")
    store, text = ("s", "--fingerprint", "x"), ("--token-ids", "ids.json")
    ids = kvmnn.open("alone.session", kv_heads=1).engine_cache.token_ids
    Path("ids.json").write_text(json.dumps(ids.tolist()))
    run("store", "get", *store, *text, "-o", "got.npz")
    run("mnn", "unpack", "alone.session", "--kv-heads", "1", "-o", "whole.npz")
    with np.load("got.npz") as got, np.load("whole.npz") as whole:
        assert {name: got[name].tobytes() for name in got} == {name: whole[name].tobytes() for name in whole}
    mnn = ("--backend", "x86-avx2", "--name", "p", "-o", "p/")
    assert "MNN takes no such prefix" in run("store", "get", *store, *text, *mnn, code=2).err


def test_replay_unequal_types_of_k_and_v_are_refused(here: Path, capsys) -> None:
    words = np.ones((2, 8, 8))
    np.savez("types.npz", **{"layer_0.key": words.astype("f2"), "layer_0.value": words.astype("f4")})
    Path("config.json").write_text("{}")
    assert main(["mnn", "replay", "types.npz", "--engine-config", "config.json"]) == 1
    assert "types.npz: the arrays are fp16 and fp32: expected one type" in capsys.readouterr().err
