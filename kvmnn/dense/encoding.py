"""Dense streams from K or V of one layer (docs/format-v2.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes, DType, Words, by_name, check_array, of_array
from ..errors import KvmnnError, LimitError
from ..frames import encode as encode_frame
from . import _stream
from .header import DTYPES, FRAME, MOST_HISTORY, MOST_RAW_BYTES, MOST_ROW_WORDS, SIZE, WORDS, check_machine, rows_of
from .rotary import Rotary

Ids = npt.NDArray[np.integer[Any]]

_SAMPLE = 8
"""A frame is tried on one row in this many first."""
_LEAST_SAMPLE_BYTES = 16 << 10
_SUFFIX = 8
"""Tokens before a token that are compared in search of an earlier place like it."""


def encode(
    array: Words,
    *,
    dtype: str | None = None,
    rotary: Rotary | None = None,
    positions: Any = None,
    token_ids: Any = None,
    history: Words | None = None,
    tables: Any = None,
) -> bytes:
    """K or V of one layer as a dense stream, losslessly.

    Parameters
    ----------
    array
        ``[kv_head, token, head_dim]`` of float16, float32 or uint16 (bf16), with any strides; rows that already lie
        together (``[token, kv_head, head_dim]``, transposed) are not copied. Never changed.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"`` where the type of the array does not say it.
    rotary
        How K was rotated; None for V, or where it is not known. `dims` at most head_dim.
    positions
        With `rotary`: the position of each token, from 0 to 2^31 - 1, gaps allowed. Default: 0, 1, 2 ... (behind
        `history`). Those of history are taken to come right before, unless `positions` has them too, first.
    token_ids
        The token of each row, where it is known: earlier places with the same tokens are tried as references.
    history
        Rows that come before, in the same form; the last 256 of them are used. `decode` needs them as well.
    tables
        A `Tables` that was made of such arrays; `decode` needs it as well.

    Returns
    -------
    bytes
        At most the raw bytes and 28 more. Wrong `rotary`, `positions` or `token_ids` cost bytes, nothing else.

    Raises
    ------
    TypeError
        For arrays that hold no such words.
    KvmnnError
        For wrong shapes and values; `LimitError` above 65,536 words a token or 2^32 - 1 bytes.
    """
    given = Given(array, dtype, rotary, positions, token_ids, history, tables)
    return given.stream()


class Given:
    """The arguments of `encode`, checked, as the compiled code takes them."""

    def __init__(
        self,
        array: Words,
        dtype: str | None,
        rotary: Rotary | None,
        positions: Any,
        token_ids: Any,
        history: Any,
        tables: Any,
    ) -> None:
        check_machine()
        self.dtype = _checked_array(array, dtype, "array")
        self.heads, self.tokens, self.dim = array.shape
        _check_limits(self.heads, self.tokens, self.dim, self.dtype)
        self.rows = rows_of(array, self.dtype)
        self.history, rows_before = self._history(history)
        self.rotary, self.positions = self._rotary(rotary, positions, rows_before)
        self.known = None if token_ids is None else _earlier_places(token_ids, self.tokens, rows_before)

    def _history(self, history: Any) -> tuple[Bytes | None, int]:
        if history is None:
            return None, 0
        _checked_array(history, self.dtype.name, "history")
        if (history.shape[0], history.shape[2]) != (self.heads, self.dim):
            raise KvmnnError(
                f"history has {history.shape[0]} heads of {history.shape[2]}: expected {self.heads} of {self.dim}"
            )
        last = history[:, max(history.shape[1] - MOST_HISTORY, 0) :]
        return (rows_of(last, self.dtype), last.shape[1]) if last.shape[1] else (None, 0)

    def _rotary(self, rotary: Rotary | None, positions: Any, rows_before: int) -> tuple[Any, Any]:
        if rotary is None:
            return None, None
        if rotary.dims > self.dim:
            raise KvmnnError(f"rotary has {rotary.dims} dims: expected at most the head_dim, {self.dim}")
        all_positions = _all_positions(positions, self.tokens, rows_before)
        return (rotary.dims, int(rotary.pairing == "interleaved"), rotary.frequencies), all_positions

    def stream(self) -> bytes:
        code = DTYPES.index(self.dtype)
        made = _stream.encode(
            code, self.heads, self.dim, self.rows, self.history, self.rotary, self.positions, self.known, None,
            self.rows.size + SIZE,
        )  # fmt: skip
        limit = self.rows.size if made is None else len(made) - SIZE
        frame = self._frame(limit)
        if frame is not None:
            return _stream.whole_stream(FRAME, code, self.heads, self.dim, self.rows, frame)
        if made is None:
            return _stream.whole_stream(WORDS, code, self.heads, self.dim, self.rows, self.rows)
        return made

    def _frame(self, limit: int) -> bytes | None:
        """The frame of the words, if it is shorter than `limit`; a sample tells whether it is worth making."""
        row_bytes = self.heads * self.dim * self.dtype.itemsize
        sample = max(self.tokens // _SAMPLE, -(-_LEAST_SAMPLE_BYTES // row_bytes))
        if sample < self.tokens:
            begin = (self.tokens - sample) // 2 * row_bytes
            size = sample * row_bytes
            tried = encode_frame(self.rows[begin : begin + size], dtype=self.dtype.name, effort="fast", threads=1)
            if len(tried) / size > 1.2 * limit / self.rows.size:
                return None
        frame = encode_frame(self.rows, dtype=self.dtype.name, effort="fast", threads=1)
        return frame if len(frame) < limit else None


def _checked_array(array: Any, dtype: str | None, what: str) -> DType:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a numpy array, not {type(array).__name__}")
    kind = of_array(array) if dtype is None else by_name(dtype)
    check_array(array, kind)
    if array.ndim != 3:
        raise KvmnnError(f"{what} has {array.ndim} axes: expected [kv_head, token, head_dim]")
    return kind


def _check_limits(heads: int, tokens: int, dim: int, dtype: DType) -> None:
    if not (heads and tokens and dim):
        raise KvmnnError(f"array is empty: [{heads}, {tokens}, {dim}]")
    if heads * dim > MOST_ROW_WORDS or max(heads, dim) == MOST_ROW_WORDS:
        raise LimitError(
            f"array has {heads} heads of {dim}: a dense stream has at most {MOST_ROW_WORDS} words a token, and "
            f"{MOST_ROW_WORDS - 1} of either"
        )
    if heads * tokens * dim * dtype.itemsize > MOST_RAW_BYTES:
        raise LimitError(
            f"array has more than {MOST_RAW_BYTES} bytes, which is what a dense stream can hold: encode parts"
        )


def _all_positions(positions: Any, tokens: int, rows_before: int) -> npt.NDArray[np.uint32]:
    if positions is None:
        return np.arange(rows_before + tokens, dtype=np.uint32)
    given = np.asarray(positions)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise KvmnnError(f"positions are {given.ndim}-dimensional {given.dtype}: expected one integer for each token")
    if given.size not in (tokens, tokens + rows_before):
        raise KvmnnError(f"positions has {given.size} entries: expected {tokens}, one for each token")
    if given.size == tokens and rows_before:
        first = int(given[0])
        if first < rows_before:
            raise KvmnnError(f"positions begin at {first}: {rows_before} rows of history have no place before it")
        given = np.concatenate([np.arange(first - rows_before, first), given])
    if int(given.min()) < 0 or int(given.max()) >= 1 << 31:
        raise KvmnnError(f"positions reach from {given.min()} to {given.max()}: expected 0 to 2^31 - 1")
    return np.ascontiguousarray(given, np.uint32)


def _earlier_places(token_ids: Any, tokens: int, rows_before: int) -> npt.NDArray[np.int32]:
    """For each own row the last row before it whose tokens end alike, the longest such ending first; -1 for none."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size not in (tokens, tokens + rows_before):
        raise KvmnnError(
            f"token_ids has shape {list(ids.shape)} of {ids.dtype}: expected {tokens} integers, one for each token"
        )
    skipped = rows_before if ids.size == tokens else 0
    _, codes = np.unique(ids, return_inverse=True)
    codes = codes.astype(np.int64)
    places = np.full(ids.size, -1, np.int32)
    ending = codes
    for length in range(_SUFFIX):
        order = np.argsort(ending, kind="stable")
        same = ending[order[1:]] == ending[order[:-1]]
        later, earlier = order[1:][same], order[:-1][same]
        if not later.size:
            break
        places[later] = earlier + skipped
        before = np.full(ids.size, -1, np.int64)
        before[length + 1 :] = codes[: ids.size - length - 1]
        before[: length + 1] = -1 - np.arange(
            min(length + 1, ids.size)
        )  # nothing is before the first token: unlike all
        _, ending = np.unique(np.stack([ending, before]), axis=1, return_inverse=True)
        ending = ending.reshape(-1)
    return np.ascontiguousarray(places[ids.size - tokens :])
