"""The compressors that are measured beside kvmnn, each behind the same two functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays.named_array import Piece
from ..frames import decoding, encoding


@dataclass(frozen=True)
class Codec:
    """Something that makes raw bytes smaller and brings them back.

    Parameters
    ----------
    name
        What the table calls it.
    version
        Of the package that does the work.
    encode
        uint8 array to bytes.
    decode
        Those bytes to a buffer equal to the input.
    stored
        How many bytes `encode` made.
    """

    name: str
    version: str
    encode: Callable[[Piece], Any]
    decode: Callable[[Any], Any]
    stored: Callable[[Any], int] = len


def kvmnn_codecs(dtype: str, threads: int | None, *, with_max: bool = False) -> list[Codec]:
    """kvmnn's own efforts for words of `dtype`."""
    from ..version import version

    def codec(effort: str) -> Codec:
        return Codec(
            f"kvmnn {effort}",
            version(),
            lambda data: encoding.encode(data, dtype=dtype, effort=effort, threads=threads),
            lambda made: decoding.decode(made, dtype=dtype, threads=threads),
        )

    return [codec(effort) for effort in ("exact", "balanced", "fast", *(["max"] if with_max else []))]


def installed(dtype: str, threads: int | None) -> tuple[list[Codec], list[str]]:
    """The rivals that can be measured on words of `dtype`, and the names of packages that are not installed."""
    found: list[Codec] = []
    missing: list[str] = []
    for package, make in _RIVALS.items():
        try:
            module = importlib.import_module(package)
        except ImportError:
            missing.append(package.partition(".")[0])
            continue
        found.extend(make(module, dtype, threads))
    return found, missing


def _version(module: Any) -> str:
    return str(getattr(module, "__version__", "unknown"))


def _zstandard(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    def codec(level: int) -> Codec:
        return Codec(
            f"zstd -{level}",
            _version(module),
            module.ZstdCompressor(level=level).compress,
            module.ZstdDecompressor().decompress,
        )

    return [codec(1), codec(3)]


def _lz4(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    import lz4

    return [Codec("lz4", str(lz4.__version__), lambda data: module.compress(data.data), module.decompress)]


_BLOSC2_LEVEL = 1
"""For zstd this is its own level 1."""


def _blosc2(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    from ..threads.pool import resolve_threads

    module.set_nthreads(resolve_threads(threads))
    width = dtypes.by_name(dtype).itemsize

    def codec(name: str, mode: Any, coder: Any) -> Codec:
        def encode(data: Piece) -> Any:
            options = {"codec": coder, "clevel": _BLOSC2_LEVEL, "filters": [mode], "filters_meta": [0]}
            return module.compress2(data, typesize=width, **options)

        return Codec(f"{name} (clevel {_BLOSC2_LEVEL})", _version(module), encode, module.decompress2)

    return [
        codec("blosc2 shuffle+zstd", module.Filter.SHUFFLE, module.Codec.ZSTD),
        codec("blosc2 bitshuffle+zstd", module.Filter.BITSHUFFLE, module.Codec.ZSTD),
        codec("blosc2 shuffle+lz4", module.Filter.SHUFFLE, module.Codec.LZ4),
        codec("blosc2 bitshuffle+lz4", module.Filter.BITSHUFFLE, module.Codec.LZ4),
    ]


def _bitshuffle(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    import ctypes

    from ..threads.pool import resolve_threads

    with suppress(OSError, AttributeError):  # one that was built without OpenMP has one thread
        ctypes.CDLL(module.ext.__file__).omp_set_num_threads(resolve_threads(threads))
    word = np.dtype(f"u{dtypes.by_name(dtype).itemsize}")

    def codec(coder: str, *level: int) -> Codec:
        compress, decompress = getattr(module, f"compress_{coder}"), getattr(module, f"decompress_{coder}")
        return Codec(
            " ".join([f"bitshuffle+{coder}", *(f"-{each}" for each in level)]),
            _version(module),
            lambda data: (data.size // word.itemsize, compress(data.view(word), 0, *level)),
            lambda made: decompress(made[1], (made[0],), word, 0).view(np.uint8),
            stored=lambda made: int(made[1].size),
        )

    return [codec("zstd", 1), codec("lz4")]


def _pcodec(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    from importlib.metadata import version

    from pcodec import ChunkConfig, standalone

    numbers = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype]

    def encode(data: Piece) -> Any:
        return standalone.simple_compress(data.view(numbers), ChunkConfig())

    return [Codec("pcodec", version("pcodec"), encode, standalone.simple_decompress)]


def _zipnn(module: Any, dtype: str, threads: int | None) -> list[Codec]:
    from importlib.metadata import version

    from ..threads.pool import resolve_threads

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    made = module.ZipNN(input_format="byte", bytearray_dtype=names[dtype], threads=resolve_threads(threads))
    return [Codec("zipnn", version("zipnn"), lambda data: made.compress(data.tobytes()), made.decompress)]


_RIVALS: dict[str, Callable[[Any, str, int | None], list[Codec]]] = {
    "zstandard": _zstandard,
    "lz4.frame": _lz4,
    "blosc2": _blosc2,
    "bitshuffle": _bitshuffle,
    "pcodec": _pcodec,
    "zipnn": _zipnn,
}
