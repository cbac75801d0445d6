"""llama.cpp state files of an independent writer: every type, order, gap, stream and sequence."""

from __future__ import annotations

from pathlib import Path
from random import Random

import llama_files
import numpy as np
import pytest
from llama_files import BLOCKS, NUMBERS, PLAIN, SEQUENCE, SESSION, Cells, Shape

import kvmnn
from kvmnn.errors import KvmnnError, OptionError, SourceError
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats import EngineOptions, PackedOptions, ReadOptions
from kvmnn.formats.llama import state as llama_state
from kvmnn.packed.inference import PackedGeometry


def heads(count: int, **more: object) -> ReadOptions:
    return ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=count)), engine=EngineOptions(**more))


def check(source: kvmnn.arrays.Source, cells: Cells) -> None:
    for layer, (keys, values) in enumerate(zip(cells.keys, cells.values, strict=True)):
        for part, expected in (("key", keys), ("value", values)):
            found = source[f"layer_{layer}.{part}"].to_numpy()
            assert found.shape == expected.shape
            assert np.array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))
    assert source.engine_cache is not None
    assert source.engine_cache.positions is not None
    assert source.engine_cache.positions.tolist() == cells.positions


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", range(40))
def test_llama_reader_any_file_equals_what_was_written(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    transposed = rng.random() < 0.4
    shape = Shape(
        layers=rng.randint(1, 3),
        heads=rng.choice((1, 2, 3)),
        dims=rng.choice((32, 64)),
        value_dims=rng.choice((32, 64)),
        k_type=rng.choice(sorted(NUMBERS)),
        v_type=rng.choice(PLAIN if transposed else sorted(NUMBERS)),
        transposed=transposed,
        extra=rng.choice((0, 0, 8, 12)),
    )
    kind = rng.choice((SESSION, SEQUENCE))
    streams = [rng.randint(1, 9) if number else 0 for number in range(rng.randint(1, 3))] + [rng.randint(1, 40)]
    data, (made,) = llama_files.state(
        rng, shape, streams, kind=kind, gaps=rng.random() < 0.5, sequences=rng.choice((1, 1, 3))
    )
    path = put(tmp_path / "x.state", data)
    for number, cells in enumerate(made):
        if cells.positions:
            source = kvmnn.open(path, heads(shape.heads, stream=number))
            check(source, cells)
            found = llama_state.parse_structure(MappedFile(path)).caches[0][number]
            assert found.sequences_by_cell == cells.seqs


@pytest.mark.parametrize("kind", sorted(NUMBERS))
@pytest.mark.parametrize("dims", [8, 48, 80])
def test_llama_reader_heads_of_partial_blocks(tmp_path: Path, kind: str, dims: int) -> None:
    """Rows are whole blocks; heads need not be."""
    shape = Shape(heads=4, dims=dims, value_dims=dims, k_type=kind, v_type=kind)
    data, ((cells,),) = llama_files.state(Random(dims), shape, [7])
    check(kvmnn.open(put(tmp_path / "x", data), heads(4)), cells)


@pytest.mark.parametrize("limit", [4, 6, 64, 128, 1000, 4096])
@pytest.mark.parametrize("transposed", [False, True])
def test_llama_reader_chunk_size_changes_no_byte(tmp_path: Path, limit: int, transposed: bool) -> None:
    data, ((cells,),) = llama_files.state(Random(1), Shape(transposed=transposed), [11])
    source = kvmnn.open(put(tmp_path / "x", data), heads(2))
    for name, expected in (("layer_1.key", cells.keys[1]), ("layer_1.value", cells.values[1])):
        pieces = list(source[name].iter_chunks(limit))
        assert b"".join(piece.tobytes() for piece in pieces) == np.ascontiguousarray(expected).tobytes()
        assert max(piece.size for piece in pieces) <= limit


@pytest.mark.parametrize("streams_said", [True, False])
@pytest.mark.parametrize("outputs", [None, (0, 0, 0), (2, 10, 6)])
def test_llama_reader_older_sessions(tmp_path: Path, streams_said: bool, outputs: tuple[int, int, int] | None) -> None:
    data, ((cells,),) = llama_files.state(
        Random(3), Shape(), [5], version=9, streams_said=streams_said, outputs=outputs
    )
    check(kvmnn.open(put(tmp_path / "x", data), heads(2)), cells)


@pytest.mark.parametrize("streams_said", [True, False])
def test_llama_reader_older_sequences(tmp_path: Path, streams_said: bool) -> None:
    data, ((cells,),) = llama_files.state(Random(3), Shape(), [5], kind=SEQUENCE, version=2, streams_said=streams_said)
    check(kvmnn.open(put(tmp_path / "x", data), heads(2)), cells)


def test_llama_reader_second_cache_of_sliding_window(tmp_path: Path) -> None:
    data, ((base,), (window,)) = llama_files.state(Random(4), Shape(), [9], second=[4])
    path = put(tmp_path / "x", data)
    source = kvmnn.open(path, heads(2))
    check(source, base)
    missing = "2 of 4 layers have a window and are in the second cache of the session (--model FILE.gguf tells which"
    assert source.completeness is not None and source.completeness.missing[0].startswith(missing)
    check(kvmnn.open(path, heads(2, window_cache=True)), window)


@pytest.mark.slow
@pytest.mark.parametrize("second", [None, [4]])
def test_llama_reader_recurrent_state_after_k_and_v(tmp_path: Path, second: list[int] | None) -> None:
    data, caches = llama_files.state(Random(4), Shape(), [9], second=second, recurrent=3)
    path = put(tmp_path / "x", data)
    source = kvmnn.open(path, heads(2))
    check(source, caches[0][0])
    size = len(data) - len(llama_files.state(Random(4), Shape(), [9], second=second)[0])
    assert source.notes[0].startswith(f"state of recurrent layers ({size} bytes)")
    for end in range(len(data) - size + 1, len(data)):
        with pytest.raises(SourceError):
            kvmnn.open(put(path, data[:end]), heads(2))


def test_llama_reader_layers_without_own_k(tmp_path: Path) -> None:
    """Hybrid models have layers without kv heads, others layers in the other cache."""
    data, ((cells,),) = llama_files.state(Random(7), Shape(), [6])
    path = put(tmp_path / "x", data)
    more = {"attention__key_length": 32, "block_count": 4}
    check(kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=[0, 2, 0, 2], **more)), cells)
    data, ((cells,),) = llama_files.state(Random(7), Shape(), [6], recurrent=2)
    path = put(tmp_path / "x", data)
    check(kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=2, **more)), cells)
    with pytest.raises(SourceError, match="does not say the kv heads"):
        kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=[1, 2, 2, 2], **more))


