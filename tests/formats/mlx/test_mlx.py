"""Prompt caches of mlx-lm of an independent writer: read, restored byte for byte, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import mlx_files
import numpy as np
import pytest
from kept_files import there_and_back
from mlx_files import Shape

import kvmnn
from kvmnn.errors import SourceError
from kvmnn.formats import EngineOptions, ReadOptions


def check(source: kvmnn.arrays.Source, expected: dict[str, np.ndarray]) -> None:
    assert set(source) == set(expected)
    for name, values in expected.items():
        found = source[name].to_numpy()
        values = values[0] if values.shape[0] == 1 else values
        assert found.shape == values.shape
        assert np.array_equal(found.view(values.dtype), values)


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_mlx_any_cache_reads_and_round_trips(tmp_path: Path, run, seed: int) -> None:
    rng = Random(seed)
    capacity = rng.randint(1, 12)
    shape = Shape(
        layers=rng.randint(1, 3),
        heads=rng.randint(1, 3),
        dims=rng.choice((32, 64, 96)),
        value_dims=rng.choice((32, 64)),
        tokens=rng.randint(1, capacity),
        capacity=capacity,
        dtype=rng.choice(("fp16", "bf16", "fp32")),
        bits=rng.choice((0, 0, 2, 3, 4, 5, 6, 8)),
        batch=rng.choice((1, 1, 2)),
        new=rng.random() < 0.6,
    )
    data, expected = mlx_files.cache(rng, shape)
    path = put(tmp_path / "x.safetensors", data)
    source = kvmnn.open(path)
    check(source, expected)
    cache = source.engine_cache
    assert cache is not None
    assert (cache.engine, cache.layers, cache.kv_heads, cache.head_dim) == (
        "MLX",
        shape.layers,
        shape.heads,
        shape.dims,
    )
    assert (cache.tokens, cache.batch) == (shape.tokens, shape.batch)
    frames = there_and_back(run, path)
    check(kvmnn.open(frames), expected)


def test_mlx_dequantised_cache_is_noted(tmp_path: Path, run) -> None:
    path = put(tmp_path / "x.safetensors", mlx_files.cache(Random(1), Shape(bits=4, group=32))[0])
    source = kvmnn.open(path)
    assert source.notes == [
        "dequantised from 4 bits in groups of 32 to fp16: 1,600 bytes in the file became 5,120, and sizes and ratios "
        "are of these"
    ]
    assert source.engine_cache.type_bits == {"4 bits in groups of 32": 1600 / 5120 * 16}
    assert str(source.engine_cache) == (
        "MLX prompt cache: 2 layers, 2 kv heads of 64, 5 tokens, 4 bits in groups of 32"
    )
    room = "960 of the 2,560 bytes are room after the valid tokens"
    said = run("encode", path, "-o", tmp_path / "frames/").out
    assert room in said
    stored = sum(file.stat().st_size for file in (tmp_path / "frames").glob("*.frame"))
    assert f"2,560 -> {stored:,} bytes, ratio {1600 / stored:.4f} of 1,600 valid bytes, " in said
    for verb in ("verify", "inspect"):
        assert f"ratio {1600 / stored:.4f} of 1,600 valid bytes" in run(verb, tmp_path / "frames").out
        found = json.loads(run(verb, tmp_path / "frames", "--json").out)
        found = found["inputs"][0] if verb == "inspect" else found
        assert (found["valid_bytes"], found["ratio"]) == (1600, 1600 / stored)
        for array in found["arrays"] if verb == "inspect" else ():
            sizes = sum(frame["bytes"] for frame in array["frames"])
            assert array["ratio"] == 5 / 8 * sum(frame["raw_bytes"] for frame in array["frames"]) / sizes
    assert room in run("inspect", tmp_path / "frames").out
    assert room in run("verify", tmp_path / "frames").out
    assert room in run("encode", tmp_path / "frames", "--codec", "mnn", "-o", tmp_path / "again/").out
    assert json.loads(run("verify", tmp_path / "again", "--against", path, "--json").out)["notes"][0] == room
    said = json.loads(run("inspect", path, "--json").out)["inputs"][0]["engine_cache"]
    assert (said["bits"], said["group_size"], said["capacity"]) == (4, 32, 8)


def test_measure_quantised_mlx_cache_omits_unused_rows(tmp_path: Path, run) -> None:
    data = mlx_files.cache(Random(1), Shape(bits=4, group=32))[0]
    path = put(tmp_path / "x.safetensors", data)
    made = json.loads(run("measure", path, "--json").out)
    assert made["dequantised"] == {"types": ["4 bits in groups of 32"], "input_bytes": len(data), "room_bytes": 960}
    times = made["breakdown"]["overall"]["simulated_bytes"] / (len(data) - 960)
    assert made["notes"] == [
        f"words dequantised from 4 bits in groups of 32: the input has {len(data):,} bytes, 960 of them room, "
        f"its words 5,120; simulated is {times:.2f} times the input without room"
    ]
    found = run("encode", path, "-o", tmp_path / "frames/").out + run("inspect", tmp_path / "frames").out
    assert "of 1,600 valid bytes" in found and "order-0" not in found  # which would be that of the room


def test_mlx_raw_codes_on_request(tmp_path: Path) -> None:
    data, _ = mlx_files.cache(Random(1), Shape(bits=8, layers=1))
    source = kvmnn.open(put(tmp_path / "x.safetensors", data), ReadOptions(engine=EngineOptions(raw_blocks=True)))
    codes = source["layer_0.key"]
    assert (codes.shape, codes.array_dtype) == ((2, 5, 64), "|u1")
    assert codes.to_numpy()[0].tobytes() in data


def test_mlx_file_of_other_metadata_is_plain_tensors(tmp_path: Path) -> None:
    """Only metadata that name a cache make a prompt cache of it."""
    tensors = {"0.0": ("F16", [2], bytes(4)), "0.1": ("F16", [2], bytes(4))}
    path = put(tmp_path / "x.safetensors", mlx_files.safetensors(Random(1), tensors, {"1.0": "nothing"}))
    assert sorted(kvmnn.open(path)) == ["0.0", "0.1"]


@pytest.mark.parametrize("kind", ["MambaCache", "ArraysCache", "CacheList", "NewestCache"])
@pytest.mark.parametrize("new", [False, True])
def test_mlx_classes_without_k_and_v_are_refused_and_kept(tmp_path: Path, run, kind: str, new: bool) -> None:
    path = put(tmp_path / "x.safetensors", mlx_files.cache(Random(1), Shape(kind=kind, new=new))[0])
    with pytest.raises(SourceError, match=f"the cache of every layer is a {kind}: K and V are read of KVCache, "):
        kvmnn.open(path)
    there_and_back(run, path)


def tampered(path: Path, change) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        (Shape(), lambda header: header["0.0"].update(shape=[1, 64, 8, 2]), "K is .* V is"),
        (Shape(), lambda header: header["0.0"].update(shape=[1, 2, 512]), "expected F16 or BF16 or F32"),
        (Shape(), lambda header: header["0.2"].update(dtype="F32"), "expected one I32"),
        (Shape(tokens=9), lambda header: None, "9 tokens: expected at least 1 and at most 8"),
        (Shape(tokens=0), lambda header: None, "0 tokens"),
        (Shape(bits=4), lambda header: header["0.0.1"].update(shape=[1, 2, 4, 4]), "do not fit scales"),
        (Shape(bits=4, group=32), lambda header: header["0.0.0"].update(dtype="F32"), "expected U32"),
    ],
)
def test_mlx_inconsistent_states_are_refused(tmp_path: Path, shape: Shape, change, message: str) -> None:
    path = put(tmp_path / "x.safetensors", mlx_files.cache(Random(1), shape)[0])
    tampered(path, change)
    with pytest.raises(SourceError, match=message):
        kvmnn.open(path)


@pytest.mark.parametrize("bits", [0, 3])
def test_mlx_truncated_file_is_refused(tmp_path: Path, bits: int) -> None:
    shape = Shape(layers=1, heads=1, dims=32, value_dims=32, tokens=2, capacity=2, bits=bits)
    data, _ = mlx_files.cache(Random(1), shape)
    for end in range(0, len(data), 3):
        with pytest.raises(SourceError):
            kvmnn.open(put(tmp_path / "x.safetensors", data[:end]))


def test_mlx_chunk_size_changes_no_byte(tmp_path: Path) -> None:
    for bits in (0, 4):
        data, expected = mlx_files.cache(Random(3), Shape(bits=bits, dtype="fp32"))
        array = kvmnn.open(put(tmp_path / "x.safetensors", data))["layer_1.value"]
        for limit in (4, 12, 100, 256, 1000, 5000):
            pieces = [piece.tobytes() for piece in array.iter_chunks(limit)]
            assert b"".join(pieces) == np.ascontiguousarray(expected["layer_1.value"]).tobytes()


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("new", [True, False])
def test_capture_marks_a_layer_without_its_tensors_as_missing(tmp_path: Path, new: bool, bits: int) -> None:
    """The file lists a class for each layer: one without V is no whole cache, though all bytes of it are kept."""
    data, _ = mlx_files.cache(Random(4), Shape(layers=3, bits=bits, new=new))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    begins = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    kept = {name: span for name, span in begins.items() if not name.startswith("1.1")}
    tensors = {
        name: (header[name]["dtype"], header[name]["shape"], data[8 + size + begin : 8 + size + end])
        for name, (begin, end) in kept.items()
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(mlx_files.safetensors(Random(4), tensors, header["__metadata__"]))
    source = kvmnn.open(path, ReadOptions(engine=EngineOptions(passthrough=True)))
    kvmnn.bundle.encode_source(source, tmp_path / "b")
    for completeness in (source.completeness, kvmnn.bundle.open_frames(tmp_path / "b").completeness):
        assert completeness is not None and completeness.included_layers == (0, 2)
        assert completeness.missing == [
            "1 of 3 layers has state of an unknown kind and is without its K or V in the file"
        ]
