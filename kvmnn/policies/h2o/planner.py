"""The engine's H2O planner over all layers: scores, step counters, triggers, pending plans, and its figures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.validation import validate_int
from ...dtypes import Floats
from ...errors import KvmnnError
from ...files.schema import Record, json_key
from ...packed.compaction import INT32_MAX, KVMeta, ReservePair
from .config import H2OConfig
from .plan import BlockPlan, plan_blocks
from .scores import sum_by_block, to_rows, to_scores, update_ema_scores


@dataclass
class PendingPlan:
    """A plan that waits for the layer's next call."""

    #: Tokens of the layer when the plan was made, all of which form the window.
    remove: int
    #: The pairs as the engine's list: begin, size, begin, size ...
    flat_pairs: tuple[int, ...]
    #: Blocks whose scores stay when the plan is applied; None if the scores were cut already.
    keep: npt.NDArray[np.bool_] | None = None

    def is_applicable(self, kv_length: int) -> bool:
        """Return whether the plan may be applied to a layer of `kv_length` tokens; if not, it is stale."""
        is_complete = len(self.flat_pairs) % 2 == 0 and self.remove == kv_length
        return is_complete and are_valid_pairs(self.pairs, self.remove)

    @property
    def pairs(self) -> tuple[ReservePair, ...]:
        """Return the flat list as pairs; an unpaired last number is ignored."""
        return tuple(zip(self.flat_pairs[::2], self.flat_pairs[1::2], strict=False))


def are_valid_pairs(pairs: tuple[ReservePair, ...], remove: int) -> bool:
    """Return whether every pair has a size, is inside the window, and starts no earlier than the one before ends."""
    end = 0
    for begin, size in pairs:
        if size <= 0 or begin < end or begin + size > min(remove, INT32_MAX):
            return False
        end = begin + size
    return True


@dataclass
class PlannerLayerState:
    """Scores, plans and, for cadence "tokens", step counters of one layer."""

    #: Running mean of the attention on each block.
    scores: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    #: The plan for the layer's next call.
    pending_plan: PendingPlan | None = None
    #: The pairs applied last.
    active_pairs: tuple[ReservePair, ...] = ()
    #: Decode steps of this layer, and the last one that triggered.
    num_steps: int = 0
    last_trigger_step: int = 0


@dataclass
class PlannerMetrics(Record):
    """The engine's figures, under its names; each has the value of the last call that wrote it."""

    #: Ratios of the last plan that its floor did not dominate: one event of one layer, not a mean.
    h2o_keep_ratio: float = 1.0
    h2o_lossy_ratio: float = 1.0
    #: Shares of the last trigger.
    h2o_target_keep_effective: float = 1.0
    h2o_floor_keep_by_recent_sink: float = 1.0
    h2o_block_quantized_keep: float = 1.0
    #: Tokens that the last trigger planned to drop.
    h2o_last_evict_tokens: int = 0
    #: Sum of these tokens over all layers and triggers.
    h2o_total_evict_tokens: int = 0
    #: The plan of the last call, 0 where it made none; n_reserve counts pairs.
    h2o_pending_remove: int = 0
    h2o_pending_n_reserve: int = 0
    h2o_pending_plan_ready: int = 0
    #: Microseconds of the last planning, in kvmnn.
    h2o_evict_us: int = 0

    def set_pending(self, plan: BlockPlan | None) -> None:
        """Set the figures of the pending plan of this call."""
        self.h2o_pending_remove = plan.window_tokens if plan else 0
        self.h2o_pending_n_reserve = len(plan.reserve_pairs) if plan else 0
        self.h2o_pending_plan_ready = int(plan is not None)

    def record(self, plan: BlockPlan, microseconds: int) -> None:
        """Record the figures of a trigger."""
        self.h2o_floor_keep_by_recent_sink = float(plan.floor_keep_ratio)
        self.h2o_target_keep_effective = float(plan.effective_target_ratio)
        self.h2o_block_quantized_keep = float(plan.block_quantized_keep_ratio)
        self.h2o_last_evict_tokens = plan.num_evicted
        self.h2o_total_evict_tokens += plan.num_evicted
        self.h2o_evict_us = microseconds
        if not plan.floor_dominates:
            self.h2o_keep_ratio = float(plan.keep_ratio)
            self.h2o_lossy_ratio = float(plan.lossy_ratio)
        self.set_pending(plan if plan.num_evicted else None)


