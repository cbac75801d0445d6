"""Records of a remote store: which unit follows which block, and with which token ids. They replace an index."""

from __future__ import annotations

import struct
from dataclasses import field

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ...frames.buffers import integrity_checksum
from ..backend import MAX_BLOCK_TOKENS, MAX_UNIT_PRIORITY, MAX_UNIT_USES, compute_benefit
from ..namespace import (
    KEY_BYTES,
    MAX_TOKENS,
    Ids,
    compute_block_keys,
    compute_state_key,
    count_ids_in_sort_key,
    hash_key,
    mask_ids,
    to_sort_key,
)

RECORD_MAGIC = b"KVMNNPB1"
STATE_RECORD_MAGIC = b"KVMNNPB2"
RECORDS_FOLDER_PREFIX = "after-"
STATES_FOLDER_PREFIX = "states-"
"""Prefix of the folders of state records, one for each namespace."""
MAX_IDS_IN_NAME = 32
"""File systems limit the length of a name."""
_RECORD_STRUCT = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sQII")
_LOSS_BIT = 1 << 31
"""Of the number of tokens."""
_CHECKSUM_STRUCT = struct.Struct("<Q")
_TICK_STRUCT = struct.Struct("<Q")
_USE_STRUCT = struct.Struct("<QQQ")


@dataclass(frozen=True, eq=False)
class UnitRecord:
    """A unit that follows a block."""

    #: Keys of the namespace, and of the block before the unit; at the beginning of a sequence both are the same.
    namespace_key: bytes
    parent: bytes
    #: Number of the unit.
    unit: int
    #: Size of the unit in bytes.
    nbytes: int
    #: Tokens of the sequence before the unit.
    start: int
    #: Token ids of the unit.
    ids: Ids
    #: What the store hashes keys with.
    secret: bytes = field(default=b"", repr=False)
    #: As in `Unit`.
    has_loss: bool = False

    def make_name(self, block_tokens: int) -> str:
        """Return the name of the record."""
        return make_record_name(self.parent, self.ids[:block_tokens], self.secret)

    def compute_block_keys(self, block_tokens: int) -> list[bytes]:
        """Return the keys of the whole blocks of the unit."""
        return compute_block_keys(self.parent, self.ids, block_tokens, self.secret)

    def to_bytes(self) -> bytes:
        """Encode the record."""
        return self._encode(RECORD_MAGIC)

    def _encode(self, magic: bytes, raw_bytes: bytes = b"") -> bytes:
        unit = self.unit.to_bytes(KEY_BYTES, "big")
        tokens = self.ids.size | (_LOSS_BIT if self.has_loss else 0)
        fields = (magic, self.namespace_key, self.parent, unit, self.nbytes, self.start, tokens)
        data = _RECORD_STRUCT.pack(*fields) + self.ids.astype("<u4").tobytes() + raw_bytes
        return data + _CHECKSUM_STRUCT.pack(integrity_checksum(data))


