"""The engine's planner on the layers of a model that all run in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...dtypes import Floats, Indices
from ...errors import KvmnnError
from ...h2o import H2OPlanner
from ...h2o.figures import H2OStats, StatsRecorder
from ...packed.reserve import ReservePair

ReadAttention = Callable[[int], Floats]
"""The attention of a layer's live tokens in this step, ``[query_head, query, token]``."""


class PlannedEviction:
    """Carries plans out at the beginning of a step, and lets every layer score and plan at its end.

    The planner takes the calls of the layers one by one, each with two halves; a model runs all layers between them.
    So what a call will drop is looked up in the plan that waits, and the calls are made when the step is done.

    Parameters
    ----------
    planner
        Of all layers; nothing has been planned yet.
    """

    def __init__(self, planner: H2OPlanner) -> None:
        self._planner = planner
        self._stats = StatsRecorder(planner)
        self._lengths: list[int] = []

    def begin_step(self, lengths: Sequence[int]) -> list[Indices | None]:
        """What each layer keeps of the tokens that it holds, int64 ``[kept]``; None where all stay."""
        self._lengths = list(lengths)
        kept_by_layer: list[Indices | None] = []
        for state, length in zip(self._planner.layers, lengths, strict=True):
            applicable_plan = (
                state.pending_plan
                if state.pending_plan is not None and state.pending_plan.is_applicable(length)
                else None
            )
            kept_by_layer.append(None if applicable_plan is None else _expand_pairs(applicable_plan.pairs))
        return kept_by_layer

    def end_step(self, lengths: Sequence[int], num_new: int, *, decode: bool, read_attention: ReadAttention) -> None:
        """The step is done: `num_new` tokens have come, and the layers hold `lengths` tokens.

        Raises
        ------
        KvmnnError
            Where the planner would have dropped other tokens than `begin_step` said.
        """
        planner = self._planner
        evicting_layers = planner.config.evicting_layers
        for layer, (tokens_before, tokens_after) in enumerate(zip(self._lengths, lengths, strict=True)):
            number = layer if planner.cadence == "tokens" else None
            edit = planner.begin_call(tokens_before, num_new, decode=decode, layer=number)
            if edit.kv_after + num_new != tokens_after:
                raise KvmnnError(
                    f"layer {layer}: the planner keeps {edit.kv_after + num_new} tokens, {tokens_after} were kept"
                )
            self._stats.record(
                planner.end_call(rows=read_attention(layer) if decode and layer in evicting_layers else None)
            )
        planner.sync()

    def to_stats(self, num_seen: int, lengths: Sequence[int]) -> H2OStats:
        """What was done so far, to layers that hold `lengths` of `num_seen` tokens."""
        return self._stats.to_stats(num_seen, lengths)


def _expand_pairs(pairs: Sequence[ReservePair]) -> Indices:
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in pairs])
