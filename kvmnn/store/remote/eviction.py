"""Pins and bounds of a store in another engine: what was not used for longest goes first, ends before beginnings.

The engine has no index, so all records are read where a bound is looked after: when what this process has put since
it last looked could exceed it, and not at every put.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ...errors import KvmnnError, ManifestError
from ...files.schema import parse_document
from ..lookup import PrefixMatch, StateLocation, TokenSequence
from ..namespace import Ids, Namespace, compute_block_keys, compute_sequence_key
from .key_values import CircuitBreaker
from .records import (
    RECORDS_FOLDER_PREFIX,
    STATES_FOLDER_PREFIX,
    StateRecord,
    UnitRecord,
    decode_tick,
    make_unit_name,
    make_use_name,
    parse_record_at,
)

_NAMES_PER_REQUEST = 256
_LIMIT_CHECK_DIVISOR = 32
"""Of the bound, what other processes may have put meanwhile: after so much of its own a process looks again."""
_MAX_PIN_DOCUMENT_BYTES = 1 << 16
_MAX_EVICTION_TRIES = 8
_FIRST_IN_ORDER = -1 << 32
"""Without its windows and state a unit is of no use: of those used as long ago it is the next that goes."""


class EvictableBackend(Protocol):
    """What is needed of `kvmnn.store.remote.backend.Shelf`."""

    key_values: CircuitBreaker
    label: str
    max_bytes: int | None
    last_total_bytes: int | None
    """Of all units when this process last looked; None before."""
    bytes_since_check: int
    """That it has put since."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest stored beginning of a text."""

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """The state of the longest beginning that has one."""

    def touch(self, units: Iterable[int], *, immediately: bool = False) -> None:
        """Units were used."""

    def evict_from_memory(self, records: Iterable[UnitRecord]) -> None:
        """Keep units no longer in memory."""


def pin(backend: EvictableBackend, namespace: Namespace, ids: Ids) -> bool:
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
    name = compute_sequence_key(namespace.key, ids).hex()
    (previous_pin,) = backend.key_values.get_many([f"pins/{name}"])
    end_units = _find_end_units(backend, sequence)
    if end_units:
        _save_pin(backend, name, end_units, ids.size)
        end_units = _find_end_units(backend, sequence)  # nobody evicts it from here on
    if not end_units:
        backend.key_values.delete([f"pins/{name}"])
        stored_tokens = backend.find_prefix(sequence).tokens
        raise KvmnnError(f"{backend.label}: holds only {stored_tokens:,} tokens of this text of {ids.size:,}")
    return previous_pin is None


def _find_end_units(backend: EvictableBackend, sequence: TokenSequence) -> tuple[int, ...]:
    """The unit with the end of a text, and that of its windows and state if it needs them; nothing unless all of the
    text is stored.
    """
    prefix_match = backend.find_prefix(sequence)
    end_units = tuple(unit_slice.unit for unit_slice in prefix_match.slices[-1:])
    if sequence.needs_state:
        state = backend.find_state(sequence, sequence.ids.size)
        if state is None or state.tokens < sequence.ids.size or (end_units and prefix_match.tokens < sequence.ids.size):
            return ()
        return (*end_units, state.unit)
    return end_units if prefix_match.tokens == sequence.ids.size else ()


def restore_pin(backend: EvictableBackend, sequence: TokenSequence) -> None:
    """Let the pins of a text and of its beginnings hold where their ends are stored now."""
    for name, (pinned_units, tokens) in _read_pins(backend).items():
        if (
            not 0 < tokens <= sequence.ids.size
            or compute_sequence_key(sequence.namespace_key, sequence.ids[:tokens]).hex() != name
        ):
            continue
        end_units = _find_end_units(backend, sequence.take_prefix(tokens))
        if end_units and end_units != pinned_units:
            _save_pin(backend, name, end_units, tokens)


