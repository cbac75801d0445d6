"""What an eviction that the planner did not make leaves of its plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import KvmnnError
from ...h2o.layer_state import PlannerLayerState, are_valid_pairs
from ...packed.reserve import ReservePair


def validate_ranges(layer: int, ranges: Sequence[ReservePair], tokens: int) -> list[ReservePair]:
    """`ranges` as a list; refused unless they are ascending ranges of a layer's tokens."""
    if not are_valid_pairs(tuple(ranges), tokens):
        raise KvmnnError(f"layer {layer}: {list(ranges)[:4]} are no ascending ranges of its {tokens} tokens")
    return list(ranges)


def invalidate_plan(state: PlannerLayerState, ranges: Sequence[ReservePair], block_tokens: int) -> None:
    """The planner's view of a layer that lost tokens: no plan in waiting, scores of the blocks that are left."""
    state.pending_plan = None
    kept_blocks = [np.arange(first, first + size) // block_tokens for first, size in ranges]
    blocks = np.unique(np.concatenate(kept_blocks)) if kept_blocks else np.empty(0, np.int64)
    state.scores = state.scores[blocks[blocks < state.scores.size]]
