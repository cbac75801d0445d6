"""The earlier analyses of dumps in the H2O work on MNN: byte entropies and split ("gear") ratios, of layers and heads.

fp16 words are split into high and low bytes, fp32 words into high and low 16-bit halves (little-endian bytes); "delta"
is the high part minus that of the token before, modulo its range, the first token as it is. Sizes are those of zstd
frames and simulated: nothing is written in compressed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..dtypes import PARTS, Elements, Part
from ..errors import SourceError
from ..frames import _streams, _zstdlib
from ..threads.pipeline import Progress
from .options import Scope
from .selection import DumpEntry, DumpSelection
from .token_runs import FileTensor

ALL_LAYERS_SCOPE = Scope(scope="all")
"""A scope that takes every dump."""


def with_all_layers(scope: Scope) -> Scope:
    """A scope that takes the dumps of all layers with the stages and lengths of `scope`."""
    return replace(ALL_LAYERS_SCOPE, stage=scope.stage, min_seq_len=scope.min_seq_len, max_seq_len=scope.max_seq_len)


@dataclass(frozen=True)
class EntropyMetrics:
    """One tensor, or one head of it; 0 stands for what its word size has not.

    Parameters
    ----------
    entropy
        Bits per byte, order 0.
    zstd_ratio
        Bytes over the zstd frame of the bytes as they lie.
    hi_entropy, lo_entropy, hi_ratio, lo_ratio
        fp16: of the high and of the low bytes.
    gear_ratio, hi_delta_ratio, gear_delta_ratio
        fp16: both parts together; the high bytes as delta; both together with that.
    hi16_entropy, lo16_entropy, hi16_ratio, lo16_ratio, split16_ratio, hi16_delta_ratio, split16_delta_ratio
        fp32: the same with 16-bit halves.
    """

    entropy: float = 0.0
    zstd_ratio: float = 0.0
    hi_entropy: float = 0.0
    lo_entropy: float = 0.0
    hi_ratio: float = 0.0
    lo_ratio: float = 0.0
    gear_ratio: float = 0.0
    hi_delta_ratio: float = 0.0
    gear_delta_ratio: float = 0.0
    hi16_entropy: float = 0.0
    lo16_entropy: float = 0.0
    hi16_ratio: float = 0.0
    lo16_ratio: float = 0.0
    split16_ratio: float = 0.0
    hi16_delta_ratio: float = 0.0
    split16_delta_ratio: float = 0.0


RATIO_NAMES = tuple(name for name in EntropyMetrics.__dataclass_fields__ if name.endswith("ratio"))


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of K or V of one dump, of all heads or of one.

    Parameters
    ----------
    entry
        The dump.
    part
        K or V.
    head
        None for all.
    raw_bytes
        Bytes of the words as they were dumped.
    """

    entry: DumpEntry
    part: Part
    head: int | None
    raw_bytes: int
    metrics: EntropyMetrics


@dataclass
class EntropyAnalysis:
    """All rows, and what was left out."""

    layer_rows: list[MetricsRow] = field(default_factory=list)
    head_rows: list[MetricsRow] = field(default_factory=list)
    num_failed: int = 0


def analyze_entropy(
    selection: DumpSelection,
    *,
    level: int = 3,
    with_heads: bool = True,
    progress: Progress | None = None,
) -> EntropyAnalysis:
    """Metrics of every selected dump whose files are complete; others count as failed.

    Parameters
    ----------
    selection
        Made by `select` with a scope such as `ALL_LAYERS_SCOPE`.
    level
        zstd level.
    """
    selection.require_entries()
    analysis, zstd = EntropyAnalysis(), _ZstdFrameSizer(level)
    for entry in selection.entries:
        try:
            tensors = [(part, _load_elements(entry.get_tensor(part))) for part in PARTS]
        except SourceError:
            analysis.num_failed += 1
            continue
        for part, elements in tensors:
            analysis.layer_rows.append(MetricsRow(entry, part, None, elements.nbytes, compute_metrics(elements, zstd)))
            if with_heads:
                analysis.head_rows.extend(_iter_head_rows(entry, part, elements, zstd))
            if progress:
                progress(elements.nbytes)
    return analysis


