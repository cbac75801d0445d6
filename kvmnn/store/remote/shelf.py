"""A store past one machine: units as values of another engine, and beside each a record of where it stands.

There is no index and there are no transactions. A record is written behind its unit, and both are named by what they
hold, so that whoever puts the same writes the same. What two put at once that begins alike may hide one of the two: a
cache can be put again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from ...dtypes import Bytes
from ...errors import KvmnnError, OptionError, OutputError, SourceError
from ...files.json_document import parse
from ..beside import MAX_BLOCK_TOKENS
from ..lookup import Found, Place, Text
from ..space import Space, from_json
from ..token_ids import Ids, agreeing
from ..units import Added
from ..updates import NewUnit
from .ram import Ram
from .records import Record, folder_after, from_bytes, record_name, unit_number
from .values import OutageError, Patient

ABOUT = "store/about"
_SCHEMA, _VERSION = "kvmnn-store", 1
_MAX_DOCUMENT = 1 << 16
_MAX_SPACES = 4096
_MAX_BRANCHES = 256
"""Continuations of one block that are compared with a text; where there are more, the others are not looked at."""


class _Memory:
    """New units, in memory."""

    def write(self, name: str, pieces: Sequence[Bytes | bytes]) -> bytes:
        return b"".join(bytes(piece) for piece in pieces)


class Shelf:
    """Units in another engine.

    Parameters
    ----------
    values
        The engine.
    block_tokens
        That the caller asks for; None for whatever the store has.
    default_tokens
        Of a store that is made, where the caller asks for none; None where one must be there.
    ram_bytes
        Most bytes of units that are kept in memory.
    read_only
        Nothing is written.

    Raises
    ------
    SourceError
        Where there is no store, or one of another version; nothing is said while the engine does not answer.
    OptionError
        For other `block_tokens` than the store has.
    """

    def __init__(
        self,
        values: Patient,
        *,
        block_tokens: int | None,
        default_tokens: int | None,
        ram_bytes: int,
        read_only: bool,
    ) -> None:
        self.label = values.label
        self.values = values
        self.read_only = read_only
        self.notes: list[str] = []
        self._asked_tokens, self._default_tokens = block_tokens, default_tokens
        self._known_tokens: int | None = None
        self._spaces: dict[str, Space] = {}
        self._ram = Ram(ram_bytes)
        self._places: dict[int, str] = {}
        self._bad: set[int] = set()
        self._lock = threading.Lock()
        try:
            self._known_tokens = self._about()
        except OutageError:
            self._known_tokens = None  # asked for again when it is needed

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; an `OutageError` where the engine has not said it yet."""
        if self._known_tokens is None:
            self._known_tokens = self._about()
        return self._known_tokens

    def spaces(self) -> list[Space]:
        """All spaces."""
        names = self.values.names_in("spaces")[:_MAX_SPACES]
        new = [name for name in names if name not in self._spaces]
        for name, document in zip(new, self.values.get_many([f"spaces/{name}" for name in new]), strict=True):
            with suppress(KvmnnError):  # a damaged one is a miss: whoever puts next writes it again
                space = from_json((document or b"").decode("utf-8", "replace"), self.label)
                if space.key.hex() == name:
                    self._spaces[name] = space
        return [self._spaces[name] for name in names if name in self._spaces]

    def find(self, text: Text) -> Found:
        """The longest stored beginning of a text: three round trips, however long it is."""
        size = text.block_tokens
        count = len(text.keys)
        names = [record_name(text.key_before(n), text.ids[n * size : (n + 1) * size]) for n in range(count)]
        records = [self._usable(data, text) for data in self.values.get_many(names)]
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
        for unit, data in zip(missing, self.values.get_many([_name(unit) for unit in missing]), strict=True):
            if data is not None:
                held[unit] = data
                self._ram.put(unit, data)
        return [None if (data := held[unit]) is None else np.frombuffer(data, np.uint8) for unit in units]

    @contextmanager
    def stage(self) -> Iterator[_Memory]:
        """New units stay in memory."""
        yield _Memory()

    def add(self, space: Space, text: Text, new: Sequence[NewUnit]) -> Added:
        """Take in units of a text: the units, and then their records."""
        self.check_writable()
        units: dict[str, bytes] = {}
        records: dict[str, bytes] = {f"spaces/{space.key.hex()}": space.to_json().encode()}
        for unit in new:
            number = unit_number(space.key, unit.parent, unit.ids)
            assert isinstance(unit.staged, bytes)
            units[_name(number)] = unit.staged
            record = Record(space.key, unit.parent, number, unit.nbytes, unit.start, unit.ids)
            records[record.name(text.block_tokens)] = record.to_bytes()
            self._bad.discard(number)
        self.values.put_many(units)
        self.values.put_many(records)
        for name, data in units.items():
            self._ram.put(int(name.rpartition("/")[2], 16), data)
        return Added(sum(map(len, units.values())), 0)

    def touch(self, units: Iterable[int]) -> None:
        """The engine counts uses by itself, if it does."""

    def discard(self, unit: int, reason: str, notes: list[str]) -> None:
        """Remove a unit that is not what it should be; one that the engine has evicted is no damage."""
        self._bad.add(unit)
        kept = self._ram.get(unit) is not None
        self._ram.drop(unit)
        record = self._places.get(unit)
        if kept or self.values.get_many([_name(unit)])[0] is not None:
            done = "is passed over" if self.read_only else "was removed"
            notes.append(f"{self.label}: unit {unit:032x}: damaged, {done}: {reason}")
        if not self.read_only:
            self.values.delete([_name(unit), *([record] if record else [])])

    def close(self) -> None:
        """Let go of connections."""
        self.values.close()

    def check_writable(self) -> None:
        """`OutputError` for a store that is open for reading only."""
        if self.read_only:
            raise OutputError(f"{self.label}: is open for reading only")

    def forget(self, records: Iterable[Record]) -> None:
        """Remove units and their records."""
        gone = list(records)
        names = [record.name(self.block_tokens) for record in gone]
        self.values.delete([*names, *(_name(record.unit) for record in gone)])
        for record in gone:
            self._ram.drop(record.unit)

    def _about(self) -> int:
        (data,) = self.values.get_many([ABOUT])
        if data is None:
            if self._default_tokens is None or self.read_only:
                raise SourceError(f"{self.label}: holds no prefix store")
            tokens = self._asked_tokens or self._default_tokens
            document = {"schema": _SCHEMA, "schema_version": _VERSION, "block_tokens": tokens}
            self.values.put_many({ABOUT: json.dumps(document).encode()})
            return tokens
        root = parse(data, f"{self.label}: {ABOUT}", _MAX_DOCUMENT)
        if root.at("schema").text() != _SCHEMA or root.at("schema_version").integer(1) != _VERSION:
            raise SourceError(f"{self.label}: holds a prefix store of another version: expected {_VERSION}")
        tokens = root.at("block_tokens").integer(1)
        if tokens > MAX_BLOCK_TOKENS:
            raise root.at("block_tokens").wrong(f"at most {MAX_BLOCK_TOKENS}")
        if self._asked_tokens not in (None, tokens):
            raise OptionError(f"{self.label}: has blocks of {tokens} tokens, not of {self._asked_tokens}")
        return tokens

    def _branches(self, text: Text, blocks: int, rest: Ids) -> Iterator[Place]:
        """What follows the last whole block, as far as it agrees."""
        folder = folder_after(text.key_before(blocks))
        names = [f"{folder}/{name}" for name in self.values.names_in(folder)[:_MAX_BRANCHES]]
        for data in self.values.get_many(names):
            record = self._usable(data, text)
            if record is not None:
                self._note_place(record, text.block_tokens)
                yield Place(record.unit, 0, agreeing(record.ids, rest))

    def _usable(self, data: bytes | None, text: Text) -> Record | None:
        record = from_bytes(data)
        return None if record is None or record.space != text.space or record.unit in self._bad else record

    def _note_place(self, record: Record, block_tokens: int) -> None:
        with self._lock:
            if len(self._places) > 1 << 16:
                self._places.clear()
            self._places[record.unit] = record.name(block_tokens)


def _name(unit: int) -> str:
    return f"units/{unit:032x}"
