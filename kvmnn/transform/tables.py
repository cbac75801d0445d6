"""Tables of transform streams, made of a model's statistics (docs/format-transform.md, "Tables")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..profiles.geometry import LayerGeometry
from ..profiles.statistics import RowMoments
from . import _codec

Matrix = npt.NDArray[np.float64]
Mode = Literal["joint", "head", "diagonal", "none"]

MODES: tuple[Mode, ...] = ("joint", "head", "diagonal", "none")
TABLES_NAME = "transform/tables"
LEVELS_PER_DOUBLING = 8
LEVEL_OF_ONE = 40
"""Level of a coefficient whose standard deviation is its step: five doublings above the first table."""

SHAPE = 1.4
"""Exponent of the generalised normal distribution of coefficients: 1 is Laplace's, 2 Gauss's. On two models it costs
0.4 % more than a table for each coefficient, 1 and 2 cost 2 and 1 %."""
_SCALE = 4096
_MAX_BASIS = 1 << 13
"""Largest element of a basis: sums of coefficients up to 2,047 stay below 2^31."""
_MAX_WEIGHT = 127
_NORMAL_DEVIATION = 1 << 11
"""Standard deviation of the normalised elements that rows are predicted from: outliers up to 16 are kept."""
_MIN_EIGENVALUE_RATIO = 1e-4
_RIDGE = 1e-3
_NOMINAL_KL = 0.004
"""Loss in nats at whose noise the predictions are made; others cost little."""
_UNKNOWN_RELATIVE_STEP = 0.5
"""Without sensitivities: the step at which a layer and side loses 1 / (2 x layers) nats, in its root mean square."""


@dataclass(frozen=True)
class Metrics:
    """How errors of K and V weigh, float64 ``[kv_head, head_dim, head_dim]`` for each layer, in the order of rows."""

    key: Sequence[Matrix]
    value: Sequence[Matrix]

    def get_side(self, part: Part, layer: int) -> Matrix:
        """Return the metric of K or V of a layer."""
        return np.asarray((self.key if part == "key" else self.value)[layer], np.float64)


def list_regressors(layer: int, part: Part, below: int) -> list[tuple[int, Part]]:
    """Return the layers and sides, in order, that a side is predicted from."""
    own: list[tuple[int, Part]] = [(layer, "key")] if part == "value" else []
    return own + [(lower, side) for lower in range(layer - 1, max(layer - below, 0) - 1, -1) for side in PARTS]


def build_tables(
    statistics: RowMoments,
    metrics: Metrics | None,
    sensitivities: npt.ArrayLike | None,
    below: int = 0,
    *,
    mode: Mode = "joint",
) -> dict[str, npt.NDArray[Any]]:
    """Return the tables of streams that are predicted from up to `below` lower layers, by name of section.

    Parameters
    ----------
    statistics
        Moments of the model's K and V.
    metrics
        Metrics of K and V; None weighs all errors alike.
    sensitivities
        Nats for each square of a step, ``[layer, 2]`` (K, V), of all coefficients of a layer and side rounded to
        multiples of the step, in the metric scaled to a mean diagonal of 1. None assumes that errors weigh by the
        layer's root mean square; losses in nats are then not predicted.
    below
        0 to 2. Tables of several may be in one profile.
    mode
        ``"joint"``: one basis of all heads; ``"head"``: one for each; ``"diagonal"``: elements as they are, weighted by
        the metric's diagonal; ``"none"``: elements as they are.

    Raises
    ------
    KvmnnError
        For arguments of other sizes.
    """
    if below not in (0, 1, 2):
        raise KvmnnError(f"below is {below}: expected 0, 1 or 2 layers")
    if mode not in MODES:
        raise KvmnnError(f"mode is {mode!r:.40}: expected one of {', '.join(MODES)}")
    num_layers = len(statistics.layers)
    if sensitivities is not None and np.shape(sensitivities) != (num_layers, 2):
        raise KvmnnError(f"sensitivities of shape {list(np.shape(sensitivities))}: expected [{num_layers}, 2]")
    tables: dict[str, npt.NDArray[Any]] = {TABLES_NAME: build_frequency_tables()}
    builder = _SideBuilder(statistics, metrics, sensitivities, below, mode)
    for layer in range(num_layers):
        for part in PARTS:
            for name, array in builder.build(layer, part).items():
                tables[f"transform/{layer}/{part}/{name}"] = array
    return tables


class _SideBuilder:
    """Builds the tables of one side after another, from the lowest layer up: each needs the noise of those below."""

    def __init__(
        self,
        statistics: RowMoments,
        metrics: Metrics | None,
        sensitivities: npt.ArrayLike | None,
        below: int,
        mode: Mode,
    ) -> None:
        self._statistics, self._metrics, self._below, self._mode = statistics, metrics, below, mode
        self._sensitivities = None if sensitivities is None else np.asarray(sensitivities, np.float64)
        self._noise: dict[tuple[int, Part], Matrix] = {}
        self._layers = len(statistics.layers)

    def build(self, layer: int, part: Part) -> dict[str, npt.NDArray[Any]]:
        """Return the tables of one layer and side."""
        statistics, below = self._statistics, self._below
        geometry = statistics.layers[layer]
        order = order_words(geometry, part)
        mean = statistics.mean(layer, part)[order]
        covariance = statistics.covariance(layer, part, part)[np.ix_(order, order)]
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-16))
        tables: dict[str, npt.NDArray[Any]] = {
            "mean": _clamp_float(mean),
            "reciprocal": _clamp_float(_NORMAL_DEVIATION / np.maximum(deviation, 1e-4 * deviation.max())),
        }
        regressors = list_regressors(layer, part, below)
        if regressors:
            weights, gain, covariance = self._predict(layer, part, regressors, order, covariance)
            tables[f"weights.{below}"], tables[f"gain.{below}"] = weights, gain
        inverse, deviations = self._find_basis(layer, part, order, covariance)
        sensitivity = self._get_sensitivity(layer, part, deviations)
        step = math.sqrt(_NOMINAL_KL / (2 * self._layers) / sensitivity)
        noise = np.minimum(step * step / 12, deviations**2)
        self._noise[layer, part] = (inverse * noise) @ inverse.T
        tables |= _quantize_basis(inverse, geometry.kv_heads, self._mode, below)
        levels = LEVEL_OF_ONE + LEVELS_PER_DOUBLING * np.log2(np.maximum(deviations, 1e-12))
        tables[f"levels.{below}"] = np.clip(np.rint(levels), -4096, 4096).astype(np.int16)
        tables[f"sensitivity.{below}"] = np.array([sensitivity, float(self._sensitivities is not None)])
        return tables

    def _predict(
        self, layer: int, part: Part, regressors: list[tuple[int, Part]], order: npt.NDArray[np.int64], own: Matrix
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], Matrix]:
        """Return int8 weights of normalised regressors, the gain of their sums, and the covariance of what is left."""
        names = [side if lower == layer else f"{side}-{layer - lower}" for lower, side in regressors]
        orders, begin = [], 0
        for lower, side in regressors:
            side_order = order_words(self._statistics.layers[lower], side)
            orders.append(begin + side_order)
            begin += len(side_order)
        columns = np.concatenate(orders)
        exact = self._statistics.covariance(layer, names, names)[np.ix_(columns, columns)]
        cross = self._statistics.covariance(layer, part, names)[np.ix_(order, columns)]
        noisy, begin = exact.copy(), 0
        for regressor in regressors:
            noise = self._noise[regressor]
            noisy[begin : begin + len(noise), begin : begin + len(noise)] += noise
            begin += len(noise)
        deviations, begin = np.sqrt(np.maximum(np.diag(exact), 1e-16)), 0
        for regressor in regressors:  # as `reciprocal` has them
            part_slice = slice(begin, begin + len(self._noise[regressor]))
            deviations[part_slice] = np.maximum(deviations[part_slice], 1e-4 * deviations[part_slice].max())
            begin = part_slice.stop
        correlation = noisy / np.outer(deviations, deviations)
        cross_correlation = cross / deviations
        ridge = _RIDGE * max(float(np.mean(np.diag(correlation))), 1e-16)
        weights = np.linalg.solve(correlation + ridge * np.eye(len(correlation)), cross_correlation.T).T
        scale = np.maximum(np.abs(weights).max(1), 1e-12) / _MAX_WEIGHT
        rounded = np.rint(weights / scale[:, None])
        weights = rounded * scale[:, None]
        left = own - weights @ cross_correlation.T - cross_correlation @ weights.T + weights @ correlation @ weights.T
        return rounded.astype(np.int8), _clamp_float(scale / _NORMAL_DEVIATION), (left + left.T) / 2

    def _find_basis(
        self, layer: int, part: Part, order: npt.NDArray[np.int64], covariance: Matrix
    ) -> tuple[Matrix, npt.NDArray[np.float64]]:
        """Return the inverse of the transform and the standard deviations of the coefficients."""
        geometry = self._statistics.layers[layer]
        heads, dim = geometry.kv_heads, geometry.get_dim(part)
        n = heads * dim
        if self._metrics is None or self._mode == "none":
            root, inverse_root = np.eye(n), np.eye(n)
        else:
            metric = self._metrics.get_side(part, layer)
            if metric.shape != (heads, dim, dim) or not np.isfinite(metric).all():
                raise KvmnnError(
                    f"layer {layer}: the metric of its {part}s has shape {list(metric.shape)}: expected finite numbers "
                    f"of {[heads, dim, dim]}"
                )
            root, inverse_root = _take_roots(metric, order)
        if self._mode in ("joint", "head"):
            size = n if self._mode == "joint" else dim
            basis = np.zeros((n, n))
            weighted = root @ covariance @ root
            for begin in range(0, n, size):
                block = slice(begin, begin + size)
                basis[block, block] = np.linalg.eigh(weighted[block, block])[1][:, ::-1]
            forward, inverse = basis.T @ root, inverse_root @ basis
        else:
            diagonal = np.sqrt(np.diag(root @ root))
            diagonal = np.maximum(diagonal, 1e-2 * diagonal.max())
            forward, inverse = np.diag(diagonal), np.diag(1 / diagonal)
        variances = np.einsum("ij,jk,ik->i", forward, covariance, forward, optimize=True)
        return inverse, np.sqrt(np.maximum(variances, 1e-24))

    def _get_sensitivity(self, layer: int, part: Part, deviations: npt.NDArray[np.float64]) -> float:
        if self._sensitivities is None:
            return float(1 / (2 * self._layers * _UNKNOWN_RELATIVE_STEP**2 * np.mean(deviations**2)))
        positive = self._sensitivities[self._sensitivities > 0]
        if not len(positive) or not np.isfinite(self._sensitivities).all():
            raise KvmnnError("sensitivities must be finite, and not all of them 0")
        # A layer whose loss was not measurable gets large steps, not infinite ones.
        return float(max(self._sensitivities[layer, PARTS.index(part)], 1e-5 * positive.max()))


def order_words(geometry: LayerGeometry, part: Part) -> npt.NDArray[np.int64]:
    """Return, for each stored element of a token, its place in a row of statistics: int64 ``[n]``."""
    head_places = np.argsort(geometry.get_order(part))
    dim = len(head_places)
    return (np.arange(geometry.kv_heads)[:, None] * dim + head_places).reshape(-1)


def _take_roots(metric: Matrix, order: npt.NDArray[np.int64]) -> tuple[Matrix, Matrix]:
    """Return the symmetric root of a metric, scaled to a mean diagonal of 1, and its inverse, in the order of words."""
    heads, dim = metric.shape[:2]
    scale = max(float(np.mean(np.einsum("hii->hi", metric))), 1e-300)
    root, inverse = np.zeros((heads * dim, heads * dim)), np.zeros((heads * dim, heads * dim))
    for head in range(heads):
        values, vectors = np.linalg.eigh((metric[head] + metric[head].T) / (2 * scale))
        values = np.sqrt(np.maximum(values, max(_MIN_EIGENVALUE_RATIO * values.max(), 1e-12)))
        block = slice(head * dim, (head + 1) * dim)
        root[block, block], inverse[block, block] = (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
    return root[np.ix_(order, order)], inverse[np.ix_(order, order)]


def _quantize_basis(inverse: Matrix, heads: int, mode: Mode, below: int) -> dict[str, npt.NDArray[Any]]:
    unit = max(float(np.abs(inverse).max()), 1e-12) / _MAX_BASIS
    rounded = np.rint(inverse / unit).astype(np.int16)
    if mode == "head":
        size = len(rounded) // heads
        blocks = np.stack([rounded[i : i + size, i : i + size] for i in range(0, len(rounded), size)])
    else:
        blocks = rounded[None] if mode == "joint" else np.maximum(np.diag(rounded), 1)
    return {f"basis.{below}": blocks, f"unit.{below}": _clamp_float(np.array([unit]))}


def _clamp_float(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return float32 numbers of absolute value 0 or from 2^-64 to 2^64: products of them have normal ones."""
    numbers = np.clip(np.nan_to_num(values), -(2.0**63), 2.0**63)
    return np.where(np.abs(numbers) < 2.0**-60, 0, numbers).astype(np.float32)


