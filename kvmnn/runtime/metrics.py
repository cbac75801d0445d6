"""Figures of a run: bytes and ratios (lossy, lossless, total), latencies, and the engine's names for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSY, compute_ratio, pluralize
from ..files.schema import Record, json_key
from .config import ENGINE_CODEC, is_lossy_codec


@dataclass(frozen=True)
class CompressionRatios:
    """The bytes of one run, and the ratios computed from them."""

    #: Bytes of all rows ever appended.
    appended_bytes: int
    #: Bytes of the rows that were not evicted.
    live_bytes: int
    #: Bytes that store them now: hot rows, frames, decoded copies and spare capacity.
    resident_bytes: int
    #: Whether the codec rounds: nothing is lossless then, whether or not it encoded anything so far.
    is_lossy: bool = False
    #: Whether it encoded anything.
    has_encoded: bool = True

    def to_metrics(self) -> dict[str, Any]:
        """Return the fields of `RuntimeMetrics`."""
        total_ratio = _compute_byte_ratio(self.appended_bytes, self.resident_bytes)
        return {
            "lossy_ratio": total_ratio
            if self.is_lossy and self.has_encoded
            else _compute_byte_ratio(self.appended_bytes, self.live_bytes),
            "lossless_ratio": None if self.is_lossy else _compute_byte_ratio(self.live_bytes, self.resident_bytes),
            "total_ratio": total_ratio,
            "held_bytes": self.resident_bytes,
        }


def compute_float32_ratio(raw_bytes: int, compressed_bytes: int) -> float:
    """Compute a ratio in float32, as the engine stores it; 1 if nothing was encoded."""
    return float(np.float32(raw_bytes / compressed_bytes)) if compressed_bytes else 1.0


def _compute_byte_ratio(bytes_before: int, bytes_after: int) -> float:
    return bytes_before / bytes_after if bytes_after else 1.0


_BUCKETS_PER_OCTAVE = 8
_NUM_BUCKETS = 64 * _BUCKETS_PER_OCTAVE


@dataclass(frozen=True, kw_only=True)
class LatencySummary(Record):
    """Durations in microseconds; percentiles are exact to 1/8 of an octave (9 %), and never below the true ones."""

    count: float
    total_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float


class LatencyHistogram:
    """A histogram of durations whose buckets grow by an eighth of an octave; `total` counts them as well."""

    def __init__(self, total: LatencyHistogram | None = None) -> None:
        self._total = total
        self.reset()

    def reset(self) -> None:
        """Clear all durations."""
        self._buckets: dict[int, int] = {}
        self.count = self.total_ns = self.max_ns = 0

    def add(self, nanoseconds: int) -> None:
        """Add a duration."""
        self.count += 1
        self.total_ns += nanoseconds
        self.max_ns = max(self.max_ns, nanoseconds)
        bucket = _find_bucket(nanoseconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        if self._total is not None:
            self._total.add(nanoseconds)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Record the duration of a ``with`` block."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(time.perf_counter_ns() - start_ns)

    def compute_percentile_us(self, fraction: float) -> float:
        """Return the duration in microseconds that a `fraction` of all durations do not exceed; 0 if there is none."""
        target_count, cumulative_count = fraction * self.count, 0
        for bucket in sorted(self._buckets):
            cumulative_count += self._buckets[bucket]
            if cumulative_count >= target_count:
                return min(_get_bucket_max_ns(bucket), self.max_ns) / 1e3
        return 0.0

    def summarize(self) -> LatencySummary:
        """Return the current figures."""
        return LatencySummary(
            count=self.count,
            total_us=self.total_ns / 1e3,
            p50_us=self.compute_percentile_us(0.50),
            p95_us=self.compute_percentile_us(0.95),
            p99_us=self.compute_percentile_us(0.99),
            max_us=self.max_ns / 1e3,
        )


def _find_bucket(nanoseconds: int) -> int:
    """Return the number of a duration's bucket: its leading bits."""
    if nanoseconds < _BUCKETS_PER_OCTAVE:
        return max(0, nanoseconds)
    shift = nanoseconds.bit_length() - _BUCKETS_PER_OCTAVE.bit_length()
    return min(_NUM_BUCKETS, (shift + 1) * _BUCKETS_PER_OCTAVE + (nanoseconds >> shift) - _BUCKETS_PER_OCTAVE)


def _get_bucket_max_ns(bucket: int) -> int:
    """Return the longest duration of a bucket."""
    if bucket < _BUCKETS_PER_OCTAVE:
        return bucket
    shift, mantissa = divmod(bucket, _BUCKETS_PER_OCTAVE)
    return ((mantissa + _BUCKETS_PER_OCTAVE + 1) << (shift - 1)) - 1


