"""Moments of a model's K and V, summed over texts: what every table of a profile is made of.

For each layer the sums and second moments of the joint row ``[K, V, K of the layer below, V of it, K of the layer below
that, V of it]`` are in float64. Means, covariances between any of these blocks, regressions and Cholesky factors follow
without the rows. Only the rows of blocks of the own layer are kept: what lies between two layers below is in these
layers' own moments.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, SourceError
from ..files.atomic import FileOutput
from . import sections
from .geometry import LayerGeometry, build_rows

Moments = npt.NDArray[np.float64]

BLOCK_NAMES = ("key", "value", "key-1", "value-1", "key-2", "value-2")
"""Blocks of a joint row: K and V of the layer, of the one below, and of the one below that."""
NUM_SINKS = 4
"""Tokens at the start of a text that are left out: models attend to them whatever they are, and they are outliers."""

_MAGIC, _VERSION = b"KVMS", 1
_ROWS_PER_STEP = 512
_MAX_LAYERS = 4096


class RowMoments(Protocol):
    """Means and covariances of rows: what tables are made of. `Statistics` are some."""

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Return sizes and rotation of each layer."""

    def mean(self, layer: int, part: Part) -> Moments:
        """Return the mean row of K or V of a layer, float64 ``[n]``."""

    def covariance(self, layer: int, rows: str | Sequence[str], columns: str | Sequence[str]) -> Moments:
        """Return the covariance of blocks of a layer's joint row, float64 ``[rows, columns]``."""