@dataclass(frozen=True)
class CacheEdit:
    """Change of a layer's cache before its new tokens are appended; none if `remove` is 0."""

    #: The layer whose plan was examined.
    layer: int
    #: Arguments of `PackedCache.realloc` or `append`.
    remove: int
    reserve: tuple[ReservePair, ...]
    #: Tokens before and after.
    kv_before: int
    kv_after: int
    #: Whether a plan was pending.
    was_pending: bool
    #: Whether the pending plan was dropped because it no longer fits the layer.
    is_stale: bool


@dataclass(frozen=True, eq=False)
class LayerCallResult:
    """Result of one call of a layer."""

    #: The layer by the planner's count; with cadence "layer-calls" 0 for every call outside decoding.
    layer: int
    #: Whether the call was scored.
    is_enabled: bool
    #: Tokens, the new ones included.
    kv_len: int
    #: Blocks that were scored, 0 where not enabled.
    num_blocks: int
    #: Whether a plan was made, even one that drops nothing.
    has_triggered: bool
    #: Whether the call began a new conversation.
    was_reset: bool
    #: Scores after this step, before a plan cut them.
    scores: Floats
    #: The plan where one was made; it waits for the layer's next call if it drops anything.
    plan: BlockPlan | None
    #: Tokens that the engine takes for its lossless budget: after the plan; without a trigger `kv_len` times the keep
    #: ratio of whatever layer triggered last, which is no eviction.
    final_keep: int


CADENCES = ("layer-calls", "tokens")


@dataclass
class LayerCallCounter:
    """The engine's step counters, shared by all layers."""

    #: Decode calls of any layer; the layer is this number modulo their count.
    cursor: int = 0
    #: The same number, compared with the interval.
    global_step: int = 0
    #: Decode calls of layer 0.
    token_step: int = 0
    #: `global_step` of the last trigger of any layer.
    last_trigger: int = 0

    def get_current_layer(self, num_layers: int) -> int:
        """Return the layer of the next call."""
        return self.cursor % num_layers

    def record_call(self, layers: list[PlannerLayerState], layer: int, decode: bool) -> int:
        """Count a call; return its layer."""
        if not decode:
            return 0
        self.cursor += 1
        self.global_step += 1
        self.token_step += layer == 0
        return layer

    def is_due(self, state: PlannerLayerState, interval: int) -> bool:
        """Return whether enough calls have passed."""
        return self.global_step - self.last_trigger >= interval

    def record_trigger(self, state: PlannerLayerState) -> None:
        """Record a trigger."""
        self.last_trigger = self.global_step

    def reset(self) -> None:
        """Reset all counters."""
        self.cursor = self.global_step = self.token_step = self.last_trigger = 0


@dataclass
class TokenCounter:
    """Counts decode steps of each layer separately, in its `PlannerLayerState`."""

    def record_call(self, layers: list[PlannerLayerState], layer: int, decode: bool) -> int:
        """Count a call; return its layer."""
        layers[layer].num_steps += decode
        return layer

    def is_due(self, state: PlannerLayerState, interval: int) -> bool:
        """Return whether the layer has made enough steps."""
        return state.num_steps - state.last_trigger_step >= interval

    def record_trigger(self, state: PlannerLayerState) -> None:
        """Record a trigger."""
        state.last_trigger_step = state.num_steps

    def reset(self) -> None:
        """Do nothing: the counters go with the layers' state."""


