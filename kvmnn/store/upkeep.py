"""What keeps a store directory in order: deleting, cleaning, verifying."""

from __future__ import annotations

from contextlib import suppress

from ..errors import OutputError
from . import updates
from .directory import DirectoryBackendBase
from .lookup import TokenSequence, UnitSlice
from .mending import repair_recovery_files
from .prefix_state import decode_state, parse_state
from .results import CleanupResult, StoreVerifyResult, explain_kept_part, explain_pinned_bytes
from .rows import (
    BlockRow,
    BranchKeyRow,
    InvalidRowError,
    KeyRow,
    NumberRow,
    StateRow,
    UnitRow,
    UnitSizesRow,
    UnitUseRow,
    ValidatingCursor,
    parse_space_document,
)
from .space import Namespace
from .strangers import iter_foreign_files
from .token_ids import compute_block_keys, to_sort_key
from .unit import DamagedUnitError, Unit
from .verifying import UnitVerifier

_UNITS_PER_QUERY = 64


def delete_sequence(backend: DirectoryBackendBase, sequence: TokenSequence) -> CleanupResult:
    """Remove the units of a text from its end on, up to one that others continue, or that is pinned."""

    is_pinned = False

    def choose_units(cursor: ValidatingCursor) -> list[int]:
        nonlocal is_pinned
        lookup = backend.make_lookup(cursor)
        prefix_match, last_unit = lookup.find_prefix(sequence), lookup.last_unit(sequence)
        chosen_units: list[int] = []
        if last_unit is None:
            return chosen_units
        slices = (
            [UnitSlice(last_unit, 0, 0), *reversed(prefix_match.slices)]
            if sequence.needs_state
            else reversed(prefix_match.slices)
        )
        for unit_slice in slices:
            other_units_sql = f"other.parent = unit.id AND other.id NOT IN ({','.join(map(str, chosen_units))})"
            tokens, pins, followers = cursor.require_row(
                UnitUseRow,
                f"SELECT tokens, pins, (SELECT count(*) FROM unit AS other WHERE {other_units_sql}) FROM unit WHERE id "
                f"= ?",
                (unit_slice.unit,),
            )
            is_pinned = bool(pins)
            if pins or followers or tokens > unit_slice.skip + unit_slice.take:
                break
            chosen_units.append(unit_slice.unit)
        return chosen_units

    removed = backend.remove_units(choose_units)
    remaining_tokens = backend.find_prefix(sequence).tokens
    kept_reason = explain_kept_part(removed.num_units, remaining_tokens, is_pinned=is_pinned)
    return CleanupResult(units=removed.num_units, bytes=removed.nbytes, kept=kept_reason)


def collect_garbage(backend: DirectoryBackendBase, max_bytes: int | None) -> CleanupResult:
    """Remove what nothing refers to, what refers to no file, and what has to go for `max_bytes`.

    Where the disk is too full to write to the index files go first.
    """
    backend.files.remove_stale()
    backend.recovery_files.remove_stale()
    try:
        return backend.change_index(lambda: _collect_garbage(backend, max_bytes))
    except OutputError:
        if backend.read_only or max_bytes is None or not backend.free_unit_files(max_bytes):
            raise
    return backend.change_index(lambda: _collect_garbage(backend, max_bytes))


