"""What a replay found."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..text import LOSSLESS, pluralize
from . import replay_plots
from .behaviours import Behaviour
from .metrics import RuntimeMetrics
from .replay_point import ReplayPoint


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A replay.

    Attributes
    ----------
    prompt, tokens
        Tokens of the prefill, and of the history.
    wrong_calls
        Calls at which attention would have read other bytes than were appended; of all calls of the first and the last
        decode step and the prefill, or with ``compare="all"`` of every call.
    compared_calls
        How many were compared.
    seconds
        Of the runtime's own work.
    """

    behaviour: Behaviour
    layers: int
    prompt: int
    tokens: int
    compared_calls: int
    wrong_calls: int
    seconds: float
    metrics: RuntimeMetrics
    points: tuple[ReplayPoint, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        document: dict[str, Any] = {name: getattr(self, name) for name in _JSON_FIELDS}
        document["not_measured"] = _NOT_COMPRESSED_REASON if self.is_idle else None
        return document | {"metrics": self.metrics.to_dict(), "points": [asdict(point) for point in self.points]}

    def plot(self, directory: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
        """Draw memory, ratio, queue and latency over the steps; `replay_plots.write_all` says how."""
        return replay_plots.write_plots(self.points, directory, overwrite)

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def format_lines(self) -> list[str]:
        """Tables over steps and layers, and the verdict."""
        steps = self.tokens - self.prompt
        head = f"{self.layers} layers, {pluralize(self.tokens, 'token')}: {self.prompt:,} as prompt, {steps:,} as steps"
        table = [f"{'step':>6} {'tokens':>8} {'live bytes':>13} {'held bytes':>13} {'ratio':>7} {'queue':>6} {'us':>9}"]
        shown_points = list(self.points[:: max(1, len(self.points) // 10)])
        if self.points and shown_points[-1] is not self.points[-1]:
            shown_points.append(self.points[-1])
        table += [str(point) for point in shown_points]
        table.append(_COLUMN_LEGEND)
        return [head, *table, *self.metrics.format_lines(), self._format_verdict()]

    @property
    def is_idle(self) -> bool:
        """Whether nothing was compressed, so that no lossless ratio was measured and equal bytes show nothing."""
        return not self.metrics.h2o_lossless_raw_bytes

    @property
    def has_passed(self) -> bool:
        """Whether attention read the right bytes, and something was compressed or evicted."""
        return not self.wrong_calls and (not self.is_idle or self.metrics.lossy_ratio > 1)

    @property
    def num_calls(self) -> int:
        """Calls of all layers: the prefill and each decode step."""
        return self.layers * (1 + self.tokens - self.prompt)

    def _format_verdict(self) -> str:
        if self.wrong_calls:
            return (
                f"WRONG: attention reads other bytes than were appended at {self.wrong_calls:,} of "
                f"{pluralize(self.compared_calls, 'call')} compared"
            )
        if self.is_idle:
            return f"NOT MEASURED: {_NOT_COMPRESSED_REASON}"
        if not (self.is_idle or self.metrics.has_stored):
            equal_text = (
                f"equal in the {self.compared_calls:,} of {pluralize(self.num_calls, 'call')} that were compared"
            )
            return f"{equal_text}, as mode {self.metrics.mode} stores nothing: every row is held as it was appended"
        if self.compared_calls < self.num_calls:
            return f"equal in the {self.compared_calls:,} of {pluralize(self.num_calls, 'call')} that were compared"
        return f"{LOSSLESS}: {pluralize(self.num_calls, 'call')} compared, every byte that attention reads is right"


_COLUMN_LEGEND = (
    "  held bytes: rows that are not compressed, frames, decoded copies, and room to grow; ratio, here and of each "
    "layer: raw over compressed bytes of what was encoded so far, and nothing else; queue: most encodings that were "
    "open at one time so far; us: time of the step in the runtime"
)

_NOT_COMPRESSED_REASON = (
    "nothing was compressed: the configuration does not enable it (kv_lossless_enable, _runtime_enable, _codec, "
    "_scope), or no block became cold (kv_h2o_trigger_min_tokens, kv_lossless_hot_recent_tokens, _block_tokens)"
)

_JSON_FIELDS = ("behaviour", "layers", "prompt", "tokens", "compared_calls", "wrong_calls", "seconds")
