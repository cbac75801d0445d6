"""One plan: which blocks of a layer stay, by score, and what that makes of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import whole
from ..errors import KvmnnError
from ..packed.reserve import INT32_MAX, Pair
from . import _scores
from .config import H2OConfig
from .scores import as_scores

_U64 = (1 << 64) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What stays of one layer, and the engine's figures about it.

    `remove` and `reserve` go to `PackedCache.realloc` as they are; where nothing is to be dropped they are 0 and empty,
    and the call changes nothing.

    Attributes
    ----------
    kv_len
        Tokens of the layer, the newest included.
    block_tokens
        Tokens in a block.
    keep
        bool ``[blocks]``: the blocks that stay if the plan is carried out.
    floor_blocks
        (sink, recent): blocks at the start and at the end that stay whatever their scores; they may overlap.
    runs
        int64 ``[n, 2]``: (begin, size) of neighbouring kept blocks in tokens, listed also where the floor dominates.
    target_before_floor
        Tokens to keep by the ratio alone.
    floor_tokens
        Tokens in the blocks of sink and recent.
    floor_dominates
        The floor reaches the target, so the engine drops nothing at all.
    quantized_keep
        The target in whole blocks.
    bytes_per_token
        As in the configuration.
    """

    kv_len: int
    block_tokens: int
    keep: npt.NDArray[np.bool_]
    floor_blocks: tuple[int, int]
    runs: npt.NDArray[np.int64]
    target_before_floor: int
    floor_tokens: int
    floor_dominates: bool
    quantized_keep: int
    bytes_per_token: int | None = None

    @property
    def target(self) -> int:
        """Tokens to keep: by the ratio, but not below the floor."""
        return max(self.target_before_floor, self.floor_tokens)

    @cached_property
    def kept_tokens(self) -> int:
        """Tokens in the blocks of `keep`."""
        return int(self.runs[:, 1].sum())

    @property
    def final_keep(self) -> int:
        """Tokens that are left once the plan is applied: all of them where the floor dominates."""
        return self.kv_len if self.floor_dominates else self.kept_tokens

    @property
    def evicted(self) -> int:
        """Tokens that go."""
        return self.kv_len - self.final_keep

    @property
    def remove(self) -> int:
        """Tokens of the window, for `PackedCache.realloc`: all, or 0 where nothing goes."""
        return self.kv_len if self.evicted else 0

    @cached_property
    def reserve(self) -> tuple[Pair, ...]:
        """Pairs (begin, size) of what stays of the window, for `PackedCache.realloc`; empty where nothing goes."""
        return tuple((begin, size) for begin, size in self.runs.tolist()) if self.evicted else ()

    @property
    def reserve_bytes(self) -> int:
        """Bytes of the pairs as the engine keeps them."""
        return 0 if self.floor_dominates else 8 * len(self.runs)

    def tokens(self) -> npt.NDArray[np.int64]:
        """Indices of the tokens that stay, ascending."""
        if not self.evicted:
            return np.arange(self.kv_len)
        return np.flatnonzero(np.repeat(self.keep, self.block_tokens)[: self.kv_len])

    # -- figures -------------------------------------------------------------------------------------------------------

    def to_lower(self, config: H2OConfig) -> tuple[str, ...]:
        """The options of `config` that make the floor reach the target, by their names: those to lower."""
        target = self.target_before_floor
        floors = {"recent_tokens": min(config.recent_tokens, self.kv_len), "sink_tokens": config.sink_tokens}
        found = tuple(name for name, tokens in floors.items() if tokens >= target)
        if found:
            return found
        return ("block_tokens",) if sum(floors.values()) < target else (max(floors, key=lambda name: floors[name]),)

    @property
    def floor_keep(self) -> np.float32:
        """Share of the floor, float32."""
        return share(self.floor_tokens, self.kv_len)

    @property
    def target_keep_effective(self) -> np.float32:
        """Share of the target, float32."""
        return share(self.target, self.kv_len)

    @property
    def block_quantized_keep(self) -> np.float32:
        """Share of the target in whole blocks, float32."""
        return share(self.quantized_keep, self.kv_len)

    @property
    def keep_ratio(self) -> np.float32:
        """Share of the tokens that stay, float32."""
        return share(self.final_keep, self.kv_len)

    @property
    def lossy_ratio(self) -> np.float32:
        """Bytes before over bytes after, the engine's pairs among them, float32; of tokens without bytes_per_token."""
        if self.bytes_per_token is None:
            return share(self.kv_len, self.final_keep)
        after = self.final_keep * self.bytes_per_token + self.reserve_bytes
        return share(self.kv_len * self.bytes_per_token, after)