@dataclass(frozen=True, eq=False)
class StateRecord(UnitRecord):
    """State of a prefix: `ids` are its last ids, at most a block, after the block with the key `parent`."""

    #: Bytes of its contents before compression.
    raw_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Length of the prefix."""
        return self.start + int(self.ids.size)

    @property
    def key(self) -> bytes:
        """Key of the state."""
        return compute_state_key(self.parent, self.ids, self.secret)

    def make_name(self, block_tokens: int) -> str:
        """Return the name of the record; names sort by the lengths of their prefixes."""
        return make_state_name(self.namespace_key, self.tokens, self.key)

    def compute_block_keys(self, block_tokens: int) -> list[bytes]:
        """Return nothing: no unit follows a state."""
        return []

    def to_bytes(self) -> bytes:
        """Encode the record."""
        return self._encode(STATE_RECORD_MAGIC, _CHECKSUM_STRUCT.pack(self.raw_bytes))

    def is_end_in(self, record: UnitRecord, block_tokens: int) -> bool:
        """Return whether a unit contains the end of the prefix."""
        keys = [record.parent, *record.compute_block_keys(block_tokens)]
        if record.namespace_key != self.namespace_key or self.parent not in keys:
            return False
        begin_token = keys.index(self.parent) * block_tokens
        return np.array_equal(record.ids[begin_token : begin_token + self.ids.size], self.ids)


def make_state_name(namespace_key: bytes, tokens: int, key: bytes) -> str:
    """Return the name of the record of a state with this key, of a prefix of `tokens` tokens."""
    return f"{STATES_FOLDER_PREFIX}{namespace_key.hex()}/{tokens:08x}-{key.hex()}"


def parse_state_name(name: str) -> tuple[int, str] | None:
    """Return length of the prefix and key of the state, in hexadecimal, from a name; None for other names."""
    tokens, _, key = name.partition("-")
    try:
        return int(tokens, 16), key
    except ValueError:
        return None


def parse_record(data: bytes | None, secret: bytes = b"") -> UnitRecord | None:
    """Decode a record; None if it is missing or damaged."""
    if data is None or len(data) < _RECORD_STRUCT.size + _CHECKSUM_STRUCT.size:
        return None
    magic, namespace, parent, unit, nbytes, start, tokens = _RECORD_STRUCT.unpack_from(data)
    has_loss, tokens = bool(tokens & _LOSS_BIT), tokens & ~_LOSS_BIT
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
        (raw_bytes,) = _CHECKSUM_STRUCT.unpack_from(data, ids_end)
        return StateRecord(namespace, parent, unit_number, nbytes, start, ids, secret, raw_bytes=raw_bytes)
    return UnitRecord(namespace, parent, unit_number, nbytes, start, ids, secret, has_loss)


def parse_record_at(data: bytes | None, name: str, block_tokens: int, secret: bytes = b"") -> UnitRecord | None:
    """Decode the record with this name; None if it belongs under another name."""
    record = parse_record(data, secret)
    return record if record is not None and record.make_name(block_tokens) == name else None


def make_record_name(parent: bytes, first_ids: Ids, secret: bytes = b"") -> str:
    """Return the name of the record of a unit that follows `parent`; `first_ids` are its first block, or a partial one.

    Names sort as the first ids, or what stands for them (`mask_ids`), of which they contain `count_ids_in_name`.
    """
    key = hash_key(parent + first_ids.tobytes(), secret).hex()
    shown_ids = mask_ids(parent, first_ids[:MAX_IDS_IN_NAME], secret)
    sort_key = to_sort_key(shown_ids[: count_ids_in_name(shown_ids)])
    return f"{make_records_folder(parent)}/{sort_key.hex()}-{key}"


def count_ids_in_name(first_ids: Ids) -> int:
    """Return how many ids a record name contains: `MAX_IDS_IN_NAME`, fewer of ids that take more bytes."""
    leading_ids = first_ids[:MAX_IDS_IN_NAME]
    return count_ids_in_sort_key(to_sort_key(leading_ids)[: 3 * MAX_IDS_IN_NAME])


def ids_from_name(name: str) -> bytes:
    """Return the ids in a record name, without its folder, as `to_sort_key`; empty for other names."""
    try:
        return bytes.fromhex(name.partition("-")[0])
    except ValueError:
        return b""


def make_records_folder(parent: bytes) -> str:
    """Return the folder of all records that follow a block."""
    return RECORDS_FOLDER_PREFIX + parent.hex()


def infer_block_tokens(name: str, record: UnitRecord) -> int | None:
    """Infer the block size of a store from the name of a record; None if the unit has one block only."""
    candidates = range(1, min(record.ids.size, MAX_BLOCK_TOKENS + 1))
    return next((candidate for candidate in candidates if record.make_name(candidate) == name), None)


def compute_unit_number(namespace_key: bytes, parent: bytes, ids: Ids, secret: bytes = b"") -> int:
    """Return the number of a unit with these tokens: the same for every writer."""
    return int.from_bytes(hash_key(namespace_key + parent + ids.tobytes(), secret), "big")


def make_unit_name(unit: int) -> str:
    """Return the name of the bytes of a unit."""
    return f"units/{unit:032x}"


def make_use_name(unit: int) -> str:
    """Return the name of the last use of a unit."""
    return f"uses/{unit:032x}"


def encode_tick(tick: int) -> bytes:
    """Encode a tick."""
    return _TICK_STRUCT.pack(tick)


def decode_tick(data: bytes | None) -> int:
    """Decode a tick; 0 if it is missing or damaged."""
    return int(_TICK_STRUCT.unpack(data)[0]) if data is not None and len(data) == _TICK_STRUCT.size else 0


class UnitUse(NamedTuple):
    """What is recorded of the uses of a unit."""

    #: Tick of the last one.
    tick: int = 0
    #: How often it was found, and once for its put.
    num_uses: int = 1
    #: Highest priority that was evicted before the last use.
    clock: int = 0

    def compute_priority(self, record: UnitRecord) -> int:
        """Return the priority by which the policy ``"benefit"`` evicts; state saves the whole prefix before it."""
        tokens = record.tokens if isinstance(record, StateRecord) else int(record.ids.size)
        return min(self.clock + self.num_uses * compute_benefit(tokens, record.nbytes), MAX_UNIT_PRIORITY)


def encode_use(use: UnitUse) -> bytes:
    """Encode the uses of a unit."""
    return _USE_STRUCT.pack(*use)


def has_benefit(data: bytes | None) -> bool:
    """Return whether recorded uses are those of a store with the policy ``"benefit"``."""
    return data is not None and len(data) == _USE_STRUCT.size


def decode_use(data: bytes | None) -> UnitUse:
    """Decode the uses of a unit, which a store without the policy ``"benefit"`` records as a tick."""
    if data is not None and has_benefit(data):
        tick, num_uses, clock = _USE_STRUCT.unpack(data)
        return UnitUse(tick, min(num_uses, MAX_UNIT_USES), min(clock, MAX_UNIT_PRIORITY))
    return UnitUse(decode_tick(data))