def test_llama_reader_latent_k_without_v(tmp_path: Path) -> None:
    """Where the model has latent K alone; a file of any other is cut after K."""
    latent = Shape(has_v=False)
    data, ((cells,),) = llama_files.state(Random(4), latent, [9], architecture="deepseek2")
    source = kvmnn.open(put(tmp_path / "x", data), heads(2))
    assert source.names == ("layer_0.key", "layer_1.key")
    assert np.array_equal(source["layer_1.key"].to_numpy().view("u2"), cells.keys[1])
    with pytest.raises(SourceError, match="is truncated"):
        kvmnn.open(put(tmp_path / "y", llama_files.state(Random(4), latent, [9])[0]), heads(2))


def test_llama_reader_sequence_without_v_needs_model(tmp_path: Path) -> None:
    data, _ = llama_files.state(Random(4), Shape(has_v=False), [9], kind=SEQUENCE)
    path = put(tmp_path / "x", data)
    with pytest.raises(SourceError, match="is truncated"):
        kvmnn.open(path, heads(2))
    options = model(tmp_path / "m.gguf", "deepseek2", attention__head_count_kv=2, attention__key_length=32)
    assert kvmnn.open(path, options).names == ("layer_0.key", "layer_1.key")


@pytest.mark.parametrize("kind", BLOCKS)
def test_llama_reader_raw_blocks_on_request(tmp_path: Path, kind: str) -> None:
    data, _ = llama_files.state(Random(5), Shape(k_type=kind, v_type="f16"), [6])
    source = kvmnn.open(put(tmp_path / "x", data), heads(2, raw_blocks=True))
    blocks = source["layer_0.key"]
    assert (blocks.shape, blocks.array_dtype) == ((6, 2, llama_files.BLOCK_BYTES[kind]), "|u1")
    assert blocks.to_numpy().tobytes() in data
    assert source["layer_0.value"].shape == (2, 6, 32)
    assert source.notes == []


