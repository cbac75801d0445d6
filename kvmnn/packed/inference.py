"""Which of several layouts the words of packed files speak for: trial by all, ranked, and how clear the answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from .addressing import EXPAND_CHUNK, FLASH_BLOCK
from .evidence import LayoutEvidence
from .fitting import LayoutMatch, PackedGeometry, find_matches, try_infer_capacity

Clarity = Literal["clear", "weak", "none"]
"""How far one layout stands out before another."""

# In full files of two real models, packed for each backend, 64 to 512 tokens, the contrast of the right layout is at
# least 1.78 times that of any wrong one. Words without structure have about 1 / tokens, whatever the layout: of the
# right layout it must be several times that.
CLEAR_CONTRAST_RATIO: Final = 1.3
WEAK_CONTRAST_RATIO: Final = 1.15
MIN_CONTRAST_SIGNAL: Final = 4.0
MIN_CONTRAST_TOKENS: Final = 16

_MIN_MISPLACED_ROWS = 4  # a few words of a cache may be zero by themselves

MAX_TRIED_HEADS: Final = 64


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that the sizes allow, and what the words tell about it."""

    match: LayoutMatch
    evidence: LayoutEvidence

    @property
    def has_default_capacity(self) -> bool:
        """Whether the files have the room that the engine makes for just the rows that are not empty."""
        min_tokens, max_tokens = infer_token_range(self.match)
        return min_tokens <= self.evidence.num_rows <= max_tokens

    @property
    def sort_key(self) -> tuple[bool, int, float, bool]:
        """What readings are sorted by, the likeliest first."""
        evidence, is_default_block = self.evidence, self.match.layout.flash_block == FLASH_BLOCK
        num_misplaced = 0 if evidence.is_consistent else evidence.num_misplaced_rows
        return not evidence.is_consistent, num_misplaced, -evidence.contrast, not is_default_block


MeasureEvidence = Callable[[LayoutMatch], LayoutEvidence]


def rank_candidates(matches: Sequence[LayoutMatch], measure: MeasureEvidence) -> list[LayoutCandidate]:
    """Try layouts, and sort them by what the words tell about them, the likeliest first.

    Of several that put each token in the same place, as blocks of 64 and none may, the first stays.
    """
    ranking: list[LayoutCandidate] = []
    for candidate in sorted(
        (LayoutCandidate(match, measure(match)) for match in matches), key=lambda candidate: candidate.sort_key
    ):
        if not any(has_same_placement(candidate.match, better.match) for better in ranking):
            ranking.append(candidate)
    return ranking


def has_same_placement(first: LayoutMatch, second: LayoutMatch) -> bool:
    """Whether two layouts of the same files put each token in the same place."""
    a, b = first.layout, second.layout
    if (a.kv_heads, a.head_dim, a.dtype) != (b.kv_heads, b.head_dim, b.dtype):
        return False
    if (a.lP, a.hP, a.flash_block) == (b.lP, b.hP, b.flash_block):
        return True
    capacity = min(*first.capacities, *second.capacities)
    tokens, dims = np.arange(min(capacity, 4 * FLASH_BLOCK))[:, None], np.arange(a.head_dim)
    sizes = [(x.key_head_bytes(capacity), x.value_head_bytes(capacity)) for x in (a, b)]
    same_keys = np.array_equal(a.key_index(tokens, dims), b.key_index(tokens, dims))
    same_values = np.array_equal(a.value_index(tokens, dims, capacity), b.value_index(tokens, dims, capacity))
    return sizes[0] == sizes[1] and same_keys and same_values


def compare_candidates(first: LayoutCandidate, second: LayoutCandidate) -> Clarity:
    """How far `first` stands out before `second`."""
    a, b = first.evidence, second.evidence
    if b.is_consistent and not a.is_consistent:
        return "none"
    is_only_consistent = a.is_consistent and not b.is_consistent
    if is_only_consistent and (not b.has_equal_ends or b.num_misplaced_rows >= _MIN_MISPLACED_ROWS):
        return "clear"
    ratio = a.contrast / b.contrast if b.contrast else float("inf")
    is_higher_everywhere = all(x.key_contrast > y.key_contrast for x, y in zip(a.layers, b.layers, strict=True))
    has_signal = a.num_rows >= MIN_CONTRAST_TOKENS and a.contrast * a.num_rows >= MIN_CONTRAST_SIGNAL
    if a.is_consistent and has_signal and is_higher_everywhere and ratio >= CLEAR_CONTRAST_RATIO:
        return "clear"
    return "weak" if is_only_consistent or (has_signal and ratio >= WEAK_CONTRAST_RATIO) else "none"


def compute_clarity(ranking: Sequence[LayoutCandidate]) -> Clarity:
    """How far the first of a ranking stands out before all others."""
    levels: tuple[Clarity, ...] = ("none", "weak", "clear")
    return min(
        (compare_candidates(ranking[0], candidate) for candidate in ranking[1:]), key=levels.index, default="clear"
    )


def infer_token_range(match: LayoutMatch) -> tuple[int, int]:
    """Return the range of tokens for which the engine makes files of these sizes; zeros where there is none.

    It makes room for 64 more than there are; K comes in tiles and V in blocks, so that several numbers may be meant.
    """
    layout, capacity = match.layout, max(match.capacities)
    min_capacity = capacity
    sizes = layout.key_bytes(capacity), layout.value_bytes(capacity)
    while min_capacity > 1 and (layout.key_bytes(min_capacity - 1), layout.value_bytes(min_capacity - 1)) == sizes:
        min_capacity -= 1
    return max(0, min_capacity - EXPAND_CHUNK), max(0, capacity - EXPAND_CHUNK)


def iter_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> Iterator[LayoutMatch]:
    """Every layout that sizes allow where kv heads, head_dim or both are not known.

    Parameters
    ----------
    geometry
        What is known.
    sizes
        Bytes of the K and V file of each layer, all of full attention.
    """
    dims = _HEAD_DIMS if geometry.head_dim is None else (geometry.head_dim,)
    heads = range(1, MAX_TRIED_HEADS + 1) if geometry.kv_heads is None else (geometry.kv_heads,)
    distinct_sizes = sorted(set(sizes))
    for dim in dims:
        for backends, layout in replace(geometry, kv_heads=1, head_dim=dim).list_candidates():
            tiles, remainder = divmod(sizes[0][0], layout.key_bytes(1))
            for kv_heads in heads:
                if remainder or not tiles or tiles % kv_heads:
                    continue
                candidate_layout = replace(layout, kv_heads=kv_heads)
                capacities = {pair: try_infer_capacity(candidate_layout, *pair) for pair in distinct_sizes}
                if all(capacities.values()):
                    yield LayoutMatch(candidate_layout, backends, tuple(capacities[pair] or 0 for pair in sizes))


_HEAD_DIMS = tuple(sorted({*range(2, 65, 2), *range(64, 257, 8), *range(256, 577, 32)}))
"""What models have, and tiny ones for tests."""


def find_regrouped_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> list[LayoutMatch]:
    """Layouts with as many words a token as `geometry` has, in another number of heads."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    elements, matches = geometry.kv_heads * geometry.head_dim, []
    for heads in range(1, MAX_TRIED_HEADS + 1):
        if elements % heads == 0 and heads != geometry.kv_heads:
            matches += find_matches(PackedGeometry(kv_heads=heads, head_dim=elements // heads), sizes)
    return matches
