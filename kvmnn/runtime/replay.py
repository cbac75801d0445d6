"""Replay a trace of K and V through a runtime, as a model would."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSLESS, pluralize
from .._util.validation import repr_short, validate_int
from ..arrays.completeness import Completeness, describe_scope, format_missing
from ..arrays.source import list_losses, qualify_label
from ..dtypes import Floats, KVPair
from ..errors import KvmnnError
from ..files.schema import Record, json_key
from . import replay_plots
from .config import Behaviour, RuntimeConfig
from .metrics import ReplayPoint, RuntimeMetrics
from .runtime import LosslessRuntime
from .trace import KVTrace, check_attention


@dataclass(frozen=True, kw_only=True)
class ReplayResult(Record):
    """Result of a replay.

    Attributes
    ----------
    prompt, tokens
        Tokens of the prefill, and of the history.
    wrong_calls
        Calls at which attention would have read other bytes than were appended; of all calls of the first and the last
        decode step and the prefill, or with ``compare="all"`` of every call.
    compared_calls
        Number of compared calls.
    seconds
        Time of the runtime's own work.
    completeness
        How much of the model's state was replayed; None if unknown.
    loss
        What K and V had lost before, in a sentence; empty if nothing is recorded.
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
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    loss: str = field(default="", metadata={"omit": True})

    def plot(self, directory: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
        """Draw memory, ratio, queue and latency over the steps, and return the files."""
        return replay_plots.write_plots(self.points, directory, overwrite)

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def format_lines(self) -> list[str]:
        """Format tables over steps and layers, and the verdict."""
        steps = self.tokens - self.prompt
        head = f"{self.layers} layers, {pluralize(self.tokens, 'token')}: {self.prompt:,} as prompt, {steps:,} as steps"
        table = [f"{'step':>6} {'tokens':>8} {'live bytes':>13} {'held bytes':>13} {'ratio':>7} {'queue':>6} {'us':>9}"]
        shown_points = list(self.points[:: max(1, len(self.points) // 10)])
        if self.points and shown_points[-1] is not self.points[-1]:
            shown_points.append(self.points[-1])
        table += [str(point) for point in shown_points]
        table.append(_COLUMN_LEGEND)
        verdict_lines = [self._format_verdict(), *list_losses(self.loss), *format_missing(self.completeness)]
        return [head, *table, *self.metrics.format_lines(), *verdict_lines]

    @property
    def is_idle(self) -> bool:
        """Return whether nothing was compressed, so that there is no lossless ratio and equal bytes prove nothing."""
        return not self.metrics.h2o_lossless_raw_bytes

    @property
    @json_key("not_measured", before="metrics")
    def _idle_reason(self) -> str | None:
        return _NOT_COMPRESSED_REASON if self.is_idle else None

    @property
    def has_passed(self) -> bool:
        """Return whether attention read the right bytes, and something was compressed or evicted."""
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
        equal_text = f"equal in the {self.compared_calls:,} of {pluralize(self.num_calls, 'call')} that were compared"
        if not self.metrics.has_stored:
            return f"{equal_text}, as mode {self.metrics.mode} stores nothing: every row is held as it was appended"
        if self.compared_calls < self.num_calls:
            return equal_text
        scope = describe_scope(2 * self.layers) if format_missing(self.completeness) else ""
        label = qualify_label(LOSSLESS, list_losses(self.loss))
        return f"{label}{scope}: {pluralize(self.num_calls, 'call')} compared, every byte that attention reads is right"


_COLUMN_LEGEND = (
    "  held bytes: rows that are not compressed, frames, decoded copies, and room to grow; ratio, here and of each "
    "layer: raw over compressed bytes of what was encoded so far, and nothing else; queue: most encodings that were "
    "open at one time so far; us: time of the step in the runtime"
)

_NOT_COMPRESSED_REASON = (
    "nothing was compressed: the configuration does not enable it (kv_lossless_enable, _runtime_enable, _codec, "
    "_scope), or no block became cold (kv_h2o_trigger_min_tokens, kv_lossless_hot_recent_tokens, _block_tokens)"
)

MAX_REPLAY_POINTS = 200
"""Steps at which memory and ratio are noted; beyond, every second, third ... step."""

COMPARE_MODES = ("ends", "all")
"""The calls to compare."""

ProgressCallback = Callable[[int], object]
"""Called with the number of tokens done since the last call."""


def replay_trace(
    trace: KVTrace,
    config: RuntimeConfig,
    *,
    prompt: int | None = None,
    behaviour: Behaviour = "sound",
    attention: Sequence[Floats] | None = None,
    compare: str = "ends",
    progress: ProgressCallback | None = None,
) -> ReplayResult:
    """Append a trace to a runtime: the first tokens in one call, the others one by one.

    What threads still encode after the last token is waited for, so that the figures have all that was handed to them.

    Parameters
    ----------
    trace
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
    prompt_tokens = validate_int(trace.tokens // 2 or 1 if prompt is None else prompt, "prompt", 1, trace.tokens)
    if compare not in COMPARE_MODES:
        raise KvmnnError(f"compare is {repr_short(compare)}: expected one of {', '.join(COMPARE_MODES)}")
    if config.h2o.enable and attention is None:
        raise KvmnnError("kv_h2o_enable without attention: an eviction plan needs scores (attention=, or --scores)")
    if attention is not None:
        check_attention(attention, len(trace.layers), trace.tokens)
        config = replace(config, h2o=replace(config.h2o, heads=int(attention[0].shape[0])))
    runner = _Replayer(trace, config, behaviour, attention)
    with runner.runtime:
        bounds = [0, prompt_tokens, *range(prompt_tokens + 1, trace.tokens + 1)]
        steps_per_point = math.ceil(len(bounds) / MAX_REPLAY_POINTS)
        points = []
        for step, (begin, end) in enumerate(pairwise(bounds)):
            is_compared = compare == "all" or step <= 1 or end == trace.tokens
            elapsed = runner.run_step(begin, end, is_compared)
            if end == trace.tokens:
                runner.wait_for_encoders()
            if step % steps_per_point == 0 or end == trace.tokens:
                points.append(runner.to_point(step, end, elapsed))
            if progress is not None:
                progress(end - begin)
        return ReplayResult(
            behaviour=behaviour,
            layers=len(trace.layers),
            prompt=prompt_tokens,
            tokens=trace.tokens,
            compared_calls=runner.num_compared,
            wrong_calls=runner.num_wrong,
            seconds=runner.nanoseconds / 1e9,
            metrics=runner.runtime.collect_metrics(),
            points=tuple(points),
            completeness=trace.completeness,
            loss=trace.loss,
        )


class _Replayer:
    """The steps of one replay."""

    def __init__(
        self, trace: KVTrace, config: RuntimeConfig, behaviour: Behaviour, attention: Sequence[Floats] | None
    ) -> None:
        self._trace, self._attention = trace, attention
        self.num_compared = self.num_wrong = self.nanoseconds = 0
        self.runtime = LosslessRuntime(
            config,
            layers=len(trace.layers),
            kv_heads=trace.kv_heads,
            head_dim=trace.head_dim,
            dtype=trace.dtype,
            behaviour=behaviour,
        )

    def run_step(self, begin: int, end: int, is_compared: bool) -> int:
        """Append the tokens ``[begin, end)``; return the nanoseconds that the runtime took."""
        elapsed = 0
        for number, (keys, values) in enumerate(self._trace.layers):
            start_ns = time.perf_counter_ns()
            live_rows = self.runtime.begin_call(number, keys[:, begin:end], values[:, begin:end])
            elapsed += time.perf_counter_ns() - start_ns
            if is_compared:
                self._compare(number, live_rows)
            rows = None
            if self._attention is not None:
                rows = self._attention[number][:, begin:end, self.runtime.get_positions(number)]
            start_ns = time.perf_counter_ns()
            self.runtime.end_call(rows=rows)
            elapsed += time.perf_counter_ns() - start_ns
        self.runtime.end_step()
        self.nanoseconds += elapsed
        return elapsed

    def wait_for_encoders(self) -> None:
        """Wait for the encodings of threads."""
        if self.runtime.behaviour == "sound":
            start_ns = time.perf_counter_ns()
            self.runtime.wait()
            self.nanoseconds += time.perf_counter_ns() - start_ns

    def to_point(self, step: int, tokens: int, elapsed: int) -> ReplayPoint:
        """Return the current figures."""
        metrics = self.runtime.collect_metrics()
        layer_bytes = sum(part.nbytes for part in self._trace.layers[0]) // self._trace.tokens
        num_live = sum(self.runtime.get_positions(number).size for number in range(len(self._trace.layers)))
        return ReplayPoint(
            step=step,
            tokens=tokens,
            appended_bytes=tokens * layer_bytes * len(self._trace.layers),
            live_bytes=num_live * layer_bytes,
            held_bytes=metrics.held_bytes,
            ratio=metrics.encoded_ratio,
            queue_depth_peak=metrics.h2o_lossless_queue_depth_peak,
            step_us=elapsed / 1e3,
        )

    def _compare(self, layer_number: int, live_rows: KVPair) -> None:
        positions = self.runtime.get_positions(layer_number)
        self.num_compared += 1
        self.num_wrong += any(
            not np.array_equal(np.ascontiguousarray(actual).view(np.uint8), original[:, positions].view(np.uint8))
            for actual, original in zip(live_rows, self._trace.layers[layer_number], strict=True)
        )