@pytest.mark.parametrize(("v_type", "needed"), [("f16", True), ("q4_0", False)])
def test_llama_reader_raw_blocks_are_not_heads(tmp_path: Path, v_type: str, needed: bool) -> None:
    data, _ = llama_files.state(Random(5), Shape(k_type="q4_0", v_type=v_type), [6])
    options = ReadOptions(engine=EngineOptions(raw_blocks=True, allow_unknown_heads=True))
    said = " ".join(kvmnn.open(put(tmp_path / "x", data), options).notes)
    assert ("each row is taken as one head" in said) is needed


@pytest.mark.parametrize(
    ("k_type", "v_type", "dims", "parts"),
    [
        ("q8_0", "f16", 64, "K"),
        ("f16", "q4_0", 128, "V"),
        ("q4_0", "q4_0", 64, "K and V"),
        ("q4_0", "q4_0", 96, None),
        ("q4_0", "q4_0", 32, None),
        ("f16", "bf16", 64, None),
    ],
)
def test_llama_reader_notes_possible_rotation(
    tmp_path: Path, k_type: str, v_type: str, dims: int, parts: str | None
) -> None:
    shape = Shape(k_type=k_type, v_type=v_type, dims=dims, value_dims=dims)
    path = put(tmp_path / "x", llama_files.state(Random(5), shape, [6])[0])
    said = [note for note in kvmnn.open(path, heads(2)).notes if "Hadamard" in note]
    assert len(said) == (parts is not None)
    assert not said or f"store quantised {parts} rotated by a Hadamard matrix" in said[0]
    assert not any("Hadamard" in note for note in kvmnn.open(path, heads(2, raw_blocks=True)).notes)


def test_llama_reader_cache_info_of_file(tmp_path: Path) -> None:
    data, _ = llama_files.state(Random(6), Shape(k_type="q8_0", v_type="f16", transposed=True), [6], tokens=8)
    source = kvmnn.open(put(tmp_path / "x", data), heads(2))
    cache = source.engine_cache
    assert cache is not None
    assert (cache.engine, cache.kind, cache.layers, cache.kv_heads, cache.head_dim) == (
        "llama.cpp",
        "session",
        2,
        2,
        32,
    )
    assert cache.types == ("q8_0", "q8_0", "f16", "f16")
    assert cache.details["architecture"] == "llama"
    assert cache.details["v_transposed"] is True
    assert cache.token_ids is not None
    assert cache.token_ids.tolist() == np.frombuffer(data, "<i4", 8, 12).tolist()
    assert str(cache) == "llama.cpp session: 2 layers, 2 kv heads of 32, 6 tokens, K q8_0, V f16"
    assert source.notes == [
        "the last 2 token ids of 8 have no cell: no K and V belong to them",
        "dequantised from q8_0 to fp32: 816 bytes in the file became 3,072, and sizes and ratios are of these",
    ]


def model(path: Path, architecture: str = "llama", **fields: int | str | list[int]) -> ReadOptions:
    path.write_bytes(llama_files.gguf(architecture, **fields))
    return ReadOptions(packed=PackedOptions(model=str(path)))


