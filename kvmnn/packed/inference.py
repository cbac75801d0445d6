"""Which of several layouts the words of packed files speak for: trial by all, ranked, and how clear the answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from .addressing import EXPAND_CHUNK, FLASH_BLOCK
from .evidence import LayoutEvidence
from .fitting import Fit, Geometry, capacity_of, fits

Clarity = Literal["clear", "weak", "none"]
"""How far one layout stands out before another."""

# In full files of two real models, packed for each backend, 64 to 512 tokens, the contrast of the right layout is at
# least 1.78 times that of any wrong one. Words without structure have about 1 / tokens, whatever the layout: of the
# right layout it must be several times that.
CLEAR_RATIO: Final = 1.3
WEAK_RATIO: Final = 1.15
MIN_SIGNAL: Final = 4.0
MIN_TOKENS: Final = 16

_MIN_MISPLACED_ROWS = 4  # a few words of a cache may be zero by themselves

MAX_HEADS: Final = 64


@dataclass(frozen=True)
class Reading:
    """A layout that the sizes allow, and what the words tell about it."""

    fit: Fit
    evidence: LayoutEvidence

    @property
    def is_fresh(self) -> bool:
        """Whether the files have the room that the engine makes for just the rows that are not empty."""
        first, last = fresh_tokens(self.fit)
        return first <= self.evidence.rows <= last

    @property
    def rank(self) -> tuple[bool, int, float, bool]:
        """What readings are sorted by, the likeliest first."""
        evidence, usual = self.evidence, self.fit.layout.flash_block == FLASH_BLOCK
        misplaced = 0 if evidence.is_consistent else evidence.misplaced_rows
        return not evidence.is_consistent, misplaced, -evidence.contrast, not usual


Measure = Callable[[Fit], LayoutEvidence]


def rank_readings(found: Sequence[Fit], measure: Measure) -> list[Reading]:
    """Try layouts, and sort them by what the words tell about them, the likeliest first.

    Of several that put each token in the same place, as blocks of 64 and none may, the first stays.
    """
    ranking: list[Reading] = []
    for reading in sorted((Reading(fit, measure(fit)) for fit in found), key=lambda reading: reading.rank):
        if not any(has_same_places(reading.fit, other.fit) for other in ranking):
            ranking.append(reading)
    return ranking


def has_same_places(one: Fit, other: Fit) -> bool:
    """Whether two layouts of the same files put each token in the same place."""
    a, b = one.layout, other.layout
    if (a.kv_heads, a.head_dim, a.dtype) != (b.kv_heads, b.head_dim, b.dtype):
        return False
    if (a.lP, a.hP, a.flash_block) == (b.lP, b.hP, b.flash_block):
        return True
    capacity = min(*one.capacities, *other.capacities)
    tokens, dims = np.arange(min(capacity, 4 * FLASH_BLOCK))[:, None], np.arange(a.head_dim)
    sizes = [(x.key_head_bytes(capacity), x.value_head_bytes(capacity)) for x in (a, b)]
    same_keys = np.array_equal(a.key_index(tokens, dims), b.key_index(tokens, dims))
    same_values = np.array_equal(a.value_index(tokens, dims, capacity), b.value_index(tokens, dims, capacity))
    return sizes[0] == sizes[1] and same_keys and same_values


def compare_readings(one: Reading, other: Reading) -> Clarity:
    """How far `one` stands out before `other`."""
    a, b = one.evidence, other.evidence
    if b.is_consistent and not a.is_consistent:
        return "none"
    tells = a.is_consistent and not b.is_consistent
    if tells and (not b.is_even or b.misplaced_rows >= _MIN_MISPLACED_ROWS):
        return "clear"
    ratio = a.contrast / b.contrast if b.contrast else float("inf")
    everywhere = all(x.key_contrast > y.key_contrast for x, y in zip(a.layers, b.layers, strict=True))
    enough = a.rows >= MIN_TOKENS and a.contrast * a.rows >= MIN_SIGNAL
    if a.is_consistent and enough and everywhere and ratio >= CLEAR_RATIO:
        return "clear"
    return "weak" if tells or (enough and ratio >= WEAK_RATIO) else "none"


def first_clarity(ranking: Sequence[Reading]) -> Clarity:
    """How far the first of a ranking stands out before all others."""
    levels: tuple[Clarity, ...] = ("none", "weak", "clear")
    return min((compare_readings(ranking[0], other) for other in ranking[1:]), key=levels.index, default="clear")


def fresh_tokens(fit: Fit) -> tuple[int, int]:
    """Return the range of tokens for which the engine makes files of these sizes; zeros where there is none.

    It makes room for 64 more than there are; K comes in tiles and V in blocks, so that several numbers may be meant.
    """
    layout, room = fit.layout, max(fit.capacities)
    least = room
    sizes = layout.key_bytes(room), layout.value_bytes(room)
    while least > 1 and (layout.key_bytes(least - 1), layout.value_bytes(least - 1)) == sizes:
        least -= 1
    return max(0, least - EXPAND_CHUNK), max(0, room - EXPAND_CHUNK)


def enumerate_fits(geometry: Geometry, sizes: Sequence[tuple[int, int]]) -> Iterator[Fit]:
    """Every layout that sizes allow where kv heads, head_dim or both are not known.

    Parameters
    ----------
    geometry
        What is known.
    sizes
        Bytes of the K and V file of each layer, all of full attention.
    """
    dims = _HEAD_DIMS if geometry.head_dim is None else (geometry.head_dim,)
    heads = range(1, MAX_HEADS + 1) if geometry.kv_heads is None else (geometry.kv_heads,)
    unlike = sorted(set(sizes))
    for dim in dims:
        for backends, layout in replace(geometry, kv_heads=1, head_dim=dim).candidates():
            tiles, rest = divmod(sizes[0][0], layout.key_bytes(1))
            for count in heads:
                if rest or not tiles or tiles % count:
                    continue
                asked = replace(layout, kv_heads=count)
                capacities = {pair: capacity_of(asked, *pair) for pair in unlike}
                if all(capacities.values()):
                    yield Fit(asked, backends, tuple(capacities[pair] or 0 for pair in sizes))


_HEAD_DIMS = tuple(sorted({*range(2, 65, 2), *range(64, 257, 8), *range(256, 577, 32)}))
"""What models have, and tiny ones for tests."""


def recut_heads(geometry: Geometry, sizes: Sequence[tuple[int, int]]) -> list[Fit]:
    """Layouts with as many words a token as `geometry` has, in another number of heads."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    words, found = geometry.kv_heads * geometry.head_dim, []
    for heads in range(1, MAX_HEADS + 1):
        if words % heads == 0 and heads != geometry.kv_heads:
            found += fits(Geometry(kv_heads=heads, head_dim=words // heads), sizes)
    return found
