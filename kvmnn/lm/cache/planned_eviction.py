"""The engine's planner on the layers of a model that all run in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...dtypes import Floats, Indices
from ...errors import KvmnnError
from ...h2o import Planner
from ...h2o.figures import FigureKeeper, H2OFigures
from ...packed.reserve import Pair

RowsOf = Callable[[int], Floats]
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

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._figures = FigureKeeper(planner)
        self._lengths: list[int] = []

    def begin(self, lengths: Sequence[int]) -> list[Indices | None]:
        """What each layer keeps of the tokens that it holds, int64 ``[kept]``; None where all stay."""
        self._lengths = list(lengths)
        found: list[Indices | None] = []
        for state, length in zip(self._planner.layers, lengths, strict=True):
            waits = state.pending if state.pending is not None and state.pending.fits(length) else None
            found.append(None if waits is None else _indices(waits.pairs))
        return found

    def end(self, lengths: Sequence[int], new: int, *, decode: bool, rows: RowsOf) -> None:
        """The step is done: `new` tokens have come, and the layers hold `lengths` tokens.

        Raises
        ------
        KvmnnError
            Where the planner would have dropped other tokens than `begin` said.
        """
        planner = self._planner
        evicting = planner.config.layer_range
        for layer, (before, after) in enumerate(zip(self._lengths, lengths, strict=True)):
            number = layer if planner.cadence == "tokens" else None
            found = planner.begin(before, new, decode=decode, layer=number)
            if found.kv_after + new != after:
                raise KvmnnError(f"layer {layer}: the planner keeps {found.kv_after + new} tokens, {after} were kept")
            self._figures.note(planner.end(rows=rows(layer) if decode and layer in evicting else None))
        planner.sync()

    def figures(self, seen: int, lengths: Sequence[int]) -> H2OFigures:
        """What was done so far, to layers that hold `lengths` of `seen` tokens."""
        return self._figures.figures(seen, lengths)


def _indices(pairs: Sequence[Pair]) -> Indices:
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in pairs])