def _collect_garbage(backend: DirectoryBackendBase, max_bytes: int | None) -> CleanupResult:
    with backend.index.begin_writing() as cursor:  # nobody gives a file its name meanwhile
        unit_ids = {row.value for row in cursor.iter_rows(NumberRow, "SELECT id FROM unit")}
        backend.recovery_files.delete_other_pins([row.key for row in cursor.iter_rows(KeyRow, "SELECT key FROM pin")])
        used_keys = cursor.iter_rows(KeyRow, "SELECT key FROM space WHERE id IN (SELECT DISTINCT space FROM unit)")
        namespaces = {row.key.hex() for row in used_keys}
        unused_names = [
            name for name in backend.recovery_files.list_table_names() if name.partition("-")[0] not in namespaces
        ]
        num_other_files, other_bytes = len(unused_names), backend.recovery_files.delete_tables(unused_names)
        for path in backend.files.iter_unknown_files(unit_ids):
            with suppress(OSError):
                other_bytes += path.stat().st_size
                path.unlink()
                num_other_files += 1

    def choose_units(cursor: ValidatingCursor) -> list[int]:
        chosen_units: list[int] = []
        for (number,) in cursor.fetch_rows(NumberRow, "SELECT id FROM unit"):
            if not backend.files.make_path(number).is_file():
                chosen_units += [
                    follower for follower in updates.list_with_followers(cursor, number) if follower not in chosen_units
                ]
        return chosen_units

    removed_units = backend.remove_units(choose_units)
    evicted = backend.evict_units(max_bytes) if max_bytes is not None else None
    with backend.index.begin_reading() as cursor:
        remaining_bytes = updates.read_total_bytes(cursor)
    backend.index.vacuum()
    return CleanupResult(
        units=removed_units.num_units + (evicted.num_units if evicted else 0),
        bytes=removed_units.nbytes + (evicted.nbytes if evicted else 0),
        other_files=num_other_files,
        other_bytes=other_bytes,
        kept=explain_pinned_bytes(remaining_bytes, max_bytes),
        foreign=tuple(sorted(iter_foreign_files(backend.folder))),
    )


def verify_units(backend: DirectoryBackendBase, threads: int | None) -> StoreVerifyResult:
    """Read, decode and compare every unit, the index first; then what lies beside the index."""
    backend.index.check_integrity()
    _check_consistency(backend)
    verifier = UnitVerifier(
        backend.files.read_unit,
        lambda key: _find_block_holder(backend, key),
        backend.tables,
        backend.block_tokens,
        threads,
    )
    num_units = num_states = num_tokens = nbytes = last_unit = 0
    notes: list[str] = []
    lost_units: set[int] = set()
    while True:
        with backend.index.begin_reading() as cursor:
            rows = cursor.fetch_rows(
                UnitRow,
                "SELECT unit.id, skip, start, tokens, space.document FROM unit LEFT JOIN space "
                "ON space.id = unit.space WHERE unit.id > ? ORDER BY unit.id LIMIT ?",
                (last_unit, _UNITS_PER_QUERY),
            )
            namespaces = {row.document: parse_space_document(row.document, backend.label) for row in rows}
        for unit_id, skip, start, unit_tokens, document in rows:
            last_unit = unit_id
            if unit_id in lost_units:
                continue
            try:
                if not unit_tokens:
                    nbytes += _verify_state_unit(backend, unit_id, namespaces[document])
                    num_states += 1
                    continue
                unit = verifier.verify(unit_id, namespaces[document])
                _check_rows(backend, unit_id, skip, start, unit)
            except DamagedUnitError as error:
                lost_units.update(backend.quarantine(unit_id, str(error), notes))
                continue
            num_units += 1
            num_tokens += unit.ids.size
            nbytes += unit.nbytes
        if not rows:
            break
    recovery_notes = tuple(repair_recovery_files(backend))
    return StoreVerifyResult(
        units=num_units,
        tokens=num_tokens,
        bytes=nbytes,
        states=num_states,
        damaged=tuple(notes),
        lost=len(lost_units),
        beside=recovery_notes,
        anew=tuple(backend.rebuilt_notes),
    )


