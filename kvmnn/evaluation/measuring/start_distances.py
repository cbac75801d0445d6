"""How far K and V from elsewhere are from those that the model computes of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...arrays.layer_cache import LayerCache
from ...arrays.undoing import ways
from ...dtypes import PARTS, Part, Words
from ...lm.start_files import turned
from ...reports.start import FAR, LayerDistance

_BLOCK_WORDS = 1 << 20
"""Numbers that are compared at once in float64."""


def distances_of(start: Sequence[LayerCache], own: Sequence[LayerCache]) -> Iterator[LayerDistance]:
    """Of every layer K, then V, at the positions that the start holds.

    Parameters
    ----------
    start
        K and V from elsewhere, in the model's dtype.
    own
        All tokens of the same text.
    """
    for held, computed in zip(start, own, strict=True):
        for part in PARTS:
            found = distance_of(held, computed, part, ())
            if found.relative > FAR:
                tried = (distance_of(held, computed, part, undo) for undo in ways(part, held.head_dim))
                near = next((each for each in tried if each.relative <= FAR), None)
                found = replace(found, undo=None if near is None else near.undo)
            yield found


def distance_of(held: LayerCache, computed: LayerCache, part: Part, undo: tuple[str, ...]) -> LayerDistance:
    """Return how far K or V of a layer is from the model's own, once `undo` was undone (`turned`)."""
    mine, theirs = (getattr(cache, f"{part}s") for cache in (held, computed))
    places = np.broadcast_to(held.positions, (held.kv_heads, held.tokens))
    heads = [_sums(turned(mine[head], part, undo), theirs[head], places[head]) for head in range(held.kv_heads)]
    words, equal, squares, own_squares = (sum(each) for each in zip(*heads, strict=True))
    return LayerDistance(
        layer=held.layer,
        part=part,
        words=int(words),
        equal=int(equal),
        squares=float(squares),
        own_squares=float(own_squares),
        undo=undo or None,
    )


def _sums(mine: Words, theirs: Words, places: np.ndarray) -> tuple[float, ...]:
    """Of one head: words, equal ones, squared differences, squares of the model's own."""
    words = equal = 0
    squares = own = 0.0
    step = max(1, _BLOCK_WORDS // mine.shape[1])
    for begin in range(0, len(places), step):
        one = np.ascontiguousarray(mine[begin : begin + step])
        two = np.ascontiguousarray(theirs[places[begin : begin + step]])
        bits = np.dtype(f"u{one.itemsize}")
        words, equal = words + one.size, equal + int(np.count_nonzero(one.view(bits) == two.view(bits)))
        wide = two.astype(np.float64)
        squares += float(np.square(one - wide).sum())
        own += float(np.square(wide).sum())
    return words, equal, squares, own
