"""Validate the arguments of `encode`, and convert them for the compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes, DType, Elements, check_array_dtype, infer_dtype, parse_dtype
from ..errors import KvmnnError, LimitError
from . import _stream, tuning
from .header import DTYPES, MAX_HISTORY_ROWS, MAX_RAW_BYTES, MAX_ROW_ELEMENTS, check_byte_order, to_row_bytes
from .rope import RopeConfig

_MAX_POSITION = (1 << 31) - 2
"""Position 2^31 - 1 is encoded as this one, which costs bytes at most: a stream cannot express its distance to 0."""


class EncoderInput:
    """The validated arguments of `encode`, as the compiled code expects them."""

    def __init__(
        self,
        array: Any,
        dtype: str | None,
        rotary: Any,
        positions: Any,
        token_ids: Any,
        history: Any,
        reference_hints: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Validate the arguments; `reference_hints` has a candidate reference for each row, -1 for none."""
        check_byte_order()
        self.dtype = validate_array(array, dtype, "array")
        self.heads, self.tokens, self.dim = array.shape
        _check_limits(self.heads, self.tokens, self.dim, self.dtype)
        self.row_bytes = to_row_bytes(array, self.dtype)
        history_rows, num_history_rows = self._select_history(history)
        rotation, row_positions = self._resolve_rotation(rotary, positions, num_history_rows)
        hints = reference_hints if token_ids is None else _find_earlier_rows(token_ids, self.tokens, num_history_rows)
        if hints is not None and len(hints) != self.tokens:
            raise KvmnnError(f"an array has {self.tokens} tokens: the one before it has {len(hints)}")
        self.compiled_input = _stream.EncoderRows(
            self.dtype_code, self.heads, self.dim, self.row_bytes, history_rows, rotation, row_positions, hints
        )
        self._history_rows, self._reference_hints = history_rows, hints

    def build_unrotated_rows(self) -> _stream.EncoderRows:
        """Return the same rows for encoding without RoPE parameters."""
        return _stream.EncoderRows(
            self.dtype_code, self.heads, self.dim, self.row_bytes, self._history_rows, None, None, self._reference_hints
        )

    @classmethod
    def from_rows(
        cls,
        rows: Elements,
        num_history_rows: int,
        dtype: DType,
        rotation: _stream.Rotation | None,
        reference_hints: npt.NDArray[np.int32] | None,
    ) -> EncoderInput:
        """Return the input for rows ``[token, kv_head, head_dim]``, with little overhead.

        Rows are contiguous, native and aligned. Positions are 0, 1, 2 ...; the first `num_history_rows` are history.
        """
        instance = cls.__new__(cls)
        tokens, instance.heads, instance.dim = rows.shape
        instance.dtype, instance.tokens = dtype, tokens - num_history_rows
        all_row_bytes = rows.reshape(-1).view(np.uint8)
        begin = all_row_bytes.size // tokens * num_history_rows
        instance.row_bytes = all_row_bytes[begin:]
        row_positions = None if rotation is None else np.arange(tokens, dtype=np.uint32)
        _check_rotation(rotation, instance.dim)
        history = all_row_bytes[:begin] if begin else None
        instance.compiled_input = _stream.EncoderRows(
            instance.dtype_code,
            instance.heads,
            instance.dim,
            instance.row_bytes,
            history,
            rotation,
            row_positions,
            reference_hints,
        )
        return instance

    @property
    def dtype_code(self) -> int:
        """Return the number of the dtype in a stream."""
        return DTYPES.index(self.dtype)

    def _select_history(self, history: Any) -> tuple[Bytes | None, int]:
        if history is None:
            return None, 0
        validate_array(history, self.dtype.name, "history")
        if (history.shape[0], history.shape[2]) != (self.heads, self.dim):
            raise KvmnnError(
                f"history has {history.shape[0]} heads of {history.shape[2]}: expected {self.heads} of {self.dim}"
            )
        recent = history[:, max(history.shape[1] - MAX_HISTORY_ROWS, 0) :]
        return (to_row_bytes(recent, self.dtype), recent.shape[1]) if recent.shape[1] else (None, 0)

    def _resolve_rotation(
        self, rotary: Any, positions: Any, num_history_rows: int
    ) -> tuple[_stream.Rotation | None, Any]:
        if rotary is None:
            if positions is not None:
                complete_positions(positions, self.tokens, num_history_rows)  # unused, but still validated
            return None, None
        if isinstance(rotary, RopeConfig):
            rotary = rotary.rotation
        if not isinstance(rotary, tuple):
            raise TypeError(f"rotary must be a RopeConfig, 'auto' or None, not {type(rotary).__name__}")
        _check_rotation(rotary, self.dim)
        return rotary, complete_positions(positions, self.tokens, num_history_rows)


