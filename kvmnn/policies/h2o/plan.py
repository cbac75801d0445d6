"""Plan which blocks of a layer stay, by score; plans of all layers, and a block map as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.text import LOSSY, UNCHANGED, pluralize
from ..._util.validation import format_fields, validate_int
from ...dtypes import Floats
from ...errors import KvmnnError
from ...files.schema import Record, json_key
from ...packed.compaction import INT32_MAX, ReservePair
from . import _scores
from .config import H2OConfig
from .scores import to_scores

_UINT64_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockPlan:
    """The blocks of one layer that stay, and the engine's figures about them.

    `window_tokens` and `reserve_pairs` are arguments of `PackedCache.realloc`; if nothing is dropped they are 0 and
    empty, and the call changes nothing.
    """

    __repr__ = format_fields

    #: Tokens of the layer, the newest included.
    kv_len: int
    #: Tokens in a block.
    block_tokens: int
    #: bool ``[blocks]``: the blocks that stay if the plan is applied.
    keep: npt.NDArray[np.bool_]
    #: (sink, recent): blocks at the start and at the end that stay whatever their scores; they may overlap.
    num_floor_blocks: tuple[int, int]
    #: int64 ``[n, 2]``: (begin, size) of neighbouring kept blocks in tokens, listed also where the floor dominates.
    retained_runs: npt.NDArray[np.int64]
    #: Tokens to keep by the ratio alone.
    target_before_floor: int
    #: Tokens in the blocks of sink and recent.
    floor_tokens: int
    #: The floor reaches the target, so the engine drops nothing at all.
    floor_dominates: bool
    #: The target in whole blocks.
    quantized_keep: int
    #: As in `H2OConfig`.
    bytes_per_token: int | None = None

    @property
    def target(self) -> int:
        """Return the number of tokens to keep: by the ratio, but not below the floor."""
        return max(self.target_before_floor, self.floor_tokens)

    @cached_property
    def num_kept_tokens(self) -> int:
        """Return the number of tokens in the blocks of `keep`."""
        return int(self.retained_runs[:, 1].sum())

    @property
    def num_final_tokens(self) -> int:
        """Return the number of tokens after the plan is applied: all if the floor dominates."""
        return self.kv_len if self.floor_dominates else self.num_kept_tokens

    @property
    def num_evicted(self) -> int:
        """Return the number of tokens that are dropped."""
        return self.kv_len - self.num_final_tokens

    @property
    def window_tokens(self) -> int:
        """Return the number of tokens of the window for `PackedCache.realloc`: all, or 0 if nothing is dropped."""
        return self.kv_len if self.num_evicted else 0

    @cached_property
    def reserve_pairs(self) -> tuple[ReservePair, ...]:
        """Return (begin, size) of the kept runs in the window, for `PackedCache.realloc`; empty if all stay."""
        return tuple((begin, size) for begin, size in self.retained_runs.tolist()) if self.num_evicted else ()

    @property
    def reserve_bytes(self) -> int:
        """Return the number of bytes of the pairs as the engine stores them."""
        return 0 if self.floor_dominates else 8 * len(self.retained_runs)

    def list_kept_tokens(self) -> npt.NDArray[np.int64]:
        """Return the indices of the tokens that stay, ascending."""
        if not self.num_evicted:
            return np.arange(self.kv_len)
        return np.flatnonzero(np.repeat(self.keep, self.block_tokens)[: self.kv_len])

    # -- figures -------------------------------------------------------------------------------------------------------

    def list_options_to_lower(self, config: H2OConfig) -> tuple[str, ...]:
        """Return the names of the options of `config` that make the floor reach the target."""
        target = self.target_before_floor
        tokens_by_option = {"recent_tokens": min(config.recent_tokens, self.kv_len), "sink_tokens": config.sink_tokens}
        exceeding = tuple(name for name, tokens in tokens_by_option.items() if tokens >= target)
        if exceeding:
            return exceeding
        if sum(tokens_by_option.values()) < target:
            return ("block_tokens",)
        return (max(tokens_by_option, key=lambda name: tokens_by_option[name]),)

    @property
    def floor_keep_ratio(self) -> np.float32:
        """Return the floor as a share of the tokens, float32."""
        return divide_float32(self.floor_tokens, self.kv_len)

    @property
    def effective_target_ratio(self) -> np.float32:
        """Return the target as a share of the tokens, float32."""
        return divide_float32(self.target, self.kv_len)

    @property
    def block_quantized_keep_ratio(self) -> np.float32:
        """Return the target in whole blocks as a share of the tokens, float32."""
        return divide_float32(self.quantized_keep, self.kv_len)

    @property
    def keep_ratio(self) -> np.float32:
        """Return the share of the tokens that stay, float32."""
        return divide_float32(self.num_final_tokens, self.kv_len)

    @property
    def lossy_ratio(self) -> np.float32:
        """Return bytes before over bytes after, the pairs included, float32; tokens if bytes_per_token is unknown."""
        if self.bytes_per_token is None:
            return divide_float32(self.kv_len, self.num_final_tokens)
        bytes_after = self.num_final_tokens * self.bytes_per_token + self.reserve_bytes
        return divide_float32(self.kv_len * self.bytes_per_token, bytes_after)


def plan_blocks(scores: Any, kv_len: int, config: H2OConfig | None = None, **options: Any) -> BlockPlan:
    """Select the blocks that stay, as the engine does when a layer triggers.

    The blocks that sink and recent touch stay. If they reach the target, the plan drops nothing, or with `floor` "keep"
    everything else, as the engine's documents have it. Otherwise the blocks
    with the highest scores join them until the target is met; of equal scores the block nearer the start wins. Zeros of
    both signs are equal, infinities are the highest and the lowest, and NaN comes below everything.

    Parameters
    ----------
    scores
        One number for each block, converted to float32.
    kv_len
        Tokens of the layer.
    config
        Options; None for the engine's defaults.
    options
        Attributes of `H2OConfig` to set instead of a `config`.

    Raises
    ------
    KvmnnError
        If there are not as many scores as blocks, or `kv_len` is not 1 to 2**31 - 1.

    Examples
    --------
    >>> plan = plan_blocks([9, 1, 5, 7, 3, 2], 12, block_tokens=2, sink_tokens=1, recent_tokens=1, target_lossy_ratio=2)
    >>> plan.reserve_pairs, plan.window_tokens
    (((0, 2), (6, 2), (10, 2)), 12)
    """
    if config is None:
        config = H2OConfig(**options)
    elif options:
        raise TypeError("options stand in place of a config: give one or the other")
    validate_int(kv_len, "kv_len", 1, INT32_MAX)
    block_tokens, num_blocks = config.effective_block_tokens, config.count_blocks(kv_len)
    block_scores = to_scores(scores, "scores")
    if block_scores.size != num_blocks:
        raise KvmnnError(
            f"{block_scores.size} scores for {kv_len} tokens: expected {num_blocks}, one for each block of "
            f"{block_tokens}"
        )
    num_sink_blocks = -(-min(kv_len, max(0, config.sink_tokens)) // block_tokens)
    first_recent = max(0, kv_len - max(0, config.recent_tokens)) // block_tokens
    keep = np.zeros(num_blocks, np.bool_)
    keep[:num_sink_blocks] = True
    keep[first_recent:] = True
    first_candidate, candidate_end = num_sink_blocks, max(num_sink_blocks, first_recent)
    floor_tokens = kv_len - (candidate_end - first_candidate) * block_tokens
    target_tokens = int(np.ceil(config.effective_keep_ratio * np.float32(kv_len)))
    clamped_target = min(max(1, target_tokens), kv_len)
    num_missing_blocks = max(0, -(-(clamped_target - floor_tokens) // block_tokens))
    candidates = slice(first_candidate, candidate_end)
    keep[candidates] = _select_highest(block_scores[candidates], num_missing_blocks)
    # (begin, size) of neighbouring kept blocks in tokens; the last block may be incomplete.
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2) * block_tokens
    retained_runs = np.stack([edges[:, 0], np.minimum(edges[:, 1], kv_len) - edges[:, 0]], axis=1)
    return BlockPlan(
        kv_len=kv_len,
        block_tokens=block_tokens,
        keep=keep,
        num_floor_blocks=(num_sink_blocks, num_blocks - min(first_recent, num_blocks)),
        retained_runs=retained_runs,
        target_before_floor=clamped_target,
        floor_tokens=floor_tokens,
        floor_dominates=config.floor == "engine" and floor_tokens >= clamped_target,
        quantized_keep=min(kv_len, floor_tokens + num_missing_blocks * block_tokens),
        bytes_per_token=config.bytes_per_token,
    )


def explain_no_eviction(config: H2OConfig, tokens: int, option_names: Mapping[str, str] | None = None) -> str | None:
    """Explain why no plan for up to `tokens` tokens drops any, and which option to change; None where one can."""
    if tokens < config.effective_trigger_tokens:
        return (
            f"it plans from trigger_min_tokens {config.effective_trigger_tokens:,} on, there are {tokens:,}: lower it"
        )
    # Blocks that recent tokens only touch stay whole: one length may drop none where another of its block does. These
    # lengths have every place that they can have in a block.
    min_tokens = max(config.effective_trigger_tokens, tokens - config.effective_block_tokens)
    for num_tokens in range(min_tokens, tokens + 1):
        full_plan = plan_blocks(np.zeros(config.count_blocks(num_tokens), np.float32), num_tokens, config)
        if full_plan.num_evicted:
            return None
    if not full_plan.floor_dominates and (config.floor == "engine" or full_plan.num_evicted):
        return "its target is all of them"
    options = " and ".join(
        f"{(option_names or {}).get(name, name)} ({getattr(config, name):,})"
        for name in full_plan.list_options_to_lower(config)
    )
    return (
        f"sink and recent reach the target, {full_plan.floor_tokens:,} of {tokens:,} tokens where "
        f"{full_plan.target_before_floor:,} are to stay: lower {options}"
    )


def divide_float32(numerator: int, denominator: int) -> np.float32:
    """Divide two numbers after rounding both to float32."""
    return _to_float32(numerator) / _to_float32(denominator)


def _to_float32(number: int) -> np.float32:
    """Round an integer once, as a conversion in C does; through a double it could be rounded twice."""
    return np.float32(np.array(number & _UINT64_MASK, np.uint64).astype(np.float32))


def _select_highest(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `count` highest scores; of equal ones the first.

    Every candidate is a whole block (docs/h2o.md).
    """
    if count == 0 or count >= scores.size:
        return np.full(scores.size, count > 0)
    keys = np.empty(scores.size, np.int32)
    _scores.compute_order_keys(scores, keys)
    threshold = np.partition(keys, scores.size - count)[scores.size - count]
    is_selected: npt.NDArray[np.bool_] = keys > threshold
    ties = np.flatnonzero(keys == threshold)
    is_selected[ties[: count - np.count_nonzero(is_selected)]] = True
    return is_selected


