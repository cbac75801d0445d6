"""Memory and live tokens of one document over its course, for the plots."""

from __future__ import annotations

import numpy as np

from ...lm.runner import Runner
from ...reports.results import KeepMap, KeptPositions
from .cells import Course

SAMPLES = 128


class Tracer:
    """Takes samples of a run, at most `SAMPLES`.

    Parameters
    ----------
    runner
        Whose cache is looked at.
    tokens
        That will be fed.
    skipped
        Layers that are never cut: live tokens are those of KV head 0 of the first other layer.
    """

    def __init__(self, runner: Runner, tokens: int, skipped: tuple[int, ...]) -> None:
        layers = runner.session.interface.layers
        self._runner = runner
        self._layer = next((layer for layer in range(layers) if layer not in skipped), 0)
        self._every = max(1, -(-tokens // SAMPLES))
        self._tokens = tokens
        self._next = 1
        self._seen: list[int] = []
        self._bytes: list[int] = []
        self._kept: list[list[int]] = []

    def after(self, seen: int) -> None:
        """A chunk has been fed; `seen` tokens of the text so far."""
        if seen < self._next and seen < self._tokens:
            return
        self._next = (seen // self._every + 1) * self._every
        cache = self._runner.cache
        positions = cache.positions(self._layer)
        self._seen.append(seen)
        self._bytes.append(cache.nbytes)
        self._kept.append((positions if positions.ndim == 1 else positions[0]).tolist())

    def course(self) -> Course:
        """The samples so far."""
        seen = tuple(self._seen)
        keep_map = KeepMap(layer=self._layer, kv_head=0, steps=seen, kept=tuple(map(tuple, self._kept)))
        return Course(step_tokens=seen, cache_bytes=tuple(self._bytes), keep_map=keep_map, kept=self._kept_at_the_end())

    def _kept_at_the_end(self) -> tuple[KeptPositions, ...]:
        """What every layer holds now."""
        cache, layers = self._runner.cache, self._runner.session.interface.layers
        rows = (np.atleast_2d(cache.positions(layer)).tolist() for layer in range(layers))
        return tuple(KeptPositions(layer=layer, positions=tuple(map(tuple, heads))) for layer, heads in enumerate(rows))
