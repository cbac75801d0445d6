"""Large arrays whose memory goes back to the system when they are dropped."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Elements, KVPair

MIN_MMAP_BYTES = 256 << 10
"""From here on an array gets pages of its own: what the C library's heap frees, a process may keep for good."""


def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Elements:
    """An array as `numpy.empty` makes it; a large one is zero, and unmapped with its last view."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < MIN_MMAP_BYTES:
        return np.empty(shape, kind)
    if hasattr(mmap, "MAP_PRIVATE"):  # a forked child must not write into its parent's rows
        pages: Any = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        pages = mmap.mmap(-1, nbytes)
    return np.frombuffer(pages, kind, math.prod(shape)).reshape(shape)


def copy_rows(rows: Elements) -> Elements:
    """A copy of `rows` in an array of its own."""
    copy = allocate(rows.shape, rows.dtype)
    copy[...] = rows
    return copy


def to_read_only(rows: Elements) -> KVPair:
    """K and V of ``[2, ...]`` as views that cannot be written to."""
    keys, values = rows[0], rows[1]
    keys.flags.writeable = values.flags.writeable = False
    return keys, values