def unpin(backend: EvictableBackend, namespace: Namespace, ids: Ids) -> bool:
    """Let go of a text; whether it was pinned."""
    name = f"pins/{compute_sequence_key(namespace.key, ids).hex()}"
    (previous_pin,) = backend.key_values.get_many([name])
    backend.key_values.delete([name])
    return previous_pin is not None


def list_pins(backend: EvictableBackend) -> dict[str, tuple[int, ...]]:
    """The units of each pinned text, by the name of its pin; none where the pin is damaged."""
    return {name: end_units for name, (end_units, _) in _read_pins(backend).items()}


def _read_pins(backend: EvictableBackend) -> dict[str, tuple[tuple[int, ...], int]]:
    """The units with the end of each pinned text, and its tokens; none and 0 where the pin is damaged."""
    names = backend.key_values.list_names("pins")
    pin_by_name: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, data in zip(names, backend.key_values.get_many([f"pins/{name}" for name in names]), strict=True):
        pin_by_name[name] = (), 0
        with suppress(ManifestError, ValueError):
            document = parse_document(data or b"", backend.label, _MAX_PIN_DOCUMENT_BYTES)
            unit_texts = [document.get(key).read_str() for key in ("unit", "state") if key in document.value]
            pin_by_name[name] = tuple(int(unit, 16) for unit in unit_texts), document.get("tokens").read_int(0)
    return pin_by_name


def _save_pin(backend: EvictableBackend, name: str, end_units: Sequence[int], tokens: int) -> None:
    """Pin the units that have the end of a stored text."""
    document: dict[str, object] = {"unit": f"{end_units[0]:032x}", "tokens": tokens}
    if len(end_units) > 1:
        document["state"] = f"{end_units[1]:032x}"
    backend.key_values.put_many({f"pins/{name}": json.dumps(document).encode()})


def list_pinned_units(backend: EvictableBackend) -> set[int]:
    """The units that pins keep."""
    return {unit for end_units in list_pins(backend).values() for unit in end_units}


def read_ticks(backend: EvictableBackend, records: Sequence[UnitRecord]) -> dict[int, int]:
    """When each unit was last used; 0 where nobody has noted it down."""
    tick_by_unit: dict[int, int] = {}
    for begin_index in range(0, len(records), _NAMES_PER_REQUEST):
        batch = records[begin_index : begin_index + _NAMES_PER_REQUEST]
        uses = backend.key_values.get_many([make_use_name(record.unit) for record in batch])
        tick_by_unit.update((record.unit, decode_tick(data)) for record, data in zip(batch, uses, strict=True))
    return tick_by_unit


def delete_unless_pinned(backend: EvictableBackend, records: Sequence[UnitRecord], known_pins: Collection[str]) -> bool:
    """Remove units with their records, unless other texts are pinned than are `known_pins`; whether that is so."""
    block_tokens = backend.block_tokens
    names = [
        name
        for record in records
        for name in (record.make_name(block_tokens), make_unit_name(record.unit), make_use_name(record.unit))
    ]
    if not backend.key_values.delete_if_unchanged(names, "pins", set(known_pins)):
        return False
    backend.evict_from_memory(records)
    return True


def enforce_limit_after_put(backend: EvictableBackend, stored_bytes: int) -> int:
    """Keep to the bound after `stored_bytes` bytes more; bytes of what had to go."""
    max_bytes = backend.max_bytes
    if max_bytes is None:
        return 0
    backend.bytes_since_check += stored_bytes
    if (
        backend.last_total_bytes is not None
        and backend.last_total_bytes + backend.bytes_since_check <= max_bytes
        and backend.bytes_since_check <= max_bytes // _LIMIT_CHECK_DIVISOR
    ):
        return 0
    backend.touch((), immediately=True)
    return evict_units(backend, max_bytes)[1]


