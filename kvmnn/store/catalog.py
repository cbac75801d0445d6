"""What a store directory holds besides K and V: pins, sessions; and what there is of everything."""

from __future__ import annotations

import zlib

from ..checks import repr_short
from ..errors import KvmnnError, SourceError
from . import updates
from .directory import DirectoryBackendBase
from .lookup import TokenSequence
from .mending import unpack_session_ids
from .prefix_state import is_prefix_state, parse_state
from .results import MAX_LAST_IDS, StoreEntry, StoreListing, StoreStats
from .rows import (
    InvalidRowError,
    NumberedDocumentRow,
    NumberRow,
    SequenceRow,
    SessionDocumentRow,
    TotalsRow,
    WordRow,
    parse_space_document,
)
from .space import Namespace
from .token_ids import Ids, compute_block_keys, compute_sequence_key
from .unit import DamagedUnitError, parse_header

_MAX_SESSION_NAME_CHARACTERS = 256


def save_session(backend: DirectoryBackendBase, name: str, namespace: Namespace, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    validate_session_name(name)
    with backend.index.begin_writing() as cursor:
        updates.save_session(cursor, name, namespace, ids)
        backend.recovery_files.save_namespace(namespace)
        backend.recovery_files.save_session(name, namespace, ids)


def get_session(backend: DirectoryBackendBase, name: str) -> tuple[Namespace, Ids]:
    """Space and text of a session; `KvmnnError` where there is none of this name."""
    validate_session_name(name)
    with backend.index.begin_reading() as cursor:
        row = cursor.fetch_row(
            SessionDocumentRow,
            "SELECT space.document, session.ids FROM session JOIN space ON space.id = session.space WHERE name = ?",
            (name,),
        )
        namespace = None if row is None else parse_space_document(row.document, backend.label)
    if row is None or namespace is None:
        raise KvmnnError(f"{backend.label}: there is no session {repr_short(name)}")
    try:
        return namespace, unpack_session_ids(row.ids)
    except (zlib.error, TypeError, ValueError) as error:
        raise SourceError(f"{backend.label}: session {repr_short(name)} is damaged: {error}") from None


def list_sessions(backend: DirectoryBackendBase) -> list[str]:
    """All names."""
    with backend.index.begin_reading() as cursor:
        return [row.value for row in cursor.iter_rows(WordRow, "SELECT name FROM session ORDER BY name")]


def delete_session(backend: DirectoryBackendBase, name: str) -> None:
    """Forget a session; errors as `get_session`."""
    validate_session_name(name)
    with backend.index.begin_writing() as cursor:
        if cursor.execute("DELETE FROM session WHERE name = ?", (name,)) == 0:
            raise KvmnnError(f"{backend.label}: there is no session {repr_short(name)}")
        backend.recovery_files.delete_session(name)


def pin(backend: DirectoryBackendBase, namespace: Namespace, ids: Ids) -> bool:
    """Pin the unit with the end of a text: what leads to it stays with it. Whether it was not pinned before.

    Raises
    ------
    KvmnnError
        Where the end is not stored any more.
    """
    sequence = TokenSequence(
        namespace.key,
        ids,
        compute_block_keys(namespace.key, ids, backend.block_tokens),
        backend.block_tokens,
        namespace.needs_state,
    )
    sequence_key = compute_sequence_key(namespace.key, ids)
    with backend.index.begin_writing() as cursor:
        unit = backend.make_lookup(cursor).last_unit(sequence)
        if unit is None:
            stored_tokens = backend.make_lookup(cursor).find_prefix(sequence).tokens
            raise KvmnnError(f"{backend.label}: holds only {stored_tokens:,} tokens of this text of {ids.size:,}")
        is_new = updates.insert_pin(cursor, sequence_key, unit, ids.size)
        if is_new:
            backend.recovery_files.save_pin(namespace, ids)
    return is_new


def unpin(backend: DirectoryBackendBase, namespace: Namespace, ids: Ids) -> bool:
    """Let go of a text; whether it was pinned."""
    sequence_key = compute_sequence_key(namespace.key, ids)
    with backend.index.begin_writing() as cursor:
        row = cursor.fetch_row(NumberRow, "SELECT unit FROM pin WHERE key = ?", (sequence_key,))
        if row is not None:
            cursor.execute("DELETE FROM pin WHERE key = ?", (sequence_key,))
            cursor.execute("UPDATE unit SET pins = pins - 1 WHERE id = ?", row)
            backend.recovery_files.delete_pin(sequence_key)
    return row is not None


_IS_SEQUENCE_END_SQL = """(NOT EXISTS (SELECT 1 FROM block JOIN branch ON branch.parent = block.key
    WHERE block.unit = unit.id AND (block.number + 1) * (SELECT block_tokens FROM state) = unit.tokens)
    AND (tokens = 0 OR NOT EXISTS (SELECT 1 FROM unit AS other
    WHERE other.parent = unit.id AND other.tokens = 0 AND other.start = unit.start + unit.tokens)))"""
"""Whether no unit goes on at the end of one; behind a tail none can. State of the text up to that end stands for it."""


_TEXT_BYTES = """(WITH RECURSIVE path(id, up, bytes) AS (SELECT unit.id, unit.parent, unit.bytes
    UNION SELECT before.id, before.parent, before.bytes FROM unit AS before JOIN path ON before.id = path.up)
    SELECT sum(bytes) FROM path)"""
"""Bytes of a unit and of all before it: UNION visits each once, also where a forged index has a circle."""


def list_entries(backend: DirectoryBackendBase) -> StoreListing:
    """The stored texts, the last used first."""
    with backend.index.begin_reading() as cursor:
        documents = cursor.iter_rows(NumberedDocumentRow, "SELECT id, document FROM space")
        namespaces = {row.number: parse_space_document(row.document, backend.label) for row in documents}
        rows = cursor.fetch_rows(
            SequenceRow,
            f"SELECT space, start + tokens, {_TEXT_BYTES}, pins, (SELECT tick FROM state) - used, id, tokens = 0 "
            f"FROM unit WHERE {_IS_SEQUENCE_END_SQL} ORDER BY used DESC, id DESC",
        )
        if not {row.namespace_id for row in rows} <= namespaces.keys():
            raise InvalidRowError("a unit has a space that is not there")
        total = cursor.require_row(NumberRow, "SELECT coalesce(sum(bytes), 0) FROM unit").value
    found_entries = []
    for number, tokens, nbytes, pins, uses_since, unit, has_state in rows:
        namespace = namespaces[number]
        found_entries.append(
            StoreEntry(
                model=namespace.model,
                dtype=namespace.dtype,
                tokens=tokens,
                bytes=nbytes,
                pinned=pins > 0,
                unused_for=uses_since,
                is_complete=bool(has_state) or not namespace.needs_state,
                last_ids=tuple(_read_last_ids(backend, unit)),
            )
        )
    return StoreListing(texts=tuple(found_entries), bytes=total)


def _read_last_ids(backend: DirectoryBackendBase, unit: int) -> list[int]:
    """The last ids in the file of a unit; none where it cannot be read."""
    data = backend.files.read_unit(unit)
    try:
        if data is None:
            return []
        ids = parse_state(data).ids if is_prefix_state(data) else parse_header(data).ids
    except DamagedUnitError:
        return []
    return [int(token_id) for token_id in ids[-MAX_LAST_IDS:]]


def collect_stats(backend: DirectoryBackendBase, requested_tokens: int, hit_tokens: int) -> StoreStats:
    """Counts of everything."""
    with backend.index.begin_reading() as cursor:
        sums = ", ".join(
            f"coalesce(sum({expression}), 0)" for expression in ("tokens = 0", "tokens", "bytes", _IS_SEQUENCE_END_SQL)
        )
        num_units, num_states, tokens, nbytes, num_sequences = cursor.require_row(
            TotalsRow, f"SELECT count(*), {sums} FROM unit"
        )
        state_bytes = cursor.require_row(NumberRow, "SELECT coalesce(sum(skip), 0) FROM unit WHERE tokens = 0").value
        num_blocks, num_pins, num_sessions = (
            cursor.require_row(NumberRow, f"SELECT count(*) FROM {table}").value
            for table in ("block", "pin", "session")
        )
        rows = cursor.iter_rows(
            NumberedDocumentRow,
            "SELECT sum(tokens), space.document FROM unit JOIN space ON space.id = unit.space GROUP BY space.id",
        )
        by_space = [(parse_space_document(row.document, backend.label), row.number) for row in rows]
    return StoreStats(
        texts=num_sequences,
        units=num_units - num_states,
        states=num_states,
        blocks=num_blocks,
        tokens=tokens,
        bytes=nbytes,
        raw_bytes=state_bytes + sum(namespace.token_bytes * number for namespace, number in by_space),
        index_bytes=backend.index.nbytes,
        models=tuple(sorted({namespace.model for namespace, _ in by_space})),
        pinned=num_pins,
        sessions=num_sessions,
        codec=backend.codec,
        asked_tokens=requested_tokens,
        found_tokens=hit_tokens,
    )


def validate_session_name(name: object) -> None:
    """Refuse what is no name of a session."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a session must be a string, not {type(name).__name__}")
    if not name or len(name) > _MAX_SESSION_NAME_CHARACTERS or not name.isprintable():
        raise KvmnnError(
            f"the name of a session is {repr_short(name)}: expected 1 to {_MAX_SESSION_NAME_CHARACTERS} printable "
            f"characters"
        )
