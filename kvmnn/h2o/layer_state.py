"""What the planner remembers of one layer, and what it reports of one call and of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from ..dtypes import Floats
from ..packed.reserve import INT32_MAX, ReservePair
from .plan import BlockPlan


@dataclass
class PendingPlan:
    """A plan that waits for the layer's next call.

    Attributes
    ----------
    remove
        Tokens the layer had when it was made, all of which form the window.
    flat_pairs
        The pairs as the engine's list: begin, size, begin, size ...
    keep
        Blocks whose scores stay when it is applied; None where the scores were cut already.
    """

    remove: int
    flat_pairs: tuple[int, ...]
    keep: npt.NDArray[np.bool_] | None = None

    def is_applicable(self, kv_length: int) -> bool:
        """Whether it may be applied to a layer of `kv_length` tokens; if not, it is stale."""
        if len(self.flat_pairs) % 2 or self.remove != kv_length:
            return False
        return are_valid_pairs(self.pairs, self.remove)

    @property
    def pairs(self) -> tuple[ReservePair, ...]:
        """The list as pairs; a last odd number is left out."""
        return tuple(zip(self.flat_pairs[::2], self.flat_pairs[1::2], strict=False))


def are_valid_pairs(pairs: tuple[ReservePair, ...], remove: int) -> bool:
    """Whether every pair has a size, lies in the window, and starts no earlier than the one before ends."""
    end = 0
    for begin, size in pairs:
        if size <= 0 or begin < end or begin + size > min(remove, INT32_MAX):
            return False
        end = begin + size
    return True


@dataclass
class PlannerLayerState:
    """Scores, plans and, for cadence "tokens", clocks of one layer.

    Attributes
    ----------
    scores
        Running mean of the attention on each block.
    pending_plan
        The plan for the layer's next call.
    active_pairs
        The pairs applied last.
    num_steps, last_trigger_step
        Decode steps of this layer, and which of them triggered last.
    """

    scores: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    pending_plan: PendingPlan | None = None
    active_pairs: tuple[ReservePair, ...] = ()
    num_steps: int = 0
    last_trigger_step: int = 0


@dataclass
class PlannerMetrics:
    """The engine's figures, under its names; each is what the last call that wrote it left.

    Attributes
    ----------
    h2o_keep_ratio, h2o_lossy_ratio
        Of the last plan that was not dominated by its floor: one event of one layer, no mean.
    h2o_target_keep_effective, h2o_floor_keep_by_recent_sink, h2o_block_quantized_keep
        Shares of the last trigger.
    h2o_last_evict_tokens
        Tokens that the last trigger planned to drop.
    h2o_total_evict_tokens
        Their sum over all layers and triggers.
    h2o_pending_remove, h2o_pending_n_reserve, h2o_pending_plan_ready
        The plan of the last call, 0 where it made none; n_reserve counts pairs.
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
    h2o_pending_remove: int = 0
    h2o_pending_n_reserve: int = 0
    h2o_pending_plan_ready: int = 0
    h2o_evict_us: int = 0

    def to_dict(self) -> dict[str, float | int]:
        """Name to figure."""
        return asdict(self)

    def set_pending(self, plan: BlockPlan | None) -> None:
        """Describe the plan of this call."""
        self.h2o_pending_remove = plan.window_tokens if plan else 0
        self.h2o_pending_n_reserve = len(plan.reserve_pairs) if plan else 0
        self.h2o_pending_plan_ready = int(plan is not None)

    def record(self, plan: BlockPlan, microseconds: int) -> None:
        """Describe a trigger."""
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
    """What to do with a layer's cache before its new tokens are appended; nothing where `remove` is 0.

    Attributes
    ----------
    layer
        The layer whose plan was looked at.
    remove, reserve
        For `PackedCache.realloc` or `append`.
    kv_before, kv_after
        Tokens before and after.
    was_pending
        Whether a plan was waiting.
    is_stale
        Whether it was dropped because it does not fit the layer any more.
    """

    layer: int
    remove: int
    reserve: tuple[ReservePair, ...]
    kv_before: int
    kv_after: int
    was_pending: bool
    is_stale: bool


@dataclass(frozen=True, eq=False)
class LayerCallResult:
    """What one call of a layer did.

    Attributes
    ----------
    layer
        As the planner counts; 0 for every call outside decoding with cadence "layer-calls".
    is_enabled
        Whether the call took part in scoring.
    kv_len
        Tokens, the new ones included.
    num_blocks
        Blocks that were scored, 0 where not enabled.
    has_triggered
        Whether a plan was made, if only to find that nothing goes.
    was_reset
        Whether the call began a new conversation.
    scores
        After this step's mean, before a plan cut them.
    plan
        The plan where one was made; it waits for the layer's next call if it drops anything.
    final_keep
        Tokens that the engine takes for its lossless budget: after the plan; without a trigger `kv_len` times the keep
        ratio of whatever layer triggered last, which is no eviction.
    """

    layer: int
    is_enabled: bool
    kv_len: int
    num_blocks: int
    has_triggered: bool
    was_reset: bool
    scores: Floats
    plan: BlockPlan | None
    final_keep: int
