"""How much quality an error in K or V of one layer costs: the KL divergence of what the model predicts after it.

A text's first tokens are read once. Then, for each layer and side, its K or V are rounded as a lossy codec would round
them, the model reads what follows, and its predictions are compared with those of the exact cache. For small steps the
divergence grows with the square of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..arrays.layer_cache import LayerCache
from ..dtypes import PARTS, Floats, KVPair, Part
from ..lm.session import DecoderSession
from ..profiles import LayerGeometry, Statistics, build_rows
from ..profiles.geometry import Rows, restore_heads
from ..profiles.statistics import NUM_SINKS
from .metrics import Metric

STEP_PER_RMS = 0.5
"""Step of the trial rounding, in units of the root mean square of the coefficients."""
_MIN_EIGENVALUE_RATIO = 1e-4
_MAX_LOGIT_BYTES = 64 << 20
"""Of one step of a model, about."""
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class RowTransform:
    """Coefficients of rows: ``(row - mean) @ forward``, decorrelated in the metric of attention."""

    mean: npt.NDArray[np.float64]
    forward: npt.NDArray[np.float64]
    inverse: npt.NDArray[np.float64]
    #: Root mean square of the coefficients.
    rms: float

    @classmethod
    def from_statistics(cls, statistics: Statistics, layer: int, part: Part, metric: Metric | None) -> RowTransform:
        """Build the transform of a layer and side; without a metric all errors count alike."""
        covariance = statistics.covariance(layer, part, part)
        size = len(covariance)
        weighting, unweighting = np.eye(size), np.eye(size)
        if metric is not None:
            for head, matrix in enumerate(metric):
                span = slice(head * len(matrix), (head + 1) * len(matrix))
                weighting[span, span], unweighting[span, span] = _take_root(matrix)
        eigenvalues, basis = np.linalg.eigh(weighting @ covariance @ weighting)
        return cls(
            mean=statistics.mean(layer, part),
            forward=weighting @ basis,
            inverse=basis.T @ unweighting,
            rms=float(np.sqrt(max(eigenvalues.mean(), 0.0))),
        )

    def round_rows(self, rows: Rows, step: float) -> Rows:
        """Return rows whose coefficients are rounded to multiples of `step`."""
        coefficients = (rows - self.mean) @ self.forward
        return np.rint(coefficients / step) * step @ self.inverse + self.mean


def _take_root(metric: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the symmetric root of a metric of unit mean diagonal, and its inverse."""
    mean_diagonal = np.trace(metric) / len(metric)
    if not mean_diagonal > 0:
        return np.eye(len(metric)), np.eye(len(metric))
    eigenvalues, basis = np.linalg.eigh(metric / mean_diagonal)
    roots = np.sqrt(np.maximum(eigenvalues, _MIN_EIGENVALUE_RATIO * eigenvalues[-1]))
    return basis * roots @ basis.T, basis / roots @ basis.T


class SensitivityProbe:
    """The predictions of a model after an exact prefix, to be compared with those after a rounded one.

    Parameters
    ----------
    session
        The model.
    caches
        K and V of every layer of the first tokens of a text.
    ids
        The ids that follow, int64 ``[token]``.
    """

    def __init__(self, session: DecoderSession, caches: Sequence[LayerCache], ids: npt.NDArray[np.int64]) -> None:
        self._session, self._caches, self._ids = session, caches, ids
        self._past = [(cache.keys[None], cache.values[None]) for cache in caches]
        self._reference = [logits.copy() for logits in self._iter_logits(self._past)]

    def measure(self, layer: int, part: Part, geometry: LayerGeometry, transform: RowTransform) -> float:
        """Return the KL divergence in nats a token, per square of the step, of one layer and side."""
        step = STEP_PER_RMS * transform.rms
        if not step > 0:
            return 0.0
        past = list(self._past)
        past[layer] = self._round_layer(self._caches[layer], part, geometry, transform, step)
        total = sum(
            compute_divergence(reference, logits)
            for reference, logits in zip(self._reference, self._iter_logits(past), strict=True)
        )
        return total / len(self._ids) / step**2

    def _round_layer(
        self, cache: LayerCache, part: Part, geometry: LayerGeometry, transform: RowTransform, step: float
    ) -> KVPair:
        rows = build_rows(cache, geometry)[PARTS.index(part)]
        heads = restore_heads(transform.round_rows(rows, step), geometry, part, cache.positions)
        elements = cache.keys if part == "key" else cache.values
        rounded = np.ascontiguousarray(heads.astype(elements.dtype))
        rounded[:, :NUM_SINKS] = elements[:, :NUM_SINKS]
        return (rounded[None], cache.values[None]) if part == "key" else (cache.keys[None], rounded[None])

    def _iter_logits(self, past: Sequence[KVPair]) -> Iterator[Floats]:
        first = self._caches[0].tokens
        size = max(1, _MAX_LOGIT_BYTES // (4 * (self._session.interface.vocab_size or 1)))
        for begin in range(0, len(self._ids), size):
            ids = self._ids[begin : begin + size]
            positions = np.arange(first + begin, first + begin + len(ids), dtype=np.int64)
            result = self._session.run_step(ids, positions, past, attentions=False)
            past = result.present_pairs
            yield result.logits


def compute_divergence(reference: Floats, logits: Floats) -> float:
    """Return the KL divergence of the predictions from the reference's in nats, summed over tokens.

    Parameters
    ----------
    reference, logits
        float32 ``[token, vocabulary]``.
    """
    total, rows = 0.0, max(1, _BLOCK_ELEMENTS // reference.shape[1])
    for begin in range(0, len(reference), rows):
        expected, actual = reference[begin : begin + rows], logits[begin : begin + rows]
        probabilities, log_norm = _normalize(expected)
        _, actual_log_norm = _normalize(actual)
        differences = (probabilities * (expected - actual)).sum(axis=1, dtype=np.float64)
        total += float((differences - log_norm + actual_log_norm).sum())
    return total


def _normalize(logits: Floats) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Return probabilities, and the logarithm of the sum of the exponentials of the logits."""
    highest = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - highest)
    sums = exponentials.sum(axis=1, dtype=np.float64)
    return exponentials / sums[:, None].astype(np.float32), np.log(sums) + highest[:, 0]
