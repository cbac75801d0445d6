"""Maintenance of a store directory: deletion, garbage collection, verification, listings, pins and sessions."""

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
from ..backend import UnitSlice
from ..namespace import (
    KEY_BYTES,
    MAX_TOKENS,
    Ids,
    Namespace,
    TokenSequence,
    compute_block_keys,
    compute_sequence_key,
    to_sort_key,
    to_token_ids,
    validate_session_name,
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
from ..unit_codec import PrefixState, is_prefix_state, parse_state
from . import index_updates
from .backend import DirectoryBackendBase, RemovedUnits
from .files import SavedSequence, is_unit_name
from .index import InvalidRowError, Key, ValidatingCursor, parse_space_document

_UNITS_PER_QUERY = 64

_KEY_PATTERN = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_OWN_FOLDER_REGEX = re.compile("spaces|texts|tables|staging|units(/[0-9a-f]{3,})?")
_OWN_NAME_PATTERNS = {
    "": r"store\.json|rebuild\.lock|index(-\d{1,9})?\.sqlite(-wal|-shm|-journal|\.new(-journal)?)?",
    "spaces": rf"{_KEY_PATTERN}\.json",
    "texts": rf"{_KEY_PATTERN}\.(pin|session)",
    "tables": f"{_KEY_PATTERN}-{_KEY_PATTERN}",
    "staging": "(?!)",
}
"""Patterns of the names that kvmnn writes into each folder of a store."""

_IS_SEQUENCE_END_SQL = """(NOT EXISTS (SELECT 1 FROM block JOIN branch ON branch.parent = block.key
    WHERE block.unit = unit.id AND (block.number + 1) * (SELECT block_tokens FROM state) = unit.tokens)
    AND (tokens = 0 OR NOT EXISTS (SELECT 1 FROM unit AS other
    WHERE other.parent = unit.id AND other.tokens = 0 AND other.start = unit.start + unit.tokens)))"""
"""True if no unit continues at the end of a unit; nothing can follow a partial block. If a state unit exists for the
same end, it is listed instead."""

_SEQUENCE_BYTES_SQL = """(WITH RECURSIVE path(id, up, bytes) AS (SELECT unit.id, unit.parent, unit.bytes
    UNION SELECT before.id, before.parent, before.bytes FROM unit AS before JOIN path ON before.id = path.up)
    SELECT sum(bytes) FROM path)"""
"""Bytes of a unit and of all units before it. UNION visits each row once, so that a forged index with a circle ends."""

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
"""Queries for rows that contradict others or have values of a wrong type; an intact index has none."""


class DirectoryBackend(DirectoryBackendBase):
    """Store in a directory, with pins, sessions, listings and maintenance: implements `StoreBackend`.

    Parameters and errors are those of `DirectoryBackendBase`.
    """

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        is_pinned = False

        def choose_units(cursor: ValidatingCursor) -> list[int]:
            nonlocal is_pinned
            lookup = self.make_lookup(cursor)
            prefix_match, last_unit = lookup.find_prefix(sequence), lookup.find_last_unit(sequence)
            chosen_units: list[int] = []
            if last_unit is None:
                return chosen_units
            slices = (
                [UnitSlice(last_unit, 0, 0), *reversed(prefix_match.slices)]
                if sequence.needs_state
                else reversed(prefix_match.slices)
            )
            for unit_slice in slices:
                followers_sql = (
                    "SELECT count(*) FROM unit AS other WHERE other.parent = unit.id "
                    f"AND other.id NOT IN ({','.join(map(str, chosen_units))})"
                )
                tokens, pins, followers = cursor.require_row(
                    tuple[int, int, int],
                    f"SELECT tokens, pins, ({followers_sql}) FROM unit WHERE id = ?",
                    (unit_slice.unit,),
                )
                is_pinned = bool(pins)
                if pins or followers or tokens > unit_slice.skip + unit_slice.take:
                    break
                chosen_units.append(unit_slice.unit)
            return chosen_units

        removed = self.remove_units(choose_units)
        remaining_tokens = self.find_prefix(sequence).tokens
        kept_reason = explain_kept_part(removed.num_units, remaining_tokens, is_pinned=is_pinned)
        return CleanupResult(units=removed.num_units, bytes=removed.nbytes, kept=kept_reason)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """Remove unreferenced files, rows without files, and units until at most `max_bytes` are left.

        If the disk is too full to write to the index, unit files are removed first.
        """
        self.files.remove_stale()
        self.recovery_files.remove_stale()
        try:
            return self.change_index(lambda: self._remove_unreferenced(max_bytes))
        except OutputError:
            if self.read_only or max_bytes is None or not self.free_unit_files(max_bytes):
                raise
        return self.change_index(lambda: self._remove_unreferenced(max_bytes))

    def _remove_unreferenced(self, max_bytes: int | None) -> CleanupResult:
        with self.index.begin_writing() as cursor:  # no other process moves a staged file into place meanwhile
            unit_ids = set(cursor.list_numbers("SELECT id FROM unit"))
            self.recovery_files.delete_other_pins(
                [key for (key,) in cursor.iter_rows(tuple[Key], "SELECT key FROM pin")]
            )
            query = "SELECT key FROM space WHERE id IN (SELECT DISTINCT space FROM unit)"
            namespaces = {key.hex() for (key,) in cursor.iter_rows(tuple[Key], query)}
            unused_names = [
                name for name in self.recovery_files.list_table_names() if name.partition("-")[0] not in namespaces
            ]
            num_other_files, other_bytes = len(unused_names), self.recovery_files.delete_tables(unused_names)
            for path in self.files.iter_unknown_files(unit_ids):
                with suppress(OSError):
                    other_bytes += path.stat().st_size
                    path.unlink()
                    num_other_files += 1

        def choose_units(cursor: ValidatingCursor) -> list[int]:
            units = cursor.list_numbers("SELECT id FROM unit")
            without_files = [unit for unit in units if not self.files.make_path(unit).is_file()]
            return index_updates.list_with_all_followers(cursor, without_files)

        removed = self.remove_units(choose_units)
        evicted = RemovedUnits() if max_bytes is None else self.evict_units(max_bytes)
        with self.index.begin_reading() as cursor:
            remaining_bytes = index_updates.read_total_bytes(cursor)
        self.index.vacuum()
        return CleanupResult(
            units=removed.num_units + evicted.num_units,
            bytes=removed.nbytes + evicted.nbytes,
            other_files=num_other_files,
            other_bytes=other_bytes,
            kept=explain_pinned_bytes(remaining_bytes, max_bytes),
            foreign=tuple(sorted(_iter_foreign_files(self.folder))),
        )

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """Read, decode and compare every unit, after checking the index; then check the recovery files."""
        self.index.check_integrity()
        with self.index.begin_reading() as cursor:
            for query in _CONTRADICTION_QUERIES:
                if cursor.has_row(f"SELECT 1 FROM {query} LIMIT 1"):
                    raise InvalidRowError("its rows do not fit together")

        def find_holder(key: bytes) -> tuple[int, int] | None:
            with self.index.begin_reading() as cursor:
                query = "SELECT unit, number + 1 FROM block WHERE key = ?"
                return cursor.fetch_row(tuple[int, int], query, (key,))

        verifier = UnitVerifier(self.files.read_unit, find_holder, self.tables, self.block_tokens, threads)
        num_units = num_states = num_tokens = nbytes = last_unit = 0
        notes: list[str] = []
        lost_units: set[int] = set()
        while True:
            with self.index.begin_reading() as cursor:
                rows = cursor.fetch_rows(
                    tuple[int, int, int, int, str],
                    "SELECT unit.id, skip, start, tokens, space.document FROM unit LEFT JOIN space "
                    "ON space.id = unit.space WHERE unit.id > ? ORDER BY unit.id LIMIT ?",
                    (last_unit, _UNITS_PER_QUERY),
                )
                namespaces = {document: parse_space_document(document, self.label) for *_, document in rows}
            for unit_id, skip, start, unit_tokens, document in rows:
                last_unit = unit_id
                if unit_id in lost_units:
                    continue
                try:
                    if not unit_tokens:
                        state, state_bytes = verifier.verify_state(unit_id, namespaces[document])
                        self._check_state_rows(unit_id, state, state_bytes)
                        num_states += 1
                        nbytes += state_bytes
                        continue
                    unit = verifier.verify(unit_id, namespaces[document])
                    self._check_unit_rows(unit_id, skip, start, unit)
                except DamagedUnitError as error:
                    lost_units.update(self.quarantine(unit_id, str(error), notes))
                    continue
                num_units += 1
                num_tokens += unit.ids.size
                nbytes += unit.nbytes
            if not rows:
                break
        recovery_notes = tuple(self._repair_recovery_files())
        return StoreVerifyResult(
            units=num_units,
            tokens=num_tokens,
            bytes=nbytes,
            states=num_states,
            damaged=tuple(notes),
            lost=len(lost_units),
            beside=recovery_notes,
            anew=tuple(self.rebuilt_notes),
        )

    def _check_state_rows(self, unit_id: int, state: PrefixState, nbytes: int) -> None:
        """Raise the errors of `_check_unit_rows` for a state unit."""
        with self.index.begin_reading() as cursor:
            query = "SELECT start, bytes, skip FROM unit WHERE id = ?"
            row = cursor.fetch_row(tuple[int, int, int], query, (unit_id,))
            branch = cursor.fetch_row(tuple[Key], "SELECT parent FROM branch WHERE unit = ?", (unit_id,))
        if row is not None:  # else another process has removed it
            if branch != (state.key,) or row[0] != state.tokens:
                raise DamagedUnitError("is of another prefix than the index says")
            if row != (state.tokens, nbytes, state.raw_bytes):
                raise self.index.mark_damaged("it says other things of a state than its file")

    def _check_unit_rows(self, unit_id: int, skip: int, start: int, unit: Unit) -> None:
        """Raise `DamagedUnitError` if a unit has other blocks than its rows, or `DamagedIndexError`."""
        size = self.block_tokens
        keys = compute_block_keys(unit.parent, unit.ids, size)
        with self.index.begin_reading() as cursor:
            query = "SELECT key, number FROM block WHERE unit = ?"
            index_by_key = dict(cursor.fetch_rows(tuple[Key, int], query, (unit_id,)))
            query = "SELECT tokens, bytes FROM unit WHERE id = ?"
            unit_sizes = cursor.fetch_row(tuple[int, int], query, (unit_id,))
            query = "SELECT parent, text FROM branch WHERE unit = ?"
            branch = cursor.fetch_row(tuple[Key, bytes], query, (unit_id,))
        if unit_sizes is None:  # another process has removed it
            return
        own_blocks = {key: block_index for block_index, key in enumerate(keys) if block_index >= skip}
        if start != unit.start or index_by_key != own_blocks:
            raise DamagedUnitError("holds other blocks than the index says")
        parent = [unit.parent, *keys][skip : skip + 1]
        first_sort_key = to_sort_key(unit.ids[skip * size : (skip + 1) * size])
        if unit_sizes != (unit.ids.size, unit.nbytes) or [branch] != [(key, first_sort_key) for key in parent]:
            raise self.index.mark_damaged("it says other things of a unit than its file")

    def _repair_recovery_files(self) -> list[str]:
        """Rewrite the files of namespaces, pins and sessions that differ from the index; return one line for each."""
        is_read_only = self.read_only or bool(self.index.write_error)
        # a writing transaction: no other process pins meanwhile
        with self.index.begin_reading() if is_read_only else self.index.begin_writing() as cursor:
            damaged_paths = self.recovery_files.repair(self._iter_expected(cursor), write=not is_read_only)
        action_text = "open the store for writing (kvmnn store verify)" if is_read_only else "written again"
        return [f"{path}: is lost or damaged: {action_text}" for path in damaged_paths]

    def _iter_expected(self, cursor: ValidatingCursor) -> Iterator[Namespace | SavedSequence]:
        """Yield everything in the index that also has a recovery file."""
        for (document,) in cursor.fetch_rows(tuple[str], "SELECT document FROM space"):
            yield parse_space_document(document, self.label)
        for key, unit, tokens in cursor.fetch_rows(tuple[Key, int, int], "SELECT key, unit, tokens FROM pin"):
            pinned = self._read_pinned_sequence(cursor, unit, tokens)
            if pinned is not None and compute_sequence_key(pinned.namespace_key, pinned.ids) == key:
                yield pinned
        query = "SELECT name, space.key, ids FROM session JOIN space ON space.id = session.space"
        for name, namespace, packed in cursor.fetch_rows(tuple[str, Key, bytes], query):
            try:
                if not name:
                    raise ValueError("it has no name")
                yield SavedSequence(name, namespace, _unpack_session_ids(packed))
            except (KvmnnError, zlib.error, TypeError, ValueError) as error:
                raise InvalidRowError(f"a session is damaged: {error}") from None

    def _read_pinned_sequence(self, cursor: ValidatingCursor, unit: int, end_token: int) -> SavedSequence | None:
        """Read the ids of a sequence up to `end_token`, which lies in `unit`; None if a unit is unreadable."""
        parts: list[Ids] = []
        query = "SELECT parent, tokens FROM unit WHERE id = ?"
        while True:
            row = cursor.fetch_row(tuple[int | None, int], query, (unit,))
            if not parts and row is not None and not row[1]:  # a state unit, which pins a prefix with state
                unit = row[0] or 0
                row = cursor.fetch_row(tuple[int | None, int], query, (unit,))
            header = self.files.read_header(unit)
            if header is None or row is None or not header.start < end_token <= header.start + header.ids.size:
                return None
            parts.insert(0, header.ids[: end_token - header.start])
            if not header.start:
                return SavedSequence("", header.namespace_key, np.concatenate(parts))
            unit, end_token = row[0] or 0, header.start

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        with self.index.begin_reading() as cursor:
            sums = ", ".join(
                f"coalesce(sum({expression}), 0)"
                for expression in ("tokens = 0", "tokens", "bytes", _IS_SEQUENCE_END_SQL)
            )
            num_units, num_states, tokens, nbytes, num_sequences = cursor.require_row(
                tuple[int, int, int, int, int], f"SELECT count(*), {sums} FROM unit"
            )
            state_bytes = cursor.require_number("SELECT coalesce(sum(skip), 0) FROM unit WHERE tokens = 0")
            num_blocks, num_pins, num_sessions = (
                cursor.require_number(f"SELECT count(*) FROM {table}") for table in ("block", "pin", "session")
            )
            rows = cursor.iter_rows(
                tuple[str, int],
                "SELECT space.document, sum(tokens) FROM unit JOIN space ON space.id = unit.space GROUP BY space.id",
            )
            by_space = [(parse_space_document(document, self.label), number) for document, number in rows]
        return StoreStats(
            texts=num_sequences,
            units=num_units - num_states,
            states=num_states,
            blocks=num_blocks,
            tokens=tokens,
            bytes=nbytes,
            raw_bytes=state_bytes + sum(namespace.token_bytes * number for namespace, number in by_space),
            index_bytes=self.index.nbytes,
            models=tuple(sorted({namespace.model for namespace, _ in by_space})),
            pinned=num_pins,
            sessions=num_sessions,
            codec=self.codec,
            asked_tokens=requested_tokens,
            found_tokens=hit_tokens,
        )

    def list_entries(self) -> StoreListing:
        with self.index.begin_reading() as cursor:
            documents = cursor.iter_rows(tuple[int, str], "SELECT id, document FROM space")
            namespaces = {number: parse_space_document(document, self.label) for number, document in documents}
            rows = cursor.fetch_rows(
                tuple[int, int, int, int, int, int, int],
                f"SELECT space, start + tokens, {_SEQUENCE_BYTES_SQL}, pins, (SELECT tick FROM state) - used, id, "
                f"tokens = 0 FROM unit WHERE {_IS_SEQUENCE_END_SQL} ORDER BY used DESC, id DESC",
            )
            if not {number for number, *_ in rows} <= namespaces.keys():
                raise InvalidRowError("a unit has a space that is not there")
            total = cursor.require_number("SELECT coalesce(sum(bytes), 0) FROM unit")
        entries = (
            StoreEntry(
                model=namespaces[number].model,
                dtype=namespaces[number].dtype,
                tokens=tokens,
                bytes=nbytes,
                pinned=pins > 0,
                unused_for=uses_since,
                is_complete=bool(has_state) or not namespaces[number].needs_state,
                last_ids=tuple(self._read_last_ids(unit)),
            )
            for number, tokens, nbytes, pins, uses_since, unit, has_state in rows
        )
        return StoreListing(texts=tuple(entries), bytes=total)

    def _read_last_ids(self, unit: int) -> list[int]:
        """Return the last ids in the file of a unit; empty if the file is unreadable."""
        data = self.files.read_unit(unit)
        try:
            if data is None:
                return []
            ids = parse_state(data).ids if is_prefix_state(data) else parse_header(data).ids
        except DamagedUnitError:
            return []
        return [int(token_id) for token_id in ids[-MAX_LAST_IDS:]]

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        sequence = namespace.make_sequence(ids, self.block_tokens)
        sequence_key = compute_sequence_key(namespace.key, ids)
        with self.index.begin_writing() as cursor:
            lookup = self.make_lookup(cursor)
            unit = lookup.find_last_unit(sequence)
            if unit is None:
                stored_tokens = lookup.find_prefix(sequence).tokens
                raise KvmnnError(f"{self.label}: holds only {stored_tokens:,} tokens of this text of {ids.size:,}")
            is_new = index_updates.insert_pin(cursor, sequence_key, unit, ids.size)
            if is_new:
                self.recovery_files.save_sequence(SavedSequence("", namespace.key, ids))
        return is_new

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        sequence_key = compute_sequence_key(namespace.key, ids)
        with self.index.begin_writing() as cursor:
            unit = cursor.fetch_number("SELECT unit FROM pin WHERE key = ?", (sequence_key,))
            if unit is not None:
                cursor.execute("DELETE FROM pin WHERE key = ?", (sequence_key,))
                cursor.execute("UPDATE unit SET pins = pins - 1 WHERE id = ?", (unit,))
                self.recovery_files.delete_pin(sequence_key)
        return unit is not None

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        validate_session_name(name)
        with self.index.begin_writing() as cursor:
            index_updates.save_session(cursor, name, namespace, ids)
            self.recovery_files.save_namespace(namespace)
            self.recovery_files.save_sequence(SavedSequence(name, namespace.key, ids))

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        validate_session_name(name)
        with self.index.begin_reading() as cursor:
            row = cursor.fetch_row(
                tuple[str, bytes],
                "SELECT space.document, session.ids FROM session JOIN space ON space.id = session.space WHERE name = ?",
                (name,),
            )
            if row is None:
                raise KvmnnError(f"{self.label}: there is no session {repr_short(name)}")
            namespace = parse_space_document(row[0], self.label)
        try:
            return namespace, _unpack_session_ids(row[1])
        except (zlib.error, TypeError, ValueError) as error:
            raise SourceError(f"{self.label}: session {repr_short(name)} is damaged: {error}") from None

    def list_sessions(self) -> list[str]:
        with self.index.begin_reading() as cursor:
            return [name for (name,) in cursor.iter_rows(tuple[str], "SELECT name FROM session ORDER BY name")]

    def delete_session(self, name: str) -> None:
        validate_session_name(name)
        with self.index.begin_writing() as cursor:
            if cursor.execute("DELETE FROM session WHERE name = ?", (name,)) == 0:
                raise KvmnnError(f"{self.label}: there is no session {repr_short(name)}")
            self.recovery_files.delete_session(name)


def _iter_foreign_files(folder: Path) -> Iterator[str]:
    """Yield the names of files and folders in a store that kvmnn did not write; they are reported and never removed."""
    for walked_folder, folders, files in os.walk(folder):
        relative_folder = Path(walked_folder).relative_to(folder)
        folders[:] = [name for name in folders if not TEMPORARY_NAME_PATTERN.fullmatch(name)]
        for name in [name for name in folders if not _OWN_FOLDER_REGEX.fullmatch((relative_folder / name).as_posix())]:
            folders.remove(name)
            yield f"{relative_folder / name}/"
        for name in files:
            path = relative_folder / name
            pattern = _OWN_NAME_PATTERNS.get("" if path.parent == Path() else str(path.parent))
            is_own = re.fullmatch(pattern, name) is not None if pattern else is_unit_name(path)
            if not is_own and not TEMPORARY_NAME_PATTERN.fullmatch(name):
                yield str(path)


def _unpack_session_ids(packed: bytes) -> Ids:
    """Decompress the ids of a session row; a damaged row raises `zlib.error`, `TypeError` or `ValueError`."""
    return to_token_ids(np.frombuffer(zlib.decompressobj().decompress(packed, 4 * MAX_TOKENS), "<u4"))