class Statistics:
    """Sums over tokens of the joint rows of every layer.

    Parameters
    ----------
    layers
        Sizes and rotation of each layer, in order.

    Attributes
    ----------
    layers : tuple of LayerGeometry
    num_tokens : int
        Tokens that are in the sums.
    num_texts : int
        Caches that were added.
    num_skipped : int
        Tokens with an element that is not finite, which were left out; sinks are not counted.
    extras : dict of str to ndarray
        Further sums of the caller, which are saved with these; names begin with ``"extras/"``.
    """

    def __init__(self, layers: Sequence[LayerGeometry]) -> None:
        if not 0 < len(layers) <= _MAX_LAYERS:
            raise KvmnnError(f"statistics of {len(layers)} layers: expected 1 to {_MAX_LAYERS}")
        self.layers: tuple[LayerGeometry, ...] = tuple(layers)
        self.num_tokens = self.num_texts = self.num_skipped = 0
        self.extras: sections.Arrays = {}
        self._sums = [np.zeros(self._count_elements(layer, 1)) for layer in range(len(layers))]
        self._moments = [
            np.zeros((self._count_elements(layer, 1), self._count_elements(layer, 3))) for layer in range(len(layers))
        ]

    def list_blocks(self, layer: int, below: int = 2) -> tuple[str, ...]:
        """Return the blocks of a layer's joint row that exist, with up to `below` layers below it."""
        return BLOCK_NAMES[: 2 * (1 + min(below, layer))]

    def add(self, layers: Sequence[LayerCache]) -> None:
        """Add all tokens of a text but its sinks.

        Parameters
        ----------
        layers
            K and V of every layer, in order, of the same tokens.

        Raises
        ------
        KvmnnError
            For layers of other sizes, or that contain different tokens.
        """
        if len(layers) != len(self.layers):
            raise KvmnnError(f"a cache of {len(layers)} layers: expected {len(self.layers)}")
        positions = layers[0].positions
        for cache, geometry in zip(layers, self.layers, strict=True):
            geometry.check_cache(cache)
            if not np.array_equal(cache.positions, positions):
                raise KvmnnError(
                    f"layer {cache.layer}: holds other tokens than layer {layers[0].layer}: statistics are of caches "
                    "from which nothing was evicted"
                )
        for begin in range(0, layers[0].tokens, _ROWS_PER_STEP):
            self._add_tokens([_slice_tokens(cache, begin, begin + _ROWS_PER_STEP) for cache in layers])
        self.num_texts += 1

    def mean(self, layer: int, part: Part) -> Moments:
        """Return the mean row of K or V of a layer, float64 ``[n]``."""
        self._check_not_empty()
        begin, end = self._locate(layer, PARTS.index(part), 0)
        return self._sums[layer][begin:end] / self.num_tokens

    def covariance(self, layer: int, rows: str | Sequence[str], columns: str | Sequence[str]) -> Moments:
        """Return the covariance of blocks of a layer's joint row, float64 ``[rows, columns]``.

        Parameters
        ----------
        rows, columns
            Names of blocks (`BLOCK_NAMES`), one or several, which are put one after another.

        Raises
        ------
        KvmnnError
            For blocks that the layer does not have, and before any token was added.
        """
        self._check_not_empty()
        row_blocks, column_blocks = self._parse_blocks(layer, rows), self._parse_blocks(layer, columns)
        return np.block([[self._get_covariance(layer, row, column) for column in column_blocks] for row in row_blocks])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums to a file, replacing it."""
        header = {
            "num_tokens": self.num_tokens,
            "num_texts": self.num_texts,
            "num_skipped": self.num_skipped,
            "layers": [geometry.to_dict() for geometry in self.layers],
        }
        arrays = dict(self.extras)
        for layer, (sums, moments) in enumerate(zip(self._sums, self._moments, strict=True)):
            arrays |= {f"statistics/{layer}/sums": sums, f"statistics/{layer}/moments": moments}
        with FileOutput(path, force=True) as output:
            for chunk in sections.write_sections(_MAGIC, _VERSION, header, arrays):
                output.file.write(chunk)
            output.commit()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what `save` wrote.

        Raises
        ------
        SourceError, ManifestError
            For a file that is not there, of another kind, or damaged.
        """
        label = os.fspath(path)
        data = sections.read_file(Path(path))
        header, arrays = sections.read_sections(data, label, _MAGIC, _VERSION, "statistics of profile make")
        geometries = [LayerGeometry.from_json(entry) for entry in header.get("layers").read_list(1, _MAX_LAYERS)]
        expected_bytes = sum(
            8 * sum(_count_row(g) for g in geometries[max(0, layer - 2) : layer + 1]) * _count_row(geometries[layer])
            for layer in range(len(geometries))
        )
        if expected_bytes > sum(array.nbytes for array in arrays.values()):  # before memory is taken
            raise SourceError(f"{label}: holds fewer moments than its {len(geometries)} layers have")
        statistics = cls(geometries)
        statistics.num_tokens = header.get("num_tokens").read_int(0)
        statistics.num_texts = header.get("num_texts").read_int(0)
        statistics.num_skipped = header.get("num_skipped").read_int(0)
        statistics.extras = {name: array for name, array in arrays.items() if name.startswith("extras/")}
        if len(arrays) - len(statistics.extras) != 2 * len(geometries):
            raise SourceError(f"{label}: has {len(arrays)} sections: expected {2 * len(geometries)} of statistics")
        for layer in range(len(geometries)):
            for name, target in (("sums", statistics._sums[layer]), ("moments", statistics._moments[layer])):
                array = arrays.get(f"statistics/{layer}/{name}")
                if array is None or array.dtype != np.float64 or array.shape != target.shape:
                    raise SourceError(f"{label}: {name} of layer {layer}: expected float64 {list(target.shape)}")
                target[:] = array
        return statistics

    def _count_elements(self, layer: int, num_layers: int) -> int:
        """Return the elements of the joint row of a layer and those below it, `num_layers` in all."""
        return sum(_count_row(geometry) for geometry in self.layers[max(0, layer + 1 - num_layers) : layer + 1])

    def _add_tokens(self, layers: Sequence[LayerCache]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            joined = [
                np.concatenate(build_rows(cache, geometry), axis=1)
                for cache, geometry in zip(layers, self.layers, strict=True)
            ]
        is_sink = (layers[0].positions < NUM_SINKS).reshape(-1, layers[0].tokens).any(axis=0)
        is_finite = np.all([np.isfinite(rows).all(axis=1) for rows in joined], axis=0)
        is_used = is_finite & ~is_sink
        self.num_skipped += int((~is_finite & ~is_sink).sum())
        self.num_tokens += int(is_used.sum())
        joined = [rows[is_used] for rows in joined]
        for layer, rows in enumerate(joined):
            self._sums[layer] += rows.sum(axis=0)
            lower = [joined[index] for index in range(layer, max(0, layer - 2) - 1, -1)]
            self._moments[layer] += rows.T @ np.concatenate(lower, axis=1)

    def _check_not_empty(self) -> None:
        if not self.num_tokens:
            raise KvmnnError("the statistics are of no tokens")

    def _parse_blocks(self, layer: int, names: str | Sequence[str]) -> list[tuple[int, int]]:
        """Return the distance below `layer` and the part, 0 for K, of each block."""
        if not 0 <= layer < len(self.layers):
            raise KvmnnError(f"layer {layer}: the statistics are of {len(self.layers)} layers")
        blocks = []
        for name in [names] if isinstance(names, str) else names:
            if name not in self.list_blocks(layer):
                raise KvmnnError(
                    f"layer {layer}: has no block {name!r:.40}: expected {', '.join(self.list_blocks(layer))}"
                )
            blocks.append(divmod(BLOCK_NAMES.index(name), 2))
        return blocks

    def _locate(self, layer: int, part: int, distance: int) -> tuple[int, int]:
        """Return where a block begins and ends in the joint row of `layer`."""
        geometry = self.layers[layer - distance]
        begin = self._count_elements(layer, distance) + part * geometry.get_row_elements("key")
        return begin, begin + geometry.get_row_elements(PARTS[part])

    def _get_covariance(self, layer: int, row: tuple[int, int], column: tuple[int, int]) -> Moments:
        if row[0] > column[0]:
            return self._get_covariance(layer, column, row).T
        base = layer - row[0]  # the layer whose moments hold both blocks
        distance = column[0] - row[0]
        rows, columns = self._locate(base, row[1], 0), self._locate(base, column[1], distance)
        own_columns = self._locate(base - distance, column[1], 0)
        moments = self._moments[base][slice(*rows), slice(*columns)] / self.num_tokens
        row_mean = self._sums[base][slice(*rows)] / self.num_tokens
        column_mean = self._sums[base - distance][slice(*own_columns)] / self.num_tokens
        return moments - np.outer(row_mean, column_mean)


def _count_row(geometry: LayerGeometry) -> int:
    return geometry.get_row_elements("key") + geometry.get_row_elements("value")


def _slice_tokens(cache: LayerCache, begin: int, end: int) -> LayerCache:
    return LayerCache(
        layer=cache.layer,
        keys=cache.keys[:, begin:end],
        values=cache.values[:, begin:end],
        positions=cache.positions[..., begin:end],
        tokens_seen=cache.tokens_seen,
    )
