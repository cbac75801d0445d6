"""What an eviction that the planner did not make leaves of its plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import KvmnnError
from ...h2o.layer_state import LayerState, valid_pairs
from ...packed.reserve import Pair


def check_kept(layer: int, pairs: Sequence[Pair], tokens: int) -> list[Pair]:
    """`pairs` as a list; refused unless they are ascending ranges of a layer's tokens."""
    if not valid_pairs(tuple(pairs), tokens):
        raise KvmnnError(f"layer {layer}: {list(pairs)[:4]} are no ascending ranges of its {tokens} tokens")
    return list(pairs)


def forget_plan(state: LayerState, pairs: Sequence[Pair], block: int) -> None:
    """The planner's view of a layer that lost tokens: no plan in waiting, scores of the blocks that are left."""
    state.pending = None
    kept = [np.arange(first, first + size) // block for first, size in pairs]
    blocks = np.unique(np.concatenate(kept)) if kept else np.empty(0, np.int64)
    state.scores = state.scores[blocks[blocks < state.scores.size]]
