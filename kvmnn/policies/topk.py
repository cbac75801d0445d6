"""Norms of keys and choices by rank: what the policies share that numpy is slow at.

One order holds everywhere: the lower norm (or the higher score) comes first, of equal ones the token that is older. -0
equals 0, infinities take their places, and NaN comes last whichever end is asked for, so that a broken token is the
first to go.
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
    """L2 norm of every token in every head.

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
    """Indices of the `count` lowest values of each row, ascending, int64 ``[row, count]``."""
    return _argtopk(values, count, highest=False)


def argtopk_highest(values: Floats, count: int) -> Indices:
    """Indices of the `count` highest values of each row, ascending, int64 ``[row, count]``."""
    return _argtopk(values, count, highest=True)


def _argtopk(values: Floats, count: int, *, highest: bool) -> Indices:
    if values.ndim != 2 or not 0 <= count <= values.shape[1]:
        raise KvmnnError(f"cannot choose {count} of each row of values of shape {list(values.shape)}")
    if values.shape[1] > 1 and values.strides[1] != values.itemsize:
        values = np.ascontiguousarray(values)
    indices = np.empty((values.shape[0], count), np.int64)
    _norms.select_extreme(values, highest, indices, 0)
    return indices


def select_middle_topk(values: Floats, tokens: int, *, sink: int, count: int, recent: int, highest: bool) -> Indices:
    """The first `sink` and the last `recent` of `tokens` indices, and `count` of those between by their values.

    Parameters
    ----------
    values
        ``[row, token]``; those of the sinks and of the recent tokens do not count.

    Returns
    -------
    ndarray
        int64 ``[row, sink + count + recent]``, ascending.
    """
    indices = np.empty((len(values), sink + count + recent), np.int64)
    indices[:, :sink] = np.arange(sink)
    indices[:, sink + count :] = np.arange(tokens - recent, tokens)
    zone = values[:, sink : tokens - recent]
    if zone.shape[1] > 1 and zone.strides[1] != zone.itemsize:
        zone = np.ascontiguousarray(zone)
    _norms.select_extreme(zone, highest, indices[:, sink : sink + count], sink)
    return indices


def sort_by_value(values: Floats, indices: Indices, *, highest: bool = False) -> Indices:
    """`indices`, as `argtopk_lowest` or `argtopk_highest` gave it, with the lowest (or the highest) value of each row
    first.
    """
    row_values = np.take_along_axis(values, indices, axis=1)
    order = np.argsort(-row_values if highest else row_values, axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1)
