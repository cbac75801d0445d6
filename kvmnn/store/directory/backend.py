"""Store in a directory: units as files, found by an SQLite index."""

from __future__ import annotations

import os
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..._util.named_tuple import NamedTuple
from ..._util.text import pluralize
from ..._util.validation import repr_short
from ...arrays.source import join_losses
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, OutputError, SourceError
from ...files.atomic import wrap_os_errors
from ..backend import (
    CODEC_DESCRIPTIONS,
    MAX_BLOCK_TOKENS,
    STORE_POLICIES,
    UNREADABLE_LOSS,
    AddResult,
    ConcurrentUpdateError,
    ExceededLimit,
    NewUnit,
    PrefixMatch,
    StateLocation,
    StoredText,
    StoreLimits,
    StoreSettings,
    UnitSlice,
    describe_lost_options,
    find_contradicting_codec,
    infer_settings,
    select_fitting,
)
from ..encryption import NO_CIPHER, StoreCipher, UnsealError, check_key_matches
from ..namespace import (
    MAX_TOKENS,
    Ids,
    Namespace,
    TokenSequence,
    compute_block_keys,
    compute_sequence_key,
    count_common_entries,
    list_session_names,
    make_session_name,
    mask_ids,
    to_sort_key,
    to_token_ids,
)
from ..read_path import UnitVerifier, require_data
from ..results import (
    MAX_LAST_IDS,
    CleanupResult,
    NamespaceStats,
    StoreEntry,
    StoreListing,
    StoreStats,
    StoreVerifyResult,
    count_excess_bytes,
    explain_kept_part,
    explain_pinned_bytes,
    sum_by_namespace,
)
from ..unit import DamagedUnitError, TableSetCache, TableSets, Unit, UnitHeader, make_object_name, parse_header
from ..unit_codec import PrefixState, is_prefix_state, parse_state
from . import index_updates
from .files import (
    LABEL_SUFFIX,
    PIN_SUFFIX,
    SETTINGS_FILE,
    TABLES_FOLDER,
    RecoveryFiles,
    SavedSequence,
    StagedFiles,
    UnitFiles,
    iter_foreign_files,
)
from .index import (
    INDEX_FILE,
    SESSION_NAME,
    DamagedIndexError,
    InvalidRowError,
    Key,
    StoreIndex,
    ValidatingCursor,
    find_newest_index,
    parse_space_document,
)
from .index_updates import rebuild_index
from .lookup import Lookup, find_stored_blocks

if TYPE_CHECKING:
    from ...profiles.search import ProfileFinder

_MAX_NAMESPACES = 4096
_MAX_SAMPLED_UNITS = 64
"""Units from which a lost codec is inferred."""
_NUM_COMPARED_UNITS = 2
"""Units with which the codec of the settings is compared whenever a store is opened."""
_TOUCH_INTERVAL_SECONDS = 1.0
"""Uses are collected this long before they are written."""
_UNITS_PER_QUERY = 64

_IS_SEQUENCE_END_SQL = """(NOT EXISTS (SELECT 1 FROM block JOIN branch ON branch.parent = block.key
    WHERE block.unit = unit.id AND (block.number + 1) * (SELECT block_tokens FROM state) = unit.tokens)
    AND (tokens = 0 OR NOT EXISTS (SELECT 1 FROM unit AS other
    WHERE other.parent = unit.id AND other.tokens = 0 AND other.start = unit.start + unit.tokens)))"""
"""True if no unit continues at the end of a unit; nothing can follow a partial block. If a state unit exists for the
same end, it is listed instead."""

_PATH_UNITS_SQL = """WITH RECURSIVE path(id, up) AS (SELECT id, parent FROM unit WHERE id = ?
    UNION SELECT before.id, before.parent FROM unit AS before JOIN path ON before.id = path.up) SELECT id FROM path"""
"""A unit and all units before it. UNION visits each row once, so that a forged index with a circle ends."""

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

T = TypeVar("T")


class _TextRow(NamedTuple):
    """A stored sequence: values of the row of its last unit."""

    namespace: Namespace
    tokens: int
    pins: int
    uses_since: int
    unit: int
    has_state: bool


class RemovedUnits(NamedTuple):
    """Number of units that were removed, and bytes of those files that were there."""

    num_units: int = 0
    nbytes: int = 0


class _Addition:
    """Units that a transaction adds and removes."""

    def __init__(self, files: UnitFiles) -> None:
        self._files = files
        self.placed_units: dict[int, int] = {}
        """Bytes of the files of the units that were added."""
        self.removed_units: list[int] = []
        self.stored_bytes = self.removed_bytes = 0

    def place(self, staged_path: Path, unit: int, nbytes: int) -> None:
        """Move the file of a unit into its place."""
        self._files.move_into_place(staged_path, unit)
        self.placed_units[unit] = nbytes
        self.stored_bytes += nbytes