def _verify_state_unit(backend: DirectoryBackendBase, unit_id: int, namespace: Namespace) -> int:
    """Decode and compare the state of a prefix; bytes of its file. Errors as `_check_rows`."""
    data = backend.files.read_unit(unit_id)
    if data is None:
        raise DamagedUnitError("its file is gone or cannot be read")
    state = parse_state(data)
    decode_state(state, namespace)
    with backend.index.begin_reading() as cursor:
        row = cursor.fetch_row(StateRow, "SELECT start, bytes, skip FROM unit WHERE id = ?", (unit_id,))
        branch = cursor.fetch_row(BranchKeyRow, "SELECT parent, text FROM branch WHERE unit = ?", (unit_id,))
    if row is not None:  # else another process has removed it
        if branch is None or branch.parent != state.key or row.tokens != state.tokens:
            raise DamagedUnitError("is of another prefix than the index says")
        if row != (state.tokens, data.size, state.raw_bytes):
            raise backend.index.mark_damaged("it says other things of a state than its file")
    return int(data.size)


_CONTRADICTION_QUERIES = (
    "unit LEFT JOIN branch ON branch.unit = unit.id WHERE branch.unit IS NULL",
    "branch WHERE unit NOT IN (SELECT id FROM unit)",
    "block WHERE unit NOT IN (SELECT id FROM unit)",
    "unit WHERE children <> (SELECT count(*) FROM unit AS other WHERE other.parent = unit.id)",
    "unit WHERE pins <> 0 AND id NOT IN (SELECT unit FROM pin)",
    "(SELECT unit, count(*) AS n FROM pin WHERE unit <> 0 GROUP BY unit) AS kept LEFT JOIN unit ON unit.id = kept.unit "
    "WHERE unit.pins IS NOT kept.n",
    "unit WHERE space NOT IN (SELECT id FROM space)",
    "space WHERE typeof(key) <> 'blob' OR typeof(document) <> 'text'",
    "pin WHERE typeof(key) <> 'blob'",
    "state WHERE bytes <> (SELECT total(bytes) FROM unit)",
)
"""Rows that contradict others, or hold what they cannot hold."""


def _check_consistency(backend: DirectoryBackendBase) -> None:
    """`DamagedIndexError` where the index contradicts itself; it is made anew then."""
    with backend.index.begin_reading() as cursor:
        for query in _CONTRADICTION_QUERIES:
            if cursor.has_row(f"SELECT 1 FROM {query} LIMIT 1"):
                raise InvalidRowError("its rows do not fit together")


def _find_block_holder(backend: DirectoryBackendBase, key: bytes) -> tuple[int, int] | None:
    """The unit that has a block, and how many of its blocks there are up to it."""
    with backend.index.begin_reading() as cursor:
        row = cursor.fetch_row(BlockRow, "SELECT key, unit, number FROM block WHERE key = ?", (key,))
    return None if row is None else (row.unit, row.number + 1)


def _check_rows(backend: DirectoryBackendBase, unit_id: int, skip: int, start: int, unit: Unit) -> None:
    """`DamagedUnitError` where the index says other blocks of a unit than its file; `DamagedIndexError` for the
    rest.
    """
    size = backend.block_tokens
    keys = compute_block_keys(unit.parent, unit.ids, size)
    with backend.index.begin_reading() as cursor:
        rows = cursor.fetch_rows(BlockRow, "SELECT key, unit, number FROM block WHERE unit = ?", (unit_id,))
        unit_sizes = cursor.fetch_row(UnitSizesRow, "SELECT tokens, bytes FROM unit WHERE id = ?", (unit_id,))
        branch = cursor.fetch_row(BranchKeyRow, "SELECT parent, text FROM branch WHERE unit = ?", (unit_id,))
    if unit_sizes is None:  # another process has removed it
        return
    if start != unit.start or {row.key: row.number for row in rows} != {
        key: block_index for block_index, key in enumerate(keys) if block_index >= skip
    }:
        raise DamagedUnitError("holds other blocks than the index says")
    parent = [unit.parent, *keys][skip : skip + 1]
    first_sort_key = to_sort_key(unit.ids[skip * size : (skip + 1) * size])
    if unit_sizes != (unit.ids.size, unit.nbytes) or [branch] != [(key, first_sort_key) for key in parent]:
        raise backend.index.mark_damaged("it says other things of a unit than its file")
