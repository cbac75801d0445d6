"""Float8 caches of torch, safetensors, LMCache and vLLM: frames keep the codes, arrays are their exact numbers."""

from __future__ import annotations

import io
import json
import lzma
import struct
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import FIXTURES

import kvmnn
from kvmnn.arrays.float8 import build_exact_table
from kvmnn.dtypes import FLOAT8_NAMES
from kvmnn.errors import KvmnnError, ManifestError, OptionError

KINDS = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
SHAPE = (1, 2, 6, 8)


@cache
def files() -> dict[str, bytes]:
    """What torch, transformers and safetensors wrote: all codes as K, and backwards as V."""
    data = lzma.decompress((FIXTURES / "float8/files.tar.xz").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Any codes, NaNs and infinities among them."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """A .safetensors file by its format's description."""
    header, data = {}, b""
    for name, (kind, codes) in tensors.items():
        content = codes.tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(codes.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def pair(path: Path, name: str, seed: int = 1, shape: tuple[int, ...] = SHAPE) -> tuple[Path, dict[str, np.ndarray]]:
    codes = {f"layer_{n}.{part}": drawn(seed + n, shape) for n in (0, 1) for part in ("key", "value")}
    return write(path, {key: (KINDS[name], each) for key, each in codes.items()}), codes


def bits(array: np.ndarray) -> np.ndarray:
    return array.view("<u4")


@pytest.mark.parametrize("name", FLOAT8_NAMES)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_float8_values_equal_torch(tmp_path: Path, run: Any, name: str, suffix: str) -> None:
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(files()[f"{name}.{suffix}"])
    expected = np.frombuffer(files()[f"{name}.f32"], "<f4")
    source = kvmnn.open(path)
    keys, values = (source[each].to_numpy() for each in source)
    assert keys.dtype == np.float32
    assert np.array_equal(keys.reshape(-1), expected, equal_nan=True)
    assert np.array_equal(values.reshape(-1), expected[::-1], equal_nan=True)
    codes = kvmnn.open(path, codes=True)
    assert [codes[each].type_name for each in codes] == [name, name]
    assert codes[codes.names[0]].to_numpy().tobytes() == bytes(range(256))
    run("encode", path, "-o", tmp_path / "f/")
    assert f"compared with {path}" in run("verify", tmp_path / "f", "--against", path).out
    run("decode", tmp_path / "f", "-o", tmp_path / "again.safetensors")
    again = kvmnn.open(tmp_path / "again.safetensors", codes=True)
    assert [again[each].element for each in again] == [name, name]
    assert again[again.names[1]].to_numpy().tobytes() == bytes(reversed(range(256)))


@pytest.mark.parametrize("name", FLOAT8_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_float8_frames_keep_codes_and_type(tmp_path: Path, run: Any, name: str, seed: int) -> None:
    path, codes = pair(tmp_path / "c.safetensors", name, seed)
    out = run("encode", path, "-o", tmp_path / "f/").out
    assert "LOSSLESS (decoded and compared)" in out
    assert f": {4 * np.prod(SHAPE):,} -> " in out
    manifest = json.loads((tmp_path / "f/manifest.json").read_text())
    for entry in manifest["arrays"]:
        assert (entry["dtype"], entry["array_dtype"], entry["element"]) == ("fp16", "|u1", name)
    run("decode", tmp_path / "f", "-o", tmp_path / "again.safetensors")
    header = (tmp_path / "again.safetensors").read_bytes()
    assert header.count(f'"dtype":"{KINDS[name]}"'.encode()) == 4
    for opened in (kvmnn.open(tmp_path / "f", codes=True), kvmnn.open(tmp_path / "again.safetensors", codes=True)):
        for key, each in codes.items():
            assert np.array_equal(opened[key].to_numpy(), each)
    for opened in (kvmnn.open(tmp_path / "f"), kvmnn.open(path)):
        assert opened.dequantized_types == (name,)
        for key, each in codes.items():
            assert np.array_equal(bits(opened[key].to_numpy()), bits(build_exact_table(name)[each]))
    assert name in run("inspect", tmp_path / "f").out
    assert name in run("inspect", path).out
    run("encode", tmp_path / "f", "--codec", "mnn", "-o", tmp_path / "g/")
    assert json.loads((tmp_path / "g/manifest.json").read_text())["arrays"][0]["element"] == name


def test_float8_manifest_without_element_is_bytes(tmp_path: Path, run: Any) -> None:
    """What older versions read, which do not know the key: bytes that come back as they were."""
    path, codes = pair(tmp_path / "c.safetensors", "float8_e5m2")
    run("encode", path, "-o", tmp_path / "f/")
    manifest = tmp_path / "f/manifest.json"
    document = json.loads(manifest.read_text())
    for entry in document["arrays"]:
        del entry["element"]
    manifest.write_text(json.dumps(document))
    run("decode", tmp_path / "f", "-o", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        for key, each in codes.items():
            assert np.array_equal(found[key], each)


@pytest.mark.parametrize("wrong", ["float8_e8m0fnu", "float9", "", 3, None])
def test_float8_manifest_with_other_element_is_refused(tmp_path: Path, run: Any, wrong: object) -> None:
    path, _ = pair(tmp_path / "c.safetensors", "float8_e5m2")
    run("encode", path, "-o", tmp_path / "f/")
    manifest = tmp_path / "f/manifest.json"
    document = json.loads(manifest.read_text())
    document["arrays"][1]["element"] = wrong
    manifest.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"arrays\[1\].element"):
        kvmnn.open(tmp_path / "f")


@pytest.mark.parametrize("name", FLOAT8_NAMES)
def test_float8_dtype_option_reads_bytes_as_codes(tmp_path: Path, run: Any, name: str) -> None:
    codes = drawn(5, (4, 6, 8))
    np.save(tmp_path / "k.npy", codes)
    np.savez(tmp_path / "a.npz", k=codes)
    write(tmp_path / "a.safetensors", {"k": ("U8", codes)})
    (tmp_path / "a.bin").write_bytes(codes.tobytes())
    for file in ("k.npy", "a.npz", "a.safetensors", "a.bin"):
        source = kvmnn.open(tmp_path / file, dtype=name)
        assert np.array_equal(
            bits(source.arrays[0].to_numpy()).reshape(-1), bits(build_exact_table(name)[codes]).reshape(-1)
        )
        if file != "a.bin":  # inspect takes raw words by --axes alone
            assert name in run("inspect", tmp_path / file, "--dtype", name).out
    run("encode", tmp_path / "k.npy", "--dtype", name, "-o", tmp_path / "f/")
    assert f"codes of {name} as bytes" in run("decode", tmp_path / "f", "-o", tmp_path / "again.npy").err
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "k.npy").read_bytes()
    assert "LOSSLESS" in run("verify", tmp_path / "f", "--against", tmp_path / "k.npy").out
    assert "float8_e4m3fn" in run("encode", tmp_path / "k.npy", "-o", tmp_path / "g/", code=2).err


def test_float8_conflicting_dtype_is_refused(tmp_path: Path, run: Any) -> None:
    path, codes = pair(tmp_path / "c.safetensors", "float8_e4m3fn")
    np.save(tmp_path / "half.npy", codes["layer_0.key"].view(np.float16))
    for dtype in ("fp16", "float8_e5m2", "float8_e4m3fnuz"):
        assert f"holds float8_e4m3fn numbers, and {dtype}" in run("inspect", path, "--dtype", dtype, code=1).err
        with pytest.raises(KvmnnError, match="holds float8_e4m3fn numbers"):
            kvmnn.open(path, dtype=dtype)
    with pytest.raises(KvmnnError, match="float16 holds no codes of float8_e4m3fn: expected uint8"):
        kvmnn.open(tmp_path / "half.npy", dtype="float8_e4m3fn")
    run("encode", path, "-o", tmp_path / "f/")
    with pytest.raises(OptionError, match="the manifest says float8_e4m3fn, not fp16"):
        kvmnn.open(tmp_path / "f", dtype="fp16")
    assert "choose from" in run("decode", tmp_path / "f", "--dtype", "float8_e4m3fn", code=2).err


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("float8_e5m2", "float8_e5m2"),
        ("uint8", "float8_e4m3fnuz"),
    ],
)
def test_float8_lmcache_pages_have_type_of_name(tmp_path: Path, run: Any, written: str, name: str) -> None:
    codes = drawn(2, (2, 3, 5, 2, 4))  # [K and V, layer, token, head, dim]
    path = tmp_path / f"org-model@1@0@12ab@{written}.pt"
    path.write_bytes(codes.tobytes())
    said = ["--dtype", name] if written == "uint8" else []
    lying = ["--shape", "2,3,-1,2,4", "--axes", "2lthd"]
    source = kvmnn.open(path, dtype=name if said else None, shape=(2, 3, -1, 2, 4), axes="2lthd")
    for layer in range(3):
        for number, part in enumerate(("key", "value")):
            expected = build_exact_table(name)[codes[number, layer].transpose(1, 0, 2)]
            assert np.array_equal(bits(source[f"layer_{layer}.{part}"].to_numpy()), bits(expected))
    run("encode", path, "-o", tmp_path / "f/", *lying, *said)
    kept = kvmnn.open(tmp_path / "f", codes=True)
    assert np.array_equal(kept["layer_1.value"].to_numpy(), codes[1, 1].transpose(1, 0, 2))
    run("encode", path, "-o", tmp_path / "whole/", *said)
    run("decode", tmp_path / "whole", "--raw", "-o", tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()
    if said:
        assert "float8_e4m3fn" in run("encode", path, "-o", tmp_path / "g/", code=2).err
    assert name in run("inspect", path, *said).out
    assert "codes are taken as they are" in run("measure", path, *lying, *said).err


def test_float8_vllm_folders(tmp_path: Path, run: Any) -> None:
    codes = [drawn(layer, (2, 6, 8)) for layer in range(3)]
    (tmp_path / "v").mkdir()
    for layer, each in enumerate(codes):
        write(tmp_path / f"v/model.layers.{layer}.self_attn.attn.safetensors", {"kv_cache": ("F8_E4M3", each)})
    source = kvmnn.open(tmp_path / "v", shape=(2, -1, 2, 4), axes="2thd")
    expected = build_exact_table("float8_e4m3fn")[codes[2][1].reshape(6, 2, 4).transpose(1, 0, 2)]
    assert np.array_equal(bits(source["layer_2.value"].to_numpy()), bits(expected))
    run("encode", tmp_path / "v", "-o", tmp_path / "f/", "--shape", "2,-1,2,4", "--axes", "2thd")
    assert "equal" in run("diff", tmp_path / "v", tmp_path / "f", "--shape", "2,-1,2,4", "--axes", "2thd").out


def test_float8_measure_counts_bytes_of_codes(tmp_path: Path, run: Any) -> None:
    path, codes = pair(tmp_path / "c.safetensors", "float8_e4m3fn")
    total = sum(each.size for each in codes.values())
    out = run("measure", path).out
    assert next(line for line in out.splitlines() if line.startswith("total")).split()[1] == f"{total:,}"
    run("encode", path, "-o", tmp_path / "f/")
    assert run("measure", tmp_path / "f").out == out
    odd, _ = pair(tmp_path / "odd.safetensors", "float8_e5m2", shape=(1, 2, 6, 7))
    assert "expected an even head_dim" in run("measure", odd, code=1).err


def test_float8_odd_number_of_codes_is_no_frame(tmp_path: Path, run: Any) -> None:
    path, codes = pair(tmp_path / "c.safetensors", "float8_e5m2", shape=(1, 1, 3, 5))
    source = kvmnn.open(path)
    assert np.array_equal(
        bits(source["layer_1.key"].to_numpy()), bits(build_exact_table("float8_e5m2")[codes["layer_1.key"]])
    )
    assert "not a whole number" in run("encode", path, "-o", tmp_path / "f/", code=1).err


def test_float8_commands_compute_with_exact_values(tmp_path: Path, run: Any) -> None:
    finite = np.flatnonzero(np.isfinite(build_exact_table("float8_e4m3fn"))).astype(np.uint8)
    codes = {f"layer_0.{part}": finite[drawn(n, SHAPE) % finite.size] for n, part in enumerate(("key", "value"))}
    path = write(tmp_path / "c.safetensors", {key: ("F8_E4M3", each) for key, each in codes.items()})
    expected = {key: build_exact_table("float8_e4m3fn")[each] for key, each in codes.items()}
    run("mnn", "unpack", path, "-o", tmp_path / "u/")
    for key, each in expected.items():
        assert np.array_equal(np.load(tmp_path / f"u/{key}.npy"), each)
    assert (
        "dequantised from float8_e4m3fn"
        in run("mnn", "pack", path, "--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "p/").out
    )
    run("mnn", "unpack", tmp_path / "p", "-o", tmp_path / "q/")
    assert np.array_equal(np.load(tmp_path / "q/layer_0.key.npy"), expected["layer_0.key"][0])
    ids = ",".join(map(str, range(SHAPE[2])))
    text = ("--fingerprint", "m", "--token-ids", ids)
    assert "float8_e4m3fn" in run("store", "put", tmp_path / "s", path, *text).err
    run("store", "get", tmp_path / "s", *text, "-o", tmp_path / "got/")
    assert np.array_equal(np.load(tmp_path / "got/layer_0.value.npy"), expected["layer_0.value"][0])
    assert "codes of float8_e4m3fn" in run("encode", path, "-o", tmp_path / "x.zarr", code=1).err
    assert "codes of float8_e4m3fn" in run("encode", path, "--codec", "dense", "-o", tmp_path / "d/", code=2).err
