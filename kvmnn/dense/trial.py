"""How K was rotated, found by trial: what a model does not say, its K does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..checks import shown
from ..dtypes import DType, Indices, Words
from ..errors import KvmnnError
from . import _stream
from .frequencies import RopeFrequencies
from .header import DTYPES, rows_of
from .rotary import PAIRINGS, Rotary
from .taking import all_positions, checked_array

Auto: TypeAlias = Literal["auto"]
"""In place of a `Rotary`: found by trial, or none."""

_SHARES = (1.0, 0.75, 0.5, 0.4, 0.25)
"""Of the words of a head: all (Llama, Qwen), three quarters (Phi-4-mini), half (GLM), 0.4 (Phi-2), a quarter (NeoX)."""
_FIRST_THETAS = (1e4, 1e5, 1e6, 8e6)
_THETAS = (1e3, 1e4, 5e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 8e6, 1e7)
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SCALINGS = ((5e5, {**_LLAMA3, "factor": 8.0}), (5e5, {**_LLAMA3, "factor": 32.0}))
"""Llama 3.1 and 3.2."""
_WORDS = 128
_SHORT_RUN, _RUN, _SPAN = 64, 128, 1024
"""Rows of a sample: two runs, from the beginning and the end of a span; rows far apart tell thetas apart."""
_FINALISTS = 3
_MOST_TRIALS = 2
_LEAST_GAIN, _LEAST_SIGMAS, _HOPELESS = 1.02, 4.0, 0.95
_CLEAR_GAIN = 1.05
"""Below it K of three models was up to 0.5 % larger with the rotation, at 128 KiB and more; never above it."""


class _Candidate(NamedTuple):
    theta: float
    dims: int
    pairing: str
    scaling: int | None = None

    def rotary(self) -> Rotary:
        scaling = None if self.scaling is None else _SCALINGS[self.scaling][1]
        return Rotary(theta=self.theta, dims=self.dims, pairing=self.pairing, scaling=scaling)

    @property
    def rotation(self) -> _stream.Rotation:
        return self.dims, int(self.pairing == "interleaved"), _frequencies(self.theta, self.dims, self.scaling)


class _Sample:
    """Some rows of a few heads, on which rotations are tried."""

    def __init__(self, array: Words, kind: DType, positions: npt.NDArray[np.uint32], rows: Indices) -> None:
        heads = max(1, min(array.shape[0], _WORDS // array.shape[2]))
        words = rows_of(array[:heads][:, rows], kind)
        anything = 2, 0, np.zeros(1, np.uint64)
        self._input = _stream.Input(
            DTYPES.index(kind), heads, array.shape[2], words, None, anything, positions[rows], None
        )

    def alike(self, tried: _Candidate | Rotary | RopeFrequencies | None) -> int:
        return self._input.alike(None if tried is None else tried.rotation)


def find_rotary(array: Words, positions: Any = None, *, dtype: str | None = None) -> Rotary | None:
    """How K was rotated, as far as one of the usual parameters fits; some milliseconds.

    Parameters
    ----------
    array
        K of one layer, ``[kv_head, token, head_dim]``, as for `encode`; that of the first layers shows it best. All
        layers of a model are rotated alike.
    positions
        Of the tokens, as for `encode`.
    dtype
        As for `encode`.

    Returns
    -------
    Rotary or None
        Of the thetas, shares of head_dim, pairings and scalings that models in use have, the one under which rows are
        most alike; None where none is better than no rotation, as of V, of noise and of few tokens. A wrong one costs
        size only.

    Raises
    ------
    TypeError, KvmnnError
        As `encode`, for the array and the positions.
    """
    kind, at, span = _checked(array, positions, dtype)
    if not span.size:
        return None
    sample = _Sample(array, kind, at, _runs(span, _SHORT_RUN))
    found = {one: sample.alike(one) for one in _shapes(array.shape[2])}
    best = max(found, key=lambda one: found[one])
    if found[best] < _HOPELESS * sample.alike(None):
        return None
    sample = _Sample(array, kind, at, _runs(span, _RUN))
    plain = sample.alike(None)
    found = {one: sample.alike(one) for one in _of_shape(best.dims, best.pairing)}
    finalists = sorted(found, key=lambda one: -found[one])[:_FINALISTS]
    if found[finalists[0]] < plain:
        return None
    if not _better(found[finalists[0]], plain) or not _better(found[finalists[0]], found[finalists[1]]):
        sample = _Sample(array, kind, at, span)
        plain = sample.alike(None)
        found = {one: sample.alike(one) for one in finalists}
    best = max(found, key=lambda one: found[one])
    return best.rotary() if _better(found[best], plain) else None


def rate_rotations(
    array: Words,
    ropes: Sequence[RopeFrequencies | None],
    positions: Any = None,
    *,
    dtype: str | None = None,
) -> list[int]:
    """Rate ways in which K may have been rotated by how alike its rows are without that rotation.

    Parameters
    ----------
    array, positions, dtype
        As for `find_rotary`.
    ropes
        Of at most head_dim dims each; None for no rotation.

    Returns
    -------
    list of int
        For each the number of elements that the row before predicts: compare them by `is_clearly_better`. Empty where
        there are too few tokens to tell.
    """
    kind, at, span = _checked(array, positions, dtype)
    if not span.size:
        return []
    sample = _Sample(array, kind, at, _runs(span, _RUN))
    return [sample.alike(rope) for rope in ropes]


def is_clearly_better(rating: int, other: int) -> bool:
    """Return whether a rating of `rate_rotations` is higher than another by more than chance."""
    return _better(rating, other)


def similar_rotaries(rotary: Rotary) -> list[Rotary]:
    """Return what else `find_rotary` tries of the same dims and pairing."""
    tried = (each.rotary() for each in _of_shape(rotary.dims, rotary.pairing))
    return [each for each in tried if each != rotary]


class Trial:
    """What is found of several arrays of a model, of which those that are K are rotated alike."""

    def __init__(self) -> None:
        self._found: Rotary | None = None
        self._left = _MOST_TRIALS

    def rotary(self, given: Rotary | Auto | None, array: Words, positions: Any, dtype: str | None) -> Rotary | None:
        """`given`, or in place of ``"auto"`` what is found."""
        if not isinstance(given, str):
            return given
        if given != "auto":
            raise KvmnnError(f"rotary is {shown(given)}: expected a Rotary, 'auto' or None")
        checked_array(array, dtype, "array")
        if positions is not None:  # those of history may come first
            positions = np.asarray(positions)[-array.shape[1] :]
        if self._found is not None:
            return self._found if _fits(self._found, array, positions, dtype) else None
        if self._left:
            self._left -= 1
            self._found = find_rotary(array, positions, dtype=dtype)
        return self._found


def is_rotation_clearly_smaller(rotary: Rotary, array: Words, positions: Any, dtype: str | None) -> bool:
    """Return whether rows are so much more alike without this rotation that a stream with it is surely smaller.

    Parameters
    ----------
    rotary, array, dtype
        As for `encode`.
    positions
        As for `encode`; those of history may come first.
    """
    if positions is not None:
        positions = np.asarray(positions)[-array.shape[1] :]
    kind, at, span = _checked(array, positions, dtype)
    if not span.size:
        return False
    sample = _Sample(array, kind, at, _runs(span, _SHORT_RUN))
    return sample.alike(rotary) > _CLEAR_GAIN * sample.alike(None)


def _fits(rotary: Rotary, array: Words, positions: Any, dtype: str | None) -> bool:
    kind, at, span = _checked(array, positions, dtype)
    if not span.size or rotary.dims > array.shape[2]:
        return False
    sample = _Sample(array, kind, at, _runs(span, _RUN))
    return sample.alike(rotary) > sample.alike(None)


def _checked(array: Words, positions: Any, dtype: str | None) -> tuple[DType, npt.NDArray[np.uint32], Indices]:
    """Element type, positions, and the rows that samples are taken of: none where there is nothing to find."""
    kind = checked_array(array, dtype, "array")
    heads, tokens, dim = array.shape
    at = all_positions(positions, tokens, 0)
    return kind, at, np.arange(min(tokens, _SPAN) if heads and dim > 1 and tokens > 1 else 0)


def _runs(span: Indices, rows: int) -> Indices:
    return span if span.size <= 2 * rows else np.concatenate([span[:rows], span[-rows:]])


def _better(alike: int, other: int) -> bool:
    """More than chance gives: counts of words vary as their square root."""
    return alike > _LEAST_GAIN * other and alike - other > _LEAST_SIGMAS * math.sqrt(2 * other)


def _shapes(dim: int) -> Iterator[_Candidate]:
    for dims in sorted({int(dim * share) // 2 * 2 for share in _SHARES} - {0}):
        for pairing in PAIRINGS:
            for theta in _FIRST_THETAS:
                yield _Candidate(theta, dims, pairing)


def _of_shape(dims: int, pairing: str) -> Iterator[_Candidate]:
    for theta in _THETAS:
        yield _Candidate(theta, dims, pairing)
    for number, (theta, _) in enumerate(_SCALINGS):
        yield _Candidate(theta, dims, pairing, number)


@lru_cache(maxsize=256)
def _frequencies(theta: float, dims: int, scaling: int | None) -> Any:
    """As `Rotary.frequencies`, which takes longer than a trial, but for what doubles round."""
    if scaling is not None:
        return Rotary(theta=theta, dims=dims, scaling=_SCALINGS[scaling][1]).frequencies
    turns = theta ** (-2.0 * np.arange(dims // 2) / dims) / (2 * math.pi)
    return (turns * 2.0**64).astype(np.uint64)
