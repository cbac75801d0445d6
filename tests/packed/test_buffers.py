"""Rows to read: their type and every axis of their shape are checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmnn import KvmnnError
from kvmnn.packed.layout import to_byte_rows

LAYOUT: Any = SimpleNamespace(kv_heads=2, head_dim=4, itemsize=2)


def test_head_rows_are_bytes_of_each_token() -> None:
    rows = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    np.testing.assert_array_equal(to_byte_rows(rows, "keys", LAYOUT), rows.view(np.uint8))
    np.testing.assert_array_equal(
        to_byte_rows(rows[:, ::-1], "keys", LAYOUT), np.ascontiguousarray(rows[:, ::-1]).view("u1")
    )


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 3, 4), (2, 12), (2, 3, 1, 4)])
def test_head_rows_other_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(KvmnnError, match=r"keys have the shape .* expected \(2, tokens, 4\)"):
        to_byte_rows(np.zeros(shape, np.float16), "keys", LAYOUT)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.bool_])
def test_head_rows_other_dtype_is_refused(dtype: type[np.generic]) -> None:
    with pytest.raises(KvmnnError, match="keys "):
        to_byte_rows(np.zeros((2, 3, 4), dtype), "keys", LAYOUT)
