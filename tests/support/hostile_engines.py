"""Small valid files of other engines and of Zarr, to be damaged (hostile_files.py has the others)."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import hf_files
import llama_files
import mlx_files
import numpy as np
import zstandard
from reader_sample import Sample, contents, made

from kvmnn.dtypes import PARTS


def _saved_cache(folder: Path, kind: str = "dynamic") -> Sample:
    """A cache of transformers as torch saves it."""
    folder.mkdir()
    pairs = hf_files.pairs(1, layers=1, shape=(2, 1, 3, 2))
    mask = np.array([[0, 1, 1], [1, 1, 1]], "<i8")
    hybrid = hf_files.hybrid_cache(pairs * 2, [True, False], window=2, rows=4, said=np.array([True, False]))
    values = {
        "static": hf_files.static_cache(pairs, 5),
        "dynamic": hf_files.dynamic_cache(pairs),
        "padded": {"past_key_values": hybrid, "input_ids": mask * 7, "attention_mask": mask},
        "halves": hf_files.encoder_decoder_cache(pairs, pairs),
    }
    hf_files.save(folder / "c.pt", values[kind])
    more = {
        "padded": ("mnn unpack {in}/c.pt --part batch=0 -o {out}.npz",),
        "halves": ("mnn unpack {in}/c.pt --part encoder --part batch=0 -o {out}.npz",),
    }
    commands = ("encode {in}/c.pt -o {out}/ --max-input-bytes 1M", "inspect {in}/c.pt", *more.get(kind, ()))
    return Sample(contents(folder), commands, ("c.pt",))


def _llama(folder: Path, kind: str = "q4_0", transposed: bool = False) -> Sample:
    """A session file of llama.cpp, its model, and its frames."""
    folder.mkdir()
    shape = llama_files.Shape(1, 1, 32, 32, kind, "f16" if transposed else kind, transposed)
    state, _ = llama_files.state(Random(1), shape, [2])
    model = llama_files.gguf(attention__head_count_kv=1, attention__key_length=32)
    (folder / "x.session").write_bytes(state)
    (folder / "m.gguf").write_bytes(model)
    made(["encode", folder / "x.session", "-o", f"{folder}/frames/"])
    commands = (
        "encode {in}/x.session -o {out}/",
        "mnn unpack {in}/x.session -o {out}.npz --model {in}/m.gguf",
        "mnn unpack {in}/x.session --part sequence=0 --kv-heads 1 -o {out}.npz",
        "inspect {in}/x.session",
        "measure {in}/x.session",
        "decode {in}/frames -o {out}.session --max-input-bytes 1M",
        "mnn unpack {in}/frames --kv-heads 1 -o {out}.npz",
    )
    damaged = ("x.session",) if transposed else ("x.session", "m.gguf", "frames/manifest.json")
    return Sample(contents(folder), commands, damaged)


def _llama_windows(folder: Path) -> Sample:
    """A session of two caches, its model, frames of it, and a folder of its arrays."""
    folder.mkdir()
    shape = llama_files.Shape(1, 1, 16, 16)
    options = {"second": [2], "second_cells": [3, 2], "architecture": "gemma4"}
    state, _ = llama_files.state(Random(1), shape, [4], **options)
    fields = {"block_count": 2, "attention__head_count_kv": 1, "attention__sliding_window": 2}
    sizes = {f"attention__{part}_length{kind}": 16 for part in ("key", "value") for kind in ("", "_swa")}
    model = llama_files.gguf("gemma4", attention__sliding_window_pattern=[True, False], **fields, **sizes)
    (folder / "x.session").write_bytes(state)
    (folder / "m.gguf").write_bytes(model)
    made(["encode", folder / "x.session", "--model", folder / "m.gguf", "-o", f"{folder}/frames/"])
    made(["mnn", "unpack", folder / "x.session", "--model", folder / "m.gguf", "-o", f"{folder}/arrays/"])
    commands = (
        "mnn unpack {in}/x.session -o {out}.npz --model {in}/m.gguf",
        "encode {in}/x.session --codec dense --model {in}/m.gguf -o {out}/",
        "inspect {in}/x.session",
        "mnn unpack {in}/frames -o {out}.npz",
        "decode {in}/frames -o {out}.session --max-input-bytes 1M",
        "inspect {in}/arrays",
        "encode {in}/arrays -o {out}/",
    )
    damaged = ("x.session", "m.gguf", "frames/manifest.json", "arrays/completeness.json", "arrays/positions.json")
    return Sample(contents(folder), commands, damaged)


def _mlx(folder: Path, bits: int = 0, kind: str = "") -> Sample:
    """A prompt cache of mlx-lm."""
    folder.mkdir()
    shape = mlx_files.Shape(layers=1, heads=1, dims=32, value_dims=32, tokens=1, capacity=2, bits=bits, kind=kind)
    (folder / "c.safetensors").write_bytes(mlx_files.cache(Random(1), shape)[0])
    commands = (
        "encode {in}/c.safetensors -o {out}/",
        "mnn unpack {in}/c.safetensors -o {out}.npz",
        "inspect {in}/c.safetensors",
        "measure {in}/c.safetensors",
    )
    return Sample(contents(folder), commands, ("c.safetensors",))


def _mlx_classes(folder: Path, name: str) -> Sample:
    """Prompt caches of classes with settings: next to a state that is not K and V, and a batch with padding."""
    folder.mkdir()
    texts, rows = (2, 2) if name == "BatchKVCache" else (1, 1)
    tensors = {
        f"{layer}.{part}": ("F16", [texts, 1, rows, 2], bytes(range(4 * texts * rows)))
        for layer in (0, 1)
        for part in (0, 1)
    }
    metadata = {"0.0": "", "1.model": "m", "2.0": name}
    if name == "BatchKVCache":
        for layer in (0, 1):
            tensors |= {f"{layer}.2": ("I32", [2], struct.pack("<2i", 2, 1))}
            tensors |= {f"{layer}.3": ("I32", [2], struct.pack("<2i", 0, 1))}
        metadata |= {"0.1": "", "2.1": name}
    else:
        metadata = {"0.0.0": "16", "0.0.1": "0", "0.1": "", "1.model": "m", "2.0": name, "2.1": "ArraysCache"}
    (folder / "c.safetensors").write_bytes(mlx_files.safetensors(Random(1), tensors, metadata))
    batch = " --part batch=1" if name == "BatchKVCache" else ""
    commands = (
        "encode {in}/c.safetensors -o {out}/",
        f"mnn unpack {{in}}/c.safetensors -o {{out}}.npz{batch}",
        "inspect {in}/c.safetensors",
    )
    return Sample(contents(folder), commands, ("c.safetensors",))


def _pages(folder: Path) -> Sample:
    """A folder of vLLM's, and a page of LMCache."""
    (folder / "0cc175b9").mkdir(parents=True)
    words = np.random.default_rng(2).normal(size=(2, 3, 2, 2)).astype(np.float16)
    header = json.dumps(
        {"kv_cache": {"dtype": "F16", "shape": words.shape, "data_offsets": [0, words.nbytes]}}
    ).encode()
    tensors = len(header).to_bytes(8, "little") + header + words.tobytes()
    (folder / "0cc175b9/layers.0.safetensors").write_bytes(tensors)
    for number in "ab":
        (folder / f"m@1@0@1{number}@half.pt").write_bytes(words.tobytes())
    commands = (
        "encode {in}/0cc175b9 -o {out}/ --axes 2thd",
        "measure {in}/m@1@0@1a@half.pt --shape 2,-1,2,2 --axes 2thd",
        "measure {in}/m@1@0@1a@half.pt {in}/m@1@0@1b@half.pt --pages --shape 2,-1,2,2 --axes 2thd",
    )
    return Sample(contents(folder), commands, ("0cc175b9/layers.0.safetensors", "m@1@0@1a@half.pt"))


