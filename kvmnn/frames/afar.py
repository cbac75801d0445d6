"""How an array repeats itself over distances that pieces do not see, told by few of its words."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes
from ._anchors import again, anchors

WINDOW = 32
"""Words that are looked at in one place."""
PLACES = 40
"""Times the square root of the number of words, those that are looked at, of which one in 8 is compared (`_anchors`).
If all words are there twice, then 70 pairs of them are expected, ..."""
PAIRS = 8
"""... and so many are enough: 6 % of the words that are copies of others, which cost as much where they are missed."""
FEW_PAIRS = 3
"""So many are enough where longer pieces are only tried."""
STEP = 8
"""Words: the search of effort "fast" sees repeats whose distance is a multiple."""


class Repeats(NamedTuple):
    """How words of an array are there again."""

    across: bool
    """In other pieces."""
    far: bool
    """More than half a piece away, and most of them not nearer."""
    odd: bool
    """At distances that are no multiples of `STEP`."""


NONE = Repeats(False, False, False)


class AtOddDistances(Exception):
    """Words are there again where the search of effort "fast" does not look."""


def repeats_from_afar(data: Bytes, stride: int, size: int) -> Repeats:
    """How words of `stride` bytes are there again, in an array that is made in pieces of `size` bytes.

    What is there many times counts once.
    """
    words = data.size // stride
    if words < WINDOW * WINDOW:
        return NONE
    begins = _windows(words)
    most = begins.size * WINDOW // 7
    heads, places = np.empty(most, np.uint64), np.empty(most, np.int64)
    found = anchors(data, stride, begins, WINDOW, heads, places)
    heads, places = heads[:found], places[:found]
    if again(heads) < FEW_PAIRS:
        return NONE
    order = np.lexsort((places, heads))
    heads, places = heads[order], places[order]
    apart, twins = np.diff(places), heads[1:] == heads[:-1]
    is_far = 2 * apart * stride > size
    across, far, near, odd = (
        np.unique(heads[1:][twins & so]).size
        for so in (np.diff(places * stride // size) > 0, is_far, ~is_far, apart % STEP != 0)
    )
    return Repeats(across >= FEW_PAIRS, far >= PAIRS and far > near, odd >= PAIRS)


@lru_cache(8)
def _windows(words: int) -> npt.NDArray[np.int64]:
    """Where windows begin: at random places, of arrays of the same size at the same ones."""
    count = PLACES * math.isqrt(words) // WINDOW
    begins = np.sort(np.random.default_rng(0).integers(words // WINDOW, size=count)) * WINDOW
    return begins[np.diff(begins, prepend=-1) > 0]
