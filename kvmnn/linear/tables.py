"""Tables of a linear model, made of the moments of a model's K and V (docs/format-linear.md, "Tables")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.validation import validate_int
from ..dtypes import PARTS, Part
from ..profiles.geometry import LayerGeometry
from ..profiles.statistics import RowMoments
from .model import MAX_BELOW, list_blocks, name_table

Arrays = dict[str, npt.NDArray[Any]]
Floats64 = npt.NDArray[np.float64]

_REGRESSION_RIDGE = 1e-3
"""Of the mean variance of regressors, which is 1."""
_CHAIN_RIDGES = 1e-3, 1e-5
"""Of an element's own variance, of the mean one."""
_SIGMA_BITS = 17
_MIN_SIGMA, _MIN_DEVIATION = 256, 1024
_UNIT_LIMIT = 1 << 30
_ZERO_EXPONENT = 160
"""Of pairs that are 0 in all texts: any other value is far from it, and both zeros have half the mass."""
_CONSTANT_BITS = 29
_DEVIATION = 256
_MAX_WEIGHT = 127


def build_tables(statistics: RowMoments, below: int) -> Arrays:
    """Build the tables of all layers.

    Parameters
    ----------
    statistics
        Moments of K and V of all layers.
    below
        How many of the layers below a layer predict it: 0, 1 or 2.

    Returns
    -------
    dict
        Arrays by their names in a profile, ``"linear/<layer>/<side>/<below>/<name>"``. Sides whose heads have an odd
        number of elements are left out: their streams are not linear.

    Raises
    ------
    KvmnnError
        For statistics of no tokens, or another `below`.
    """
    validate_int(below, "below", 0, MAX_BELOW)
    tables: Arrays = {}
    for layer in range(len(statistics.layers)):
        tables |= build_layer_tables(statistics, layer, below)
    return tables


def build_layer_tables(statistics: RowMoments, layer: int, below: int, name_layer: int | None = None) -> Arrays:
    """Build the tables of a layer of `statistics`; in their names it is `name_layer`, if that is not None."""
    return {
        name_table(layer if name_layer is None else name_layer, part, below, name): array
        for part in PARTS
        if statistics.layers[layer].get_dim(part) % 2 == 0
        for name, array in _build_side(statistics, layer, part, below).items()
    }