def validate_array(array: Any, dtype: str | None, name: str) -> DType:
    """Return the element type of K or V of one layer; errors as `encode`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    element_type = infer_dtype(array) if dtype is None else parse_dtype(dtype)
    check_array_dtype(array, element_type)
    if array.ndim != 3:
        raise KvmnnError(f"{name} has {array.ndim} axes: expected [kv_head, token, head_dim]")
    return element_type


def _check_rotation(rotation: _stream.Rotation | None, dim: int) -> None:
    if rotation is not None and rotation[0] > dim:
        raise KvmnnError(f"rotary has {rotation[0]} dims: expected at most the head_dim, {dim}")


def _check_limits(heads: int, tokens: int, dim: int, dtype: DType) -> None:
    if not (heads and tokens and dim):
        raise KvmnnError(f"array is empty: [{heads}, {tokens}, {dim}]")
    if heads * dim > MAX_ROW_ELEMENTS or max(heads, dim) == MAX_ROW_ELEMENTS:
        raise LimitError(
            f"array has {heads} heads of {dim}: a dense stream has at most {MAX_ROW_ELEMENTS} words a token, and "
            f"{MAX_ROW_ELEMENTS - 1} of either"
        )
    if heads * tokens * dim * dtype.itemsize > MAX_RAW_BYTES:
        raise LimitError(
            f"array has more than {MAX_RAW_BYTES} bytes, which is what a dense stream can hold: encode parts"
        )


def complete_positions(positions: Any, tokens: int, num_history_rows: int) -> npt.NDArray[np.uint32]:
    """Return the positions of history and own rows; errors as `encode`."""
    if positions is None:
        return np.arange(num_history_rows + tokens, dtype=np.uint32)
    token_positions = np.asarray(positions)
    if token_positions.ndim != 1 or token_positions.dtype.kind not in "iu":
        raise KvmnnError(
            f"positions are {token_positions.ndim}-dimensional {token_positions.dtype}: expected one integer for each "
            f"token"
        )
    if token_positions.size not in (tokens, tokens + num_history_rows):
        raise KvmnnError(f"positions has {token_positions.size} entries: expected {tokens}, one for each token")
    if token_positions.size == tokens and num_history_rows:
        first = int(token_positions[0])
        if first < num_history_rows:
            raise KvmnnError(f"positions begin at {first}: {num_history_rows} rows of history have no place before it")
        token_positions = np.concatenate([np.arange(first - num_history_rows, first), token_positions])
    if int(token_positions.min()) < 0 or int(token_positions.max()) >= 1 << 31:
        raise KvmnnError(
            f"positions reach from {token_positions.min()} to {token_positions.max()}: expected 0 to 2^31 - 1"
        )
    return np.minimum(token_positions.astype(np.uint32), _MAX_POSITION)


def _find_earlier_rows(token_ids: Any, tokens: int, num_history_rows: int) -> npt.NDArray[np.int32]:
    """Return for each own row the last earlier row that shares the longest suffix of tokens; -1 for none."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size not in (tokens, tokens + num_history_rows):
        raise KvmnnError(
            f"token_ids has shape {list(ids.shape)} of {ids.dtype}: expected {tokens} integers, one for each token"
        )
    row_offset = num_history_rows if ids.size == tokens else 0
    _, codes = np.unique(ids, return_inverse=True)
    codes = codes.astype(np.int64)
    earlier_rows = np.full(ids.size, -1, np.int32)
    suffix_codes = codes
    for length in range(tuning.SUFFIX_TOKENS):
        order = np.argsort(suffix_codes, kind="stable")
        is_equal = suffix_codes[order[1:]] == suffix_codes[order[:-1]]
        later, earlier = order[1:][is_equal], order[:-1][is_equal]
        if not later.size:
            break
        earlier_rows[later] = earlier + row_offset
        previous_codes = np.full(ids.size, -1, np.int64)
        previous_codes[length + 1 :] = codes[: ids.size - length - 1]
        # No token precedes the first one: these codes differ from all others.
        previous_codes[: length + 1] = -1 - np.arange(min(length + 1, ids.size))
        _, suffix_codes = np.unique(np.stack([suffix_codes, previous_codes]), axis=1, return_inverse=True)
        suffix_codes = suffix_codes.reshape(-1)
    return np.ascontiguousarray(earlier_rows[ids.size - tokens :])