class H2OPlanner:
    """Decides for every layer and step what to drop, exactly as the engine does.

    Each call of a layer has two halves: `begin_call` applies the plan that the layer made earlier, `end_call` takes the
    attention of this step, updates the scores, and plans for the layer's next call. Between them the caller compacts
    the cache and appends the new tokens::

        edit = planner.begin_call(len(cache))
        cache.append(keys, values, remove=edit.remove, reserve=edit.reserve)
        planner.end_call(rows=attention)

    and calls `end_step` when all layers of a step are done.

    Parameters
    ----------
    config
        Options; None for the engine's defaults.
    cadence
        ``"layer-calls"`` counts as the engine does: calls of any layer, one counter for all, and which layer it is by
        the number of calls; so two of 32 layers trigger per token with an interval of 16. Everything else follows the
        engine too, its behaviour at a second turn included (docs/h2o.md). ``"tokens"`` is what the interval was meant
        to be: decode steps between two plans of the same layer, whose number the caller gives. Plans are only ever
        applied to their own layer, and scores are cut when that happens.
    on_invalid
        ``"raise"`` refuses a call at which the engine would drop all tokens of the layer because the shared count of
        tokens is 0: the planner began with a cache that it has not seen (set ``meta.previous``), or `end_step` was not
        called. ``"engine"`` drops them.

    Attributes
    ----------
    layers
        `PlannerLayerState` of each layer.
    metrics
        Figures under the engine's names.
    meta
        The counts that layers share, as the engine stores them; unused with cadence "tokens".
    clock
        `LayerCallCounter` or `TokenCounter`.

    Raises
    ------
    KvmnnError
        For an unknown cadence or `on_invalid`.
    """

    def __init__(
        self, config: H2OConfig | None = None, *, cadence: str = "layer-calls", on_invalid: str = "raise"
    ) -> None:
        if cadence not in CADENCES:
            raise KvmnnError(f"cadence is {cadence!r}: expected one of {', '.join(CADENCES)}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        self._is_strict = on_invalid == "raise"
        self.config = config or H2OConfig()
        self.cadence = cadence
        self.reset()

    def reset(self) -> None:
        """Reset everything, figures and shared counts included."""
        self.layers = [PlannerLayerState() for _ in range(self.config.effective_layers)]
        self.metrics = PlannerMetrics()
        self.meta = KVMeta()
        self.clock: LayerCallCounter | TokenCounter = (
            LayerCallCounter() if self.cadence == "layer-calls" else TokenCounter()
        )
        self._open_call: tuple[CacheEdit, int, bool] | None = None

    def __repr__(self) -> str:
        return f"H2OPlanner({self.config!r}, cadence={self.cadence!r})"

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin_call(
        self, kv_length: int, num_new: int = 1, *, decode: bool = True, layer: int | None = None
    ) -> CacheEdit:
        """Begin a call: return what to drop from the layer's cache before new tokens are appended.

        Parameters
        ----------
        kv_length
            Tokens in the layer's cache.
        num_new
            New tokens of this step.
        decode
            False while a prompt is processed.
        layer
            The layer's number; required with cadence "tokens", not allowed with "layer-calls", which counts by itself.

        Raises
        ------
        KvmnnError
            For a layer that does not exist, lengths outside 0 to 2**31 - 1, a call before that was not ended, and as
            `on_invalid` specifies.
        """
        if self._open_call is not None:
            raise KvmnnError("begin: the call before was not ended")
        validate_int(kv_length, "kv_length", 0, INT32_MAX)
        validate_int(num_new, "add", 0, INT32_MAX - kv_length)
        index = self._resolve_layer(layer, decode)
        state = self.layers[index]
        is_untracked = self.cadence != "tokens" and not self.meta.previous and not self.meta.remove
        if self._is_strict and is_untracked and kv_length and state.pending_plan is None:
            raise KvmnnError(
                f"meta.previous is 0 while the layer holds {kv_length} tokens: the engine would drop them; expected "
                "end_step() after each step, or meta.previous set to the tokens of a cache that was there before"
            )
        pending_plan, state.pending_plan = state.pending_plan, None
        valid_plan = pending_plan if pending_plan is not None and pending_plan.is_applicable(kv_length) else None
        if valid_plan is not None:
            state.active_pairs = valid_plan.pairs
            if valid_plan.keep is not None:
                state.scores = select_scores(state.scores, valid_plan.keep)
        self.metrics.set_pending(None)
        remove, reserve = self._build_window(kv_length, num_new, decode, valid_plan)
        kv_after = kv_length - remove + sum(size for _, size in reserve)
        edit = CacheEdit(
            index, remove, reserve, kv_length, kv_after, pending_plan is not None, pending_plan is not valid_plan
        )
        self._open_call = edit, num_new, decode
        return edit

    def end_call(
        self, sums: Any = None, *, rows: Any = None, threads: int = 1, tile: int | None = None
    ) -> LayerCallResult:
        """End a call: update the scores, and plan if the layer triggers.

        Parameters
        ----------
        sums
            Sums of the attention on each block, as of `sum_by_block`. Ignored in a call that does not score: outside
            decoding, or in a layer that does not evict.
        rows
            Instead of `sums`: the attention itself, ``[heads, queries, keys]`` or ``[heads, keys]``.
        threads, tile
            For `sum_by_block` on `rows`.

        Raises
        ------
        KvmnnError
            If the sums or rows do not match the length. Nothing has changed then, and `end_call` can be called again.
        """
        if self._open_call is None:
            raise KvmnnError("end: no call was begun")
        edit, num_new, decode = self._open_call
        kv_len = edit.kv_after + num_new
        config = self.config
        has_work = config.enable and not config.quantised and num_new > 0 and kv_len > 0
        scores = None
        if has_work and decode and edit.layer in config.evicting_layers:
            scores = self._update_scores(self.layers[edit.layer], kv_len, num_new, sums, rows, threads, tile)
        self._open_call = None
        layer = self.clock.record_call(self.layers, edit.layer, decode)
        was_reset = not decode and kv_len <= num_new
        if was_reset:  # a new conversation: for the engine of all layers at once, otherwise of this one
            self.clock.reset()
            if self.cadence == "tokens":
                self.layers[layer] = PlannerLayerState()
            else:
                self.layers = [PlannerLayerState() for _ in self.layers]
                self.meta.remove, self.meta.reserve = 0, ()
        if scores is None:
            return LayerCallResult(layer, False, kv_len, 0, False, was_reset, self.layers[layer].scores, None, kv_len)
        self.layers[layer].scores = scores
        layer_plan = None
        if kv_len >= config.effective_trigger_tokens and self.clock.is_due(
            self.layers[layer], config.effective_interval
        ):
            layer_plan = self._plan_layer(layer, scores, kv_len)
            num_kept = layer_plan.num_final_tokens
        else:  # the ratio that was written last times the length, rounded half up
            num_kept = max(1, int(float(np.float32(self.metrics.h2o_keep_ratio) * np.float32(kv_len)) + 0.5))
        return LayerCallResult(
            layer, True, kv_len, scores.size, layer_plan is not None, was_reset, scores, layer_plan, num_kept
        )

    def select_blocks(self, scores: Floats, kv_len: int) -> BlockPlan:
        """Plan a layer that triggers; subclasses may override this with other rules."""
        return plan_blocks(scores, kv_len, self.config)

    def end_step(self) -> int:
        """End a step of all layers; return the engine's shared length.

        It follows the last layer alone; for the cadence "tokens" it is 0.
        """
        return self.meta.sync()

    # -- internals -----------------------------------------------------------------------------------------------------

    def _resolve_layer(self, layer: int | None, decode: bool) -> int:
        if isinstance(self.clock, TokenCounter):
            if layer is None:
                raise KvmnnError("layer: expected a layer's number with cadence 'tokens'")
            return validate_int(layer, "layer", 0, len(self.layers) - 1)
        if layer is not None:
            raise KvmnnError("layer: cadence 'layer-calls' counts layers by itself")
        return self.clock.get_current_layer(len(self.layers)) if decode else 0

    def _build_window(
        self, kv_length: int, num_new: int, decode: bool, pending_plan: PendingPlan | None
    ) -> tuple[int, tuple[ReservePair, ...]]:
        """Return `remove` and `reserve` of this layer."""
        if self.cadence == "tokens":
            return (pending_plan.remove, pending_plan.pairs) if pending_plan else (0, ())
        meta = self.meta
        meta.add = num_new
        if decode and self.config.enable:
            meta.remove, meta.reserve = 0, ()
        if pending_plan:
            meta.remove, meta.reserve = pending_plan.remove, pending_plan.pairs
        if meta.remove > kv_length:
            meta.remove, meta.reserve = kv_length, ()
        if meta.reserve and not are_valid_pairs(meta.reserve, meta.remove):
            meta.reserve = ()
        if meta.previous == meta.remove and not meta.reserve:
            return kv_length, ()
        return meta.remove, () if self.config.quantised else meta.reserve

    def _update_scores(
        self, state: PlannerLayerState, kv_len: int, num_new: int, sums: Any, rows: Any, threads: int, tile: int | None
    ) -> Floats:
        """Return the layer's scores after this step."""
        heads = self.config.heads
        if (sums is None) == (rows is None):
            raise KvmnnError("end: expected either sums or rows of the attention")
        if rows is not None:
            array = to_rows(rows)
            if array.shape[2] != kv_len:
                raise KvmnnError(f"rows over {array.shape[2]} keys: expected {kv_len}, the layer's tokens")
            if heads not in (None, array.shape[0]) or array.shape[1] != num_new:
                raise KvmnnError(f"rows of shape {array.shape}: expected {heads or 'any'} heads and {num_new} queries")
            heads = array.shape[0]
            sums = sum_by_block(array, self.config.effective_block_tokens, threads=threads, tile=tile)
        elif heads is None:
            raise KvmnnError("sums without config.heads: expected the number of query heads to divide by")
        step_sums = to_scores(sums, "sums")
        if step_sums.size != self.config.count_blocks(kv_len):
            raise KvmnnError(f"{step_sums.size} sums for {kv_len} tokens: expected {self.config.count_blocks(kv_len)}")
        return update_ema_scores(
            state.scores, step_sums, count=heads * num_new, alpha=float(self.config.effective_alpha)
        )

    def _plan_layer(self, layer: int, scores: Floats, kv_len: int) -> BlockPlan:
        state = self.layers[layer]
        self.clock.record_trigger(state)
        start_ns = time.perf_counter_ns()
        layer_plan = self.select_blocks(scores, kv_len)
        self.metrics.record(layer_plan, (time.perf_counter_ns() - start_ns) // 1000)
        state.pending_plan = None
        if layer_plan.num_evicted:
            flat_pairs = tuple(layer_plan.retained_runs.reshape(-1).tolist())
            if self.cadence == "tokens":
                state.pending_plan = PendingPlan(layer_plan.window_tokens, flat_pairs, layer_plan.keep)
            else:
                state.pending_plan = PendingPlan(layer_plan.window_tokens, flat_pairs)
                state.scores = select_scores(scores, layer_plan.keep)
        return layer_plan


def select_scores(scores: Floats, keep: npt.NDArray[np.bool_]) -> Floats:
    """Return the scores of the kept blocks, in order."""
    selected: Floats = scores[keep[: scores.size]]
    return selected


@dataclass(frozen=True, kw_only=True)
class PlannerStats(Record):
    """The figures of `PlannerMetrics`: of the last plan, and the tokens that all plans dropped."""

    #: Figures of the last plan that its floor did not cancel: one event, not a mean.
    h2o_keep_ratio: float = 1.0
    h2o_lossy_ratio: float = 1.0
    h2o_target_keep_effective: float = 1.0
    h2o_floor_keep_by_recent_sink: float = 1.0
    h2o_block_quantized_keep: float = 1.0
    h2o_last_evict_tokens: int = 0
    #: Total tokens that plans dropped.
    h2o_total_evict_tokens: int = 0
    #: Microseconds of the last planning, in kvmnn.
    h2o_evict_us: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannerLayerStats(PlannerStats):
    """Figures of one layer, each from the layer's own plans."""

    layer: int
    #: Tokens of the text, and those in the layer's cache.
    tokens_seen: int
    tokens_kept: int
    #: Plans that were made, those that dropped nothing included.
    triggers: int

    @property
    @json_key()
    def lossy_ratio(self) -> float:
        """Return tokens seen over tokens kept."""
        return self.tokens_seen / self.tokens_kept if self.tokens_kept else 1.0


@dataclass(frozen=True, kw_only=True)
class H2OStats(PlannerStats):
    """The figures of all layers, as the engine shares them, and of each layer."""

    layers: tuple[PlannerLayerStats, ...] = ()


class StatsRecorder:
    """Records the figures of each layer; those of the planner are shared by all layers."""

    def __init__(self, planner: H2OPlanner) -> None:
        self._planner = planner
        self._layers = [PlannerMetrics() for _ in planner.layers]
        self._triggers = [0] * len(planner.layers)

    def record(self, call: LayerCallResult) -> None:
        """Record a call of a layer."""
        if call.plan is not None:
            self._triggers[call.layer] += 1
            self._layers[call.layer].record(call.plan, self._planner.metrics.h2o_evict_us)

    def to_stats(self, num_seen: int, tokens_kept: Sequence[int]) -> H2OStats:
        """Return the figures after `num_seen` tokens, of which the layers store `tokens_kept`."""

        def copy_fields(metrics: PlannerMetrics) -> dict[str, Any]:
            return {entry.name: getattr(metrics, entry.name) for entry in fields(PlannerStats)}

        layers = tuple(
            PlannerLayerStats(
                **copy_fields(metrics), layer=number, tokens_seen=num_seen, tokens_kept=num_kept, triggers=triggers
            )
            for number, (metrics, num_kept, triggers) in enumerate(
                zip(self._layers, tokens_kept, self._triggers, strict=True)
            )
        )
        return H2OStats(**copy_fields(self._planner.metrics), layers=layers)


def merge_stats(runs: Iterable[H2OStats]) -> H2OStats | None:
    """Merge the figures of several texts: counts are added up, the others are those of the last text."""
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