def _build_side(statistics: RowMoments, layer: int, part: Part, below: int) -> Arrays:
    blocks = [block.name for block in list_blocks(statistics.layers, layer, part, below)]
    mean = statistics.mean(layer, part)
    covariance = statistics.covariance(layer, [part, *blocks], [part, *blocks])
    deviations = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    is_constant = deviations <= 1e-9 * np.abs(np.concatenate([mean, np.ones(len(deviations) - len(mean))]))
    deviations[is_constant] = 1.0
    correlations = covariance / np.outer(deviations, deviations)
    correlations[is_constant], correlations[:, is_constant] = 0.0, 0.0
    n = len(mean)
    own, cross, predictors = correlations[:n, :n], correlations[n:, :n], correlations[n:, n:]
    base, base_factors, residual = _regress(own, cross, predictors)
    chain, chain_factors, sigmas, pair_correlations = _build_chain(residual)
    scale = deviations[:n]
    exponents = _choose_exponents(sigmas * scale, mean, is_constant[:n])
    units = np.repeat(np.exp2(exponents.astype(np.float64)), 2)
    flat = np.repeat(is_constant[:n].reshape(-1, 2).all(axis=1), 2)
    sigma_units = np.where(flat, 1 << _SIGMA_BITS, np.rint(sigmas * scale * units))
    lower_rows = np.tri(n, n, -1, dtype=bool) & ~(np.kron(np.eye(n // 2), np.ones((2, 2))) > 0)
    return {
        "exponents": exponents,
        "means": _to_int32(mean * units, -_UNIT_LIMIT + 1, _UNIT_LIMIT - 1),
        "deviations": _to_int32(scale * units, _MIN_DEVIATION, _UNIT_LIMIT),
        "sigmas": _to_int32(sigma_units, _MIN_SIGMA, (1 << (_SIGMA_BITS + 1)) - 1),
        "correlations": np.rint(pair_correlations * (1 << 14)).astype(np.int16),
        "base": base,
        "base_factors": _to_int32(base_factors * scale * units * ((1 << 16) / _DEVIATION)),
        "chain": chain[lower_rows],
        "chain_factors": _to_int32(chain_factors * scale * units * ((1 << 16) / _DEVIATION)),
    }


def _regress(own: Floats64, cross: Floats64, predictors: Floats64) -> tuple[npt.NDArray[np.int8], Floats64, Floats64]:
    """Return weights by row of `own`, the factor of each row, and the covariance of what they leave."""
    if not len(predictors):
        return np.zeros((len(own), 0), np.int8), np.zeros(len(own)), own
    solution = np.linalg.solve(predictors + _REGRESSION_RIDGE * np.eye(len(predictors)), cross).T
    weights, factors = _quantize_rows(np.asarray(solution, np.float64))
    rounded = weights * factors[:, None]
    explained = rounded @ cross
    return weights, factors, own - explained - explained.T + rounded @ predictors @ rounded.T


def _build_chain(residual: Floats64) -> tuple[npt.NDArray[np.int8], Floats64, Floats64, Floats64]:
    """Return weights of earlier innovations, factors of rows, deviations and correlations of innovations."""
    n = len(residual)
    variances = np.diag(residual)
    ridge = _CHAIN_RIDGES[0] * variances + _CHAIN_RIDGES[1] * max(float(variances.mean()), 1e-12)
    factor = np.linalg.cholesky(residual + np.diag(ridge))
    pair_factors = np.array([factor[i : i + 2, i : i + 2] for i in range(0, n, 2)])
    inverses = np.linalg.inv(pair_factors)
    slopes = np.concatenate([factor[:, 2 * p : 2 * p + 2] @ inverse for p, inverse in enumerate(inverses)], axis=1)
    slopes[np.arange(n), np.arange(n)] = 0.0
    slopes[np.arange(1, n, 2), np.arange(0, n, 2)] = 0.0
    covariances = pair_factors @ pair_factors.transpose(0, 2, 1)
    for _ in range(2):  # deviations of innovations, then those that rounded weights leave
        sigmas = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2)).reshape(-1).astype(np.float64)
        weights, factors = _quantize_rows(np.asarray(slopes * sigmas, np.float64))
        rounded = weights * factors[:, None] / sigmas
        inverse = np.linalg.inv(np.eye(n) + rounded)
        final = inverse @ residual @ inverse.T
        covariances = np.array([final[i : i + 2, i : i + 2] + np.diag(ridge[i : i + 2]) for i in range(0, n, 2)])
    correlations = covariances[:, 0, 1] / np.sqrt(covariances[:, 0, 0] * covariances[:, 1, 1])
    return weights, factors, sigmas, np.clip(correlations, -0.999, 0.999)


def _quantize_rows(rows: Floats64) -> tuple[npt.NDArray[np.int8], Floats64]:
    factors = np.maximum(np.abs(rows).max(axis=1), 1e-30) / _MAX_WEIGHT
    return np.rint(rows / factors[:, None]).astype(np.int8), factors


def _choose_exponents(sigmas: Floats64, mean: Floats64, is_constant: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    """Return for each pair the exponent of units in which its larger deviation has 18 bits."""
    largest = np.where(is_constant, 0.0, sigmas).reshape(-1, 2).max(axis=1)
    size = np.abs(mean).reshape(-1, 2).max(axis=1)
    with np.errstate(divide="ignore"):
        exponents = np.where(
            largest > 0,
            _SIGMA_BITS - np.floor(np.log2(largest)),
            np.where(size > 0, _CONSTANT_BITS - np.ceil(np.log2(size)), _ZERO_EXPONENT),
        )
    return np.clip(exponents, -_ZERO_EXPONENT, _ZERO_EXPONENT).astype(np.int16)


def _to_int32(values: Floats64, low: int = -(1 << 31), high: int = (1 << 31) - 1) -> npt.NDArray[np.int32]:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def count_weights(layers: tuple[LayerGeometry, ...], below: int) -> int:
    """Return the bytes of weights in the tables of a model."""
    total = 0
    for layer, geometry in enumerate(layers):
        for part in PARTS:
            n = geometry.get_row_elements(part)
            regressors = sum(block.elements for block in list_blocks(layers, layer, part, below))
            total += n * regressors + n * (n - 2) // 2
    return total
