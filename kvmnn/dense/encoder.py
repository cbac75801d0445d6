"""Encode K or V of one layer as dense streams (docs/format-v2.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..dtypes import Elements, parse_dtype
from ..errors import KvmnnError
from ..frames import CodecOptions
from ..frames.encoder import encode_elements
from . import _stream, tuning
from .header import DTYPES, HEADER_BYTES, METHOD_FRAME, METHOD_WORDS
from .inputs import EncoderInput
from .rope import RopeConfig
from .rope_search import AutoRope, RopeSearch, is_rotation_clearly_smaller
from .shared_tables import get_rotation, to_table_set

ReferenceHints: TypeAlias = npt.NDArray[np.int32]
"""Reference of each row (a row index, or -1): tried first for the next array of the same tokens."""

_FRAME_OPTIONS = {dtype: CodecOptions(effort="fast").to_lane_options(dtype) for dtype in DTYPES}
"""Frame options by dtype, resolved once: for short arrays it would take a noticeable part of the time."""


def encode(
    array: Elements,
    *,
    dtype: str | None = None,
    rotary: RopeConfig | AutoRope | None = None,
    positions: Any = None,
    token_ids: Any = None,
    history: Elements | None = None,
    tables: Any = None,
) -> bytes:
    """Encode K or V of one layer as a dense stream, losslessly.

    Parameters
    ----------
    array
        ``[kv_head, token, head_dim]`` of float16, float32 or uint16 (bf16), with any strides; never changed. Contiguous
        rows (``[token, kv_head, head_dim]``, transposed) are not copied.
    dtype : {"fp16", "bf16", "fp32"}, optional
        Default: the type of the array.
    rotary
        How K was rotated, `dims` at most head_dim; None for V; ``"auto"`` for the result of `search_rope`.
    positions
        With `rotary`: the position of each token, from 0 to 2^31 - 1, with gaps or without. Default: 0, 1, 2 ... (after
        `history`). The rows of history directly precede them, unless `positions` begins with theirs.
    token_ids
        The token of each row: earlier rows with the same tokens are tried as references.
    history
        Preceding rows in the same form, of which the last 256 are used. `decode` requires them as well.
    tables
        A `SharedTables` of similar arrays; `decode` requires it as well.

    Returns
    -------
    bytes
        At most 28 bytes longer than the raw bytes. Wrong `rotary`, `positions` or `token_ids` cost bytes, nothing else.

    Raises
    ------
    TypeError
        If an array has another element type.
    KvmnnError
        If a shape or a value is wrong; `LimitError` above 65,536 elements a token or 2^32 - 1 bytes.
    """
    encoder_input, table_set, _ = _prepare_input(
        array, dtype, RopeSearch(), rotary, positions, token_ids, history, tables
    )
    return _encode_smallest(encoder_input, table_set)


def encode_many(
    arrays: Sequence[Elements],
    *,
    dtype: str | None = None,
    rotary: RopeConfig | AutoRope | Sequence[RopeConfig | AutoRope | None] | None = None,
    positions: Any = None,
    token_ids: Any = None,
    history: Sequence[Elements] | None = None,
    tables: Sequence[Any] | None = None,
    choose_rotation: bool = False,
) -> list[bytes]:
    """Encode several arrays of the same tokens (layers, K and V, in any order), each as a stream of its own.

    Rows that are similar in one array are tried first in the next, so streams are smaller and take less time than with
    `encode` for each.

    Parameters
    ----------
    arrays
        As for `encode`, of equally many tokens.
    rotary
        One for all, or one for each array: None for V. With several ``"auto"``, the first rotation that is found is
        tried on the others; if the first two arrays have none, the search ends.
    history, tables
        One for each array.
    dtype, positions, token_ids
        As for `encode`, for all arrays.
    choose_rotation
        Omit the rotation from each array whose stream is smaller without it, and try a frame for repetitive arrays.
        Arrays of up to 128 KiB, and those that the rotation hardly helps, take twice as long.

    Raises
    ------
    KvmnnError, TypeError
        As `encode`, and if a sequence has another length than `arrays`.
    """
    count = len(arrays)
    is_sequence = isinstance(rotary, Sequence) and not isinstance(rotary, str)
    rotaries = _broadcast(cast("Sequence[Any]", rotary), count, "rotary") if is_sequence else [rotary] * count
    histories, table_choices = _broadcast(history, count, "history"), _broadcast(tables, count, "tables")
    streams: list[bytes] = []
    reference_hints: npt.NDArray[np.int32] | None = None
    rope_search = RopeSearch()
    for array, array_rotary, array_history, array_tables in zip(
        arrays, rotaries, histories, table_choices, strict=True
    ):
        ids = None if streams else token_ids
        encoder_input, table_set, used_rotary = _prepare_input(
            array, dtype, rope_search, array_rotary, positions, ids, array_history, array_tables, reference_hints
        )
        reference_hints = np.empty(encoder_input.tokens, np.int32)
        if (
            choose_rotation
            and used_rotary is not None
            and _may_be_smaller_unrotated(used_rotary, encoder_input, array, positions, dtype)
        ):
            streams.append(_encode_with_and_without_rope(encoder_input, reference_hints))
        else:
            streams.append(_encode_smallest(encoder_input, table_set, reference_hints, repeats=choose_rotation))
    return streams


def encode_next(
    rows: Elements,
    num_history_rows: int,
    reference_hints: ReferenceHints | None = None,
    *,
    dtype: str,
    rotary: RopeConfig | None = None,
    tables: Any = None,
    frame_trial_min_bytes: float = 0,
) -> tuple[bytes, ReferenceHints]:
    """Encode one array as `encode_many` does, and return the reference hints for the next one of the same tokens.

    Parameters
    ----------
    rows
        ``[token, kv_head, head_dim]``, contiguous, native and aligned, within the limits of `encode`; the first
        `num_history_rows` are history, at most 256.
    """
    table_set = to_table_set(tables)
    rotation = rotary.rotation if rotary is not None else None
    if table_set is not None:
        rotation = get_rotation(table_set)
    encoder_input = EncoderInput.from_rows(rows, num_history_rows, parse_dtype(dtype), rotation, reference_hints)
    _check_tables(tables, encoder_input)
    references = np.empty(encoder_input.tokens, np.int32)
    return _encode_smallest(
        encoder_input, table_set, references, frame_trial_min_bytes=frame_trial_min_bytes
    ), references


def _broadcast(values: Sequence[Any] | None, count: int, name: str) -> Sequence[Any]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise KvmnnError(f"{name} for {len(values)} arrays: expected {count}")
    return values


def _prepare_input(
    array: Elements,
    dtype: str | None,
    rope_search: RopeSearch,
    rotary: RopeConfig | AutoRope | None,
    positions: Any,
    token_ids: Any,
    history: Any,
    tables: Any,
    reference_hints: npt.NDArray[np.int32] | None = None,
) -> tuple[EncoderInput, _stream.TableSet | None, RopeConfig | None]:
    """Return the input, the tables, and the rotation; None if the tables state it."""
    table_set = to_table_set(tables)
    if table_set is not None and rotary == "auto":
        rotary = None
    used_rotary = rope_search.resolve(rotary, array, positions, dtype)
    rotation: RopeConfig | _stream.Rotation | None = used_rotary
    if table_set is not None:
        rotation = get_rotation(table_set)
        if used_rotary is not None and not _is_same_rotation(used_rotary, rotation):
            raise KvmnnError("rotary differs from that of the tables: leave it out, or make other tables")
    encoder_input = EncoderInput(array, dtype, rotation, positions, token_ids, history, reference_hints)
    _check_tables(tables, encoder_input)
    return encoder_input, table_set, used_rotary if table_set is None else None


def _may_be_smaller_unrotated(
    rotary: RopeConfig, encoder_input: EncoderInput, array: Elements, positions: Any, dtype: str | None
) -> bool:
    """Return whether the stream may be smaller without this rotation."""
    return encoder_input.row_bytes.size <= tuning.ROPE_TRIAL_MAX_BYTES or not is_rotation_clearly_smaller(
        rotary, array, positions, dtype
    )


def _check_tables(tables: Any, encoder_input: EncoderInput) -> None:
    if tables is not None and tables.table_set.dtype != encoder_input.dtype_code:
        raise KvmnnError(f"tables are for {tables.dtype}: the array is {encoder_input.dtype.name}")


def _is_same_rotation(rotary: RopeConfig, rotation: _stream.Rotation | None) -> bool:
    if rotation is None:
        return False
    dims, interleaved, frequencies = rotation
    is_equal = np.array_equal(frequencies, rotary.frequencies)
    return is_equal and (dims, bool(interleaved)) == (rotary.dims, rotary.pairing == "interleaved")


def _encode_with_and_without_rope(encoder_input: EncoderInput, references: ReferenceHints) -> bytes:
    """Return the smaller of the streams with and without the rotation."""
    rotated_stream = _encode_smallest(encoder_input, None, references, repeats=True)
    unrotated_references = np.empty_like(references)
    unrotated_stream = _encode_smallest(
        encoder_input, None, unrotated_references, compiled_input=encoder_input.build_unrotated_rows(), repeats=True
    )
    if len(unrotated_stream) >= len(rotated_stream):
        return rotated_stream
    references[:] = unrotated_references
    return unrotated_stream


def _encode_as_frame(encoder_input: EncoderInput) -> bytes:
    """Return a stream that is a frame inside."""
    return _stream.build_verbatim_stream(
        METHOD_FRAME,
        encoder_input.dtype_code,
        encoder_input.heads,
        encoder_input.dim,
        encoder_input.row_bytes,
        encode_elements(encoder_input.row_bytes, _FRAME_OPTIONS[encoder_input.dtype], 1),
    )


def encode_as_frame(rows: Elements, *, dtype: str) -> bytes:
    """Encode rows of `encode_next`, without history, as a stream that is a frame inside, whatever the other methods."""
    return _encode_as_frame(EncoderInput.from_rows(rows, 0, parse_dtype(dtype), None, None))


def _encode_smallest(
    encoder_input: EncoderInput,
    tables: _stream.TableSet | None,
    references: ReferenceHints | None = None,
    *,
    frame_trial_min_bytes: float = 0,
    compiled_input: _stream.EncoderRows | None = None,
    repeats: bool = False,
) -> bytes:
    """Return the smallest stream of any method; `compiled_input` replaces that of `encoder_input`."""
    stream, try_frame = (encoder_input.compiled_input if compiled_input is None else compiled_input).encode(
        tables, references, frame_trial_min_bytes, repeats
    )
    max_bytes = encoder_input.row_bytes.size + HEADER_BYTES if stream is None else len(stream)
    if try_frame:
        frame_stream = _encode_as_frame(encoder_input)
        if len(frame_stream) < max_bytes:
            return frame_stream
    if stream is None:
        return _stream.build_verbatim_stream(
            METHOD_WORDS,
            encoder_input.dtype_code,
            encoder_input.heads,
            encoder_input.dim,
            encoder_input.row_bytes,
            encoder_input.row_bytes,
        )
    return stream
