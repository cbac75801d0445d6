"""Sum attention rows to block scores, bit for bit as the engine does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._util.validation import validate_int
from ...dtypes import Floats
from ...errors import KvmnnError
from ...packed.compaction import INT32_MAX
from . import _scores


def sum_by_block(
    rows: Any, block_tokens: int, *, threads: int = 1, tile: int | None = None, out: Floats | None = None
) -> Floats:
    """Return the attention that each block of keys received, summed over heads, queries and its keys.

    The additions are float32 and in the engine's order: each of its threads takes a run of heads and adds, for each
    block, head by head, tile by tile, query by query, key by key; then the threads' sums are added in order. (The
    engine adds them in the order in which threads finish, which is not reproducible.) Infinities and NaN stay in their
    block.

    Parameters
    ----------
    rows
        Attention on each key: ``[heads, queries, keys]`` or, for one query, ``[heads, keys]``; floats of any width.
        Rows of every query are true rows: the engine reads a packed buffer wrongly where there are several queries,
        which is not copied.
    block_tokens
        Keys in a block; less than 1 counts as 1.
    threads
        Threads of the engine whose order of additions is followed; kvmnn itself works on one.
    tile
        Keys in a tile of the engine's attention: 64 with flash attention, None for all keys at once. It changes the
        bits only where there are several queries.
    out
        Where to put the result; must not overlap `rows`.

    Returns
    -------
    float32 ``[blocks]``, blocks being keys / block_tokens rounded up.

    Raises
    ------
    KvmnnError
        For rows of another shape or type, and without keys.
    """
    array = to_rows(rows)
    block = max(1, validate_int(block_tokens, "block_tokens", -INT32_MAX - 1, INT32_MAX))
    keys = array.shape[2]
    tile_keys = keys if tile is None else validate_int(tile, "tile", 1, INT32_MAX)
    blocks = -(-keys // block)
    if out is None:
        out = np.empty(blocks, np.float32)
    elif out.dtype != np.float32 or out.shape != (blocks,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise KvmnnError(f"out: expected a writable contiguous float32 array of {blocks}")
    _scores.sum_blocks(array, min(block, keys), tile_keys, validate_int(threads, "threads", 1, INT32_MAX), out)
    return out


def update_ema_scores(scores: Any, sums: Any, *, count: int, alpha: float) -> Floats:
    """Return the scores after a step: ``alpha * score + (1 - alpha) * sums / count``, float32 after every operation.

    Parameters
    ----------
    scores
        Scores so far. Cut, or filled up with 0, to as many as there are sums.
    sums
        Result of `sum_by_block` for this step.
    count
        Heads times queries that were added up; less than 1 counts as 1.
    alpha
        Weight of the old scores, clamped to 0 to 1.

    Returns
    -------
    float32 ``[blocks]``, new. The first steps are not corrected: with alpha 0.9 the first gives a tenth.
    """
    step_sums = to_scores(sums, "sums")
    previous = to_scores(scores, "scores")
    new_scores = np.zeros(step_sums.size, np.float32)
    new_scores[: min(previous.size, step_sums.size)] = previous[: step_sums.size]
    weight = float(np.float32(min(1.0, max(0.0, alpha))))
    _scores.update_running_mean(new_scores, step_sums, float(np.float32(max(1, count))), weight)
    return new_scores


def to_rows(rows: Any) -> Floats:
    """Return `rows` as float32 ``[heads, queries, keys]``, contiguous along the keys; copied only where it must be."""
    array = np.asarray(rows)
    if array.dtype.kind != "f":
        raise KvmnnError(f"attention rows are {array.dtype}: expected floats")
    if array.ndim == 2:
        array = array[:, None, :]
    if array.ndim != 3:
        raise KvmnnError(f"attention rows have the shape {array.shape}: expected (heads, queries, keys)")
    if not 0 < array.shape[2] <= INT32_MAX:
        raise KvmnnError(f"attention rows over {array.shape[2]} keys: expected 1 to {INT32_MAX}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if array.strides[2] != 4 or array.strides[0] % 4 or array.strides[1] % 4 or not array.flags.aligned:
        array = np.require(array, requirements=("C", "A"))  # ascontiguousarray leaves words that straddle addresses
    return array


def to_scores(values: Any, name: str) -> Floats:
    """Return `values` as a contiguous float32 vector; wider numbers are rounded."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "fiu"):
        raise KvmnnError(f"{name} are {array.dtype} of shape {array.shape}: expected a list of numbers")
    with np.errstate(over="ignore"):
        return np.require(array, np.float32, ("C", "A"))
