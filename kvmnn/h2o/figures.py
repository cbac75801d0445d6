"""What the planner did to the layers of one text, under the engine's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..files.records import Record
from .layer_state import LayerCallResult, PlannerMetrics
from .planner import H2OPlanner


@dataclass(frozen=True, kw_only=True)
class PlannerStats(Record):
    """The figures of `kvmnn.h2o.Metrics`; those that the last plan wrote, and the tokens that all plans dropped.

    Attributes
    ----------
    h2o_lossy_ratio, h2o_keep_ratio
        Of the last plan that its floor did not cancel: one event, no mean.
    h2o_total_evict_tokens
        Tokens that plans dropped, all together.
    h2o_evict_us
        Microseconds that the last planning took, in kvmnn.
    """

    h2o_keep_ratio: float = 1.0
    h2o_lossy_ratio: float = 1.0
    h2o_target_keep_effective: float = 1.0
    h2o_floor_keep_by_recent_sink: float = 1.0
    h2o_block_quantized_keep: float = 1.0
    h2o_last_evict_tokens: int = 0
    h2o_total_evict_tokens: int = 0
    h2o_evict_us: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannerLayerStats(PlannerStats):
    """The figures of one layer, each of its own plans.

    Attributes
    ----------
    layer
        Its number.
    tokens_seen, tokens_kept
        Tokens of the text, and those that the layer holds.
    triggers
        Plans that were made, those that dropped nothing included.
    lossy_ratio
        Tokens seen over tokens kept: what the evictions came to.
    """

    layer: int
    tokens_seen: int
    tokens_kept: int
    triggers: int

    @property
    def lossy_ratio(self) -> float:
        """Tokens seen over tokens kept."""
        return self.tokens_seen / self.tokens_kept if self.tokens_kept else 1.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**super().to_dict(), "lossy_ratio": self.lossy_ratio}


@dataclass(frozen=True, kw_only=True)
class H2OStats(PlannerStats):
    """The figures of all layers, as the engine shares them, and of each layer."""

    layers: tuple[PlannerLayerStats, ...] = ()


class StatsRecorder:
    """Keeps the figures of each layer beside those that a planner shares among all."""

    def __init__(self, planner: H2OPlanner) -> None:
        self._planner = planner
        self._layers = [PlannerMetrics() for _ in planner.layers]
        self._triggers = [0] * len(planner.layers)

    def record(self, call: LayerCallResult) -> None:
        """Take in a call of a layer."""
        if call.plan is not None:
            self._triggers[call.layer] += 1
            self._layers[call.layer].record(call.plan, self._planner.metrics.h2o_evict_us)

    def to_stats(self, num_seen: int, tokens_kept: Sequence[int]) -> H2OStats:
        """The figures after `num_seen` tokens, of which the layers hold `tokens_kept`."""
        return H2OStats(
            **_copy_planner_fields(self._planner.metrics),
            layers=tuple(
                PlannerLayerStats(
                    **_copy_planner_fields(metrics),
                    layer=number,
                    tokens_seen=num_seen,
                    tokens_kept=num_kept,
                    triggers=triggers,
                )
                for number, (metrics, num_kept, triggers) in enumerate(
                    zip(self._layers, tokens_kept, self._triggers, strict=True)
                )
            ),
        )


def merge_stats(runs: Iterable[H2OStats]) -> H2OStats | None:
    """The figures of several texts, one after the other: counts are added up, the rest is that of the last text."""
    total_stats: H2OStats | None = None
    for stats in runs:
        if total_stats is None:
            total_stats = stats
            continue
        layers = [
            replace(
                new,
                h2o_total_evict_tokens=previous.h2o_total_evict_tokens + new.h2o_total_evict_tokens,
                tokens_seen=previous.tokens_seen + new.tokens_seen,
                tokens_kept=previous.tokens_kept + new.tokens_kept,
                triggers=previous.triggers + new.triggers,
            )
            for previous, new in zip(total_stats.layers, stats.layers, strict=True)
        ]
        total_evicted = total_stats.h2o_total_evict_tokens + stats.h2o_total_evict_tokens
        total_stats = replace(stats, h2o_total_evict_tokens=total_evicted, layers=tuple(layers))
    return total_stats


def _copy_planner_fields(metrics: PlannerMetrics) -> dict[str, Any]:
    return {entry.name: getattr(metrics, entry.name) for entry in fields(PlannerStats)}