def build_frequency_tables() -> npt.NDArray[np.uint16]:
    """Return frequencies of symbols, uint16 ``[table, symbol]``, each of sum 4096.

    Table i is of a coefficient whose standard deviation is 2^((i - 40) / 8) steps. The last symbol is the escape.
    """
    tables = np.zeros((_codec.NUM_TABLES, _codec.NUM_SYMBOLS), np.uint16)
    centre = _codec.NUM_SYMBOLS // 2 - 1
    numbers = np.arange(-centre, centre + 1)[:, None] + (np.arange(64) + 0.5) / 64 - 0.5
    for i in range(len(tables)):
        deviation = 2.0 ** ((i - LEVEL_OF_ONE) / LEVELS_PER_DOUBLING)
        width = deviation * math.sqrt(math.gamma(1 / SHAPE) / math.gamma(3 / SHAPE))
        density = np.exp(-((np.abs(numbers) / width) ** SHAPE)).sum(1)
        tables[i] = _round_frequencies(np.append(density / density.sum(), 1e-6), centre)
    return tables


def _round_frequencies(probabilities: npt.NDArray[np.float64], largest: int) -> npt.NDArray[np.uint16]:
    """Return frequencies of sum 4096, at least 1 for those of use and for the escape."""
    frequencies = np.rint(probabilities * _SCALE).astype(np.int64)
    frequencies[largest - 1 : largest + 2] = np.maximum(frequencies[largest - 1 : largest + 2], 1)
    frequencies[-1] = max(frequencies[-1], 1)
    frequencies[largest] += _SCALE - frequencies.sum()
    return frequencies.astype(np.uint16)
