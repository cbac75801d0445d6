"""What llama.cpp does to K and V before it stores them, undone; and found by comparing with a model's own.

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

from ..dtypes import Floats, Part, Words
from ..errors import OptionError

Undo = Literal["k-rotation", "v-rotation", "k-order"]
UNDOABLE: Final[tuple[Undo, ...]] = get_args(Undo)
"""In the order in which they are undone."""

ROTATIONS: Final[tuple[Undo, ...]] = ("k-rotation", "v-rotation")
"""Those that are rounded when they are undone; the order is exact."""

_SMALLEST = 64
_BLOCK_WORDS = 1 << 22


def check_undo(undo: Sequence[str], head_dim: int) -> tuple[Undo, ...]:
    """The names, each once, in order; `OptionError` for others and for what no head of this size had done to it.

    ``"none"`` alone says that nothing is to be undone.
    """
    if list(undo) == ["none"]:
        return ()
    for name in undo:
        if name not in UNDOABLE:
            raise OptionError(f"undo {name!r}: expected {', '.join(UNDOABLE[:-1])} or {UNDOABLE[-1]}")
        if name not in (able := (*ways_of("key", head_dim), *ways_of("value", head_dim))):
            raise OptionError(f"undo {name}: heads have {head_dim} dimensions: expected {', '.join(able) or 'nothing'}")
    return tuple(name for name in UNDOABLE if name in undo)


def ways_of(part: Part, head_dim: int) -> tuple[Undo, ...]:
    """What may have been done to K or V of heads of this size."""
    rotations: dict[Part, Undo] = {"key": "k-rotation", "value": "v-rotation"}
    able = (rotations[part],) if head_dim % _SMALLEST == 0 else ()
    return (*able, "k-order") if part == "key" and head_dim % 2 == 0 else able


def undone(words: Words, part: Part, undo: Sequence[Undo]) -> Words:
    """K or V ``[..., head_dim]`` as the model's own lie.

    Rotations are of float32 or float16, computed in float32 and rounded once; the order is of words of any type.
    """
    dims = words.shape[-1]
    if "k-rotation" in undo and part == "key":
        words = _rotated(words, dims & -dims)
    if "v-rotation" in undo and part == "value":
        words = _rotated(words, _SMALLEST)
    if "k-order" in undo and part == "key":
        pairs = words.reshape(*words.shape[:-1], dims // 2, 2)
        words = np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(words.shape)
    return words


def rounded(names: Sequence[Undo]) -> bool:
    """Whether undoing these rounds numbers."""
    return any(name in ROTATIONS for name in names)


def ways(part: Part, head_dim: int) -> Iterator[tuple[Undo, ...]]:
    """Combinations of what may have to be undone of K or V, the shortest first."""
    able = ways_of(part, head_dim)
    for count in range(1, len(able) + 1):
        yield from combinations(able, count)


def _rotated(words: Words, size: int) -> Words:
    """Each `size` dimensions times Hadamard's matrix."""
    matrix: Floats = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = (matrix / np.sqrt(size)).astype(np.float32)
    rows = words.reshape(-1, size)
    found = np.empty_like(rows)
    step = max(1, _BLOCK_WORDS // size)
    for begin in range(0, len(rows), step):
        found[begin : begin + step] = rows[begin : begin + step].astype(np.float32, copy=False) @ matrix
    return found.reshape(words.shape)
