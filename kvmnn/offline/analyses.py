"""The earlier analyses of dumps in the H2O work on MNN: byte entropies and split ("gear") ratios, of layers and heads.

fp16 words are split into high and low bytes, fp32 words into high and low 16-bit halves (little-endian bytes); "delta"
is the high part minus that of the token before, modulo its range, the first token as it is. Sizes are those of zstd
frames and simulated: nothing is written in compressed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..dtypes import PARTS, Part, Words
from ..errors import SourceError
from ..frames import _streams, _zstdlib
from ..threads.pipeline import Progress
from .options import Scope
from .selection import Entry, Selection
from .token_runs import FileTensor

ALL_LAYERS = Scope(scope="all")
"""A scope that takes every dump."""


def all_layers(scope: Scope) -> Scope:
    """A scope that takes the dumps of all layers with the stages and lengths of `scope`."""
    return replace(ALL_LAYERS, stage=scope.stage, min_seq_len=scope.min_seq_len, max_seq_len=scope.max_seq_len)


@dataclass(frozen=True)
class Metrics:
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


RATIOS = tuple(name for name in Metrics.__dataclass_fields__ if name.endswith("ratio"))


@dataclass(frozen=True)
class Row:
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

    entry: Entry
    part: Part
    head: int | None
    raw_bytes: int
    metrics: Metrics


@dataclass
class Analysis:
    """All rows, and what was left out."""

    layers: list[Row] = field(default_factory=list)
    heads: list[Row] = field(default_factory=list)
    failed: int = 0


def analyse(
    selection: Selection,
    *,
    level: int = 3,
    with_heads: bool = True,
    progress: Progress | None = None,
) -> Analysis:
    """Metrics of every selected dump whose files are complete; others count as failed.

    Parameters
    ----------
    selection
        Made by `select` with a scope such as `ALL_LAYERS`.
    level
        zstd level.
    """
    selection.require_entries()
    found, zstd = Analysis(), _Zstd(level)
    for entry in selection.entries:
        try:
            tensors = [(part, _load(entry.tensor(part))) for part in PARTS]
        except SourceError:
            found.failed += 1
            continue
        for part, words in tensors:
            found.layers.append(Row(entry, part, None, words.nbytes, measure_words(words, zstd)))
            if with_heads:
                found.heads.extend(_heads(entry, part, words, zstd))
            if progress:
                progress(words.nbytes)
    return found


def measure_words(words: Words, zstd: Callable[[Words], int]) -> Metrics:
    """The metrics of ``[token, ...]`` words: uint16 for fp16, uint32 for fp32; `zstd` gives the size of a frame."""
    nbytes = words.nbytes
    common = {"entropy": _entropy(words), "zstd_ratio": _over(nbytes, zstd(words))}
    kind, bits = (np.uint8, 8) if words.itemsize == 2 else (np.uint16, 16)
    hi, lo = (words >> bits).astype(kind), words.astype(kind)
    delta = hi.copy()
    np.subtract(hi[1:], hi[:-1], out=delta[1:])
    sizes = {name: zstd(stream) for name, stream in (("hi", hi), ("lo", lo), ("delta", delta))}
    both = {
        "hi_entropy": _entropy(hi),
        "lo_entropy": _entropy(lo),
        "hi_ratio": _over(hi.nbytes, sizes["hi"]),
        "lo_ratio": _over(lo.nbytes, sizes["lo"]),
        "gear_ratio": _over(nbytes, sizes["hi"] + sizes["lo"]),
        "hi_delta_ratio": _over(hi.nbytes, sizes["delta"]),
        "gear_delta_ratio": _over(nbytes, sizes["delta"] + sizes["lo"]),
    }
    if bits == 8:
        return Metrics(**common, **both)
    renamed = {_WIDE.get(name, name.replace("_", "16_", 1)): value for name, value in both.items()}
    return Metrics(**common, **renamed)


_WIDE = {"gear_ratio": "split16_ratio", "gear_delta_ratio": "split16_delta_ratio"}


def averages(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """The mean of a ratio over dumps, and the ratio of the sums of bytes.

    Rows with a ratio of 0 have no such ratio: they count only in the mean of ``zstd_ratio``.
    """
    values = [(row.raw_bytes, float(getattr(row.metrics, name))) for row in rows]
    counted = [value for _, value in values if value > 0 or name == "zstd_ratio"]
    mean = sum(counted) / len(counted) if counted else 0.0
    weighted = [(raw, raw / value) for raw, value in values if value > 0]
    compressed = sum(part for _, part in weighted)
    return mean, sum(raw for raw, _ in weighted) / compressed if compressed else 0.0


def _heads(entry: Entry, part: Part, words: Words, zstd: Callable[[Words], int]) -> Iterator[Row]:
    for head in range(entry.kv_heads):
        own = np.ascontiguousarray(words[:, head])
        yield Row(entry, part, head, own.nbytes, measure_words(own, zstd))


def _load(tensor: object) -> Words:
    """``[token, kv_head, head_dim]`` words of a dump's file, not rounded."""
    if not isinstance(tensor, FileTensor):
        raise SourceError("only KV dumps are analysed")
    if not tensor.is_complete():
        raise SourceError(f"{tensor.path}: has {tensor.found} bytes, its metadata says otherwise")
    runs = [run.copy() for run in tensor.raw_runs(max(tensor.found, 1))]
    return runs[0].view(f"<u{tensor.width}").reshape(tensor.shape)


class _Zstd:
    """Sizes of zstd frames."""

    def __init__(self, level: int) -> None:
        self._context = _zstdlib.Context()
        self._level = level

    def __call__(self, words: Words) -> int:
        data = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        return self._context.compress_into(np.empty(_zstdlib.bound(data.size), np.uint8), data, self._level)


def _entropy(words: Words) -> float:
    return _streams.order0_entropy(np.ascontiguousarray(words).reshape(-1).view(np.uint8))


def _over(raw: int, compressed: int) -> float:
    return raw / compressed if compressed else 0.0
