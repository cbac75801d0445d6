"""Decode dense streams to K or V of one layer (docs/format-v2.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Bytes, Elements, parse_dtype
from ..errors import FrameError, KvmnnError, LimitError
from ..frames import decode as decode_frame
from . import _rows, _stream
from .header import (
    DTYPES,
    MAX_RAW_BYTES,
    METHOD_FRAME,
    METHOD_ROWS,
    DenseHeader,
    check_byte_order,
    read_header,
    to_row_bytes,
)
from .shared_tables import to_table_set

_NUMPY_TYPES = tuple(dtype.numpy_dtype for dtype in DTYPES)
"""Numpy types by the number of the dtype in a stream."""


def decode(
    stream: Any,
    *,
    history: Elements | None = None,
    tables: Any = None,
    out: Elements | None = None,
    max_bytes: int | None = None,
) -> Elements:
    """Decode a dense stream.

    Parameters
    ----------
    stream
        Bytes-like; exactly one stream.
    history, tables
        The arguments of `encode`; ignored if the stream does not refer to them.
    out
        An array ``[kv_head, token, head_dim]`` to decode into, of the stream's shape and element size, with any
        strides. It is unchanged if the stream is rejected.
    max_bytes
        Reject a stream that claims more raw bytes, before any memory is allocated.

    Returns
    -------
    numpy.ndarray
        `out`, or ``[kv_head, token, head_dim]`` of float16, uint16 (bf16) or float32, in memory
        ``[token, kv_head, head_dim]``.

    Raises
    ------
    FrameError
        If the stream violates the format, its checksum differs, or history or tables are wrong.
    LimitError
        Above `max_bytes`.
    """
    if out is None and history is None and isinstance(stream, bytes):
        short_array = _decode_short_block(stream, tables, max_bytes)
        if short_array is not None:
            return short_array
    header = read_header(stream, max_bytes)
    shape = (header.tokens, header.heads, header.dim)
    if out is not None:
        _check_out(out, header)
    row_bytes = _decode_rows(header, history, tables) if header.method == METHOD_ROWS else _decode_verbatim(header)
    array: Elements = row_bytes.view(header.dtype.numpy_dtype).reshape(shape).transpose(1, 0, 2)
    if out is None:
        return array
    out[...] = array.view(out.dtype)
    return out


def decode_into(header: DenseHeader, out: Elements, *, history: Elements | None = None, tables: Any = None) -> None:
    """Decode a stream into `out`, without a copy if its rows are contiguous; an error leaves `out` undefined."""
    _check_out(out, header)
    token_rows = out.transpose(1, 0, 2)
    if header.method == METHOD_ROWS and token_rows.flags.c_contiguous:
        _decode_rows(header, history, tables, token_rows.reshape(-1).view(np.uint8))
    else:
        decode(header.stream, history=history, tables=tables, out=out)


class RowDecoder:
    """Decodes streams of adjacent tokens into one array, with little overhead for each.

    Parameters
    ----------
    elements
        ``[kv_head, token, head_dim]``, in memory ``[token, kv_head, head_dim]``.
    """

    def __init__(self, elements: Elements, dtype: str) -> None:
        check_byte_order()
        heads, _, dim = elements.shape
        rows = elements.transpose(1, 0, 2)
        if not rows.flags.c_contiguous:
            raise KvmnnError("rows that do not lie token by token")
        self._destination = _rows.RowDestination(
            DTYPES.index(parse_dtype(dtype)), heads, dim, rows.reshape(-1).view(np.uint8)
        )

    def decode(
        self, stream: Bytes | bytes, checksum: int, begin: int, tokens: int, *, history: int = 0, tables: Any = None
    ) -> bool:
        """Decode a stream of `tokens` rows to the rows from `begin` on."""
        return self._destination.decode(stream, checksum, to_table_set(tables), begin, tokens, history)


def _decode_short_block(stream: bytes, tables: Any, max_bytes: int | None) -> Elements | None:
    """Decode most short blocks in half a microsecond of Python; None if only `decode` can decode or reject it."""
    check_byte_order()
    max_raw_bytes = MAX_RAW_BYTES if max_bytes is None else min(max(max_bytes, 0), MAX_RAW_BYTES)
    array = _rows.decode_short_block(stream, to_table_set(tables), max_raw_bytes, np.empty, _NUMPY_TYPES)
    return None if array is None else array.transpose(1, 0, 2)


def open_rows(header: DenseHeader) -> _rows.RowsPayload:
    """Return the payload of a stream of method 2, split into sections."""
    return _rows.RowsPayload(header.stream, header.dtype_code, header.heads, header.dim, header.tokens, header.flags)


def _decode_rows(header: DenseHeader, history: Elements | None, tables: Any, out_bytes: Bytes | None = None) -> Bytes:
    rows_payload = open_rows(header)  # validates the payload before memory is allocated
    history_bytes = _check_history(header, rows_payload.history, history)
    table_set = _match_tables(rows_payload.table_set, tables)
    if out_bytes is None:
        out_bytes = np.empty(header.raw_bytes, np.uint8)
    rows_payload.decode(history_bytes, table_set, out_bytes)
    return out_bytes


def _check_history(header: DenseHeader, num_rows: int, history: Elements | None) -> Bytes | None:
    if not num_rows:
        return None
    if history is None:
        raise FrameError(f"dense stream refers to {num_rows} rows before it: give them as history")
    if not isinstance(history, np.ndarray):
        raise TypeError(f"history must be a numpy array, not {type(history).__name__}")
    heads, dim, itemsize = header.heads, header.dim, header.dtype.itemsize
    if history.dtype.itemsize != itemsize:
        raise FrameError(f"history has words of {history.dtype.itemsize} bytes: expected {itemsize}")
    if history.ndim != 3 or (history.shape[0], history.shape[2]) != (heads, dim) or history.shape[1] < num_rows:
        raise FrameError(f"history has shape {list(history.shape)}: expected [{heads}, {num_rows} or more, {dim}]")
    return to_row_bytes(history[:, history.shape[1] - num_rows :], header.dtype)


def _match_tables(table_set_id: int | None, tables: Any) -> _stream.TableSet | None:
    table_set = to_table_set(tables)
    if table_set_id is None:
        return None
    if table_set is None:
        raise FrameError(f"dense stream was made with the table set {table_set_id:016x}: give it as tables")
    if table_set.id != table_set_id:
        raise FrameError(f"dense stream was made with the table set {table_set_id:016x}: found {table_set.id:016x}")
    return table_set


def _decode_verbatim(header: DenseHeader) -> Bytes:
    elements = header.payload
    if header.method == METHOD_FRAME:
        try:
            elements = decode_frame(elements, dtype=header.dtype.name, max_bytes=header.raw_bytes, threads=1).view(
                np.uint8
            )
        except LimitError:  # the limit is the header's, not the caller's
            raise FrameError(f"dense stream has a frame of more words than its {header.raw_bytes} bytes") from None
    if elements.size != header.raw_bytes:
        raise FrameError(f"dense stream holds {elements.size} bytes of words: expected {header.raw_bytes}")
    if _stream.compute_verbatim_checksum(header.stream, elements) != header.checksum:
        raise FrameError("dense stream has other words than its checksum says")
    return elements if header.method == METHOD_FRAME else elements.copy()


def _check_out(out: Any, header: DenseHeader) -> None:
    expected_shape = (header.heads, header.tokens, header.dim)
    if not isinstance(out, np.ndarray) or out.dtype.itemsize != header.dtype.itemsize or out.dtype.kind not in "fiu":
        raise KvmnnError(f"out: expected an array of {header.dtype.itemsize}-byte words")
    if out.shape != expected_shape:
        raise KvmnnError(f"out has shape {list(out.shape)}: expected {list(expected_shape)}")
    if not out.flags.writeable:
        raise KvmnnError("out is read-only: expected a writable array")
    if not out.dtype.isnative:
        raise KvmnnError(f"out has words of type {out.dtype.str}: expected the byte order of this machine")
