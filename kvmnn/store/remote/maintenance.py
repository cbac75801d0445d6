"""Sessions in another engine: a document under the name, in hexadecimal digits.

What keeps a store in another engine in order; each of these calls reads all records.

Another engine as the units of a store: finding and storing, and all that looks after them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..._util.validation import repr_short
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.schema import parse_document
from ..directory.maintenance import validate_session_name
from ..lookup import TokenSequence
from ..namespace import Ids, Namespace, parse_namespace, to_token_ids
from ..read_path import MissingUnitError, UnitVerifier
from ..results import (
    MAX_LAST_IDS,
    CleanupResult,
    StoreEntry,
    StoreListing,
    StoreStats,
    StoreVerifyResult,
    explain_kept_part,
    explain_pinned_bytes,
)
from ..unit import DamagedUnitError
from ..unit_codec import decode_state, parse_state
from . import eviction
from .backend import TABLES_FOLDER, RemoteBackendBase
from .key_values import BackendUnavailableError, CircuitBreaker
from .records import (
    RECORDS_FOLDER_PREFIX,
    STATES_FOLDER_PREFIX,
    StateRecord,
    UnitRecord,
    make_unit_name,
    parse_record_at,
)

_SESSIONS_FOLDER = "sessions"
_MAX_SESSION_BYTES = 256 << 20


def save_session(key_values: CircuitBreaker, name: str, namespace: Namespace, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    document = {
        "space": namespace.to_json(),
        "ids": ids.tolist(),
        "checksum": _compute_session_checksum(name, namespace, ids),
    }
    key_values.put_many({_make_session_key(name): json.dumps(document).encode()})


def read_session(key_values: CircuitBreaker, name: str) -> tuple[Namespace, Ids]:
    """Space and text of a session; `KvmnnError` where there is none of this name."""
    label = f"{key_values.label}: session {repr_short(name)}"
    root = parse_document(_read_session_bytes(key_values, name), label, _MAX_SESSION_BYTES)
    try:
        namespace = parse_namespace(root.get("space").read_str(), label)
        ids = to_token_ids([node.read_int(0) for node in root.get("ids").read_list(min_len=1)])
        if root.value.get("checksum", "") not in (
            "",
            _compute_session_checksum(name, namespace, ids),
        ):  # earlier ones have none
            raise SourceError("it does not match its checksum")
    except KvmnnError as error:
        raise SourceError(f"{label} is damaged: {error}") from None
    return namespace, ids


def _read_session_bytes(key_values: CircuitBreaker, name: str) -> bytes:
    (data,) = key_values.get_many([_make_session_key(name)])
    if data is None:
        raise KvmnnError(f"{key_values.label}: there is no session {repr_short(name)}")
    return data


def list_damaged_sessions(key_values: CircuitBreaker) -> list[str]:
    """What is wrong with sessions."""
    problems = []
    for name in list_session_names(key_values):
        try:
            read_session(key_values, name)
        except BackendUnavailableError:
            raise
        except (SourceError, ManifestError) as error:
            problems.append(str(error))
    return problems


def list_session_names(key_values: CircuitBreaker) -> list[str]:
    """All names."""
    session_names = []
    for key in key_values.list_names(_SESSIONS_FOLDER):
        try:
            session_names.append(bytes.fromhex(key).decode())
        except ValueError:
            continue
    return sorted(session_names)


def delete_session(key_values: CircuitBreaker, name: str) -> None:
    """Forget a session, a damaged one, too; `KvmnnError` where there is none of this name."""
    _read_session_bytes(key_values, name)
    key_values.delete([_make_session_key(name)])


def _compute_session_checksum(name: str, namespace: Namespace, ids: Ids) -> str:
    data = json.dumps([name, namespace.to_json()]).encode() + ids.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _make_session_key(name: str) -> str:
    validate_session_name(name)
    return f"{_SESSIONS_FOLDER}/{name.encode().hex()}"


T = TypeVar("T")

_UNIT_NAME_REGEX = re.compile("[0-9a-f]{32}")
_VALUES_PER_REQUEST, _MAX_REQUEST_BYTES = 256, 32 << 20
"""Values, and bytes of units unless one has more, in one round trip."""


def iter_records(backend: RemoteBackendBase) -> Iterator[tuple[str, UnitRecord | None]]:
    """All records by their names; None for one that is damaged, or lies where another belongs."""
    for batch in _split_batches(
        sorted(
            (*backend.key_values.list_tree(RECORDS_FOLDER_PREFIX), *backend.key_values.list_tree(STATES_FOLDER_PREFIX))
        )
    ):
        for name, data in zip(batch, backend.key_values.get_many(batch), strict=True):
            yield name, parse_record_at(data, name, backend.block_tokens)


def _list_valid_records(backend: RemoteBackendBase) -> list[UnitRecord]:
    return [record for _, record in iter_records(backend) if record is not None]


def delete_sequence(backend: RemoteBackendBase, sequence: TokenSequence) -> CleanupResult:
    """Remove the units of a text from its end on, up to one that others continue, or that is pinned."""
    while True:
        prefix_match = backend.find_prefix(sequence)
        size = backend.block_tokens
        record_by_unit = {record.unit: record for record in _list_valid_records(backend)}
        pins = eviction.list_pins(backend)
        pinned_units = {unit for end_units in pins.values() for unit in end_units}
        deleted: list[UnitRecord] = []
        state = backend.find_state(sequence, sequence.ids.size) if sequence.needs_state else None
        if (
            state is not None
            and state.tokens == sequence.ids.size
            and state.unit not in pinned_units
            and state.unit in record_by_unit
        ):
            deleted.append(record_by_unit[state.unit])
        is_stored = bool(deleted) if sequence.needs_state else prefix_match.tokens == sequence.ids.size
        for unit_slice in reversed(prefix_match.slices if is_stored else ()):
            record = record_by_unit.get(unit_slice.unit)
            if record is None or record.unit in pinned_units:
                break
            keys = set(record.compute_block_keys(size))
            following_records = [
                candidate
                for candidate in record_by_unit.values()
                if candidate.parent in keys and candidate not in deleted
            ]
            remaining = [
                candidate
                for candidate in record_by_unit.values()
                if candidate not in deleted and candidate is not record
            ]
            following_records += [
                candidate
                for candidate in _select_states(remaining)
                if candidate.is_end_in(record, size) and not _has_end_unit(remaining, candidate, size)
            ]
            if following_records or record.ids.size > unit_slice.skip + unit_slice.take:
                break
            deleted.append(record)
        if not deleted or eviction.delete_unless_pinned(backend, deleted, pins):
            is_pinned = bool(prefix_match.slices) and prefix_match.slices[-1].unit in pinned_units
            is_pinned |= state is not None and state.unit in pinned_units
            kept_reason = explain_kept_part(len(deleted), backend.find_prefix(sequence).tokens, is_pinned=is_pinned)
            return CleanupResult(units=len(deleted), bytes=sum(record.nbytes for record in deleted), kept=kept_reason)


def collect_garbage(backend: RemoteBackendBase, max_bytes: int | None) -> CleanupResult:
    """Remove records without units, damaged records, units without records, and what goes on from nothing; and texts
    down to `max_bytes`.

    A put stores tables and units before records, or all at once. So what is listed first is compared with what was
    listed after it, and nothing that came meanwhile seems to be of no use; what a put may have stored just now stays.
    """
    backend.touch((), immediately=True)
    uses, tables = backend.key_values.list_names("uses"), backend.key_values.list_names(TABLES_FOLDER)
    named_records = list(iter_records(backend))
    stored_names = set(backend.key_values.list_names("units"))
    lost_names = [name for name, record in named_records if record is None or f"{record.unit:032x}" not in stored_names]
    stored_records = [record for record in _list_valid_records(backend) if f"{record.unit:032x}" in stored_names]
    known_names = {f"{record.unit:032x}" for record in stored_records}
    namespaces = {record.namespace_key.hex() for record in stored_records}
    foreign_names = sorted(name for name in stored_names if not _UNIT_NAME_REGEX.fullmatch(name))
    unused_names = [f"units/{name}" for name in sorted(stored_names - known_names - set(foreign_names))]
    reached_units = {record.unit for record in _iter_in_order(stored_records, backend.block_tokens, with_orphans=False)}
    keys_with_layers = {namespace.key for namespace in backend.list_namespaces() if namespace.layers}
    reached_units |= {
        state.unit for state in _select_states(stored_records) if state.namespace_key not in keys_with_layers
    }
    reached_units -= {
        state.unit
        for state in _select_states(stored_records)
        if state.namespace_key in keys_with_layers and not _has_end_unit(stored_records, state, backend.block_tokens)
    }
    unreachable_units = (
        {record.unit for _, record in named_records if record is not None}
        - reached_units
        - eviction.list_pinned_units(backend)
    )
    orphans = [candidate for candidate in stored_records if candidate.unit in unreachable_units]
    backend.delete_records(orphans)
    unused_use_names = [f"uses/{name}" for name in uses if name not in known_names]
    unused_names += [f"{TABLES_FOLDER}/{name}" for name in tables if name.partition("-")[0] not in namespaces]
    deletable_names = backend.key_values.select_settled(unused_names)
    for batch in _split_batches([*lost_names, *deletable_names, *unused_use_names]):
        backend.key_values.delete(batch)
    evicted, nbytes = (0, 0) if max_bytes is None else eviction.evict_units(backend, max_bytes)
    return CleanupResult(
        units=len(lost_names) + len(orphans) + evicted,
        bytes=nbytes + sum(record.nbytes for record in orphans),
        other_files=len(deletable_names) + backend.key_values.remove_stale(),
        young_files=len(unused_names) - len(deletable_names),
        kept=explain_pinned_bytes(backend.last_total_bytes or 0, max_bytes),
        foreign=tuple(sorted({*(f"units/{name}" for name in foreign_names), *backend.key_values.list_foreign()})),
    )


def verify_units(backend: RemoteBackendBase, threads: int | None) -> StoreVerifyResult:
    """Read, decode and compare every unit."""
    namespaces = {namespace.key: namespace for namespace in backend.list_namespaces()}
    valid_records = _list_valid_records(backend)
    size = backend.block_tokens
    holders = {
        key: (record.unit, num_blocks)
        for record in valid_records
        for num_blocks, key in enumerate(record.compute_block_keys(size), 1)
    }
    cached_units: dict[int, Bytes | None] = {}
    verifier = UnitVerifier(
        lambda unit: _read_unit(backend, unit, cached_units), holders.get, backend.tables, size, threads
    )
    num_units = num_states = num_tokens = nbytes = 0
    notes: list[str] = []
    damaged: list[UnitRecord] = []
    lost_records: list[UnitRecord] = []
    damaged_keys: set[bytes] = set()
    for batch in _batch_by_bytes(_iter_in_order(valid_records, size)):
        cached_units.clear()
        values = backend.key_values.get_many([make_unit_name(record.unit) for record in batch])
        for record, data in zip(batch, values, strict=True):
            cached_units[record.unit] = None if data is None else np.frombuffer(data, np.uint8)
        for record in batch:
            if record.parent in damaged_keys:
                lost_records.append(record)
                damaged_keys.update(record.compute_block_keys(size))
                continue
            try:
                namespace = namespaces.get(record.namespace_key)
                if namespace is None:
                    raise DamagedUnitError("is of no known model")
                if isinstance(record, StateRecord):
                    _verify_state_record(_read_unit(backend, record.unit, cached_units), record, namespace)
                    num_states += 1
                    nbytes += record.nbytes
                    continue
                unit = verifier.verify(record.unit, namespace, record.ids)
                if (unit.parent, unit.start) != (record.parent, record.start):
                    raise DamagedUnitError("holds other blocks than its record says")
            except MissingUnitError:  # the engine has evicted it, or what it follows: no damage
                continue
            except DamagedUnitError as error:
                backend.quarantine(record.unit, str(error), notes)
                damaged.append(record)
                damaged_keys.update(record.compute_block_keys(size))
                continue
            num_units += 1
            num_tokens += unit.ids.size
            nbytes += unit.nbytes
    if not backend.read_only:
        backend.delete_records([*damaged, *lost_records])
    return StoreVerifyResult(
        units=num_units,
        tokens=num_tokens,
        bytes=nbytes,
        damaged=tuple(notes),
        states=num_states,
        lost=len(lost_records),
        beside=(
            *list_damaged_sessions(backend.key_values),
            *map(_format_wrong_type, backend.key_values.list_foreign()),
        ),
        anew=tuple(backend.notes),
    )


def _format_wrong_type(name: str) -> str:
    """Report a value that nobody can read: texts may be behind it, so a store without a word about it seems whole."""
    return f"kvmnn:{name} is of another type than a store writes, and nothing of it is read: delete the key, put again"


def _verify_state_record(data: Bytes | None, record: StateRecord, namespace: Namespace) -> None:
    """Decode and compare windows and state; `MissingUnitError` where they were evicted, `DamagedUnitError` for what is
    wrong.
    """
    if data is None:
        raise MissingUnitError("its file is gone or cannot be read")
    state = parse_state(data)
    decode_state(state, namespace)
    if (state.key, state.tokens, data.size) != (record.key, record.tokens, record.nbytes):
        raise DamagedUnitError("is of another prefix than its record says")


def _has_end_unit(records: Iterable[UnitRecord], state: StateRecord, block_tokens: int) -> bool:
    """Whether any unit has the end of the prefix."""
    return any(not isinstance(record, StateRecord) and state.is_end_in(record, block_tokens) for record in records)


def _select_states(records: Iterable[UnitRecord]) -> list[StateRecord]:
    return [record for record in records if isinstance(record, StateRecord)]


def _read_unit(backend: RemoteBackendBase, unit: int, cached_units: Mapping[int, Bytes | None]) -> Bytes | None:
    """A unit as the engine has it."""
    if unit in cached_units:
        return cached_units[unit]
    (data,) = backend.key_values.get_many([make_unit_name(unit)])
    return None if data is None else np.frombuffer(data, np.uint8)


def _batch_by_bytes(ordered_records: Iterable[UnitRecord]) -> Iterator[list[UnitRecord]]:
    """Records whose units are read in one round trip."""
    batch: list[UnitRecord] = []
    nbytes = 0
    for record in ordered_records:
        if batch and (nbytes + record.nbytes > _MAX_REQUEST_BYTES or len(batch) == _VALUES_PER_REQUEST):
            yield batch
            batch, nbytes = [], 0
        batch.append(record)
        nbytes += record.nbytes
    if batch:
        yield batch


def _iter_in_order(
    valid_records: Sequence[UnitRecord], block_tokens: int, *, with_orphans: bool = True
) -> Iterator[UnitRecord]:
    """Each behind the one that it follows, if it can be; `with_orphans` are those for which it cannot."""
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


def collect_stats(backend: RemoteBackendBase, requested_tokens: int, hit_tokens: int) -> StoreStats:
    """Counts of everything, as the records say."""
    namespaces = {namespace.key: namespace for namespace in backend.list_namespaces()}
    all_records = [record for record in _list_valid_records(backend) if record.namespace_key in namespaces]
    states = _select_states(all_records)
    unit_records = [record for record in all_records if not isinstance(record, StateRecord)]
    size = backend.block_tokens
    return StoreStats(
        texts=len(_select_end_records(all_records, size)),
        states=len(states),
        units=len(unit_records),
        blocks=sum(record.ids.size // size for record in unit_records),
        tokens=sum(record.ids.size for record in unit_records),
        bytes=sum(record.nbytes for record in all_records),
        raw_bytes=sum(state.raw_bytes for state in states)
        + sum(record.ids.size * namespaces[record.namespace_key].token_bytes for record in unit_records),
        index_bytes=0,
        models=tuple(sorted({namespaces[record.namespace_key].model for record in unit_records})),
        pinned=len(eviction.list_pins(backend)),
        sessions=len(list_session_names(backend.key_values)),
        codec=backend.codec,
        asked_tokens=requested_tokens,
        found_tokens=hit_tokens,
    )


def list_entries(backend: RemoteBackendBase) -> StoreListing:
    """The stored texts, the last used first, those of equal use by length."""
    namespaces: dict[bytes, Namespace] = {namespace.key: namespace for namespace in backend.list_namespaces()}
    valid_records = [record for record in _list_valid_records(backend) if record.namespace_key in namespaces]
    pinned = eviction.list_pinned_units(backend)
    ticks = eviction.read_ticks(backend, valid_records)
    latest_tick = max(ticks.values(), default=0)
    block_tokens = backend.block_tokens
    unit_records = [record for record in valid_records if not isinstance(record, StateRecord)]
    record_by_key = {
        key: record for record in reversed(unit_records) for key in record.compute_block_keys(block_tokens)
    }
    entries = []
    for record in sorted(
        _select_end_records(valid_records, backend.block_tokens),
        key=lambda candidate: (-ticks[candidate.unit], -candidate.start),
    ):
        namespace, tick = namespaces[record.namespace_key], ticks[record.unit]
        entries.append(
            StoreEntry(
                model=namespace.model,
                dtype=namespace.dtype,
                tokens=record.start + record.ids.size,
                bytes=sum(
                    candidate.nbytes for candidate in _iter_ancestors(record, unit_records, record_by_key, block_tokens)
                ),
                pinned=record.unit in pinned,
                unused_for=latest_tick - tick if tick else None,
                is_complete=isinstance(record, StateRecord) or not namespace.needs_state,
                last_ids=tuple(record.ids[-MAX_LAST_IDS:].tolist()),
            )
        )
    return StoreListing(texts=tuple(entries), bytes=sum(record.nbytes for record in valid_records))


def _iter_ancestors(
    record: UnitRecord, unit_records: Sequence[UnitRecord], record_by_key: Mapping[bytes, UnitRecord], block_tokens: int
) -> Iterator[UnitRecord]:
    """A record and those before it in its text; before windows and state stands the unit that they end in, if any."""
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
    """The records at whose end no other goes on; behind a tail none can."""
    states = _select_states(valid_records)
    unit_records = [record for record in valid_records if not isinstance(record, StateRecord)]
    parents = {record.parent for record in unit_records}
    end_records: list[UnitRecord] = [
        record
        for record in unit_records
        if record.ids.size % block_tokens or record.compute_block_keys(block_tokens)[-1] not in parents
    ]
    return [
        *states,
        *(
            candidate
            for candidate in end_records
            if not any(_is_state_at_end(candidate, state, block_tokens) for state in states)
        ),
    ]


def _is_state_at_end(record: UnitRecord, state: StateRecord, block_tokens: int) -> bool:
    """Whether windows and state stand for the text up to the end of a unit."""
    return state.tokens == record.start + record.ids.size and state.is_end_in(record, block_tokens)


def _split_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin_index in range(0, len(items), _VALUES_PER_REQUEST):
        yield items[begin_index : begin_index + _VALUES_PER_REQUEST]


class RemoteBackend(RemoteBackendBase):
    """As `StoreBackend`; parameters and errors as `RemoteBackendBase`."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """As `upkeep.delete`."""
        self.check_writable()
        return delete_sequence(self, sequence)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """As `upkeep.clean`."""
        self.check_writable()
        return collect_garbage(self, max_bytes)

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """As `upkeep.verify`."""
        return verify_units(self, threads)

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        """As `upkeep.stats`."""
        return collect_stats(self, requested_tokens, hit_tokens)

    def list_entries(self) -> StoreListing:
        """As `upkeep.entries`."""
        return list_entries(self)

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `bounding.pin`."""
        self.check_writable()
        return eviction.pin(self, namespace, ids)

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `bounding.unpin`."""
        self.check_writable()
        return eviction.unpin(self, namespace, ids)

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """Keep the text of a session under its name."""
        self.check_writable()
        save_session(self.key_values, name, namespace, ids)

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """Space and text of a session."""
        return read_session(self.key_values, name)

    def list_sessions(self) -> list[str]:
        """All names."""
        return list_session_names(self.key_values)

    def delete_session(self, name: str) -> None:
        """Forget a session."""
        self.check_writable()
        delete_session(self.key_values, name)
