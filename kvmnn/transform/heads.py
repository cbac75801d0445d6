"""Transform tables of single heads, from those of a profile's layers.

A transform stream contains all heads of its tokens. Where heads hold different tokens, each head of a layer becomes a
layer of its own in a second profile, whose tables follow from the first one's. Those state a Gaussian chain: each row
is a linear function of the rows that it is predicted from, plus coefficients of known variance in a known basis. So
the covariance of each head's K and V follows, and their metric from the basis, which whitens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..profiles import Profile, ProfileInfo
from ..profiles.geometry import LayerGeometry
from .profile_tables import SideTables, get_tables
from .tables import LEVEL_OF_ONE, LEVELS_PER_DOUBLING, Matrix, Metrics, build_tables, order_words

_Side = tuple[int, Part]


def split_heads(profile: Profile) -> Profile:
    """Return a profile whose layer ``l * kv_heads + h`` is head `h` of layer `l` of the given one, with K and V alone.

    It has the transform tables of ``below=0``. Its predicted losses are those of all heads together. Another machine
    may round its tables differently: write the profile next to streams that name it.

    Raises
    ------
    KvmnnError
        For a profile without transform tables, whose layers have different numbers of heads, or whose tables are of
        no model: a basis without an inverse, or variances beyond float64.
    """
    moments = HeadMoments(profile)
    return Profile(moments.describe(), build_tables(moments, moments.metrics, moments.sensitivities))


class HeadMoments:
    """Means and covariances of each head's rows, by a profile: `kvmnn.profiles.statistics.RowMoments`.

    Parameters
    ----------
    profile
        A profile with transform tables, whose layers have the same number of heads.

    Attributes
    ----------
    layers : tuple of LayerGeometry
        One for each head of each layer.
    metrics : Metrics
        Of each head.
    sensitivities : ndarray or None
        Of each head, as in `build_tables`; None where the profile does not have measured ones.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile, self._tables = profile, get_tables(profile)
        self._heads, self._below = profile.layers[0].kv_heads, self._tables.belows[0]
        if any(geometry.kv_heads != self._heads for geometry in profile.layers):
            raise KvmnnError("the layers of the profile have different numbers of heads: expected the same in all")
        self.layers = tuple(replace(geometry, kv_heads=1) for geometry in profile.layers for _ in range(self._heads))
        self._metrics: dict[Part, list[Matrix]] = {"key": [], "value": []}
        self._sensitivities = np.zeros((len(self.layers), 2))
        self._is_measured = True
        self._means: dict[_Side, list[Matrix]] = {}
        self._covariances: dict[tuple[int, str, str], list[Matrix]] = {}
        self._chain_sides: list[_Side] = []
        self._chain = np.zeros((0, 0))
        for layer, geometry in enumerate(profile.layers):
            try:
                with np.errstate(over="raise", invalid="raise"):
                    self._add_layer(layer, geometry)
            except (FloatingPointError, np.linalg.LinAlgError) as error:
                raise KvmnnError(
                    f"layer {layer}: the transform tables of the profile are of no model: {error}"
                ) from None
        self.metrics = Metrics(self._metrics["key"], self._metrics["value"])
        self.sensitivities = self._sensitivities if self._is_measured else None

    def describe(self) -> ProfileInfo:
        """Return what a profile of these heads is of."""
        settings = {"heads_of": self._profile.key.hex()}
        return replace(self._profile.info, layers=self.layers, settings=settings)

    def mean(self, layer: int, part: Part) -> Matrix:
        """Return the mean row of K or V of a head, float64 ``[n]``."""
        layer, head = divmod(layer, self._heads)
        return self._means[layer, part][head]

    def covariance(self, layer: int, rows: str | Sequence[str], columns: str | Sequence[str]) -> Matrix:
        """Return the covariance of K, V or both of a head, float64 ``[rows, columns]``."""
        layer, head = divmod(layer, self._heads)
        names = [[side] if isinstance(side, str) else side for side in (rows, columns)]
        return np.block([[self._covariances[layer, row, column][head] for column in names[1]] for row in names[0]])

    def _add_layer(self, layer: int, geometry: LayerGeometry) -> None:
        for part in PARTS:
            side = self._tables.get_side(layer, part, self._below)
            self._extend_chain((layer, part), side)
            self._means[layer, part] = self._split(geometry, part, side.mean.astype(np.float64))
            basis = _get_basis(side)
            inverse_metrics = self._split(geometry, part, basis @ basis.T, part)
            for number, inverse_metric in enumerate(inverse_metrics, layer * self._heads):
                metric = np.asarray(np.linalg.inv(inverse_metric), np.float64)
                self._metrics[part].append(metric[np.newaxis])
                # Tables scale the metric of a head to a mean diagonal of 1, and the heads of a layer share its loss.
                scale = float(np.diag(metric).mean()) / self._heads
                self._sensitivities[number, PARTS.index(part)] = side.sensitivity * scale
            self._is_measured &= side.is_measured
        for row in PARTS:
            for column in PARTS:
                block = self._chain[self._locate((layer, row)), self._locate((layer, column))]
                self._covariances[layer, row, column] = self._split(geometry, row, block, column)

    def _split(
        self, geometry: LayerGeometry, part: Part, words: npt.NDArray[np.float64], column: Part | None = None
    ) -> list[npt.NDArray[np.float64]]:
        """Return what belongs to each head, in the order of rows of statistics, of an array in that of words."""
        single = replace(geometry, kv_heads=1)
        orders = [order_words(single, side) for side in (part, column) if side is not None]
        split = []
        for head in range(self._heads):
            places = [slice(head * len(order), (head + 1) * len(order)) for order in orders]
            split.append(words[tuple(places)][np.ix_(*(np.argsort(order) for order in orders))])
        return split

    def _locate(self, side: _Side) -> slice:
        begin = 0
        for lower in self._chain_sides:
            n = self._tables.layers[lower[0]].get_row_elements(lower[1])
            if lower == side:
                return slice(begin, begin + n)
            begin += n
        raise AssertionError(f"{side} is not in the chain")

    def _extend_chain(self, side: _Side, tables: SideTables) -> None:
        """Add a side to the covariance of those that later sides are predicted from, and drop those that none are."""
        basis, (layer, part) = _get_basis(tables), side
        covariance = (basis * 4.0 ** ((tables.levels - LEVEL_OF_ONE) / LEVELS_PER_DOUBLING)) @ basis.T
        prediction = np.zeros((len(basis), len(self._chain)))  # of a row from those in the chain
        if tables.gain is not None:
            weights = (
                self._profile.arrays[f"transform/{layer}/{part}/weights.{self._below}"] * tables.gain[:, np.newaxis]
            )
            begin = 0
            for lower in tables.regressors:
                reciprocal = self._tables.get_normalization(*lower)[1]
                end = begin + len(reciprocal)
                prediction[:, self._locate(lower)] = weights[:, begin:end] * reciprocal.astype(np.float64)
                begin = end
        cross = prediction @ self._chain
        self._chain = np.block([[self._chain, cross.T], [cross, covariance + cross @ prediction.T]])
        self._chain_sides.append(side)
        while self._chain_sides[0][0] < layer - self._below:
            first = self._locate(self._chain_sides[0]).stop
            self._chain, self._chain_sides = self._chain[first:, first:], self._chain_sides[1:]


def _get_basis(side: SideTables) -> Matrix:
    """Return the basis as a matrix ``[n, n]`` in units of elements."""
    scaled = side.exact_basis.astype(np.float64) * float(side.unit)
    if scaled.ndim == 1:
        return np.diag(scaled)
    n = side.elements
    basis, size = np.zeros((n, n)), n // len(scaled)
    for number, block in enumerate(scaled):
        place = slice(number * size, (number + 1) * size)
        basis[place, place] = block
    return basis
