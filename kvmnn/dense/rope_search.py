"""How K was rotated, found by trial: what a model does not say, its K does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .._util.validation import repr_short
from ..dtypes import DType, Elements, Indices
from ..errors import KvmnnError
from . import _stream
from .header import DTYPES, to_row_bytes
from .inputs import complete_positions, validate_array
from .rope import PAIRINGS, RopeConfig, RopeFrequencies

AutoRope: TypeAlias = Literal["auto"]
"""In place of a `RopeConfig`: found by trial, or none."""

_ROTATED_FRACTIONS = (1.0, 0.75, 0.5, 0.4, 0.25)
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
_SAMPLE_ELEMENTS = 128
_SHORT_RUN_ROWS, _RUN_ROWS, _SPAN_ROWS = 64, 128, 1024
"""Rows of a sample: two runs, from the beginning and the end of a span; rows far apart tell thetas apart."""
_NUM_FINALISTS = 3
_MAX_TRIALS = 2
_MIN_GAIN, _MIN_SIGMAS, _ABANDON_RATIO = 1.02, 4.0, 0.95
_CLEAR_GAIN = 1.05
"""Below it K of three models was up to 0.5 % larger with the rotation, at 128 KiB and more; never above it."""


class _RopeCandidate(NamedTuple):
    theta: float
    dims: int
    pairing: str
    scaling: int | None = None

    def to_config(self) -> RopeConfig:
        scaling = None if self.scaling is None else _SCALINGS[self.scaling][1]
        return RopeConfig(theta=self.theta, dims=self.dims, pairing=self.pairing, scaling=scaling)

    @property
    def rotation(self) -> _stream.Rotation:
        return (
            self.dims,
            int(self.pairing == "interleaved"),
            _approximate_frequencies(self.theta, self.dims, self.scaling),
        )


class _RowSample:
    """Some rows of a few heads, on which rotations are tried."""

    def __init__(self, array: Elements, element_type: DType, positions: npt.NDArray[np.uint32], rows: Indices) -> None:
        heads = max(1, min(array.shape[0], _SAMPLE_ELEMENTS // array.shape[2]))
        row_bytes = to_row_bytes(array[:heads][:, rows], element_type)
        placeholder_rotation = 2, 0, np.zeros(1, np.uint64)
        self._input = _stream.EncoderRows(
            DTYPES.index(element_type),
            heads,
            array.shape[2],
            row_bytes,
            None,
            placeholder_rotation,
            positions[rows],
            None,
        )

    def count_predicted(self, candidate: _RopeCandidate | RopeConfig | RopeFrequencies | None) -> int:
        return self._input.count_predicted(None if candidate is None else candidate.rotation)


def search_rope(array: Elements, positions: Any = None, *, dtype: str | None = None) -> RopeConfig | None:
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
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return None
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, _SHORT_RUN_ROWS))
    scores = {candidate: sample.count_predicted(candidate) for candidate in _iter_shapes(array.shape[2])}
    best = max(scores, key=lambda candidate: scores[candidate])
    if scores[best] < _ABANDON_RATIO * sample.count_predicted(None):
        return None
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, _RUN_ROWS))
    baseline = sample.count_predicted(None)
    scores = {candidate: sample.count_predicted(candidate) for candidate in _iter_parameters(best.dims, best.pairing)}
    finalists = sorted(scores, key=lambda candidate: -scores[candidate])[:_NUM_FINALISTS]
    if scores[finalists[0]] < baseline:
        return None
    if not _is_better(scores[finalists[0]], baseline) or not _is_better(scores[finalists[0]], scores[finalists[1]]):
        sample = _RowSample(array, element_type, row_positions, span)
        baseline = sample.count_predicted(None)
        scores = {candidate: sample.count_predicted(candidate) for candidate in finalists}
    best = max(scores, key=lambda candidate: scores[candidate])
    return best.to_config() if _is_better(scores[best], baseline) else None


def rate_rotations(
    array: Elements,
    ropes: Sequence[RopeFrequencies | None],
    positions: Any = None,
    *,
    dtype: str | None = None,
) -> list[int]:
    """Rate ways in which K may have been rotated by how alike its rows are without that rotation.

    Parameters
    ----------
    array, positions, dtype
        As for `search_rope`.
    ropes
        Of at most head_dim dims each; None for no rotation.

    Returns
    -------
    list of int
        For each the number of elements that the row before predicts: compare them by `is_clearly_better`. Empty where
        there are too few tokens to tell.
    """
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return []
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, _RUN_ROWS))
    return [sample.count_predicted(rope) for rope in ropes]


def is_clearly_better(rating: int, baseline: int) -> bool:
    """Return whether a rating of `rate_rotations` is higher than another by more than chance."""
    return _is_better(rating, baseline)


def list_similar_ropes(rotary: RopeConfig) -> list[RopeConfig]:
    """Return what else `search_rope` tries of the same dims and pairing."""
    candidates = (config.to_config() for config in _iter_parameters(rotary.dims, rotary.pairing))
    return [config for config in candidates if config != rotary]


class RopeSearch:
    """What is found of several arrays of a model, of which those that are K are rotated alike."""

    def __init__(self) -> None:
        self._rope: RopeConfig | None = None
        self._trials_remaining = _MAX_TRIALS

    def resolve(
        self, rotary: RopeConfig | AutoRope | None, array: Elements, positions: Any, dtype: str | None
    ) -> RopeConfig | None:
        """`rotary`, or in place of ``"auto"`` what is found."""
        if not isinstance(rotary, str):
            return rotary
        if rotary != "auto":
            raise KvmnnError(f"rotary is {repr_short(rotary)}: expected a Rotary, 'auto' or None")
        validate_array(array, dtype, "array")
        if positions is not None:  # those of history may come first
            positions = np.asarray(positions)[-array.shape[1] :]
        if self._rope is not None:
            return self._rope if _is_improved_by(self._rope, array, positions, dtype) else None
        if self._trials_remaining:
            self._trials_remaining -= 1
            self._rope = search_rope(array, positions, dtype=dtype)
        return self._rope


def is_rotation_clearly_smaller(rotary: RopeConfig, array: Elements, positions: Any, dtype: str | None) -> bool:
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
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return False
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, _SHORT_RUN_ROWS))
    return sample.count_predicted(rotary) > _CLEAR_GAIN * sample.count_predicted(None)


def _is_improved_by(rotary: RopeConfig, array: Elements, positions: Any, dtype: str | None) -> bool:
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size or rotary.dims > array.shape[2]:
        return False
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, _RUN_ROWS))
    return sample.count_predicted(rotary) > sample.count_predicted(None)


def _prepare_sampling(
    array: Elements, positions: Any, dtype: str | None
) -> tuple[DType, npt.NDArray[np.uint32], Indices]:
    """Element type, positions, and the rows that samples are taken of: none where there is nothing to find."""
    element_type = validate_array(array, dtype, "array")
    heads, tokens, dim = array.shape
    row_positions = complete_positions(positions, tokens, 0)
    return element_type, row_positions, np.arange(min(tokens, _SPAN_ROWS) if heads and dim > 1 and tokens > 1 else 0)


def _select_runs(span: Indices, rows: int) -> Indices:
    return span if span.size <= 2 * rows else np.concatenate([span[:rows], span[-rows:]])


def _is_better(score: int, baseline: int) -> bool:
    """More than chance gives: counts of words vary as their square root."""
    return score > _MIN_GAIN * baseline and score - baseline > _MIN_SIGMAS * math.sqrt(2 * baseline)


def _iter_shapes(dim: int) -> Iterator[_RopeCandidate]:
    for dims in sorted({int(dim * fraction) // 2 * 2 for fraction in _ROTATED_FRACTIONS} - {0}):
        for pairing in PAIRINGS:
            for theta in _FIRST_THETAS:
                yield _RopeCandidate(theta, dims, pairing)


def _iter_parameters(dims: int, pairing: str) -> Iterator[_RopeCandidate]:
    for theta in _THETAS:
        yield _RopeCandidate(theta, dims, pairing)
    for scaling_index, (theta, _) in enumerate(_SCALINGS):
        yield _RopeCandidate(theta, dims, pairing, scaling_index)


@lru_cache(maxsize=256)
def _approximate_frequencies(theta: float, dims: int, scaling: int | None) -> Any:
    """As `RopeConfig.frequencies`, which takes longer than a trial, but for what doubles round."""
    if scaling is not None:
        return RopeConfig(theta=theta, dims=dims, scaling=_SCALINGS[scaling][1]).frequencies
    turns = theta ** (-2.0 * np.arange(dims // 2) / dims) / (2 * math.pi)
    return (turns * 2.0**64).astype(np.uint64)
