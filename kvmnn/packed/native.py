"""The compiled copying code: the numbers it works with, and its work shared among threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..dtypes import PARTS, Part
from ..threads.pool import parallel_map, resolve_threads
from . import _layout
from .addressing import LayoutParams

HeadRangeWork = Callable[[Part, int, int], None]
"""Called as ``work(part, first head, last head)``, the last one excluded."""


def make_native_params(layout: LayoutParams, part: Part, capacity: int) -> _layout.NativeLayout:
    """What the compiled code needs to know of a K or V buffer with room for `capacity` tokens."""
    int8 = layout.is_int8(part)
    lP, hP = layout.pack_numbers(part)
    if part == "key":
        size, tile = layout.key_head_bytes(capacity), layout.key_strides()[0]
    else:
        size, tile = layout.value_head_bytes(capacity), layout.value_strides(capacity)[0]
    return _layout.NativeLayout(
        part == "key",
        layout.itemsize,
        layout.head_dim,
        lP,
        hP,
        layout.value_block(capacity),
        size,
        tile * (1 if int8 else layout.itemsize),
    )


def run_over_heads(work: HeadRangeWork, kv_heads: int, threads: int | None) -> None:
    """Call `work` for all heads of K and of V, on `threads` threads; None for one per processor."""
    num_shares = min(resolve_threads(threads), kv_heads)
    boundaries = [kv_heads * i // num_shares for i in range(num_shares + 1)]
    shares = [(part, first, last) for part in PARTS for first, last in pairwise(boundaries)]
    parallel_map(lambda share: work(*share), shares, num_shares)