def plan(scores: Any, kv_len: int, config: H2OConfig | None = None, **options: Any) -> Plan:
    """Choose the blocks that stay, as the engine chooses them when a layer triggers.

    The blocks that sink and recent touch stay. If they reach the target, the plan drops nothing. Otherwise the blocks
    with the highest scores join them until the target is met; of equal scores the block nearer the start wins. Zeros
    of both signs are equal, infinities are the highest and the lowest, and NaN comes below everything.

    Parameters
    ----------
    scores
        One number for each block, cut to float32.
    kv_len
        Tokens of the layer.
    config
        Options; None for the engine's defaults.
    options
        Attributes of `H2OConfig` to set instead of a `config`.

    Raises
    ------
    KvmnnError
        When there are not as many scores as blocks, or `kv_len` is not 1 to 2**31 - 1.

    Examples
    --------
    >>> made = plan([9, 1, 5, 7, 3, 2], 12, block_tokens=2, sink_tokens=1, recent_tokens=1, target_lossy_ratio=2)
    >>> made.reserve, made.remove
    (((0, 2), (6, 2), (10, 2)), 12)
    """
    config = _config(config, options)
    whole(kv_len, "kv_len", 1, INT32_MAX)
    block, blocks = config.block, config.blocks(kv_len)
    values = as_scores(scores, "scores")
    if values.size != blocks:
        raise KvmnnError(f"{values.size} scores for {kv_len} tokens: expected {blocks}, one for each block of {block}")
    sink = -(-min(kv_len, max(0, config.sink_tokens)) // block)
    first_recent = max(0, kv_len - max(0, config.recent_tokens)) // block
    keep = np.zeros(blocks, np.bool_)
    keep[:sink] = True
    keep[first_recent:] = True
    low, high = sink, max(sink, first_recent)
    floor = kv_len - (high - low) * block
    wanted = int(np.ceil(config.ratio * np.float32(kv_len)))
    before_floor = min(max(1, wanted), kv_len)
    missing = max(0, -(-(before_floor - floor) // block))
    keep[low:high] = _best(values[low:high], missing)
    return Plan(
        kv_len=kv_len,
        block_tokens=block,
        keep=keep,
        floor_blocks=(sink, blocks - min(first_recent, blocks)),
        runs=_runs(keep, block, kv_len),
        target_before_floor=before_floor,
        floor_tokens=floor,
        floor_dominates=floor >= before_floor,
        quantized_keep=min(kv_len, floor + missing * block),
        bytes_per_token=config.bytes_per_token,
    )


def never_drops(config: H2OConfig, tokens: int, names: Mapping[str, str] | None = None) -> str | None:
    """Why no plan for up to `tokens` tokens drops any, and which option to change; None where one can.

    Parameters
    ----------
    names
        What its options are called, where that is not as in `H2OConfig`.
    """
    if tokens < config.trigger_tokens:
        return f"it plans from trigger_min_tokens {config.trigger_tokens:,} on, there are {tokens:,}: lower it"
    made = _plan_of(tokens, config)
    # blocks that recent tokens only touch stay whole: one length may drop none where another of its block does
    if any(_plan_of(fewer, config).evicted for fewer in range(_least_alike(tokens, config), tokens + 1)):
        return None
    if not made.floor_dominates:
        return "its target is all of them"
    options = " and ".join(
        f"{(names or {}).get(name, name)} ({getattr(config, name):,})" for name in made.to_lower(config)
    )
    return (
        f"sink and recent reach the target, {made.floor_tokens:,} of {tokens:,} tokens where "
        f"{made.target_before_floor:,} are to stay: lower {options}"
    )


def _plan_of(tokens: int, config: H2OConfig) -> Plan:
    return plan(np.zeros(config.blocks(tokens), np.float32), tokens, config)


def _least_alike(tokens: int, config: H2OConfig) -> int:
    """From here on up to `tokens`, lengths have every place that they can have in a block."""
    return max(config.trigger_tokens, tokens - config.block)


def share(part: int, of: int) -> np.float32:
    """`part` over `of`, both rounded to float32 first."""
    return _float(part) / _float(of)


def _float(number: int) -> np.float32:
    """An integer rounded once, as a conversion in C does; by way of a double it could be rounded twice."""
    return np.float32(np.array(number & _U64, np.uint64).astype(np.float32))


def _config(config: H2OConfig | None, options: dict[str, Any]) -> H2OConfig:
    if config is None:
        return H2OConfig(**options)
    if options:
        raise TypeError("options stand in place of a config: give one or the other")
    return config


def _best(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.bool_]:
    """The `count` highest scores; of equal ones the first. Every candidate is a whole block (see docs/h2o.md)."""
    if count == 0 or count >= scores.size:
        return np.full(scores.size, count > 0)
    keys = np.empty(scores.size, np.int32)
    _scores.order_keys(scores, keys)
    least = np.partition(keys, scores.size - count)[scores.size - count]
    chosen: npt.NDArray[np.bool_] = keys > least
    equal = np.flatnonzero(keys == least)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen


def _runs(keep: npt.NDArray[np.bool_], block: int, kv_len: int) -> npt.NDArray[np.int64]:
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2) * block
    runs = np.empty_like(edges)
    runs[:, 0] = edges[:, 0]
    runs[:, 1] = np.minimum(edges[:, 1], kv_len) - edges[:, 0]
    return runs
