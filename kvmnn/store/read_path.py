"""Reading stored units: decoding into K and V, quarantine of damaged ones, verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._util.named_tuple import NamedTuple
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..arrays.source import ROUNDED_TEXT
from ..dtypes import Bytes
from ..errors import SourceError
from .backend import PrefixMatch, StoreBackend, UnitSlice
from .namespace import Ids, Namespace, TokenSequence, compute_block_keys
from .unit import MAX_CHAIN_UNITS, DamagedUnitError, TableSetCache, Unit, parse_unit, predict_kl
from .unit_codec import (
    DamagedSliceError,
    LoadedSlice,
    PrefixState,
    check_unit_matches,
    count_blocks_per_unit,
    decode_slices,
    decode_state,
    iter_decoded_layers,
    parse_state,
)

if TYPE_CHECKING:
    from ..profiles.search import ProfileFinder


def read_layers(
    backend: StoreBackend,
    namespace: Namespace,
    prefix_match: PrefixMatch,
    ids: Ids,
    notes: list[str],
    threads: int | None,
) -> tuple[list[LayerCache] | None, UnitLosses]:
    """Read K and V of a stored prefix, and what its units lost; None if one is damaged, which is then removed."""
    slices = load_slices(backend, namespace, prefix_match, ids, notes)
    if slices is None:
        return None, UnitLosses()
    try:
        layers = decode_slices(namespace, slices, threads, tables=backend.tables, profiles=backend.profiles)
    except DamagedSliceError as error:
        backend.quarantine(prefix_match.slices[error.slice_index].unit, str(error), notes)
        return None, UnitLosses()
    return layers, join_unit_losses(slices)


class UnitLosses(NamedTuple):
    """What K and V of a prefix lost, by the headers of its units."""

    #: Whether any unit decodes to other elements than were put.
    is_lossy: bool = False
    #: Whether K and V of any unit had lost something before they were put.
    is_rounded: bool = False
    #: Nats a token that the rounding of lossy units is expected to cost; None where nothing says it.
    predicted_kl: float | None = None

    def select_predicted_kl(self, loss: str) -> float | None:
        """Return the nats that are expected; None where K and V had been rounded before they were put."""
        return None if ROUNDED_TEXT in loss else self.predicted_kl


def join_unit_losses(slices: Sequence[LoadedSlice]) -> UnitLosses:
    """Return what the units of a prefix lost."""
    units = [loaded_slice.unit for loaded_slice in slices]
    return UnitLosses(
        any(unit.is_lossy for unit in units),
        any(unit.is_rounded for unit in units),
        predict_kl((unit, take) for unit, _, take in slices),
    )


def iter_layers(
    backend: StoreBackend,
    namespace: Namespace,
    prefix_match: PrefixMatch,
    slices: Sequence[LoadedSlice],
    threads: int | None,
) -> Iterator[LayerCache]:
    """Yield the layers of `read_layers`, each when it is decoded; a damaged unit raises `DamagedPrefixError`."""
    notes: list[str] = []
    try:
        yield from iter_decoded_layers(namespace, slices, threads, tables=backend.tables, profiles=backend.profiles)
    except DamagedSliceError as error:
        backend.quarantine(prefix_match.slices[error.slice_index].unit, str(error), notes)
        raise DamagedPrefixError(notes[0] if notes else str(error)) from None


class DamagedPrefixError(SourceError):
    """A unit was damaged, after layers of the prefix were returned: drop these, and get the prefix again."""


def load_slices(
    backend: StoreBackend, namespace: Namespace, prefix_match: PrefixMatch, ids: Ids, notes: list[str]
) -> list[LoadedSlice] | None:
    """Read the units of a prefix, and check what they say of themselves; None if one is damaged, as `read_layers`."""
    max_tokens = (count_blocks_per_unit(namespace, backend.block_tokens) + 1) * backend.block_tokens
    unit_ids = prefix_match.list_units()
    data_by_unit = dict(zip(unit_ids, backend.read_units(unit_ids), strict=True))
    slices: list[LoadedSlice] = []
    begin_token, key = 0, namespace.key
    for unit_slice in prefix_match.slices:
        try:
            unit = parse_unit(require_data(data_by_unit[unit_slice.unit]))
            check_unit_matches(
                unit, namespace, ids[begin_token : begin_token + unit_slice.take], unit_slice.skip, max_tokens
            )
            key = _compute_end_key(unit, unit_slice, key, backend.block_tokens, namespace.secret)
        except DamagedUnitError as error:
            backend.quarantine(unit_slice.unit, str(error), notes)
            return None
        slices.append(LoadedSlice(unit, unit_slice.skip, unit_slice.take))
        begin_token += unit_slice.take
    return slices


def read_state(
    backend: StoreBackend, namespace: Namespace, unit_id: int, sequence: TokenSequence, notes: list[str]
) -> tuple[list[LayerCache], list[OpaqueState], bool] | None:
    """Read rows of windows and opaque state at the end of a sequence, and whether they had lost something before."""
    try:
        (data,) = backend.read_units([unit_id])
        state = parse_state(require_data(data))
        parent, last_ids = sequence.get_end(sequence.ids.size)
        if state.tokens != sequence.ids.size or state.parent != parent or not np.array_equal(state.ids, last_ids):
            raise DamagedUnitError("is of another prefix than the index says")
        return *decode_state(state, namespace), state.is_rounded
    except DamagedUnitError as error:
        backend.quarantine(unit_id, str(error), notes)
        return None


def _compute_end_key(unit: Unit, unit_slice: UnitSlice, expected_key: bytes, block_tokens: int, secret: bytes) -> bytes:
    """Return the key of the last whole block of a unit that is used.

    Its first block must follow the block with the key `expected_key`: the same tokens may follow other ones as well.
    """
    ids = unit.ids[: unit_slice.skip + unit_slice.take]
    keys = [unit.parent, *compute_block_keys(unit.parent, ids, block_tokens, secret)]
    if keys[unit_slice.skip // block_tokens] != expected_key:
        raise DamagedUnitError("follows other tokens than the index says")
    return keys[-1]


class MissingUnitError(DamagedUnitError):
    """A unit, or one that it depends on, is missing."""


def require_data(data: Bytes | None) -> Bytes:
    """Return the bytes of a unit; raise `MissingUnitError` without any."""
    if data is None:
        raise MissingUnitError("its file is gone or cannot be read")
    return data


LayerCaches = Sequence[LayerCache]


class UnitVerifier:
    """Decodes single units of a store; the rows of the last one are cached, as the next one mostly refers to them.

    `read_unit` returns the bytes of a unit, None if they are unreadable. `find_holder` returns, for the key of a block,
    the unit that contains it and the number of its blocks up to this one, or None.
    """

    def __init__(
        self,
        read_unit: Callable[[int], Bytes | None],
        find_holder: Callable[[bytes], tuple[int, int] | None],
        tables: TableSetCache,
        profiles: ProfileFinder,
        block_tokens: int,
        threads: int | None,
    ) -> None:
        self._read_unit, self._find_holder, self._tables = read_unit, find_holder, tables
        self._profiles = profiles
        self._block_tokens, self._threads = block_tokens, threads
        self._last_unit: tuple[int, LayerCaches, LayerCaches] = 0, (), ()
        """The unit that was decoded last, the rows before it that it refers to, and its own rows."""

    def verify(self, unit_id: int, namespace: Namespace, ids: Ids | None = None) -> Unit:
        """Decode a unit completely and compare it with its checksums; if `ids` are specified, it must contain these."""
        unit = self._read_and_check(unit_id, namespace, ids)
        self._last_unit = unit_id, *self._decode(unit, namespace)
        return unit

    def verify_state(self, unit_id: int, namespace: Namespace) -> tuple[PrefixState, int]:
        """Decode a state unit completely and compare it with its checksums; return it with its size in bytes."""
        data = require_data(self._read_unit(unit_id))
        state = parse_state(data)
        decode_state(state, namespace)
        return state, int(data.size)

    def _read_and_check(self, unit_id: int, namespace: Namespace, ids: Ids | None = None) -> Unit:
        unit = parse_unit(require_data(self._read_unit(unit_id)))
        max_tokens = (count_blocks_per_unit(namespace, self._block_tokens) + 1) * self._block_tokens
        check_unit_matches(unit, namespace, unit.ids if ids is None else ids, 0, max_tokens)
        return unit

    def _decode(self, unit: Unit, namespace: Namespace) -> tuple[LayerCaches, LayerCaches]:
        """Return the rows before a unit that it refers to, and its own."""
        own_slice = LoadedSlice(unit, 0, unit.ids.size)
        history = unit.dense.history_rows if unit.dense else 0
        if not history:
            return (), self._decode_slices(namespace, [own_slice])
        preceding_rows = self._get_cached_preceding(unit, history)
        if not preceding_rows:
            slices = self._list_needed_slices(unit, namespace)
            rows = self._decode_slices(namespace, slices)
            preceding_rows = _copy_rows(rows, rows[0].tokens - history, rows[0].tokens)
        return preceding_rows, self._decode_slices(namespace, [own_slice], preceding_rows)

    def _decode_slices(
        self, namespace: Namespace, slices: Sequence[LoadedSlice], preceding_rows: LayerCaches | None = None
    ) -> LayerCaches:
        return decode_slices(
            namespace,
            slices,
            self._threads,
            tables=self._tables,
            profiles=self._profiles,
            preceding_rows=preceding_rows,
        )

    def _get_cached_preceding(self, unit: Unit, history: int) -> LayerCaches:
        """Return the rows that a unit refers to, if they are those of the last unit; else nothing."""
        holder = self._find_holder(unit.parent)
        last_unit, preceding_rows, layers = self._last_unit
        if holder is None or holder[0] != last_unit or not layers:
            return ()
        end_token = holder[1] * self._block_tokens
        own_rows = _copy_rows(layers, max(end_token - history, 0), end_token)
        num_missing = history - own_rows[0].tokens
        if not num_missing:
            return own_rows
        if not preceding_rows or preceding_rows[0].tokens < num_missing:
            return ()
        end_row = preceding_rows[0].tokens
        return [
            LayerCache(
                layer=own.layer,
                keys=np.concatenate([before.keys[:, end_row - num_missing :], own.keys], axis=1),
                values=np.concatenate([before.values[:, end_row - num_missing :], own.values], axis=1),
            )
            for before, own in zip(preceding_rows, own_rows, strict=True)
        ]

    def _list_needed_slices(self, unit: Unit, namespace: Namespace) -> list[LoadedSlice]:
        """Return the slices to decode for the rows that a unit refers to."""
        assert unit.dense is not None
        block_tokens, end_token, parent_key = self._block_tokens, unit.start, unit.parent
        begin_token = unit.start - unit.dense.history_rows
        slices: list[LoadedSlice] = []
        while end_token > begin_token:
            if len(slices) == MAX_CHAIN_UNITS:
                raise DamagedUnitError("needs more units before it than are allowed")
            holder = self._find_holder(parent_key)
            if holder is None:
                raise MissingUnitError("refers to rows that are not there")
            unit_id, end_block = holder
            unit_before = self._read_and_check(unit_id, namespace)
            keys = compute_block_keys(unit_before.parent, unit_before.ids, block_tokens, namespace.secret)
            end_before = unit_before.start + end_block * block_tokens
            if keys[end_block - 1 : end_block] != [parent_key] or end_before != end_token:
                raise DamagedUnitError("refers to rows that are not there")
            if unit_before.dense and unit_before.dense.history_rows:
                begin_token = min(begin_token, unit_before.start - unit_before.dense.history_rows)
            first_block = end_block - 1
            while (
                first_block
                and unit_before.start + first_block * block_tokens > begin_token
                and self._find_holder(keys[first_block - 1]) == (unit_id, first_block)
            ):
                first_block -= 1
            skip = first_block * block_tokens
            slices.insert(0, LoadedSlice(unit_before, skip, end_block * block_tokens - skip))
            end_token = unit_before.start + skip
            parent_key = keys[first_block - 1] if first_block else unit_before.parent
        return slices


def _copy_rows(layers: LayerCaches, begin_row: int, end_row: int) -> LayerCaches:
    """Copy rows: a view would keep all rows in memory."""
    return [
        LayerCache(
            layer=cache.layer,
            keys=cache.keys[:, begin_row:end_row].copy(),
            values=cache.values[:, begin_row:end_row].copy(),
        )
        for cache in layers
    ]
