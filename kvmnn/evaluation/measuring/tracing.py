"""Memory and live tokens of one document over its course, for the plots."""

from __future__ import annotations

import numpy as np

from ...lm.runner import Runner
from ...reports.results import KeepMap, KeptPositions
from .cells import TimeSeries

MAX_SAMPLES = 128


class TimeSeriesRecorder:
    """Takes samples of a run, at most `MAX_SAMPLES`.

    Parameters
    ----------
    runner
        Whose cache is looked at.
    tokens
        That will be fed.
    skipped_layers
        Layers that are never cut: live tokens are those of KV head 0 of the first other layer.
    """

    def __init__(self, runner: Runner, tokens: int, skipped_layers: tuple[int, ...]) -> None:
        layers = runner.session.interface.layers
        self._runner = runner
        self._layer = next((layer for layer in range(layers) if layer not in skipped_layers), 0)
        self._tokens_per_sample = max(1, -(-tokens // MAX_SAMPLES))
        self._tokens = tokens
        self._next_sample = 1
        self._step_tokens: list[int] = []
        self._cache_bytes: list[int] = []
        self._kept_positions: list[list[int]] = []

    def record(self, num_seen: int) -> None:
        """A chunk has been fed; `num_seen` tokens of the text so far."""
        if num_seen < self._next_sample and num_seen < self._tokens:
            return
        self._next_sample = (num_seen // self._tokens_per_sample + 1) * self._tokens_per_sample
        cache = self._runner.cache
        positions = cache.get_positions(self._layer)
        self._step_tokens.append(num_seen)
        self._cache_bytes.append(cache.nbytes)
        self._kept_positions.append((positions if positions.ndim == 1 else positions[0]).tolist())

    def to_time_series(self) -> TimeSeries:
        """The samples so far."""
        step_tokens = tuple(self._step_tokens)
        keep_map = KeepMap(
            layer=self._layer, kv_head=0, steps=step_tokens, kept=tuple(map(tuple, self._kept_positions))
        )
        return TimeSeries(
            step_tokens=step_tokens,
            cache_bytes=tuple(self._cache_bytes),
            keep_map=keep_map,
            kept=self._list_final_positions(),
        )

    def _list_final_positions(self) -> tuple[KeptPositions, ...]:
        """What every layer holds now."""
        cache, layers = self._runner.cache, self._runner.session.interface.layers
        rows = (np.atleast_2d(cache.get_positions(layer)).tolist() for layer in range(layers))
        return tuple(KeptPositions(layer=layer, positions=tuple(map(tuple, heads))) for layer, heads in enumerate(rows))
