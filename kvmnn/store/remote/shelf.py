"""A store past one machine: units as values of another engine, and beside each a record of where it stands.

There is no index. A record is written behind its unit, and both are named by what they hold, so that whoever puts the
same writes the same. A record is only stored where none is: of two who put texts that begin alike at once the second is
told, and puts what is left behind the first one's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, OutputError, SourceError
from ..beside import Settings, check_settings, parse_settings, settings_document
from ..lookup import Found, Place, StatePlace, Text
from ..prefix_state import PrefixState, state_key
from ..space import Space, from_json
from ..table_sets import KeptTables, TableSets, object_name
from ..token_ids import Ids, agreeing, agreeing_texts, as_text
from ..unit import DENSE_MAGIC
from ..units import Added
from ..updates import NewUnit, ParentGoneError
from . import bounding
from .ram import Ram
from .records import (
    AFTER,
    STATES,
    Record,
    StateRecord,
    folder_after,
    from_bytes,
    named_count,
    named_ids,
    named_state,
    placed,
    record_name,
    state_number,
    tick_of,
    told_block_tokens,
    unit_name,
    unit_number,
    use_bytes,
    use_name,
)
from .values import OutageError, Patient

ABOUT = "store/about"
TABLES = "tables"
_MAX_SPACES = 4096
_NEAR = 128
"""Names on each side of a text's that are looked at, of all that follow a block; in names lie the first ids."""
_SOME = 4
"""Records that are read where any of them would do: one may be damaged, or evicted."""
_LOOKED_AT = 64
"""Records that tell what a store is made with."""
_TICK = "store/tick"
_TOUCH_SECONDS = 1.0


class _Memory:
    """New units, in memory."""

    def write(self, pieces: Sequence[Bytes | bytes]) -> bytes:
        return b"".join(bytes(piece) for piece in pieces)