def _float8(folder: Path) -> Sample:
    """A .safetensors file of float8 codes, and frames of them."""
    folder.mkdir()
    header = json.dumps({"k": {"dtype": "F8_E5M2", "shape": [1, 3, 2], "data_offsets": [0, 6]}}).encode()
    (folder / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(120, 126)))
    made(["encode", folder / "c.safetensors", "-o", f"{folder}/f/"])
    commands = (
        "inspect {in}/c.safetensors",
        "mnn unpack {in}/c.safetensors -o {out}.npz",
        "decode {in}/f -o {out}.safetensors --max-input-bytes 1M",
        "mnn unpack {in}/f -o {out}.npy",
    )
    return Sample(contents(folder), commands, ("c.safetensors", "f/manifest.json"))


def _zarr(folder: Path) -> Sample:
    """A Zarr store as `encode` writes it, of two chunks an array."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    np.savez(folder / "kv.npz", **{f"layer_0.{part}": rng.normal(size=(1, 4, 2)).astype("f2") for part in PARTS})
    made(["encode", folder / "kv.npz", "-o", folder / "x.zarr", "--chunk-bytes", "8"])
    commands = (
        "inspect {in}/x.zarr",
        "verify {in}/x.zarr",
        "decode {in}/x.zarr -o {out}.npz --max-input-bytes 1M",
        "measure {in}/x.zarr",
        "encode {in}/x.zarr -o {out}.zarr",
    )
    damaged = ("x.zarr/zarr.json", "x.zarr/layer_0.key/zarr.json", "x.zarr/layer_0.key/c/0/1/0")
    return Sample(contents(folder), commands, damaged)


def _zarr_of_others(folder: Path) -> Sample:
    """Stores of version 2 and 3 as other programs write them: zstd, gzip, nothing; chunks across the axes."""
    words = np.arange(24, dtype="<f2").reshape(2, 4, 3)
    (folder / "two/k").mkdir(parents=True)
    (folder / "three").mkdir()
    (folder / "two/.zgroup").write_text('{"zarr_format": 2}')
    old = {"zarr_format": 2, "shape": [2, 4, 3], "chunks": [2, 3, 2], "dtype": "<f2", "fill_value": 0.0, "order": "C"}
    (folder / "two/k/.zarray").write_text(
        json.dumps({**old, "compressor": {"id": "zlib", "level": 1}, "filters": None})
    )
    padded = np.zeros((2, 6, 4), "<f2")
    padded[:, :4, :3] = words
    for i, j in np.ndindex(2, 2):
        part = np.ascontiguousarray(padded[:, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2])
        (folder / f"two/k/0.{i}.{j}").write_bytes(zlib.compress(part.tobytes()))
    (folder / "three/zarr.json").write_text(json.dumps(_ZARR_3))
    (folder / "three/c.0").write_bytes(zstandard.compress(words.reshape(-1).byteswap().tobytes()))
    commands = (
        "inspect {in}/two",
        "decode {in}/two -o {out}.npz --max-input-bytes 1M",
        "encode {in}/three -o {out}.frame --max-input-bytes 1M",
    )
    return Sample(contents(folder), commands, ("two/k/.zarray", "two/k/0.0.0", "three/zarr.json", "three/c.0"))


_ZARR_3 = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [24],
    "data_type": "float16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [24]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "fill_value": "NaN",
    "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "zstd"}],
}


MAKERS: dict[str, Callable[[Path], Sample]] = {
    "session of llama.cpp": _llama,
    "session of llama.cpp, transposed": lambda folder: _llama(folder, "f16", transposed=True),
    "session of llama.cpp, windows": _llama_windows,
    "cache of MLX": _mlx,
    "cache of MLX, quantised": lambda folder: _mlx(folder, 4),
    "cache of MLX, a window": lambda folder: _mlx(folder, kind="RotatingKVCache"),
    "cache of MLX, chunks and arrays": lambda folder: _mlx_classes(folder, "ChunkedKVCache"),
    "cache of MLX, a batch": lambda folder: _mlx_classes(folder, "BatchKVCache"),
    "cache of transformers": _saved_cache,
    "cache of transformers, static": lambda folder: _saved_cache(folder, "static"),
    "cache of transformers, windows and padding": lambda folder: _saved_cache(folder, "padded"),
    "cache of transformers, encoder and decoder": lambda folder: _saved_cache(folder, "halves"),
    "float8": _float8,
    "pages": _pages,
    "zarr": _zarr,
    "zarr, of others": _zarr_of_others,
}
"""By the name of the reader."""
