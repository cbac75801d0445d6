"""What `encode` is given, checked, as the compiled code takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes, DType, Words, by_name, check_array, of_array
from ..errors import KvmnnError, LimitError
from . import _stream
from .header import DTYPES, MOST_HISTORY, MOST_RAW_BYTES, MOST_ROW_WORDS, check_machine, rows_of
from .rotary import Rotary

_SUFFIX = 8
"""Tokens before a token that are compared in search of an earlier place like it."""
_LAST_POSITION = (1 << 31) - 2
"""Taken for the one behind it as well, from which a stream cannot say the way back to 0: it costs bytes at most."""


class Given:
    """The arguments of `encode`, checked, as the compiled code takes them."""

    def __init__(
        self,
        array: Any,
        dtype: str | None,
        rotary: Any,
        positions: Any,
        token_ids: Any,
        history: Any,
        alike: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """`rotary` may also be what `rotation_of` a table set gives; `alike`: for each own row a row to try."""
        check_machine()
        self.dtype = checked_array(array, dtype, "array")
        self.heads, self.tokens, self.dim = array.shape
        _check_limits(self.heads, self.tokens, self.dim, self.dtype)
        self.words = rows_of(array, self.dtype)
        before, rows_before = self._history(history)
        rotation, at = self._rotation(rotary, positions, rows_before)
        known = alike if token_ids is None else _earlier_places(token_ids, self.tokens, rows_before)
        if known is not None and len(known) != self.tokens:
            raise KvmnnError(f"an array has {self.tokens} tokens: the one before it has {len(known)}")
        self.rows = _stream.Input(self.code, self.heads, self.dim, self.words, before, rotation, at, known)
        self._before, self._known = before, known

    def unrotated_rows(self) -> _stream.Input:
        """Return the same rows as those of an array that no model has rotated."""
        return _stream.Input(self.code, self.heads, self.dim, self.words, self._before, None, None, self._known)

    @classmethod
    def of_rows(
        cls,
        rows: Words,
        before: int,
        dtype: DType,
        rotation: _stream.Rotation | None,
        alike: npt.NDArray[np.int32] | None,
    ) -> Given:
        """Of rows ``[token, kv_head, head_dim]`` that lie together, native and aligned, at positions 0, 1, 2 ...; the
        first `before` are history. With the least work for each of many arrays.
        """
        made = cls.__new__(cls)
        tokens, made.heads, made.dim = rows.shape
        made.dtype, made.tokens = dtype, tokens - before
        words = rows.reshape(-1).view(np.uint8)
        begin = words.size // tokens * before
        made.words = words[begin:]
        at = None if rotation is None else np.arange(tokens, dtype=np.uint32)
        _check_rotation(rotation, made.dim)
        history = words[:begin] if begin else None
        made.rows = _stream.Input(made.code, made.heads, made.dim, made.words, history, rotation, at, alike)
        return made

    @property
    def code(self) -> int:
        """The dtype's number in a stream."""
        return DTYPES.index(self.dtype)

    def _history(self, history: Any) -> tuple[Bytes | None, int]:
        if history is None:
            return None, 0
        checked_array(history, self.dtype.name, "history")
        if (history.shape[0], history.shape[2]) != (self.heads, self.dim):
            raise KvmnnError(
                f"history has {history.shape[0]} heads of {history.shape[2]}: expected {self.heads} of {self.dim}"
            )
        last = history[:, max(history.shape[1] - MOST_HISTORY, 0) :]
        return (rows_of(last, self.dtype), last.shape[1]) if last.shape[1] else (None, 0)

    def _rotation(self, rotary: Any, positions: Any, rows_before: int) -> tuple[_stream.Rotation | None, Any]:
        if rotary is None:
            if positions is not None:
                all_positions(positions, self.tokens, rows_before)  # not used, and what is wrong with them is wrong
            return None, None
        if isinstance(rotary, Rotary):
            rotary = rotary.rotation
        if not isinstance(rotary, tuple):
            raise TypeError(f"rotary must be a Rotary, 'auto' or None, not {type(rotary).__name__}")
        _check_rotation(rotary, self.dim)
        return rotary, all_positions(positions, self.tokens, rows_before)


def checked_array(array: Any, dtype: str | None, what: str) -> DType:
    """The element type of K or V of one layer; errors as `encode`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a numpy array, not {type(array).__name__}")
    kind = of_array(array) if dtype is None else by_name(dtype)
    check_array(array, kind)
    if array.ndim != 3:
        raise KvmnnError(f"{what} has {array.ndim} axes: expected [kv_head, token, head_dim]")
    return kind


def _check_rotation(rotation: _stream.Rotation | None, dim: int) -> None:
    if rotation is not None and rotation[0] > dim:
        raise KvmnnError(f"rotary has {rotation[0]} dims: expected at most the head_dim, {dim}")


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


def all_positions(positions: Any, tokens: int, rows_before: int) -> npt.NDArray[np.uint32]:
    """Positions of history and own rows; errors as `encode`."""
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
    return np.minimum(given.astype(np.uint32), _LAST_POSITION)


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
