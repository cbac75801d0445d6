"""What is noted down beside a unit where there is no index: where it stands in its text, and its ids."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from ...frames.buffers import integrity_checksum
from ..backend import MAX_BLOCK_TOKENS
from ..namespace import (
    KEY_BYTES,
    MAX_TOKENS,
    Ids,
    compute_block_keys,
    compute_state_key,
    count_ids_in_sort_key,
    to_sort_key,
)

RECORD_MAGIC = b"KVMNNPB1"
STATE_RECORD_MAGIC = b"KVMNNPB2"
RECORDS_FOLDER_PREFIX = "after-"
STATES_FOLDER_PREFIX = "states-"
"""Begin of the folders of records of windows and state, one for each space."""
MAX_IDS_IN_NAME = 32
"""Ids that the name of a record has: file systems allow for no more."""
_RECORD_STRUCT = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sQII")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_USE_STRUCT = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class UnitRecord:
    """A unit that follows a block.

    Parameters
    ----------
    namespace_key, parent
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

    namespace_key: bytes
    parent: bytes
    unit: int
    nbytes: int
    start: int
    ids: Ids

    def make_name(self, block_tokens: int) -> str:
        """Where the record lies."""
        return make_record_name(self.parent, self.ids[:block_tokens])

    def compute_block_keys(self, block_tokens: int) -> list[bytes]:
        """The keys of the unit's whole blocks."""
        return compute_block_keys(self.parent, self.ids, block_tokens)

    def to_bytes(self) -> bytes:
        """The record's bytes."""
        unit = self.unit.to_bytes(KEY_BYTES, "big")
        fields = _RECORD_STRUCT.pack(
            RECORD_MAGIC, self.namespace_key, self.parent, unit, self.nbytes, self.start, self.ids.size
        )
        data = fields + self.ids.astype("<u4").tobytes()
        return data + _CHECKSUM_STRUCT.pack(integrity_checksum(data))


@dataclass(frozen=True, eq=False)
class StateRecord(UnitRecord):
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
        return compute_state_key(self.parent, self.ids)

    def make_name(self, block_tokens: int) -> str:
        """Where the record lies; names sort by the tokens of their prefixes."""
        return f"{STATES_FOLDER_PREFIX}{self.namespace_key.hex()}/{self.tokens:08x}-{self.key.hex()}"

    def compute_block_keys(self, block_tokens: int) -> list[bytes]:
        """Nothing goes on from state."""
        return []

    def to_bytes(self) -> bytes:
        """The record's bytes."""
        unit = self.unit.to_bytes(KEY_BYTES, "big")
        fields = _RECORD_STRUCT.pack(
            STATE_RECORD_MAGIC, self.namespace_key, self.parent, unit, self.nbytes, self.start, self.ids.size
        )
        data = fields + self.ids.astype("<u4").tobytes() + _CHECKSUM_STRUCT.pack(self.raw_bytes)
        return data + _CHECKSUM_STRUCT.pack(integrity_checksum(data))

    def is_end_in(self, record: UnitRecord, block_tokens: int) -> bool:
        """Whether a unit has the end of the prefix."""
        keys = [record.parent, *record.compute_block_keys(block_tokens)]
        if record.namespace_key != self.namespace_key or self.parent not in keys:
            return False
        begin_token = keys.index(self.parent) * block_tokens
        return np.array_equal(record.ids[begin_token : begin_token + self.ids.size], self.ids)


def compute_state_number(key: bytes) -> int:
    """The number of the unit of a state with this key."""
    return int.from_bytes(key, "big")


def parse_state_name(name: str) -> tuple[int, str] | None:
    """Tokens of a prefix, and the key of its state in hexadecimal, by the name of its record; None for another name."""
    tokens, _, key = name.partition("-")
    try:
        return int(tokens, 16), key
    except ValueError:
        return None


