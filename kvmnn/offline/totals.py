"""Sums of sizes: over the streams of a byte lane, over the lanes of a layer, over layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..dtypes import PARTS, Part
from .options import FP32_LANES, LANE_HALVES, LANES, LaneHalf, format_lane
from .simulated_sizes import StreamSizeEstimate
from .stored_sizes import StoredSize


@dataclass
class LaneSizeStats:
    """One byte lane of a layer, or of all layers: sums over its streams."""

    raw_bytes: int = 0
    simulated_bytes: int = 0
    limit_bytes: float = 0.0
    modes: Counter[str] = field(default_factory=Counter)

    def add_stream(self, size: StreamSizeEstimate) -> None:
        """Count one stream in."""
        self.raw_bytes += size.raw_bytes
        self.simulated_bytes += size.bytes
        self.limit_bytes += size.limit_bytes
        for name, count in size.modes.items():
            self.modes[name] += count


@dataclass
class Fp32SizeStats:
    """fp32 words of a layer, or of all of them, in four byte lanes.

    Parameters
    ----------
    lanes
        By part and number, the lowest byte first.
    extra_bytes
        By part: framing and tables.
    """

    lanes: dict[tuple[Part, int], LaneSizeStats] = field(
        default_factory=lambda: {(part, lane): LaneSizeStats() for part in PARTS for lane in FP32_LANES}
    )
    extra_bytes: Counter[Part] = field(default_factory=Counter)

    def sum_lanes(self, parts: Sequence[Part] = PARTS) -> LaneSizeStats:
        """The lanes of `parts` together, framing and tables included."""
        lanes = [lane for (part, _), lane in self.lanes.items() if part in parts]
        return LaneSizeStats(
            raw_bytes=sum(lane.raw_bytes for lane in lanes),
            simulated_bytes=sum(lane.simulated_bytes for lane in lanes) + sum(self.extra_bytes[part] for part in parts),
            limit_bytes=sum(lane.limit_bytes for lane in lanes),
        )


@dataclass
class AggregateSizeStats:
    """A layer, or all of them.

    Parameters
    ----------
    tokens
        Of all that was measured of the layer; of all layers, their sum.
    lanes
        Of 16-bit words, by name: ``"k_hi"``, ``"k_lo"``, ``"v_hi"``, ``"v_lo"``.
    extra_bytes
        By part: framing and tables, which belong to the simulated size.
    stored_sizes
        By part: frames that were made and decoded, where that was asked for.
    fp32
        fp32 words in four byte lanes; None for no such words.
    is_fp32_counted
        Whether these belong to the sums. They do not where fp32 was rounded and the 16-bit words are measured.
    """

    tokens: int = 0
    lanes: dict[str, LaneSizeStats] = field(default_factory=lambda: {lane: LaneSizeStats() for lane in LANES})
    extra_bytes: Counter[Part] = field(default_factory=Counter)
    stored_sizes: dict[Part, StoredSize] = field(default_factory=dict)
    fp32: Fp32SizeStats | None = None
    is_fp32_counted: bool = False

    def raw_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Bytes of what could be compressed, as it was measured."""
        return sum(lane.raw_bytes for lane in self.list_counted_lanes(parts))

    def simulated_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Bytes that the simulated format would take."""
        return sum(lane.simulated_bytes for lane in self.list_counted_lanes(parts)) + sum(
            self.extra_bytes[part] for part in parts
        )

    def limit_bytes(self, parts: Sequence[Part] = PARTS) -> float:
        """What the order-0 entropy of the byte lanes amounts to."""
        return sum(lane.limit_bytes for lane in self.list_counted_lanes(parts))

    def stored_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Bytes of frames that were made and decoded."""
        return sum(self.stored_sizes[part].bytes for part in parts if part in self.stored_sizes)

    def stored_frames(self, parts: Sequence[Part] = PARTS) -> int:
        """How many these frames are."""
        return sum(self.stored_sizes[part].frames for part in parts if part in self.stored_sizes)

    def list_counted_lanes(self, parts: Sequence[Part]) -> list[LaneSizeStats]:
        """The lanes of `parts` that belong to the sums."""
        lanes = [self.lanes[format_lane(part, half)] for part in parts for half in LANE_HALVES]
        return lanes + [self.fp32_lanes[part, lane] for part in parts for lane in FP32_LANES if self.fp32_lanes]

    @property
    def fp32_lanes(self) -> dict[tuple[Part, int], LaneSizeStats]:
        """The lanes of fp32 words that belong to the sums, by part and number; none where there are no such words."""
        return self.fp32.lanes if self.fp32 is not None and self.is_fp32_counted else {}

    def count_modes(self, part: Part, half: LaneHalf) -> dict[str, int]:
        """How many blocks of the upper or lower bytes took which predictor; of fp32 the two upper or lower lanes."""
        mode_counts = Counter(self.lanes[format_lane(part, half)].modes)
        for lane in FP32_LANES[2:] if half == "hi" else FP32_LANES[:2]:
            if self.fp32_lanes:
                for name, number in self.fp32_lanes[part, lane].modes.items():
                    mode_counts[name] += number
        return dict(mode_counts)
