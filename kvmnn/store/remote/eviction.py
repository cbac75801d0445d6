"""Pins, uses, and the order of eviction of a remote store.

The units with the lowest priorities are evicted first, ends of sequences before their beginnings, pinned ones never.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from ..._util.named_tuple import NamedTuple
from ...errors import ManifestError
from ...files.schema import parse_document
from .key_values import CircuitBreaker
from .records import StateRecord, UnitRecord, UnitUse, decode_use, make_use_name

_NAMES_PER_REQUEST = 256
_MAX_PIN_DOCUMENT_BYTES = 256 << 20
_STATE_PARENT_ORDER = -1 << 32
"""Sorts the unit before an evicted state first among units of equal priority: without its state it is of no use."""


class Pin(NamedTuple):
    """A pinned sequence; of a damaged pin both fields are empty."""

    #: The units of the sequence in order, then its state unit if it has one: if some are lost, those before them stay.
    units: tuple[int, ...] = ()
    #: Length of the sequence.
    tokens: int = 0


def read_pins(key_values: CircuitBreaker) -> dict[str, Pin]:
    """Read all pins by their names."""
    names = key_values.list_names("pins")
    pins: dict[str, Pin] = {}
    for name, data in zip(names, key_values.get_many([f"pins/{name}" for name in names]), strict=True):
        pins[name] = Pin()
        with suppress(ManifestError, ValueError):
            document = parse_document(data or b"", key_values.label, _MAX_PIN_DOCUMENT_BYTES)
            nodes = document.get("before").read_list() if "before" in document.value else []
            nodes += [document.get(key) for key in ("unit", "state") if key in document.value]
            units = tuple(int(node.read_str(), 16) for node in nodes)
            pins[name] = Pin(units, document.get("tokens").read_int(0))
    return pins


def save_pin(key_values: CircuitBreaker, name: str, pin: Pin, *, has_state: bool) -> None:
    """Write a pin under its name; with `has_state` its last unit is one of state."""
    *before, unit = [f"{unit:032x}" for unit in pin.units]
    document: dict[str, object] = {"unit": unit, "tokens": pin.tokens}
    if has_state and before:
        document |= {"unit": before.pop(), "state": unit}
    key_values.put_many({f"pins/{name}": json.dumps(document | {"before": before}).encode()})


def list_pinned_units(pins: Mapping[str, Pin]) -> set[int]:
    """Return the units that pins keep."""
    return {unit for pin in pins.values() for unit in pin.units}


def list_pinned_ends(pins: Mapping[str, Pin], stored_units: Collection[int]) -> set[int]:
    """Return the last stored unit of each pinned sequence."""
    ends = (next((unit for unit in reversed(pin.units) if unit in stored_units), None) for pin in pins.values())
    return {unit for unit in ends if unit is not None}


def read_uses(key_values: CircuitBreaker, records: Sequence[UnitRecord]) -> dict[int, UnitUse]:
    """Read the recorded uses of each unit."""
    use_by_unit: dict[int, UnitUse] = {}
    for begin_index in range(0, len(records), _NAMES_PER_REQUEST):
        batch = records[begin_index : begin_index + _NAMES_PER_REQUEST]
        uses = key_values.get_many([make_use_name(record.unit) for record in batch])
        use_by_unit.update((record.unit, decode_use(data)) for record, data in zip(batch, uses, strict=True))
    return use_by_unit


def select_evicted(
    records: Sequence[UnitRecord],
    block_tokens: int,
    rank_by_unit: Mapping[int, tuple[int, int]],
    pinned: set[int],
    excess: int,
    last_units: Collection[int] = (),
) -> list[UnitRecord]:
    """Return the units to evict for `excess` bytes: none that is pinned, or that a remaining unit follows.

    `rank_by_unit` has the priority of each unit and the tick of its last use; `last_units` go after all others.
    """
    orders = {unit: (unit in last_units, rank) for unit, rank in rank_by_unit.items()}
    record_by_block_key: dict[bytes, UnitRecord] = {}
    for record in records:
        for key in record.compute_block_keys(block_tokens):
            record_by_block_key.setdefault(key, record)
    children = dict.fromkeys((record.unit for record in records), 0)
    parents: dict[int, list[UnitRecord]] = {}
    ends_by_state = find_ends_of_states(records, block_tokens)
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
        (orders[unit], -record.start, unit)
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
                order = _STATE_PARENT_ORDER if isinstance(record, StateRecord) else -parent.start
                heapq.heappush(leaves, (orders[parent.unit], order, parent.unit))
    return evicted


def find_ends_of_states(records: Sequence[UnitRecord], block_tokens: int) -> dict[int, list[UnitRecord]]:
    """Return the units that contain the ends of stored states, by the number of the state unit."""
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
