"""Norms of keys and selection by rank, shared by the policies and faster than numpy's.

The lower norm (or the higher score) comes first, of equal ones the older token. -0 equals 0, infinities are ordinary
values, and NaN comes last at either end, so that a broken token is the first to be evicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from . import _norms


def compute_key_norms(keys: npt.NDArray[Any]) -> Floats:
    """Return the L2 norm of every token in every head.

    Parameters
    ----------
    keys
        ``[kv_head, token, head_dim]``: float16, float32, or uint16 holding bf16; any strides.

    Returns
    -------
    ndarray
        float32 ``[kv_head, token]``. All arithmetic is float32 whatever the cache's type, and the same bits on every
        machine (norms.h has the order of the sum). A sum beyond float32 is infinite, as in torch.

    Raises
    ------
    TypeError
        For anything but an array of those types.
    KvmnnError
        For another number of axes.
    """
    if not isinstance(keys, np.ndarray):
        raise TypeError(f"keys must be a numpy array, not {type(keys).__name__}")
    dtype = dtypes.infer_dtype(keys)
    if keys.ndim != 3:
        raise KvmnnError(f"keys have shape {list(keys.shape)}: expected [kv_head, token, head_dim]")
    elements = keys.view(np.uint16) if keys.dtype.kind == "V" else keys
    if not elements.dtype.isnative:
        elements = elements.astype(elements.dtype.newbyteorder("="))
    if (elements.shape[2] > 1 and elements.strides[2] != elements.itemsize) or not elements.flags.aligned:
        elements = np.ascontiguousarray(elements) if elements.flags.aligned else elements.copy()
    norms = np.empty(keys.shape[:2], np.float32)
    if dtype is dtypes.FP32:
        _norms.compute_norms32(elements.view(np.float32), norms)
    else:
        _norms.compute_norms16(elements.view(np.uint16), dtype is dtypes.BF16, norms)
    return norms


def argtopk_lowest(values: Floats, count: int) -> Indices:
    """Return indices of the `count` lowest values of each row, ascending, int64 ``[row, count]``."""
    return _argtopk(values, count, highest=False)


def argtopk_highest(values: Floats, count: int) -> Indices:
    """Return indices of the `count` highest values of each row, ascending, int64 ``[row, count]``."""
    return _argtopk(values, count, highest=True)


def _argtopk(values: Floats, count: int, *, highest: bool) -> Indices:
    if values.ndim != 2 or not 0 <= count <= values.shape[1]:
        raise KvmnnError(f"cannot choose {count} of each row of values of shape {list(values.shape)}")
    indices = np.empty((values.shape[0], count), np.int64)
    _select_extreme(values, indices, 0, highest=highest)
    return indices


def _select_extreme(values: Floats, indices: Indices, first_index: int, *, highest: bool) -> None:
    if values.shape[1] > 1 and values.strides[1] != values.itemsize:
        values = np.ascontiguousarray(values)
    _norms.select_extreme(values, highest, indices, first_index)


def select_middle_topk(values: Floats, tokens: int, *, sink: int, count: int, recent: int, highest: bool) -> Indices:
    """Return the first `sink` and the last `recent` of `tokens` indices, and `count` of those between by their
    values.
    """
    indices = np.empty((len(values), sink + count + recent), np.int64)
    indices[:, :sink] = np.arange(sink)
    indices[:, sink + count :] = np.arange(tokens - recent, tokens)
    _select_extreme(values[:, sink : tokens - recent], indices[:, sink : sink + count], sink, highest=highest)
    return indices


def sort_by_value(values: Floats, indices: Indices, *, highest: bool = False) -> Indices:
    """Sort `indices` of `argtopk_lowest` or `argtopk_highest` by the values of each row, lowest (or highest) first."""
    row_values = np.take_along_axis(values, indices, axis=1)
    order = np.argsort(-row_values if highest else row_values, axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1)