def evict_units(backend: EvictableBackend, max_bytes: int) -> tuple[int, int]:
    """Remove what was not used for longest until no more than `max_bytes` are left; units, and their bytes."""
    for _ in range(_MAX_EVICTION_TRIES):  # pins may come meanwhile
        records = _read_stored_records(backend)
        pins = list_pins(backend)
        total_bytes = sum(record.nbytes for record in records)
        pinned = {unit for end_units in pins.values() for unit in end_units}
        evicted = _select_evicted(
            records, backend.block_tokens, read_ticks(backend, records), pinned, total_bytes - max_bytes
        )
        nbytes = sum(record.nbytes for record in evicted)
        if not evicted or delete_unless_pinned(backend, evicted, pins):
            backend.last_total_bytes, backend.bytes_since_check = total_bytes - nbytes, 0
            return len(evicted), nbytes
    return 0, 0


def _read_stored_records(backend: EvictableBackend) -> list[UnitRecord]:
    """The records of all units that are there."""
    stored_names = set(backend.key_values.list_names("units"))
    names = sorted(
        (*backend.key_values.list_tree(RECORDS_FOLDER_PREFIX), *backend.key_values.list_tree(STATES_FOLDER_PREFIX))
    )
    record_by_unit = {}
    for begin_index in range(0, len(names), _NAMES_PER_REQUEST):
        batch = names[begin_index : begin_index + _NAMES_PER_REQUEST]
        for name, data in zip(batch, backend.key_values.get_many(batch), strict=True):
            record = parse_record_at(data, name, backend.block_tokens)
            if record is not None and f"{record.unit:032x}" in stored_names:
                record_by_unit[record.unit] = record
    return list(record_by_unit.values())


def _select_evicted(
    records: Sequence[UnitRecord], block_tokens: int, tick_by_unit: Mapping[int, int], pinned: set[int], excess: int
) -> list[UnitRecord]:
    """The units that go for `excess` bytes: none that another follows or that is pinned."""
    record_by_block_key: dict[bytes, UnitRecord] = {}
    for record in records:
        for key in record.compute_block_keys(block_tokens):
            record_by_block_key.setdefault(key, record)
    children = dict.fromkeys((record.unit for record in records), 0)
    parents: dict[int, list[UnitRecord]] = {}
    ends_by_state = _find_ends_of_states(records, block_tokens)
    for record in records:
        parent = record_by_block_key.get(record.parent)
        parents[record.unit] = list(
            {
                parent_record.unit: parent_record
                for parent_record in (parent, *ends_by_state.get(record.unit, ()))
                if parent_record
            }.values()
        )
        for parent_record in parents[record.unit]:
            children[parent_record.unit] += 1
    by_unit = {record.unit: record for record in records}
    leaves = [
        (tick_by_unit[unit], -record.start, unit)
        for unit, record in by_unit.items()
        if not children[unit] and unit not in pinned
    ]
    heapq.heapify(leaves)
    evicted: list[UnitRecord] = []
    while excess > 0 and leaves:
        record = by_unit[heapq.heappop(leaves)[2]]
        evicted.append(record)
        excess -= record.nbytes
        for parent in parents[record.unit]:
            children[parent.unit] -= 1
            if not children[parent.unit] and parent.unit not in pinned:
                order = _FIRST_IN_ORDER if isinstance(record, StateRecord) else -parent.start
                heapq.heappush(leaves, (tick_by_unit[parent.unit], order, parent.unit))
    return evicted


def _find_ends_of_states(records: Sequence[UnitRecord], block_tokens: int) -> dict[int, list[UnitRecord]]:
    """The units that have the ends of prefixes whose windows and state are stored, by the numbers of these."""
    by_parent: dict[bytes, list[StateRecord]] = {}
    for record in records:
        if isinstance(record, StateRecord):
            by_parent.setdefault(record.parent, []).append(record)
    ends_by_state: dict[int, list[UnitRecord]] = {}
    if by_parent:
        for record in records:
            for key in (record.parent, *record.compute_block_keys(block_tokens)):
                for state in by_parent.get(key, ()):
                    if not isinstance(record, StateRecord) and state.is_end_in(record, block_tokens):
                        ends_by_state.setdefault(state.unit, []).append(record)
    return ends_by_state
