"""The files beside an index compared with what it knows: without them it could not be made anew."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from ..errors import KvmnnError
from .beside import KeptText
from .directory import Directory
from .rows import Cursor, MaybeNumber, PinRow, SessionRow, Word, WrongRowError, parse_space_document
from .space import Space
from .token_ids import MAX_TOKENS, Ids, as_ids, text_key


def mend_beside(units: Directory) -> list[str]:
    """Write the files of spaces, pinned texts and sessions again that are not as the index knows them; a line each."""
    is_fixed = units.read_only or bool(units.index.full)
    with units.index.reading() if is_fixed else units.index.writing() as cursor:  # nobody pins meanwhile
        wrong = units.beside.mend(_held(units, cursor), write=not is_fixed)
    done = "open the store for writing (kvmnn store verify)" if is_fixed else "written again"
    return [f"{path}: is lost or damaged: {done}" for path in wrong]


def _held(units: Directory, cursor: Cursor) -> Iterator[Space | KeptText]:
    """All that the index knows and a file beside it says."""
    for (document,) in cursor.all_rows(Word, "SELECT document FROM space"):
        yield parse_space_document(document, units.label)
    for pin in cursor.all_rows(PinRow, "SELECT key, unit, tokens FROM pin"):
        text = _text(units, cursor, pin.unit, pin.tokens)
        if text is not None and text_key(text.space, text.ids) == pin.key:
            yield text
    query = "SELECT name, space.key, ids FROM session JOIN space ON space.id = session.space"
    for name, space, packed in cursor.all_rows(SessionRow, query):
        try:
            if not name:
                raise ValueError("it has no name")
            yield KeptText(name, space, session_ids(packed))
        except (KvmnnError, zlib.error, TypeError, ValueError) as error:
            raise WrongRowError(f"a session is damaged: {error}") from None


def _text(units: Directory, cursor: Cursor, unit: int, end: int) -> KeptText | None:
    """The text up to its token `end`, which a unit holds; None where units do not say it."""
    parts: list[Ids] = []
    while True:
        row = cursor.row(MaybeNumber, "SELECT parent FROM unit WHERE id = ?", (unit,))
        if not parts and row is not None and cursor.has_row("SELECT 1 FROM unit WHERE id = ? AND tokens = 0", (unit,)):
            unit = row.value or 0  # of a prefix with windows or state these are pinned
            row = cursor.row(MaybeNumber, "SELECT parent FROM unit WHERE id = ?", (unit,))
        header = units.header(unit)
        if header is None or row is None or not header.start < end <= header.start + header.ids.size:
            return None
        parts.insert(0, header.ids[: end - header.start])
        if not header.start:
            return KeptText("", header.space, np.concatenate(parts))
        unit, end = row.value or 0, header.start


def session_ids(packed: bytes) -> Ids:
    """The ids of a session as the index has them; `zlib.error` and others for what is damaged."""
    return as_ids(np.frombuffer(zlib.decompressobj().decompress(packed, 4 * MAX_TOKENS), "<u4"))
