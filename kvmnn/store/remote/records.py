"""What is noted down beside a unit where there is no index: where it stands in its text, and its ids."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from ...frames.hashing import checksum
from ..beside import MAX_BLOCK_TOKENS
from ..prefix_state import state_key
from ..space import KEY_BYTES
from ..token_ids import MAX_TOKENS, Ids, as_text, block_keys, ids_in_text

MAGIC = b"KVMNNPB1"
STATE_MAGIC = b"KVMNNPB2"
AFTER = "after-"
STATES = "states-"
"""Begin of the folders of records of windows and state, one for each space."""
NAMED_IDS = 32
"""Ids that the name of a record has: file systems allow for no more."""
_FIELDS = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sQII")
_CHECKSUM = struct.Struct("<Q")
_USE = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class Record:
    """A unit that follows a block.

    Parameters
    ----------
    space, parent
        Keys of the space and of the block before; that of the space at the beginning of a text.
    unit
        The unit's number.
    nbytes
        Of the unit.
    start
        Tokens of the text before it.
    ids
        Of its tokens.
    """

    space: bytes
    parent: bytes
    unit: int
    nbytes: int
    start: int
    ids: Ids

    def name(self, block_tokens: int) -> str:
        """Where the record lies."""
        return record_name(self.parent, self.ids[:block_tokens])

    def keys(self, block_tokens: int) -> list[bytes]:
        """The keys of the unit's whole blocks."""
        return block_keys(self.parent, self.ids, block_tokens)

    def to_bytes(self) -> bytes:
        """The record's bytes."""
        unit = self.unit.to_bytes(KEY_BYTES, "big")
        fields = _FIELDS.pack(MAGIC, self.space, self.parent, unit, self.nbytes, self.start, self.ids.size)
        data = fields + self.ids.astype("<u4").tobytes()
        return data + _CHECKSUM.pack(checksum(data))


@dataclass(frozen=True, eq=False)
class StateRecord(Record):
    """Windows and state of a prefix: `ids` are the last of its ids, at most a block, behind the block `parent`.

    Parameters
    ----------
    raw_bytes
        Of what it holds.
    """

    raw_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return self.start + int(self.ids.size)

    @property
    def key(self) -> bytes:
        """The key of the state."""
        return state_key(self.parent, self.ids)

    def name(self, block_tokens: int) -> str:
        """Where the record lies; names sort by the tokens of their prefixes."""
        return f"{STATES}{self.space.hex()}/{self.tokens:08x}-{self.key.hex()}"

    def keys(self, block_tokens: int) -> list[bytes]:
        """Nothing goes on from state."""
        return []

    def to_bytes(self) -> bytes:
        """The record's bytes."""
        unit = self.unit.to_bytes(KEY_BYTES, "big")
        fields = _FIELDS.pack(STATE_MAGIC, self.space, self.parent, unit, self.nbytes, self.start, self.ids.size)
        data = fields + self.ids.astype("<u4").tobytes() + _CHECKSUM.pack(self.raw_bytes)
        return data + _CHECKSUM.pack(checksum(data))

    def ends_in(self, record: Record, block_tokens: int) -> bool:
        """Whether a unit has the end of the prefix."""
        keys = [record.parent, *record.keys(block_tokens)]
        if record.space != self.space or self.parent not in keys:
            return False
        begin = keys.index(self.parent) * block_tokens
        return np.array_equal(record.ids[begin : begin + self.ids.size], self.ids)


def state_number(key: bytes) -> int:
    """The number of the unit of a state with this key."""
    return int.from_bytes(key, "big")


def named_state(name: str) -> tuple[int, str] | None:
    """Tokens of a prefix, and the key of its state in hexadecimal, by the name of its record; None for another name."""
    tokens, _, key = name.partition("-")
    try:
        return int(tokens, 16), key
    except ValueError:
        return None


def from_bytes(data: bytes | None) -> Record | None:
    """A record; None for what is none, or is damaged."""
    if data is None or len(data) < _FIELDS.size + _CHECKSUM.size:
        return None
    magic, space, parent, unit, nbytes, start, tokens = _FIELDS.unpack_from(data)
    ids_end = _FIELDS.size + 4 * tokens
    end = ids_end + (_CHECKSUM.size if magic == STATE_MAGIC else 0)
    if (
        magic not in (MAGIC, STATE_MAGIC)
        or not 1 <= tokens <= MAX_TOKENS
        or start > MAX_TOKENS
        or len(data) != end + _CHECKSUM.size
    ):
        return None
    if checksum(data[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        return None
    ids = np.frombuffer(data, "<u4", tokens, _FIELDS.size)
    number = int.from_bytes(unit, "big")
    if magic == STATE_MAGIC:
        return StateRecord(space, parent, number, nbytes, start, ids, _CHECKSUM.unpack_from(data, ids_end)[0])
    return Record(space, parent, number, nbytes, start, ids)


def placed(data: bytes | None, name: str, block_tokens: int) -> Record | None:
    """As `from_bytes` of what lies under a name; None for a record that belongs under another."""
    record = from_bytes(data)
    return record if record is not None and record.name(block_tokens) == name else None


def record_name(parent: bytes, first: Ids) -> str:
    """Where the record of a unit lies that follows `parent` and begins with the ids of one block, or a tail.

    Names sort as the first ids do, of which `named_count` are in them.
    """
    key = hashlib.blake2b(parent + first.tobytes(), digest_size=KEY_BYTES).hexdigest()
    return f"{folder_after(parent)}/{name_begin(first)}-{key}"


def name_begin(first: Ids) -> str:
    """With what the name of a record begins, in its folder."""
    return as_text(first[: named_count(first)]).hex()


def named_count(first: Ids) -> int:
    """How many ids of a unit are in the name of its record: `NAMED_IDS`, fewer of ids that take more bytes."""
    named = first[:NAMED_IDS]
    return ids_in_text(as_text(named)[: 3 * NAMED_IDS])


def named_ids(name: str) -> bytes:
    """The ids in the name of a record, in its folder, as `as_text` has them; empty for another name."""
    try:
        return bytes.fromhex(name.partition("-")[0])
    except ValueError:
        return b""


def folder_after(parent: bytes) -> str:
    """The folder of all records that follow a block."""
    return AFTER + parent.hex()


def told_block_tokens(name: str, record: Record) -> int | None:
    """Of how many tokens the blocks of a store are, by the name of a record; None where the unit has one alone."""
    sizes = range(1, min(record.ids.size, MAX_BLOCK_TOKENS + 1))
    return next((size for size in sizes if record.name(size) == name), None)


def unit_number(space: bytes, parent: bytes, ids: Ids) -> int:
    """The number of a unit with these tokens: the same whoever puts it."""
    return int.from_bytes(hashlib.blake2b(space + parent + ids.tobytes(), digest_size=KEY_BYTES).digest(), "big")


def unit_name(unit: int) -> str:
    """Where the bytes of a unit lie."""
    return f"units/{unit:032x}"


def use_name(unit: int) -> str:
    """Where it stands when a unit was last used."""
    return f"uses/{unit:032x}"


def use_bytes(tick: int) -> bytes:
    """A tick as it is stored."""
    return _USE.pack(tick)


def tick_of(data: bytes | None) -> int:
    """A tick that was stored; 0 for what is none."""
    return int(_USE.unpack(data)[0]) if data is not None and len(data) == _USE.size else 0