class Shelf:
    """Units in another engine.

    Parameters
    ----------
    values
        The engine.
    block_tokens, codec
        That the caller asks for; None for whatever the store has.
    made
        Settings of a store that is made; None where one must be there.
    ram_bytes
        Most bytes of units that are kept in memory.
    read_only
        Nothing is written.
    max_bytes
        Most bytes of all units; None for no bound.

    Raises
    ------
    SourceError
        Where there is no store, or one of another version; nothing is said while the engine does not answer.
    OptionError
        For another `block_tokens` or `codec` than the store has.
    """

    def __init__(
        self,
        values: Patient,
        *,
        block_tokens: int | None,
        codec: str | None,
        made: Settings | None,
        ram_bytes: int,
        read_only: bool,
        max_bytes: int | None = None,
    ) -> None:
        self.label = values.label
        self.values = values
        self.read_only = read_only
        self.notes: list[str] = []
        self._asked, self._made = (block_tokens, codec), made
        self._known: Settings | None = None
        self.tables = KeptTables(self._read_tables, lambda: values.names_in(TABLES))
        self._spaces: dict[str, Space] = {}
        self._numbers: dict[str, int] = {}
        """Of spaces, in the order of their first puts."""
        self._ram = Ram(ram_bytes)
        self._places: dict[int, str] = {}
        self._bad: set[int] = set()
        self._lock = threading.Lock()
        self.max_bytes = max_bytes
        self.held_bytes: int | None = None
        self.put_bytes = 0
        self._touched: dict[int, None] = {}
        self._last_touch = time.monotonic()
        self._tick = 0
        try:
            self._known = self._about()
        except OutageError:
            self._known = None  # asked for again when it is needed

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; an `OutageError` where the engine has not said it yet."""
        return self._settings().block_tokens

    @property
    def codec(self) -> str:
        """What new units are made of; errors as `block_tokens`."""
        return self._settings().codec

    def _settings(self) -> Settings:
        if self._known is None:
            self._known = self._about()
        return self._known

    def spaces(self) -> list[Space]:
        """All spaces, in the order of their first puts."""
        names = self.values.names_in("spaces")[:_MAX_SPACES]
        new = [name for name in names if name not in self._spaces]
        for name, document in zip(new, self.values.get_many([f"spaces/{name}" for name in new]), strict=True):
            with suppress(KvmnnError):  # a damaged one is a miss: whoever puts next writes it again
                text = (document or b"").decode("utf-8", "replace")
                space = from_json(text, self.label)
                if space.key.hex() == name:
                    self._spaces[name] = space
                    number = json.loads(text).get("number")
                    self._numbers[name] = number if isinstance(number, int) else 0
        known = [name for name in names if name in self._spaces]
        return [self._spaces[name] for name in sorted(known, key=lambda name: (self._numbers[name], name))]

    def keep_space(self, space: Space) -> None:
        """As `Units`: the engine may have evicted it, and its units are not found without it."""
        if not self.read_only and space.key not in {each.key for each in self.spaces()}:
            self.values.put_many({f"spaces/{space.key.hex()}": self._document(space)})

    def _document(self, space: Space) -> bytes:
        """What is noted down of a space."""
        number = self._numbers.get(space.key.hex(), max(self._numbers.values(), default=0) + 1)
        return json.dumps({**json.loads(space.to_json()), "number": number}).encode()

    def has_texts(self, space: Space) -> bool:
        """Whether anything of a space is stored."""
        folder = folder_after(space.key) if space.layers else STATES + space.key.hex()
        return bool(self.values.names_in(folder))

    def find(self, text: Text) -> Found:
        """The longest stored beginning of a text: four round trips, however long it is."""
        while True:
            found = self._find(text)
            lost = self._lost([place.unit for place in found.places])
            if not lost:
                return found
            self._bad.update(lost)  # the engine has evicted them: their records would be in the way
            if not self.read_only:
                self.values.delete([self._places[unit] for unit in lost if unit in self._places])

    def _lost(self, units: Sequence[int]) -> list[int]:
        """The units that are not there any more."""
        asked = [unit for unit in units if self._ram.get(unit) is None]
        return [
            unit
            for unit, is_there in zip(asked, self.values.there(list(map(unit_name, asked))), strict=True)
            if not is_there
        ]

    def _find(self, text: Text) -> Found:
        size = text.block_tokens
        count = len(text.keys)
        names = [record_name(text.key_before(n), text.ids[n * size : (n + 1) * size]) for n in range(count)]
        records = [
            self._usable(data, name, text) for data, name in zip(self.values.get_many(names), names, strict=True)
        ]
        places: list[Place] = []
        blocks, extra = 0, None
        while blocks < count and (record := records[blocks]) is not None:
            same = agreeing(record.ids, text.ids[blocks * size :])
            whole = same // size
            if not whole:
                break
            self._note_place(record, size)
            places.append(Place(record.unit, 0, whole * size))
            blocks += whole
            extra = same - whole * size
        rest = text.ids[blocks * size : (blocks + 1) * size]
        branch = (
            max(self._branches(text, blocks, rest), key=lambda place: place.take, default=None) if rest.size else None
        )
        if places and extra and (branch is None or branch.take <= extra):
            places[-1] = places[-1]._replace(take=places[-1].take + extra)
        elif branch is not None and branch.take:
            places.append(branch)
        return Found(tuple(places), blocks)

    def read(self, units: Sequence[int]) -> list[Bytes | None]:
        """The bytes of units, from memory or in one round trip; None for those that are not there."""
        held = {unit: self._ram.get(unit) for unit in units}
        missing = [unit for unit, data in held.items() if data is None]
        for unit, data in zip(missing, self.values.get_many([unit_name(unit) for unit in missing]), strict=True):
            if data is not None:
                held[unit] = data
                self._ram.put(unit, data)
        return [None if (data := held[unit]) is None else np.frombuffer(data, np.uint8) for unit in units]

    def at_hand(self, unit: int) -> Bytes | None:
        """The bytes of a unit that is kept in memory."""
        data = self._ram.get(unit)
        return None if data is None else np.frombuffer(data, np.uint8)

    @contextmanager
    def stage(self) -> Iterator[_Memory]:
        """New units stay in memory."""
        yield _Memory()

    def add(self, space: Space, text: Text, new: Sequence[NewUnit], tables: TableSets | None) -> Added:
        """Take in units of a text: the tables that some need, the units, and then their records.

        Raises
        ------
        ParentGoneError
            Where another has put a text at once that begins as this one does: what is left is put behind it.
        """
        self.check_writable()
        units: dict[str, bytes] = {}
        records: dict[str, Record] = {}
        for unit in new:
            number = unit_number(space.key, unit.parent, unit.ids)
            assert isinstance(unit.staged, bytes)
            units[unit_name(number)] = unit.staged
            record = Record(space.key, unit.parent, number, unit.nbytes, unit.start, unit.ids)
            records[record.name(text.block_tokens)] = record
        tail = self._tail_before(new[0], text)
        about = {f"spaces/{space.key.hex()}": self._document(space)}
        if tables is not None:
            about[f"{TABLES}/{object_name(space.key, tables.key)}"] = tables.data
        then = {name: record.to_bytes() for name, record in records.items()}
        there = self.values.put_new({**about, **units}, then)
        self._bad.difference_update(record.unit for record in records.values())
        lost = self._settle({name: records[name] for name in there})
        if lost:
            self.values.delete([unit_name(record.unit) for record in lost])
            raise ParentGoneError("another has put a text that begins alike")
        for name, data in units.items():
            self._ram.put(int(name.rpartition("/")[2], 16), data)
        if tail is not None:
            self.forget([tail])
        stored = sum(map(len, units.values()))
        removed = 0 if tail is None else tail.nbytes
        bounding.pin_again(self, text)
        self.touch([record.unit for record in records.values()])
        return Added(stored, removed + bounding.after_put(self, stored))

    def find_state(self, text: Text, tokens: int) -> StatePlace | None:
        """The state of the longest beginning of at most `tokens` tokens that has one: three round trips."""
        folder = STATES + text.space.hex()
        names = {name: said for name in self.values.names_in(folder) if (said := named_state(name)) is not None}
        keys: dict[int, str] = {}
        for name in sorted(names, reverse=True):
            size, key = names[name]
            if not 0 < size <= tokens:
                continue
            if size not in keys:
                keys[size] = state_key(*text.end(size)).hex()
            if keys[size] != key:
                continue
            record = self._usable(self.values.get_many([f"{folder}/{name}"])[0], f"{folder}/{name}", text)
            if record is not None and not self._lost([record.unit]):
                self._note_place(record, text.block_tokens)
                return StatePlace(size, record.unit)
        return None

    def add_state(self, space: Space, text: Text, state: PrefixState) -> Added:
        """As `Units`; whoever looks for a state looks for its units first."""
        self.check_writable()
        if space.layers and self.find(text).tokens < text.ids.size:
            raise ParentGoneError("the blocks before a state are gone")
        data = b"".join(bytes(piece) for piece in state.to_pieces())
        number, start = state_number(state.key), state.tokens - int(state.ids.size)
        record = StateRecord(space.key, state.parent, number, len(data), start, state.ids, state.raw_bytes)
        name = record.name(text.block_tokens)
        first = {f"spaces/{space.key.hex()}": self._document(space), unit_name(number): data}
        if self.values.put_new(first, {name: record.to_bytes()}):
            self.values.put_many({name: record.to_bytes()})  # the one that is there may be damaged
        self._bad.discard(number)
        self._ram.put(number, data)
        bounding.pin_again(self, text)
        self.touch([number])
        return Added(len(data), bounding.after_put(self, len(data)))

    def _tail_before(self, new: NewUnit, text: Text) -> Record | None:
        """The tail that a longer text repeats: a chat that grows would leave one at every turn."""
        folder, name = record_name(new.parent, new.ids[: text.block_tokens]).split("/")
        before = [found for found in self.values.near(folder, name, 1) if found < name]
        paths = [f"{folder}/{found}" for found in before]
        for data, path in zip(self.values.get_many(paths), paths, strict=True):
            record = placed(data, path, text.block_tokens)
            if record is None or record.ids.size >= min(text.block_tokens, new.ids.size):
                continue
            if agreeing(record.ids, new.ids) == record.ids.size and record.unit not in bounding.pinned_units(self):
                return record
        return None

    def _settle(self, records: Mapping[str, Record]) -> list[Record]:
        """Of records whose names were taken those that another text has; what is of no use is replaced."""
        lost, mine = [], {}
        for (name, record), data in zip(records.items(), self.values.get_many(list(records)), strict=True):
            other = placed(data, name, self.block_tokens)
            if other is not None and other.unit == record.unit:
                continue
            if other is not None and self.values.get_many([unit_name(other.unit)])[0] is not None:
                lost.append(record)
            else:
                mine[name] = record.to_bytes()
        self.values.put_many(mine)
        return lost

    def keep_bound(self) -> int:
        """Remove what is above the bound, where this process has not looked yet: bytes."""
        return bounding.after_put(self, 0)

    def touch(self, units: Iterable[int], *, now: bool = False) -> None:
        """Units were used: noted down with others after a while, or `now`, where that is cheap or somebody bounds."""
        if self.read_only or not (self.values.counts_uses or self.max_bytes is not None):
            return
        with self._lock:
            for unit in units:  # in the order of their last uses
                self._touched.pop(unit, None)
                self._touched[unit] = None
            if not self._touched or not (now or time.monotonic() - self._last_touch >= _TOUCH_SECONDS):
                return
            touched, self._touched = list(self._touched), {}
            self._last_touch = time.monotonic()
        with suppress(KvmnnError):  # the order of uses is no reason to fail
            (data,) = self.values.get_many([_TICK])
            tick = max(self._tick, tick_of(data))
            uses = {use_name(unit): use_bytes(tick + at) for at, unit in enumerate(touched, 1)}
            self._tick = tick + len(touched)
            self.values.put_many({_TICK: use_bytes(self._tick), **uses})

    def discard(self, unit: int, reason: str, notes: list[str]) -> None:
        """Remove a unit that is not what it should be; one that the engine has evicted is no damage."""
        self._bad.add(unit)
        kept = self._ram.get(unit) is not None
        self._ram.drop(unit)
        record = self._places.get(unit)
        if kept or self.values.get_many([unit_name(unit)])[0] is not None:
            done = "is passed over" if self.read_only else "was removed"
            notes.append(f"{self.label}: unit {unit:032x}: damaged, {done}, with what goes on from it: {reason}")
        if not self.read_only:
            self.values.delete([unit_name(unit), *([record] if record else [])])

    def check_open(self) -> None:
        """`KvmnnError` for a store that was closed."""
        self.values.check_open()

    def close(self) -> None:
        """Note down the uses, and let go of connections."""
        self.touch((), now=True)
        self.values.close()

    def check_writable(self) -> None:
        """`OutputError` for a store that is open for reading only."""
        if self.read_only:
            raise OutputError(f"{self.label}: is open for reading only")

    def forget(self, records: Iterable[Record]) -> None:
        """Remove units and their records."""
        gone = list(records)
        names = [record.name(self.block_tokens) for record in gone]
        uses = [use_name(record.unit) for record in gone]
        self.values.delete([*names, *(unit_name(record.unit) for record in gone), *uses])
        self.drop(gone)

    def drop(self, gone: Iterable[Record]) -> None:
        """Keep units no longer in memory."""
        for record in gone:
            self._ram.drop(record.unit)

    def _about(self) -> Settings:
        (data,) = self.values.get_many([ABOUT])
        if data is None:
            if self._made is None or self.read_only:
                is_there = ABOUT.partition("/")[0] in self.values.foreign()
                why = ": its key kvmnn:store is of another type than a store writes" if is_there else ""
                raise SourceError(f"{self.label}: holds no prefix store{why}")
            self.values.put_many({ABOUT: settings_document(self._made)})
            return self._made
        try:
            found = parse_settings(data, f"{self.label}: {ABOUT}")
        except ManifestError as error:
            found = self._settings_told(error)
        check_settings(self.label, found, *self._asked)
        return found

    def _settings_told(self, error: ManifestError) -> Settings:
        """What units and records say of a store whose settings are damaged; they are noted down anew."""
        names = self.values.tree(AFTER)[:_LOOKED_AT]
        for name, record in zip(names, map(from_bytes, self.values.get_many(names)), strict=True):
            block_tokens = None if record is None else told_block_tokens(name, record)
            if record is None or block_tokens is None:
                continue
            (unit,) = self.values.get_many([unit_name(record.unit)])
            if unit is not None:
                found = Settings(block_tokens, "dense" if unit.startswith(DENSE_MAGIC) else "frames")
                if not self.read_only:
                    self.values.put_many({ABOUT: settings_document(found)})
                self.notes.append(f"{error}: it was damaged, and is made anew by what a unit says")
                return found
        wanted = settings_document(Settings(64, "dense")).decode().strip()
        raise ManifestError(f"{error}; write what the store was made with there, such as {wanted}") from None

    def _read_tables(self, name: str) -> bytes | None:
        return self.values.get_many([f"{TABLES}/{name}"])[0]

    def _branches(self, text: Text, blocks: int, rest: Ids) -> Iterator[Place]:
        """What follows the last whole block, as far as it agrees."""
        folder, name = record_name(text.key_before(blocks), rest).split("/")
        names = self.values.near(folder, name, _NEAR)
        named = named_count(rest)
        wanted = as_text(rest[:named])
        same = {found: agreeing_texts(named_ids(found), wanted) for found in names}
        most = max(same.values(), default=0)
        best = [found for found in names if same[found] == most] if most else []
        if most < named or named == rest.size:  # each of them agrees as far
            best = best[:_SOME]
        paths = [f"{folder}/{found}" for found in best]
        for data, path in zip(self.values.get_many(paths), paths, strict=True):
            record = self._usable(data, path, text)
            if record is not None:
                self._note_place(record, text.block_tokens)
                yield Place(record.unit, 0, agreeing(record.ids, rest))

    def _usable(self, data: bytes | None, name: str, text: Text) -> Record | None:
        record = placed(data, name, text.block_tokens)
        return None if record is None or record.space != text.space or record.unit in self._bad else record

    def _note_place(self, record: Record, block_tokens: int) -> None:
        with self._lock:
            if len(self._places) > 1 << 16:
                self._places.clear()
            self._places[record.unit] = record.name(block_tokens)
