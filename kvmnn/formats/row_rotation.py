"""K turned from the positions of its tokens in the text to others (RoPE): what an evicted cache needs in an engine that
counts positions from 0.

RoPE rotates each pair of elements by position times frequency. A rotation by the distance between two positions leads
from one to the other, whatever scaled the frequencies or K, and the distances between the tokens are then those of the
new positions. Products are of float32, as where dense streams rotate rows; the angles come from integers of 64 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.casting import floats, round_words
from ..arrays.named_array import NamedArray, Piece, rechunked
from ..dense.frequencies import RopeFrequencies
from ..dtypes import Bytes, Floats, Positions
from ..errors import KvmnnError
from ..packed.cache_info import Ranges
from ..text import LOSSLESS, LOSSY, count

_STEP = 1 << 20
_RADIANS = 2 * np.pi / 2.0**64


@dataclass
class RotationError:
    """How far the written K is from the exact rotation of the K that was read.

    Attributes
    ----------
    largest
        The largest absolute difference of an element.
    relative
        The largest difference over the length of its pair, which a rotation does not change.
    """

    largest: float = 0.0
    relative: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def include(self, largest: float, relative: float) -> None:
        """Take in the errors of further rows; rows that are read again change nothing."""
        with self._lock:
            self.largest, self.relative = max(self.largest, largest), max(self.relative, relative)


@dataclass(frozen=True, kw_only=True)
class Rerotated:
    """What rotating K to other positions did.

    Parameters
    ----------
    rotation
        How K is rotated, for people: one text for each different kind of layer.
    origin
        Where that comes from, as the end of a sentence: ``"as model/llm.mnn has it"``, ``"found by trial"``.
    tokens
        Tokens whose K was rotated, of all layers.
    layers
        Layers that have such tokens.
    dtype
        Of the words that were rounded.
    error
        How far the words are from the exact rotation; complete when all were written.
    """

    rotation: str
    origin: str
    tokens: int
    layers: int
    dtype: str
    error: RotationError

    @property
    def label(self) -> str:
        """``LOSSY`` where any K was rotated, as its elements are rounded; ``LOSSLESS`` where all stayed as it was."""
        return LOSSY if self.tokens else LOSSLESS

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "label": self.label,
            "rotation": self.rotation,
            "origin": self.origin,
            "tokens": self.tokens,
            "layers": self.layers,
            "dtype": self.dtype,
            "largest_error": self.error.largest,
            "largest_relative_error": self.error.relative,
        }

    def __str__(self) -> str:
        if not self.tokens:
            return "K was not rotated: the tokens are at the first positions already"
        return (
            f"K of {count(self.tokens, 'token')} in {count(self.layers, 'layer')} rotated to the first positions, "
            f"rounded to {self.dtype}:\n    largest error {self.error.largest:.3g}, {self.error.relative:.2g} of the "
            f"length of its pair\n    {self.rotation}, {self.origin}"
        )


def rerotation_document(rerotated: Rerotated | None) -> dict[str, Any]:
    """Return the entry ``rerotated`` of a JSON document; empty where nothing was to be rotated."""
    return {} if rerotated is None else {"rerotated": rerotated.to_dict()}


def positions_of(runs: Ranges) -> Positions:
    """Return ``(begin, size)`` runs as int64 positions."""
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in runs])


def rotate_rows(words: Bytes, dtype: str, distances: Positions, rope: RopeFrequencies, error: RotationError) -> Bytes:
    """Rotate rows of K by distances in positions.

    Parameters
    ----------
    words
        Bytes of whole rows ``[row, head_dim]``.
    dtype
        Of the words: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    distances
        int64 ``[row]``: new position less old one. Rows with distance 0 keep every bit.
    rope
        How K is rotated.
    error
        Takes in how far the result is from the exact rotation.

    Returns
    -------
    Bytes of the same shape: computed in float32 and rounded once, to nearest even.

    Raises
    ------
    KvmnnError
        Where a finite element becomes infinite.
    """
    moved = distances != 0
    if not moved.any():
        return words
    rows = floats(words, dtype).reshape(len(distances), -1)
    half = rope.dims // 2
    first, second = (
        (slice(0, half), slice(half, rope.dims))
        if rope.pairing == "half"
        else (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
    )
    x, y = np.ascontiguousarray(rows[:, first]), np.ascontiguousarray(rows[:, second])
    # Evicted tokens leave runs at the same distance: their angles are computed once.
    unique, places = np.unique(distances, return_inverse=True)
    angles = (unique.astype(np.uint64)[:, None] * rope.turns).view(np.int64) * _RADIANS
    cosines, sines = np.cos(angles), np.sin(angles)
    result = rows.copy()
    with np.errstate(all="ignore"):
        c, s = (each.astype(np.float32)[places] for each in (cosines, sines))
        turned_x, turned_y = x * c - y * s, y * c + x * s
        result[:, first], result[:, second] = turned_x, turned_y
        rounded: Bytes = round_words(result.reshape(-1), dtype)
        row_bytes = words.size // len(distances)
        rounded.reshape(-1, row_bytes)[~moved] = words.reshape(-1, row_bytes)[~moved]  # not even a NaN changes
        stored = floats(rounded, dtype).reshape(rows.shape)
        new_x, new_y = stored[moved, first], stored[moved, second]
        x, y = x[moved], y[moved]
        _check_finite(x, y, new_x, new_y)
        errors: npt.NDArray[Any]
        if dtype == "fp32":
            wide_c, wide_s = cosines[places[moved]], sines[places[moved]]
            errors = np.maximum(np.abs(x * wide_c - y * wide_s - new_x), np.abs(y * wide_c + x * wide_s - new_y))
        else:  # what float32 rounds is nothing to what these do
            errors = np.maximum(np.abs(turned_x[moved] - new_x), np.abs(turned_y[moved] - new_y))
        error.include(_max_finite(errors), _max_finite(errors / np.sqrt(x * x + y * y)))
    return rounded


def _check_finite(x: Floats, y: Floats, new_x: Floats, new_y: Floats) -> None:
    """Raise `KvmnnError` where finite elements became infinite."""
    if not (np.isfinite(new_x).all() and np.isfinite(new_y).all()):
        finite = np.isfinite(x) & np.isfinite(y)
        if not (np.isfinite(new_x[finite]).all() and np.isfinite(new_y[finite]).all()):
            raise KvmnnError("elements of K become infinite by the rotation: pack them as fp32 (--cast)")


def _max_finite(values: npt.NDArray[Any]) -> float:
    largest = float(values.max(initial=0.0))
    return largest if np.isfinite(largest) else float(values[np.isfinite(values)].max(initial=0.0))


def rotate_array(
    array: NamedArray,
    token_major: bool,
    distances: Positions,
    rope: RopeFrequencies,
    error: RotationError,
) -> NamedArray:
    """Return K ``[kv_head, token, head_dim]``, or token-major, rotated as it is read; parameters as `rotate_rows`."""
    if not distances.any():
        return array
    heads = array.shape[1] if token_major else array.shape[0]
    by_row = np.repeat(distances, heads) if token_major else np.tile(distances, heads)
    reader = partial(_read_rotated, array, by_row, rope, error)
    return replace(array, array_dtype=array.array_dtype.replace(">", "<"), reader=reader)


def _read_rotated(
    array: NamedArray, distances: Positions, rope: RopeFrequencies, error: RotationError, step: int
) -> Iterator[Piece]:
    yield from rechunked(_rotated_rows(array, distances, rope, error), step, array.nbytes)


def _rotated_rows(
    array: NamedArray, distances: Positions, rope: RopeFrequencies, error: RotationError
) -> Iterator[Piece]:
    row_bytes, row = array.shape[-1] * array.itemsize, 0
    for piece in array.pieces(max(_STEP, row_bytes)):
        rows = piece.size // row_bytes
        yield rotate_rows(piece, array.dtype, distances[row : row + rows], rope, error)
        row += rows
