"""Sizes by layer, part and byte lane, each with its byte entropy, and which numbers are simulated or stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import PART_LETTERS, PARTS, Part
from ..text import count, ratio, span
from .options import FP32_LANES, HALVES, lane_of
from .stored_sizes import StoredSize
from .totals import FP32Totals, LaneTotal, Totals

SIMULATED = "simulated: zstd frames were made and their lengths added up; no such file exists"
STORED = (
    "STORED: frames as MNN makes them were encoded, decoded and compared: LOSSLESS for the words measured, "
    "[token, kv_head, head_dim] as dumps have them"
)
FP32 = "fp32 words as they are, nothing rounded, in four byte lanes, the lowest byte first"
LIMIT = (
    "order-0 entropy of the byte lanes, the bound of coders that code each byte by its frequency alone; predictors and "
    "matches go beyond it, so it is no limit of codecs"
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a layer, a part or a lane; None where limits were not computed or no frames were made."""

    raw_bytes: int
    simulated_bytes: int
    limit_bytes: float | None = None
    stored: StoredSize | None = None

    @property
    def limit_ratio(self) -> float | None:
        """Raw bytes over the limit; None without a limit above 0."""
        return self.raw_bytes / self.limit_bytes if self.limit_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {
            "raw_bytes": self.raw_bytes,
            "simulated_bytes": self.simulated_bytes,
            "simulated_ratio": ratio(self.raw_bytes, self.simulated_bytes),
        }
        if self.limit_bytes is not None:
            found |= {"limit_bytes": self.limit_bytes, "limit_ratio": self.limit_ratio}  # since the first version
            found |= {"byte_entropy_bytes": self.limit_bytes, "byte_entropy_ratio": self.limit_ratio}
        if self.stored is not None:
            found |= {
                "stored_bytes": self.stored.bytes,
                "stored_ratio": ratio(self.raw_bytes, self.stored.bytes),
                "stored_frames": self.stored.frames,
                "verified": True,
            }
        return found

    def line(self, label: str) -> str:
        """A line of the table."""
        simulated = ratio(self.raw_bytes, self.simulated_bytes)
        line = f"{label:<9} {self.raw_bytes:>13,} {self.simulated_bytes:>13,} {simulated:>6.4f}"
        if self.limit_bytes is not None:
            line += f" {'none' if self.limit_ratio is None else f'{self.limit_ratio:.4f}':>13}"
        if self.stored is not None:
            line += f" {self.stored.bytes:>13,} {ratio(self.raw_bytes, self.stored.bytes):>6.4f}"
        return line


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """All sizes.

    Attributes
    ----------
    overall, layers
        Of everything that was measured, and by layer number.
    found_layers
        How many layers the inputs have, measured or not.
    has_limits
        Whether the entropy of bytes was computed.
    is_stored
        Whether frames were made too.
    """

    overall: Totals
    layers: dict[int, Totals]
    found_layers: int
    has_limits: bool
    is_stored: bool

    def of(self, totals: Totals, parts: Sequence[Part] = PARTS) -> Sizes:
        """The sizes of a layer, or of one part of it."""
        return Sizes(
            raw_bytes=totals.raw_bytes(parts),
            simulated_bytes=totals.simulated_bytes(parts),
            limit_bytes=totals.limit_bytes(parts) if self.has_limits else None,
            stored=StoredSize(totals.stored_bytes(parts), totals.stored_frames(parts)) if self.is_stored else None,
        )

    def of_lane(self, lane: LaneTotal) -> Sizes:
        """The sizes of a lane, for which no frames exist."""
        limit = lane.limit_bytes if self.has_limits else None
        return Sizes(raw_bytes=lane.raw_bytes, simulated_bytes=lane.simulated_bytes, limit_bytes=limit)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        meaning = {"simulated": SIMULATED}
        if self.has_limits:
            meaning["limit"] = LIMIT
        if self.is_stored:
            meaning["stored"] = STORED
        tokens = [totals.tokens for totals in self.layers.values()]
        fp32 = {"fp32": self._fp32_document()} if self.overall.fp32 else {}
        return {
            "meaning": meaning,
            "found_layers": self.found_layers,
            "overall": {
                "layers": len(self.layers),
                "least_tokens": min(tokens, default=0),
                "most_tokens": max(tokens, default=0),
                **self._document(self.overall),
            },
            "layers": {
                str(layer): {"tokens": totals.tokens, **self._document(totals)} for layer, totals in self.layers.items()
            },
            **fp32,
        }

    def _document(self, totals: Totals) -> dict[str, Any]:
        return self.of(totals).to_dict() | {PART_LETTERS[part]: self._part(totals, part) for part in PARTS}

    def _part(self, totals: Totals, part: Part) -> dict[str, Any]:
        lanes: dict[str, LaneTotal] = {half: totals.lanes[lane_of(part, half)] for half in HALVES}
        wide = {str(number): lane for (of, number), lane in totals.fp32_lanes.items() if of == part and lane.raw_bytes}
        lanes |= wide  # "hi" and "lo" are there for every part, as programs have read them since the first version
        found = {name: {**self.of_lane(lane).to_dict(), "modes": dict(lane.modes)} for name, lane in lanes.items()}
        sizes = self.of(totals, [part]).to_dict()
        return {**sizes, "framing_bytes": totals.extra_bytes[part], "lanes": found}

    def _fp32_document(self) -> dict[str, Any]:
        """The same of fp32 words: overall, and of each layer that has such."""
        layers = {str(layer): self._fp32(totals.fp32) for layer, totals in self.layers.items() if totals.fp32}
        overall = {"layers": len(layers), **self._fp32(self.overall.fp32)}
        return {"meaning": FP32, "overall": overall, "layers": layers}

    def _fp32(self, totals: FP32Totals | None) -> dict[str, Any]:
        if totals is None:
            return {}
        found = self.of_lane(totals.sum()).to_dict()
        for part in PARTS:
            lanes = {lane: totals.lanes[part, lane] for lane in FP32_LANES}
            found[PART_LETTERS[part]] = {
                **self.of_lane(totals.sum([part])).to_dict(),
                "framing_bytes": totals.extra_bytes[part],
                "lanes": {
                    str(n): {**self.of_lane(lane).to_dict(), "modes": dict(lane.modes)} for n, lane in lanes.items()
                },
            }
        return found

    def _fp32_lines(self) -> list[str]:
        """Lines of fp32 words of which others are the measured ones, rounded to fp16."""
        lines: list[str] = []
        if self.overall.is_fp32_counted:
            return lines
        labelled = [*((f"layer {n}", totals.fp32) for n, totals in self.layers.items()), ("total", self.overall.fp32)]
        for label, totals in labelled:
            if totals is None:
                continue
            lines.append(self.of_lane(totals.sum()).line(f"{label} fp32"))
            for part in (part for part in PARTS if totals.sum([part]).raw_bytes):
                lines.append(self.of_lane(totals.sum([part])).line(f"  {PART_LETTERS[part].upper()}"))
                lines += [self.of_lane(totals.lanes[part, n]).line(f"    lane {n}") for n in FP32_LANES]
        return lines

    def __str__(self) -> str:
        header = f"{'':<9} {'raw bytes':>13} {'simulated':>13} {'ratio':>6}"
        header += f" {'byte entropy':>13}" if self.has_limits else ""
        header += f" {'STORED':>13} {'ratio':>6}" if self.is_stored else ""
        lines = [header]
        for label, totals in [*((f"layer {n}", t) for n, t in self.layers.items()), ("total", self.overall)]:
            lines.append(self.of(totals).line(label))
            for part in (part for part in PARTS if totals.raw_bytes([part])):
                lines.append(self.of(totals, [part]).line(f"  {PART_LETTERS[part].upper()}"))
                lanes: list[tuple[str, LaneTotal]] = [(half, totals.lanes[lane_of(part, half)]) for half in HALVES]
                lanes += [(f"lane {n}", totals.fp32_lanes[part, n]) for n in FP32_LANES if totals.fp32_lanes]
                lines += [self.of_lane(lane).line(f"    {name}") for name, lane in lanes if lane.raw_bytes]
        lines += self._fp32_lines()
        lines += ["", f"total: {self._measured()}", SIMULATED]
        if self.has_limits:
            lines.append(f"byte entropy: {LIMIT}")
        if self.overall.fp32:
            layers = sum(totals.fp32 is not None for totals in self.layers.values())
            too = "" if self.overall.is_fp32_counted else "simulated too: "
            lines.append(f"fp32: {count(layers, 'layer')}, {too}{FP32}")
        return "\n".join([*lines, STORED] if self.is_stored else lines)

    def _measured(self) -> str:
        """Of how many layers and tokens the total is."""
        layers = count(self.found_layers, "layer")
        if len(self.layers) < self.found_layers:
            layers = f"{len(self.layers):,} of {layers}"
        tokens = sorted({totals.tokens for totals in self.layers.values()})
        return f"{layers}, {span(tokens)} tokens{' each' if len(self.layers) > 1 else ''}" if tokens else "nothing"
