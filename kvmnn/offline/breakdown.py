"""Sizes by layer, part and byte lane, each with its byte entropy, and which numbers are simulated or stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import PART_LETTERS, PARTS, Part
from ..text import compute_ratio, format_range, pluralize
from .options import FP32_LANES, LANE_HALVES, format_lane
from .stored_sizes import StoredSize
from .totals import AggregateSizeStats, Fp32SizeStats, LaneSizeStats

SIMULATED_MEANING = "simulated: zstd frames were made and their lengths added up; no such file exists"
STORED_MEANING = (
    "STORED: frames as MNN makes them were encoded, decoded and compared: LOSSLESS for the words measured, "
    "[token, kv_head, head_dim] as dumps have them"
)
FP32_MEANING = "fp32 words as they are, nothing rounded, in four byte lanes, the lowest byte first"
LIMIT_MEANING = (
    "order-0 entropy of the byte lanes, the bound of coders that code each byte by its frequency alone; predictors and "
    "matches go beyond it, so it is no limit of codecs"
)


@dataclass(frozen=True, kw_only=True)
class SizeEntry:
    """The sizes of a layer, a part or a lane; None where limits were not computed or no frames were made."""

    raw_bytes: int
    simulated_bytes: int
    limit_bytes: float | None = None
    stored_size: StoredSize | None = None

    @property
    def limit_ratio(self) -> float | None:
        """Raw bytes over the limit; None without a limit above 0."""
        return self.raw_bytes / self.limit_bytes if self.limit_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        document: dict[str, Any] = {
            "raw_bytes": self.raw_bytes,
            "simulated_bytes": self.simulated_bytes,
            "simulated_ratio": compute_ratio(self.raw_bytes, self.simulated_bytes),
        }
        if self.limit_bytes is not None:
            document |= {"limit_bytes": self.limit_bytes, "limit_ratio": self.limit_ratio}  # since the first version
            document |= {"byte_entropy_bytes": self.limit_bytes, "byte_entropy_ratio": self.limit_ratio}
        if self.stored_size is not None:
            document |= {
                "stored_bytes": self.stored_size.bytes,
                "stored_ratio": compute_ratio(self.raw_bytes, self.stored_size.bytes),
                "stored_frames": self.stored_size.frames,
                "verified": True,
            }
        return document

    def format_line(self, label: str) -> str:
        """A line of the table."""
        simulated_ratio = compute_ratio(self.raw_bytes, self.simulated_bytes)
        text = f"{label:<9} {self.raw_bytes:>13,} {self.simulated_bytes:>13,} {simulated_ratio:>6.4f}"
        if self.limit_bytes is not None:
            text += f" {'none' if self.limit_ratio is None else f'{self.limit_ratio:.4f}':>13}"
        if self.stored_size is not None:
            text += f" {self.stored_size.bytes:>13,} {compute_ratio(self.raw_bytes, self.stored_size.bytes):>6.4f}"
        return text


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """All sizes.

    Attributes
    ----------
    totals, totals_by_layer
        Of everything that was measured, and by layer number.
    num_layers
        How many layers the inputs have, measured or not.
    has_limits
        Whether the entropy of bytes was computed.
    is_stored
        Whether frames were made too.
    """

    totals: AggregateSizeStats
    totals_by_layer: dict[int, AggregateSizeStats]
    num_layers: int
    has_limits: bool
    is_stored: bool

    def build_entry(self, totals: AggregateSizeStats, parts: Sequence[Part] = PARTS) -> SizeEntry:
        """The sizes of a layer, or of one part of it."""
        return SizeEntry(
            raw_bytes=totals.raw_bytes(parts),
            simulated_bytes=totals.simulated_bytes(parts),
            limit_bytes=totals.limit_bytes(parts) if self.has_limits else None,
            stored_size=StoredSize(totals.stored_bytes(parts), totals.stored_frames(parts)) if self.is_stored else None,
        )

    def build_lane_entry(self, lane: LaneSizeStats) -> SizeEntry:
        """The sizes of a lane, for which no frames exist."""
        limit = lane.limit_bytes if self.has_limits else None
        return SizeEntry(raw_bytes=lane.raw_bytes, simulated_bytes=lane.simulated_bytes, limit_bytes=limit)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        meaning = {"simulated": SIMULATED_MEANING}
        if self.has_limits:
            meaning["limit"] = LIMIT_MEANING
        if self.is_stored:
            meaning["stored"] = STORED_MEANING
        layer_tokens = [totals.tokens for totals in self.totals_by_layer.values()]
        fp32_document = {"fp32": self._fp32_document()} if self.totals.fp32 else {}
        return {
            "meaning": meaning,
            "found_layers": self.num_layers,
            "overall": {
                "layers": len(self.totals_by_layer),
                "least_tokens": min(layer_tokens, default=0),
                "most_tokens": max(layer_tokens, default=0),
                **self._document(self.totals),
            },
            "layers": {
                str(layer): {"tokens": totals.tokens, **self._document(totals)}
                for layer, totals in self.totals_by_layer.items()
            },
            **fp32_document,
        }

    def _document(self, totals: AggregateSizeStats) -> dict[str, Any]:
        return self.build_entry(totals).to_dict() | {
            PART_LETTERS[part]: self._part_document(totals, part) for part in PARTS
        }

    def _part_document(self, totals: AggregateSizeStats, part: Part) -> dict[str, Any]:
        lanes: dict[str, LaneSizeStats] = {half: totals.lanes[format_lane(part, half)] for half in LANE_HALVES}
        wide_lanes = {
            str(number): lane
            for (lane_part, number), lane in totals.fp32_lanes.items()
            if lane_part == part and lane.raw_bytes
        }
        lanes |= (
            wide_lanes  # "hi" and "lo" are there for every part, as programs have read them since the first version
        )
        lane_documents = {
            name: {**self.build_lane_entry(lane).to_dict(), "modes": dict(lane.modes)} for name, lane in lanes.items()
        }
        sizes = self.build_entry(totals, [part]).to_dict()
        return {**sizes, "framing_bytes": totals.extra_bytes[part], "lanes": lane_documents}

    def _fp32_document(self) -> dict[str, Any]:
        """The same of fp32 words: overall, and of each layer that has such."""
        layers = {
            str(layer): self._fp32_totals_document(totals.fp32)
            for layer, totals in self.totals_by_layer.items()
            if totals.fp32
        }
        overall = {"layers": len(layers), **self._fp32_totals_document(self.totals.fp32)}
        return {"meaning": FP32_MEANING, "overall": overall, "layers": layers}

    def _fp32_totals_document(self, totals: Fp32SizeStats | None) -> dict[str, Any]:
        if totals is None:
            return {}
        document = self.build_lane_entry(totals.sum_lanes()).to_dict()
        for part in PARTS:
            lanes = {lane: totals.lanes[part, lane] for lane in FP32_LANES}
            document[PART_LETTERS[part]] = {
                **self.build_lane_entry(totals.sum_lanes([part])).to_dict(),
                "framing_bytes": totals.extra_bytes[part],
                "lanes": {
                    str(n): {**self.build_lane_entry(lane).to_dict(), "modes": dict(lane.modes)}
                    for n, lane in lanes.items()
                },
            }
        return document

    def _format_fp32_lines(self) -> list[str]:
        """Lines of fp32 words of which others are the measured ones, rounded to fp16."""
        lines: list[str] = []
        if self.totals.is_fp32_counted:
            return lines
        labels_and_totals = [
            *((f"layer {n}", totals.fp32) for n, totals in self.totals_by_layer.items()),
            ("total", self.totals.fp32),
        ]
        for label, totals in labels_and_totals:
            if totals is None:
                continue
            lines.append(self.build_lane_entry(totals.sum_lanes()).format_line(f"{label} fp32"))
            for part in (part for part in PARTS if totals.sum_lanes([part]).raw_bytes):
                lines.append(
                    self.build_lane_entry(totals.sum_lanes([part])).format_line(f"  {PART_LETTERS[part].upper()}")
                )
                lines += [self.build_lane_entry(totals.lanes[part, n]).format_line(f"    lane {n}") for n in FP32_LANES]
        return lines

    def __str__(self) -> str:
        header = f"{'':<9} {'raw bytes':>13} {'simulated':>13} {'ratio':>6}"
        header += f" {'byte entropy':>13}" if self.has_limits else ""
        header += f" {'STORED':>13} {'ratio':>6}" if self.is_stored else ""
        lines = [header]
        for label, totals in [*((f"layer {n}", t) for n, t in self.totals_by_layer.items()), ("total", self.totals)]:
            lines.append(self.build_entry(totals).format_line(label))
            for part in (part for part in PARTS if totals.raw_bytes([part])):
                lines.append(self.build_entry(totals, [part]).format_line(f"  {PART_LETTERS[part].upper()}"))
                lanes: list[tuple[str, LaneSizeStats]] = [
                    (half, totals.lanes[format_lane(part, half)]) for half in LANE_HALVES
                ]
                lanes += [(f"lane {n}", totals.fp32_lanes[part, n]) for n in FP32_LANES if totals.fp32_lanes]
                lines += [
                    self.build_lane_entry(lane).format_line(f"    {name}") for name, lane in lanes if lane.raw_bytes
                ]
        lines += self._format_fp32_lines()
        lines += ["", f"total: {self._describe_scope()}", SIMULATED_MEANING]
        if self.has_limits:
            lines.append(f"byte entropy: {LIMIT_MEANING}")
        if self.totals.fp32:
            layers = sum(totals.fp32 is not None for totals in self.totals_by_layer.values())
            simulated_text = "" if self.totals.is_fp32_counted else "simulated too: "
            lines.append(f"fp32: {pluralize(layers, 'layer')}, {simulated_text}{FP32_MEANING}")
        return "\n".join([*lines, STORED_MEANING] if self.is_stored else lines)

    def _describe_scope(self) -> str:
        """Of how many layers and tokens the total is."""
        layers = pluralize(self.num_layers, "layer")
        if len(self.totals_by_layer) < self.num_layers:
            layers = f"{len(self.totals_by_layer):,} of {layers}"
        tokens = sorted({totals.tokens for totals in self.totals_by_layer.values()})
        return (
            f"{layers}, {format_range(tokens)} tokens{' each' if len(self.totals_by_layer) > 1 else ''}"
            if tokens
            else "nothing"
        )