def compute_metrics(elements: Elements, zstd: Callable[[Elements], int]) -> EntropyMetrics:
    """The metrics of ``[token, ...]`` words: uint16 for fp16, uint32 for fp32; `zstd` gives the size of a frame."""
    nbytes = elements.nbytes
    shared_metrics = {"entropy": _compute_entropy(elements), "zstd_ratio": _compute_ratio(nbytes, zstd(elements))}
    element_type, bits = (np.uint8, 8) if elements.itemsize == 2 else (np.uint16, 16)
    hi, lo = (elements >> bits).astype(element_type), elements.astype(element_type)
    delta = hi.copy()
    np.subtract(hi[1:], hi[:-1], out=delta[1:])
    sizes = {name: zstd(stream) for name, stream in (("hi", hi), ("lo", lo), ("delta", delta))}
    split_metrics = {
        "hi_entropy": _compute_entropy(hi),
        "lo_entropy": _compute_entropy(lo),
        "hi_ratio": _compute_ratio(hi.nbytes, sizes["hi"]),
        "lo_ratio": _compute_ratio(lo.nbytes, sizes["lo"]),
        "gear_ratio": _compute_ratio(nbytes, sizes["hi"] + sizes["lo"]),
        "hi_delta_ratio": _compute_ratio(hi.nbytes, sizes["delta"]),
        "gear_delta_ratio": _compute_ratio(nbytes, sizes["delta"] + sizes["lo"]),
    }
    if bits == 8:
        return EntropyMetrics(**shared_metrics, **split_metrics)
    wide_metrics = {
        _WIDE_RATIO_NAMES.get(name, name.replace("_", "16_", 1)): value for name, value in split_metrics.items()
    }
    return EntropyMetrics(**shared_metrics, **wide_metrics)


_WIDE_RATIO_NAMES = {"gear_ratio": "split16_ratio", "gear_delta_ratio": "split16_delta_ratio"}


def compute_averages(rows: Sequence[MetricsRow], name: str) -> tuple[float, float]:
    """The mean of a ratio over dumps, and the ratio of the sums of bytes.

    Rows with a ratio of 0 have no such ratio: they count only in the mean of ``zstd_ratio``.
    """
    values = [(row.raw_bytes, float(getattr(row.metrics, name))) for row in rows]
    counted_values = [value for _, value in values if value > 0 or name == "zstd_ratio"]
    mean = sum(counted_values) / len(counted_values) if counted_values else 0.0
    byte_pairs = [(raw_bytes, raw_bytes / value) for raw_bytes, value in values if value > 0]
    compressed_bytes = sum(compressed_part_bytes for _, compressed_part_bytes in byte_pairs)
    return mean, sum(raw_bytes for raw_bytes, _ in byte_pairs) / compressed_bytes if compressed_bytes else 0.0


def _iter_head_rows(
    entry: DumpEntry, part: Part, elements: Elements, zstd: Callable[[Elements], int]
) -> Iterator[MetricsRow]:
    for head in range(entry.kv_heads):
        head_elements = np.ascontiguousarray(elements[:, head])
        yield MetricsRow(entry, part, head, head_elements.nbytes, compute_metrics(head_elements, zstd))


def _load_elements(tensor: object) -> Elements:
    """``[token, kv_head, head_dim]`` words of a dump's file, not rounded."""
    if not isinstance(tensor, FileTensor):
        raise SourceError("only KV dumps are analysed")
    if not tensor.is_complete():
        raise SourceError(f"{tensor.path}: has {tensor.file_bytes} bytes, its metadata says otherwise")
    chunks = [chunk.copy() for chunk in tensor.iter_raw_chunks(max(tensor.file_bytes, 1))]
    return chunks[0].view(f"<u{tensor.stored_itemsize}").reshape(tensor.shape)


class _ZstdFrameSizer:
    """Sizes of zstd frames."""

    def __init__(self, level: int) -> None:
        self._context = _zstdlib.ZstdContext()
        self._level = level

    def __call__(self, elements: Elements) -> int:
        data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        return self._context.compress_into(
            np.empty(_zstdlib.max_compressed_size(data.size), np.uint8), data, self._level
        )


def _compute_entropy(elements: Elements) -> float:
    return _streams.compute_order0_entropy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))


def _compute_ratio(raw_bytes: int, compressed_bytes: int) -> float:
    return raw_bytes / compressed_bytes if compressed_bytes else 0.0
