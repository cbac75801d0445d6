"""Caches with windows and state that engines wrote round-trip through the store byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engine_client import unpack
from hybrid_prefix import read_files, write_hybrid
from repository import FIXTURES

import kvmnn
from kvmnn.arrays.source import Source
from kvmnn.store import PrefixStore, read_layer_caches


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(FIXTURES / "llama_windows" / "files.tar.xz", tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(FIXTURES / "hf" / "layers.tar.xz", tmp_path_factory.mktemp("hf"))


def ids_of(source: Source, tokens: int) -> list[int]:
    cache = source.engine_cache
    return [*range(3, 3 + tokens)] if cache is None or cache.token_ids is None else cache.token_ids.tolist()[:tokens]


@pytest.mark.parametrize("name", ["long.session", "long.sequence", "short.session"])
def test_store_llama_session_round_trips(llama: Path, tmp_path: Path, run, name: str) -> None:
    model = llama / "model.gguf"
    source = kvmnn.open(llama / name, model=model)
    tokens = 12 if name.startswith("short") else 300
    ids = ids_of(source, tokens)
    said, asked = json.dumps(ids), json.dumps([*ids, 1, 2])
    put = run("store", "put", tmp_path / "s", llama / name, "--model", model, "--token-ids", said[1:-1]).out
    assert put.startswith(f"{tokens} tokens, {tokens} of them new") and ("windows" in put) == (tokens > 16)
    out = tmp_path / "x.safetensors"
    got = run("store", "get", tmp_path / "s", "--token-ids", asked[1:-1], "-o", out).out
    assert got.startswith(f"{tokens} of {tokens + 2} tokens") and "INCOMPLETE" not in got
    found = kvmnn.open(out)
    wanted = read_layer_caches(source, with_windows=True)
    for one, other in zip(read_layer_caches(found, with_windows=True), wanted, strict=True):
        assert one.keys.tobytes() == other.keys.tobytes() and one.values.tobytes() == other.values.tobytes()
        assert np.array_equal(one.positions, other.positions) and one.tokens_seen == other.tokens_seen
    again = ("store", "put", tmp_path / "s", out, "--model", model, "--token-ids", said[1:-1])
    assert "all of them were stored already" in run(*again).out
    if tokens > 16:
        shorter = said[1:-1].rpartition(",")[0]
        assert run("store", "match", tmp_path / "s", "--token-ids", shorter, code=1).out.strip() == "0"
        error = run("store", "get", tmp_path / "s", "--token-ids", shorter, "-o", out, "--force", code=1).err
        assert "299 tokens of it are stored without windows and state" in error and "--partial" in error
        part = ("store", "get", tmp_path / "s", "--token-ids", shorter, "-o", out, "--force", "--partial")
        assert (
            "INCOMPLETE: 5 of 6 layers have a window and are not stored at the length of 299 tokens" in run(*part).out
        )
        document = json.loads(run(*part, "--json").out)
        assert document["missing"] == ["5 of 6 layers have a window and are not stored at the length of 299 tokens"]
        assert [*kvmnn.open(out)] == ["layer_5.key", "layer_5.value"]
        error = run("store", "put", tmp_path / "s", out, "--model", model, "--token-ids", shorter, code=1).err
        assert (
            "cannot make a stored prefix of a part of the state: 5 of 6 layers have a window and are not stored"
            in error
        )
        mnn = ("--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "p")
        error = run("store", "get", tmp_path / "s", "--token-ids", asked[1:-1], *mnn, code=2).err
        assert "this text has windows, which the prefix cache of an MNN engine has no place for" in error


NAMES = ("gemma3_hybrid", "cohere2_dynamic", "mistral_static", "lfm2_dynamic", "lfm2_static", "qwen3next_dynamic")


@pytest.mark.parametrize("name", [*NAMES, "qwen3next_static", "llama_dynamic"])
def test_store_transformers_cache_with_windows_and_state_round_trips(hf: Path, tmp_path: Path, name: str) -> None:
    source = kvmnn.open(hf / f"{name}.pt")
    layers = read_layer_caches(source, with_windows=True, with_states=True)
    tokens = layers[0].tokens_seen
    windows = [cache.layer for cache in layers if cache.tokens < tokens]
    ids = [*range(3, 3 + tokens)]
    has_state = name.startswith(("lfm2", "qwen3next"))
    assert bool(source.states) == has_state and (not has_state or source.completeness.missing)
    with PrefixStore(tmp_path / "s") as store:
        put = store.put(ids, layers, model=name, windows=windows, states=source.states)
        assert bool(put.state_bytes) == bool(windows or has_state)
        found = store.get([*ids, 1], model=name)
        assert (found.tokens, found.is_complete) == (tokens, True)
        for one, other in zip(found.layers, layers, strict=True):
            assert one.keys.tobytes() == other.keys.tobytes() and one.values.tobytes() == other.values.tobytes()
            assert np.array_equal(one.positions, other.positions)
        expected = sorted((s.layer, s.name, s.dtype, s.shape, s.read()) for s in source.states)
        assert [(s.layer, s.name, s.dtype, s.shape, s.read()) for s in found.states] == expected
        assert store.match(ids[:-1], model=name) == (0 if windows or has_state else tokens - 1)
        assert store.verify().damaged == ()


def test_store_command_transformers_state_round_trips(hf: Path, tmp_path: Path, run) -> None:
    source = kvmnn.open(hf / "qwen3next_dynamic.pt")
    tokens = next(iter(source.arrays)).shape[2]
    ids = ",".join(map(str, range(3, 3 + tokens)))
    words = ("store", "put", tmp_path / "s", hf / "qwen3next_dynamic.pt", "--token-ids", ids, "--fingerprint", "q")
    assert "of windows and state at this length" in run(*words).out
    out = tmp_path / "x.safetensors"
    run("store", "get", tmp_path / "s", "--token-ids", ids, "-o", out)
    found = kvmnn.open(out)
    for state in source.states:
        assert found[f"layer_{state.layer}.state.{state.name}"].to_numpy().tobytes() == state.read()
    again = ("store", "put", tmp_path / "s", out, "--token-ids", ids, "--fingerprint")
    assert "all of them were stored already" in run(*again, "q").out
    assert "of windows and state at this length" in run(*again, "another", "--force").out
    got = (
        "store",
        "get",
        tmp_path / "s",
        "--token-ids",
        ids,
        "--fingerprint",
        "another",
        "-o",
        tmp_path / "y.safetensors",
    )
    run(*got)
    assert (tmp_path / "y.safetensors").read_bytes() == out.read_bytes()
    words = ("mnn", "pack", out, "--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "p")
    assert "cannot make a prefix cache of a part of the state: 3 of 4 layers" in run(*words, code=1).err


@pytest.mark.parametrize(
    "text",
    ["[]", '{"version":1,"states":[{"layer":9,"name":"a","dtype":"f","shape":[]}]}', '{"version":1,"states":[7]}'],
)
def test_open_inconsistent_state_metadata_is_refused(tmp_path: Path, run, text: str) -> None:
    arrays = {f"layer_0.{part}": np.ones((2, 20, 16), np.float32) for part in ("key", "value")}
    data = {name: array.tobytes() for name, array in arrays.items()}
    about = {"__metadata__": {"kvmnn.states": text}}
    begin = 0
    for name, each in data.items():
        about[name] = {"dtype": "F32", "shape": [2, 20, 16], "data_offsets": [begin, begin + len(each)]}
        begin += len(each)
    head = json.dumps(about).encode()
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data.values()))
    ids = ",".join(map(str, range(20)))
    words = ("store", "put", tmp_path / "s", tmp_path / "x.safetensors", "--token-ids", ids, "--fingerprint", "m")
    assert "metadata 'kvmnn.states'" in run(*words, code=1).err
    assert not (tmp_path / "s").exists()


TYPES = ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [("LLLFLLLF", (1152, 4096)), ("LLLFLLLF", None), ("FLFL", (600, 8)), ("LF", (64, 12))],
    ids=["differ", "fit", "short", "two"],
)
def test_store_mnn_prefix_cache_round_trips(tmp_path: Path, run, kinds: str, sizes: tuple[int, int] | None) -> None:
    write_hybrid(tmp_path / "p", kinds, sizes=sizes)
    model = tmp_path / "model"
    model.mkdir()
    layer_types = ["full_attention" if kind == "F" else "linear_attention" for kind in kinds]
    shape = {"key_value_shape": [2, 1, 0, 2, 16], "layer_nums": len(kinds), "attention_type": "mix"}
    (model / "llm_config.json").write_text(json.dumps(shape | {"layer_types": layer_types}))
    (model / "llm.mnn").write_bytes(b"graph")
    ids, shorter = (",".join(map(str, range(tokens))) for tokens in (50, 49))
    store = tmp_path / "s"
    put = run("store", "put", store, tmp_path / "p", "--token-ids", ids, "--model", model, "--backend", "x86-avx2").out
    assert "of windows and state at this length" in put
    to_prefix = ("--backend", "x86-avx2", "--name", "sys", "--capacity", "114", "-o", tmp_path / "r", "--force")
    got = run("store", "get", store, "--token-ids", f"{ids},7", "--model", model, *to_prefix).out
    assert got.startswith("50 of 51 tokens") and "LOSSLESS" in got
    assert read_files(tmp_path / "r") == read_files(tmp_path / "p")
    assert run("store", "match", store, "--token-ids", shorter, code=1).out.strip() == "0"
    error = run("store", "get", store, "--token-ids", shorter, "--partial", *to_prefix, code=1).err
    assert "cannot make a prefix cache of a part of the state" in error


def test_store_command_settings_folder_needs_fingerprint(tmp_path: Path, run) -> None:
    write_hybrid(tmp_path / "p", "LLLF", sizes=(1152, 4096))
    (tmp_path / "model").mkdir()
    shape = {"key_value_shape": [2, 1, 0, 2, 16], "layer_nums": 4, "attention_type": "mix", "layer_types": TYPES}
    (tmp_path / "model" / "llm_config.json").write_text(json.dumps(shape))
    ids = ",".join(map(str, range(50)))
    put = ["store", "put", tmp_path / "s", tmp_path / "p", "--token-ids", ids, "--model", tmp_path / "model"]
    assert "names a model that is none of" in run(*put, "--backend", "x86-avx2", code=1).err
    assert "of windows and state" in run(*put, "--backend", "x86-avx2", "--fingerprint", "m").out
    assert run("store", "match", tmp_path / "s", "--token-ids", ids, "--fingerprint", "m").out.strip() == "50"


def test_store_command_other_state_as_mnn_prefix_is_refused(hf: Path, tmp_path: Path, run) -> None:
    ids = ",".join(map(str, range(next(iter(kvmnn.open(hf / "lfm2_dynamic.pt").arrays)).shape[2])))
    run("store", "put", tmp_path / "s", hf / "lfm2_dynamic.pt", "--token-ids", ids, "--fingerprint", "m")
    words = ("--token-ids", ids, "--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "p")
    error = run("store", "get", tmp_path / "s", *words, code=2).err
    assert "is another engine's: a prefix cache of MNN has state that MNN wrote" in error
    assert not (tmp_path / "p").exists()
