"""Which token and dimension an element of a packed head is: the inverse of `PackLayout.key_index` and `value_index`."""

from __future__ import annotations

from ..dtypes import Part
from .addressing import LayoutParams


def locate_element(layout: LayoutParams, part: Part, element: int, capacity: int) -> tuple[int, int]:
    """Return row and dimension of an element of one head.

    Parameters
    ----------
    layout, part, capacity
        What the buffer is; float layouts only.
    element
        Index inside the head, in elements.

    Returns
    -------
    tuple of int
        The row (of a token, or behind the last one), and the dimension: at least `head_dim` for padding.
    """
    lP, hP = layout.pack_numbers(part)
    if part == "key":
        tile, unit, _, _ = layout.key_strides()
        offset = element % tile
        return element // tile * hP + offset % unit // lP, offset // unit * lP + offset % lP
    block, column, unit, _, _ = layout.value_strides(capacity)
    offset = element % block % column
    row = element // block * layout.value_block(capacity) + offset // unit * lP + offset % lP
    return row, element % block // column * hP + offset % unit // lP
