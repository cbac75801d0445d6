"""Codecs of other libraries, kvmnn's efforts and dense streams, each as an encode and a decode function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from .. import dense, dtypes
from .._util.dataclass import dataclass
from .._util.packages import get_version
from .._util.parallel import parallel_map, resolve_threads
from .._util.text import LOSSY
from ..arrays.array import Chunk
from ..arrays.source import Source
from ..bundle.dense import DenseOptions, DensePlan, plan_arrays, search_rope, split_into_groups
from ..dtypes import Elements
from ..errors import OptionError
from ..files.schema import Record
from ..frames import EFFORTS, Effort, decoder, encoder


@dataclass(frozen=True)
class LossStats(Record):
    """What a lossy codec lost."""

    label: ClassVar = LOSSY
    json_keys = "label predicted_kl max_error"

    #: Nats a token that the encoder expects; None if that is not known.
    predicted_kl: float | None
    #: The largest difference of an element.
    max_error: float

    def __str__(self) -> str:
        cost = (
            "KL divergence not known" if self.predicted_kl is None else f"{self.predicted_kl:.2g} nats a token expected"
        )
        return f"{self.label}: {cost}, largest error {self.max_error:.3g}"


@dataclass(frozen=True)
class BenchCodec:
    """A codec as functions on raw bytes."""

    #: Name in the table.
    name: str
    #: Version of its package.
    version: str
    #: Encodes a uint8 array to bytes.
    encode: Callable[[Chunk], Any]
    #: Decodes these bytes to a buffer equal to the input.
    decode: Callable[[Any], Any]
    #: Counts the bytes that `encode` returned.
    count_bytes: Callable[[Any], int] = len
    #: Compares decoded bytes with the input, and returns what was lost; None for lossless codecs.
    check_loss: Callable[[Chunk, Chunk], LossStats] | None = None


def make_kvmnn_codecs(dtype: str, threads: int | None, *, with_max: bool = False) -> list[BenchCodec]:
    """Make a codec for each of kvmnn's efforts for words of `dtype`."""

    def make_codec(effort: Effort) -> BenchCodec:
        return BenchCodec(
            f"kvmnn {effort}",
            get_version(),
            lambda data: encoder.encode(data, dtype=dtype, effort=effort, threads=threads),
            lambda payload: decoder.decode(payload, dtype=dtype, threads=threads),
        )

    return [make_codec(effort) for effort in EFFORTS if with_max or effort != "max"]


def find_installed_codecs(dtype: str, threads: int | None) -> tuple[list[BenchCodec], list[str]]:
    """Return the installed alternatives for words of `dtype`, and the names of packages that are missing."""
    codecs: list[BenchCodec] = []
    not_installed: list[str] = []
    for package, factory in _CODEC_FACTORIES.items():
        try:
            module = importlib.import_module(package)
        except ImportError:
            not_installed.append(package.partition(".")[0])
            continue
        codecs.extend(factory(module, dtype, threads))
    return codecs, not_installed


def _get_version(module: Any) -> str:
    return str(getattr(module, "__version__", "unknown"))


def _make_zstandard_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    def make_codec(level: int) -> BenchCodec:
        return BenchCodec(
            f"zstd -{level}",
            _get_version(module),
            module.ZstdCompressor(level=level).compress,
            module.ZstdDecompressor().decompress,
        )

    return [make_codec(1), make_codec(3)]


def _make_lz4_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    import lz4

    return [BenchCodec("lz4", str(lz4.__version__), lambda data: module.compress(data.data), module.decompress)]


_BLOSC2_LEVEL = 1
"""With zstd inside Blosc2 this is zstd's level 1."""


def _make_blosc2_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    module.set_nthreads(resolve_threads(threads))
    itemsize = dtypes.parse_dtype(dtype).itemsize

    def make_codec(name: str, mode: Any, coder: Any) -> BenchCodec:
        def encode(data: Chunk) -> Any:
            options = {"codec": coder, "clevel": _BLOSC2_LEVEL, "filters": [mode], "filters_meta": [0]}
            return module.compress2(data, typesize=itemsize, **options)

        return BenchCodec(f"{name} -{_BLOSC2_LEVEL}", _get_version(module), encode, module.decompress2)

    return [
        make_codec("blosc2 shuffle+zstd", module.Filter.SHUFFLE, module.Codec.ZSTD),
        make_codec("blosc2 bitshuffle+zstd", module.Filter.BITSHUFFLE, module.Codec.ZSTD),
        make_codec("blosc2 shuffle+lz4", module.Filter.SHUFFLE, module.Codec.LZ4),
        make_codec("blosc2 bitshuffle+lz4", module.Filter.BITSHUFFLE, module.Codec.LZ4),
    ]


