"""Choose the quantisation steps of transform streams (docs/format-transform.md).

A target comes in (`TransformOptions`: a loss in nats, a ratio, or bits for each element), with the sensitivities and
bit rates in a profile. One step for K and one for V of each layer goes out, at which the predicted loss or size meets
the target. `choose_exponents` varies a step by token, from the attention that the token gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.validation import repr_short, validate_int
from ..arrays.layer_cache import LayerCache
from ..dtypes import PARTS
from ..errors import KvmnnError, OptionError
from ..profiles.statistics import NUM_SINKS
from . import _codec
from .header import MAX_STEP, MIN_STEP
from .profile_tables import ProfileTables
from .tables import LEVELS_PER_DOUBLING

LOSS_FACTORS = (0.95, 0.75, 0.65)
"""Measured loss over the sum of what each layer and side loses alone, by layers below. Layers
that are predicted from decoded ones undo a part of what was lost below them."""
ATTENTION_LOSS_FACTOR = 0.6
"""Measured loss with steps by attention over that without, at the same steps of all tokens."""
_BITS_FACTORS = (1.03, 1.05, 1.08)
"""Measured bits over those that the profile predicts, by layers below: texts differ from those it was made of."""
_MIN_SHARE_OF_BITS = 0.9
"""Of the bits that are asked for: coded tokens pay for exact ones down to that. Otherwise exact ones come on top, as
the others of a short cache with a long exact end would lose all they have."""
_MAX_SHIFT = 10
_SEARCH_STEPS = 40
_MAX_LEVEL_SHIFT = 8.0 * LEVELS_PER_DOUBLING
_BITS_OF_WORD = 16
MAX_KL = 100.0
"""Nats, the largest loss that may be asked for."""


@dataclass(frozen=True, kw_only=True)
class TransformOptions:
    """What a transform stream may lose, and what it keeps exactly.

    Parameters
    ----------
    kl
        Loss of the whole cache in nats: mean Kullback-Leibler divergence of the next token's distribution. At most one
        of `kl`, `ratio` and `bits` is given; 0.002 nats by default.
    ratio
        Bytes of fp16 for each byte, about; of the tokens that are not exact where the exact ones take more than a tenth
        of that.
    bits
        Bits an element, likewise.
    below
        Lower layers that a layer is predicted from, 0 to 2; by default as many as the profile has tables for.
    first, recent
        Tokens at the beginning and at the end that are stored exactly.
    """

    kl: float | None = None
    ratio: float | None = None
    bits: float | None = None
    below: int | None = None
    first: int = 4
    recent: int = 0

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.kl, self.ratio, self.bits)) > 1:
            raise OptionError("kl, ratio and bits: expected one of them")
        limits: tuple[tuple[str, Any, float, float], ...] = (
            ("kl", self.kl, 1e-9, MAX_KL),
            ("ratio", self.ratio, 1.0, 1000.0),
            ("bits", self.bits, 0.02, 16.0),
        )
        for name, value, low, high in limits:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not is_number:
                raise OptionError(f"{name} is {repr_short(value)}: expected a number")
            if value is not None and not low <= value <= high:
                raise OptionError(f"{name} is {value}: expected {low:g} to {high:g}")
        if self.below not in (None, 0, 1, 2):
            raise OptionError(f"below is {repr_short(self.below)}: expected 0, 1 or 2 layers")
        validate_int(self.first, "first", 0)
        validate_int(self.recent, "recent", 0)


DEFAULT_KL = 0.002
"""Nats a token that are lost where no option says how much."""


_MAX_SIZE_ERROR = 0.05


def is_size_missed(reached: float, target: float) -> bool:
    """Return whether a ratio, or bits, are so far from what was asked for that a user should know."""
    return abs(reached / target - 1) > _MAX_SIZE_ERROR


_MAX_BITS_FACTOR, _MIN_JUDGED_TOKENS = 3.0, 64


def is_loss_doubtful(bits_factor: float, tokens: int) -> bool:
    """Return whether `tokens` tokens take so many times the predicted bits that the predicted loss does not hold.

    K of SmolLM2 turned back by wrong positions takes 3.5 times the bits, as random numbers do; other texts up to 1.8.
    """
    return bits_factor > _MAX_BITS_FACTOR and tokens >= _MIN_JUDGED_TOKENS


@dataclass(frozen=True)
class StepPlan:
    """Steps of all layers."""

    below: int
    #: float64 ``[layer, 2]``: steps of K and V, and the loss that each is predicted to add, in nats.
    steps: npt.NDArray[np.float64]
    losses: npt.NDArray[np.float64]
    #: Bits of a token that is not stored exactly, predicted: float64 ``[layer, 2]``; by the profile alone, and with the
    #: bits of the text that the steps were chosen by.
    profile_bits: npt.NDArray[np.float64]
    bits: npt.NDArray[np.float64]
    #: Whether losses rest on measured sensitivities, of all tokens that are rounded.
    is_measured: bool
    #: Bits of such a token in all layers that were asked for; None for a loss. No loss may be large enough for so few.
    max_token_bits: float | None = None

    @property
    def kl(self) -> float:
        """Return the predicted loss of all layers in nats."""
        return float(self.losses.sum())

    @property
    def token_bits(self) -> float:
        """Return the predicted bits of a token in all layers."""
        return float(self.bits.sum())

    def get_layer_steps(self, layer: int) -> tuple[float, float]:
        """Return the steps of K and V of a layer, as streams store them: binary32."""
        key_step, value_step = (float(np.float32(np.clip(step, MIN_STEP, MAX_STEP))) for step in self.steps[layer])
        return key_step, value_step


def plan_steps(
    tables: ProfileTables,
    options: TransformOptions,
    tokens: int,
    has_attention: bool = False,
    *,
    bits_factor: float = 1.0,
    level_shifts: npt.NDArray[np.float64] | None = None,
    begin_token: int = 0,
    exact_bits: int = 16,
) -> StepPlan:
    """Return the steps of all layers for a cache of `tokens` tokens.

    Each layer and side is to lose as much as any other: on two models, shares by what a bit more would save lose more
    in all at the same size.

    Parameters
    ----------
    tables
        Tables of the profile.
    options
        What may be lost.
    tokens
        Tokens of the cache.
    has_attention
        Whether steps of tokens will go with the attention that they draw.
    bits_factor
        Bits that the text takes over those that the profile predicts (`measure_bits_factor`).
    level_shifts
        Of each layer, where all of the text was measured (`fit_level_shifts`): float64 ``[layer]``.
    begin_token
        Tokens of the text before these.
    exact_bits
        Bits of an element of a token that is stored exactly, 32 of fp32. Sizes that are asked for count words of 16.
    """
    below = tables.belows[-1] if options.below is None else options.below
    planner = _Planner(
        tables, below, has_attention, bits_factor, level_shifts,
        # no sensitivity counts the first tokens: SmolLM2 lost 0.112 nats where 0.002 were predicted, with first=0
        can_predict=begin_token + options.first >= NUM_SINKS,
    )  # fmt: skip
    if options.ratio is None and options.bits is None:
        return planner.plan(DEFAULT_KL if options.kl is None else options.kl)
    bits = _BITS_OF_WORD / options.ratio if options.ratio is not None else options.bits or 0.0
    num_exact = min(options.first + options.recent, tokens)
    coded_bits = (bits * tokens - exact_bits * num_exact) / max(tokens - num_exact, 1)
    budget = (coded_bits if coded_bits >= _MIN_SHARE_OF_BITS * bits else bits) * planner.num_elements
    low, high = math.log(1e-9), math.log(MAX_KL)
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if planner.plan(math.exp(middle)).token_bits > budget else (low, middle)
    return replace(planner.plan(min(math.exp(high), MAX_KL)), max_token_bits=budget)


class _Planner:
    def __init__(
        self,
        tables: ProfileTables,
        below: int,
        has_attention: bool = False,
        bits_factor: float = 1.0,
        level_shifts: npt.NDArray[np.float64] | None = None,
        *,
        can_predict: bool = True,
    ) -> None:
        self._below, self._has_attention, self._can_predict = below, has_attention, can_predict
        self._bits_factor = bits_factor
        self._level_shifts = level_shifts
        self._sides = [[tables.get_side(layer, part, below) for part in PARTS] for layer in range(len(tables.layers))]
        self.num_elements = sum(side.elements for sides in self._sides for side in sides)
        self._sensitivities = np.array([[side.sensitivity for side in sides] for sides in self._sides])
        self._bits_by_level = compute_level_bits(tables.frequencies)
        levels = [side.levels.reshape(-1) for sides in self._sides for side in sides]
        has_equal_sizes = len({side_levels.size for side_levels in levels}) == 1
        self._levels = np.stack(levels) if has_equal_sizes else None  # [layer and side, coefficient]

    def plan(self, kl: float) -> StepPlan:
        """Return the steps of a loss."""
        total = kl / LOSS_FACTORS[self._below] / (ATTENTION_LOSS_FACTOR if self._has_attention else 1.0)
        shares = np.full(self._sensitivities.shape, 1 / self._sensitivities.size)
        steps = np.sqrt(total * shares / self._sensitivities)
        profile_bits = bits = self._compute_bits(steps, np.zeros(len(steps)))
        if self._level_shifts is not None:
            bits = self._compute_bits(steps, self._level_shifts)
        return StepPlan(
            self._below,
            steps,
            kl * shares,
            profile_bits,
            self._bits_factor * bits,
            self._can_predict and all(side.is_measured for sides in self._sides for side in sides),
        )

    def _compute_bits(
        self, steps: npt.NDArray[np.float64], level_shifts: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        if self._levels is not None and not level_shifts.any():  # a search for a size does so hundreds of times
            offsets = [round(LEVELS_PER_DOUBLING * math.log2(step)) for step in steps.reshape(-1).tolist()]
            levels = np.clip(self._levels - np.array(offsets)[:, None], 0, len(self._bits_by_level) - 1)
            sums: npt.NDArray[np.float64] = self._bits_by_level[levels].sum(axis=1)
            return _BITS_FACTORS[self._below] * sums.reshape(steps.shape)
        return np.array(
            [
                [self.compute_side_bits(layer, side, steps[layer, side], shift) for side in range(len(PARTS))]
                for layer, shift in enumerate(level_shifts.tolist())
            ]
        )

    def compute_side_bits(self, layer: int, side: int, step: float, shift: float) -> float:
        """Return the bits of a token of K or V of a layer, whose coefficients are `shift` levels larger."""
        levels = self._sides[layer][side].levels - round(LEVELS_PER_DOUBLING * math.log2(step))
        table = self._bits_by_level
        if shift:
            bits = np.interp(levels + shift, np.arange(len(table)), table)
        else:
            bits = table[np.clip(levels, 0, len(table) - 1)]
        return _BITS_FACTORS[self._below] * float(bits.sum())


def fit_level_shifts(
    tables: ProfileTables, plan: StepPlan, bits_by_layer: Mapping[int, float]
) -> npt.NDArray[np.float64]:
    """Return by how many levels coefficients are larger than those of a profile's texts: float64 ``[layer]``.

    Bits do not follow the steps in proportion: at large steps few coefficients take any.

    Parameters
    ----------
    tables, plan
        What the streams were made by.
    bits_by_layer
        Bits of a token in the streams of the layers that the text has; others get the median shift of these.
    """
    planner, shifts = _Planner(tables, plan.below), np.full(len(plan.steps), np.nan)
    for layer, bits in bits_by_layer.items():
        low, high = -_MAX_LEVEL_SHIFT, _MAX_LEVEL_SHIFT
        for _ in range(_SEARCH_STEPS):
            middle = (low + high) / 2
            predicted = sum(
                planner.compute_side_bits(layer, side, plan.steps[layer, side], middle) for side in range(len(PARTS))
            )
            low, high = (low, middle) if predicted > bits else (middle, high)
        shifts[layer] = high
    return np.where(np.isnan(shifts), np.nanmedian(shifts), shifts)


def measure_bits_factor(
    plan: StepPlan, streams: Sequence[bytes], sample: Sequence[LayerCache], num_exact: int
) -> float:
    """Return the bits of streams over those that a plan predicts.

    Parameters
    ----------
    plan
        What the streams were made by.
    streams
        Streams of some layers.
    sample
        These layers.
    num_exact
        Tokens of each that are stored exactly.
    """
    exact_bits = sum(8 * layer.nbytes / layer.tokens for layer in sample) * num_exact
    num_coded = sample[0].tokens - num_exact
    predicted_bits = float(plan.bits[[layer.layer for layer in sample]].sum()) * num_coded
    return (8 * sum(map(len, streams)) - exact_bits) / predicted_bits if predicted_bits > 0 else 1.0


def compute_level_bits(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    """Return the bits that a coefficient takes by its level, from 0 on."""
    probabilities = frequencies / frequencies.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.nan_to_num(probabilities * np.log2(probabilities)).sum(1)
    last = _codec.NUM_TABLES - 1
    shifted = [
        bits[last - (LEVELS_PER_DOUBLING - 1) + i % LEVELS_PER_DOUBLING] + 1 + i // LEVELS_PER_DOUBLING
        for i in range(LEVELS_PER_DOUBLING * _MAX_SHIFT)
    ]
    return np.concatenate([bits, shifted])


def choose_exponents(attention: npt.ArrayLike, exponent: float = 0.5) -> npt.NDArray[np.int8]:
    """Return the exponents of tokens' steps, in quarters of a doubling, int8 ``[token]``.

    Parameters
    ----------
    attention
        The mean attention probability that later tokens give each token, over heads and these tokens: ``[token]``.
    exponent
        Strength: a token's step is proportional to its attention to the power of minus `exponent`, within a factor of
        2.
    """
    drawn = np.asarray(attention, np.float64)
    if drawn.ndim != 1 or not np.isfinite(drawn).all() or (drawn < 0).any():
        raise KvmnnError("attention: expected a finite number of at least 0 for each token")
    if len(drawn) > 1 and not drawn.any():  # of the last token alone there is none
        raise KvmnnError("attention: all zeros: expected what later tokens gave each token")
    logs = np.log2(np.maximum(drawn, max(float(drawn.max(initial=0)), 1e-30) * 1e-6))
    center = np.median(logs) if len(logs) else 0.0
    mean = logs[np.abs(logs - center) < 8].mean() if len(logs) else 0.0
    return np.clip(np.rint(-4 * exponent * (logs - mean)), -4, 4).astype(np.int8)


def choose_layer_exponents(attention: npt.NDArray[Any], layer: LayerCache, label: str) -> npt.NDArray[np.int8]:
    """Return the exponents of the tokens of a layer, int8 ``[token]``, as `choose_exponents`.

    Parameters
    ----------
    attention
        Floats ``[layer, kv_head, position]``, as `kvmnn.lm.dump_kv` writes them.
    layer
        The layer, whose heads contain the same tokens.
    label
        What errors call the attention.
    """
    if layer.positions.ndim != 1:
        raise KvmnnError(f"layer {layer.layer}: its heads hold different tokens, attention is of tokens")
    num_positions = int(layer.positions.max(initial=-1)) + 1
    if (
        attention.ndim != 3
        or layer.layer >= attention.shape[0]
        or num_positions > attention.shape[2]
        or not attention.shape[1]
    ):
        raise KvmnnError(
            f"{label} {list(attention.shape)}: layer {layer.layer} has {layer.kv_heads} heads and "
            f"{num_positions:,} positions"
        )
    return choose_exponents(attention[layer.layer].mean(axis=0, dtype=np.float64)[layer.positions])
