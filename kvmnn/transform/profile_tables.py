"""The transform tables of a profile, checked, in the form that the compiled code takes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import Part
from ..errors import KvmnnError
from ..profiles.geometry import LayerGeometry
from . import _codec
from .tables import TABLES_NAME, list_regressors

_MAX_TABLE_VALUE = 2.0**64
_MIN_TABLE_VALUE = 2.0**-61
"""Limits of absolute values other than 0 in float tables of a profile (docs/format-transform.md)."""


class TableSource(Protocol):
    """What is needed of a `kvmnn.profiles.Profile`."""

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return tables by name."""

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Return the geometry of each layer."""

    @property
    def key(self) -> bytes:
        """Return the key of the profile."""


@dataclass(frozen=True, eq=False)
class SideTables:
    """Tables of K or V of one layer, for one number of layers below."""

    kv_heads: int
    dim: int
    mean: npt.NDArray[np.float32]
    reciprocal: npt.NDArray[np.float32]
    #: Layers and sides that rows are predicted from; packed weights (`_codec.multiply`) and their gain.
    regressors: tuple[tuple[int, Part], ...]
    num_regressors: int
    weights: npt.NDArray[np.int16] | None
    gain: npt.NDArray[np.float32] | None
    #: Blocks of the basis, packed as they are, or its diagonal.
    blocks: int
    basis: npt.NDArray[np.int16] | None
    diagonal: npt.NDArray[np.int16] | None
    unit: np.float32
    levels: npt.NDArray[np.int32]
    #: Nats for each square of a step, and whether it was measured.
    sensitivity: float
    is_measured: bool
    #: The basis as the profile has it: int16 ``[block, d, d]`` or ``[n]``.
    exact_basis: npt.NDArray[np.int16]

    @cached_property
    def forward(self) -> npt.NDArray[np.float32]:
        """Return the inverse of the basis, for encoders: float32 ``[block, d, d]``, or ``[n]``."""
        scaled = self.exact_basis.astype(np.float64) * float(self.unit)
        if scaled.ndim == 1:
            return np.asarray(1 / scaled, np.float32)
        return _invert(scaled)

    @property
    def elements(self) -> int:
        """Return the number of elements of a row."""
        return self.kv_heads * self.dim

    def transform(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the coefficients of rows ``[token, n]``, in units of the metric."""
        if self.forward.ndim == 1:
            coefficients = rows * self.forward
        elif self.blocks == 1:
            coefficients = rows @ self.forward[0]
        else:
            parts = rows.reshape(len(rows), self.blocks, -1).transpose(1, 0, 2) @ self.forward
            coefficients = parts.transpose(1, 0, 2).reshape(rows.shape)
        return np.ascontiguousarray(coefficients)


