"""Transforms that llama.cpp applies to K and V before it stores them, and their inverses.

Rotation: builds from pull request 21038 on multiply each head of quantised K and V by an orthonormal Hadamard matrix
(Sylvester's), K by the largest power of two that divides the head, V by 64, where heads have a multiple of 64
dimensions. The matrix is its own inverse. Order: GGUF files of Llama models have the rows of the query and key weights
permuted, so that the two dimensions which RoPE turns together are neighbours; elsewhere they are half a head apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final, Literal, get_args

import numpy as np

from ..dtypes import Elements, Floats, Part
from ..errors import OptionError

Transform = Literal["k-rotation", "v-rotation", "k-order"]
TRANSFORMS: Final[tuple[Transform, ...]] = get_args(Transform)  # in the order in which they are inverted
ROTATIONS: Final[tuple[Transform, ...]] = ("k-rotation", "v-rotation")  # inverses are rounded; the order is exact

_MIN_ROTATION_DIMS = 64
_BLOCK_ELEMENTS = 1 << 22


def validate_transforms(names: Sequence[str], head_dim: int) -> tuple[Transform, ...]:
    """Return the names deduplicated and ordered (none for ``"none"``); `OptionError` if invalid for this head_dim."""
    if list(names) == ["none"]:
        return ()
    for name in names:
        if name not in TRANSFORMS:
            raise OptionError(f"undo {name!r}: expected {', '.join(TRANSFORMS[:-1])} or {TRANSFORMS[-1]}")
        if name not in (
            applicable := (*list_possible_transforms("key", head_dim), *list_possible_transforms("value", head_dim))
        ):
            raise OptionError(
                f"undo {name}: heads have {head_dim} dimensions: expected {', '.join(applicable) or 'nothing'}"
            )
    return tuple(name for name in TRANSFORMS if name in names)


def list_possible_transforms(part: Part, head_dim: int) -> tuple[Transform, ...]:
    """Return the transforms that K or V of this head_dim may have."""
    rotations: dict[Part, Transform] = {"key": "k-rotation", "value": "v-rotation"}
    possible = (rotations[part],) if head_dim % _MIN_ROTATION_DIMS == 0 else ()
    return (*possible, "k-order") if part == "key" and head_dim % 2 == 0 else possible


def invert_transforms(elements: Elements, part: Part, transforms: Sequence[Transform]) -> Elements:
    """Invert transforms of K or V ``[..., head_dim]``."""
    # Rotations are of float32 or float16, computed in float32 and rounded once; the order is of words of any type.
    head_dim = elements.shape[-1]
    if "k-rotation" in transforms and part == "key":
        elements = _multiply_hadamard(elements, head_dim & -head_dim)
    if "v-rotation" in transforms and part == "value":
        elements = _multiply_hadamard(elements, _MIN_ROTATION_DIMS)
    if "k-order" in transforms and part == "key":
        pairs = elements.reshape(*elements.shape[:-1], head_dim // 2, 2)
        elements = np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(elements.shape)
    return elements


def has_lossy_inverse(transforms: Sequence[Transform]) -> bool:
    """Return whether inverting these transforms rounds numbers."""
    return any(name in ROTATIONS for name in transforms)


def iter_transform_combinations(part: Part, head_dim: int) -> Iterator[tuple[Transform, ...]]:
    """Iterate over combinations of transforms that K or V may have, the shortest first."""
    possible = list_possible_transforms(part, head_dim)
    for count in range(1, len(possible) + 1):
        yield from combinations(possible, count)


def _multiply_hadamard(elements: Elements, size: int) -> Elements:
    """Multiply each `size` dimensions by Hadamard's matrix."""
    matrix: Floats = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = (matrix / np.sqrt(size)).astype(np.float32)
    rows = elements.reshape(-1, size)
    rotated_rows = np.empty_like(rows)
    rows_per_block = max(1, _BLOCK_ELEMENTS // size)
    for begin in range(0, len(rows), rows_per_block):
        block = slice(begin, begin + rows_per_block)
        rotated_rows[block] = rows[block].astype(np.float32, copy=False) @ matrix
    return rotated_rows.reshape(elements.shape)
