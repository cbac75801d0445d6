"""Predictors along the token axis, and bitshuffle: what the offline evaluation tries on each byte lane.

They work on bytes ``[token, kv_head, head_dim]``. The engine's predictors of the same names
(`kvmnn.frames.options`) go from byte to byte instead, and no frame holds what these give.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes
from ..errors import KvmnnError
from . import _stream_meter

PREDICTOR_NAMES: tuple[str, ...] = _stream_meter.PREDICTOR_NAMES
"""``raw``; ``delta_seq``, ``xor_seq``: each token minus, or exclusive-or, the one before; ``pair_delta``: odd columns
of a head minus their left neighbours; ``pair_delta_delta_seq``: the two in that order."""


def parse_predictor_list(flag: str, text: str) -> tuple[str, ...]:
    """The predictors that an option's value names, each once, in order."""
    names: list[str] = []
    for item in text.split(","):
        name = item.strip()
        if not name:
            continue
        if name not in PREDICTOR_NAMES:
            raise KvmnnError(f"{flag}: invalid predictor `{name}`")
        if name not in names:
            names.append(name)
    if not names:
        raise KvmnnError(f"{flag}: predictor list is empty")
    return tuple(names)


def apply_predictor(lane: npt.NDArray[Any], name: str) -> Bytes:
    """The stream of the predictor called `name`.

    Parameters
    ----------
    lane
        uint8 ``[token, kv_head, head_dim]``.
    """
    tokens, heads, dims, predictor_id = _check_lane(lane, name)
    if lane.size == 0:
        return lane.copy()
    stream = _stream_meter.predict(np.ascontiguousarray(lane).reshape(-1), heads, dims, predictor_id)
    return np.frombuffer(stream, np.uint8).reshape(tokens, heads, dims)


def invert_predictor(stream: npt.NDArray[Any], name: str) -> Bytes:
    """The lane that `apply_predictor` made `stream` of."""
    tokens, heads, dims, predictor_id = _check_lane(stream, name)
    if stream.size == 0:
        return stream.copy()
    lane = _stream_meter.unpredict(np.ascontiguousarray(stream).reshape(-1), heads, dims, predictor_id)
    return np.frombuffer(lane, np.uint8).reshape(tokens, heads, dims)


def bitshuffle(data: bytes | bytearray | memoryview | Bytes) -> bytes:
    """The bits of `data` (n bytes) by plane: all lowest bits first, ``n * 8`` bits packed from the lowest bit up."""
    return _stream_meter.bitshuffle(data)


def _check_lane(lane: npt.NDArray[Any], name: str) -> tuple[int, int, int, int]:
    if lane.ndim != 3 or lane.dtype != np.uint8:
        raise TypeError(f"expected uint8 [token, kv_head, head_dim], not {lane.dtype} {list(lane.shape)}")
    if name not in PREDICTOR_NAMES:
        raise KvmnnError(f"unknown predictor {name!r}: expected one of {', '.join(PREDICTOR_NAMES)}")
    tokens, heads, dims = lane.shape
    return tokens, heads, dims, PREDICTOR_NAMES.index(name)