class ProfileTables:
    """Reads the transform tables of a profile as they are needed."""

    def __init__(self, profile: TableSource) -> None:
        self._arrays, self.layers, self.key = profile.arrays, profile.layers, profile.key
        self._sides: dict[tuple[int, Part, int], SideTables] = {}
        self.belows = tuple(below for below in (0, 1, 2) if f"transform/0/key/levels.{below}" in self._arrays)
        if not self.belows:
            raise KvmnnError(
                "the profile has no sections transform/* (tables of lossy streams): make one with kvmnn profile make "
                "without --for lossless"
            )
        self.frequencies = self._get(TABLES_NAME, "uint16", (_codec.NUM_TABLES, _codec.NUM_SYMBOLS))
        if not _codec.are_tables_valid(self.frequencies):
            raise KvmnnError(f"section {TABLES_NAME!r} of the profile: expected frequencies of sum 4096, all below it")

    def get_side(self, layer: int, part: Part, below: int) -> SideTables:
        """Return the tables of a layer and side; `KvmnnError` where they are missing or not valid."""
        if below not in self.belows:
            raise KvmnnError(
                f"the profile has no sections transform/*.{below} (tables of lossy streams, below={below}), only of "
                f"below={', '.join(map(str, self.belows))}: make one with kvmnn profile make --below {below}"
            )
        key = (layer, part, below)
        if key not in self._sides:
            self._sides[key] = self._load(layer, part, below)
        return self._sides[key]

    def get_normalization(self, layer: int, part: Part) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return mean and reciprocal of a layer and side: with them rows become regressors."""
        n = self.layers[layer].get_row_elements(part)
        prefix = f"transform/{layer}/{part}/"
        return self._get_floats(f"{prefix}mean", n), self._get_floats(f"{prefix}reciprocal", n)

    def _load(self, layer: int, part: Part, below: int) -> SideTables:
        geometry, prefix = self.layers[layer], f"transform/{layer}/{part}/"
        n = geometry.get_row_elements(part)
        mean, reciprocal = self.get_normalization(layer, part)
        regressors = tuple(list_regressors(layer, part, below))
        depth = sum(self.layers[lower].get_row_elements(side) for lower, side in regressors)
        weights = gain = None
        if regressors:
            matrix = self._get(f"{prefix}weights.{below}", "int8", (n, depth))
            weights, gain = _pack_matrix(matrix.T), self._get_floats(f"{prefix}gain.{below}", n)
        unit = self._get_floats(f"{prefix}unit.{below}", 1)[0]
        name = f"{prefix}basis.{below}"
        basis = self._arrays.get(name)
        if basis is None or basis.dtype != np.int16 or not unit > 0:
            raise KvmnnError(f"section {name!r} of the profile: expected int16 elements, and a unit above 0")
        if basis.shape == (n,):
            if (basis < 1).any():
                raise KvmnnError(f"section {name!r} of the profile: expected elements above 0")
            blocks, packed, diagonal = 1, None, np.ascontiguousarray(basis)
        else:
            blocks = len(basis)
            if basis.ndim != 3 or basis.shape[1] != basis.shape[2] or blocks * basis.shape[1] != n:
                raise KvmnnError(f"section {name!r} of the profile is {list(basis.shape)}: a row has {n} elements")
            packed, diagonal = np.stack([_pack_matrix(block.T) for block in basis]), None
        sensitivity = self._get(f"{prefix}sensitivity.{below}", "float64", (2,))
        if not 0 < sensitivity[0] < np.inf:
            raise KvmnnError(f"layer {layer}: the sensitivity of its {part}s is {sensitivity[0]}: expected one above 0")
        return SideTables(
            kv_heads=geometry.kv_heads,
            dim=geometry.get_dim(part),
            mean=mean,
            reciprocal=reciprocal,
            regressors=regressors,
            num_regressors=depth,
            weights=weights,
            gain=gain,
            blocks=blocks,
            basis=packed,
            diagonal=diagonal,
            unit=unit,
            levels=self._get(f"{prefix}levels.{below}", "int16", (n,)).astype(np.int32),
            sensitivity=float(sensitivity[0]),
            is_measured=bool(sensitivity[1]),
            exact_basis=basis,
        )

    def _get(self, name: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            raise KvmnnError(f"the profile has no section {name!r}")
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise KvmnnError(
                f"section {name!r} of the profile is {array.dtype} {list(array.shape)}: expected {dtype} {list(shape)}"
            )
        return np.ascontiguousarray(array)

    def _get_floats(self, name: str, count: int) -> npt.NDArray[np.float32]:
        floats: npt.NDArray[np.float32] = self._get(name, "float32", (count,))
        size = np.abs(floats)
        if not ((size == 0) | ((size >= _MIN_TABLE_VALUE) & (size <= _MAX_TABLE_VALUE))).all():
            raise KvmnnError(f"section {name!r} of the profile: expected 0, or numbers from 2^-61 to 2^64")
        return floats


_TABLES: weakref.WeakKeyDictionary[Any, ProfileTables] = weakref.WeakKeyDictionary()


def get_tables(profile: TableSource) -> ProfileTables:
    """Return the transform tables of a profile, made once for each."""
    tables = _TABLES.get(profile)
    if tables is None:
        tables = _TABLES[profile] = ProfileTables(profile)
    return tables


def _pack_matrix(matrix: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Return ``[depth, column]`` as ``[column / 16, depth / 2, 16, 2]``, filled up with zeros."""
    depth, columns = matrix.shape
    full = np.zeros((depth + depth % 2, columns + -columns % _codec.LANES), np.int16)
    full[:depth, :columns] = matrix
    return np.ascontiguousarray(full.reshape(len(full) // 2, 2, -1, _codec.LANES).transpose(2, 0, 3, 1))


def _invert(blocks: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    try:
        inverse = np.linalg.inv(blocks)
    except np.linalg.LinAlgError:
        inverse = np.full_like(blocks, np.nan)
    if not np.isfinite(inverse).all():
        raise KvmnnError("a basis of the profile has no inverse")
    return np.ascontiguousarray(inverse.transpose(0, 2, 1), np.float32)
