"""Maintenance of a remote store: deletion, garbage collection, verification, listings, pins and sessions.

Except for sessions and pins, each of these calls reads all records.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..._util.patterns import declare_pattern
from ..._util.text import pluralize
from ..._util.validation import repr_short
from ...arrays.source import join_losses
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.schema import parse_document
from ..backend import UNREADABLE_LOSS, BackendUnavailableError, StoredText
from ..encryption import UnsealError
from ..namespace import (
    Ids,
    Namespace,
    TokenSequence,
    compute_sequence_key,
    compute_state_key,
    count_common_entries,
    list_session_names,
    make_session_name,
    parse_namespace,
    to_token_ids,
)
from ..read_path import MissingUnitError, UnitVerifier
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
from ..unit import DamagedUnitError, UnitHeader, parse_header
from ..unit_codec import MAX_UNIT_TOKENS
from .backend import NAMES_PER_REQUEST, TABLES_FOLDER, RemoteBackendBase
from .eviction import Pin, find_ends_of_states, list_pinned_ends, list_pinned_units, read_pins, read_uses, save_pin
from .records import (
    StateRecord,
    UnitRecord,
    compute_unit_number,
    make_record_name,
    make_state_name,
    make_unit_name,
    parse_record_at,
)

_SESSIONS_FOLDER, _LABELS_FOLDER, _LOSSES_FOLDER = "sessions", "labels", "losses"
_MAX_SESSION_BYTES = 256 << 20
_UNIT_NAME_REGEX = declare_pattern("[0-9a-f]{32}")
"""Names of labels have the same form."""
_MAX_REQUEST_BYTES = 32 << 20
"""Bytes of units that are read in one round trip, unless a single unit has more."""


class RemoteBackend(RemoteBackendBase):
    """Store in another engine, with pins, sessions, listings and maintenance: implements `StoreBackend`.

    Parameters and errors are those of `RemoteBackendBase`.
    """

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        self.check_writable()
        size, ids = self.block_tokens, sequence.ids
        key = compute_sequence_key(sequence.namespace_key, ids, sequence.secret)
        while True:
            prefix_match = self.find_prefix(sequence)
            state = self.find_state(sequence, ids.size) if sequence.needs_state else None
            has_state = state is not None and state.tokens == ids.size
            is_cut = prefix_match.tokens < ids.size or (sequence.needs_state and not has_state)
            damaged_names = self._list_damaged_names(sequence) if is_cut else []
            unit_names = self._list_unrecorded_names(sequence, prefix_match.num_blocks) if is_cut else []
            valid_records = self.list_valid_records()
            # a record whose unit is gone continues nothing: no get finds it
            remaining = {record.unit: record for record in self.list_stored_records(valid_records=valid_records)}
            pins = read_pins(self.key_values)
            if is_cut and key.hex() in pins:  # what is left of it stays until it is put again
                return CleanupResult(kept=explain_kept_part(0, 0, 0, is_pinned=True))
            pinned_units = list_pinned_units(pins)
            parts = _select_parts(sequence, valid_records)
            stale = [record for record in parts if record.unit not in remaining]
            are_stored = [unit_slice.unit in remaining for unit_slice in prefix_match.slices]
            num_slices = [*are_stored, False].index(False)
            num_missing = ids.size - sum(unit_slice.take for unit_slice in prefix_match.slices[:num_slices])
            deleted: list[UnitRecord] = []
            if state is not None and has_state and state.unit not in pinned_units:
                deleted += filter(None, [remaining.pop(state.unit, None)])
            for record in parts if is_cut else ():  # behind a gap, where no search gets
                is_unreached = record.unit in remaining.keys() - set(prefix_match.list_units())
                if is_unreached and record.unit not in pinned_units and not _is_needed(record, remaining, size):
                    deleted.append(remaining.pop(record.unit))
            for unit_slice in reversed(prefix_match.slices):
                if unit_slice.unit not in remaining:  # its bytes are gone, which an object store is not asked
                    continue
                record = remaining[unit_slice.unit]
                is_needed = record.unit in pinned_units or _is_needed(record, remaining, size)
                if is_needed or record.ids.size > unit_slice.skip + unit_slice.take:
                    break
                deleted.append(remaining.pop(record.unit))
            recorded_names = {make_unit_name(record.unit) for record in valid_records}
            unit_names = [name for name in unit_names if name not in recorded_names]
            unit_bytes = sum(len(data or b"") for data in self.key_values.get_stored_many(unit_names))
            extra_names = [*damaged_names, *(record.make_name(size) for record in stale), *unit_names]
            if not (deleted or extra_names) or self.delete_unless_pinned(deleted, pins, extra_names):
                long_pins = {name: pin for name, pin in pins.items() if pin.tokens >= ids.size}
                pinned_ends = list_pinned_ends(long_pins, remaining)
                is_pinned = not is_cut and bool(prefix_match.slices) and prefix_match.slices[-1].unit in pinned_ends
                is_pinned |= state is not None and state.unit in pinned_ends
                num_units = len(deleted) + len(unit_names)
                num_left, num_needed = self._count_left_tokens(sequence, remaining, pins)
                return CleanupResult(
                    units=num_units,
                    bytes=sum(record.nbytes for record in deleted) + unit_bytes,
                    kept=explain_kept_part(num_units, num_left, num_needed, is_pinned=is_pinned),
                    unshared_tokens=num_left - num_needed,
                    missing_tokens=num_missing,
                )

    def _list_damaged_names(self, sequence: TokenSequence) -> list[str]:
        """Return the names of the records of a sequence that cannot be read."""
        size, num_tokens = sequence.block_tokens, sequence.ids.size
        names = [
            make_record_name(sequence.get_parent_key(block_index), sequence.get_block(block_index), sequence.secret)
            for block_index in range(-(-num_tokens // size))
        ]
        if sequence.needs_state:
            state_key = compute_state_key(*sequence.get_end(num_tokens), sequence.secret)
            names.append(make_state_name(sequence.namespace_key, num_tokens, state_key))
        values = zip(names, self.key_values.get_many(names), strict=True)
        return [
            name
            for name, data in values
            if data is not None and parse_record_at(data, name, size, sequence.secret) is None
        ]

    def _list_unrecorded_names(self, sequence: TokenSequence, first_block: int) -> list[str]:
        """Return the names of stored units that may be of a sequence from `first_block` on, if no record has them."""
        size, num_tokens = sequence.block_tokens, sequence.ids.size
        stored_names = set(self.key_values.list_names("units"))
        units = set()
        for begin_token in range(first_block * size, num_tokens, size):
            parent = sequence.get_parent_key(begin_token // size)
            max_tokens = max(MAX_UNIT_TOKENS, size) + size
            for end_token in range(begin_token + size, begin_token + max_tokens + 1, size):
                ids = sequence.ids[begin_token:end_token]
                units.add(compute_unit_number(sequence.namespace_key, parent, ids, sequence.secret))
        if sequence.needs_state:
            units.add(int.from_bytes(compute_state_key(*sequence.get_end(num_tokens), sequence.secret), "big"))
        names = [make_unit_name(unit) for unit in sorted(units) if f"{unit:032x}" in stored_names]
        return self.key_values.select_collectable(names)

    def _count_left_tokens(
        self, sequence: TokenSequence, records: Mapping[int, UnitRecord], pins: Mapping[str, Pin]
    ) -> tuple[int, int]:
        """Return how many tokens of a sequence are stored, and how many of them other sequences have or pins keep."""
        prefix_match = self.find_prefix(sequence)
        num_left, path = prefix_match.tokens, set(prefix_match.list_units())
        if not path:
            return 0, 0
        last = prefix_match.slices[-1]
        last_record = records.get(last.unit)
        if last_record is None or last_record.ids.size > last.skip + last.take:  # the unit is of another sequence
            return num_left, num_left
        keys = set(sequence.keys[: prefix_match.num_blocks])
        needed_tokens = [0]
        needed_tokens += [
            record.start + count_common_entries(record.ids, sequence.ids[record.start :])
            for record in records.values()
            if record.parent in keys and record.unit not in path
        ]
        states = {record.unit for record in _select_states(records.values())}
        for pin in pins.values():
            pinned_units = records.keys() & set(pin.units) - states
            if pinned_units and path.issuperset(pinned_units):
                needed_tokens.append(pin.tokens)
        return num_left, min(max(needed_tokens), num_left)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """Remove unusable records and unreferenced values; then evict units until at most `max_bytes` are left.

        A put writes tables and units before records, or all at once. So the lists of uses and tables are read first,
        then the records, the unit names, and the records again: a value that is added meanwhile does not look
        unreferenced. Values that a running put may have written just now are kept.
        """
        self.check_writable()
        self.touch((), immediately=True)
        uses, tables = self.key_values.list_names("uses"), self.key_values.list_names(TABLES_FOLDER)
        named_records = list(self.iter_records())
        if named_records and not any(record is not None for _, record in named_records):
            raise SourceError(
                f"{self.label}: none of its {pluralize(len(named_records), 'record')} can be read as one of this "
                "store, which another key or another store's settings explain: nothing is removed"
            )
        stored_names = set(self.key_values.list_names("units"))
        lost_names = [
            name for name, record in named_records if record is None or f"{record.unit:032x}" not in stored_names
        ]
        stored_records = [record for record in self.list_valid_records() if f"{record.unit:032x}" in stored_names]
        known_names = {f"{record.unit:032x}" for record in stored_records}
        namespaces = {record.namespace_key.hex() for record in stored_records}
        foreign_names = sorted(name for name in stored_names if not _UNIT_NAME_REGEX.fullmatch(name))
        unused_names = [f"units/{name}" for name in sorted(stored_names - known_names - set(foreign_names))]
        unreachable_units = self._find_unreachable(stored_records)
        orphans = [candidate for candidate in stored_records if candidate.unit in unreachable_units]
        self.delete_records(orphans)
        unused_use_names = [f"uses/{name}" for name in uses if name not in known_names]
        unused_names += [f"{TABLES_FOLDER}/{name}" for name in tables if name.partition("-")[0] not in namespaces]
        unused_names += [
            f"{_LOSSES_FOLDER}/{name}" for name in self.key_values.list_names(_LOSSES_FOLDER) if name not in namespaces
        ]
        deletable_names = self.key_values.select_collectable(unused_names)
        names = [*lost_names, *deletable_names, *unused_use_names]
        for begin_index in range(0, len(names), NAMES_PER_REQUEST):
            self.key_values.delete(names[begin_index : begin_index + NAMES_PER_REQUEST])
        evicted = [] if max_bytes is None else self._evict_units(max_bytes)
        return CleanupResult(
            units=len(lost_names) + len(orphans) + len(evicted),
            lost=len(lost_names) + len(orphans),
            bytes=sum(record.nbytes for record in [*orphans, *evicted]),
            other_files=len(deletable_names) + self.key_values.remove_stale(),
            young_files=len(unused_names) - len(deletable_names),
            kept=explain_pinned_bytes(self._last_bytes.get(None, 0), max_bytes),
            excess_bytes=count_excess_bytes(self._last_bytes.get(None, 0), max_bytes),
            foreign=tuple(sorted({*(f"units/{name}" for name in foreign_names), *self.key_values.list_foreign()})),
        )

    def _find_unreachable(self, stored_records: Sequence[UnitRecord]) -> set[int]:
        """Return the units that no search reaches: after a unit that none of the records has, or states without end."""
        keys_with_layers = {namespace.key for namespace in self.list_namespaces() if namespace.layers}
        ends_by_state = find_ends_of_states(stored_records, self.block_tokens)
        reached_units = {
            record.unit for record in _iter_in_order(stored_records, self.block_tokens, with_orphans=False)
        }
        for state in _select_states(stored_records):
            if state.namespace_key not in keys_with_layers:
                reached_units.add(state.unit)
            elif state.unit not in ends_by_state:
                reached_units.discard(state.unit)
        return {record.unit for record in stored_records} - reached_units

    def _list_with_lost(self) -> tuple[list[UnitRecord], dict[int, UnitRecord]]:
        """List the records whose units are stored, and those of units that no search finds, by their units."""
        valid_records = self.list_valid_records()
        stored_records = self.list_stored_records(valid_records=valid_records)
        lost_units = {record.unit for record in valid_records} - {record.unit for record in stored_records}
        lost_units |= self._find_unreachable(stored_records)
        return stored_records, {record.unit: record for record in valid_records if record.unit in lost_units}

    def verify(self, threads: int | None) -> StoreVerifyResult:
        stored_names = self.key_values.list_names("units")
        valid_records = self.list_valid_records()
        namespaces = {namespace.key: namespace for namespace in self.list_namespaces()}
        keys_with_layers = {key for key, namespace in namespaces.items() if namespace.layers}
        size = self.block_tokens
        orphaned_units = _find_orphans(valid_records, keys_with_layers, size)
        if orphaned_units:  # unless a put or an eviction was at work during the listing
            orphaned_units &= _find_orphans(self.list_valid_records(), keys_with_layers, size)
        ends_by_state = find_ends_of_states(valid_records, size)
        holders = {
            key: (record.unit, num_blocks)
            for record in valid_records
            for num_blocks, key in enumerate(record.compute_block_keys(size), 1)
        }
        cached_units: dict[int, Bytes | None] = {}
        verifier = UnitVerifier(
            lambda unit: self._read_unit(unit, cached_units), holders.get, self.tables, self.profiles, size, threads
        )
        num_units = num_states = num_tokens = nbytes = 0
        num_lossy = 0
        notes: list[str] = []
        damaged: list[UnitRecord] = []
        lost_records: list[UnitRecord] = []
        unusable_units: set[int] = set()
        damaged_keys: set[bytes] = set()

        def is_lost(record: UnitRecord) -> bool:
            """Return whether a record follows what is damaged or lost."""
            if not isinstance(record, StateRecord):
                return record.parent in damaged_keys
            ends = ends_by_state.get(record.unit, ()) if record.namespace_key in keys_with_layers else ()
            return bool(ends) and all(end.unit in unusable_units for end in ends)

        ordered_records = sorted(
            _iter_in_order(valid_records, size), key=lambda record: isinstance(record, StateRecord)
        )
        for batch in _batch_by_bytes(ordered_records):
            cached_units.clear()
            values = self.key_values.get_many([make_unit_name(record.unit) for record in batch])
            for record, data in zip(batch, values, strict=True):
                cached_units[record.unit] = self.to_unit_bytes(data)
            for record in batch:
                if is_lost(record):
                    lost_records.append(record)
                    unusable_units.add(record.unit)
                    damaged_keys.update(record.compute_block_keys(size))
                    continue
                try:
                    namespace = namespaces.get(record.namespace_key)
                    if namespace is None:
                        raise DamagedUnitError("is of no known model")
                    if record.unit in orphaned_units:
                        raise MissingUnitError("the unit before it is gone, or its record, and no text finds it")
                    if isinstance(record, StateRecord):
                        state, state_bytes = verifier.verify_state(record.unit, namespace)
                        state_key = state.compute_key(self.cipher.secret)
                        file_bytes = state_bytes + self.unit_overhead_bytes
                        if (state_key, state.tokens, file_bytes) != (record.key, record.tokens, record.nbytes):
                            raise DamagedUnitError("is of another prefix than its record says")
                        num_states += 1
                        nbytes += record.nbytes
                        continue
                    unit = verifier.verify(record.unit, namespace, record.ids)
                    if (unit.parent, unit.start) != (record.parent, record.start):
                        raise DamagedUnitError("holds other blocks than its record says")
                except MissingUnitError as error:
                    reason = str(error)
                    if record.unit not in orphaned_units:
                        if not self._is_taken(record):  # another process has removed it
                            continue
                        reason = "its value is gone: the server evicted it or let it expire, or somebody deleted it"
                    notes.append(self._describe_loss(record, reason))
                    damaged.append(record)
                    unusable_units.add(record.unit)
                    damaged_keys.update(record.compute_block_keys(size))
                    continue
                except DamagedUnitError as error:
                    self.quarantine(record.unit, str(error), notes)
                    damaged.append(record)
                    unusable_units.add(record.unit)
                    damaged_keys.update(record.compute_block_keys(size))
                    continue
                num_units += 1
                num_tokens += unit.ids.size
                nbytes += unit.nbytes + self.unit_overhead_bytes
                num_lossy += unit.has_loss
        if not self.read_only:
            self.delete_records([*damaged, *lost_records])
        notes += self._list_unreferenced_units(stored_names, valid_records)
        return StoreVerifyResult(
            units=num_units,
            tokens=num_tokens,
            bytes=nbytes,
            damaged=tuple(notes),
            states=num_states,
            lost=len(lost_records),
            damaged_files=(
                *self._list_damaged_sessions(),
                # nothing in such a key is readable: without a note, a store that lost sequences by it would seem intact
                *(
                    f"kvmnn:{name} is of another type than a store writes, and nothing of it is read: delete the key, "
                    "put again"
                    for name in self.key_values.list_foreign()
                ),
            ),
            rebuilt_parts=tuple(self.notes),
            lossy_units=num_lossy,
        )

    def _is_taken(self, record: UnitRecord) -> bool:
        """Return whether the server has taken a unit: whoever removes one removes its record first."""
        name = record.make_name(self.block_tokens)
        (data,) = self.key_values.get_many([name])
        stored_record = parse_record_at(data, name, self.block_tokens, self.cipher.secret)
        return stored_record is not None and stored_record.unit == record.unit and not self.has_unit(record.unit)

    def _describe_loss(self, record: UnitRecord, reason: str) -> str:
        end_token = record.start + record.ids.size
        tokens_text = f"tokens {record.start:,} to {end_token - 1:,} of a text"
        if isinstance(record, StateRecord):
            tokens_text = f"windows and state after {end_token:,} tokens of a text"
        action_text = "is passed over" if self.read_only else "was removed"
        return (
            f"{self.label}: unit {record.unit:032x}: damaged, {action_text} ({tokens_text}), with what goes on from "
            f"it: {reason}"
        )

    def _list_unreferenced_units(self, names: Iterable[str], records: Iterable[UnitRecord]) -> list[str]:
        """Name the units, by names that were listed before the records, whose records are gone or damaged."""
        recorded_names = {f"{record.unit:032x}" for record in records}
        unit_names = [f"units/{name}" for name in sorted({*names} - recorded_names) if _UNIT_NAME_REGEX.fullmatch(name)]
        collectable_names = self.key_values.select_collectable(unit_names)
        are_stored = self.key_values.contains_many(collectable_names) if collectable_names else []
        return [
            f"{self.label}: unit {name.rpartition('/')[2]}: cannot be used: its record is gone or damaged (gc removes "
            "it)"
            for name, is_stored in zip(collectable_names, are_stored, strict=True)
            if is_stored
        ]

    def _list_damaged_sessions(self) -> list[str]:
        problems = []
        for name in self.list_sessions():
            try:
                self.get_session(name)
            except BackendUnavailableError:
                raise
            except (SourceError, ManifestError) as error:
                problems.append(str(error))
        return problems

    def _read_unit(self, unit: int, cached_units: Mapping[int, Bytes | None]) -> Bytes | None:
        if unit in cached_units:
            return cached_units[unit]
        (data,) = self.key_values.get_many([make_unit_name(unit)])
        return self.to_unit_bytes(data)

    def _count_pins(self, own_units: Collection[int]) -> int:
        """Count the pins of the tenant; those of no stored unit belong to a store that is not divided."""
        stored_units = {record.unit for record in self.list_stored_records()}
        pins = read_pins(self.key_values).values()
        return sum(
            any(unit in own_units for unit in pin.units)
            or (not self.tenant and not stored_units.intersection(pin.units))
            for pin in pins
        )

    def _get_own_namespaces(self) -> dict[bytes, Namespace]:
        """Return the namespaces of the tenant by their keys."""
        return {namespace.key: namespace for namespace in self.list_namespaces() if namespace.tenant == self.tenant}

    def collect_stats(self, requested_tokens: int, hit_tokens: int, *, all_namespaces: bool = False) -> StoreStats:
        namespaces = self._get_own_namespaces()
        if all_namespaces:
            namespaces = {namespace.key: namespace for namespace in self.list_namespaces()}
        stored_records, lost_records = self._list_with_lost()
        if lost_records:  # unless a put or an eviction was at work between the lists
            lost_units = lost_records.keys() & self._list_with_lost()[1].keys()
            lost_records = {unit: lost_records[unit] for unit in lost_units}
        all_records = [record for record in stored_records if record.namespace_key in namespaces]
        states = _select_states(all_records)
        unit_records = [record for record in all_records if not isinstance(record, StateRecord)]
        size = self.block_tokens
        headers = self._read_sampled_headers(unit_records)
        rounded_keys = {record.namespace_key for record in unit_records if record.has_loss}
        is_rounded = any(header.is_rounded for header in headers) or (bool(rounded_keys) and not self.settings.is_lossy)
        return StoreStats(
            texts=len(_select_end_records(all_records, size)),
            states=len(states),
            units=len(unit_records),
            blocks=len({key for record in unit_records for key in record.compute_block_keys(size)}),
            tokens=sum(record.ids.size for record in unit_records),
            bytes=sum(record.nbytes for record in all_records),
            raw_bytes=sum(state.raw_bytes for state in states)
            + sum(record.ids.size * namespaces[record.namespace_key].token_bytes for record in unit_records),
            index_bytes=None,
            models=tuple(sorted({namespaces[record.namespace_key].model for record in unit_records})),
            pinned=len(read_pins(self.key_values))
            if all_namespaces
            else self._count_pins({record.unit for record in all_records}),
            sessions=len(self._list_session_names() if all_namespaces else self.list_sessions()),
            codec=self.codec,
            policy=self.policy,
            ignores_uses=not (self.key_values.has_cheap_touch or self.policy == "benefit"),
            profile=self.settings.profile.key if self.settings.profile else "",
            is_lossy=self.settings.is_lossy or any(header.is_lossy for header in headers),
            loss=join_losses(*(self.get_loss(namespaces[key]) for key in sorted(rounded_keys)))
            or (UNREADABLE_LOSS if is_rounded else ""),
            lost_units=sum(record.namespace_key in namespaces for record in lost_records.values()),
            asked_tokens=requested_tokens,
            found_tokens=hit_tokens,
        )

    def collect_namespaces(self) -> list[NamespaceStats]:
        tenants = {namespace.key: namespace.tenant for namespace in self.list_namespaces()}
        return sum_by_namespace(
            (
                tenants[record.namespace_key],
                1,
                0 if isinstance(record, StateRecord) else int(record.ids.size),
                record.nbytes,
            )
            for record in self.list_stored_records()
            if record.namespace_key in tenants
        )

    def _read_sampled_headers(self, records: Sequence[UnitRecord]) -> list[UnitHeader]:
        """Return the headers of the first and the last of some units: what settings and records say may be wrong."""
        names = {make_unit_name(record.unit) for record in (*records[:1], *records[-1:])}
        headers = []
        for data in self.key_values.get_many(sorted(names)):
            with suppress(DamagedUnitError):
                headers.append(parse_header(np.frombuffer(data or b"", np.uint8)))
        return headers

    def list_entries(self) -> StoreListing:
        namespaces = self._get_own_namespaces()
        valid_records = [record for record in self.list_stored_records() if record.namespace_key in namespaces]
        pinned = list_pinned_ends(read_pins(self.key_values), {record.unit for record in valid_records})
        ticks = {unit: use.tick for unit, use in read_uses(self.key_values, valid_records).items()}
        sorted_ticks = sorted(set(ticks.values()))
        block_tokens = self.block_tokens
        unit_records = [record for record in valid_records if not isinstance(record, StateRecord)]
        record_by_key = {
            key: record for record in reversed(unit_records) for key in record.compute_block_keys(block_tokens)
        }
        labels = {text.key.hex(): label for label, text in self.iter_labels()}
        entries = []
        end_records = _select_end_records(valid_records, block_tokens)
        for record in sorted(end_records, key=lambda record: (-ticks[record.unit], -record.start)):
            namespace, tick = namespaces[record.namespace_key], ticks[record.unit]
            path = list(_iter_ancestors(record, unit_records, record_by_key, block_tokens))
            ids = _join_ids(path)
            key = "" if ids is None else StoredText(namespace, ids).key.hex()
            entries.append(
                StoreEntry(
                    model=namespace.model,
                    dtype=namespace.dtype,
                    tokens=record.start + record.ids.size,
                    bytes=sum(before.nbytes for before in path),
                    pinned=record.unit in pinned,
                    unused_for=len(sorted_ticks) - bisect_right(sorted_ticks, tick) if tick else None,
                    is_complete=isinstance(record, StateRecord) or not namespace.needs_state,
                    last_ids=tuple(record.ids[-MAX_LAST_IDS:].tolist()),
                    key=key,
                    label=labels.get(key, ""),
                    is_lossy=self.settings.is_lossy or any(before.has_loss for before in path),
                )
            )
        return StoreListing(texts=tuple(entries), bytes=sum(record.nbytes for record in valid_records))

    def iter_texts(self) -> Iterator[StoredText]:
        namespaces = self._get_own_namespaces()
        valid_records = [record for record in self.list_stored_records() if record.namespace_key in namespaces]
        unit_records = [record for record in valid_records if not isinstance(record, StateRecord)]
        size = self.block_tokens
        record_by_key = {key: record for record in reversed(unit_records) for key in record.compute_block_keys(size)}
        for record in _select_end_records(valid_records, size):
            ids = _join_ids(list(_iter_ancestors(record, unit_records, record_by_key, size)))
            if ids is not None:
                yield StoredText(namespaces[record.namespace_key], ids)

    def iter_pinned(self) -> Iterator[StoredText]:
        namespaces = self._get_own_namespaces()
        records = {record.unit: record for record in self.list_stored_records()}
        for name, pin in read_pins(self.key_values).items():
            path = [records[unit] for unit in reversed(pin.units) if unit in records]
            ids = _join_ids(path) if path else None
            if ids is not None and path[0].namespace_key in namespaces:
                text = StoredText(namespaces[path[0].namespace_key], ids[: pin.tokens])
                if text.key.hex() == name:
                    yield text

    def save_loss(self, namespace: Namespace, loss: str) -> None:
        self.check_writable()
        self.key_values.put_many({f"{_LOSSES_FOLDER}/{namespace.key.hex()}": loss.encode()})

    def get_loss(self, namespace: Namespace) -> str:
        (data,) = self.key_values.get_many([f"{_LOSSES_FOLDER}/{namespace.key.hex()}"])
        return (data or b"").decode("utf-8", "replace")

    def save_label(self, label: str, namespace: Namespace, ids: Ids) -> None:
        self.check_writable()
        name = f"{_LABELS_FOLDER}/{StoredText(namespace, ids).key.hex()}"
        self.key_values.put_many({name: _encode_saved_text(label, namespace, ids)})

    def get_label(self, namespace: Namespace, ids: Ids) -> str | None:
        name = f"{_LABELS_FOLDER}/{StoredText(namespace, ids).key.hex()}"
        return next((label for label, _ in self._iter_labels_of([name])), None)

    def list_label_keys(self) -> list[bytes]:
        names = self.key_values.list_names(_LABELS_FOLDER)
        return [bytes.fromhex(name) for name in names if _UNIT_NAME_REGEX.fullmatch(name)]

    def iter_labels(
        self, keys: Sequence[bytes] | None = None, *, all_namespaces: bool = False
    ) -> Iterator[tuple[str, StoredText]]:
        keys = self.list_label_keys() if keys is None else keys
        names = [f"{_LABELS_FOLDER}/{key.hex()}" for key in keys]
        for begin_index in range(0, len(names), NAMES_PER_REQUEST):
            batch = names[begin_index : begin_index + NAMES_PER_REQUEST]
            yield from self._iter_labels_of(batch, all_namespaces=all_namespaces)

    def _iter_labels_of(
        self, names: Sequence[str], *, all_namespaces: bool = False
    ) -> Iterator[tuple[str, StoredText]]:
        for data in self.key_values.get_many(names):
            with suppress(KvmnnError):
                if data is not None:
                    label, text = self._parse_label(data)
                    if all_namespaces or text.namespace.tenant == self.tenant:
                        yield label, text

    def _parse_label(self, data: bytes) -> tuple[str, StoredText]:
        """Parse the document of a label; raise `KvmnnError` for a damaged one."""
        label = parse_document(data, "a label", _MAX_SESSION_BYTES).get("name").read_str()
        return label, StoredText(*_decode_saved_text(data, "a label", label, self.cipher.secret))

    def list_damaged_labels(self) -> list[bytes]:
        keys = self.list_label_keys()
        values = self.key_values.get_many([f"{_LABELS_FOLDER}/{key.hex()}" for key in keys])
        damaged_keys = []
        for key, data in zip(keys, values, strict=True):
            try:
                if data is not None:
                    self._parse_label(data)
            except KvmnnError:
                damaged_keys.append(key)
        return damaged_keys

    def delete_labels(self, keys: Sequence[bytes]) -> None:
        self.check_writable()
        self.key_values.delete([f"{_LABELS_FOLDER}/{key.hex()}" for key in keys])

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        self.check_writable()
        sequence = namespace.make_sequence(ids, self.block_tokens)
        name = StoredText(namespace, ids).key.hex()
        (previous_pin,) = self.key_values.get_many([f"pins/{name}"])
        units = self.find_pinned_units(sequence)
        if units:
            save_pin(self.key_values, name, Pin(units, ids.size), has_state=sequence.needs_state)
            units = self.find_pinned_units(sequence)  # from here on no process evicts it
        if not units:
            self.key_values.delete([f"pins/{name}"])
            stored_tokens = self.find_prefix(sequence).tokens
            raise KvmnnError(f"{self.label}: holds only {stored_tokens:,} tokens of this text of {ids.size:,}")
        return previous_pin is None

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        self.check_writable()
        name = f"pins/{StoredText(namespace, ids).key.hex()}"
        (previous_pin,) = self.key_values.get_many([name])
        self.key_values.delete([name])
        return previous_pin is not None

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        self.check_writable()
        stored_name = make_session_name(self.tenant, name)
        self.key_values.put_many({self._make_session_key(stored_name): _encode_saved_text(stored_name, namespace, ids)})

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        stored_name = make_session_name(self.tenant, name)
        data = self._read_session_bytes(stored_name)
        label = f"{self.label}: session {repr_short(name)}"
        return _decode_saved_text(data, label, stored_name, self.cipher.secret)

    def _read_session_bytes(self, name: str) -> bytes:
        (data,) = self.key_values.get_many([self._make_session_key(name)])
        if data is None:
            (shown_name,) = list_session_names(self.tenant, [name])
            raise KvmnnError(f"{self.label}: there is no session {repr_short(shown_name)}")
        return data

    def list_sessions(self) -> list[str]:
        return sorted(list_session_names(self.tenant, self._list_session_names()))

    def _list_session_names(self) -> list[str]:
        """List the names of the sessions of all namespaces."""
        session_names = []
        for key in self.key_values.list_names(_SESSIONS_FOLDER):
            with suppress(ValueError, UnsealError):
                session_names.append(
                    self.cipher.unseal_name(key) if self.cipher.secret else bytes.fromhex(key).decode()
                )
        return session_names

    def delete_session(self, name: str) -> None:
        self.check_writable()
        stored_name = make_session_name(self.tenant, name)
        self._read_session_bytes(stored_name)
        self.key_values.delete([self._make_session_key(stored_name)])

    def _make_session_key(self, stored_name: str) -> str:
        sealed_name = self.cipher.seal_name(stored_name) if self.cipher.secret else stored_name.encode().hex()
        return f"{_SESSIONS_FOLDER}/{sealed_name}"


def _encode_saved_text(name: str, namespace: Namespace, ids: Ids) -> bytes:
    """Return the document of a session or a label."""
    document = {
        "name": name,
        "space": namespace.to_json(),
        "ids": ids.tolist(),
        "checksum": _compute_session_checksum(name, namespace, ids),
    }
    return json.dumps(document).encode()


def _decode_saved_text(data: bytes, label: str, name: str, secret: bytes) -> tuple[Namespace, Ids]:
    """Parse the document of the session or label `name`; errors start with `label`."""
    root = parse_document(data, label, _MAX_SESSION_BYTES)
    try:
        namespace = parse_namespace(root.get("space").read_str(), label, secret)
        ids = to_token_ids([node.read_int(0) for node in root.get("ids").read_list(min_len=1)])
        checksum = root.value.get("checksum", "")  # the first versions wrote none
        if checksum not in ("", _compute_session_checksum(name, namespace, ids)):
            raise SourceError("it does not match its checksum")
    except KvmnnError as error:
        raise SourceError(f"{label} is damaged: {error}") from None
    return namespace, ids


def _join_ids(path: Sequence[UnitRecord]) -> Ids | None:
    """Return the ids of a sequence whose records are those of `_iter_ancestors`; None if some are missing."""
    records = [record for record in path if not isinstance(record, StateRecord)]
    end = max(record.start + record.ids.size for record in path[:1])
    parts: list[Ids] = []
    for record in records:
        if not record.start < end <= record.start + record.ids.size:
            return None
        parts.insert(0, record.ids[: end - record.start])
        end = record.start
    return np.concatenate(parts) if parts and not end else None


def _compute_session_checksum(name: str, namespace: Namespace, ids: Ids) -> str:
    data = json.dumps([name, namespace.to_json()]).encode() + ids.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _select_parts(sequence: TokenSequence, records: Iterable[UnitRecord]) -> list[UnitRecord]:
    """Return the records with tokens of a sequence alone, the last ones first, whether a search reaches them or not."""
    num_tokens, num_blocks = sequence.ids.size, len(sequence.keys)
    end = sequence.get_end(num_tokens)
    parts = []
    for record in records:
        if isinstance(record, StateRecord):
            is_part = record.namespace_key == sequence.namespace_key and record.tokens == num_tokens
            is_part = is_part and record.parent == end[0] and np.array_equal(record.ids, end[1])
        else:
            block_index = record.start // sequence.block_tokens
            ids = sequence.ids[record.start : record.start + record.ids.size]
            is_part = block_index <= num_blocks and record.parent == sequence.get_parent_key(block_index)
            is_part = is_part and np.array_equal(record.ids, ids)
        if is_part:
            parts.append(record)
    return sorted(parts, key=lambda record: -record.start)


def _is_needed(record: UnitRecord, records: Mapping[int, UnitRecord], block_tokens: int) -> bool:
    """Return whether another record follows one, or is of a state at an end that this one alone has."""
    keys = set(record.compute_block_keys(block_tokens))
    if any(candidate.parent in keys for candidate in records.values()):
        return True
    remaining_after = [candidate for candidate in records.values() if candidate is not record]
    return any(
        state_record.is_end_in(record, block_tokens) and not _has_end_unit(remaining_after, state_record, block_tokens)
        for state_record in _select_states(remaining_after)
    )


def _has_end_unit(records: Iterable[UnitRecord], state: StateRecord, block_tokens: int) -> bool:
    """Return whether any of the units contains the end of the prefix of a state."""
    return any(not isinstance(record, StateRecord) and state.is_end_in(record, block_tokens) for record in records)


def _find_orphans(records: Sequence[UnitRecord], keys_with_layers: Collection[bytes], block_tokens: int) -> set[int]:
    """Return the units after a block, and the states at an end, that no record has; states without layers have none."""
    block_keys = {key for record in records for key in record.compute_block_keys(block_tokens)}
    ends_by_state = find_ends_of_states(records, block_tokens)
    return {
        record.unit
        for record in records
        if (
            record.namespace_key in keys_with_layers and record.unit not in ends_by_state
            if isinstance(record, StateRecord)
            else record.parent not in block_keys and record.parent != record.namespace_key
        )
    }


def _select_states(records: Iterable[UnitRecord]) -> list[StateRecord]:
    return [record for record in records if isinstance(record, StateRecord)]


def _batch_by_bytes(ordered_records: Iterable[UnitRecord]) -> Iterator[list[UnitRecord]]:
    """Split records into batches whose units are read in one round trip."""
    batch: list[UnitRecord] = []
    nbytes = 0
    for record in ordered_records:
        if batch and (nbytes + record.nbytes > _MAX_REQUEST_BYTES or len(batch) == NAMES_PER_REQUEST):
            yield batch
            batch, nbytes = [], 0
        batch.append(record)
        nbytes += record.nbytes
    if batch:
        yield batch


def _iter_in_order(
    valid_records: Sequence[UnitRecord], block_tokens: int, *, with_orphans: bool = True
) -> Iterator[UnitRecord]:
    """Yield each record after its parent; `with_orphans` includes those whose parent is missing."""
    records_by_parent: dict[bytes, list[UnitRecord]] = {}
    for record in valid_records:
        records_by_parent.setdefault(record.parent, []).append(record)
    block_keys = {key for record in valid_records for key in record.compute_block_keys(block_tokens)}
    pending = [
        candidate
        for candidate in valid_records
        if candidate.parent == candidate.namespace_key or (with_orphans and candidate.parent not in block_keys)
    ]
    while pending:
        record = pending.pop()
        yield record
        for key in record.compute_block_keys(block_tokens):
            pending += records_by_parent.pop(key, [])


def _iter_ancestors(
    record: UnitRecord, unit_records: Sequence[UnitRecord], record_by_key: Mapping[bytes, UnitRecord], block_tokens: int
) -> Iterator[UnitRecord]:
    """Yield a record and those before it in its sequence; a state record comes after the unit of its end, if stored."""
    yield record
    if isinstance(record, StateRecord):
        ends = (unit for unit in unit_records if record.is_end_in(unit, block_tokens))
        record = next(ends, None) or record_by_key.get(record.parent, record)
        if not isinstance(record, StateRecord):
            yield record
    while (before := record_by_key.get(record.parent)) is not None:
        record = before
        yield record


def _select_end_records(valid_records: Sequence[UnitRecord], block_tokens: int) -> list[UnitRecord]:
    """Return the records that no other follows; a state replaces the unit with the same end."""
    states = _select_states(valid_records)
    unit_records = [record for record in valid_records if not isinstance(record, StateRecord)]
    parents = {record.parent for record in unit_records}

    def is_listed(record: UnitRecord) -> bool:
        end = record.start + record.ids.size
        if any(state.tokens == end and state.is_end_in(record, block_tokens) for state in states):
            return False
        return bool(record.ids.size % block_tokens) or record.compute_block_keys(block_tokens)[-1] not in parents

    return [*states, *filter(is_listed, unit_records)]
