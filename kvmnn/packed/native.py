"""The compiled copying code: the numbers it works with, and its work shared among threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..dtypes import PARTS, Part
from ..threads.pool import map_pulled, resolve_threads
from . import _layout
from .addressing import PackNumbers

Work = Callable[[Part, int, int], None]
"""Called as ``work(part, first head, last head)``, the last one excluded."""


def native_numbers(layout: PackNumbers, part: Part, capacity: int) -> _layout.Numbers:
    """What the compiled code needs to know of a K or V buffer with room for `capacity` tokens."""
    int8 = layout.is_int8(part)
    lP, hP = layout.pack_numbers(part)
    if part == "key":
        size, tile = layout.key_head_bytes(capacity), layout.key_strides()[0]
    else:
        size, tile = layout.value_head_bytes(capacity), layout.value_strides(capacity)[0]
    return _layout.Numbers(
        part == "key",
        layout.itemsize,
        layout.head_dim,
        lP,
        hP,
        layout.value_block(capacity),
        size,
        tile * (1 if int8 else layout.itemsize),
    )


def share_heads(work: Work, kv_heads: int, threads: int | None) -> None:
    """Call `work` for all heads of K and of V, on `threads` threads; None for one per processor."""
    share = min(resolve_threads(threads), kv_heads)
    cuts = [kv_heads * i // share for i in range(share + 1)]
    shares = [(part, first, last) for part in PARTS for first, last in pairwise(cuts)]
    map_pulled(lambda each: work(*each), shares, share)
