"""Core of a store in a directory: units as files, found by an SQLite index."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..._util.text import pluralize
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, OutputError, SourceError
from ...files.atomic import wrap_os_errors
from ..backend import (
    MAX_BLOCK_TOKENS,
    AddResult,
    ConcurrentUpdateError,
    NewUnit,
    PrefixMatch,
    StateLocation,
    StoreSettings,
    explain_settings,
)
from ..namespace import Namespace, TokenSequence
from ..unit import TableSetCache, TableSets, UnitHeader
from ..unit_codec import PrefixState
from . import index_updates
from .files import SETTINGS_FILE, RecoveryFiles, StagedFiles, UnitFiles
from .index import (
    INDEX_FILE,
    DamagedIndexError,
    InvalidRowError,
    StoreIndex,
    ValidatingCursor,
    find_newest_index,
    parse_space_document,
)
from .index_updates import rebuild_index
from .lookup import Lookup, find_stored_blocks

_MAX_NAMESPACES = 4096
_MAX_SAMPLED_UNITS = 64
"""Units from which a lost codec is inferred."""
_TOUCH_INTERVAL_SECONDS = 1.0
"""Uses are collected this long before they are written."""

T = TypeVar("T")


class RemovedUnits(NamedTuple):
    """Number of units that were removed, and bytes of their files."""

    num_units: int = 0
    nbytes: int = 0


class _Addition:
    """Units that a transaction adds and removes."""

    def __init__(self, files: UnitFiles) -> None:
        self._files = files
        self.placed_units: list[int] = []
        self.removed_units: list[int] = []
        self.stored_bytes = self.removed_bytes = 0

    def place(self, staged_path: Path, unit: int, nbytes: int) -> None:
        """Move the file of a unit into its place."""
        self._files.move_into_place(staged_path, unit)
        self.placed_units.append(unit)
        self.stored_bytes += nbytes


class DirectoryBackendBase:
    """Unit files and their index in one folder, which is created if `settings` for a new store are specified."""

    def __init__(self, folder: Path, *, settings: StoreSettings | None, max_bytes: int | None, read_only: bool) -> None:
        self.folder = folder
        self.label = str(folder)
        self.read_only = read_only
        self._max_bytes = max_bytes
        if folder.exists() and not folder.is_dir():
            raise SourceError(f"{folder}: is not a prefix store, but a file: expected a directory")
        is_new = not folder.exists()
        self.recovery_files = RecoveryFiles(folder)
        if settings is not None and not read_only:
            self._create_folder()
        self.notes: list[str] = []
        self.rebuilt_notes: list[str] = []
        """The notes about what was damaged and rebuilt."""
        self.tables = TableSetCache(self.recovery_files.read_tables, self.recovery_files.list_table_names)
        self.files = UnitFiles(folder)
        self._cached_namespaces: tuple[int | None, list[Namespace]] = None, []
        self._damaged_units: set[int] = set()
        block_tokens = settings.block_tokens if settings else None
        try:
            self.index = StoreIndex(folder, block_tokens=block_tokens, read_only=read_only, rebuild=self._rebuild_index)
        except OutputError:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
            raise
        if self.index.write_error:
            self.notes.append(f"{self.index.path}: cannot be written ({self.index.write_error}): nothing can be stored")
        try:
            self.block_tokens = self._read_block_tokens()
        except DamagedIndexError:
            if read_only:
                raise
            self.block_tokens = self._read_block_tokens()  # the index was rebuilt
        if not read_only and not self.recovery_files.exists:
            for namespace in self.list_namespaces():
                self.recovery_files.save_namespace(namespace)
            with self.index.begin_reading() as cursor:
                has_units = cursor.has_row("SELECT 1 FROM unit LIMIT 1")
            codec = settings.codec if settings and not has_units else "frames"  # the first stores had frames
            self.recovery_files.save_settings(StoreSettings(self.block_tokens, codec))
        self.codec = self._read_codec()
        self._touched_units: set[int] = set()
        self._last_touch_time = time.monotonic()
        self._lock = threading.Lock()

    def list_namespaces(self) -> list[Namespace]:
        with self.index.begin_reading() as cursor:
            (last_id,) = cursor.require_row(tuple[int | None], "SELECT max(id) FROM space")
            if last_id != self._cached_namespaces[0]:
                query = "SELECT document FROM space ORDER BY id LIMIT ?"
                rows = cursor.iter_rows(tuple[str], query, (_MAX_NAMESPACES,))
                self._cached_namespaces = last_id, [parse_space_document(row[0], self.label) for row in rows]
        return self._cached_namespaces[1]

    def ensure_namespace(self, namespace: Namespace) -> None:
        """Do nothing: the index contains the namespaces of its units."""

    def has_sequences(self, namespace: Namespace) -> bool:
        with self.index.begin_reading() as cursor:
            if namespace.layers:
                return cursor.has_row("SELECT 1 FROM branch WHERE parent = ? LIMIT 1", (namespace.key,))
            query = "SELECT 1 FROM unit JOIN space ON space.id = unit.space WHERE space.key = ? LIMIT 1"
            return cursor.has_row(query, (namespace.key,))

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        with self.index.begin_reading() as cursor:
            return self.make_lookup(cursor).find_prefix(sequence)

    def make_lookup(self, cursor: ValidatingCursor) -> Lookup:
        """Return the queries of the index for a transaction."""
        return Lookup(cursor, self.files.read_header, self._damaged_units.__contains__)

    def read_units(self, units: Sequence[int]) -> list[Bytes | None]:
        return [self.files.read_unit(unit) for unit in units]

    def get_cached(self, unit: int) -> Bytes | None:
        return self.files.read_unit(unit)

    def stage(self) -> StagedFiles:
        return self.files.stage()

    def add_units(
        self, namespace: Namespace, sequence: TokenSequence, new: Sequence[NewUnit], tables: TableSets | None
    ) -> AddResult:
        """Add units of a sequence, in order, and the tables that some of them need: all or none."""

        def has_all(cursor: ValidatingCursor) -> bool:
            return self.make_lookup(cursor).find_prefix(sequence).tokens == sequence.ids.size

        with self._add(namespace, sequence) as (cursor, namespace_id, addition):
            if tables is not None:
                self.recovery_files.save_tables(namespace, tables)
            index_updates.advance_clock(cursor)
            for unit in new:
                self._check_history(cursor, sequence, unit, addition.placed_units)
                unit_id, superfluous_units = index_updates.insert_unit(
                    cursor, namespace_id, unit, sequence, lambda: has_all(cursor)
                )
                if unit_id:
                    assert isinstance(unit.staged, Path)
                    addition.place(unit.staged, unit_id, unit.nbytes)
                index_updates.delete_units(cursor, superfluous_units)
                addition.removed_units += superfluous_units
        return AddResult(addition.stored_bytes, addition.removed_bytes)

    @contextmanager
    def _add(self, namespace: Namespace, sequence: TokenSequence) -> Iterator[tuple[ValidatingCursor, int, _Addition]]:
        """Open a transaction that adds units, then evicts others; yield it with the row id of the namespace."""
        addition = _Addition(self.files)
        try:
            with self.index.begin_writing() as cursor:
                self._save_touched(cursor)
                bytes_before = index_updates.read_total_bytes(cursor)
                self.recovery_files.save_namespace(namespace)
                yield cursor, index_updates.ensure_namespace_id(cursor, namespace), addition
                index_updates.restore_pins(cursor, self.make_lookup(cursor), sequence)
                if self._max_bytes is not None:
                    addition.removed_units += index_updates.evict_units(cursor, self._max_bytes)
                bytes_after = index_updates.read_total_bytes(cursor)
                addition.removed_bytes = bytes_before + addition.stored_bytes - bytes_after
        except BaseException:
            self.files.delete_units(addition.placed_units)
            raise
        self.files.delete_units(addition.removed_units)

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        with self.index.begin_reading() as cursor:
            return self.make_lookup(cursor).find_state(sequence, tokens)

    def add_state(self, namespace: Namespace, sequence: TokenSequence, state: PrefixState) -> AddResult:
        pieces = state.to_pieces()
        nbytes = sum(map(len, pieces))
        with self.files.stage() as staging:
            path = staging.write(pieces)
            with self._add(namespace, sequence) as (cursor, namespace_id, addition):
                parent = None
                if namespace.layers:
                    end = sequence.get_end(sequence.ids.size)
                    parent = self.make_lookup(cursor).find_end(namespace.key, *end, sequence.block_tokens)
                    if parent is None:
                        raise ConcurrentUpdateError("the blocks before a state are gone")
                unit_id = index_updates.insert_state(cursor, namespace_id, state, nbytes, parent)
                if unit_id:
                    addition.place(path, unit_id, nbytes)
        return AddResult(addition.stored_bytes, addition.removed_bytes)

    def _check_history(
        self, cursor: ValidatingCursor, sequence: TokenSequence, new_unit: NewUnit, placed_units: Sequence[int]
    ) -> None:
        """Raise `ConcurrentUpdateError` if another process has replaced the blocks that a unit refers to."""
        end_block = new_unit.start // sequence.block_tokens
        headers: dict[int, UnitHeader | None] = {}
        keys = sequence.keys[end_block - len(new_unit.history_sums) : end_block]
        stored = find_stored_blocks(cursor, keys)
        for key, expected_sum in zip(keys, new_unit.history_sums, strict=True):
            unit, block_index = stored.get(key, (0, 0))
            if unit in placed_units:
                continue
            if unit not in headers:
                headers[unit] = self.files.read_header(unit)
            header = headers[unit]
            if (
                header is None
                or header.dense is None
                or header.dense.block_sums[block_index : block_index + 1] != (expected_sum,)
            ):
                raise ConcurrentUpdateError("the blocks before a unit hold other rows by now")

    def touch(self, units: Iterable[int], *, immediately: bool = False) -> None:
        """Record that units were used; written together after a second, or `immediately`."""
        if self.read_only:
            return
        with self._lock:
            self._touched_units.update(units)
            is_due = self._touched_units and (
                immediately or time.monotonic() - self._last_touch_time >= _TOUCH_INTERVAL_SECONDS
            )
        if is_due:
            # a full disk must not stop reads
            with suppress(KvmnnError), self.index.begin_writing() as cursor:
                self._save_touched(cursor)

    def _save_touched(self, cursor: ValidatingCursor) -> None:
        """Write the pending uses; called before each change, so that the order of uses is correct."""
        with self._lock:
            unit_ids, self._touched_units = sorted(self._touched_units), set()
            self._last_touch_time = time.monotonic()
        if unit_ids:
            index_updates.touch(cursor, unit_ids)

    def quarantine(self, unit: int, reason: str, notes: list[str]) -> list[int]:
        """Remove a damaged unit and all units that follow it; in a read-only store, ignore it from now on.

        `notes` stay unchanged if another process has removed the unit already.
        """
        with self.index.begin_reading() as cursor:
            row = cursor.fetch_row(tuple[int, int], "SELECT start, tokens FROM unit WHERE id = ?", (unit,))
            start, tokens = row or (0, 0)
            followers = index_updates.list_with_followers(cursor, unit)[:-1]
        self._damaged_units.add(unit)
        if row is None:
            return followers
        path = self.files.make_path(unit)
        action_text = "is passed over" if self.read_only else "was removed"
        tokens_text = f"windows and state behind {start:,} tokens of a text"
        if tokens:
            tokens_text = f"tokens {start:,} to {start + tokens - 1:,} of a text"
        tokens_text += f", with {pluralize(len(followers), 'unit')} behind them" if followers else ""
        notes.append(f"{path}: damaged, {action_text} ({tokens_text}): {reason}")
        if not self.read_only:
            with suppress(OutputError):  # the disk is full: the unit is only ignored
                self.remove_units(lambda cursor: index_updates.list_with_followers(cursor, unit))
        return followers

    def remove_units(self, choose: Callable[[ValidatingCursor], Sequence[int]]) -> RemovedUnits:
        """Remove the units that `choose` returns, inside a transaction.

        On a full disk their files are deleted first, which frees space for the change of the index.
        """

        def remove_chosen(choose: Callable[[ValidatingCursor], Sequence[int]]) -> RemovedUnits:
            with self.index.begin_writing() as cursor:
                removed_units = choose(cursor)
                nbytes = index_updates.delete_units(cursor, removed_units)
            self.files.delete_units(removed_units)
            return RemovedUnits(len(removed_units), nbytes)

        try:
            return self.change_index(lambda: remove_chosen(choose))
        except OutputError:
            if self.read_only:
                raise
        with self.index.begin_reading() as cursor:
            chosen_units = choose(cursor)
        self.files.delete_units(chosen_units)  # without these files `choose` would find fewer units
        return self.change_index(
            lambda: remove_chosen(lambda cursor: index_updates.list_with_all_followers(cursor, chosen_units))
        )

    def change_index(self, change: Callable[[], T]) -> T:
        """Run a change of the index; if the disk has no space for a journal, change the index in place."""
        try:
            return change()
        except OutputError as error:
            if self.read_only:
                raise
            try:
                with self.index.write_in_place():
                    return change()
            except KvmnnError:
                raise error from None

    def free_unit_files(self, max_bytes: int) -> bool:
        """Delete files of units that `evict_units` would remove, not their rows; return whether there were any."""
        with self.index.begin_reading() as cursor:
            evictable_units = [
                unit
                for unit in index_updates.list_evictable_leaves(cursor, max_bytes)
                if self.files.make_path(unit).is_file()
            ]
        self.files.delete_units(evictable_units)
        return bool(evictable_units)

    def enforce_limit(self) -> int:
        if self._max_bytes is None:
            return 0
        with self.index.begin_reading() as cursor:
            if index_updates.read_total_bytes(cursor) <= self._max_bytes:
                return 0
        return self.evict_units(self._max_bytes).nbytes

    def evict_units(self, max_bytes: int) -> RemovedUnits:
        """Remove the least recently used units until at most `max_bytes` are left."""
        with self.index.begin_writing() as cursor:
            self._save_touched(cursor)
            bytes_before = index_updates.read_total_bytes(cursor)
            evicted_units = index_updates.evict_units(cursor, max_bytes)
            removed_units = RemovedUnits(len(evicted_units), bytes_before - index_updates.read_total_bytes(cursor))
        self.files.delete_units(evicted_units)
        return removed_units

    def check_open(self) -> None:
        self.index.check_open()

    def close(self) -> None:
        try:
            if self._touched_units:
                self.touch((), immediately=True)
        finally:
            self.files.close()
            self.index.close()

    def _read_block_tokens(self) -> int:
        with self.index.begin_reading() as cursor:
            block_tokens = cursor.require_number("SELECT block_tokens FROM state")
            if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
                raise InvalidRowError(f"it says that a block has {block_tokens:,} tokens")
        return block_tokens

    def _read_codec(self) -> str:
        """Return the codec of new units; damaged settings are replaced by those of the index and the units."""
        if not self.recovery_files.exists:
            return "frames"
        try:
            return self.recovery_files.read_settings().codec
        except ManifestError as error:
            with self.index.begin_reading() as cursor:
                units = cursor.list_numbers("SELECT id FROM unit ORDER BY id LIMIT ?", (_MAX_SAMPLED_UNITS,))
            headers = [header for unit in units if (header := self.files.read_header(unit)) is not None]
            codec = "frames" if headers and all(header.dense is None for header in headers) else "dense"
            if not self.read_only:
                self.recovery_files.save_settings(StoreSettings(self.block_tokens, codec), overwrite=True)
                self._add_rebuilt_note(
                    f"{error}: the file was damaged, and is made anew by what the index and units say"
                )
            return codec

    def _rebuild_index(self, reason: str, known_path: Path | None) -> bool:
        """Rebuild the index if the folder is a store; return whether it is."""
        if not self.recovery_files.exists:
            return False
        rebuilt_index = rebuild_index(self.folder, known_path)
        self._cached_namespaces = None, []
        self._damaged_units.clear()
        if rebuilt_index is not None:
            kept_text = (
                f"{pluralize(rebuilt_index.num_units, 'unit')}, {pluralize(rebuilt_index.num_pins, 'pin')} and "
                f"{pluralize(rebuilt_index.num_sessions, 'session')}"
            )
            left_text = (
                f"; {pluralize(rebuilt_index.num_unusable, 'unit')} could not be used, which gc removes"
                if rebuilt_index.num_unusable
                else ""
            )
            self._add_rebuilt_note(
                f"{self.folder}: the index was lost or damaged ({reason}): made anew, with {kept_text}{left_text}"
            )
        return True

    def _add_rebuilt_note(self, note: str) -> None:
        self.notes.append(note)
        self.rebuilt_notes.append(note)

    def _create_folder(self) -> None:
        """Create the folder of the store; refuse one that contains other files."""
        with wrap_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._is_store():
                return
            foreign_names = [name for name in os.listdir(self.folder) if not name.startswith(INDEX_FILE)]
            if foreign_names and not self._is_store():  # another process may have created it meanwhile
                problem = f"it holds other things and no {INDEX_FILE}"
                if self.recovery_files.has_only_units:
                    problem = f"it has no {INDEX_FILE}, but units: {explain_settings(SETTINGS_FILE)}"
                raise SourceError(f"{self.folder}: is not a prefix store: {problem}")

    def _is_store(self) -> bool:
        return find_newest_index(self.folder)[1] is not None or self.recovery_files.exists