def test_llama_reader_geometry_of_gguf_model(tmp_path: Path) -> None:
    data, ((cells,),) = llama_files.state(Random(7), Shape(), [6])
    path = put(tmp_path / "x", data)
    width = {"attention__head_count": 4, "embedding_length": 128, "block_count": 2}
    check(kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=2, **width)), cells)
    check(kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=[2, 2], **width)), cells)
    check(kvmnn.open(path, model(tmp_path / "m.gguf", attention__head_count_kv=2, attention__key_length=32)), cells)
    by_layer = {"attention__head_count": [4, 8], "attention__head_count_kv": [2, 2], "embedding_length": 128}
    check(kvmnn.open(path, model(tmp_path / "m.gguf", **by_layer)), cells)  # the first layer's heads say the dimensions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention__head_count": 4, "embedding_length": 256}, "it is of another model"),
        ({"attention__head_count_kv": 2, "attention__key_length": 32, "block_count": 1}, "2 layers, a cache .* has 1"),
        ({"attention__head_count_kv": 2}, "does not say the kv heads and head_dim"),
    ],
)
def test_llama_reader_other_model_is_refused(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    path = put(tmp_path / "x", llama_files.state(Random(7), Shape(), [6])[0])
    with pytest.raises(KvmnnError, match=message):
        kvmnn.open(path, model(tmp_path / "m.gguf", **fields))


def test_llama_reader_damaged_model_is_one_line(tmp_path: Path) -> None:
    path = put(tmp_path / "x", llama_files.state(Random(7), Shape(), [6])[0])
    whole = llama_files.gguf(attention__head_count_kv=[2, 2], attention__key_length=32)
    for end in range(len(whole)):
        put(tmp_path / "m.gguf", whole[:end])
        with pytest.raises(SourceError):
            kvmnn.open(path, ReadOptions(packed=PackedOptions(model=str(tmp_path / "m.gguf"))))


def test_llama_reader_requires_kv_heads(tmp_path: Path) -> None:
    path = put(tmp_path / "x", llama_files.state(Random(7), Shape(), [6])[0])
    with pytest.raises(OptionError, match=r"a row of K has 64 values.*--kv-heads N, or --model FILE\.gguf"):
        kvmnn.open(path)
    source = kvmnn.open(path, ReadOptions(engine=EngineOptions(allow_unknown_heads=True)))
    assert source["layer_0.key"].shape == (1, 6, 64)
    with pytest.raises(OptionError, match="which are not 3 kv heads"):
        kvmnn.open(path, heads(3))


def test_llama_reader_requires_stream(tmp_path: Path) -> None:
    path = put(tmp_path / "x", llama_files.state(Random(7), Shape(), [3, 0, 2])[0])
    with pytest.raises(OptionError, match=r"2 streams hold cells: --part stream=N says which \(0, 2\)"):
        kvmnn.open(path, heads(2))
    with pytest.raises(OptionError, match="stream 1 holds no cells"):
        kvmnn.open(path, heads(2, stream=1))
    with pytest.raises(OptionError, match=r"--part sliding-window \(window_cache=\) is about files with a second one"):
        kvmnn.open(path, heads(2, window_cache=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_llama_reader_truncated_file_is_refused(tmp_path: Path, transposed: bool) -> None:
    data, _ = llama_files.state(Random(8), Shape(1, 1, 8, 8, transposed=transposed), [2], sequences=2)
    for end in range(4, len(data)):
        with pytest.raises(SourceError):
            kvmnn.open(put(tmp_path / "x", data[:end]), heads(2))


def test_llama_reader_trailing_bytes_are_refused(tmp_path: Path) -> None:
    data, _ = llama_files.state(Random(8), Shape(), [3])
    with pytest.raises(SourceError, match=r"7 bytes are left after K and V.*not known"):
        kvmnn.open(put(tmp_path / "x", data + bytes(7)), heads(2))


@pytest.mark.parametrize("version", [0, 8, 11, 1 << 31])
def test_llama_reader_other_version_is_refused(tmp_path: Path, version: int) -> None:
    data, _ = llama_files.state(Random(8), Shape(), [3], version=version)
    with pytest.raises(SourceError, match=f"session file of version {version}: read are 9 and 10"):
        kvmnn.open(put(tmp_path / "x", data), heads(2))


def test_llama_reader_other_ggml_type_is_refused(tmp_path: Path) -> None:
    data, _ = llama_files.state(Random(8), Shape(k_type="f16"), [3])
    at = data.index(b"\x01\0\0\0\x80\0\0\0\0\0\0\0")
    with pytest.raises(SourceError, match="ggml type 24 is none of a KV cache"):
        kvmnn.open(put(tmp_path / "x", data[:at] + b"\x18" + data[at + 1 :]), heads(2))
    with pytest.raises(
        SourceError, match=r"x: K of layer 0 is of type q2_K \(at offset .*\): read are f32, f16, .* q8_0"
    ):
        kvmnn.open(put(tmp_path / "x", data[:at] + b"\x0a" + data[at + 1 :]), heads(2))


def test_llama_reader_invalid_transposition_is_refused(tmp_path: Path) -> None:
    data, _ = llama_files.state(Random(3), Shape(layers=1, heads=1, dims=32, transposed=True), [4], kind=SEQUENCE)
    said = []
    for at in range(len(data) - 4):
        if data[at : at + 4] != b"\x01\0\0\0":
            continue
        path = put(tmp_path / "x.state", data[:at] + b"\x02\0\0\0" + data[at + 4 :])
        try:
            kvmnn.open(path, heads(1))
        except SourceError as error:
            said.append(str(error))
    assert any("the order of V is 2" in line for line in said)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 100])
def test_llama_reader_batches_end_with_the_array(tmp_path: Path, rows: int) -> None:
    shape = Shape(layers=1, heads=2, dims=32)
    data, (made,) = llama_files.state(Random(4), shape, [7], kind=SEQUENCE)
    source = kvmnn.open(put(tmp_path / "x.state", data), heads(2))
    for array in source.arrays:
        row = array.nbytes // 14
        pieces = list(array.iter_chunks(rows * row))
        assert [piece.size for piece in pieces[:-1]] == [rows * row] * (len(pieces) - 1)
        assert b"".join(piece.tobytes() for piece in pieces) == array.to_numpy().tobytes()
    check(source, made[0])


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
@pytest.mark.parametrize("transposed", [False, True])
def test_llama_reader_selects_one_sequence(tmp_path: Path, run, kind: str, transposed: bool) -> None:
    shape = Shape(2, 2, 32, 32, kind, "f16" if transposed else kind, transposed)
    data, ((cells,),) = llama_files.state(Random(3), shape, [23], sequences=3, gaps=True)
    path = put(tmp_path / "x.session", data)
    assert "cells are of 3 sequences (0, 1, 2): --part sequence=N takes those of one" in run(
        "inspect", path
    ).err + "".join(kvmnn.open(path, heads(2)).notes)
    for sequence in range(3):
        mine = [number for number, ids in enumerate(cells.seqs) if sequence in ids]
        chosen = Cells(
            [cells.positions[number] for number in mine],
            [],
            [keys[:, mine] for keys in cells.keys],
            [values[:, mine] for values in cells.values],
        )
        source = kvmnn.open(path, heads(2, sequence=sequence))
        check(source, chosen)
        assert source.engine_cache is not None
        assert (source.engine_cache.tokens, source.engine_cache.details["sequence"]) == (len(mine), sequence)
        for array in source.arrays:
            whole = b"".join(map(bytes, array.iter_chunks()))
            assert all(b"".join(map(bytes, array.iter_chunks(n))) == whole for n in (64, 512, 1000))
        if kind == "q4_0":
            blocks = kvmnn.open(path, heads(2, sequence=sequence, raw_blocks=True))["layer_1.key"]
            every = kvmnn.open(path, heads(2, raw_blocks=True))["layer_1.key"]
            assert np.array_equal(blocks.to_numpy(), every.to_numpy()[mine])
    with pytest.raises(OptionError, match=r"no cell is of sequence 3; --part sequence=N \(sequence=\) may be 0, 1, 2"):
        kvmnn.open(path, heads(2, sequence=3))
    run("encode", path, "--part", "sequence=1", "--kv-heads", 2, "-o", tmp_path / "x.frames/")
    assert kvmnn.open(tmp_path / "x.frames")["layer_0.key"].shape[1] == sum(1 in ids for ids in cells.seqs)
