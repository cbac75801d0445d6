"""K or V of one layer from dense streams (docs/format-v2.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Bytes, Words, by_name
from ..errors import FrameError, KvmnnError, LimitError
from ..frames import decode as decode_frame
from . import _rows, _stream
from .header import DTYPES, FRAME, MOST_RAW_BYTES, ROWS, Header, check_machine, read_header, rows_of
from .tables import held_tables

_TYPES = tuple(dtype.numpy for dtype in DTYPES)
"""By the number that a stream has for them."""


def decode(
    stream: Any,
    *,
    history: Words | None = None,
    tables: Any = None,
    out: Words | None = None,
    max_bytes: int | None = None,
) -> Words:
    """The words of a dense stream.

    Parameters
    ----------
    stream
        Bytes-like; exactly one stream.
    history, tables
        What `encode` was given; not looked at where the stream does not need them.
    out
        An array ``[kv_head, token, head_dim]`` of the stream's shape and word size, with any strides, to write to. It
        is untouched if the stream is refused.
    max_bytes
        Refuse a stream that says it holds more raw bytes, before any memory is taken.

    Returns
    -------
    numpy.ndarray
        ``[kv_head, token, head_dim]`` of float16, uint16 (bf16) or float32, rows token by token in memory; or `out`.

    Raises
    ------
    FrameError
        For what breaks the format, a checksum that does not hold, and wrong history or tables.
    LimitError
        Above `max_bytes`.
    """
    if out is None and history is None and isinstance(stream, bytes):
        alone = _decoded_alone(stream, tables, max_bytes)
        if alone is not None:
            return alone
    header = read_header(stream, max_bytes)
    shape = (header.tokens, header.heads, header.dim)
    if out is not None:
        _check_out(out, header)
    found = _decode_rows(header, history, tables) if header.method == ROWS else _decode_whole(header)
    array: Words = found.view(header.dtype.numpy).reshape(shape).transpose(1, 0, 2)
    if out is None:
        return array
    out[...] = array.view(out.dtype)
    return out


def decode_into(header: Header, out: Words, *, history: Words | None = None, tables: Any = None) -> None:
    """As `decode` of this stream to `out`, which may hold anything where the stream is refused: rows that lie together
    in `out` are decoded in their places.
    """
    _check_out(out, header)
    rows = out.transpose(1, 0, 2)
    if header.method == ROWS and rows.flags.c_contiguous:
        _decode_rows(header, history, tables, rows.reshape(-1).view(np.uint8))
    else:
        decode(header.stream, history=history, tables=tables, out=out)


class Places:
    """Rows of all tokens, to which streams of neighbouring tokens are decoded with the least work for each.

    Parameters
    ----------
    words
        ``[kv_head, token, head_dim]``, rows token by token in memory.
    """

    def __init__(self, words: Words, dtype: str) -> None:
        check_machine()
        heads, _, dim = words.shape
        rows = words.transpose(1, 0, 2)
        if not rows.flags.c_contiguous:
            raise KvmnnError("rows that do not lie token by token")
        self._held = _rows.Place(DTYPES.index(by_name(dtype)), heads, dim, rows.reshape(-1).view(np.uint8))

    def decode(
        self, stream: Bytes | bytes, checksum: int, begin: int, tokens: int, *, history: int = 0, tables: Any = None
    ) -> bool:
        """Decode a stream of `tokens` rows to those from `begin` on.

        Returns
        -------
        False for a stream that is none of method 2, of this `checksum` and of no more than `history` rows before it, or
        does not decode with these tables: `decode_into` does, or says what is wrong with it.
        """
        return self._held.decode(stream, checksum, held_tables(tables), begin, tokens, history)


def _decoded_alone(stream: bytes, tables: Any, max_bytes: int | None) -> Words | None:
    """Most short blocks, in half a microsecond of Python; None for what `decode` has to look at, or to refuse."""
    check_machine()
    most = MOST_RAW_BYTES if max_bytes is None else min(max(max_bytes, 0), MOST_RAW_BYTES)
    found = _rows.decode_alone(stream, held_tables(tables), most, np.empty, _TYPES)
    return None if found is None else found.transpose(1, 0, 2)


def open_rows(header: Header) -> _rows.Rows:
    """The payload of method 2, its sections found."""
    return _rows.Rows(header.stream, header.dtype_code, header.heads, header.dim, header.tokens, header.flags)


def _decode_rows(header: Header, history: Words | None, tables: Any, words: Bytes | None = None) -> Bytes:
    parsed = open_rows(header)  # before memory for the words is taken
    before = _history(header, parsed.history, history)
    held = _needed_tables(parsed.table_set, tables)
    if words is None:
        words = np.empty(header.raw_bytes, np.uint8)
    parsed.decode(before, held, words)
    return words


def _history(header: Header, needed: int, history: Words | None) -> Bytes | None:
    if not needed:
        return None
    if history is None:
        raise FrameError(f"dense stream refers to {needed} rows before it: give them as history")
    if not isinstance(history, np.ndarray):
        raise TypeError(f"history must be a numpy array, not {type(history).__name__}")
    heads, dim, itemsize = header.heads, header.dim, header.dtype.itemsize
    if history.dtype.itemsize != itemsize:
        raise FrameError(f"history has words of {history.dtype.itemsize} bytes: expected {itemsize}")
    if history.ndim != 3 or (history.shape[0], history.shape[2]) != (heads, dim) or history.shape[1] < needed:
        raise FrameError(f"history has shape {list(history.shape)}: expected [{heads}, {needed} or more, {dim}]")
    return rows_of(history[:, history.shape[1] - needed :], header.dtype)


def _needed_tables(needed: int | None, tables: Any) -> _stream.TableSet | None:
    held = held_tables(tables)
    if needed is None:
        return None
    if held is None:
        raise FrameError(f"dense stream was made with the table set {needed:016x}: give it as tables")
    if held.id != needed:
        raise FrameError(f"dense stream was made with the table set {needed:016x}: found {held.id:016x}")
    return held


def _decode_whole(header: Header) -> Bytes:
    found = header.payload
    if header.method == FRAME:
        try:
            found = decode_frame(found, dtype=header.dtype.name, max_bytes=header.raw_bytes, threads=1).view(np.uint8)
        except LimitError:  # no limit of the caller's: the stream breaks its own word
            raise FrameError(f"dense stream has a frame of more words than its {header.raw_bytes} bytes") from None
    if found.size != header.raw_bytes:
        raise FrameError(f"dense stream holds {found.size} bytes of words: expected {header.raw_bytes}")
    if _stream.whole_checksum(header.stream, found) != header.checksum:
        raise FrameError("dense stream has other words than its checksum says")
    return found if header.method == FRAME else found.copy()


def _check_out(out: Any, header: Header) -> None:
    expected = (header.heads, header.tokens, header.dim)
    if not isinstance(out, np.ndarray) or out.dtype.itemsize != header.dtype.itemsize or out.dtype.kind not in "fiu":
        raise KvmnnError(f"out: expected an array of {header.dtype.itemsize}-byte words")
    if out.shape != expected:
        raise KvmnnError(f"out has shape {list(out.shape)}: expected {list(expected)}")
    if not out.flags.writeable:
        raise KvmnnError("out is read-only: expected a writable array")
    if not out.dtype.isnative:
        raise KvmnnError(f"out has words of type {out.dtype.str}: expected the byte order of this machine")
