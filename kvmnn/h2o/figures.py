"""What the planner did to the layers of one text, under the engine's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..files.records import Record
from .layer_state import LayerCall, Metrics
from .planner import Planner


@dataclass(frozen=True, kw_only=True)
class PlannerFigures(Record):
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
class LayerFigures(PlannerFigures):
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
class H2OFigures(PlannerFigures):
    """The figures of all layers, as the engine shares them, and of each layer."""

    layers: tuple[LayerFigures, ...] = ()


class FigureKeeper:
    """Keeps the figures of each layer beside those that a planner shares among all."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._layers = [Metrics() for _ in planner.layers]
        self._triggers = [0] * len(planner.layers)

    def note(self, call: LayerCall) -> None:
        """Take in a call of a layer."""
        if call.plan is not None:
            self._triggers[call.layer] += 1
            self._layers[call.layer].record(call.plan, self._planner.metrics.h2o_evict_us)

    def figures(self, seen: int, kept: Sequence[int]) -> H2OFigures:
        """The figures after `seen` tokens, of which the layers hold `kept`."""
        return H2OFigures(
            **_shared(self._planner.metrics),
            layers=tuple(
                LayerFigures(**_shared(found), layer=number, tokens_seen=seen, tokens_kept=held, triggers=triggers)
                for number, (found, held, triggers) in enumerate(zip(self._layers, kept, self._triggers, strict=True))
            ),
        )


def together(texts: Iterable[H2OFigures]) -> H2OFigures | None:
    """The figures of several texts, one after the other: counts are added up, the rest is that of the last text."""
    found: H2OFigures | None = None
    for one in texts:
        if found is None:
            found = one
            continue
        layers = [
            replace(
                new,
                h2o_total_evict_tokens=old.h2o_total_evict_tokens + new.h2o_total_evict_tokens,
                tokens_seen=old.tokens_seen + new.tokens_seen,
                tokens_kept=old.tokens_kept + new.tokens_kept,
                triggers=old.triggers + new.triggers,
            )
            for old, new in zip(found.layers, one.layers, strict=True)
        ]
        total = found.h2o_total_evict_tokens + one.h2o_total_evict_tokens
        found = replace(one, h2o_total_evict_tokens=total, layers=tuple(layers))
    return found


def _shared(metrics: Metrics) -> dict[str, Any]:
    return {entry.name: getattr(metrics, entry.name) for entry in fields(PlannerFigures)}
