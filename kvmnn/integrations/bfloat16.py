"""The data type ``bfloat16`` of the Zarr extensions for Zarr version 3, with the numpy type of ml_dtypes.

zarr 3.2 and later load this through its entry point when they look for any data type, so that it imports only zarr;
without ml_dtypes the type is missing. zarr 3.1 collects such entry points but never loads them (seen in 3.1.6): there
``import kvmnn.integrations.bfloat16`` registers the type.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from zarr.core.dtype.common import HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError
except ImportError:  # zarr 3.1
    from zarr.dtype import DataTypeValidationError

DTYPE_NAME: Final = "bfloat16"
_SPECIAL_VALUES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _get_native_dtype() -> np.dtype[Any]:
    try:
        native_dtype: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise DataTypeValidationError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    return native_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class BFloat16(ZDType[np.dtype[Any], Any], HasItemSize):
    """Numbers of 16 bits with the exponent of float32; of Zarr version 3 only."""

    _zarr_v3_name: ClassVar[str] = DTYPE_NAME
    dtype_cls: ClassVar[type] = np.dtype

    @property
    def item_size(self) -> int:
        """Number of bytes per element."""
        return 2

    @classmethod
    def _check_native_dtype(cls, dtype: np.dtype[Any]) -> bool:
        return dtype.name == DTYPE_NAME

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Create the type from bfloat16 of ml_dtypes; raise `DataTypeValidationError` for every other type."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"invalid data type {dtype}: expected {DTYPE_NAME}")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy type of ml_dtypes."""
        return _get_native_dtype()

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"{DTYPE_NAME} is no data type of Zarr version 2")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != DTYPE_NAME:
            raise DataTypeValidationError(f"invalid data type {data!r}: expected {DTYPE_NAME!r}")
        _get_native_dtype()
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        """Return the name of the type; raise `ValueError` for Zarr version 2."""
        if zarr_format != 3:
            raise ValueError(f"{DTYPE_NAME} is no data type of Zarr version {zarr_format}: use version 3")
        return DTYPE_NAME

    def _check_scalar(self, data: object) -> bool:
        try:
            self.cast_scalar(data)
        except TypeError:
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        """Convert a number, or a text as in `from_json_scalar`, to bfloat16; raise `TypeError` for anything else."""
        if isinstance(data, str):
            return self.from_json_scalar(data, zarr_format=3)
        try:
            return self.to_native_dtype().type(data)
        except (TypeError, ValueError):
            raise TypeError(f"{data!r} is no {DTYPE_NAME}") from None

    def _cast_scalar_unchecked(self, data: Any) -> Any:
        return self.cast_scalar(data)

    def default_scalar(self) -> Any:
        """Return 0."""
        return self.cast_scalar(0.0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        """Parse a fill value: a number, ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, or bits such as ``"0x7fc0"``."""
        native_dtype = self.to_native_dtype()
        if isinstance(data, str) and data in _SPECIAL_VALUES:
            return native_dtype.type(_SPECIAL_VALUES[data])
        if isinstance(data, str) and data.startswith("0x") and len(data) == 6:
            return np.array([int(data, 16)], np.uint16).view(native_dtype)[0]
        if isinstance(data, int | float) and not isinstance(data, bool):
            return native_dtype.type(data)
        raise TypeError(f"{data!r} is no {DTYPE_NAME}")

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        """Convert a fill value to JSON."""
        number = float(self.cast_scalar(data))
        if math.isnan(number):
            return "NaN"
        return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")


data_type_registry.register(DTYPE_NAME, BFloat16)