MAP_LEGEND = "S sink, # heavy hitter, R recent, . dropped, 1 to 9 tenths kept"
MAX_MAP_LINES = 8


def render_block_map(plan: BlockPlan, width: int = 80) -> list[str]:
    """Render a map of letters; each line begins with its first token."""
    sink, recent = plan.num_floor_blocks
    letters = np.where(plan.keep | (plan.num_evicted == 0), "#", ".")
    letters[letters.size - recent :] = "R"
    letters[:sink] = "S"
    label_width = len(f"{plan.kv_len:,}") + 2
    columns = max(10, width - label_width)
    blocks_per_cell = -(-letters.size // (columns * MAX_MAP_LINES))
    cells = [_merge_letters(letters[i : i + blocks_per_cell]) for i in range(0, letters.size, blocks_per_cell)]
    tokens_per_cell = blocks_per_cell * plan.block_tokens
    return [
        f"{first * tokens_per_cell:>{label_width - 2},}  " + "".join(cells[first : first + columns])
        for first in range(0, len(cells), columns)
    ]


def compute_tokens_per_letter(plan: BlockPlan, width: int = 80) -> int:
    """Return the number of tokens per letter of `render_block_map`."""
    columns = max(10, width - len(f"{plan.kv_len:,}") - 2)
    return -(-plan.keep.size // (columns * MAX_MAP_LINES)) * plan.block_tokens


def _merge_letters(letters: npt.NDArray[np.str_]) -> str:
    kinds = set(letters.tolist())
    if len(kinds) == 1:
        return str(kinds.pop())
    if "." in kinds:
        return str(min(9, max(1, round(10 * float(np.mean(letters != "."))))))
    return "#" if "#" in kinds else "S"


MAX_SHOWN_PAIRS = 100  # of a layer


def format_reserve(pairs: Sequence[ReservePair]) -> str:
    """Format pairs as for `kvmnn mnn compact --reserve`; only the first if there are very many."""
    pairs_text = ",".join(f"{begin}:{size}" for begin, size in pairs[:MAX_SHOWN_PAIRS])
    num_hidden = len(pairs) - MAX_SHOWN_PAIRS
    if num_hidden <= 0:
        return pairs_text
    return f"{pairs_text} ... {pluralize(num_hidden, 'pair')} more (-o writes them all)"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScores:
    """Scores of one layer."""

    #: Name of the source.
    name: str
    #: Tokens of the layer.
    kv_len: int
    #: float32 ``[blocks]``.
    scores: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan(Record):
    """The plan of one layer."""

    json_keys = (
        "**plan_entry name tokens=plan.kv_len blocks=plan.keep.size tokens_after=plan.num_final_tokens "
        "evicted=plan.num_evicted target=plan.target_before_floor floor_tokens=plan.floor_tokens "
        "floor_dominates=plan.floor_dominates quantized_keep=plan.quantized_keep keep_ratio=_keep_ratio "
        "lossy_ratio=_lossy_ratio lossy_ratio_of=_ratio_basis keep=_keep_map"
    )

    #: Number of the layer, and name of the source of its scores.
    layer: int
    name: str
    plan: BlockPlan

    @property
    def plan_entry(self) -> dict[str, Any]:
        """Return the entry of a layer for `kvmnn mnn compact --plan`."""
        pairs = [list(pair) for pair in self.plan.reserve_pairs]
        return {"layer": self.layer, "remove": self.plan.window_tokens, "pairs": pairs}

    @property
    def _keep_ratio(self) -> float:
        return float(self.plan.keep_ratio)

    @property
    def _lossy_ratio(self) -> float:
        return float(self.plan.lossy_ratio)

    @property
    def _keep_map(self) -> str:
        is_unchanged = self.plan.num_evicted == 0
        return "".join("1" if is_kept or is_unchanged else "0" for is_kept in self.plan.keep)

    def format_lines(self, config: H2OConfig) -> list[str]:
        """Format how many tokens stay and, if any are evicted, the options for `kvmnn mnn compact`; no block map."""
        layer_plan = self.plan
        label = f"layer {self.layer}"
        head = f"{label}: " if self.name == label else f"{label} ({self.name}): "
        if not layer_plan.num_evicted:
            reason = self._explain_floor(config) if layer_plan.floor_dominates else "the target is all of them"
            return [head + f"{UNCHANGED}, all {layer_plan.kv_len:,} tokens stay: {reason}"]
        head += (
            f"{LOSSY}, {layer_plan.num_final_tokens:,} of {layer_plan.kv_len:,} tokens stay, "
            f"{float(layer_plan.lossy_ratio):.3f} x {self._ratio_basis}, target {layer_plan.target_before_floor:,}"
        )
        return [head, f"  --remove {layer_plan.window_tokens} --reserve {format_reserve(layer_plan.reserve_pairs)}"]

    def _explain_floor(self, config: H2OConfig) -> str:
        """Explain why the floor leaves nothing to evict, and which option to lower."""
        target = self.plan.target_before_floor
        options = " and ".join(
            f"--h2o {name} ({getattr(config, name):,})" for name in self.plan.list_options_to_lower(config)
        )
        return (
            f"sink and recent reach the target, {self.plan.floor_tokens:,} tokens in blocks of "
            f"{config.effective_block_tokens:,} where {target:,} are to stay: lower {options}"
        )

    @property
    def _ratio_basis(self) -> str:
        return "tokens" if self.plan.bytes_per_token is None else "bytes"


def _build_config_document(config: H2OConfig) -> dict[str, Any]:
    return {
        "block_tokens": config.effective_block_tokens,
        "sink_tokens": config.sink_tokens,
        "recent_tokens": config.recent_tokens,
        "target_mode": config.target_mode,
        "keep_ratio": float(config.effective_keep_ratio),
        "ema_alpha": float(config.effective_alpha),
        "bytes_per_token": config.bytes_per_token,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlans(Record):
    """The plans of all layers."""

    #: The file of scores, and the file that the plans were written to, if any.
    input: str | None = None
    output: str | None = None
    #: Elapsed time, reading included.
    seconds: float
    #: Options of the plans.
    config: H2OConfig = field(metadata={"convert": _build_config_document})
    #: One plan for each layer.
    layers: tuple[LayerPlan, ...]

    @property
    @json_key(after="output")
    def label(self) -> str:
        """Return ``"LOSSY"`` if any layer drops tokens, else ``"UNCHANGED"``."""
        return LOSSY if any(layer.plan.num_evicted for layer in self.layers) else UNCHANGED

    def to_plan_entries(self) -> list[dict[str, Any]]:
        """Return the entries for `kvmnn mnn compact --plan`."""
        return [layer.plan_entry for layer in self.layers]

    def format_lines(self, *, width: int = 100, picture: bool = True) -> list[str]:
        """Format each layer's figures, pairs and, unless `picture` is False, its blocks in `width` columns."""
        lines = []
        for layer in self.layers:
            lines += layer.format_lines(self.config)
            if picture:
                lines += [f"  {line}" for line in render_block_map(layer.plan, width - 2)]
            if picture and layer.layer == 0:
                lines.append(f"  {compute_tokens_per_letter(layer.plan, width - 2):,} tokens a letter: {MAP_LEGEND}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.format_lines())


def plan_layers(scores: Sequence[LayerScores], config: H2OConfig | None = None) -> LayerPlans:
    """Plan every layer as if it triggered now; raise the errors of `plan_blocks`."""
    config = config or H2OConfig()
    start_time = time.perf_counter()
    layers = tuple(
        LayerPlan(layer=number, name=layer.name, plan=plan_blocks(layer.scores, layer.kv_len, config))
        for number, layer in enumerate(scores)
    )
    return LayerPlans(config=config, layers=layers, seconds=time.perf_counter() - start_time)
