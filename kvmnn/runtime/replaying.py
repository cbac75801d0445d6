"""Runs a history of K and V through a runtime, as a model would have."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..checks import shown, whole
from ..dtypes import Floats, KVPair
from ..errors import KvmnnError
from .behaviours import Behaviour
from .config import RuntimeConfig
from .history import History, check_attention
from .lossless_runtime import LosslessRuntime
from .replay_point import ReplayPoint
from .replay_result import ReplayResult

MAX_POINTS = 200
"""Steps at which memory and ratio are noted; beyond, every second, third ... step."""

COMPARISONS = ("ends", "all")
"""Which calls are compared."""

Progress = Callable[[int], object]
"""Called with the number of tokens done since the last call."""


def replay(
    history: History,
    config: RuntimeConfig,
    *,
    prompt: int | None = None,
    behaviour: Behaviour = "sound",
    attention: Sequence[Floats] | None = None,
    compare: str = "ends",
    progress: Progress | None = None,
) -> ReplayResult:
    """Append a history to a runtime, the first tokens at once and the others one by one.

    What threads still encode behind the last token is waited for, so that the figures have all that was handed to them.

    Parameters
    ----------
    history
        K and V of all layers.
    config, behaviour
        As for `LosslessRuntime`.
    prompt
        Tokens of the prefill; by default half of them.
    attention
        Probabilities of every layer, ``[head, query, key]``, from which evictions are planned. What evicted tokens had
        is not shared out among the others.
    compare
        ``"all"`` compares what attention reads at every call, ``"ends"`` in the prefill and the first and last step.
    progress
        Called with the number of tokens done.

    Raises
    ------
    KvmnnError
        For an eviction without attention, attention that does not fit, a prompt longer than the history, and options
        that do not exist.
    RestoreError
        Where a sound runtime cannot restore rows.
    """
    first = whole(history.tokens // 2 or 1 if prompt is None else prompt, "prompt", 1, history.tokens)
    if compare not in COMPARISONS:
        raise KvmnnError(f"compare is {shown(compare)}: expected one of {', '.join(COMPARISONS)}")
    if config.h2o.enable and attention is None:
        raise KvmnnError("kv_h2o_enable without attention: an eviction plan needs scores (kvmnn replay --scores)")
    if attention is not None:
        check_attention(attention, len(history.layers), history.tokens)
        config = replace(config, h2o=replace(config.h2o, heads=int(attention[0].shape[0])))
    runner = _Runner(history, config, behaviour, attention)
    with runner.runtime:
        bounds = [0, first, *range(first + 1, history.tokens + 1)]
        every = math.ceil(len(bounds) / MAX_POINTS)
        points = []
        for step, (begin, end) in enumerate(pairwise(bounds)):
            checked = compare == "all" or step <= 1 or end == history.tokens
            elapsed = runner.step(begin, end, checked)
            if end == history.tokens:
                runner.finish()
            if step % every == 0 or end == history.tokens:
                points.append(runner.point(step, end, elapsed))
            if progress is not None:
                progress(end - begin)
        return ReplayResult(
            behaviour=behaviour,
            layers=len(history.layers),
            prompt=first,
            tokens=history.tokens,
            compared_calls=runner.compared,
            wrong_calls=runner.wrong,
            seconds=runner.nanoseconds / 1e9,
            metrics=runner.runtime.metrics(),
            points=tuple(points),
        )


class _Runner:
    """The steps of one replay."""

    def __init__(
        self, history: History, config: RuntimeConfig, behaviour: Behaviour, attention: Sequence[Floats] | None
    ) -> None:
        self._history, self._attention = history, attention
        self.compared = self.wrong = self.nanoseconds = 0
        self.runtime = LosslessRuntime(
            config,
            layers=len(history.layers),
            kv_heads=history.kv_heads,
            head_dim=history.head_dim,
            dtype=history.dtype,
            behaviour=behaviour,
        )

    def step(self, begin: int, end: int, checked: bool) -> int:
        """Append the tokens ``[begin, end)``; returns the nanoseconds that the runtime took."""
        elapsed = 0
        for number, (keys, values) in enumerate(self._history.layers):
            started = time.perf_counter_ns()
            read = self.runtime.begin(number, keys[:, begin:end], values[:, begin:end])
            elapsed += time.perf_counter_ns() - started
            if checked:
                self._compare(number, read)
            rows = None
            if self._attention is not None:
                rows = self._attention[number][:, begin:end, self.runtime.positions(number)]
            started = time.perf_counter_ns()
            self.runtime.end(rows=rows)
            elapsed += time.perf_counter_ns() - started
        self.runtime.sync()
        self.nanoseconds += elapsed
        return elapsed

    def finish(self) -> None:
        """Take in what threads still encode."""
        if self.runtime.behaviour == "sound":
            started = time.perf_counter_ns()
            self.runtime.wait()
            self.nanoseconds += time.perf_counter_ns() - started

    def point(self, step: int, tokens: int, elapsed: int) -> ReplayPoint:
        """The figures now."""
        metrics = self.runtime.metrics()
        layer_bytes = sum(part.nbytes for part in self._history.layers[0]) // self._history.tokens
        live = sum(self.runtime.positions(number).size for number in range(len(self._history.layers)))
        return ReplayPoint(
            step=step,
            tokens=tokens,
            appended_bytes=tokens * layer_bytes * len(self._history.layers),
            live_bytes=live * layer_bytes,
            held_bytes=metrics.held_bytes,
            ratio=metrics.h2o_lossless_ratio if metrics.h2o_lossless_raw_bytes else None,
            queue_depth_peak=metrics.h2o_lossless_queue_depth_peak,
            step_us=elapsed / 1e3,
        )

    def _compare(self, number: int, read: KVPair) -> None:
        positions = self.runtime.positions(number)
        self.compared += 1
        self.wrong += any(
            not np.array_equal(np.ascontiguousarray(one).view(np.uint8), other[:, positions].view(np.uint8))
            for one, other in zip(read, self._history.layers[number], strict=True)
        )
