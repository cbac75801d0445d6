"""What the lossless runtime did to the cache of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from ..files.records import Record


@dataclass(frozen=True, kw_only=True)
class RuntimeLayerStats(Record):
    """One layer of the model, under the names of `kvmnn.runtime.LayerMetrics`."""

    layer: int
    tokens: int = 0
    raw_bytes: int = 0
    compressed_bytes: int = 0
    blocks: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    held_bytes: int = 0
    fallbacks: int = 0
    skips: int = 0

    @property
    def ratio(self) -> float | None:
        """Raw over compressed bytes of all that was encoded; None where nothing was."""
        return self.raw_bytes / self.compressed_bytes if self.compressed_bytes else None


@dataclass(frozen=True, kw_only=True)
class RuntimeStats(Record):
    """All layers, of one run; what the engine has, under its names.

    Attributes
    ----------
    mode
        ``"probe"``, ``"full"`` or ``"store"``.
    appended_bytes, live_bytes, held_bytes
        K and V of all tokens that were seen; of those that the policy left; and what holds these between two steps:
        rows, frames, and room to grow.
    lossy_ratio, lossless_ratio, total_ratio
        The first over the second, the second over the third, the first over the third (JSON only; they follow).
    """

    mode: Literal["probe", "full", "store"]
    appended_bytes: int
    live_bytes: int
    held_bytes: int
    h2o_lossless_raw_bytes: int = 0
    h2o_lossless_compressed_bytes: int = 0
    h2o_lossless_decompressed_bytes: int = 0
    h2o_lossless_compress_us: int = 0
    h2o_lossless_decompress_us: int = 0
    h2o_lossless_fallback_count: int = 0
    h2o_lossless_backpressure_skip_count: int = 0
    layers: tuple[RuntimeLayerStats, ...] = ()

    @property
    def lossy_ratio(self) -> float | None:
        """Bytes of all tokens over bytes of those that are left."""
        return self.appended_bytes / self.live_bytes if self.live_bytes else None

    @property
    def lossless_ratio(self) -> float | None:
        """Bytes of the tokens that are left over the bytes that hold them."""
        return self.live_bytes / self.held_bytes if self.held_bytes else None

    @property
    def total_ratio(self) -> float | None:
        """Bytes of all tokens over the bytes that are held."""
        return self.appended_bytes / self.held_bytes if self.held_bytes else None

    @property
    def encoded_ratio(self) -> float | None:
        """Raw over compressed bytes of all that was encoded (the engine's h2o_lossless_ratio)."""
        compressed_bytes = self.h2o_lossless_compressed_bytes
        return self.h2o_lossless_raw_bytes / compressed_bytes if compressed_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        document = super().to_dict()
        layers = document.pop("layers")
        ratios = {"lossy_ratio": self.lossy_ratio, "lossless_ratio": self.lossless_ratio}
        ratios |= {"total_ratio": self.total_ratio, "h2o_lossless_ratio": self.encoded_ratio}
        return {**document, **ratios, "layers": layers}


T = TypeVar("T", RuntimeLayerStats, RuntimeStats)


def merge_runtime_stats(all_stats: Iterable[RuntimeStats]) -> RuntimeStats | None:
    """The figures of several texts, added up; None without any."""
    merged: RuntimeStats | None = None
    for stats in all_stats:
        layers = stats.layers
        if merged is not None:
            layers = tuple(_add_int_fields(old, new) for old, new in zip(merged.layers, stats.layers, strict=True))
            stats = _add_int_fields(merged, stats)
        merged = replace(stats, layers=layers)
    return merged


def _add_int_fields(first: T, second: T) -> T:
    names = [entry.name for entry in fields(first) if entry.type == "int" and entry.name != "layer"]
    return replace(second, **{name: getattr(first, name) + getattr(second, name) for name in names})