class DirectoryBackend:
    """Unit files and their index in one folder, which is created if `settings` for a new store are specified."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: StoreSettings | None,
        limits: StoreLimits,
        tenant: str,
        read_only: bool,
        profiles: ProfileFinder,
        cipher: StoreCipher = NO_CIPHER,
    ) -> None:
        self.folder, self.profiles = folder, profiles
        self.label = str(folder)
        self.read_only = read_only
        self.tenant = tenant
        self.cipher = cipher
        self.unit_overhead_bytes = cipher.unit_overhead_bytes
        self._limits = limits
        if folder.exists() and not folder.is_dir():
            raise SourceError(f"{folder}: is not a prefix store, but a file: expected a directory")
        is_new = not folder.exists()
        self.recovery_files = RecoveryFiles(folder, cipher)
        is_key_checked = self._check_key()
        if settings is not None and not read_only:
            self._create_folder()
        self.notes: list[str] = []
        self.rebuilt_notes: list[str] = []
        """The notes about what was damaged and rebuilt."""
        self.tables = TableSetCache(self.recovery_files.read_tables, self.recovery_files.list_table_names)
        self.files = UnitFiles(folder, cipher)
        self._cached_namespaces: tuple[int | None, list[Namespace]] = None, []
        self._damaged_units: set[int] = set()
        try:
            self.index = StoreIndex(
                folder,
                settings=settings,
                read_only=read_only,
                rebuild=self._rebuild_index,
                explain_lost_settings=self.recovery_files.explain_lost_settings,
                cipher=cipher,
            )
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
            if settings is not None and not self._had_units():
                new_settings = settings._replace(block_tokens=self.block_tokens, policy=self._read_policy())
                self.recovery_files.save_settings(new_settings._replace(key_check=cipher.key_check))
        try:
            if not is_key_checked:  # another process may have created the store meanwhile
                self._check_key()
            self.settings = self._read_settings(settings)
        except KvmnnError:
            self.index.close()
            raise
        self.codec, self.policy = self.settings.codec, self.settings.policy
        if self.settings.profile is not None and self.settings.profile.file:
            self.profiles.add_name(self.settings.profile.file)
        self._num_uses_by_touched_unit: dict[int, int] = {}
        self._last_touch_time = time.monotonic()
        self._lock = threading.Lock()

    def list_namespaces(self) -> list[Namespace]:
        with self.index.begin_reading() as cursor:
            (last_id,) = cursor.require_row(tuple[int | None], "SELECT max(id) FROM space")
            if last_id != self._cached_namespaces[0]:
                query = "SELECT document FROM space ORDER BY id LIMIT ?"
                rows = cursor.iter_rows(tuple[str], query, (_MAX_NAMESPACES,))
                self._cached_namespaces = last_id, [self._parse_space(row[0]) for row in rows]
        return self._cached_namespaces[1]

    def ensure_namespace(self, namespace: Namespace) -> None:
        """Write the document of a namespace if it is lost: without it a loss of the index loses all its texts."""
        if not self.read_only:
            with suppress(OutputError):  # the index has the namespace: a full disk must not stop what stores nothing
                self.recovery_files.save_namespace(namespace)

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

    def find_unreadable(self, units: Sequence[int]) -> tuple[int, str] | None:
        for unit in units:
            try:
                self._check_readable(unit)
            except DamagedUnitError as error:
                return unit, str(error)
        return None

    def _check_readable(self, unit: int) -> None:
        """Raise `DamagedUnitError` if the file of a unit is missing, cut or without its tables."""
        data = require_data(self.files.read_head(unit))
        if is_prefix_state(data):
            return
        header = parse_header(data)
        nbytes = self.files.count_unit_bytes(unit)
        if nbytes != header.unit_bytes:
            raise DamagedUnitError(f"has {nbytes:,} bytes: its header says {header.unit_bytes:,}")
        if header.dense is not None and header.dense.tables_key:
            name = make_object_name(header.namespace_key, header.dense.tables_key)
            if not self.recovery_files.has_tables(name):
                raise DamagedUnitError(f"its tables are gone ({TABLES_FOLDER}/{name})")

    def has_losses(self, prefix_match: PrefixMatch) -> bool:
        return any(map(self._has_loss, prefix_match.list_units()))

    def stage(self) -> StagedFiles:
        return self.files.stage()

    def add_units(
        self, namespace: Namespace, sequence: TokenSequence, new: Sequence[NewUnit], tables: TableSets | None
    ) -> AddResult:
        """Add units of a sequence, in order, and the tables that some of them need: all or none."""

        def has_all(cursor: ValidatingCursor) -> bool:
            return self.make_lookup(cursor).find_prefix(sequence).tokens == sequence.ids.size

        with self._add(namespace, sequence) as (cursor, namespace_id, addition):
            # what another process has put since the caller looked is known, not new
            known_tokens = self.make_lookup(cursor).find_prefix(sequence).tokens
            parent = cursor.fetch_number("SELECT unit FROM block WHERE key = ?", (new[0].parent,)) or 0
            num_fitting, exceeded_limit = self._count_fitting(cursor, parent, [unit.nbytes for unit in new])
            if tables is not None and num_fitting:
                self.recovery_files.save_tables(namespace, tables)
            placed_units: list[NewUnit] = []
            for unit in new[:num_fitting]:
                self._check_history(cursor, sequence, unit, addition.placed_units)
                unit_id, superfluous_units = index_updates.insert_unit(
                    cursor, namespace_id, unit, sequence, lambda: has_all(cursor)
                )
                if unit_id:
                    assert isinstance(unit.staged, Path)
                    addition.place(unit.staged, unit_id, unit.nbytes)
                    placed_units.append(unit)
                index_updates.delete_units(cursor, superfluous_units)
                addition.removed_units += superfluous_units
        return AddResult(
            addition.stored_bytes,
            addition.removed_bytes,
            exceeded_limit=exceeded_limit,
            known_tokens=known_tokens,
            stored_from=placed_units[0].start if placed_units else None,
            stored_tokens=sum(unit.ids.size for unit in placed_units),
        )

    def _count_fitting(
        self, cursor: ValidatingCursor, parent: int, sizes: Sequence[int]
    ) -> tuple[int, ExceededLimit | None]:
        """Return how many units after `parent` have room once all others went that can go, and the limit to name.

        What has none must not be added: the units that are evicted for it would go for nothing.
        """
        num_fitting, exceeded_limit = len(sizes), None
        for limit, spaces in self._list_limits(cursor):
            if index_updates.read_total_bytes(cursor, spaces) + sum(sizes) <= limit:
                continue
            unevictable_bytes = index_updates.read_unevictable_bytes(cursor, parent, spaces)
            num_in_limit = select_fitting(sizes, unevictable_bytes, limit)
            if num_in_limit < num_fitting:
                num_fitting = num_in_limit
                shown_bytes = 0 if spaces is None and self.tenant else unevictable_bytes
                exceeded_limit = ExceededLimit(_name_limit(spaces), limit, sum(sizes), shown_bytes)
        return num_fitting, exceeded_limit

    @contextmanager
    def _add(self, namespace: Namespace, sequence: TokenSequence) -> Iterator[tuple[ValidatingCursor, int, _Addition]]:
        """Open a transaction that adds units, then evicts others; yield it with the row id of the namespace."""
        addition = _Addition(self.files)
        try:
            with self.index.begin_writing() as cursor:
                self._save_touched(cursor)
                index_updates.advance_clock(cursor)  # what is added is newer than what was used before
                bytes_before = index_updates.read_total_bytes(cursor)
                self.recovery_files.save_namespace(namespace)
                yield cursor, index_updates.ensure_namespace_id(cursor, namespace), addition
                index_updates.restore_pins(cursor, self.make_lookup(cursor), sequence)
                if addition.placed_units:  # for what has no room nothing goes
                    addition.removed_units += self._evict_excess(cursor, list(addition.placed_units))
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
        nbytes = sum(map(len, pieces)) + self.unit_overhead_bytes
        with self.files.stage() as staging:
            path = staging.write(pieces)
            with self._add(namespace, sequence) as (cursor, namespace_id, addition):
                parent = None
                if namespace.layers:
                    end = sequence.get_end(sequence.ids.size)
                    parent = self.make_lookup(cursor).find_end(namespace.key, *end, sequence.block_tokens)
                    if parent is None:
                        raise ConcurrentUpdateError("the blocks before a state are gone")
                num_fitting, exceeded_limit = self._count_fitting(cursor, parent or 0, [nbytes])
                unit_id = 0
                if num_fitting:
                    unit_id = index_updates.insert_state(cursor, namespace_id, state, nbytes, parent)
                if unit_id:
                    addition.place(path, unit_id, nbytes)
        return AddResult(addition.stored_bytes, addition.removed_bytes, exceeded_limit=exceeded_limit)

    def _check_history(
        self, cursor: ValidatingCursor, sequence: TokenSequence, new_unit: NewUnit, placed_units: Container[int]
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

    def touch(self, units: Iterable[int], *, num_uses: int = 1, immediately: bool = False) -> None:
        """Record that units were used; written together after a second, or `immediately`."""
        if self.read_only:
            return
        with self._lock:
            touched = self._num_uses_by_touched_unit
            for unit in units:
                touched[unit] = touched.get(unit, 0) + num_uses
            is_due = touched and (immediately or time.monotonic() - self._last_touch_time >= _TOUCH_INTERVAL_SECONDS)
        if is_due:
            # a full disk must not stop reads
            with suppress(KvmnnError), self.index.begin_writing() as cursor:
                self._save_touched(cursor)

    def _save_touched(self, cursor: ValidatingCursor) -> None:
        """Write the pending uses; called before each change, so that the order of uses is correct."""
        with self._lock:
            touched, self._num_uses_by_touched_unit = self._num_uses_by_touched_unit, {}
            self._last_touch_time = time.monotonic()
        if touched:
            index_updates.touch(cursor, touched)

    def quarantine(self, unit: int, reason: str, notes: list[str]) -> list[int]:
        """Remove a damaged unit and all units that follow it; in a read-only store, ignore it from now on.

        `notes` stay unchanged if another process has removed the unit already.
        """
        with self.index.begin_reading() as cursor:
            row = cursor.fetch_row(tuple[int, int], "SELECT start, tokens FROM unit WHERE id = ?", (unit,))
            start, tokens = row or (0, 0)
            descendants = index_updates.list_with_descendants(cursor, unit)[:-1]
        self._damaged_units.add(unit)
        if row is None:
            return descendants
        path = self.files.make_path(unit)
        action_text = "is passed over" if self.read_only else "was removed"
        tokens_text = f"windows and state after {start:,} tokens of a text"
        if tokens:
            tokens_text = f"tokens {start:,} to {start + tokens - 1:,} of a text"
        tokens_text += f", with {pluralize(len(descendants), 'unit')} after them" if descendants else ""
        notes.append(f"{path}: damaged, {action_text} ({tokens_text}): {reason}")
        if not self.read_only:
            with suppress(OutputError):  # the disk is full: the unit is only ignored
                self.remove_units(lambda cursor: index_updates.list_with_descendants(cursor, unit))
        return descendants

    def remove_units(self, choose: Callable[[ValidatingCursor], Sequence[int]]) -> RemovedUnits:
        """Remove the units that `choose` returns, inside a transaction.

        On a full disk their files are deleted first, which frees space for the change of the index.
        """

        def remove_chosen(choose: Callable[[ValidatingCursor], Sequence[int]]) -> RemovedUnits:
            with self.index.begin_writing() as cursor:
                removed_units = choose(cursor)
                index_updates.delete_units(cursor, removed_units)
            return RemovedUnits(len(removed_units), self.files.delete_units(removed_units))

        try:
            return self.change_index(lambda: remove_chosen(choose))
        except OutputError:
            if self.read_only:
                raise
        with self.index.begin_reading() as cursor:
            chosen_units = choose(cursor)
        nbytes = self.files.delete_units(chosen_units)  # without these files `choose` would find fewer units
        removed = self.change_index(
            lambda: remove_chosen(lambda cursor: index_updates.list_all_with_descendants(cursor, chosen_units))
        )
        return removed._replace(nbytes=nbytes + removed.nbytes)

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

    def free_unit_files(self, max_bytes: int) -> RemovedUnits:
        """Delete files of units that `evict_units` would remove, not their rows."""
        with self.index.begin_reading() as cursor:
            evictable_units = [
                unit
                for unit in index_updates.list_evictable_units(cursor, max_bytes)
                if self.files.make_path(unit).is_file()
            ]
        return RemovedUnits(len(evictable_units), self.files.delete_units(evictable_units))

    def enforce_limit(self) -> tuple[int, ExceededLimit | None]:
        with self.index.begin_reading() as cursor:
            exceeded_limits = [
                ExceededLimit(_name_limit(spaces), limit)
                for limit, spaces in self._list_limits(cursor)
                if index_updates.read_total_bytes(cursor, spaces) > limit
            ]
        if not exceeded_limits:
            return 0, None
        evicted = self._evict(self._evict_excess)
        return evicted.nbytes, min(exceeded_limits, key=lambda limit: limit.max_bytes) if evicted.num_units else None

    def evict_units(self, max_bytes: int) -> RemovedUnits:
        """Remove the units with the lowest priorities until at most `max_bytes` are left."""
        return self._evict(lambda cursor: index_updates.evict_units(cursor, max_bytes))

    def _evict(self, evict: Callable[[ValidatingCursor], list[int]]) -> RemovedUnits:
        with self.index.begin_writing() as cursor:
            self._save_touched(cursor)
            evicted_units = evict(cursor)
        return RemovedUnits(len(evicted_units), self.files.delete_units(evicted_units))

    def _evict_excess(self, cursor: ValidatingCursor, exempt_units: Sequence[int] = ()) -> list[int]:
        """Delete the rows of units above the quota of the tenant, then of those above the limit of all.

        Units that a put adds are exempt: `_count_fitting` has shown that the others make room for them.
        """
        return [
            unit
            for limit, spaces in self._list_limits(cursor)
            for unit in index_updates.evict_units(cursor, limit, spaces, exempt_units)
        ]

    def _list_limits(self, cursor: ValidatingCursor) -> Iterator[tuple[int, list[int] | None]]:
        """Yield each limit, with the namespaces that it is for; None for all."""
        if self._limits.quota is not None:
            yield self._limits.quota, self._list_space_ids(cursor)
        if self._limits.max_bytes is not None:
            yield self._limits.max_bytes, None

    def _list_space_ids(self, cursor: ValidatingCursor) -> list[int]:
        """Return the row ids of the namespaces of the tenant."""
        rows = cursor.fetch_rows(tuple[int, str], "SELECT id, document FROM space")
        return [number for number, document in rows if self._parse_space(document).tenant == self.tenant]

    def _parse_space(self, document: str) -> Namespace:
        """Parse the namespace document of a row; raise `InvalidRowError` if it is malformed."""
        return parse_space_document(document, self.label, self.cipher)

    def _check_key(self) -> bool:
        """Raise `OptionError` if the store is encrypted with another key, or by another rule, than this object.

        Returns False for a store of which nothing says that yet.
        """
        key_check = self.recovery_files.read_key_check()
        if key_check is not None:
            check_key_matches(self.label, key_check, self.cipher)
        return key_check is not None

    def check_open(self) -> None:
        self.index.check_open()

    def close(self) -> None:
        try:
            if self._num_uses_by_touched_unit:
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

    def _read_policy(self) -> str:
        """Return the policy that the index has."""
        with self.index.begin_reading() as cursor:
            (policy,) = cursor.require_row(tuple[str], "SELECT policy FROM state")
            if policy not in STORE_POLICIES:
                raise InvalidRowError(f"its policy is {repr_short(policy)}")
        return policy

    def _read_settings(self, requested: StoreSettings | None) -> StoreSettings:
        """Return the settings; lost and damaged ones, and a codec of no unit, are replaced by what the units say."""
        path = self.recovery_files.settings_path
        if not self.recovery_files.exists and not self._had_units():  # whoever creates it has not written them yet
            return infer_settings(self.block_tokens, [])._replace(
                policy=self._read_policy(), key_check=self.cipher.key_check
            )
        if not self.recovery_files.exists:
            return self._restore_settings(SourceError(f"{path}: is missing"), "was lost", requested)
        try:
            settings = self.recovery_files.read_settings()
        except ManifestError as error:
            return self._restore_settings(error, "was damaged", requested)
        if settings.key_check != self.cipher.key_check:  # `_check_key` has shown that the units have the key
            problem = "encrypted with another key, and its units are with this one"
            if not settings.key_check:
                problem = "not encrypted, and its units are"
            key_error = SourceError(f"{path}: says that the store is {problem}")
            return self._restore_settings(key_error, "was wrong", requested)
        num_compared = _MAX_SAMPLED_UNITS if self.rebuilt_notes else _NUM_COMPARED_UNITS  # without its index, the units
        wrong_codec = find_contradicting_codec(settings.codec, self._read_sampled_headers(num_compared))
        policy = self._read_policy()
        if wrong_codec is not None:
            problem = (
                f"units are {CODEC_DESCRIPTIONS[settings.codec]}, and the units are {CODEC_DESCRIPTIONS[wrong_codec]}"
            )
        elif settings.block_tokens != self.block_tokens:
            problem = f"blocks have {settings.block_tokens} tokens, and the index says {self.block_tokens}"
        elif settings.policy != policy:
            problem = f"the policy is {settings.policy}, and the index says {policy}"
        else:
            return settings
        return self._restore_settings(SourceError(f"{path}: says that {problem}"), "was wrong", requested, settings)

    def _had_units(self) -> bool:
        """Return whether any unit was ever put: SQLite keeps the last number."""
        with self.index.begin_reading() as cursor:
            return cursor.has_row("SELECT 1 FROM sqlite_sequence WHERE name = 'unit'")

    def _restore_settings(
        self, error: KvmnnError, problem: str, requested: StoreSettings | None, wrong: StoreSettings | None = None
    ) -> StoreSettings:
        """Infer the settings from index and units, and write them; refuse where nothing says what the codec is.

        Without units it is that of the `wrong` settings, if these could be read.
        """
        headers = self._read_sampled_headers(_MAX_SAMPLED_UNITS)
        with self.index.begin_reading() as cursor:
            has_units = cursor.has_row("SELECT 1 FROM unit LIMIT 1")
        settings = infer_settings(self.block_tokens, headers)
        if not headers and wrong is not None:
            settings = wrong._replace(block_tokens=self.block_tokens)
        elif not headers:
            if has_units or (requested is None and not self.read_only):
                advice = self.recovery_files.explain_settings(self.recovery_files.settings_path)
                raise SourceError(f"{error}; no unit says what its codec is: {advice}")
            settings = settings if requested is None else requested._replace(block_tokens=self.block_tokens)
        settings = settings._replace(policy=self._read_policy(), key_check=self.cipher.key_check)
        sources = [self.recovery_files.read_settings_profile(settings.codec), requested.profile if requested else None]
        for source in sources:
            settings = settings.adopt_profile(source)
        lost_text = describe_lost_options(settings, sources)
        if self.read_only:
            self._add_rebuilt_note(f"{error}: settings are those that the index and units say{lost_text}")
            return settings
        self.recovery_files.save_settings(settings, overwrite=True)
        self._add_rebuilt_note(
            f"{error}: the file {problem}, and is made again by what the index and units say{lost_text}"
        )
        return settings

    def _iter_headers(self, condition: str, max_units: int | None) -> Iterator[UnitHeader]:
        """Yield the headers of units in an SQL condition: of all, or of the first and last, at most `max_units`."""
        with self.index.begin_reading() as cursor:
            units = cursor.list_numbers(f"SELECT id FROM unit WHERE tokens > 0 AND {condition} ORDER BY id", ())
        if max_units is not None and len(units) > max_units:
            units = [*units[: max_units // 2], *units[-(max_units // 2) :]]
        for unit in units:
            header = self.files.read_header(unit)
            if header is not None:
                yield header

    def _read_sampled_headers(self, max_units: int) -> list[UnitHeader]:
        """Return the headers of the first and the last units that were put, at most `max_units`."""
        return list(self._iter_headers("1", max_units))

    def _has_loss(self, unit: int) -> bool:
        header = self.files.read_header(unit)
        return header is not None and header.has_loss

    def _rebuild_index(self, reason: str, expected_path: Path | None) -> bool:
        """Rebuild the index if the folder is a store; return whether it is."""
        if not self.recovery_files.exists:
            return False
        rebuilt_index = rebuild_index(self.folder, expected_path, self.cipher)
        self._cached_namespaces = None, []
        self._damaged_units.clear()
        if rebuilt_index is not None:
            contents_text = (
                f"{pluralize(rebuilt_index.num_units, 'unit')}, {pluralize(rebuilt_index.num_pins, 'pin')} and "
                f"{pluralize(rebuilt_index.num_sessions, 'session')}"
            )
            left_text = (
                f"; {pluralize(rebuilt_index.num_unusable, 'unit')} could not be used, which gc removes"
                if rebuilt_index.num_unusable
                else ""
            )
            self._add_rebuilt_note(
                f"{self.folder}: the index was lost or damaged ({reason}): made again, with {contents_text}{left_text}"
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
                    problem = (
                        f"it has no {INDEX_FILE}, but units: {self.recovery_files.explain_settings(SETTINGS_FILE)}"
                    )
                raise SourceError(f"{self.folder}: is not a prefix store: {problem}")

    def _is_store(self) -> bool:
        return find_newest_index(self.folder)[1] is not None or self.recovery_files.exists

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        is_pinned, num_missing = False, 0
        key = self._compute_sequence_key(sequence.namespace_key, sequence.ids)

        def choose_units(cursor: ValidatingCursor) -> list[int]:
            nonlocal is_pinned, num_missing
            lookup = self.make_lookup(cursor)
            prefix_match, last_unit = lookup.find_prefix(sequence), lookup.find_last_unit(sequence)
            chosen_units: list[int] = []
            num_missing = sequence.ids.size - prefix_match.tokens
            is_pinned = cursor.has_row(
                "SELECT 1 FROM pin WHERE key = ? OR (unit = ? AND tokens >= ?) LIMIT 1",
                (key, last_unit, sequence.ids.size),
            )
            if is_pinned and last_unit is None:  # what is left of it stays until it is put again
                return chosen_units
            slices = [*reversed(prefix_match.slices)]
            if sequence.needs_state and last_unit is not None:
                slices.insert(0, UnitSlice(last_unit, 0, 0))
            for unit_slice in slices:
                query = "SELECT tokens, pins FROM unit WHERE id = ?"
                tokens, pins = cursor.require_row(tuple[int, int], query, (unit_slice.unit,))
                children = cursor.list_numbers(
                    f"SELECT id FROM unit WHERE parent = ? AND id NOT IN ({','.join(map(str, chosen_units))})",
                    (unit_slice.unit,),
                )
                is_followed = any(self.files.make_path(child).is_file() for child in children)
                if pins or is_followed or tokens > unit_slice.skip + unit_slice.take:
                    break
                # units without files continue nothing: no get finds them, nor what follows them
                lost_units = index_updates.list_all_with_descendants(cursor, children)
                if cursor.has_row(f"SELECT 1 FROM unit WHERE pins > 0 AND id IN ({','.join(map(str, lost_units))})"):
                    break
                chosen_units += [*lost_units, unit_slice.unit]
            return chosen_units

        removed = self.remove_units(choose_units)
        num_left, num_needed = self._count_left_tokens(sequence)
        return CleanupResult(
            units=removed.num_units,
            bytes=removed.nbytes,
            kept=explain_kept_part(removed.num_units, num_left, num_needed, is_pinned=is_pinned),
            unshared_tokens=num_left - num_needed,
            missing_tokens=num_missing,
        )

    def _count_left_tokens(self, sequence: TokenSequence) -> tuple[int, int]:
        """Return how many tokens of a sequence are stored, and how many of them other sequences have or pins keep."""
        with self.index.begin_reading() as cursor:
            prefix_match = self.make_lookup(cursor).find_prefix(sequence)
            num_left, units = prefix_match.tokens, prefix_match.list_units()
            if not units:
                return 0, 0
            last = prefix_match.slices[-1]
            num_unit_tokens = cursor.fetch_number("SELECT tokens FROM unit WHERE id = ?", (last.unit,)) or 0
            if num_unit_tokens > last.skip + last.take:  # the unit is of another sequence
                return num_left, num_left
            path = ",".join(map(str, units))
            pinned_tokens = cursor.list_numbers(f"SELECT tokens FROM pin WHERE unit IN ({path})", ())
            followers = cursor.fetch_rows(
                tuple[int, int, int],
                f"SELECT id, start, tokens FROM unit WHERE parent IN ({path}) AND id NOT IN ({path})",
            )
        needed_tokens = [0, *pinned_tokens]
        for unit, start, num_unit_tokens in followers:
            # a state has all tokens before it; of a damaged unit only its place is known
            header = self.files.read_header(unit) if num_unit_tokens else None
            common = 0 if header is None else count_common_entries(header.ids, sequence.ids[start:])
            needed_tokens.append(start + common)
        return num_left, min(max(needed_tokens), num_left)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """Remove unreferenced files, rows without files, and units until at most `max_bytes` are left.

        If the disk is too full to write to the index, unit files are removed first.
        """
        self.files.remove_stale()
        self.recovery_files.remove_stale()
        try:
            return self.change_index(lambda: self._remove_unreferenced(max_bytes, RemovedUnits()))
        except OutputError:
            freed = RemovedUnits() if self.read_only or max_bytes is None else self.free_unit_files(max_bytes)
            if not freed.num_units:
                raise
        return self.change_index(lambda: self._remove_unreferenced(max_bytes, freed))

    def _remove_unreferenced(self, max_bytes: int | None, freed: RemovedUnits) -> CleanupResult:
        """Remove as `collect_garbage`; of `freed` units the files were removed before."""
        with self.index.begin_writing() as cursor:  # no other process moves a staged file into place meanwhile
            unit_ids = set(cursor.list_numbers("SELECT id FROM unit"))
            unknown_paths = list(self.files.iter_unknown_files(unit_ids))
            file_units = chain(unit_ids, (int(path.stem, 16) for path in unknown_paths))
            if unknown_paths and not self.files.has_readable_unit(file_units):
                raise SourceError(
                    f"{self.folder}: none of its {pluralize(len(unknown_paths), 'unit file')} can be read as a unit of "
                    "this store, which another key or another store's files explain: nothing is removed; if they are "
                    "of no use, remove the store"
                )
            num_other_files = other_bytes = 0
            for path in unknown_paths:
                with suppress(OSError):
                    other_bytes += path.stat().st_size
                    path.unlink()
                    num_other_files += 1

        def choose_units(cursor: ValidatingCursor) -> list[int]:
            units = cursor.list_numbers("SELECT id FROM unit")
            without_files = [unit for unit in units if not self.files.make_path(unit).is_file()]
            return index_updates.list_all_with_descendants(cursor, without_files)

        removed = self.remove_units(choose_units)
        evicted = RemovedUnits() if max_bytes is None else self.evict_units(max_bytes)
        with self.index.begin_writing() as cursor:
            remaining_bytes = index_updates.read_total_bytes(cursor)
            num_tables, tables_bytes = self._remove_unused_recovery_files(cursor)
        self.index.vacuum()
        return CleanupResult(
            units=removed.num_units + evicted.num_units,
            lost=max(removed.num_units - freed.num_units, 0),
            bytes=removed.nbytes + evicted.nbytes + freed.nbytes,
            other_files=num_other_files + num_tables,
            other_bytes=other_bytes + tables_bytes,
            kept=explain_pinned_bytes(remaining_bytes, max_bytes),
            excess_bytes=count_excess_bytes(remaining_bytes, max_bytes),
            foreign=tuple(sorted(iter_foreign_files(self.folder))),
        )

    def _remove_unused_recovery_files(self, cursor: ValidatingCursor) -> tuple[int, int]:
        """Remove pins, losses and tables that no unit needs any more; return number and bytes of the tables."""
        self.recovery_files.delete_other_pins([key for (key,) in cursor.iter_rows(tuple[Key], "SELECT key FROM pin")])
        query = "SELECT key FROM space WHERE id IN (SELECT DISTINCT space FROM unit)"
        namespaces = {key.hex() for (key,) in cursor.iter_rows(tuple[Key], query)}
        self.recovery_files.delete_other_losses(namespaces)
        unused_names = [
            name for name in self.recovery_files.list_table_names() if name.partition("-")[0] not in namespaces
        ]
        return len(unused_names), self.recovery_files.delete_tables(unused_names)

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

        verifier = UnitVerifier(
            self.files.read_unit, find_holder, self.tables, self.profiles, self.block_tokens, threads
        )
        num_units = num_states = num_tokens = nbytes = last_unit = 0
        num_lossy = 0
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
                namespaces = {document: self._parse_space(document) for *_, document in rows}
            for unit_id, skip, start, unit_tokens, document in rows:
                last_unit = unit_id
                if unit_id in lost_units:
                    continue
                try:
                    if not unit_tokens:
                        state, state_bytes = verifier.verify_state(unit_id, namespaces[document])
                        self._check_state_rows(unit_id, state, state_bytes)
                        num_states += 1
                        nbytes += state_bytes + self.unit_overhead_bytes
                        continue
                    unit = verifier.verify(unit_id, namespaces[document])
                    self._check_unit_rows(unit_id, skip, start, unit)
                except DamagedUnitError as error:
                    lost_units.update(self.quarantine(unit_id, str(error), notes))
                    continue
                num_units += 1
                num_tokens += unit.ids.size
                nbytes += unit.nbytes + self.unit_overhead_bytes
                num_lossy += unit.has_loss
            if not rows:
                break
        notes += self._list_orphaned_units()
        recovery_notes = tuple(self._repair_recovery_files())
        return StoreVerifyResult(
            units=num_units,
            tokens=num_tokens,
            bytes=nbytes,
            states=num_states,
            damaged=tuple(notes),
            lost=len(lost_units),
            damaged_files=recovery_notes,
            rebuilt_parts=tuple(self.rebuilt_notes),
            lossy_units=num_lossy,
        )

    def _list_orphaned_units(self) -> list[str]:
        """Name the intact units that an index without their namespace, whose document is lost too, cannot refer to.

        What a killed put left, or a running one is about to add, has its document: a put writes that first.
        """
        paths = list(self.files.iter_unknown_files(set()))
        with self.index.begin_reading() as cursor:
            unit_ids = set(cursor.list_numbers("SELECT id FROM unit"))
            namespace_keys: set[bytes] = {key for (key,) in cursor.iter_rows(tuple[Key], "SELECT key FROM space")}
        namespace_keys.update(namespace.key for namespace in self.recovery_files.iter_namespaces())
        notes = []
        for path in paths:
            unit_id = int(path.stem, 16)
            header = None if unit_id in unit_ids else self.files.read_header(unit_id)
            if header is not None and header.namespace_key not in namespace_keys:
                notes.append(f"{path}: cannot be used: is of a model whose document in spaces/ is lost (gc removes it)")
        return notes

    def _check_state_rows(self, unit_id: int, state: PrefixState, nbytes: int) -> None:
        """Raise the errors of `_check_unit_rows` for a state unit."""
        with self.index.begin_reading() as cursor:
            query = "SELECT start, bytes, skip FROM unit WHERE id = ?"
            row = cursor.fetch_row(tuple[int, int, int], query, (unit_id,))
            branch = cursor.fetch_row(tuple[Key], "SELECT parent FROM branch WHERE unit = ?", (unit_id,))
        if row is not None:  # else another process has removed it
            if branch != (state.compute_key(self.cipher.secret),) or row[0] != state.tokens:
                raise DamagedUnitError("is of another prefix than the index says")
            if row != (state.tokens, nbytes + self.unit_overhead_bytes, state.raw_bytes):
                raise self.index.mark_damaged("it says other things of a state than its file")

    def _check_unit_rows(self, unit_id: int, skip: int, start: int, unit: Unit) -> None:
        """Raise `DamagedUnitError` if a unit has other blocks than its rows, or `DamagedIndexError`."""
        size = self.block_tokens
        keys = compute_block_keys(unit.parent, unit.ids, size, self.cipher.secret)
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
        own_ids = unit.ids[skip * size : (skip + 1) * size]
        branches = [(key, to_sort_key(mask_ids(key, own_ids, self.cipher.secret))) for key in parent]
        if unit_sizes != (unit.ids.size, unit.nbytes + self.unit_overhead_bytes) or [branch] != branches:
            raise self.index.mark_damaged("it says other things of a unit than its file")

    def _repair_recovery_files(self) -> list[str]:
        """Rewrite the files of namespaces, pins and sessions that differ from the index; return one line for each."""
        is_read_only = self.read_only or bool(self.index.write_error)
        # a writing transaction: no other process pins meanwhile
        with self.index.begin_reading() if is_read_only else self.index.begin_writing() as cursor:
            damaged_paths = self.recovery_files.repair(self._iter_recoverable_entries(cursor), write=not is_read_only)
        action_text = "written again"
        if is_read_only:
            action_text = "kvmnn store verify writes it again (without --dry-run, with permission to write)"
        return [f"{path}: is lost or damaged: {action_text}" for path in damaged_paths]

    def _iter_recoverable_entries(self, cursor: ValidatingCursor) -> Iterator[Namespace | SavedSequence]:
        """Yield everything in the index that also has a recovery file."""
        for (document,) in cursor.fetch_rows(tuple[str], "SELECT document FROM space"):
            yield self._parse_space(document)
        for key, unit, tokens in cursor.fetch_rows(tuple[Key, int, int], "SELECT key, unit, tokens FROM pin"):
            pinned = self._read_pinned_sequence(cursor, unit, tokens)
            if pinned is not None and self._compute_sequence_key(pinned.namespace_key, pinned.ids) == key:
                yield pinned
        query = "SELECT name, space.key, ids FROM session JOIN space ON space.id = session.space"
        for name, namespace, packed in cursor.fetch_rows(tuple[str, Key, bytes], query):
            try:
                session_name = self.cipher.unseal_name(name)
                if not session_name:
                    raise ValueError("it has no name")
                yield SavedSequence(session_name, namespace, self._unpack_session_ids(session_name, packed))
            except (KvmnnError, zlib.error, TypeError, ValueError) as error:
                raise InvalidRowError(f"a session is damaged: {error}") from None

    def _read_pinned_sequence(
        self, cursor: ValidatingCursor, unit: int, end_token: int, loss_by_unit: dict[int, bool] | None = None
    ) -> SavedSequence | None:
        """Read the ids of a sequence up to `end_token`, which lies in `unit`; None if a unit is unreadable.

        Adds to `loss_by_unit` which of its units have a loss.
        """
        parts: list[Ids] = []
        query = "SELECT parent, tokens FROM unit WHERE id = ?"
        while True:
            row = cursor.fetch_row(tuple[int | None, int], query, (unit,))
            if not parts and row is not None and not row[1]:  # a state unit, which pins a prefix with state
                unit = row[0] or 0
                row = cursor.fetch_row(tuple[int | None, int], query, (unit,))
            header = self.files.read_header(unit)
            if header is not None and loss_by_unit is not None:
                loss_by_unit[unit] = header.has_loss
            if header is None or row is None or not header.start < end_token <= header.start + header.ids.size:
                return None
            parts.insert(0, header.ids[: end_token - header.start])
            if not header.start:
                return SavedSequence("", header.namespace_key, np.concatenate(parts))
            unit, end_token = row[0] or 0, header.start

    def collect_stats(self, requested_tokens: int, hit_tokens: int, *, all_namespaces: bool = False) -> StoreStats:
        with self.index.begin_reading() as cursor:
            sums = ", ".join(
                f"coalesce(sum({expression}), 0)"
                for expression in ("tokens = 0", "tokens", "bytes", _IS_SEQUENCE_END_SQL)
            )
            own_ids = self._list_space_ids(cursor)
            own = "1" if all_namespaces else f"unit.space IN ({','.join(map(str, own_ids))})"
            num_units, num_states, tokens, nbytes, num_sequences = cursor.require_row(
                tuple[int, int, int, int, int], f"SELECT count(*), {sums} FROM unit WHERE {own}"
            )
            state_bytes = cursor.require_number(f"SELECT coalesce(sum(skip), 0) FROM unit WHERE tokens = 0 AND {own}")
            num_blocks, num_pins = (
                cursor.require_number(f"SELECT count(*) FROM {table} JOIN unit ON unit.id = {table}.unit WHERE {own}")
                for table in ("block", "pin")
            )
            session_names = self._read_session_names(cursor)
            num_pins += self._count_lost_pins(cursor, None if all_namespaces else own_ids)
            rows = cursor.iter_rows(
                tuple[str, int],
                "SELECT space.document, sum(tokens) FROM unit JOIN space ON space.id = unit.space "
                f"WHERE {own} GROUP BY space.id",
            )
            by_space = [(self._parse_space(document), number) for document, number in rows]
            own_units = cursor.list_numbers(f"SELECT id FROM unit WHERE {own}", ())
        lost_units = list(self._list_lost_units(own_units))
        if lost_units:
            with self.index.begin_reading() as cursor:
                lost_units = index_updates.list_all_with_descendants(cursor, lost_units)
        headers = self._read_sampled_headers(_MAX_SAMPLED_UNITS)
        loss = join_losses(*(self.get_loss(namespace) for namespace, _ in by_space))
        # a record may be of a text that was removed since: all heads are looked at then, else the first and last
        rounded = self._iter_headers(own, None if loss else _MAX_SAMPLED_UNITS)
        is_rounded = any(header.is_rounded or (loss and header.is_lossy) for header in rounded)
        return StoreStats(
            texts=num_sequences,
            units=num_units - num_states,
            states=num_states,
            blocks=num_blocks,
            tokens=tokens,
            bytes=nbytes,
            raw_bytes=state_bytes + sum(namespace.token_bytes * number for namespace, number in by_space),
            index_bytes=None if self.tenant and not all_namespaces else self.index.nbytes,
            models=tuple(sorted({namespace.model for namespace, _ in by_space})),
            pinned=num_pins,
            sessions=len(session_names if all_namespaces else list_session_names(self.tenant, session_names)),
            codec=self.codec,
            policy=self.policy,
            profile=self.settings.profile.key if self.settings.profile else "",
            is_lossy=self.settings.is_lossy or any(header.is_lossy for header in headers),
            loss=(loss or UNREADABLE_LOSS) if is_rounded else "",
            attention_units=self._count_attention_units(own) if self.settings.is_lossy else None,
            lost_units=len(lost_units),
            asked_tokens=requested_tokens,
            found_tokens=hit_tokens,
        )

    def collect_namespaces(self) -> list[NamespaceStats]:
        with self.index.begin_reading() as cursor:
            rows = cursor.fetch_rows(
                tuple[str, int, int, int],
                "SELECT space.document, count(*), sum(tokens), sum(bytes) FROM unit "
                "JOIN space ON space.id = unit.space GROUP BY space.id",
            )
            return sum_by_namespace(
                (self._parse_space(document).tenant, units, tokens, nbytes) for document, units, tokens, nbytes in rows
            )

    def _count_attention_units(self, condition: str) -> int:
        with self.index.begin_reading() as cursor:
            units = cursor.list_numbers(f"SELECT id FROM unit WHERE tokens > 0 AND {condition}", ())
        return sum(map(self.files.has_attention_steps, units))

    def _count_lost_pins(self, cursor: ValidatingCursor, space_ids: Sequence[int] | None) -> int:
        """Count the pins of texts that are lost, in some namespaces or (None) in all.

        The index no longer knows whose they are; the recovery file of a pin does.
        """
        lost_keys = {key for (key,) in cursor.iter_rows(tuple[Key], "SELECT key FROM pin WHERE unit = 0")}
        if space_ids is None or not lost_keys:
            return len(lost_keys)
        documents = cursor.fetch_rows(tuple[int, str], "SELECT id, document FROM space")
        own_keys = {self._parse_space(document).key for number, document in documents if number in space_ids}
        return sum(
            pin.namespace_key in own_keys and self._compute_sequence_key(pin.namespace_key, pin.ids) in lost_keys
            for pin in self.recovery_files.iter_sequences(PIN_SUFFIX)
        )

    def list_entries(self) -> StoreListing:
        labels = {text.key.hex(): label for label, text in self.iter_labels()}
        with self.index.begin_reading() as cursor:
            rows = self._list_text_rows(cursor)
            spaces = ",".join(map(str, self._list_space_ids(cursor)))
            query = f"SELECT id, bytes FROM unit WHERE space IN ({spaces})"
            nbytes_by_unit = dict(cursor.iter_rows(tuple[int, int], query))
            loss_by_unit: dict[int, bool] = {}

            def read_flag(unit: int) -> bool:
                if unit not in loss_by_unit:
                    loss_by_unit[unit] = self._has_loss(unit)
                return loss_by_unit[unit]

            keys, last_ids, paths, loss_flags = [], [], [], []
            for row in rows:
                text = self._read_pinned_sequence(cursor, row.unit, row.tokens, loss_by_unit)
                keys.append("" if text is None else self._compute_sequence_key(text.namespace_key, text.ids).hex())
                last_ids.append(self._read_last_ids(row.unit) if text is None else text.ids[-MAX_LAST_IDS:].tolist())
                paths.append(cursor.list_numbers(_PATH_UNITS_SQL, (row.unit,)))
                loss_flags.append(any(map(read_flag, paths[-1])))
        for unit in self._list_lost_units(nbytes_by_unit):
            nbytes_by_unit[unit] = 0
        entries = (
            StoreEntry(
                model=row.namespace.model,
                dtype=row.namespace.dtype,
                tokens=row.tokens,
                bytes=sum(nbytes_by_unit.get(unit, 0) for unit in path),
                pinned=row.pins > 0,
                unused_for=row.uses_since,
                is_complete=row.has_state or not row.namespace.needs_state,
                last_ids=tuple(ids),
                key=key,
                label=labels.get(key, ""),
                is_lossy=self.settings.is_lossy or has_loss,
            )
            for row, key, ids, path, has_loss in zip(rows, keys, last_ids, paths, loss_flags, strict=True)
        )
        return StoreListing(texts=tuple(entries), bytes=sum(nbytes_by_unit.values()))

    def _list_lost_units(self, units: Iterable[int]) -> set[int]:
        """Return which of these units of the index have no file."""
        lost_units = set(units) - self.files.list_stored_units()
        if lost_units:  # as opposed to those that another process has removed since the index was read
            with self.index.begin_reading() as cursor:
                lost_units.intersection_update(cursor.list_numbers("SELECT id FROM unit", ()))
        return lost_units

    def _list_text_rows(self, cursor: ValidatingCursor) -> list[_TextRow]:
        """Return the rows of stored sequences, the most recently used first."""
        documents = cursor.iter_rows(tuple[int, str], "SELECT id, document FROM space")
        namespaces = {number: self._parse_space(document) for number, document in documents}
        rows = cursor.fetch_rows(
            tuple[int, int, int, int, int, int],
            "SELECT space, start + tokens, pins, used, id, tokens = 0 FROM unit "
            f"WHERE {_IS_SEQUENCE_END_SQL} ORDER BY used DESC, id DESC",
        )
        # the tick of the store counts what others do as well
        own_ids = [str(number) for number, namespace in namespaces.items() if namespace.tenant == self.tenant]
        ticks = cursor.list_numbers(
            f"SELECT DISTINCT used FROM unit WHERE space IN ({','.join(own_ids)}) ORDER BY used"
        )
        if not {number for number, *_ in rows} <= namespaces.keys():
            raise InvalidRowError("a unit has a space that is not there")
        return [
            _TextRow(namespaces[number], tokens, pins, len(ticks) - bisect_right(ticks, used), unit, bool(has_state))
            for number, tokens, pins, used, unit, has_state in rows
            if namespaces[number].tenant == self.tenant
        ]

    def iter_texts(self) -> Iterator[StoredText]:
        with self.index.begin_reading() as cursor:
            rows = self._list_text_rows(cursor)
            for row in rows:
                text = self._read_pinned_sequence(cursor, row.unit, row.tokens)
                if text is not None and text.namespace_key == row.namespace.key:
                    yield StoredText(row.namespace, text.ids)

    def iter_pinned(self) -> Iterator[StoredText]:
        namespaces = {namespace.key: namespace for namespace in self.list_namespaces()}
        for _, namespace_key, ids in self.recovery_files.iter_sequences(PIN_SUFFIX):
            namespace = namespaces.get(namespace_key)
            if namespace is not None and namespace.tenant == self.tenant:
                yield StoredText(namespace, ids)

    def save_loss(self, namespace: Namespace, loss: str) -> None:
        self.recovery_files.save_loss(namespace, loss)

    def get_loss(self, namespace: Namespace) -> str:
        return self.recovery_files.read_loss(namespace)

    def save_label(self, label: str, namespace: Namespace, ids: Ids) -> None:
        self.recovery_files.save_label(SavedSequence(label, namespace.key, ids))

    def get_label(self, namespace: Namespace, ids: Ids) -> str | None:
        return self.recovery_files.read_label(StoredText(namespace, ids).key)

    def list_label_keys(self) -> list[bytes]:
        return self.recovery_files.list_label_keys()

    def iter_labels(
        self, keys: Sequence[bytes] | None = None, *, all_namespaces: bool = False
    ) -> Iterator[tuple[str, StoredText]]:
        namespaces = {
            namespace.key: namespace
            for namespace in self.list_namespaces()
            if all_namespaces or namespace.tenant == self.tenant
        }
        files = self.recovery_files
        saved = files.iter_sequences(LABEL_SUFFIX) if keys is None else files.iter_labelled(keys)
        for name, namespace_key, ids in saved:
            if namespace_key in namespaces:
                yield name, StoredText(namespaces[namespace_key], ids)

    def list_damaged_labels(self) -> list[bytes]:
        return self.recovery_files.list_damaged_labels()

    def delete_labels(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.recovery_files.delete_label(key)

    def _read_last_ids(self, unit: int) -> list[int]:
        """Return the last ids in the file of a unit; empty if the file is unreadable."""
        data = self.files.read_head(unit)
        try:
            if data is not None and is_prefix_state(data):
                data = self.files.read_unit(unit)
                ids = None if data is None else parse_state(data).ids
            else:
                ids = None if data is None else parse_header(data).ids
            if ids is None:
                return []
        except DamagedUnitError:
            return []
        return [int(token_id) for token_id in ids[-MAX_LAST_IDS:]]

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        sequence = namespace.make_sequence(ids, self.block_tokens)
        sequence_key = self._compute_sequence_key(namespace.key, ids)
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
        sequence_key = self._compute_sequence_key(namespace.key, ids)
        with self.index.begin_writing() as cursor:
            unit = cursor.fetch_number("SELECT unit FROM pin WHERE key = ?", (sequence_key,))
            if unit is not None:
                cursor.execute("DELETE FROM pin WHERE key = ?", (sequence_key,))
                cursor.execute("UPDATE unit SET pins = pins - 1 WHERE id = ?", (unit,))
                self.recovery_files.delete_pin(sequence_key)
        return unit is not None

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        name = make_session_name(self.tenant, name)
        with self.index.begin_writing() as cursor:
            index_updates.save_session(cursor, name, namespace, ids)
            self.recovery_files.save_namespace(namespace)
            self.recovery_files.save_sequence(SavedSequence(name, namespace.key, ids))

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        name = make_session_name(self.tenant, name)
        with self.index.begin_reading() as cursor:
            row = cursor.fetch_row(
                tuple[str, bytes],
                "SELECT space.document, session.ids FROM session JOIN space ON space.id = session.space WHERE name = ?",
                (self.cipher.seal_name(name),),
            )
            if row is None:
                raise KvmnnError(f"{self.label}: there is no session {repr_short(name)}")
            namespace = self._parse_space(row[0])
        try:
            return namespace, self._unpack_session_ids(name, row[1])
        except (UnsealError, zlib.error, TypeError, ValueError) as error:
            raise SourceError(f"{self.label}: session {repr_short(name)} is damaged: {error}") from None

    def list_sessions(self) -> list[str]:
        with self.index.begin_reading() as cursor:
            names = self._read_session_names(cursor)
        return list_session_names(self.tenant, sorted(names))

    def _read_session_names(self, cursor: ValidatingCursor) -> list[str]:
        try:
            rows = cursor.iter_rows(tuple[str], "SELECT name FROM session")
            return [self.cipher.unseal_name(name) for (name,) in rows]
        except UnsealError as error:
            raise InvalidRowError(f"the name of a session {error}") from None

    def delete_session(self, name: str) -> None:
        name = make_session_name(self.tenant, name)
        with self.index.begin_writing() as cursor:
            if cursor.execute("DELETE FROM session WHERE name = ?", (self.cipher.seal_name(name),)) == 0:
                raise KvmnnError(f"{self.label}: there is no session {repr_short(name)}")
            self.recovery_files.delete_session(name)

    def _compute_sequence_key(self, namespace_key: bytes, ids: Ids) -> bytes:
        return compute_sequence_key(namespace_key, ids, self.cipher.secret)

    def _unpack_session_ids(self, name: str, packed: bytes) -> Ids:
        """Return the ids of a session row; `UnsealError`, `zlib.error`, `TypeError` or `ValueError` report damage."""
        data = zlib.decompressobj().decompress(self.cipher.unseal(packed, SESSION_NAME + name), 4 * MAX_TOKENS)
        return to_token_ids(np.frombuffer(data, "<u4"))


def _name_limit(spaces: Sequence[int] | None) -> str:
    """Return the name of the limit on the units of some namespaces, or (None) of all."""
    return "max_bytes" if spaces is None else "quota"
