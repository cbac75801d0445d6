"""Files in the folder of a store that kvmnn has not made: they are named, and left alone.

The files beside an index compared with what it knows: without them it could not be made anew.

What a store directory holds besides K and V: pins, sessions; and what there is of everything.

What keeps a store directory in order: deleting, cleaning, verifying.

A directory as the units of a store: finding and storing, and all that looks after them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..._util.validation import repr_short
from ...errors import KvmnnError, OutputError, SourceError
from ...files.temporary import TEMPORARY_NAME_PATTERN
from ..lookup import TokenSequence, UnitSlice
from ..namespace import (
    KEY_BYTES,
    MAX_TOKENS,
    Ids,
    Namespace,
    compute_block_keys,
    compute_sequence_key,
    to_sort_key,
    to_token_ids,
)
from ..read_path import UnitVerifier
from ..results import (
    MAX_LAST_IDS,
    CleanupResult,
    StoreEntry,
    StoreListing,
    StoreStats,
    StoreVerifyResult,
    explain_kept_part,
    explain_pinned_bytes,
)
from ..unit import DamagedUnitError, Unit, parse_header
from ..unit_codec import decode_state, is_prefix_state, parse_state
from . import index_updates
from .backend import DirectoryBackendBase
from .files import SavedSequence, is_unit_name
from .index import (
    BlockRow,
    BranchKeyRow,
    InvalidRowError,
    KeyRow,
    NumberedDocumentRow,
    NumberRow,
    OptionalNumberRow,
    PinRow,
    SequenceRow,
    SessionDocumentRow,
    SessionNameRow,
    StateRow,
    TotalsRow,
    UnitRow,
    UnitSizesRow,
    UnitUseRow,
    ValidatingCursor,
    WordRow,
    parse_space_document,
)

_KEY_PATTERN = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_OWN_NAME_PATTERNS = {
    "": r"store\.json|rebuild\.lock|index(-\d{1,9})?\.sqlite(-wal|-shm|-journal|\.new(-journal)?)?",
    "spaces": rf"{_KEY_PATTERN}\.json",
    "texts": rf"{_KEY_PATTERN}\.(pin|session)",
    "tables": f"{_KEY_PATTERN}-{_KEY_PATTERN}",
    "staging": "(?!)",
}
"""By folders, the names in them."""
_UNITS_FOLDER = "units"
_UNIT_FOLDER_REGEX = re.compile(r"units/[0-9a-f]{3,}")


def iter_foreign_files(folder: Path) -> Iterator[str]:
    """Their names below the folder."""
    for walked_folder, folders, files in os.walk(folder):
        relative_folder = Path(walked_folder).relative_to(folder)
        folders[:] = [name for name in folders if not TEMPORARY_NAME_PATTERN.fullmatch(name)]
        for name in [name for name in folders if not _may_have_files(relative_folder / name)]:
            folders.remove(name)
            yield f"{relative_folder / name}/"
        for name in files:
            path = relative_folder / name
            if not (TEMPORARY_NAME_PATTERN.fullmatch(name) or _is_own_file(path)):
                yield str(path)


def _may_have_files(path: Path) -> bool:
    """Return whether kvmnn makes this folder."""
    return (
        str(path) in _OWN_NAME_PATTERNS
        or path == Path(_UNITS_FOLDER)
        or _UNIT_FOLDER_REGEX.fullmatch(str(path)) is not None
    )


def _is_own_file(path: Path) -> bool:
    pattern = _OWN_NAME_PATTERNS.get("" if path.parent == Path() else str(path.parent))
    return re.fullmatch(pattern, path.name) is not None if pattern else is_unit_name(path)


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


_MAX_SESSION_NAME_CHARACTERS = 256


def save_session(backend: DirectoryBackendBase, name: str, namespace: Namespace, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    validate_session_name(name)
    with backend.index.begin_writing() as cursor:
        index_updates.save_session(cursor, name, namespace, ids)
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
        is_new = index_updates.insert_pin(cursor, sequence_key, unit, ids.size)
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


_UNITS_PER_QUERY = 64


def delete_sequence(backend: DirectoryBackendBase, sequence: TokenSequence) -> CleanupResult:
    """Remove the units of a text from its end on, up to one that others continue, or that is pinned."""

    is_pinned = False

    def choose_units(cursor: ValidatingCursor) -> list[int]:
        nonlocal is_pinned
        lookup = backend.make_lookup(cursor)
        prefix_match, last_unit = lookup.find_prefix(sequence), lookup.last_unit(sequence)
        chosen_units: list[int] = []
        if last_unit is None:
            return chosen_units
        slices = (
            [UnitSlice(last_unit, 0, 0), *reversed(prefix_match.slices)]
            if sequence.needs_state
            else reversed(prefix_match.slices)
        )
        for unit_slice in slices:
            other_units_sql = f"other.parent = unit.id AND other.id NOT IN ({','.join(map(str, chosen_units))})"
            tokens, pins, followers = cursor.require_row(
                UnitUseRow,
                f"SELECT tokens, pins, (SELECT count(*) FROM unit AS other WHERE {other_units_sql}) FROM unit WHERE id "
                f"= ?",
                (unit_slice.unit,),
            )
            is_pinned = bool(pins)
            if pins or followers or tokens > unit_slice.skip + unit_slice.take:
                break
            chosen_units.append(unit_slice.unit)
        return chosen_units

    removed = backend.remove_units(choose_units)
    remaining_tokens = backend.find_prefix(sequence).tokens
    kept_reason = explain_kept_part(removed.num_units, remaining_tokens, is_pinned=is_pinned)
    return CleanupResult(units=removed.num_units, bytes=removed.nbytes, kept=kept_reason)


def collect_garbage(backend: DirectoryBackendBase, max_bytes: int | None) -> CleanupResult:
    """Remove what nothing refers to, what refers to no file, and what has to go for `max_bytes`.

    Where the disk is too full to write to the index files go first.
    """
    backend.files.remove_stale()
    backend.recovery_files.remove_stale()
    try:
        return backend.change_index(lambda: _collect_garbage(backend, max_bytes))
    except OutputError:
        if backend.read_only or max_bytes is None or not backend.free_unit_files(max_bytes):
            raise
    return backend.change_index(lambda: _collect_garbage(backend, max_bytes))


def _collect_garbage(backend: DirectoryBackendBase, max_bytes: int | None) -> CleanupResult:
    with backend.index.begin_writing() as cursor:  # nobody gives a file its name meanwhile
        unit_ids = {row.value for row in cursor.iter_rows(NumberRow, "SELECT id FROM unit")}
        backend.recovery_files.delete_other_pins([row.key for row in cursor.iter_rows(KeyRow, "SELECT key FROM pin")])
        used_keys = cursor.iter_rows(KeyRow, "SELECT key FROM space WHERE id IN (SELECT DISTINCT space FROM unit)")
        namespaces = {row.key.hex() for row in used_keys}
        unused_names = [
            name for name in backend.recovery_files.list_table_names() if name.partition("-")[0] not in namespaces
        ]
        num_other_files, other_bytes = len(unused_names), backend.recovery_files.delete_tables(unused_names)
        for path in backend.files.iter_unknown_files(unit_ids):
            with suppress(OSError):
                other_bytes += path.stat().st_size
                path.unlink()
                num_other_files += 1

    def choose_units(cursor: ValidatingCursor) -> list[int]:
        chosen_units: list[int] = []
        for (number,) in cursor.fetch_rows(NumberRow, "SELECT id FROM unit"):
            if not backend.files.make_path(number).is_file():
                chosen_units += [
                    follower
                    for follower in index_updates.list_with_followers(cursor, number)
                    if follower not in chosen_units
                ]
        return chosen_units

    removed_units = backend.remove_units(choose_units)
    evicted = backend.evict_units(max_bytes) if max_bytes is not None else None
    with backend.index.begin_reading() as cursor:
        remaining_bytes = index_updates.read_total_bytes(cursor)
    backend.index.vacuum()
    return CleanupResult(
        units=removed_units.num_units + (evicted.num_units if evicted else 0),
        bytes=removed_units.nbytes + (evicted.nbytes if evicted else 0),
        other_files=num_other_files,
        other_bytes=other_bytes,
        kept=explain_pinned_bytes(remaining_bytes, max_bytes),
        foreign=tuple(sorted(iter_foreign_files(backend.folder))),
    )


def verify_units(backend: DirectoryBackendBase, threads: int | None) -> StoreVerifyResult:
    """Read, decode and compare every unit, the index first; then what lies beside the index."""
    backend.index.check_integrity()
    _check_consistency(backend)
    verifier = UnitVerifier(
        backend.files.read_unit,
        lambda key: _find_block_holder(backend, key),
        backend.tables,
        backend.block_tokens,
        threads,
    )
    num_units = num_states = num_tokens = nbytes = last_unit = 0
    notes: list[str] = []
    lost_units: set[int] = set()
    while True:
        with backend.index.begin_reading() as cursor:
            rows = cursor.fetch_rows(
                UnitRow,
                "SELECT unit.id, skip, start, tokens, space.document FROM unit LEFT JOIN space "
                "ON space.id = unit.space WHERE unit.id > ? ORDER BY unit.id LIMIT ?",
                (last_unit, _UNITS_PER_QUERY),
            )
            namespaces = {row.document: parse_space_document(row.document, backend.label) for row in rows}
        for unit_id, skip, start, unit_tokens, document in rows:
            last_unit = unit_id
            if unit_id in lost_units:
                continue
            try:
                if not unit_tokens:
                    nbytes += _verify_state_unit(backend, unit_id, namespaces[document])
                    num_states += 1
                    continue
                unit = verifier.verify(unit_id, namespaces[document])
                _check_rows(backend, unit_id, skip, start, unit)
            except DamagedUnitError as error:
                lost_units.update(backend.quarantine(unit_id, str(error), notes))
                continue
            num_units += 1
            num_tokens += unit.ids.size
            nbytes += unit.nbytes
        if not rows:
            break
    recovery_notes = tuple(repair_recovery_files(backend))
    return StoreVerifyResult(
        units=num_units,
        tokens=num_tokens,
        bytes=nbytes,
        states=num_states,
        damaged=tuple(notes),
        lost=len(lost_units),
        beside=recovery_notes,
        anew=tuple(backend.rebuilt_notes),
    )


def _verify_state_unit(backend: DirectoryBackendBase, unit_id: int, namespace: Namespace) -> int:
    """Decode and compare the state of a prefix; bytes of its file. Errors as `_check_rows`."""
    data = backend.files.read_unit(unit_id)
    if data is None:
        raise DamagedUnitError("its file is gone or cannot be read")
    state = parse_state(data)
    decode_state(state, namespace)
    with backend.index.begin_reading() as cursor:
        row = cursor.fetch_row(StateRow, "SELECT start, bytes, skip FROM unit WHERE id = ?", (unit_id,))
        branch = cursor.fetch_row(BranchKeyRow, "SELECT parent, text FROM branch WHERE unit = ?", (unit_id,))
    if row is not None:  # else another process has removed it
        if branch is None or branch.parent != state.key or row.tokens != state.tokens:
            raise DamagedUnitError("is of another prefix than the index says")
        if row != (state.tokens, data.size, state.raw_bytes):
            raise backend.index.mark_damaged("it says other things of a state than its file")
    return int(data.size)


_CONTRADICTION_QUERIES = (
    "unit LEFT JOIN branch ON branch.unit = unit.id WHERE branch.unit IS NULL",
    "branch WHERE unit NOT IN (SELECT id FROM unit)",
    "block WHERE unit NOT IN (SELECT id FROM unit)",
    "unit WHERE children <> (SELECT count(*) FROM unit AS other WHERE other.parent = unit.id)",
    "unit WHERE pins <> 0 AND id NOT IN (SELECT unit FROM pin)",
    "(SELECT unit, count(*) AS n FROM pin WHERE unit <> 0 GROUP BY unit) AS kept LEFT JOIN unit ON unit.id = kept.unit "
    "WHERE unit.pins IS NOT kept.n",
    "unit WHERE space NOT IN (SELECT id FROM space)",
    "space WHERE typeof(key) <> 'blob' OR typeof(document) <> 'text'",
    "pin WHERE typeof(key) <> 'blob'",
    "state WHERE bytes <> (SELECT total(bytes) FROM unit)",
)
"""Rows that contradict others, or hold what they cannot hold."""


def _check_consistency(backend: DirectoryBackendBase) -> None:
    """`DamagedIndexError` where the index contradicts itself; it is made anew then."""
    with backend.index.begin_reading() as cursor:
        for query in _CONTRADICTION_QUERIES:
            if cursor.has_row(f"SELECT 1 FROM {query} LIMIT 1"):
                raise InvalidRowError("its rows do not fit together")


def _find_block_holder(backend: DirectoryBackendBase, key: bytes) -> tuple[int, int] | None:
    """The unit that has a block, and how many of its blocks there are up to it."""
    with backend.index.begin_reading() as cursor:
        row = cursor.fetch_row(BlockRow, "SELECT key, unit, number FROM block WHERE key = ?", (key,))
    return None if row is None else (row.unit, row.number + 1)


def _check_rows(backend: DirectoryBackendBase, unit_id: int, skip: int, start: int, unit: Unit) -> None:
    """`DamagedUnitError` where the index says other blocks of a unit than its file; `DamagedIndexError` for the
    rest.
    """
    size = backend.block_tokens
    keys = compute_block_keys(unit.parent, unit.ids, size)
    with backend.index.begin_reading() as cursor:
        rows = cursor.fetch_rows(BlockRow, "SELECT key, unit, number FROM block WHERE unit = ?", (unit_id,))
        unit_sizes = cursor.fetch_row(UnitSizesRow, "SELECT tokens, bytes FROM unit WHERE id = ?", (unit_id,))
        branch = cursor.fetch_row(BranchKeyRow, "SELECT parent, text FROM branch WHERE unit = ?", (unit_id,))
    if unit_sizes is None:  # another process has removed it
        return
    if start != unit.start or {row.key: row.number for row in rows} != {
        key: block_index for block_index, key in enumerate(keys) if block_index >= skip
    }:
        raise DamagedUnitError("holds other blocks than the index says")
    parent = [unit.parent, *keys][skip : skip + 1]
    first_sort_key = to_sort_key(unit.ids[skip * size : (skip + 1) * size])
    if unit_sizes != (unit.ids.size, unit.nbytes) or [branch] != [(key, first_sort_key) for key in parent]:
        raise backend.index.mark_damaged("it says other things of a unit than its file")


class DirectoryBackend(DirectoryBackendBase):
    """As `StoreBackend`; parameters and errors as `DirectoryBackendBase`."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """As `upkeep.delete`."""
        return delete_sequence(self, sequence)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """As `upkeep.clean`."""
        return collect_garbage(self, max_bytes)

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """As `upkeep.verify`."""
        return verify_units(self, threads)

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        """As `catalog.stats`."""
        return collect_stats(self, requested_tokens, hit_tokens)

    def list_entries(self) -> StoreListing:
        """As `catalog.entries`."""
        return list_entries(self)

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `catalog.pin`."""
        return pin(self, namespace, ids)

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `catalog.unpin`."""
        return unpin(self, namespace, ids)

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """As `catalog.note_session`."""
        save_session(self, name, namespace, ids)

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """As `catalog.session`."""
        return get_session(self, name)

    def list_sessions(self) -> list[str]:
        """As `catalog.sessions`."""
        return list_sessions(self)

    def delete_session(self, name: str) -> None:
        """As `catalog.forget_session`."""
        delete_session(self, name)
