"""Arrays of files, as bytes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from kvmnn import formats
from kvmnn.arrays.array import LazyArray
from kvmnn.formats import ReadOptions

WORDS = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


def content(array: LazyArray, limit: int = 0) -> bytes:
    return b"".join(bytes(piece) for piece in array.iter_chunks(limit))


def only(path: Path, **options: object) -> LazyArray:
    (array,) = formats.open(path, ReadOptions(**options)).arrays  # type: ignore[arg-type]
    return array


def saved(values: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, **options)
    return buffer.getvalue()
