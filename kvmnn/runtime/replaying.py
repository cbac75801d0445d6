"""Runs a history of K and V through a runtime, as a model would have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..checks import whole
from ..dtypes import Floats, KVPair
from ..text import LOSSLESS, count
from .config import RuntimeConfig
from .history import History, check_attention
from .lossless_runtime import Behaviour, LosslessRuntime
from .metrics import RuntimeMetrics

MAX_POINTS = 200
"""Steps at which memory and ratio are noted; beyond, every second, third ... step."""

Progress = Callable[[int], object]
"""Called with the number of tokens done since the last call."""


@dataclass(frozen=True, kw_only=True)
class ReplayPoint:
    """Figures after a step, sums over the layers.

    Attributes
    ----------
    appended_bytes, live_bytes, held_bytes
        Of all rows so far; of those that are left; of the rows, frames and decoded copies that hold them.
    ratio
        Raw over compressed bytes of everything encoded so far.
    step_us
        How long the step took, attention and model left out.
    """

    step: int
    tokens: int
    appended_bytes: int
    live_bytes: int
    held_bytes: int
    ratio: float
    queue_depth_peak: int
    step_us: float

    def __str__(self) -> str:
        sizes = f"{self.live_bytes:>13,} {self.held_bytes:>13,} {self.ratio:>7.3f}"
        return f"{self.step:>6,} {self.tokens:>8,} {sizes} {self.queue_depth_peak:>6,} {self.step_us:>9,.0f}"


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
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        return own | {"metrics": self.metrics.to_dict(), "points": [asdict(point) for point in self.points]}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Tables over steps and layers, and the verdict."""
        steps = self.tokens - self.prompt
        head = f"{self.layers} layers, {count(self.tokens, 'token')}: {self.prompt:,} as prompt, {steps:,} as steps"
        verdict = (
            f"{LOSSLESS}: {count(self.compared_calls, 'call')} compared, every byte that attention reads is right"
            if not self.wrong_calls
            else f"WRONG: attention reads other bytes than were appended at {self.wrong_calls:,} of "
            f"{count(self.compared_calls, 'call')} compared"
        )
        table = [f"{'step':>6} {'tokens':>8} {'live bytes':>13} {'held bytes':>13} {'ratio':>7} {'queue':>6} {'us':>9}"]
        shown = list(self.points[:: max(1, len(self.points) // 10)])
        if self.points and shown[-1] is not self.points[-1]:
            shown.append(self.points[-1])
        table += [str(point) for point in shown]
        return [head, *table, *self.metrics.lines(), verdict]


_OWN_FIELDS = ("behaviour", "layers", "prompt", "tokens", "compared_calls", "wrong_calls", "seconds")


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
        For an eviction without attention, a prompt longer than the history, and options that do not exist.
    RestoreError
        Where a sound runtime cannot restore rows.
    """
    first = whole(history.tokens // 2 or 1 if prompt is None else prompt, "prompt", 1, history.tokens)
    check_attention(attention, config.h2o.enable)
    if attention is not None:
        config = replace(config, h2o=replace(config.h2o, heads=int(attention[0].shape[0])))
    runner = _Runner(history, config, behaviour, attention)
    with runner.runtime:
        bounds = [0, first, *range(first + 1, history.tokens + 1)]
        every = -(-len(bounds) // MAX_POINTS)
        points = []
        for step, (begin, end) in enumerate(pairwise(bounds)):
            checked = compare == "all" or step <= 1 or end == history.tokens
            elapsed = runner.step(begin, end, checked)
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
            ratio=metrics.h2o_lossless_ratio,
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