def parse_record(data: bytes | None) -> UnitRecord | None:
    """A record; None for what is none, or is damaged."""
    if data is None or len(data) < _RECORD_STRUCT.size + _CHECKSUM_STRUCT.size:
        return None
    magic, namespace, parent, unit, nbytes, start, tokens = _RECORD_STRUCT.unpack_from(data)
    ids_end = _RECORD_STRUCT.size + 4 * tokens
    checksum_begin = ids_end + (_CHECKSUM_STRUCT.size if magic == STATE_RECORD_MAGIC else 0)
    if (
        magic not in (RECORD_MAGIC, STATE_RECORD_MAGIC)
        or not 1 <= tokens <= MAX_TOKENS
        or start > MAX_TOKENS
        or len(data) != checksum_begin + _CHECKSUM_STRUCT.size
    ):
        return None
    if integrity_checksum(data[:checksum_begin]) != _CHECKSUM_STRUCT.unpack_from(data, checksum_begin)[0]:
        return None
    ids = np.frombuffer(data, "<u4", tokens, _RECORD_STRUCT.size)
    unit_number = int.from_bytes(unit, "big")
    if magic == STATE_RECORD_MAGIC:
        return StateRecord(
            namespace, parent, unit_number, nbytes, start, ids, _CHECKSUM_STRUCT.unpack_from(data, ids_end)[0]
        )
    return UnitRecord(namespace, parent, unit_number, nbytes, start, ids)


def parse_record_at(data: bytes | None, name: str, block_tokens: int) -> UnitRecord | None:
    """As `parse_record` of what lies under a name; None for a record that belongs under another."""
    record = parse_record(data)
    return record if record is not None and record.make_name(block_tokens) == name else None


def make_record_name(parent: bytes, first_ids: Ids) -> str:
    """Where the record of a unit lies that follows `parent` and begins with the ids of one block, or a tail.

    Names sort as the first ids do, of which `count_ids_in_name` are in them.
    """
    key = hashlib.blake2b(parent + first_ids.tobytes(), digest_size=KEY_BYTES).hexdigest()
    return f"{make_records_folder(parent)}/{make_name_prefix(first_ids)}-{key}"


def make_name_prefix(first_ids: Ids) -> str:
    """With what the name of a record begins, in its folder."""
    return to_sort_key(first_ids[: count_ids_in_name(first_ids)]).hex()


def count_ids_in_name(first_ids: Ids) -> int:
    """How many ids of a unit are in the name of its record: `MAX_IDS_IN_NAME`, fewer of ids that take more bytes."""
    leading_ids = first_ids[:MAX_IDS_IN_NAME]
    return count_ids_in_sort_key(to_sort_key(leading_ids)[: 3 * MAX_IDS_IN_NAME])


def ids_from_name(name: str) -> bytes:
    """The ids in the name of a record, in its folder, as `to_sort_key` has them; empty for another name."""
    try:
        return bytes.fromhex(name.partition("-")[0])
    except ValueError:
        return b""


def make_records_folder(parent: bytes) -> str:
    """The folder of all records that follow a block."""
    return RECORDS_FOLDER_PREFIX + parent.hex()


def infer_block_tokens(name: str, record: UnitRecord) -> int | None:
    """Of how many tokens the blocks of a store are, by the name of a record; None where the unit has one alone."""
    candidates = range(1, min(record.ids.size, MAX_BLOCK_TOKENS + 1))
    return next((candidate for candidate in candidates if record.make_name(candidate) == name), None)


def compute_unit_number(namespace_key: bytes, parent: bytes, ids: Ids) -> int:
    """The number of a unit with these tokens: the same whoever puts it."""
    return int.from_bytes(
        hashlib.blake2b(namespace_key + parent + ids.tobytes(), digest_size=KEY_BYTES).digest(), "big"
    )


def make_unit_name(unit: int) -> str:
    """Where the bytes of a unit lie."""
    return f"units/{unit:032x}"


def make_use_name(unit: int) -> str:
    """Where it stands when a unit was last used."""
    return f"uses/{unit:032x}"


def encode_tick(tick: int) -> bytes:
    """A tick as it is stored."""
    return _USE_STRUCT.pack(tick)


def decode_tick(data: bytes | None) -> int:
    """A tick that was stored; 0 for what is none."""
    return int(_USE_STRUCT.unpack(data)[0]) if data is not None and len(data) == _USE_STRUCT.size else 0
