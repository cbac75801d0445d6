"""Search for the rotation of K, for models whose RoPE parameters are unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from .._util.validation import repr_short
from ..dtypes import DType, Elements, Indices
from ..errors import KvmnnError
from . import _stream, tuning
from .header import DTYPES, to_row_bytes
from .inputs import complete_positions, validate_array
from .rope import PAIRINGS, RopeConfig, RopeFrequencies

AutoRope: TypeAlias = Literal["auto"]
"""In place of a `RopeConfig`: the result of `search_rope`."""

_LLAMA3_SCALINGS = tuple(
    {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "factor": factor,
    }
    for factor in tuning.LLAMA3_FACTORS
)


class _RopeCandidate(NamedTuple):
    theta: float
    dims: int
    pairing: str
    scaling: int | None = None

    def to_config(self) -> RopeConfig:
        scaling = None if self.scaling is None else _LLAMA3_SCALINGS[self.scaling]
        return RopeConfig(theta=self.theta, dims=self.dims, pairing=self.pairing, scaling=scaling)

    @property
    def rotation(self) -> _stream.Rotation:
        return (
            self.dims,
            int(self.pairing == "interleaved"),
            _approximate_frequencies(self.theta, self.dims, self.scaling),
        )


class _RowSample:
    """Rows of a few heads on which rotations are tried."""

    def __init__(self, array: Elements, element_type: DType, positions: npt.NDArray[np.uint32], rows: Indices) -> None:
        heads = max(1, min(array.shape[0], tuning.SAMPLE_ROW_ELEMENTS // array.shape[2]))
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
    """Search the usual RoPE parameters for those by which K was rotated; takes some milliseconds.

    Parameters
    ----------
    array
        K of one layer, ``[kv_head, token, head_dim]``, as for `encode`. The first layers show the rotation best; all
        layers of a model share it.
    positions
        Positions of the tokens, as for `encode`.
    dtype
        As for `encode`.

    Returns
    -------
    RopeConfig or None
        The theta, fraction of head_dim, pairing and scaling, out of those of models in use, that make rows most
        similar; None if none is better than no rotation, as for V, for noise and for few tokens. A wrong one costs size
        only.

    Raises
    ------
    TypeError, KvmnnError
        As for the array and the positions of `encode`.
    """
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return None
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, tuning.SHORT_RUN_ROWS))
    scores = {candidate: sample.count_predicted(candidate) for candidate in _iter_shapes(array.shape[2])}
    best = max(scores, key=lambda candidate: scores[candidate])
    if scores[best] < tuning.ABANDON_RATIO * sample.count_predicted(None):
        return None
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, tuning.RUN_ROWS))
    baseline = sample.count_predicted(None)
    scores = {candidate: sample.count_predicted(candidate) for candidate in _iter_parameters(best.dims, best.pairing)}
    finalists = sorted(scores, key=lambda candidate: -scores[candidate])[: tuning.NUM_FINALISTS]
    if scores[finalists[0]] < baseline:
        return None
    if not is_clearly_better(scores[finalists[0]], baseline) or not is_clearly_better(
        scores[finalists[0]], scores[finalists[1]]
    ):
        sample = _RowSample(array, element_type, row_positions, span)
        baseline = sample.count_predicted(None)
        scores = {candidate: sample.count_predicted(candidate) for candidate in finalists}
    best = max(scores, key=lambda candidate: scores[candidate])
    return best.to_config() if is_clearly_better(scores[best], baseline) else None


def rate_rotations(
    array: Elements,
    ropes: Sequence[RopeFrequencies | None],
    positions: Any = None,
    *,
    dtype: str | None = None,
) -> list[int]:
    """Rate rotations of K by how similar its rows become without them."""
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return []
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, tuning.RUN_ROWS))
    return [sample.count_predicted(rope) for rope in ropes]


def is_clearly_better(rating: int, baseline: int) -> bool:
    """Return whether a rating of `rate_rotations` is higher than another by more than chance."""
    # Counts of elements vary as their square root.
    return rating > tuning.MIN_GAIN * baseline and rating - baseline > tuning.MIN_SIGMAS * math.sqrt(2 * baseline)


def list_similar_ropes(rotary: RopeConfig) -> list[RopeConfig]:
    """Return the other parameters that `search_rope` tries with the same dims and pairing."""
    candidates = (config.to_config() for config in _iter_parameters(rotary.dims, rotary.pairing))
    return [config for config in candidates if config != rotary]


class RopeSearch:
    """Resolver of ``"auto"`` for several arrays of a model whose K share one rotation."""

    def __init__(self) -> None:
        self._rope: RopeConfig | None = None
        self._searches_remaining = tuning.MAX_SEARCHES

    def resolve(
        self, rotary: RopeConfig | AutoRope | None, array: Elements, positions: Any, dtype: str | None
    ) -> RopeConfig | None:
        """Return `rotary`; for ``"auto"`` the rotation that was found and suits the array, or None."""
        if not isinstance(rotary, str):
            return rotary
        if rotary != "auto":
            raise KvmnnError(f"rotary is {repr_short(rotary)}: expected a Rotary, 'auto' or None")
        validate_array(array, dtype, "array")
        if positions is not None:  # positions of history may come first
            positions = np.asarray(positions)[-array.shape[1] :]
        if self._rope is not None:
            return self._rope if _is_improved_by(self._rope, array, positions, dtype) else None
        if self._searches_remaining:
            self._searches_remaining -= 1
            self._rope = search_rope(array, positions, dtype=dtype)
        return self._rope


def is_rotation_clearly_smaller(rotary: RopeConfig, array: Elements, positions: Any, dtype: str | None) -> bool:
    """Return whether unrotated rows are so much more similar that a stream with this rotation is surely smaller."""
    if positions is not None:
        positions = np.asarray(positions)[-array.shape[1] :]
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size:
        return False
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, tuning.SHORT_RUN_ROWS))
    return sample.count_predicted(rotary) > tuning.CLEAR_ROTATION_GAIN * sample.count_predicted(None)


def _is_improved_by(rotary: RopeConfig, array: Elements, positions: Any, dtype: str | None) -> bool:
    element_type, row_positions, span = _prepare_sampling(array, positions, dtype)
    if not span.size or rotary.dims > array.shape[2]:
        return False
    sample = _RowSample(array, element_type, row_positions, _select_runs(span, tuning.RUN_ROWS))
    return sample.count_predicted(rotary) > sample.count_predicted(None)


def _prepare_sampling(
    array: Elements, positions: Any, dtype: str | None
) -> tuple[DType, npt.NDArray[np.uint32], Indices]:
    """Return the element type, positions and rows to sample from; no rows if the array is too small to search."""
    element_type = validate_array(array, dtype, "array")
    heads, tokens, dim = array.shape
    row_positions = complete_positions(positions, tokens, 0)
    return (
        element_type,
        row_positions,
        np.arange(min(tokens, tuning.SPAN_ROWS) if heads and dim > 1 and tokens > 1 else 0),
    )


def _select_runs(span: Indices, rows: int) -> Indices:
    return span if span.size <= 2 * rows else np.concatenate([span[:rows], span[-rows:]])


def _iter_shapes(dim: int) -> Iterator[_RopeCandidate]:
    for dims in sorted({int(dim * fraction) // 2 * 2 for fraction in tuning.ROTATED_FRACTIONS} - {0}):
        for pairing in PAIRINGS:
            for theta in tuning.SHAPE_THETAS:
                yield _RopeCandidate(theta, dims, pairing)


def _iter_parameters(dims: int, pairing: str) -> Iterator[_RopeCandidate]:
    for theta in tuning.THETAS:
        yield _RopeCandidate(theta, dims, pairing)
    for scaling_index in range(len(_LLAMA3_SCALINGS)):
        yield _RopeCandidate(tuning.LLAMA3_THETA, dims, pairing, scaling_index)


@lru_cache(maxsize=256)
def _approximate_frequencies(theta: float, dims: int, scaling: int | None) -> Any:
    """Return `RopeConfig.frequencies` in double precision: the exact ones take longer than a trial."""
    if scaling is not None:
        return RopeConfig(theta=theta, dims=dims, scaling=_LLAMA3_SCALINGS[scaling]).frequencies
    turns = theta ** (-2.0 * np.arange(dims // 2) / dims) / (2 * math.pi)
    return (turns * 2.0**64).astype(np.uint64)
