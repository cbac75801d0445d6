"""Dense streams from K or V of one layer (docs/format-v2.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..dtypes import Words, by_name
from ..errors import KvmnnError
from ..frames import CodecOptions
from ..frames.encoding import encode_words
from . import _stream
from .header import DTYPES, FRAME, SIZE, WORDS
from .rotary import Rotary
from .tables import held_tables, rotation_of
from .taking import Given
from .trial import Auto, Trial, is_rotation_clearly_smaller

Alike: TypeAlias = npt.NDArray[np.int32]
"""For each row the row that it refers to, or -1."""

_SMALL_BYTES = 128 << 10
"""Rows of fewer bytes are encoded with and without the rotation: its parameters are up to 3 % of such a stream."""

_FRAMES = {dtype: CodecOptions(effort="fast").for_words(dtype) for dtype in DTYPES}
"""Of the frames: short arrays would take longer to ask for them each time."""


def encode(
    array: Words,
    *,
    dtype: str | None = None,
    rotary: Rotary | Auto | None = None,
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
        How K was rotated, `dims` at most head_dim; None for V; ``"auto"`` for what `find_rotary` finds, if it does.
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
    given, held, _ = _checked(array, dtype, Trial(), rotary, positions, token_ids, history, tables)
    return _smallest(given, held)


def encode_many(
    arrays: Sequence[Words],
    *,
    dtype: str | None = None,
    rotary: Rotary | Auto | Sequence[Rotary | Auto | None] | None = None,
    positions: Any = None,
    token_ids: Any = None,
    history: Sequence[Words] | None = None,
    tables: Sequence[Any] | None = None,
    choose_rotation: bool = False,
) -> list[bytes]:
    """Several arrays of the same tokens, each as `encode` makes it: layers, K and V, in any order.

    What one array found to be alike is tried first in the next: smaller streams in less time than one by one.

    Parameters
    ----------
    arrays
        As for `encode`, of equally many tokens.
    rotary
        One for all, or one for each array: None for V. Of several ``"auto"`` the first that is found is tried on the
        others; where the first two show none, no further ones are searched.
    history, tables
        One for each array.
    dtype, positions, token_ids
        As for `encode`, for all arrays.
    choose_rotation
        Leave the rotation out of each array whose stream is smaller without it, and look for repeats that a frame
        takes less for. Arrays of up to 128 KiB, and those whose rows hardly become more alike, take twice as long.

    Raises
    ------
    KvmnnError, TypeError
        As `encode`, and for sequences of other lengths.
    """
    count = len(arrays)
    several = isinstance(rotary, Sequence) and not isinstance(rotary, str)
    rotaries = _for_each(cast("Sequence[Any]", rotary), count, "rotary") if several else [rotary] * count
    histories, sets = _for_each(history, count, "history"), _for_each(tables, count, "tables")
    streams: list[bytes] = []
    alike: npt.NDArray[np.int32] | None = None
    trial = Trial()
    for array, one, before, held in zip(arrays, rotaries, histories, sets, strict=True):
        ids = None if streams else token_ids
        given, table_set, used = _checked(array, dtype, trial, one, positions, ids, before, held, alike)
        alike = np.empty(given.tokens, np.int32)
        if choose_rotation and used is not None and _is_open(used, given, array, positions, dtype):
            streams.append(_smallest_of_both(given, alike))
        else:
            streams.append(_smallest(given, table_set, alike, repeats=choose_rotation))
    return streams


def encode_next(
    rows: Words,
    before: int,
    alike: Alike | None = None,
    *,
    dtype: str,
    rotary: Rotary | None = None,
    tables: Any = None,
    frames_above: float = 0,
) -> tuple[bytes, Alike]:
    """One array of those that `encode_many` takes, and what it found to be alike, for the next one of the same tokens.

    Parameters
    ----------
    rows
        ``[token, kv_head, head_dim]``, together in memory, native and aligned, within the limits of `encode`; the first
        `before` are history, at most 256.
    alike
        What the array before it found.
    rotary
        Without tables: these know it themselves.
    frames_above
        A stream of more bytes is compared with a frame, and the smaller one taken.
    """
    table_set = held_tables(tables)
    rotation = rotary.rotation if rotary is not None else None
    if table_set is not None:
        rotation = rotation_of(table_set)
    given = Given.of_rows(rows, before, by_name(dtype), rotation, alike)
    _check_tables(tables, given)
    found = np.empty(given.tokens, np.int32)
    return _smallest(given, table_set, found, frames_above=frames_above), found


def _for_each(given: Sequence[Any] | None, count: int, what: str) -> Sequence[Any]:
    if given is None:
        return [None] * count
    if len(given) != count:
        raise KvmnnError(f"{what} for {len(given)} arrays: expected {count}")
    return given


def _checked(
    array: Words,
    dtype: str | None,
    trial: Trial,
    rotary: Rotary | Auto | None,
    positions: Any,
    token_ids: Any,
    history: Any,
    tables: Any,
    alike: npt.NDArray[np.int32] | None = None,
) -> tuple[Given, _stream.TableSet | None, Rotary | None]:
    """Return the arguments, the tables, and the rotation where no tables state it for all their streams."""
    held = held_tables(tables)
    if held is not None and rotary == "auto":
        rotary = None
    used = trial.rotary(rotary, array, positions, dtype)
    rotation: Rotary | _stream.Rotation | None = used
    if held is not None:
        rotation = rotation_of(held)
        if used is not None and not _same_rotation(used, rotation):
            raise KvmnnError("rotary differs from that of the tables: leave it out, or make other tables")
    given = Given(array, dtype, rotation, positions, token_ids, history, alike)
    _check_tables(tables, given)
    return given, held, used if held is None else None


def _is_open(rotary: Rotary, given: Given, array: Words, positions: Any, dtype: str | None) -> bool:
    """Return whether the stream may be smaller without this rotation."""
    return given.words.size <= _SMALL_BYTES or not is_rotation_clearly_smaller(rotary, array, positions, dtype)


def _check_tables(tables: Any, given: Given) -> None:
    if tables is not None and tables.held.dtype != given.code:
        raise KvmnnError(f"tables are for {tables.dtype}: the array is {given.dtype.name}")


def _same_rotation(rotary: Rotary, rotation: _stream.Rotation | None) -> bool:
    if rotation is None:
        return False
    dims, interleaved, frequencies = rotation
    same = np.array_equal(frequencies, rotary.frequencies)
    return same and (dims, bool(interleaved)) == (rotary.dims, rotary.pairing == "interleaved")


def _smallest_of_both(given: Given, references: Alike) -> bytes:
    """The smaller of the streams with the rotation and without it."""
    rotated = _smallest(given, None, references, repeats=True)
    own = np.empty_like(references)
    plain = _smallest(given, None, own, rows=given.unrotated_rows(), repeats=True)
    if len(plain) >= len(rotated):
        return rotated
    references[:] = own
    return plain


def _smallest(
    given: Given,
    tables: _stream.TableSet | None,
    references: Alike | None = None,
    *,
    frames_above: float = 0,
    rows: _stream.Input | None = None,
    repeats: bool = False,
) -> bytes:
    """The stream by the method that needs fewest bytes; `rows` in place of those of `given`."""
    made, try_frame = (given.rows if rows is None else rows).encode(tables, references, frames_above, repeats)
    limit = given.words.size + SIZE if made is None else len(made)
    if try_frame:
        frame = encode_words(given.words, _FRAMES[given.dtype], 1)
        if SIZE + len(frame) < limit:
            return _stream.whole_stream(FRAME, given.code, given.heads, given.dim, given.words, frame)
    if made is None:
        return _stream.whole_stream(WORDS, given.code, given.heads, given.dim, given.words, given.words)
    return made