def _make_bitshuffle_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    import ctypes

    with suppress(OSError, AttributeError):  # one that was built without OpenMP has one thread
        ctypes.CDLL(module.ext.__file__).omp_set_num_threads(resolve_threads(threads))
    word_type = np.dtype(f"u{dtypes.parse_dtype(dtype).itemsize}")

    def make_codec(coder: str, *level: int) -> BenchCodec:
        compress, decompress = getattr(module, f"compress_{coder}"), getattr(module, f"decompress_{coder}")
        return BenchCodec(
            " ".join([f"bitshuffle+{coder}", *(f"-{number}" for number in level)]),
            _get_version(module),
            lambda data: (data.size // word_type.itemsize, compress(data.view(word_type), 0, *level)),
            lambda payload: decompress(payload[1], (payload[0],), word_type, 0).view(np.uint8),
            count_bytes=lambda payload: int(payload[1].size),
        )

    return [make_codec("zstd", 1), make_codec("lz4")]


def _make_pcodec_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    from importlib.metadata import version

    from pcodec import ChunkConfig, standalone

    numpy_type = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype]

    def encode(data: Chunk) -> Any:
        return standalone.simple_compress(data.view(numpy_type), ChunkConfig())

    return [BenchCodec("pcodec", version("pcodec"), encode, standalone.simple_decompress)]


def _make_zipnn_codecs(module: Any, dtype: str, threads: int | None) -> list[BenchCodec]:
    from importlib.metadata import version

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    compressor = module.ZipNN(input_format="byte", bytearray_dtype=names[dtype], threads=resolve_threads(threads))
    return [
        BenchCodec("zipnn", version("zipnn"), lambda data: compressor.compress(data.tobytes()), compressor.decompress)
    ]


_CODEC_FACTORIES: dict[str, Callable[[Any, str, int | None], list[BenchCodec]]] = {
    "zstandard": _make_zstandard_codecs,
    "lz4.frame": _make_lz4_codecs,
    "blosc2": _make_blosc2_codecs,
    "bitshuffle": _make_bitshuffle_codecs,
    "pcodec": _make_pcodec_codecs,
    "zipnn": _make_zipnn_codecs,
}


DENSE_CODEC_NAME = "kvmnn dense"


def make_dense_plans(source: Source, *, with_rope_search: bool = True) -> dict[str, DensePlan]:
    """Plan the dense streams of the arrays of a source, by name; empty if none can be encoded so.

    RoPE parameters of K are found by trial with `with_rope_search`.
    """
    try:
        return plan_arrays(source, DenseOptions(rotary=search_rope(source) if with_rope_search else None))
    except OptionError:
        return {}


def explain_no_dense(plan: DensePlan | None, sample_bytes: int) -> str:
    """Return why no dense streams are measured; empty if they are."""
    if plan is None:
        return f"{DENSE_CODEC_NAME}: not measured, these are not K or V of layers, or nobody says how they lie (--axes)"
    if not count_dense_bytes(plan, sample_bytes):
        return f"{DENSE_CODEC_NAME}: not measured, a layer takes {plan.nbytes:,} bytes (--sample-bytes)"
    return ""


def count_dense_bytes(plan: DensePlan | None, sample_bytes: int) -> int:
    """Return how many bytes of a sample can be encoded as dense streams: whole layers, or whole tokens of one layer."""
    if plan is None:
        return 0
    if sample_bytes >= plan.nbytes or plan.axes == "htd":
        return sample_bytes // plan.nbytes * plan.nbytes
    token_bytes = plan.nbytes // plan.tokens
    return sample_bytes // token_bytes * token_bytes


def make_dense_codec(plan: DensePlan, threads: int | None) -> BenchCodec:
    """Make a codec for dense streams of the first `count_dense_bytes`; groups of layers share the threads."""
    num_threads = resolve_threads(threads)

    def encode(data: Chunk) -> list[bytes]:
        layers = _split_layers(plan, data)
        remaining_layers = iter(layers)
        groups = [
            [next(remaining_layers) for _ in group] for group in split_into_groups([layer.nbytes for layer in layers])
        ]
        return [
            stream for streams in parallel_map(partial(_encode_layers, plan), groups, num_threads) for stream in streams
        ]

    def decode(streams: Sequence[bytes]) -> Any:
        layers = parallel_map(dense.decode, streams, num_threads)
        return np.concatenate([layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers])

    return BenchCodec(
        DENSE_CODEC_NAME, get_version(), encode, decode, count_bytes=lambda streams: sum(map(len, streams))
    )


def make_plan(keys: Elements, *, dtype: str, part: dtypes.Part) -> DensePlan:
    """Plan the dense streams of an array ``[layer, token, kv_head, head_dim]``; RoPE parameters of K are searched."""
    rotary = dense.search_rope(keys[0].transpose(1, 0, 2), dtype=dtype) if part == "key" else None
    shape = keys.shape[1:]
    return DensePlan(axes="thd", shape=shape, dtype=dtype, part=part, layer=None, rotary=rotary)


def _split_layers(plan: DensePlan, data: Chunk) -> list[Elements]:
    elements = data.view(dtypes.parse_dtype(plan.dtype).numpy_dtype)
    if data.size < plan.nbytes:
        return [elements.reshape(-1, *plan.shape[1:]).transpose(1, 0, 2)]
    layers = elements.reshape(-1, *plan.shape)
    return [layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers]


def _encode_layers(plan: DensePlan, layers: Sequence[Elements]) -> list[bytes]:
    tokens = layers[0].shape[1]
    return dense.encode_many(
        layers,
        dtype=plan.dtype,
        rotary=plan.rotary,
        positions=None if plan.positions is None else plan.positions[:tokens],
        token_ids=None if plan.token_ids is None else plan.token_ids[:tokens],
    )
