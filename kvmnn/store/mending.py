"""The files beside an index compared with what it knows: without them it could not be made anew."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from ..errors import KvmnnError
from .beside import SavedSequence
from .directory import DirectoryBackendBase
from .rows import (
    InvalidRowError,
    OptionalNumberRow,
    PinRow,
    SessionNameRow,
    ValidatingCursor,
    WordRow,
    parse_space_document,
)
from .space import Namespace
from .token_ids import MAX_TOKENS, Ids, compute_sequence_key, to_token_ids


def repair_recovery_files(backend: DirectoryBackendBase) -> list[str]:
    """Write the files of spaces, pinned texts and sessions again that are not as the index knows them; a line each."""
    is_read_only = backend.read_only or bool(backend.index.write_error)
    with (
        backend.index.begin_reading() if is_read_only else backend.index.begin_writing() as cursor
    ):  # nobody pins meanwhile
        damaged_paths = backend.recovery_files.repair(_iter_expected(backend, cursor), write=not is_read_only)
    action_text = "open the store for writing (kvmnn store verify)" if is_read_only else "written again"
    return [f"{path}: is lost or damaged: {action_text}" for path in damaged_paths]


def _iter_expected(backend: DirectoryBackendBase, cursor: ValidatingCursor) -> Iterator[Namespace | SavedSequence]:
    """All that the index knows and a file beside it says."""
    for (document,) in cursor.fetch_rows(WordRow, "SELECT document FROM space"):
        yield parse_space_document(document, backend.label)
    for pin_row in cursor.fetch_rows(PinRow, "SELECT key, unit, tokens FROM pin"):
        saved_sequence = _read_pinned_sequence(backend, cursor, pin_row.unit, pin_row.tokens)
        if (
            saved_sequence is not None
            and compute_sequence_key(saved_sequence.namespace_key, saved_sequence.ids) == pin_row.key
        ):
            yield saved_sequence
    query = "SELECT name, space.key, ids FROM session JOIN space ON space.id = session.space"
    for name, namespace, packed in cursor.fetch_rows(SessionNameRow, query):
        try:
            if not name:
                raise ValueError("it has no name")
            yield SavedSequence(name, namespace, unpack_session_ids(packed))
        except (KvmnnError, zlib.error, TypeError, ValueError) as error:
            raise InvalidRowError(f"a session is damaged: {error}") from None


def _read_pinned_sequence(
    backend: DirectoryBackendBase, cursor: ValidatingCursor, unit: int, end_token: int
) -> SavedSequence | None:
    """The text up to its token `end_token`, which a unit holds; None where units do not say it."""
    parts: list[Ids] = []
    while True:
        row = cursor.fetch_row(OptionalNumberRow, "SELECT parent FROM unit WHERE id = ?", (unit,))
        if not parts and row is not None and cursor.has_row("SELECT 1 FROM unit WHERE id = ? AND tokens = 0", (unit,)):
            unit = row.value or 0  # of a prefix with windows or state these are pinned
            row = cursor.fetch_row(OptionalNumberRow, "SELECT parent FROM unit WHERE id = ?", (unit,))
        header = backend.read_header(unit)
        if header is None or row is None or not header.start < end_token <= header.start + header.ids.size:
            return None
        parts.insert(0, header.ids[: end_token - header.start])
        if not header.start:
            return SavedSequence("", header.namespace_key, np.concatenate(parts))
        unit, end_token = row.value or 0, header.start


def unpack_session_ids(packed: bytes) -> Ids:
    """The ids of a session as the index has them; `zlib.error` and others for what is damaged."""
    return to_token_ids(np.frombuffer(zlib.decompressobj().decompress(packed, 4 * MAX_TOKENS), "<u4"))
