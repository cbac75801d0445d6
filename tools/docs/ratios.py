"""Measure what ratio MNN frames reach: benchmarks/ratios.md, which docs/ratios.md explains.

    python tools/docs/ratios.py K.npy V.npy ...     arrays of float16 or float32
    python tools/docs/ratios.py --synth             K and V like data made here

Arrays of four axes are read as [layer, token, head, dim], of three as one layer. A float32 array is measured as it is
and as bf16, cut to its upper 16 bits. Two files whose names differ only in `_k` and `_v` are measured together as well.
Output is Markdown on stdout. Every frame after a printed ratio of efforts is decoded and compared first.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvmnn
from kvmnn.frames import _encoder, _zstdlib, zstd

Array = npt.NDArray[Any]

ORDERS = {
    "token, head, dim": (0, 1, 2),
    "head, token, dim": (1, 0, 2),  # the engine's
    "head, dim, token": (1, 2, 0),
}
ENGINE_ORDER = "head, token, dim"
BLOCK_TOKENS = (16, 32, 64, 128, 256, 512)
LEVELS = (1, 3, 9, 19)
ALL_MODES = 0b111
ALL_CODECS = 0b11
HEAD = """\
# What ratio MNN frames reach

Ratio: raw bytes over frame bytes, headers included; what the numbers mean is in [ratios.md](../docs/ratios.md).
Written by `python tools/docs/ratios.py kv_real_k_fp16.npy kv_real_v_fp16.npy kv_real_k_fp32.npy kv_real_v_fp32.npy
--synth`; every frame of the first table was decoded and compared. `kv_real_k`, `kv_real_v`: K (with RoPE) and V of a
model of 2.9 million parameters, 1,024 unseen tokens, 4 layers, 4 heads of 64. `synth_k`, `synth_v`: generated, one
layer, 1,024 tokens, 8 heads of 128; *64 rows*: the same V for a prompt that uses 64 different tokens. bf16: the upper
16 bits of the fp32 arrays.
"""


class Data(NamedTuple):
    """Words of one tensor, [layer, token, head, dim]."""

    name: str
    dtype: str
    words: Array

    def layer(self, index: int, order: str = ENGINE_ORDER) -> Array:
        return np.ascontiguousarray(self.words[index].transpose(ORDERS[order]))


class Size(NamedTuple):
    """Bytes before and after; sizes add up, ratios do not."""

    raw: int = 0
    stored: int = 0

    def __add__(self, other: object) -> Size:
        if not isinstance(other, Size):
            return NotImplemented
        return Size(self.raw + other.raw, self.stored + other.stored)

    def __str__(self) -> str:
        return f"{self.raw / self.stored:.3f}"


def total(sizes: Iterable[Size]) -> Size:
    result = Size()
    for size in sizes:
        result += size
    return result


# -- data -------------------------------------------------------------------------------------------------------------


def from_file(path: Path) -> Iterator[Data]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.dtype not in (np.float16, np.float32):
        sys.exit(f"{path}: {array.dtype} of shape {array.shape}: expected float16 or float32 [layer, token, head, dim]")
    name = path.stem.removesuffix("_fp16").removesuffix("_fp32")
    if array.dtype == np.float16:
        yield Data(name, "fp16", array)
    else:
        yield Data(name, "fp32", array)
        yield Data(name, "bf16", upper_half(array))


def upper_half(array: Array) -> Array:
    """float32 as bf16 without rounding."""
    return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)


def synthetic(seed: int = 7, heads: int = 8, tokens: int = 1024, dim: int = 128) -> Iterator[Data]:
    """K and V like tensors of one layer.

    Every channel has a mean and a scale of its own and moves along the tokens as an AR(1) process. In K that process is
    slow (0.9) and four channels of each head stand far out; in V it is fast (0.3). The third tensor has the V of a
    prompt made of 64 different tokens: equal tokens, equal rows.
    """
    rng = np.random.default_rng(seed)
    k_mean = rng.normal(size=(heads, dim))
    k_scale = rng.lognormal(-0.3, 0.5, size=(heads, dim))
    for head in range(heads):
        outliers = rng.permutation(dim)[:4]
        k_mean[head, outliers] = rng.choice((-1.0, 1.0), 4) * rng.uniform(6.0, 14.0, 4)
        k_scale[head, outliers] *= 3.0
    v_mean = rng.normal(scale=0.05, size=(heads, dim))
    v_scale = 0.3 * rng.lognormal(0.0, 0.4, size=(heads, dim))
    k = k_mean + k_scale * autoregressive(rng, (tokens, heads, dim), 0.9)
    v = v_mean + v_scale * autoregressive(rng, (tokens, heads, dim), 0.3)
    repeated = v[rng.integers(0, 64, tokens)]
    for name, values in (("synth_k", k), ("synth_v", v), ("synth_v, 64 rows", repeated)):
        single = values.astype(np.float32)[None]
        yield Data(name, "fp16", single.astype(np.float16))
        yield Data(name, "bf16", upper_half(single))
        yield Data(name, "fp32", single)


def autoregressive(rng: np.random.Generator, shape: tuple[int, ...], memory: float) -> Array:
    """Unit-variance AR(1) along the first axis."""
    series = rng.normal(size=shape)
    series[1:] *= np.sqrt(1.0 - memory**2)
    for now in range(1, shape[0]):
        series[now] += memory * series[now - 1]
    return series


# -- measuring --------------------------------------------------------------------------------------------------------


def encoded(words: Array, dtype: str, effort: str = "exact") -> bytes:
    frame = kvmnn.encode(words, dtype=dtype, effort=effort)
    back = kvmnn.decode(frame, dtype=dtype)
    if back.tobytes() != words.tobytes():
        sys.exit(f"effort {effort}: the frame does not decode to its input")
    return frame


def size_of(words: Array, dtype: str) -> Size:
    return Size(words.nbytes, len(kvmnn.encode(words, dtype=dtype)))


def at_level(words: Array, level: int) -> Size:
    """One frame as the exact effort makes it, at another zstd level."""
    stride = words.dtype.itemsize
    frame = _encoder.encode(as_bytes(words), stride, (ALL_MODES,) * stride, ALL_CODECS, level)
    return Size(words.nbytes, len(frame))


def as_bytes(words: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)


def predictors_of(info: kvmnn.FrameInfo) -> str:
    """The predictors by stream, or the one name if all streams have the same."""
    names = [stream.predictor for stream in info.streams]
    return names[0] if len(set(names)) == 1 else ", ".join(names)


def entropies_of(info: kvmnn.FrameInfo) -> str:
    return " / ".join(f"{stream.entropy:.2f}" for stream in info.streams)


def limit_of(info: kvmnn.FrameInfo) -> str:
    return f"{info.entropy_ratio:.3f}"


# -- tables -----------------------------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def whole_arrays(tensors: list[Data], efforts: Sequence[str]) -> None:
    def row(data: Data) -> list[object]:
        words = np.ascontiguousarray(data.words)
        frames = {effort: encoded(words, data.dtype, effort) for effort in efforts}
        info = kvmnn.inspect(frames["exact"], dtype=data.dtype)
        plain = Size(words.nbytes, len(_zstdlib.compress(as_bytes(words), zstd.DEFAULT_LEVEL)))
        ratios = [Size(words.nbytes, len(frame)) for frame in frames.values()]
        return [data.name, data.dtype, entropies_of(info), limit_of(info), plain, *ratios, predictors_of(info)]

    head = ["array", "dtype", "entropy by stream", "byte entropy", "zstd -3", *efforts, "predictors"]
    table("Whole arrays", head, map(row, tensors))


def layers(tensors: list[Data]) -> None:
    several = [data for data in tensors if len(data.words) > 1]

    def rows() -> Iterator[list[object]]:
        for data in several:
            for index in range(len(data.words)):
                words = data.layer(index)
                info = kvmnn.inspect(kvmnn.encode(words, dtype=data.dtype), dtype=data.dtype)
                tokens = data.words[index].reshape(data.words.shape[1], -1)
                distinct = len(np.unique(tokens.view(f"u{tokens.dtype.itemsize}"), axis=0))
                by_token = size_of(data.layer(index, "token, head, dim"), data.dtype)
                stored = Size(words.nbytes, info.frame_bytes)
                bits = " / ".join(f"{stream.bits_per_byte:.2f}" for stream in info.streams)
                yield [data.name, data.dtype, index, distinct, limit_of(info), bits, stored, by_token]

    head = [
        "array",
        "dtype",
        "layer",
        "distinct rows",
        "byte entropy",
        "bits by stream",
        ENGINE_ORDER,
        "token, head, dim",
    ]
    if several:
        table("Layer by layer", head, rows())


def pairs(tensors: list[Data]) -> None:
    by_key = {(data.name, data.dtype): data for data in tensors}
    found = [
        (data, by_key[data.name.replace("_k", "_v"), data.dtype])
        for data in tensors
        if "_k" in data.name and (data.name.replace("_k", "_v"), data.dtype) in by_key and len(data.words) > 2
    ]

    def rows() -> Iterator[list[object]]:
        for k, v in found:
            both = [
                size_of(k.layer(index), k.dtype) + size_of(v.layer(index), v.dtype) for index in range(len(k.words))
            ]
            yield [f"{k.name} + {v.name}", k.dtype, total(both[:2]), total(both[2:]), total(both)]

    if found:
        table("K and V together", ["arrays", "dtype", "layers 0 and 1", "deeper layers", "all"], rows())


def orders(tensors: list[Data]) -> None:
    def cell(data: Data, order: str) -> str:
        sizes, chosen = [], Counter[str]()
        for index in range(len(data.words)):
            words = data.layer(index, order)
            info = kvmnn.inspect(kvmnn.encode(words, dtype=data.dtype), dtype=data.dtype, entropy=False)
            sizes.append(Size(words.nbytes, info.frame_bytes))
            chosen.update(stream.predictor for stream in info.streams)
        counts = "-".join(str(chosen[name]) for name in ("raw", "delta_seq", "xor_seq"))
        return f"{total(sizes)} ({counts})"

    rows = ([data.name, data.dtype, *(cell(data, order) for order in ORDERS)] for data in tensors)
    table("Order of the elements (in brackets: streams by predictor raw-delta-xor)", ["array", "dtype", *ORDERS], rows)


def blocks(tensors: list[Data]) -> None:
    def pooled(data: Data, tokens: int) -> Size:
        return total(
            size_of(np.ascontiguousarray(data.words[index, at : at + tokens].transpose(1, 0, 2)), data.dtype)
            for index in range(len(data.words))
            for at in range(0, data.words.shape[1], tokens)
        )

    rows = (
        [data.name, data.dtype, *(pooled(data, tokens) for tokens in (*BLOCK_TOKENS, data.words.shape[1]))]
        for data in tensors
    )
    table("Tokens in a block", ["array", "dtype", *map(str, BLOCK_TOKENS), "all"], rows)


def zstd_levels(tensors: list[Data]) -> None:
    rows = ([data.name, data.dtype, *(at_level(data.words, level) for level in LEVELS)] for data in tensors)
    table("zstd level", ["array", "dtype", *(f"level {level}" for level in LEVELS)], rows)


def origin() -> str:
    return (
        f"{datetime.datetime.now(datetime.UTC).date()}, kvmnn {kvmnn.__version__}, libzstd {zstd.get_version()}"
        f"{'' if zstd.is_byte_exact() else ' (not byte-exact)'}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what ratio MNN frames reach on K and V arrays.")
    parser.add_argument("files", nargs="*", type=Path, help=".npy files, float16 or float32 [layer, token, head, dim]")
    parser.add_argument("--synth", action="store_true", help="also measure generated data")
    parser.add_argument("--no-max", action="store_true", help="leave out effort max, which is slow")
    arguments = parser.parse_args()
    tensors = [data for path in arguments.files for data in from_file(path)]
    if arguments.synth:
        tensors += synthetic()
    if not tensors:
        parser.error("nothing to measure: name .npy files or say --synth")
    tensors.sort(key=lambda data: ("fp16", "bf16", "fp32").index(data.dtype))  # and in the order given
    print(HEAD)
    print(origin())
    whole_arrays(tensors, ("exact", "balanced", "fast") if arguments.no_max else ("exact", "balanced", "fast", "max"))
    layers(tensors)
    pairs(tensors)
    orders(tensors)
    blocks(tensors)
    zstd_levels(tensors)


if __name__ == "__main__":
    main()
