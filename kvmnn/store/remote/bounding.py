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
from ...files.json_document import parse
from ..lookup import Found, StatePlace, Text
from ..space import Space
from ..token_ids import Ids, block_keys, text_key
from .records import AFTER, STATES, Record, StateRecord, placed, tick_of, unit_name, use_name
from .values import Patient

_AT_ONCE = 256
_SHARE = 32
"""Of the bound, what other processes may have put meanwhile: after so much of its own a process looks again."""
_MAX_DOCUMENT = 1 << 16
_TRIES = 8
_AT_ONCE_WITH_STATE = -1 << 32
"""Without its windows and state a unit is of no use: of those used as long ago it is the next that goes."""


class Bounded(Protocol):
    """What is needed of `kvmnn.store.remote.shelf.Shelf`."""

    values: Patient
    label: str
    max_bytes: int | None
    held_bytes: int | None
    """Of all units when this process last looked; None before."""
    put_bytes: int
    """That it has put since."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    def find(self, text: Text) -> Found:
        """The longest stored beginning of a text."""

    def find_state(self, text: Text, tokens: int) -> StatePlace | None:
        """The state of the longest beginning that has one."""

    def touch(self, units: Iterable[int], *, now: bool = False) -> None:
        """Units were used."""

    def drop(self, gone: Iterable[Record]) -> None:
        """Keep units no longer in memory."""


def pin(units: Bounded, space: Space, ids: Ids) -> bool:
    """Pin the unit with the end of a text: what leads to it stays with it. Whether it was not pinned before.

    Raises
    ------
    KvmnnError
        Where the end is not stored any more.
    """
    text = Text(space.key, ids, block_keys(space.key, ids, units.block_tokens), units.block_tokens, space.needs_state)
    name = text_key(space.key, ids).hex()
    (before,) = units.values.get_many([f"pins/{name}"])
    ends = _ends(units, text)
    if ends:
        _note(units, name, ends, ids.size)
        ends = _ends(units, text)  # nobody evicts it from here on
    if not ends:
        units.values.delete([f"pins/{name}"])
        held = units.find(text).tokens
        raise KvmnnError(f"{units.label}: holds only {held:,} tokens of this text of {ids.size:,}")
    return before is None


def _ends(units: Bounded, text: Text) -> tuple[int, ...]:
    """The unit with the end of a text, and that of its windows and state if it needs them; nothing unless all of the
    text is stored.
    """
    found = units.find(text)
    ends = tuple(place.unit for place in found.places[-1:])
    if text.needs_state:
        state = units.find_state(text, text.ids.size)
        if state is None or state.tokens < text.ids.size or (ends and found.tokens < text.ids.size):
            return ()
        return (*ends, state.unit)
    return ends if found.tokens == text.ids.size else ()


def pin_again(units: Bounded, text: Text) -> None:
    """Let the pins of a text and of its beginnings hold where their ends are stored now."""
    for name, (pinned, tokens) in _pins(units).items():
        if not 0 < tokens <= text.ids.size or text_key(text.space, text.ids[:tokens]).hex() != name:
            continue
        ends = _ends(units, text.beginning(tokens))
        if ends and ends != pinned:
            _note(units, name, ends, tokens)


def unpin(units: Bounded, space: Space, ids: Ids) -> bool:
    """Let go of a text; whether it was pinned."""
    name = f"pins/{text_key(space.key, ids).hex()}"
    (before,) = units.values.get_many([name])
    units.values.delete([name])
    return before is not None


def pins(units: Bounded) -> dict[str, tuple[int, ...]]:
    """The units of each pinned text, by the name of its pin; none where the pin is damaged."""
    return {name: ends for name, (ends, _) in _pins(units).items()}


def _pins(units: Bounded) -> dict[str, tuple[tuple[int, ...], int]]:
    """The units with the end of each pinned text, and its tokens; none and 0 where the pin is damaged."""
    names = units.values.names_in("pins")
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, data in zip(names, units.values.get_many([f"pins/{name}" for name in names]), strict=True):
        found[name] = (), 0
        with suppress(ManifestError, ValueError):
            document = parse(data or b"", units.label, _MAX_DOCUMENT)
            said = [document.at(key).text() for key in ("unit", "state") if key in document.value]
            found[name] = tuple(int(unit, 16) for unit in said), document.at("tokens").integer(0)
    return found


def _note(units: Bounded, name: str, ends: Sequence[int], tokens: int) -> None:
    """Pin the units that have the end of a stored text."""
    document: dict[str, object] = {"unit": f"{ends[0]:032x}", "tokens": tokens}
    if len(ends) > 1:
        document["state"] = f"{ends[1]:032x}"
    units.values.put_many({f"pins/{name}": json.dumps(document).encode()})


def pinned_units(units: Bounded) -> set[int]:
    """The units that pins keep."""
    return {unit for ends in pins(units).values() for unit in ends}


def ticks(units: Bounded, records: Sequence[Record]) -> dict[int, int]:
    """When each unit was last used; 0 where nobody has noted it down."""
    found: dict[int, int] = {}
    for at in range(0, len(records), _AT_ONCE):
        some = records[at : at + _AT_ONCE]
        uses = units.values.get_many([use_name(record.unit) for record in some])
        found.update((record.unit, tick_of(data)) for record, data in zip(some, uses, strict=True))
    return found


def forget_unless_pinned(units: Bounded, records: Sequence[Record], known: Collection[str]) -> bool:
    """Remove units with their records, unless other texts are pinned than are `known`; whether that is so."""
    size = units.block_tokens
    names = [name for each in records for name in (each.name(size), unit_name(each.unit), use_name(each.unit))]
    if not units.values.delete_if(names, "pins", set(known)):
        return False
    units.drop(records)
    return True


def after_put(units: Bounded, stored: int) -> int:
    """Keep to the bound after `stored` bytes more; bytes of what had to go."""
    most = units.max_bytes
    if most is None:
        return 0
    units.put_bytes += stored
    if (
        units.held_bytes is not None
        and units.held_bytes + units.put_bytes <= most
        and units.put_bytes <= most // _SHARE
    ):
        return 0
    units.touch((), now=True)
    return evict(units, most)[1]


def evict(units: Bounded, max_bytes: int) -> tuple[int, int]:
    """Remove what was not used for longest until no more than `max_bytes` are left; units, and their bytes."""
    for _ in range(_TRIES):  # pins may come meanwhile
        records = _records(units)
        known = pins(units)
        held = sum(record.nbytes for record in records)
        pinned = {unit for ends in known.values() for unit in ends}
        gone = _chosen(records, units.block_tokens, ticks(units, records), pinned, held - max_bytes)
        nbytes = sum(record.nbytes for record in gone)
        if not gone or forget_unless_pinned(units, gone, known):
            units.held_bytes, units.put_bytes = held - nbytes, 0
            return len(gone), nbytes
    return 0, 0


def _records(units: Bounded) -> list[Record]:
    """The records of all units that are there."""
    there = set(units.values.names_in("units"))
    names = sorted((*units.values.tree(AFTER), *units.values.tree(STATES)))
    found = {}
    for at in range(0, len(names), _AT_ONCE):
        some = names[at : at + _AT_ONCE]
        for name, data in zip(some, units.values.get_many(some), strict=True):
            record = placed(data, name, units.block_tokens)
            if record is not None and f"{record.unit:032x}" in there:
                found[record.unit] = record
    return list(found.values())


def _chosen(
    records: Sequence[Record], block_tokens: int, used: Mapping[int, int], pinned: set[int], excess: int
) -> list[Record]:
    """The units that go for `excess` bytes: none that another follows or that is pinned."""
    holder: dict[bytes, Record] = {}
    for record in records:
        for key in record.keys(block_tokens):
            holder.setdefault(key, record)
    children = dict.fromkeys((record.unit for record in records), 0)
    parents: dict[int, list[Record]] = {}
    ends = _ends_of_states(records, block_tokens)
    for record in records:
        parent = holder.get(record.parent)
        parents[record.unit] = list({each.unit: each for each in (parent, *ends.get(record.unit, ())) if each}.values())
        for each in parents[record.unit]:
            children[each.unit] += 1
    by_unit = {record.unit: record for record in records}
    leaves = [
        (used[unit], -record.start, unit)
        for unit, record in by_unit.items()
        if not children[unit] and unit not in pinned
    ]
    heapq.heapify(leaves)
    gone: list[Record] = []
    while excess > 0 and leaves:
        record = by_unit[heapq.heappop(leaves)[2]]
        gone.append(record)
        excess -= record.nbytes
        for parent in parents[record.unit]:
            children[parent.unit] -= 1
            if not children[parent.unit] and parent.unit not in pinned:
                order = _AT_ONCE_WITH_STATE if isinstance(record, StateRecord) else -parent.start
                heapq.heappush(leaves, (used[parent.unit], order, parent.unit))
    return gone


def _ends_of_states(records: Sequence[Record], block_tokens: int) -> dict[int, list[Record]]:
    """The units that have the ends of prefixes whose windows and state are stored, by the numbers of these."""
    by_parent: dict[bytes, list[StateRecord]] = {}
    for record in records:
        if isinstance(record, StateRecord):
            by_parent.setdefault(record.parent, []).append(record)
    found: dict[int, list[Record]] = {}
    if by_parent:
        for record in records:
            for key in (record.parent, *record.keys(block_tokens)):
                for state in by_parent.get(key, ()):
                    if not isinstance(record, StateRecord) and state.ends_in(record, block_tokens):
                        found.setdefault(state.unit, []).append(record)
    return found
