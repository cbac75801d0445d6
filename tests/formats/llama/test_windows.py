"""Sessions of models with sliding windows: two caches in one file, each layer as the model has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import llama_files
import numpy as np
import pytest
from llama_files import Cells, Shape

import kvmnn
from kvmnn.arrays.completeness import IncompleteCacheError
from kvmnn.arrays.source import Source
from kvmnn.bundle import DenseOptions
from kvmnn.bundle.dense import plan_arrays
from kvmnn.errors import OptionError, SourceError
from kvmnn.formats.llama.gguf import read_model_layers, read_rotations
from kvmnn.store import read_layer_caches

Run = Callable[..., Any]
FULL, WINDOW = Shape(layers=2, heads=4, dims=64, value_dims=64), Shape(layers=10, heads=16, dims=32, value_dims=32)
PATTERN = [(layer + 1) % 6 != 0 for layer in range(12)]
FULL_LAYERS = [layer for layer, each in enumerate(PATTERN) if not each]
WINDOW_LAYERS = [layer for layer, each in enumerate(PATTERN) if each]
GEMMA4 = {
    "block_count": 12,
    "embedding_length": 512,
    "attention__head_count": 16,
    "attention__head_count_kv": [16 if each else 4 for each in PATTERN],
    "attention__key_length": 64,
    "attention__value_length": 64,
    "attention__key_length_swa": 32,
    "attention__value_length_swa": 32,
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": PATTERN,
    "rope__dimension_count": 64,
    "rope__freq_base": 1e6,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_session(
    name: str = "x.session",
    *,
    architecture: str = "gemma4",
    tokens: int = 40,
    cells: list[int] | None = None,
    shapes: tuple[Shape, Shape] = (FULL, WINDOW),
    **options: Any,
) -> tuple[Cells, Cells]:
    """A session of two caches; `cells` are the positions of the second."""
    held = list(range(tokens - 16, tokens)) if cells is None else cells
    data, ((full,), (window,)) = llama_files.state(
        Random(4),
        shapes[0],
        [tokens],
        second=[len(held)],
        second_shape=shapes[1],
        second_cells=held,
        architecture=architecture,
        **options,
    )
    Path(name).write_bytes(data)
    return full, window


def write_model(name: str = "m.gguf", architecture: str = "gemma4", **fields: Any) -> str:
    Path(name).write_bytes(llama_files.gguf(architecture, **(GEMMA4 | fields)))
    return name


def check(source: Source, full: Cells, window: Cells, layers: tuple[list[int], list[int]]) -> None:
    order = np.argsort(window.positions)
    for cells, numbers, places in ((full, layers[0], slice(None)), (window, layers[1], order)):
        for place, layer in enumerate(numbers):
            for part, arrays in (("key", cells.keys), ("value", cells.values)):
                found = source[f"layer_{layer}.{part}"].to_numpy()
                assert np.array_equal(found.view("u2"), arrays[place][:, places]), (layer, part)


def test_open_with_model_reads_every_layer_with_its_geometry() -> None:
    full, window = write_session()
    source = kvmnn.open("x.session", model=write_model())
    check(source, full, window, (FULL_LAYERS, WINDOW_LAYERS))
    cache = source.engine_cache
    assert cache is not None and cache.layer_positions is not None
    assert cache.layer_kv_heads == tuple(16 if each else 4 for each in PATTERN)
    assert cache.layer_head_dims == tuple(32 if each else 64 for each in PATTERN)
    assert [each.tolist() for each in cache.layer_positions] == [
        list(range(24, 40)) if each else list(range(40)) for each in PATTERN
    ]
    assert source.completeness is not None and source.completeness.is_complete
    assert [state.kind for state in source.completeness.layers] == ["window" if each else "full" for each in PATTERN]
    assert {state.window for state in source.completeness.layers} == {16, None}


def test_open_of_reused_cells_orders_them_by_position() -> None:
    cells = [*range(256, 300), *range(100, 256)]  # llama.cpp fills the cells of a window again
    full, window = write_session(tokens=300, cells=cells)
    source = kvmnn.open("x.session", model=write_model())
    check(source, full, window, (FULL_LAYERS, WINDOW_LAYERS))
    assert source.engine_cache is not None and source.engine_cache.layer_position_runs is not None
    assert source.engine_cache.layer_position_runs[0] == ((100, 200),)


def test_open_of_quantised_windows_as_blocks_and_numbers() -> None:
    shapes = (Shape(layers=1, k_type="q8_0"), Shape(layers=1, k_type="q8_0", v_type="q4_0"))
    full, window = write_session(cells=[38, 39, 36, 37], shapes=shapes, architecture="gemma2")
    source = kvmnn.open("x.session", kv_heads=2)
    assert np.array_equal(source["layer_0.key"].to_numpy(), window.keys[0][:, [2, 3, 0, 1]])
    assert np.array_equal(source["layer_1.key"].to_numpy(), full.keys[0])
    assert source.dequantized_types == ("q4_0", "q8_0")
    options = kvmnn.formats.ReadOptions(engine=kvmnn.formats.EngineOptions(raw_blocks=True))
    blocks = kvmnn.open("x.session", options, kv_heads=2)["layer_0.key"].to_numpy().view("u1").reshape(4, -1)
    one = (
        kvmnn.open("x.session", options, window_cache=True, kv_heads=2)["layer_0.key"]
        .to_numpy()
        .view("u1")
        .reshape(4, -1)
    )
    assert np.array_equal(blocks, one) and len({row.tobytes() for row in blocks}) == 4


def test_open_without_model_numbers_layers_by_architecture() -> None:
    """Gemma 3 has one layer of six with full attention; counts that do not fit leave the second cache out."""
    shapes = (Shape(layers=2), Shape(layers=10))
    full, window = write_session(architecture="gemma3", shapes=shapes)
    source = kvmnn.open("x.session", kv_heads=2)
    check(source, full, window, (FULL_LAYERS, WINDOW_LAYERS))
    assert any(note.startswith("layers are numbered as in gemma3 models") for note in source.notes)
    write_session(architecture="gemma3", shapes=(Shape(layers=3), Shape(layers=9)))
    source = kvmnn.open("x.session", kv_heads=2)
    assert len(source) == 6 and source.completeness is not None
    assert source.completeness.missing == [
        "9 of 12 layers have a window and are in the second cache of the session (--model FILE.gguf tells which layers "
        "these are)"
    ]


def test_open_without_model_of_different_heads_is_refused() -> None:
    write_session(architecture="gemma3")
    with pytest.raises(OptionError, match=r"256 values in the first cache and 512 in the second.*--model FILE\.gguf"):
        kvmnn.open("x.session", kv_heads=4)


def test_open_window_cache_reads_second_cache_only() -> None:
    _, window = write_session()
    source = kvmnn.open("x.session", model=write_model(), window_cache=True)
    assert len(source) == 20
    assert np.array_equal(source["layer_6.key"].to_numpy().view("u2"), window.keys[5])
    assert source.completeness is not None
    assert source.completeness.missing == [
        "2 of 12 layers have full attention and are in the first cache of the session"
    ]


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"attention__sliding_window_pattern": [not each for each in PATTERN]}, "first cache has 2 layers; the model"),
        ({"attention__sliding_window_pattern": 4}, "the first cache has 2 layers; the model in m.gguf has 3 with full"),
        ({"attention__head_count_kv": 4}, "first cache: K of layer|second cache: K of layer 0 has 512 values a cell"),
        ({"attention__key_length_swa": 64}, "second cache: K of layer 0 has 512 values a cell, in m.gguf it has 1,024"),
        ({"block_count": 13}, "pattern has 12 values, expected 13|has K and V of 12 layers"),
    ],
)
def test_open_with_another_model_names_the_difference(fields: dict[str, Any], wrong: str) -> None:
    write_session()
    with pytest.raises((OptionError, SourceError), match=wrong):
        kvmnn.open("x.session", model=write_model(**fields))


def test_open_layers_that_share_k_and_v_are_not_missing() -> None:
    """Gemma 3n and 4: the last layers use K and V of the last ones of their kind that have their own."""
    pattern = [(layer + 1) % 5 != 0 for layer in range(15)]
    full, window = write_session(shapes=(Shape(layers=2), Shape(layers=8)))
    fields = {
        "block_count": 15,
        "attention__head_count_kv": 2,
        "attention__sliding_window_pattern": pattern,
        "attention__shared_kv_layers": 5,
        **{f"attention__{part}_length{kind}": 32 for part in ("key", "value") for kind in ("", "_swa")},
    }
    source = kvmnn.open("x.session", model=write_model(**fields))
    own = [layer for layer in range(10) if pattern[layer]]
    check(source, full, window, ([4, 9], own))
    assert source.completeness is not None and source.completeness.is_complete
    shared = {state.layer: state.shared_with for state in source.completeness.layers if state.kind == "shared"}
    assert shared == {10: 8, 11: 8, 12: 8, 13: 8, 14: 9}


def test_open_short_text_within_window_is_whole_prefix() -> None:
    write_session(tokens=12, cells=list(range(12)))
    source = kvmnn.open("x.session", model=write_model())
    assert source.engine_cache is not None and source.engine_cache.is_contiguous_prefix
    assert [cache.tokens for cache in read_layer_caches(source)] == [12] * 12


def test_read_layer_caches_windows_have_positions() -> None:
    write_session()
    source = kvmnn.open("x.session", model=write_model())
    with pytest.raises(
        IncompleteCacheError, match="10 of 12 layers have a window of 16 tokens and contain the last 16"
    ):
        read_layer_caches(source)
    layers = read_layer_caches(source, with_windows=True)
    assert [(cache.layer, cache.tokens, cache.tokens_seen) for cache in layers] == [
        (layer, 16 if each else 40, 40) for layer, each in enumerate(PATTERN)
    ]
    assert layers[0].positions.tolist() == list(range(24, 40))


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([*range(20, 28), *range(32, 40)], id="a gap"),
        pytest.param(list(range(20, 36)), id="not the last"),
        pytest.param(list(range(30, 40)), id="fewer than the window"),
    ],
)
def test_read_layer_caches_cut_window_is_refused(cells: list[int]) -> None:
    write_session(cells=cells)
    source = kvmnn.open("x.session", model=write_model())
    with pytest.raises(SourceError, match="holds no beginning of a text, whole and in order"):
        read_layer_caches(source, with_windows=True)


def test_commands_name_windows_or_keep_them(run: Run) -> None:
    write_session()
    write_model()
    sentence = "10 of 12 layers have a window of 16 tokens and contain the last 16 of 40 tokens"
    packing = ("--backend", "x86-avx2", "--cast", "--name", "s", "-o", "p/")
    assert sentence in run("mnn", "pack", "x.session", *packing, "--model", "m.gguf", code=1).err
    assert not Path("p").exists()
    assert "of windows and state at this length" in run("store", "put", "s/", "x.session", "--model", "m.gguf").out


@pytest.mark.parametrize("codec", ["mnn", "dense"])
def test_encode_keeps_session_and_model_layers(run: Run, codec: str) -> None:
    full, window = write_session(cells=[*range(32, 40), *range(24, 32)])
    write_model()
    out = run("encode", "x.session", "--model", "m.gguf", "--codec", codec, "-o", "b/").out
    assert "LOSSLESS (decoded and compared)" in out and "incomplete" not in out
    run("verify", "b/", "--against", "x.session")
    run("decode", "b/", "-o", "y.session")
    assert Path("y.session").read_bytes() == Path("x.session").read_bytes()
    source = kvmnn.open("b/")  # without the model
    check(source, full, window, (FULL_LAYERS, WINDOW_LAYERS))
    assert source.completeness == kvmnn.open("x.session", model="m.gguf").completeness
    assert "layers 5, 11: full attention" in run("inspect", "b/").out


def test_dense_streams_have_the_rotation_of_their_layer(run: Run) -> None:
    write_session()
    write_model()
    said = run("encode", "x.session", "--model", "m.gguf", "--codec", "dense", "-o", "b/").err
    assert "theta=10000,dims=32 in layers 0 to 4, 6 to 10, theta=1000000,dims=64 in layers 5, 11" in said
    rotations, _ = read_rotations("m.gguf")
    plans = plan_arrays(kvmnn.open("x.session", model="m.gguf"), DenseOptions(layer_rotary=rotations))
    ways = {name: plan.rotary and str(plan.rotary) for name, plan in plans.items()}
    assert (ways["layer_4.key"], ways["layer_5.key"]) == ("theta=10000,dims=32", "theta=1000000,dims=64")
    assert ways["layer_4.value"] is None
    positions = plans["layer_4.key"].positions
    assert positions is not None and positions.tolist() == list(range(24, 40))
    assert (
        "theta=10000,dims=32"
        in run("measure", "x.session", "--part", "sliding-window", "--model", "m.gguf", "--dense").out
    )


def test_dense_streams_of_two_caches_need_model(run: Run) -> None:
    write_session()
    said = run("encode", "x.session", "--kv-heads", "4", "--codec", "dense", "-o", "b/", code=2).err
    assert "dense streams of two caches need the layers of the model: say --model FILE.gguf" in said


def test_bundle_of_an_earlier_version_reads_the_first_cache(run: Run) -> None:
    """Its manifest has the kv heads of the first cache, and no layers of the model."""
    full, _ = write_session()
    write_model()
    run("encode", "x.session", "--model", "m.gguf", "-o", "b/")
    path = Path("b/manifest.json")
    document = json.loads(path.read_text())
    kept = json.loads(document["metadata"]["kvmnn.file"])
    del kept["layer_numbers"]
    kept["kv_heads"] = [4, 4]
    document["metadata"] = {"kvmnn.file": json.dumps(kept)}
    path.write_text(json.dumps(document))
    source = kvmnn.open("b/")
    assert np.array_equal(source["layer_1.key"].to_numpy().view("u2"), full.keys[1])
    assert source.completeness is not None and not source.completeness.is_complete


def test_recurrent_state_makes_session_incomplete(run: Run) -> None:
    data, _ = llama_files.state(Random(4), Shape(), [9], recurrent=3)
    Path("h.session").write_bytes(data)
    found = run("inspect", "h.session", "--kv-heads", "2").out
    assert "incomplete: recurrent state of" in found and "is in the session after K and V" in found
    words = ("store", "put", "s/", "h.session", "--kv-heads", "2", "--fingerprint", "m")
    assert "cannot make a stored prefix of a part of the state: recurrent state of" in run(*words, code=1).err
    assert "incomplete" not in run("encode", "h.session", "-o", "b/").out  # the file is kept whole


@pytest.mark.parametrize(
    ("architecture", "fields", "full"),
    [
        ("gemma2", {"block_count": 6}, [1, 3, 5]),
        ("gemma3", {"block_count": 8, "attention__sliding_window": 16}, [5]),
        ("gemma3", {"block_count": 8}, list(range(8))),
        ("gemma3", {"block_count": 8, "attention__sliding_window": 16, "attention__sliding_window_pattern": 3}, [2, 5]),
        ("smallthinker", {"block_count": 8, "attention__sliding_window": 16}, [0, 4]),
        ("exaone4", {"block_count": 8, "attention__sliding_window": 16}, list(range(8))),
        ("phi3", {"block_count": 4, "attention__sliding_window": 16}, list(range(4))),
        ("llama", {"block_count": 4}, list(range(4))),
        ("new", {"block_count": 4, "attention__sliding_window": 8, "attention__sliding_window_pattern": 2}, [1, 3]),
        ("gpt-oss", {"block_count": 5, "attention__sliding_window": 8, "nextn_predict_layers": 1}, [1, 3]),
    ],
)
def test_read_model_layers_follows_llama_cpp(architecture: str, fields: dict[str, Any], full: list[int]) -> None:
    usual = {"embedding_length": 64, "attention__head_count": 2, "attention__head_count_kv": 1}
    Path("m.gguf").write_bytes(llama_files.gguf(architecture, **(usual | fields)))
    layers = read_model_layers("m.gguf")
    assert layers is not None
    assert [layer.state.layer for layer in layers if layer.state.kind == "full"] == full
    assert {(layer.kv_heads, layer.head_dim) for layer in layers} == {(1, 32)}


def test_read_model_layers_of_unknown_pattern_is_none() -> None:
    fields = {"block_count": 4, "embedding_length": 64, "attention__head_count": 2, "attention__sliding_window": 8}
    Path("m.gguf").write_bytes(llama_files.gguf("new", **fields))
    assert read_model_layers("m.gguf") is None


def test_read_rotations_of_layers_without_rotation() -> None:
    """Cohere 2 rotates K in layers with a window alone."""
    write_model(architecture="cohere2", attention__sliding_window_pattern=4, rope__freq_base=5e4, block_count=8)
    found, _ = read_rotations("m.gguf")
    assert [layer for layer, each in found.items() if each is None] == [3, 7]
    assert found[0] is not None and (found[0].theta, found[0].pairing) == (5e4, "interleaved")


def test_unpack_folder_of_windows_keeps_positions(run: Run) -> None:
    write_session()
    run("mnn", "unpack", "x.session", "--model", write_model(), "-o", "a/")
    assert "layers 0 to 4, 6 to 10: a window of 16 tokens, positions 24 to 39" in run("inspect", "a/").out
    for words in (("encode", "a/", "-o", "b/"), ("decode", "b/", "-o", "c/")):
        run(*words)
    names = {path.name for path in Path("a").iterdir()}
    assert {"positions.json", "completeness.json"} < names
    assert {path.name: path.read_bytes() for path in Path("c").iterdir()} == {
        name: Path("a", name).read_bytes() for name in names
    }
    words = ("store", "put", "s/", "c/", "--fingerprint", "m", "--token-ids", ",".join(map(str, range(40))))
    assert "of windows and state at this length" in run(*words).out


def test_open_stream_and_sequence_apply_to_both_caches() -> None:
    data, (full, window) = llama_files.state(
        Random(9), Shape(layers=1), [6, 9], second=[6, 9], architecture="gemma2", sequences=2
    )
    Path("x.session").write_bytes(data)
    source = kvmnn.open("x.session", kv_heads=2, stream=1)
    assert np.array_equal(source["layer_0.key"].to_numpy().view("u2"), window[1].keys[0])
    assert np.array_equal(source["layer_1.key"].to_numpy().view("u2"), full[1].keys[0])
    source = kvmnn.open("x.session", kv_heads=2, stream=1, sequence=1)
    for layer, cells in ((0, window[1]), (1, full[1])):
        rows = [place for place, seqs in enumerate(cells.seqs) if 1 in seqs]
        assert np.array_equal(source[f"layer_{layer}.key"].to_numpy().view("u2"), cells.keys[0][:, rows])


@pytest.mark.slow
def test_open_damaged_model_of_windows_is_one_line() -> None:
    write_session()
    whole = Path(write_model()).read_bytes()
    for end in range(0, len(whole), 13):
        Path("m.gguf").write_bytes(whole[:end])
        with pytest.raises(SourceError):
            kvmnn.open("x.session", model="m.gguf")
    rng = Random(3)
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        Path("m.gguf").write_bytes(data)
        try:
            kvmnn.open("x.session", model="m.gguf")
        except kvmnn.KvmnnError as error:
            assert "\n" not in str(error)
