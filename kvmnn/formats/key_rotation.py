"""Rotate K from the text positions of its tokens to other positions (RoPE).

Engines that count positions from 0 need this for an evicted cache.

RoPE rotates each pair of elements by position times frequency. Rotating by the distance between two positions leads
from one to the other, however frequencies or K were scaled. Distances between tokens are then those of the new
positions. Products are computed in float32, as when dense streams rotate rows; angles come from 64-bit integers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import LOSSLESS, LOSSY, pluralize
from ..arrays.array import Chunk, LazyArray, rechunk
from ..arrays.cast import round_to_dtype, to_float32
from ..dense.rope import RopeFrequencies
from ..dtypes import Bytes, Floats, Positions
from ..errors import KvmnnError
from ..files.schema import Record, json_key
from ..packed.cache_info import CACHE_SIDECAR_SUFFIX, PositionRuns

_READ_CHUNK_BYTES = 1 << 20
_RADIANS_PER_PHASE_UNIT = 2 * np.pi / 2.0**64


@dataclass
class RotationErrorStats(Record):
    """The error of the written K relative to the exact rotation of the K that was read."""

    #: The largest absolute difference of an element.
    max_abs_error: float = field(default=0.0, metadata={"key": "largest_error"})
    #: The largest difference over the length of its pair, which a rotation does not change.
    max_relative_error: float = field(default=0.0, metadata={"key": "largest_relative_error"})
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False, metadata={"json": False})

    def include(self, max_abs_error: float, max_relative_error: float) -> None:
        """Include the errors of further rows; rows that are read again change nothing."""
        with self._lock:
            self.max_abs_error, self.max_relative_error = (
                max(self.max_abs_error, max_abs_error),
                max(self.max_relative_error, max_relative_error),
            )


@dataclass(frozen=True, kw_only=True)
class RerotationResult(Record):
    """The result of rotating K to other positions."""

    #: Human-readable rotation of K: one text for each different kind of layer.
    rotation: str
    #: Source of the rotation, as the end of a sentence: ``"as model/llm.mnn has it"``, ``"found by trial"``.
    origin: str
    #: Tokens whose K was rotated, of all layers.
    tokens: int
    #: Layers that have such tokens.
    layers: int
    #: Type of the rounded elements.
    dtype: str
    #: Type of the written elements; where it differs, the errors do not contain its rounding.
    written_dtype: str = field(metadata={"json": False})
    #: Error relative to the exact rotation; complete after all elements were written.
    error_stats: RotationErrorStats = field(metadata={"inline": True})

    @property
    @json_key(before="rotation")
    def label(self) -> str:
        """Return ``LOSSY`` if any K was rotated, because its elements were rounded; otherwise ``LOSSLESS``."""
        return LOSSY if self.tokens else LOSSLESS

    @property
    def losses(self) -> tuple[str, ...]:
        """Return a sentence for the record of what K has lost; none if nothing was rotated."""
        return ("K was rotated to other positions",) if self.tokens else ()

    def __str__(self) -> str:
        if not self.tokens:
            return (
                "K was not rotated: nothing says that its tokens are at other positions than the first; of a cut cache "
                f"NAME{CACHE_SIDECAR_SUFFIX} or positions.json does, next to its files"
            )
        rounding_text = (
            f"{self.dtype} rounds this rotation by up to {self.error_stats.max_abs_error:.3g}, "
            f"{self.error_stats.max_relative_error:.2g} of the length of its pair"
            if self.written_dtype == self.dtype
            else f"computed in {self.dtype}, then converted to {self.written_dtype}"
        )
        return (
            f"{pluralize(self.tokens, 'row')} of K rotated to the first positions, in "
            f"{pluralize(self.layers, 'layer')} together, by\n    {self.rotation}, {self.origin}\n    {rounding_text}"
        )


def expand_position_runs(runs: PositionRuns) -> Positions:
    """Return ``(begin, size)`` runs as int64 positions."""
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in runs])


def rotate_rows(
    elements: Bytes, dtype: str, distances: Positions, rope: RopeFrequencies, error_stats: RotationErrorStats
) -> Bytes:
    """Rotate rows of K by distances in positions.

    Parameters
    ----------
    elements
        Bytes of whole rows ``[row, head_dim]``.
    distances
        int64 ``[row]``: new position less old one. Rows with distance 0 keep every bit.
    """
    is_moved = distances != 0
    if not is_moved.any():
        return elements
    rows = to_float32(elements, dtype).reshape(len(distances), -1)
    half = rope.dims // 2
    first_slice, second_slice = (
        (slice(0, half), slice(half, rope.dims))
        if rope.pairing == "half"
        else (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
    )
    x, y = np.ascontiguousarray(rows[:, first_slice]), np.ascontiguousarray(rows[:, second_slice])
    # Evicted tokens leave runs at the same distance: their angles are computed once.
    unique_distances, inverse = np.unique(distances, return_inverse=True)
    angles = (unique_distances.astype(np.uint64)[:, None] * rope.turns).view(np.int64) * _RADIANS_PER_PHASE_UNIT
    cosines, sines = np.cos(angles), np.sin(angles)
    result = rows.copy()
    with np.errstate(all="ignore"):
        row_cosines, row_sines = (table.astype(np.float32)[inverse] for table in (cosines, sines))
        rotated_x, rotated_y = x * row_cosines - y * row_sines, y * row_cosines + x * row_sines
        result[:, first_slice], result[:, second_slice] = rotated_x, rotated_y
        rounded_bytes: Bytes = round_to_dtype(result.reshape(-1), dtype)
        row_bytes = elements.size // len(distances)
        rounded_bytes.reshape(-1, row_bytes)[~is_moved] = elements.reshape(-1, row_bytes)[
            ~is_moved
        ]  # not even a NaN changes
        stored_values = to_float32(rounded_bytes, dtype).reshape(rows.shape)
        new_x, new_y = stored_values[is_moved, first_slice], stored_values[is_moved, second_slice]
        x, y = x[is_moved], y[is_moved]
        _check_finite(x, y, new_x, new_y)
        errors: npt.NDArray[Any]
        if dtype == "fp32":
            exact_cosines, exact_sines = cosines[inverse[is_moved]], sines[inverse[is_moved]]
            errors = np.maximum(
                np.abs(x * exact_cosines - y * exact_sines - new_x), np.abs(y * exact_cosines + x * exact_sines - new_y)
            )
        else:  # what float32 rounds is nothing to what these do
            errors = np.maximum(np.abs(rotated_x[is_moved] - new_x), np.abs(rotated_y[is_moved] - new_y))
        error_stats.include(_max_finite(errors), _max_finite(errors / np.sqrt(x * x + y * y)))
    return rounded_bytes


def _check_finite(x: Floats, y: Floats, new_x: Floats, new_y: Floats) -> None:
    """Raise `KvmnnError` if finite elements became infinite."""
    if not (np.isfinite(new_x).all() and np.isfinite(new_y).all()):
        is_finite = np.isfinite(x) & np.isfinite(y)
        if not (np.isfinite(new_x[is_finite]).all() and np.isfinite(new_y[is_finite]).all()):
            raise KvmnnError("elements of K become infinite by the rotation: pack them as fp32 (--cast)")


def _max_finite(values: npt.NDArray[Any]) -> float:
    max_value = float(values.max(initial=0.0))
    return max_value if np.isfinite(max_value) else float(values[np.isfinite(values)].max(initial=0.0))


def rotate_array(
    array: LazyArray,
    token_major: bool,
    distances: Positions,
    rope: RopeFrequencies,
    error_stats: RotationErrorStats,
) -> LazyArray:
    """Return K ``[kv_head, token, head_dim]``, or token-major, rotated when it is read.

    The parameters are those of `rotate_rows`.
    """
    if not distances.any():
        return array
    num_heads = array.shape[1] if token_major else array.shape[0]
    row_distances = np.repeat(distances, num_heads) if token_major else np.tile(distances, num_heads)
    reader = partial(_iter_rotated_chunks, array, row_distances, rope, error_stats)
    return replace(array, array_dtype=array.array_dtype.replace(">", "<"), reader=reader)


def _iter_rotated_chunks(
    array: LazyArray, distances: Positions, rope: RopeFrequencies, error_stats: RotationErrorStats, chunk_bytes: int
) -> Iterator[Chunk]:
    yield from rechunk(_iter_rotated_rows(array, distances, rope, error_stats), chunk_bytes, array.nbytes)


def _iter_rotated_rows(
    array: LazyArray, distances: Positions, rope: RopeFrequencies, error_stats: RotationErrorStats
) -> Iterator[Chunk]:
    row_bytes, row = array.shape[-1] * array.itemsize, 0
    for chunk in array.iter_chunks(max(_READ_CHUNK_BYTES, row_bytes)):
        num_rows = chunk.size // row_bytes
        yield rotate_rows(chunk, array.dtype, distances[row : row + num_rows], rope, error_stats)
        row += num_rows
