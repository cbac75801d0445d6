"""A store in a directory: units as files, and an index of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..dtypes import Bytes
from ..errors import KvmnnError, ManifestError, OutputError, SourceError
from ..files.output import failures
from ..text import count
from . import updates
from .beside import FILE_NAME as SETTINGS
from .beside import MAX_BLOCK_TOKENS, Beside, Settings, settings_wanted
from .index import FILE_NAME, DamagedIndexError, Index, newest
from .lookup import Found, Lookup, StatePlace, Text, stored_blocks
from .prefix_state import PrefixState
from .rebuilding import rebuild
from .rows import Cursor, MaybeNumber, Number, UnitSpan, Word, WrongRowError, parse_space_document
from .space import Space
from .table_sets import KeptTables, TableSets
from .token_ids import Ids
from .unit import DamagedError, Header, parse_header
from .unit_files import Staging, UnitFiles
from .units import Added
from .updates import NewUnit, ParentGoneError

_MAX_SPACES = 4096
_LOOKED_AT = 64
"""Units that tell what others are made of."""
_TOUCH_SECONDS = 1.0
"""Uses are noted down together after so many seconds."""

T = TypeVar("T")


class Removed(NamedTuple):
    """Units that were removed, and the bytes of their files."""

    units: int
    nbytes: int


class Directory:
    """Units and their index in a folder.

    Parameters
    ----------
    folder
        It is made where `settings` say how.
    settings
        Of a store that is made; None where one must be there.
    max_bytes
        Most bytes of all units; None for no bound.
    read_only
        Nothing is written.

    Raises
    ------
    SourceError, OutputError
        As `Index`, and for a folder that holds something else.
    """

    def __init__(self, folder: Path, *, settings: Settings | None, max_bytes: int | None, read_only: bool) -> None:
        self.folder = folder
        self.label = str(folder)
        self.read_only = read_only
        self._max_bytes = max_bytes
        if folder.exists() and not folder.is_dir():
            raise SourceError(f"{folder}: is not a prefix store, but a file: expected a directory")
        is_new = not folder.exists()
        if settings is not None and not read_only:
            _make(folder)
        self.notes: list[str] = []
        self.made_anew: list[str] = []
        """Those of them that say what was damaged."""
        self.beside = Beside(folder)
        self.tables = KeptTables(self.beside.read_tables, self.beside.table_names)
        self.files = UnitFiles(folder)
        self._known_spaces: tuple[int | None, list[Space]] = None, []
        self._bad: set[int] = set()
        block_tokens = settings.block_tokens if settings else None
        try:
            self.index = Index(folder, block_tokens=block_tokens, read_only=read_only, rebuild=self._rebuild)
        except OutputError:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
            raise
        if self.index.full:
            self.notes.append(f"{self.index.path}: cannot be written ({self.index.full}): nothing can be stored")
        try:
            self.block_tokens = self._block_tokens()
        except DamagedIndexError:
            if read_only:
                raise
            self.block_tokens = self._block_tokens()  # of an index that is made anew
        if not read_only:
            self._note_beside(settings.codec if settings else "frames")
        self.codec = self._codec()
        self._touched: set[int] = set()
        self._last_touch = time.monotonic()
        self._lock = threading.Lock()

    def spaces(self) -> list[Space]:
        """All spaces."""
        with self.index.reading() as cursor:
            last = cursor.need_row(MaybeNumber, "SELECT max(id) FROM space").value
            if last != self._known_spaces[0]:
                rows = cursor.rows(Word, "SELECT document FROM space ORDER BY id LIMIT ?", (_MAX_SPACES,))
                self._known_spaces = last, [parse_space_document(row.value, self.label) for row in rows]
        return self._known_spaces[1]

    def keep_space(self, space: Space) -> None:
        """As `Units`: the index has what its units refer to."""

    def has_texts(self, space: Space) -> bool:
        """Whether anything of a space is stored."""
        with self.index.reading() as cursor:
            if space.layers:
                return cursor.has_row("SELECT 1 FROM branch WHERE parent = ? LIMIT 1", (space.key,))
            query = "SELECT 1 FROM unit JOIN space ON space.id = unit.space WHERE space.key = ? LIMIT 1"
            return cursor.has_row(query, (space.key,))

    def find(self, text: Text) -> Found:
        """The longest stored beginning of a text."""
        with self.index.reading() as cursor:
            return self.lookup(cursor).find(text)

    def lookup(self, cursor: Cursor) -> Lookup:
        """A way to ask the index inside a transaction."""
        return Lookup(cursor, self._ids_of, self._bad.__contains__)

    def read(self, units: Sequence[int]) -> list[Bytes | None]:
        """The bytes of the units' files; None for those that are not there."""
        return [self.files.read(unit) for unit in units]

    def at_hand(self, unit: int) -> Bytes | None:
        """The bytes of a unit's file."""
        return self.files.read(unit)

    def stage(self) -> Staging:
        """A folder for the files of new units."""
        return self.files.stage()

    def add(self, space: Space, text: Text, new: Sequence[NewUnit], tables: TableSets | None) -> Added:
        """Take in units of a text, in order, and the tables that some of them need, all or none.

        Raises
        ------
        ParentGoneError
            Where the blocks before the first are not there any more, or hold other rows than a unit refers to.
        OutputError
            Where something cannot be written; nothing has been taken in then.
        """
        placed: list[int] = []
        gone: list[int] = []
        stored = 0

        def has_all(cursor: Cursor) -> bool:
            return self.lookup(cursor).find(text).tokens == text.ids.size

        try:
            with self.index.writing() as cursor:
                self._note_touched(cursor)
                before = updates.held_bytes(cursor)
                self.beside.note_space(space)
                if tables is not None:
                    self.beside.note_tables(space, tables)
                number = updates.space_id(cursor, space)
                updates.next_tick(cursor)
                for unit in new:
                    self._check_behind(cursor, text, unit, placed)
                    found, superfluous = updates.insert(cursor, number, unit, text, lambda: has_all(cursor))
                    if found:
                        assert isinstance(unit.staged, Path)
                        self.files.place(unit.staged, found)
                        placed.append(found)
                        stored += unit.nbytes
                    updates.remove_all(cursor, superfluous)
                    gone += superfluous
                updates.pin_again(cursor, self.lookup(cursor), text)
                if self._max_bytes is not None:
                    gone += updates.evict(cursor, self._max_bytes)
                removed = before + stored - updates.held_bytes(cursor)
        except BaseException:
            self.files.remove(placed)
            raise
        self.files.remove(gone)
        return Added(stored, removed)

    def find_state(self, text: Text, tokens: int) -> StatePlace | None:
        """The state of the longest beginning of at most `tokens` tokens that has one."""
        with self.index.reading() as cursor:
            return self.lookup(cursor).find_state(text, tokens)

    def add_state(self, space: Space, text: Text, state: PrefixState) -> Added:
        """Take in the state of a text, whose units are stored; errors as `Units`."""
        gone: list[int] = []
        placed: list[int] = []
        pieces = state.to_pieces()
        nbytes = sum(map(len, pieces))
        try:
            with self.files.stage() as staging:
                path = staging.write(pieces)
                with self.index.writing() as cursor:
                    self._note_touched(cursor)
                    self.beside.note_space(space)
                    number = updates.space_id(cursor, space)
                    parent = (
                        self.lookup(cursor).find_end(space.key, *text.end(text.ids.size), text.block_tokens)
                        if space.layers
                        else None
                    )
                    if parent is None and space.layers:
                        raise ParentGoneError("the blocks before a state are gone")
                    before = updates.held_bytes(cursor)
                    new = updates.NewState(state.key, state.tokens, state.raw_bytes, nbytes)
                    unit = updates.insert_state(cursor, number, new, parent)
                    if unit:
                        self.files.place(path, unit)
                        placed.append(unit)
                    updates.pin_again(cursor, self.lookup(cursor), text)
                    if self._max_bytes is not None:
                        gone = updates.evict(cursor, self._max_bytes)
                    stored = nbytes if unit else 0
                    removed = before + stored - updates.held_bytes(cursor)
        except BaseException:
            self.files.remove(placed)
            raise
        self.files.remove(gone)
        return Added(stored, removed)

    def _check_behind(self, cursor: Cursor, text: Text, new: NewUnit, placed: Sequence[int]) -> None:
        """Another process may have put the blocks that a unit follows, computed otherwise, since it was encoded."""
        end = new.start // text.block_tokens
        headers: dict[int, Header | None] = {}
        keys = text.keys[end - len(new.behind) : end]
        stored = stored_blocks(cursor, keys)
        for key, wanted in zip(keys, new.behind, strict=True):
            unit, number = (stored[key].unit, stored[key].number) if key in stored else (0, 0)
            if unit in placed:
                continue
            if unit not in headers:
                headers[unit] = self.header(unit)
            header = headers[unit]
            if header is None or header.dense is None or header.dense.sums[number : number + 1] != (wanted,):
                raise ParentGoneError("the blocks before a unit hold other rows by now")

    def touch(self, units: Iterable[int], *, now: bool = False) -> None:
        """Units were used; noted down with others after a while, or `now`."""
        if self.read_only:
            return
        with self._lock:
            self._touched.update(units)
            due = self._touched and (now or time.monotonic() - self._last_touch >= _TOUCH_SECONDS)
        if due:
            with suppress(KvmnnError), self.index.writing() as cursor:  # on a full disk what is stored is still found
                self._note_touched(cursor)

    def _note_touched(self, cursor: Cursor) -> None:
        """Note the uses down before the next thing counts as one."""
        with self._lock:
            touched, self._touched = sorted(self._touched), set()
            self._last_touch = time.monotonic()
        if touched:
            updates.touch(cursor, touched)

    def discard(self, unit: int, reason: str, notes: list[str]) -> list[int]:
        """Remove a unit that is not what it should be, and all that follow it; without writing, pass over it.

        Nothing is said where another process has removed it meanwhile.

        Returns
        -------
        The units that follow it.
        """
        with self.index.reading() as cursor:
            row = cursor.row(UnitSpan, "SELECT start, tokens FROM unit WHERE id = ?", (unit,))
            start, tokens = row or (0, 0)
            lost = updates.with_followers(cursor, unit)[:-1]
        self._bad.add(unit)
        if row is None:
            return lost
        path = self.files.path(unit)
        done = "is passed over" if self.read_only else "was removed"
        what = f"tokens {start:,} to {start + tokens - 1:,} of a text"
        what = what if tokens else f"windows and state behind {start:,} tokens of a text"
        what += f", with {count(len(lost), 'unit')} behind them" if lost else ""
        notes.append(f"{path}: damaged, {done} ({what}): {reason}")
        if not self.read_only:
            with suppress(OutputError):  # of a full disk: it is passed over
                self.remove(lambda cursor: updates.with_followers(cursor, unit))
        return lost

    def remove(self, choose: Callable[[Cursor], Sequence[int]]) -> Removed:
        """Remove the units that `choose` names inside a transaction; on a full disk their files make room for it."""

        def remove(choose: Callable[[Cursor], Sequence[int]]) -> Removed:
            with self.index.writing() as cursor:
                gone = choose(cursor)
                nbytes = updates.remove_all(cursor, gone)
            self.files.remove(gone)
            return Removed(len(gone), nbytes)

        try:
            return self.in_little_room(lambda: remove(choose))
        except OutputError:
            if self.read_only:
                raise
        with self.index.reading() as cursor:
            chosen = choose(cursor)
        self.files.remove(chosen)  # without them `choose` would find less
        return self.in_little_room(lambda: remove(lambda cursor: updates.with_all_followers(cursor, chosen)))

    def in_little_room(self, change: Callable[[], T]) -> T:
        """Change the index; where the disk has no room for a journal beside it, in place."""
        try:
            return change()
        except OutputError as error:
            if self.read_only:
                raise
            try:
                with self.index.in_place():
                    return change()
            except KvmnnError:
                raise error from None

    def make_room(self, max_bytes: int) -> bool:
        """Remove files of units that `evict` would remove, not their rows; whether there were any."""
        with self.index.reading() as cursor:
            gone = [unit for unit in updates.leaves(cursor, max_bytes) if self.files.path(unit).is_file()]
        self.files.remove(gone)
        return bool(gone)

    def keep_bound(self) -> int:
        """Remove what is above the bound, as another process may have had a larger one: bytes."""
        if self._max_bytes is None:
            return 0
        with self.index.reading() as cursor:
            if updates.held_bytes(cursor) <= self._max_bytes:
                return 0
        return self.evict(self._max_bytes).nbytes

    def evict(self, max_bytes: int) -> Removed:
        """Remove what was not used for longest until no more than `max_bytes` are left."""
        with self.index.writing() as cursor:
            self._note_touched(cursor)
            before = updates.held_bytes(cursor)
            gone = updates.evict(cursor, max_bytes)
            removed = Removed(len(gone), before - updates.held_bytes(cursor))
        self.files.remove(gone)
        return removed

    def check_open(self) -> None:
        """`KvmnnError` for a store that was closed."""
        self.index.check_open()

    def close(self) -> None:
        """Note down the uses, and close the index."""
        try:
            if self._touched:
                self.touch((), now=True)
        finally:
            self.files.close()
            self.index.close()

    def _block_tokens(self) -> int:
        with self.index.reading() as cursor:
            found = cursor.need_row(Number, "SELECT block_tokens FROM state").value
            if not 1 <= found <= MAX_BLOCK_TOKENS:
                raise WrongRowError(f"it says that a block has {found:,} tokens")
        return found

    def _codec(self) -> str:
        """What new units are made of; settings that are damaged are noted down anew, by the index and the units."""
        if not self.beside.is_there:
            return "frames"
        try:
            return self.beside.settings().codec
        except ManifestError as error:
            with self.index.reading() as cursor:
                units = cursor.all_rows(Number, "SELECT id FROM unit ORDER BY id LIMIT ?", (_LOOKED_AT,))
            headers = [header for unit in units if (header := self.header(unit.value)) is not None]
            codec = "frames" if headers and all(header.dense is None for header in headers) else "dense"
            if not self.read_only:
                self.beside.note_settings(Settings(self.block_tokens, codec), anew=True)
                self._note_anew(f"{error}: the file was damaged, and is made anew by what the index and units say")
            return codec

    def _rebuild(self, what: str, seen: Path | None) -> bool:
        """Make the index anew, where the folder says that it is a store; whether it could be."""
        if not self.beside.is_there:
            return False
        made = rebuild(self.folder, seen)
        self._known_spaces = None, []
        self._bad.clear()
        if made is not None:
            kept = f"{count(made.units, 'unit')}, {count(made.pins, 'pin')} and {count(made.sessions, 'session')}"
            left = f"; {count(made.left, 'unit')} could not be used, which gc removes" if made.left else ""
            self._note_anew(f"{self.folder}: the index was lost or damaged ({what}): made anew, with {kept}{left}")
        return True

    def _note_anew(self, note: str) -> None:
        self.notes.append(note)
        self.made_anew.append(note)

    def _note_beside(self, codec: str) -> None:
        """What the index alone would know, for a store that does not have it yet; one with units has frames."""
        if not self.beside.is_there:
            for space in self.spaces():
                self.beside.note_space(space)
            with self.index.reading() as cursor:
                is_new = not cursor.has_row("SELECT 1 FROM unit LIMIT 1")
            self.beside.note_settings(Settings(self.block_tokens, codec if is_new else "frames"))

    def _ids_of(self, unit: int) -> Ids | None:
        header = self.header(unit)
        return None if header is None else header.ids

    def header(self, unit: int) -> Header | None:
        """What the file of a unit begins with; None where that cannot be read."""
        data = self.files.read(unit)
        try:
            return None if data is None else parse_header(data)
        except DamagedError:
            return None


def _make(folder: Path) -> None:
    """Make the folder of a store; one that holds other things is left alone."""
    with failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not _begun(folder):
            others = [name for name in os.listdir(folder) if not name.startswith(FILE_NAME)]
            if others and not _begun(folder):
                found = f"it holds other things and no {FILE_NAME}"
                if Beside(folder).has_units_alone:
                    found = f"it has no {FILE_NAME}, but units: {settings_wanted(SETTINGS)}"
                raise SourceError(f"{folder}: is not a prefix store: {found}")


def _begun(folder: Path) -> bool:
    return newest(folder)[1] is not None or Beside(folder).is_there