MEBIBYTE = 1 << 20
_NO_VALUE = "-"
"""A figure of something that did not happen."""


class OperationLatencies:
    """The durations of the measured operations; those of a layer are also counted in `total`."""

    def __init__(self, total: OperationLatencies | None = None) -> None:
        self.compress: LatencyHistogram = LatencyHistogram(total.compress if total else None)
        self.decompress: LatencyHistogram = LatencyHistogram(total.decompress if total else None)
        self.wait: LatencyHistogram = LatencyHistogram(total.wait if total else None)
        self.verify: LatencyHistogram = LatencyHistogram(total.verify if total else None)

    def reset(self) -> None:
        """Clear all durations."""
        for histogram in vars(self).values():
            histogram.reset()

    def summarize(self) -> dict[str, Any]:
        """Return the summaries by their names in metrics."""
        return {name: histogram.summarize() for name, histogram in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class RuntimeLayerMetrics(Record):
    """Figures of one layer since the request began.

    Attributes
    ----------
    raw_bytes, compressed_bytes
        Encoded so far; a block that does not gain counts with its raw size in both.
    stored_raw_bytes, stored_bytes
        Raw size and frame size of the blocks that are stored as frames now.
    held_bytes
        Bytes of all current rows and frames, spare capacity included.
    compress, decompress, wait, verify
        Percentiles of single operations on this layer's blocks; the last is the check before rows are dropped, and wait
        the one for a restore that was still under way.
    """

    layer: int
    tokens: int = 0
    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress_us: int = 0
    decompress_us: int = 0
    updates: int = 0
    fallbacks: int = 0
    num_backpressure_skips: int = field(default=0, metadata={"key": "skips"})
    blocks: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    held_bytes: int = 0
    compress: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    decompress: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    wait: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    verify: LatencySummary = field(default_factory=LatencyHistogram().summarize)

    def __str__(self) -> str:
        share = f"{compute_ratio(self.raw_bytes, self.compressed_bytes):.3f}" if self.raw_bytes else _NO_VALUE
        sizes = f"{self.blocks:>6,} {self.raw_bytes:>12,} {self.compressed_bytes:>12,} {share:>7}"
        return f"{self.layer:>5} {self.tokens:>8,} {sizes} {self.fallbacks:>9,}"


@dataclass(frozen=True, kw_only=True)
class RuntimeMetrics(Record):
    """Figures of all layers; the engine's fields keep its names, times are kvmnn's.

    Attributes
    ----------
    h2o_lossless_ratio
        Raw over compressed bytes of everything encoded, rounded to float32; None of a codec that is LOSSY.
    h2o_codec_us
        Duration of the last encoding.
    h2o_lossless_queue_depth_peak
        Most encodings that were open at one time, which max_queue bounds. Behaviour "engine" counts blocks in the list
        of a layer as well, as the engine does.
    h2o_lossless_async_queue_peak
        Most encodings that were open on threads at one time.
    h2o_lossless_async_wait_us
        Time that calls were blocked by open encodings.
    h2o_keep_ratio, h2o_lossy_ratio
        Figures of the eviction planner (docs/h2o.md): one event, not a mean.
    lossy_ratio, lossless_ratio, total_ratio
        Of this run: bytes of all tokens ever appended over those that are left; those over the bytes that contain them,
        hot rows and room to grow included; and the product. Where nothing is stored, the last two tell of room alone:
        the tables have no such figure then, and JSON has null. Of a codec that is LOSSY the second is
        None, and the first the product where anything was encoded.
    held_bytes
        Bytes of all current rows, frames and decoded copies, spare capacity included.
    compress, decompress, wait, verify
        Percentiles of single operations; verify is the check before rows are dropped.
    restores_ahead, restores_late
        Blocks that a thread had decoded before they were needed, and blocks that it was still decoding then.
    waiting_blocks_peak
        Behaviour "sound" only: most cold blocks of all layers that waited for a place in the queue at one time.
    mode
        Mode of the runtime: only ``"store"`` stores anything.
    codec
        Codec of the runtime.
    layers
        One entry for each layer.
    """

    h2o_lossless_raw_bytes: int = 0
    h2o_lossless_compressed_bytes: int = 0
    h2o_lossless_decompressed_bytes: int = 0
    h2o_lossless_compress_us: int = 0
    h2o_lossless_decompress_us: int = 0
    h2o_lossless_ratio: float | None = 1.0
    h2o_lossless_fallback_count: int = 0
    h2o_lossless_backpressure_skip_count: int = 0
    h2o_lossless_queue_depth_peak: int = 0
    h2o_lossless_async_queue_peak: int = 0
    h2o_lossless_async_wait_us: int = 0
    h2o_lossless_decode_cache_hit: int = 0
    h2o_lossless_decode_cache_miss: int = 0
    h2o_codec_us: int = 0
    h2o_keep_ratio: float = 1.0
    h2o_lossy_ratio: float = 1.0
    h2o_total_evict_tokens: int = 0
    lossy_ratio: float = 1.0
    lossless_ratio: float | None = 1.0
    total_ratio: float | None = 1.0
    held_bytes: int = 0
    compress: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    decompress: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    wait: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    verify: LatencySummary = field(default_factory=LatencyHistogram().summarize)
    restores_ahead: int = 0
    restores_late: int = 0
    waiting_blocks_peak: int = 0
    mode: str = "store"
    codec: str = ENGINE_CODEC
    layers: tuple[RuntimeLayerMetrics, ...] = ()

    @property
    @json_key(before="layers")
    def is_lossy(self) -> bool:
        """Return whether the codec rounds what it encodes, so that no ratio is lossless."""
        return is_lossy_codec(self.codec)

    def to_dict(self) -> dict[str, Any]:
        """Return names and figures; percentiles and layers as objects, None for a ratio without stored bytes."""
        # computed: the engine's columns have 1.0 where nothing was stored, and JSON has null
        document = super().to_dict()
        return document if self.has_stored else document | {"lossless_ratio": None, "total_ratio": None}

    @property
    def encoded_ratio(self) -> float | None:
        """Raw over compressed bytes of everything encoded, by whatever codec; None if nothing was."""
        compressed_bytes = self.h2o_lossless_compressed_bytes
        return self.h2o_lossless_raw_bytes / compressed_bytes if compressed_bytes else None

    @property
    def has_stored(self) -> bool:
        """Return whether any frames replaced their rows."""
        return self.mode == "store" and bool(self.h2o_lossless_raw_bytes)

    @property
    def _reported_lossy_ratio(self) -> float:
        """The planner's ratio, as the engine reports it; of a codec that is LOSSY that of the cache."""
        return self.lossy_ratio if self.is_lossy else self.h2o_lossy_ratio

    def to_bench_columns(self) -> dict[str, float | int | None]:
        """Return the columns that the engine's ``llm_bench`` prints; of a codec that is LOSSY as `to_gate_values`."""
        return {
            "h2o_keep": self.h2o_keep_ratio,
            "h2o_lossy": self._reported_lossy_ratio,
            "h2o_lossless": self.h2o_lossless_ratio,
            "h2o_codec_us": self.h2o_codec_us,
            "h2o_lossless_raw_mb": self.h2o_lossless_raw_bytes / MEBIBYTE,
            "h2o_lossless_comp_mb": self.h2o_lossless_compressed_bytes / MEBIBYTE,
            "h2o_lossless_comp_us": self.h2o_lossless_compress_us,
            "h2o_lossless_decomp_us": self.h2o_lossless_decompress_us,
            "h2o_lossless_queue_peak": self.h2o_lossless_queue_depth_peak,
            "h2o_lossless_fallback": self.h2o_lossless_fallback_count,
            "h2o_lossless_backpressure_skip": self.h2o_lossless_backpressure_skip_count,
            "h2o_lossless_async_queue_peak": self.h2o_lossless_async_queue_peak,
            "h2o_lossless_async_wait_us": self.h2o_lossless_async_wait_us,
            "h2o_lossless_decode_cache_hit": self.h2o_lossless_decode_cache_hit,
            "h2o_lossless_decode_cache_miss": self.h2o_lossless_decode_cache_miss,
        }

    def to_gate_values(
        self,
        *,
        tokens_per_second: float | None = None,
        baseline_tokens_per_second: float | None = None,
        wait_limit_us: float | None = None,
        consistent: bool | None = None,
    ) -> dict[str, float | int | bool | None]:
        """Return the figures of this run under the names in the MNN fork's reports.

        Those reports take ``lossless_selected_value`` from a simulation over dumps and never compare K and V; here both
        are of this run.

        Parameters
        ----------
        tokens_per_second, baseline_tokens_per_second
            Decode speed of a model with the runtime and without it, which the caller measures.
        wait_limit_us
            Microseconds that waiting may take.
        consistent
            Whether everything that attention read was compared and correct (`ReplayResult.wrong_calls`).

        Returns
        -------
        dict
            None for what follows from something that was not given. Of a codec that is LOSSY the lossless value is
            None, and lossy and total are bytes of all tokens over those held.
        """
        drop = None
        if tokens_per_second is not None and baseline_tokens_per_second:
            drop = (baseline_tokens_per_second - tokens_per_second) / baseline_tokens_per_second
        headroom = None if wait_limit_us is None else wait_limit_us - self.h2o_lossless_async_wait_us
        return {
            "lossy_best": self._reported_lossy_ratio,
            "lossless_selected_value": self.h2o_lossless_ratio,
            "decode_gate_tps": tokens_per_second,
            "decode_drop_ratio": drop,
            "kv_content_consistency_pass": consistent,
            "runtime_decomp_best_us": self.h2o_lossless_decompress_us,
            "runtime_async_wait_headroom_us": headroom,
            "runtime_fallback_best": self.h2o_lossless_fallback_count,
            "runtime_decode_cache_hit_best": self.h2o_lossless_decode_cache_hit,
            "runtime_queue_peak_best": self.h2o_lossless_queue_depth_peak,
            "candidate_runtime_total_ratio_avg": self._reported_lossy_ratio * (self.h2o_lossless_ratio or 1.0),
        }

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def format_lines(self) -> list[str]:
        """Format a table of the layers, followed by sums and percentiles."""
        rows = [f"{'layer':>5} {'tokens':>8} {'blocks':>6} {'raw bytes':>12} {'compressed':>12} {'ratio':>7} fallbacks"]
        rows += [str(layer) for layer in self.layers]
        rows.append(self._format_ratios())
        waiting_text = f" ({self.waiting_blocks_peak:,} more waited)" if self.waiting_blocks_peak else ""
        rows.append(
            f"{pluralize(self.h2o_lossless_fallback_count, 'fallback')}, "
            f"{pluralize(self.h2o_lossless_backpressure_skip_count, 'skip')}, queue peak "
            f"{self.h2o_lossless_queue_depth_peak:,}{waiting_text}, "
            f"cache {self.h2o_lossless_decode_cache_hit:,} hits and {self.h2o_lossless_decode_cache_miss:,} misses"
        )
        for name in ("compress", "verify", "decompress", "wait"):
            latency: LatencySummary = getattr(self, name)
            percentiles = (("p50", latency.p50_us), ("p95", latency.p95_us), ("p99", latency.p99_us))
            texts = (f"{label} {f'{us:,.1f}' if latency.count else _NO_VALUE:>10} us" for label, us in percentiles)
            rows.append(f"{name:<10} {latency.count:>8,} x, {', '.join(texts)}")
        return rows

    def _format_ratios(self) -> str:
        if self.has_stored:
            lossless_text = _NO_VALUE if self.lossless_ratio is None else f"{self.lossless_ratio:.3f}"
            return (
                f"lossless {lossless_text}, lossy {self.lossy_ratio:.3f}, total {self.total_ratio:.3f} "
                "(raw bytes over bytes held, of this run; those include hot tokens and room to grow)"
                f"{f'; codec {self.codec} is {LOSSY}' if self.is_lossy else ''}"
            )
        prefix = f"lossless {_NO_VALUE}, lossy {self.lossy_ratio:.3f}, total {_NO_VALUE}"
        if not self.h2o_lossless_raw_bytes:
            return f"{prefix}: nothing was compressed"
        return (
            f"{prefix}: mode {self.mode} measures and stores nothing; of what it compressed "
            f"{self.encoded_ratio or 1.0:.3f}"
        )


@dataclass(frozen=True, kw_only=True)
class ReplayPoint(Record):
    """Figures after a step, sums over the layers.

    Attributes
    ----------
    appended_bytes, live_bytes, held_bytes
        Bytes of all rows so far; of those not evicted; and of the rows, frames and decoded copies that store these.
    ratio
        Raw over compressed bytes of everything encoded so far; None before the first block.
    step_us
        Duration of the step, without attention and model.
    """

    step: int
    tokens: int
    appended_bytes: int
    live_bytes: int
    held_bytes: int
    ratio: float | None
    queue_depth_peak: int
    step_us: float

    def __str__(self) -> str:
        share = "-" if self.ratio is None else f"{self.ratio:.3f}"
        sizes = f"{self.live_bytes:>13,} {self.held_bytes:>13,} {share:>7}"
        return f"{self.step:>6,} {self.tokens:>8,} {sizes} {self.queue_depth_peak:>6,} {self.step_us:>9,.0f}"
