"""Whether an array repeats itself over distances that pieces do not see, told by few of its bytes."""

from __future__ import annotations

import math

import numpy as np

from ..dtypes import Bytes

LINE = 64
"""Bytes: rows of a cache are whole lines."""
SAMPLES = 8
"""Times the square root of their number, of the lines that are looked at: if each line is there twice, then 32 pairs of
them are expected, ..."""
PAIRS = 16
"""... and half of them are enough."""


def repeats_from_afar(data: Bytes, distance: int) -> bool:
    """Whether most lines of an array are there again more than `distance` bytes away, and not nearer.

    Lines are taken at random, of arrays of the same size the same ones, and compared by their first eight bytes.
    """
    lines = data.size // LINE
    places = np.sort(np.random.default_rng(0).integers(lines, size=SAMPLES * math.isqrt(lines)))
    places = places[np.diff(places, prepend=-1) > 0]
    heads = data[: lines * LINE].view(np.uint64)[places * (LINE // 8)]
    alike = np.sort(heads)
    if np.count_nonzero(alike[1:] == alike[:-1]) < PAIRS:
        return False
    order = np.lexsort((places, heads))
    heads, places = heads[order], places[order]
    apart = np.diff(places) * LINE
    twins = heads[1:] == heads[:-1]
    far, near = (np.unique(heads[1:][twins & so]).size for so in (apart > distance, apart <= distance))
    return far >= PAIRS and far > near
