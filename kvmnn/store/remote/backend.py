"""Core of a remote store: units as values of another engine, each with a record of its place in a sequence.

There is no index. A record is written after its unit, and the names of both follow from their contents, so that all
writers of the same blocks write the same values. A record is only written under a free name: of two concurrent puts of
sequences with a common prefix the second fails with `ConcurrentUpdateError`, and then stores what follows the first.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from ..._util.named_tuple import NamedTuple
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, OptionError, OutputError, SourceError
from ..backend import (
    CODEC_DESCRIPTIONS,
    MAX_BLOCK_TOKENS,
    PLAIN_CODECS,
    STORE_CODECS,
    STORE_POLICIES,
    AddResult,
    BackendUnavailableError,
    ConcurrentUpdateError,
    ExceededLimit,
    NewUnit,
    PrefixMatch,
    StateLocation,
    StoreLimits,
    StoreSettings,
    UnitSlice,
    check_settings_match,
    describe_lost_options,
    encode_settings,
    explain_settings,
    infer_settings,
    parse_settings,
    select_fitting,
)
from ..encryption import NO_CIPHER, StoreCipher, UnsealError, check_key_matches, infer_key_check
from ..namespace import (
    Ids,
    Namespace,
    TokenSequence,
    compute_sequence_key,
    compute_state_key,
    count_common_entries,
    count_common_ids,
    mask_ids,
    parse_namespace,
    to_sort_key,
)
from ..unit import (
    DamagedUnitError,
    TableSetCache,
    TableSets,
    make_object_name,
    parse_header,
    to_unit_bytes,
)
from ..unit_codec import PrefixState
from .eviction import Pin, list_pinned_units, read_pins, read_uses, save_pin, select_evicted
from .key_values import CircuitBreaker
from .records import (
    MAX_IDS_IN_NAME,
    RECORDS_FOLDER_PREFIX,
    STATES_FOLDER_PREFIX,
    StateRecord,
    UnitRecord,
    UnitUse,
    compute_unit_number,
    count_ids_in_name,
    decode_tick,
    decode_use,
    encode_tick,
    encode_use,
    has_benefit,
    ids_from_name,
    infer_block_tokens,
    make_record_name,
    make_records_folder,
    make_unit_name,
    make_use_name,
    parse_record,
    parse_record_at,
    parse_state_name,
)

if TYPE_CHECKING:
    from ...profiles.search import ProfileFinder

SETTINGS_NAME = "store/about"
TABLES_FOLDER = "tables"
NAMES_PER_REQUEST = 256
_MAX_NAMESPACES = 4096
_MAX_NEIGHBOURS = 128
"""Names that are read on each side of a sequence's own name, among those that follow a block. A name has the first ids
of its unit, so that similar units are neighbours."""
_MAX_EQUAL_RECORDS_READ = 4
"""Records that are read where any of them would do: one may be damaged or evicted."""
_MAX_SAMPLED_RECORDS = 64
"""Records from which lost settings are inferred."""
_MAX_ADVICE_UNITS = 4
"""Units that are read for an example of settings that cannot be inferred, and where no namespace says the key."""
_TICK_NAME, _CLOCK_NAME = "store/tick", "store/clock"
_TOUCH_INTERVAL_SECONDS = 1.0
"""Uses are collected this long before they are written."""
_LIMIT_CHECK_DIVISOR = 32
"""A process counts the bytes of the store again after it has put this fraction of the limit: others may put as well."""
_MAX_EVICTION_TRIES = 8


class MemoryCache:
    """Least recently used cache of units, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._units: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, unit: int) -> bytes | None:
        """Return the bytes of a unit; None if it is not cached."""
        with self._lock:
            if unit in self._units:
                self._units.move_to_end(unit)
            return self._units.get(unit)

    def put(self, unit: int, data: bytes) -> None:
        """Cache a unit and evict others for it; a unit larger than the limit is not cached."""
        with self._lock:
            self._evict(unit)
            if len(data) > self._max_bytes:
                return
            while self.nbytes + len(data) > self._max_bytes:
                self._evict(next(iter(self._units)))
            self._units[unit] = data
            self.nbytes += len(data)

    def evict(self, unit: int) -> None:
        """Remove a unit from the cache."""
        with self._lock:
            self._evict(unit)

    def _evict(self, unit: int) -> None:
        self.nbytes -= len(self._units.pop(unit, b""))


class _MemoryStaging:
    def write(self, pieces: Sequence[Bytes | bytes]) -> bytes:
        return b"".join(bytes(piece) for piece in pieces)


class _RecordedSettings(NamedTuple):
    """Values of settings that documents of namespaces record; empty where none does."""

    block_tokens: set[int]
    codecs: set[str]
    policies: set[str]

    def find_contradiction(self, settings: StoreSettings) -> str:
        """Return what settings say that no namespace records, and what is recorded instead; empty for nothing."""
        codec = settings.codec
        if self.codecs and codec not in self.codecs:
            return f"units are {CODEC_DESCRIPTIONS[codec]}, and they are {CODEC_DESCRIPTIONS[min(self.codecs)]}"
        if self.block_tokens and settings.block_tokens not in self.block_tokens:
            return f"blocks have {settings.block_tokens} tokens, and they have {min(self.block_tokens)}"
        if self.policies and settings.policy not in self.policies:
            return f"the policy is {settings.policy}, and it is {min(self.policies)}"
        return ""

    def get_block_tokens(self) -> int | None:
        """Return the tokens of a block where all namespaces that record them agree, else None."""
        return min(self.block_tokens) if len(self.block_tokens) == 1 else None

    def complete(self, settings: StoreSettings) -> StoreSettings:
        """Return inferred settings with the policy, and which of the plain codecs it is, if namespaces agree on it."""
        if len(self.policies) == 1:
            settings = settings._replace(policy=min(self.policies))
        if len(self.codecs) == 1 and {settings.codec, *self.codecs} <= {*PLAIN_CODECS}:
            settings = settings._replace(codec=min(self.codecs))
        return settings


class RemoteBackendBase:
    """Units in another engine.

    `block_tokens`, `codec` and `policy` are the requested settings: None accepts those of the store. `new_settings` are
    those of a new store, None if the store must exist. `ram_bytes` limits the units that are cached in memory.
    """

    def __init__(
        self,
        key_values: CircuitBreaker,
        *,
        block_tokens: int | None,
        codec: str | None,
        policy: str | None,
        new_settings: StoreSettings | None,
        ram_bytes: int,
        read_only: bool,
        limits: StoreLimits,
        tenant: str,
        profiles: ProfileFinder,
        cipher: StoreCipher = NO_CIPHER,
    ) -> None:
        self.profiles = profiles
        self.tenant = tenant
        self.cipher = cipher
        self.unit_overhead_bytes = cipher.value_overhead_bytes
        self.label = key_values.label
        self.key_values = key_values
        self.read_only = read_only
        self.notes: list[str] = []
        requested_profile = new_settings.profile if new_settings is not None else None
        self._requested_settings, self._new_settings = (block_tokens, codec, policy, requested_profile), new_settings
        self._cached_settings: StoreSettings | None = None
        self.tables = TableSetCache(
            lambda name: key_values.get_many([f"{TABLES_FOLDER}/{name}"])[0],
            lambda: key_values.list_names(TABLES_FOLDER),
        )
        self._namespaces: dict[str, Namespace] = {}
        self._namespace_numbers: dict[str, int] = {}
        """Places of the namespaces in the order of first puts."""
        self._memory_cache = MemoryCache(ram_bytes)
        self._record_names: dict[int, str] = {}
        self._damaged_units: set[int] = set()
        self._lock = threading.Lock()
        self._limits = limits
        self._last_bytes: dict[str | None, int] = {}
        """Bytes of the units of the tenant, and by the key None of all, when this process last counted them."""
        self._bytes_since_count: dict[str | None, int] = {}
        """Bytes that this process has put since, by the same keys."""
        self._num_uses_by_touched_unit: dict[int, int] = {}
        self._last_touch_time = time.monotonic()
        self._lru_clock = 0
        try:
            self._cached_settings = self._load_settings()
        except BackendUnavailableError:
            self._cached_settings = None  # read when it is needed

    @property
    def block_tokens(self) -> int:
        """Tokens per block; raises `BackendUnavailableError` if the settings could not be read yet."""
        return self.settings.block_tokens

    @property
    def codec(self) -> str:
        """Codec of new units; raises as `block_tokens` does."""
        return self.settings.codec

    @property
    def policy(self) -> str:
        """What is evicted first; raises as `block_tokens` does."""
        return self.settings.policy

    @property
    def settings(self) -> StoreSettings:
        """Settings that were fixed when the store was created; raises as `block_tokens` does."""
        if self._cached_settings is None:
            self._cached_settings = self._load_settings()
        return self._cached_settings

    def list_namespaces(self) -> list[Namespace]:
        _ = self.settings  # with another key than the store's, nothing is read: an error, not a miss
        names = self.key_values.list_names("spaces")[:_MAX_NAMESPACES]
        new_names = [name for name in names if name not in self._namespaces]
        documents = self.key_values.get_many([f"spaces/{name}" for name in new_names])
        for name, document in zip(new_names, documents, strict=True):
            with suppress(KvmnnError):  # a damaged one is a miss; the next put writes it again
                document_text = (document or b"").decode("utf-8", "replace")
                namespace = parse_namespace(document_text, self.label, self.cipher.secret)
                if namespace.key.hex() == name:
                    self._namespaces[name] = namespace
                    number = json.loads(document_text).get("number")
                    self._namespace_numbers[name] = number if isinstance(number, int) else 0
        known_names = [name for name in names if name in self._namespaces]
        known_names.sort(key=lambda name: (self._namespace_numbers[name], name))
        return [self._namespaces[name] for name in known_names]

    def ensure_namespace(self, namespace: Namespace) -> None:
        """Write a namespace that the engine has evicted: without it, its units are not found."""
        if not self.read_only and all(listed.key != namespace.key for listed in self.list_namespaces()):
            self.key_values.put_many({f"spaces/{namespace.key.hex()}": self._encode_namespace(namespace)})

    def _encode_namespace(self, namespace: Namespace) -> bytes:
        """Return the document of a namespace, with its place in the order of first puts, and settings of the store."""
        number = self._namespace_numbers.get(namespace.key.hex(), max(self._namespace_numbers.values(), default=0) + 1)
        settings = {"codec": self.codec, "block_tokens": self.block_tokens, "policy": self.policy}
        return json.dumps({**json.loads(namespace.to_json()), "number": number, **settings}).encode()

    def has_sequences(self, namespace: Namespace) -> bool:
        folder = make_records_folder(namespace.key) if namespace.layers else STATES_FOLDER_PREFIX + namespace.key.hex()
        return bool(self.key_values.list_names(folder))

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """Find the longest stored prefix: four round trips, whatever its length."""
        while True:
            prefix_match = self._find_by_records(sequence)
            missing_units = self._find_missing([unit_slice.unit for unit_slice in prefix_match.slices])
            if not missing_units:
                return prefix_match
            self._damaged_units.update(missing_units)  # evicted by the engine: their records would block a put
            if not self.read_only:
                self.key_values.delete(
                    [self._record_names[unit] for unit in missing_units if unit in self._record_names]
                )

    def _find_missing(self, units: Sequence[int]) -> list[int]:
        """Return the units that the engine has evicted."""
        uncached_units = [unit for unit in units if self._memory_cache.get(unit) is None]
        are_stored = self.key_values.contains_many(list(map(make_unit_name, uncached_units)))
        return [unit for unit, is_stored in zip(uncached_units, are_stored, strict=True) if not is_stored]

    def _find_by_records(self, sequence: TokenSequence) -> PrefixMatch:
        block_tokens = sequence.block_tokens
        names = [
            make_record_name(sequence.get_parent_key(block_index), sequence.get_block(block_index), sequence.secret)
            for block_index in range(len(sequence.keys))
        ]
        records = [
            self._parse_usable_record(data, name, sequence)
            for data, name in zip(self.key_values.get_many(names), names, strict=True)
        ]
        slices: list[UnitSlice] = []
        num_blocks = num_extra = 0
        while num_blocks < len(records) and (record := records[num_blocks]) is not None:
            num_equal = count_common_entries(record.ids, sequence.ids[num_blocks * block_tokens :])
            num_whole_blocks = num_equal // block_tokens
            if not num_whole_blocks:
                break
            self._cache_record_name(record, block_tokens)
            slices.append(UnitSlice(record.unit, 0, num_whole_blocks * block_tokens, record.has_loss))
            num_blocks += num_whole_blocks
            num_extra = num_equal - num_whole_blocks * block_tokens
        next_ids = sequence.get_block(num_blocks)
        branches = self._iter_branches(sequence, num_blocks, next_ids) if next_ids.size else ()
        branch = max(branches, key=lambda unit_slice: unit_slice.take, default=None)
        if slices and num_extra and (branch is None or branch.take <= num_extra):
            slices[-1] = slices[-1]._replace(take=slices[-1].take + num_extra)
        elif branch is not None and branch.take:
            slices.append(branch)
        return PrefixMatch(tuple(slices), num_blocks)

    def read_units(self, units: Sequence[int]) -> list[Bytes | None]:
        """Read the bytes of units, from memory or in one round trip."""
        data_by_unit = {unit: self._memory_cache.get(unit) for unit in units}
        missing_units = [unit for unit, data in data_by_unit.items() if data is None]
        values = self.key_values.get_many(list(map(make_unit_name, missing_units)))
        for unit, data in zip(missing_units, values, strict=True):
            if data is not None:
                data_by_unit[unit] = data
                self._memory_cache.put(unit, data)
        return [self.to_unit_bytes(data_by_unit[unit]) for unit in units]

    def get_cached(self, unit: int) -> Bytes | None:
        return self.to_unit_bytes(self._memory_cache.get(unit))

    def to_unit_bytes(self, data: bytes | None) -> Bytes | None:
        """Return a value as the bytes of a unit; None for a missing one."""
        return None if data is None else to_unit_bytes(data, is_sealed=bool(self.cipher.secret))

    def find_unreadable(self, units: Sequence[int]) -> tuple[int, str] | None:
        """Return None: `find_prefix` has looked for units, and more would need their bytes."""
        return None

    def has_losses(self, prefix_match: PrefixMatch) -> bool:
        return any(unit_slice.has_loss for unit_slice in prefix_match.slices)

    @contextmanager
    def stage(self) -> Iterator[_MemoryStaging]:
        """Keep new units in memory."""
        yield _MemoryStaging()

    def add_units(
        self, namespace: Namespace, sequence: TokenSequence, new: Sequence[NewUnit], tables: TableSets | None
    ) -> AddResult:
        """Add units of a sequence: the tables that some need, the units, and then their records."""
        self.check_writable()
        num_fitting, exceeded_limit = self._count_fitting(
            sequence.take_prefix(new[0].start), [unit.nbytes for unit in new]
        )
        new = new[:num_fitting]
        if not new:
            return AddResult(0, 0, exceeded_limit=exceeded_limit)
        data_by_name: dict[str, bytes] = {}
        records: dict[str, UnitRecord] = {}
        for new_unit in new:
            unit_id = compute_unit_number(namespace.key, new_unit.parent, new_unit.ids, namespace.secret)
            assert isinstance(new_unit.staged, bytes)
            data_by_name[make_unit_name(unit_id)] = new_unit.staged
            place = (namespace.key, new_unit.parent, unit_id, new_unit.nbytes, new_unit.start, new_unit.ids)
            record = UnitRecord(*place, namespace.secret, has_loss=new_unit.has_loss)
            records[record.make_name(sequence.block_tokens)] = record
        superseded_tail = self._find_superseded_tail(new[0], sequence)
        dependencies = {f"spaces/{namespace.key.hex()}": self._encode_namespace(namespace)}
        if tables is not None:
            dependencies[f"{TABLES_FOLDER}/{make_object_name(namespace.key, tables.key)}"] = tables.data
        record_items = {name: record.to_bytes() for name, record in records.items()}
        taken_names = self.key_values.put_if_absent({**dependencies, **data_by_name}, record_items)
        repaired_units = self._damaged_units & {record.unit for record in records.values()}
        self._damaged_units -= repaired_units
        lost_records, shared_names = self._resolve_conflicts({name: records[name] for name in taken_names})
        if lost_records:
            self.key_values.delete([make_unit_name(record.unit) for record in lost_records])
            lost_units = {record.unit for record in lost_records}
            remaining = [
                record for name, record in records.items() if record.unit not in lost_units and name not in shared_names
            ]
            added = _count_added(remaining) if remaining else None
            raise ConcurrentUpdateError("another has put a text that begins alike", added)
        for name, data in data_by_name.items():
            self._memory_cache.put(int(name.rpartition("/")[2], 16), data)
        if superseded_tail is not None:
            self.delete_records([superseded_tail])
        own_records = [
            record for name, record in records.items() if name not in shared_names or record.unit in repaired_units
        ]
        removed_bytes = 0 if superseded_tail is None else superseded_tail.nbytes
        self._restore_pins(sequence)
        self.touch([record.unit for record in records.values()], num_uses=0)
        lost_bytes, other_bytes, lost_limit = self._enforce_limit_after_put(
            {record.unit: record.nbytes for record in own_records}
        )
        added, known_tokens = _count_added(own_records), None
        if len(own_records) < len(records):
            known_tokens = new[-1].start + new[-1].ids.size if added.stored_from is None else added.stored_from
        return added._replace(
            stored_bytes=added.stored_bytes - lost_bytes,
            removed_bytes=removed_bytes + other_bytes,
            exceeded_limit=lost_limit or exceeded_limit,
            known_tokens=known_tokens,
        )

    def _count_fitting(self, prefix: TokenSequence, sizes: Sequence[int]) -> tuple[int, ExceededLimit | None]:
        """Return how many units after a stored prefix have room once all others went, and the limit to name.

        What has none must not be added: the units that are evicted for it would go for nothing.
        """
        num_fitting, exceeded_limit = len(sizes), None
        for name, limit, tenant in (
            ("quota", self._limits.quota, self.tenant),
            ("max_bytes", self._limits.max_bytes, None),
        ):
            used_bytes = self._last_bytes.get(tenant, limit) if limit is not None else 0
            used_bytes = (used_bytes or 0) + self._bytes_since_count.get(tenant, 0)
            if limit is None or used_bytes + sum(sizes) <= limit:
                continue
            unevictable_bytes = self._measure_unevictable_bytes(prefix, tenant)
            num_in_limit = select_fitting(sizes, unevictable_bytes, limit)
            if num_in_limit < num_fitting:
                shown_bytes = 0 if tenant is None and self.tenant else unevictable_bytes
                num_fitting, exceeded_limit = num_in_limit, ExceededLimit(name, limit, sum(sizes), shown_bytes)
        return num_fitting, exceeded_limit

    def _measure_unevictable_bytes(self, prefix: TokenSequence, tenant: str | None) -> int:
        """Return the bytes that no eviction frees for a unit after a prefix: of its units, and of pinned texts.

        Where nothing is pinned the records of the prefix alone are read, else all of the tenant's, or (None) all.
        """
        prefix_sizes = self._read_prefix_sizes(prefix)
        pinned = list_pinned_units(read_pins(self.key_values))
        if not pinned:
            return sum(prefix_sizes.values())
        records = self.list_stored_records(tenant)
        ranks = dict.fromkeys((record.unit for record in records), (0, 0))
        total_bytes = sum(record.nbytes for record in records)
        evictable = select_evicted(records, self.block_tokens, ranks, pinned | prefix_sizes.keys(), total_bytes + 1)
        return total_bytes - sum(record.nbytes for record in evictable)

    def _read_prefix_sizes(self, prefix: TokenSequence) -> dict[int, int]:
        """Return the units with the whole blocks of a prefix, with their bytes."""
        names = [
            make_record_name(prefix.get_parent_key(block_index), prefix.get_block(block_index), prefix.secret)
            for block_index in range(len(prefix.keys))
        ]
        records = [parse_record(data, prefix.secret) for data in self.key_values.get_many(names)]
        return {record.unit: record.nbytes for record in records if record is not None}

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """Find the state of the longest prefix that has one: three round trips."""
        folder = STATES_FOLDER_PREFIX + sequence.namespace_key.hex()
        names = {
            name: parsed_name
            for name in self.key_values.list_names(folder)
            if (parsed_name := parse_state_name(name)) is not None
        }
        key_by_size: dict[int, str] = {}
        for name in sorted(names, reverse=True):
            num_tokens, key = names[name]
            if not 0 < num_tokens <= tokens:
                continue
            if num_tokens not in key_by_size:
                key_by_size[num_tokens] = compute_state_key(*sequence.get_end(num_tokens), sequence.secret).hex()
            if key_by_size[num_tokens] != key:
                continue
            (data,) = self.key_values.get_many([f"{folder}/{name}"])
            record = self._parse_usable_record(data, f"{folder}/{name}", sequence)
            if record is not None and not self._find_missing([record.unit]):
                self._cache_record_name(record, sequence.block_tokens)
                return StateLocation(num_tokens, record.unit)
        return None

    def add_state(self, namespace: Namespace, sequence: TokenSequence, state: PrefixState) -> AddResult:
        """Add a state. Its units are not locked: a search finds them before it looks for the state."""
        self.check_writable()
        if namespace.layers and self.find_prefix(sequence).tokens < sequence.ids.size:
            raise ConcurrentUpdateError("the blocks before a state are gone")
        data = b"".join(bytes(piece) for piece in state.to_pieces())
        unit_id = int.from_bytes(state.compute_key(namespace.secret), "big")
        start, nbytes = state.tokens - int(state.ids.size), len(data) + self.unit_overhead_bytes
        place = (namespace.key, state.parent, unit_id, nbytes, start, state.ids)
        num_fitting, exceeded_limit = self._count_fitting(sequence, [nbytes])
        if not num_fitting:
            return AddResult(0, 0, exceeded_limit=exceeded_limit)
        record = StateRecord(*place, namespace.secret, raw_bytes=state.raw_bytes)
        name = record.make_name(sequence.block_tokens)
        dependencies = {
            f"spaces/{namespace.key.hex()}": self._encode_namespace(namespace),
            make_unit_name(unit_id): data,
        }
        if self.key_values.put_if_absent(dependencies, {name: record.to_bytes()}):
            self.key_values.put_many({name: record.to_bytes()})  # the stored record may be damaged
        self._damaged_units.discard(unit_id)
        self._memory_cache.put(unit_id, data)
        self._restore_pins(sequence)
        self.touch([unit_id], num_uses=0)
        lost_bytes, other_bytes, exceeded_limit = self._enforce_limit_after_put({unit_id: nbytes})
        return AddResult(nbytes - lost_bytes, other_bytes, exceeded_limit=exceeded_limit)

    def _find_superseded_tail(self, new_unit: NewUnit, sequence: TokenSequence) -> UnitRecord | None:
        """Return the partial block that a longer sequence repeats: a growing chat would leave one at every turn."""
        first_ids = new_unit.ids[: sequence.block_tokens]
        folder, name = make_record_name(new_unit.parent, first_ids, sequence.secret).split("/")
        lower_names = [candidate for candidate in self.key_values.list_neighbours(folder, name, 1) if candidate < name]
        paths = [f"{folder}/{candidate}" for candidate in lower_names]
        for data, path in zip(self.key_values.get_many(paths), paths, strict=True):
            record = parse_record_at(data, path, sequence.block_tokens, sequence.secret)
            if record is None or record.ids.size >= min(sequence.block_tokens, new_unit.ids.size):
                continue
            if count_common_entries(
                record.ids, new_unit.ids
            ) == record.ids.size and record.unit not in list_pinned_units(read_pins(self.key_values)):
                return record
        return None

    def _resolve_conflicts(self, records: Mapping[str, UnitRecord]) -> tuple[list[UnitRecord], set[str]]:
        """Return the records whose names belong to other units now, and the names of those that others have written.

        Unusable records under their names are replaced.
        """
        lost_records, shared_names, own_records = [], set(), {}
        for (name, record), data in zip(records.items(), self.key_values.get_many(list(records)), strict=True):
            stored_record = parse_record_at(data, name, self.block_tokens, self.cipher.secret)
            if stored_record is not None and stored_record.unit == record.unit:
                shared_names.add(name)
                continue
            if stored_record is not None and self.has_unit(stored_record.unit):
                lost_records.append(record)
            else:
                own_records[name] = record.to_bytes()
        self.key_values.put_many(own_records)
        return lost_records, shared_names

    def has_unit(self, unit: int) -> bool:
        return self.key_values.get_many([make_unit_name(unit)])[0] is not None

    def enforce_limit(self) -> tuple[int, ExceededLimit | None]:
        _, removed_bytes, exceeded_limit = self._enforce_limit_after_put({})
        return removed_bytes, exceeded_limit

    def _enforce_limit_after_put(self, new_sizes: Mapping[int, int]) -> tuple[int, int, ExceededLimit | None]:
        """Evict units if the new ones may exceed a limit, these last, as else a store might never admit any.

        All records are read for it, so it does nothing until this process has put enough since the last count.

        Returns
        -------
        tuple
            Bytes of the new units that had no room, as pins hold it, bytes of the others that were removed, and the
            limit that new units exceed; without new ones that which others were removed for.
        """
        stored_bytes, lost_bytes, other_bytes = sum(new_sizes.values()), 0, 0
        exceeded_limit: ExceededLimit | None = None
        for name, limit, tenant in (
            ("quota", self._limits.quota, self.tenant),
            ("max_bytes", self._limits.max_bytes, None),
        ):
            if limit is None:
                continue
            since_count = self._bytes_since_count[tenant] = self._bytes_since_count.get(tenant, 0) + stored_bytes
            if (
                tenant not in self._last_bytes
                or self._last_bytes[tenant] + since_count > limit
                or since_count > limit // _LIMIT_CHECK_DIVISOR
            ):
                self.touch((), immediately=True)
                for record in self._evict_units(limit, tenant, new_sizes):
                    if record.unit in new_sizes:
                        lost_bytes += record.nbytes
                        exceeded_limit = ExceededLimit(name, limit, stored_bytes)
                    else:
                        other_bytes += record.nbytes
                        exceeded_limit = exceeded_limit if new_sizes else ExceededLimit(name, limit)
        return lost_bytes, other_bytes, exceeded_limit

    def _evict_units(
        self, max_bytes: int, tenant: str | None = None, last_units: Collection[int] = ()
    ) -> list[UnitRecord]:
        """Evict units, or those of a tenant, until at most `max_bytes` are left, `last_units` last; return them."""
        for _ in range(_MAX_EVICTION_TRIES):  # fails if other pins are set meanwhile
            records = self.list_stored_records(tenant)
            pins = read_pins(self.key_values)
            total_bytes = sum(record.nbytes for record in records)
            ranks = self._compute_ranks(records)
            excess = total_bytes - max_bytes
            evicted = select_evicted(records, self.block_tokens, ranks, list_pinned_units(pins), excess, last_units)
            nbytes = sum(record.nbytes for record in evicted)
            if not evicted or self.delete_unless_pinned(evicted, pins):
                if evicted and self.policy == "benefit":
                    self._advance_clock(max(ranks[record.unit][0] for record in evicted))
                self._last_bytes[tenant], self._bytes_since_count[tenant] = total_bytes - nbytes, 0
                return evicted
        return []

    def list_stored_records(
        self, tenant: str | None = None, valid_records: Sequence[UnitRecord] | None = None
    ) -> list[UnitRecord]:
        """List the records whose units are stored, of a tenant or (None) of all, each unit once.

        The names of units are listed for it, after the records (`valid_records`, if they were listed before): what is
        put meanwhile has its unit then.
        """
        valid_records = self.list_valid_records() if valid_records is None else valid_records
        stored_names = set(self.key_values.list_names("units"))
        keys = {namespace.key for namespace in self.list_namespaces() if tenant in (None, namespace.tenant)}
        record_by_unit = {
            record.unit: record
            for record in valid_records
            if f"{record.unit:032x}" in stored_names
            if tenant is None or record.namespace_key in keys
        }
        return list(record_by_unit.values())

    def _compute_ranks(self, records: Sequence[UnitRecord]) -> dict[int, tuple[int, int]]:
        """Return the priority of each unit, and the tick of its last use, which decides among equal ones."""
        uses = read_uses(self.key_values, records)
        if self.policy == "lru":
            return {unit: (use.tick, use.tick) for unit, use in uses.items()}
        return {record.unit: (uses[record.unit].compute_priority(record), uses[record.unit].tick) for record in records}

    def _advance_clock(self, clock: int) -> None:
        """Record the highest priority that was evicted: units that are put or used later must not be evicted first."""
        with suppress(KvmnnError):
            (data,) = self.key_values.get_many([_CLOCK_NAME])
            self.key_values.put_many({_CLOCK_NAME: encode_tick(max(clock, decode_tick(data)))})

    def iter_records(self) -> Iterator[tuple[str, UnitRecord | None]]:
        """Yield all records by name; None for one that is damaged, or that belongs under another name."""
        names = sorted(
            (*self.key_values.list_tree(RECORDS_FOLDER_PREFIX), *self.key_values.list_tree(STATES_FOLDER_PREFIX))
        )
        for begin_index in range(0, len(names), NAMES_PER_REQUEST):
            batch = names[begin_index : begin_index + NAMES_PER_REQUEST]
            for name, data in zip(batch, self.key_values.get_many(batch), strict=True):
                yield name, parse_record_at(data, name, self.block_tokens, self.cipher.secret)

    def list_valid_records(self) -> list[UnitRecord]:
        """Return all records that are readable."""
        return [record for _, record in self.iter_records() if record is not None]

    def delete_unless_pinned(
        self, records: Sequence[UnitRecord], expected_pins: Collection[str], extra_names: Sequence[str] = ()
    ) -> bool:
        """Delete units and their records, and `extra_names`, unless the pins are others than `expected_pins`.

        Returns whether it did.
        """
        names = [*self._list_all_names(records), *extra_names]
        if not self.key_values.delete_if_unchanged(names, "pins", set(expected_pins)):
            return False
        for record in records:
            self._memory_cache.evict(record.unit)
        return True

    def _list_all_names(self, records: Sequence[UnitRecord]) -> list[str]:
        """Return the names of records, then of their units and last uses."""
        units = [record.unit for record in records]
        record_names = [record.make_name(self.block_tokens) for record in records]
        return [*record_names, *map(make_unit_name, units), *map(make_use_name, units)]

    def find_pinned_units(self, sequence: TokenSequence) -> tuple[int, ...]:
        """Return the units of a sequence, then its state unit if it needs one; () unless all is stored."""
        prefix_match = self.find_prefix(sequence)
        units = prefix_match.list_units()
        is_entire = prefix_match.tokens == sequence.ids.size
        if not sequence.needs_state:
            return units if is_entire else ()
        state = self.find_state(sequence, sequence.ids.size)
        if state is None or state.tokens < sequence.ids.size or (units and not is_entire):
            return ()
        return (*units, state.unit)

    def _restore_pins(self, sequence: TokenSequence) -> None:
        """Move the pins of a sequence and of its prefixes to the units that they have now."""
        for name, pin in read_pins(self.key_values).items():
            if (
                not 0 < pin.tokens <= sequence.ids.size
                or compute_sequence_key(sequence.namespace_key, sequence.ids[: pin.tokens], sequence.secret).hex()
                != name
            ):
                continue
            units = self.find_pinned_units(sequence.take_prefix(pin.tokens))
            if units and units != pin.units:
                save_pin(self.key_values, name, Pin(units, pin.tokens), has_state=sequence.needs_state)

    @property
    def records_uses(self) -> bool:
        """Whether uses are recorded: where each costs a request, by policy ``"benefit"`` or for a limit to enforce."""
        if self.key_values.has_cheap_touch or any(limit is not None for limit in self._limits):
            return True
        return self._cached_settings is not None and self._cached_settings.policy == "benefit"

    def touch(self, units: Iterable[int], *, num_uses: int = 1, immediately: bool = False) -> None:
        """Record that units were used; written together after a second, or `immediately`.

        It does nothing if `records_uses` is False.
        """
        if self.read_only or not self.records_uses:
            return
        with self._lock:
            for unit in units:  # in order of last use
                self._num_uses_by_touched_unit[unit] = num_uses + self._num_uses_by_touched_unit.pop(unit, 0)
            if not self._num_uses_by_touched_unit or not (
                immediately or time.monotonic() - self._last_touch_time >= _TOUCH_INTERVAL_SECONDS
            ):
                return
            touched, self._num_uses_by_touched_unit = self._num_uses_by_touched_unit, {}
            self._last_touch_time = time.monotonic()
        with suppress(KvmnnError):  # the order of uses is no reason to fail
            names = list(map(make_use_name, touched))
            has_benefits = self.policy == "benefit"
            tick_data, clock_data, *stored_uses = self.key_values.get_many(
                [_TICK_NAME, _CLOCK_NAME, *(names if has_benefits else [])]
            )
            tick, clock = max(self._lru_clock, decode_tick(tick_data)), decode_tick(clock_data)
            values = [encode_tick(tick + offset) for offset in range(1, len(names) + 1)]
            if has_benefits:  # two processes at once may count one use of both: the order suffers little
                counts = [
                    decode_use(data).num_uses + count for data, count in zip(stored_uses, touched.values(), strict=True)
                ]
                values = [encode_use(UnitUse(tick + offset, count, clock)) for offset, count in enumerate(counts, 1)]
            self._lru_clock = tick + len(names)
            uses = dict(zip(names, values, strict=True))
            self.key_values.put_many({_TICK_NAME: encode_tick(self._lru_clock), **uses})

    def quarantine(self, unit: int, reason: str, notes: list[str]) -> None:
        """Remove a damaged unit; a unit that the engine has evicted is not reported."""
        self._damaged_units.add(unit)
        is_cached = self._memory_cache.get(unit) is not None
        self._memory_cache.evict(unit)
        record_name = self._record_names.get(unit)
        if is_cached or self.has_unit(unit):
            action_text = "is passed over" if self.read_only else "was removed"
            notes.append(f"{self.label}: unit {unit:032x}: damaged, {action_text}, with what goes on from it: {reason}")
        if not self.read_only:
            self.key_values.delete([*([record_name] if record_name else []), make_unit_name(unit)])

    def check_open(self) -> None:
        self.key_values.check_open()

    def close(self) -> None:
        self.touch((), immediately=True)
        self.key_values.close()

    def check_writable(self) -> None:
        """Raise `OutputError` if the store is read-only."""
        if self.read_only:
            raise OutputError(f"{self.label}: is open for reading only")

    def delete_records(self, records: Sequence[UnitRecord]) -> None:
        """Delete units and their records."""
        self.key_values.delete(self._list_all_names(records))
        for record in records:
            self._memory_cache.evict(record.unit)

    def _load_settings(self) -> StoreSettings:
        label = f"{self.label}: {SETTINGS_NAME}"
        (data,) = self.key_values.get_many([SETTINGS_NAME])
        samples = self._read_samples()
        recorded = self._parse_recorded(samples)
        stored_key_check = self._infer_key_check(samples, data, label)
        if data is None:
            is_foreign = SETTINGS_NAME.partition("/")[0] in self.key_values.list_foreign()
            if not is_foreign and self.key_values.list_tree(RECORDS_FOLDER_PREFIX):
                (data,) = self.key_values.get_many([SETTINGS_NAME])  # another process may have created it meanwhile
                if data is None:
                    missing = ManifestError(f"{label}: is missing")
                    return self._check_settings(self._infer_settings(missing, recorded))
        if data is None:
            if self._new_settings is None or self.read_only:
                why = ": its key kvmnn:store is of another type than a store writes" if is_foreign else ""
                raise SourceError(f"{self.label}: holds no prefix store{why}")
            new_settings = self._new_settings._replace(key_check=self.cipher.key_check)
            if not self.key_values.put_if_absent({}, {SETTINGS_NAME: encode_settings(new_settings)}):
                return new_settings
            (data,) = self.key_values.get_many([SETTINGS_NAME])  # another process has created it meanwhile
        try:
            settings = parse_settings(data or b"", label)
        except ManifestError as error:
            settings = self._infer_settings(error, recorded)
        if stored_key_check not in (None, settings.key_check):
            problem = "encrypted with another key, and its values are with this one"
            if not settings.key_check:
                problem = "not encrypted, and its values are"
            settings = self._infer_settings(ManifestError(f"{label}: says that the store is {problem}"), recorded)
        contradiction = recorded.find_contradiction(settings)
        if contradiction and self.key_values.list_tree(RECORDS_FOLDER_PREFIX):
            settings = self._infer_settings(ManifestError(f"{label}: says that {contradiction}"), recorded)
        return self._check_settings(settings)

    def _read_samples(self) -> list[tuple[str, Bytes]]:
        """Return names and bytes of namespaces as they are stored; of units where there are none."""
        names = [f"spaces/{name}" for name in self.key_values.list_names("spaces")[:_MAX_SAMPLED_RECORDS]]
        if not names:  # the engine may have evicted them
            names = [f"units/{name}" for name in self.key_values.list_names("units")[:_MAX_ADVICE_UNITS]]
        values = zip(names, self.key_values.get_stored_many(names), strict=True)
        return [(name, np.frombuffer(data, np.uint8)) for name, data in values if data is not None]

    def _parse_recorded(self, samples: Sequence[tuple[str, Bytes]]) -> _RecordedSettings:
        """Return what the documents of namespaces record of the settings."""
        recorded = _RecordedSettings(set(), set(), set())
        for name, data in samples:
            document = None
            with suppress(UnsealError, ValueError, RecursionError):  # a damaged one, or a unit
                document = json.loads(self.cipher.unseal(data.tobytes(), name))
            if isinstance(document, dict):  # of earlier versions without some of these
                size, codec, policy = map(document.get, ("block_tokens", "codec", "policy"))
                recorded.block_tokens.update({size} if type(size) is int and 1 <= size <= MAX_BLOCK_TOKENS else ())
                recorded.codecs.update({codec} if type(codec) is str and codec in STORE_CODECS else ())
                recorded.policies.update({policy} if type(policy) is str and policy in STORE_POLICIES else ())
        return recorded

    def _infer_key_check(
        self, samples: Sequence[tuple[str, Bytes]], settings_data: bytes | None, label: str
    ) -> str | None:
        """Return the `key_check` of what is stored; None if nothing is stored that tells it.

        What is stored decides, not the settings, which may be those of another store. Raises `OptionError` unless it is
        that of the key, and if the settings are those of an encrypted store and what is stored is not encrypted.
        """
        key_check = infer_key_check(samples, self.cipher)
        if key_check is None:
            return None
        if not key_check:
            with suppress(ManifestError):
                if parse_settings(settings_data or b"", label).key_check:
                    raise OptionError(
                        f"{label}: says that the store is encrypted, and its values are not: put its own document in "
                        "the place of this one, or remove it, and it is made again"
                    )
        check_key_matches(self.label, key_check, self.cipher)
        return key_check

    def _check_settings(self, settings: StoreSettings) -> StoreSettings:
        """Return settings that are those of the key and of the caller; raise `OptionError` for others."""
        check_key_matches(self.label, settings.key_check, self.cipher)
        if settings.profile is not None and settings.profile.file:
            self.profiles.add_name(settings.profile.file)
        check_settings_match(self.label, settings, *self._requested_settings)
        return settings

    def _infer_settings(self, error: ManifestError, recorded: _RecordedSettings) -> StoreSettings:
        """Infer lost, damaged or wrong settings from records, units and namespaces, and write them."""
        names = self.key_values.list_tree(RECORDS_FOLDER_PREFIX)[:_MAX_SAMPLED_RECORDS]
        values = self.key_values.get_many(names)
        for name, data in zip(names, values, strict=True):
            record = parse_record(data, self.cipher.secret)
            # the records first: who put with wrong settings has recorded these
            block_tokens = None if record is None else infer_block_tokens(name, record) or recorded.get_block_tokens()
            if record is None or block_tokens is None:
                continue
            unit, use = self.key_values.get_many([make_unit_name(record.unit), make_use_name(record.unit)])
            with suppress(DamagedUnitError):
                headers = [parse_header(np.frombuffer(unit or b"", np.uint8))]
                inferred = infer_settings(block_tokens, headers)._replace(
                    policy="benefit" if has_benefit(use) else "lru"
                )
                inferred = recorded.complete(inferred)._replace(key_check=self.cipher.key_check)
                inferred = inferred.adopt_profile(self._requested_settings[-1])
                if not self.read_only:
                    self.key_values.put_many({SETTINGS_NAME: encode_settings(inferred)})
                lost_text = describe_lost_options(inferred, self._requested_settings[-1:])
                self.notes.append(
                    f"{error}: it was lost, damaged or wrong, and is made again by what is stored{lost_text}"
                )
                return inferred
        unit_names = [f"units/{name}" for name in self.key_values.list_names("units")[:_MAX_ADVICE_UNITS]]
        headers = []
        for data in self.key_values.get_many(unit_names):
            with suppress(DamagedUnitError):
                headers.append(parse_header(np.frombuffer(data or b"", np.uint8)))
        raise ManifestError(f"{error}; {explain_settings(SETTINGS_NAME, self.cipher, headers)}") from None

    def _iter_branches(self, sequence: TokenSequence, num_blocks: int, next_ids: Ids) -> Iterator[UnitSlice]:
        """Yield what follows the last whole block, as far as it matches."""
        parent = sequence.get_parent_key(num_blocks)
        folder, name = make_record_name(parent, next_ids, sequence.secret).split("/")
        names = self.key_values.list_neighbours(folder, name, _MAX_NEIGHBOURS)
        shown_ids = mask_ids(parent, next_ids[:MAX_IDS_IN_NAME], sequence.secret)
        num_named = count_ids_in_name(shown_ids)
        sort_key = to_sort_key(shown_ids[:num_named])
        counts = [count_common_ids(ids_from_name(stored_name), sort_key) for stored_name in names]
        max_equal = max(counts, default=0)
        best_names = [name for name, count in zip(names, counts, strict=True) if count == max_equal > 0]
        if max_equal < num_named or num_named == next_ids.size:  # all of them match equally far
            best_names = best_names[:_MAX_EQUAL_RECORDS_READ]
        paths = [f"{folder}/{stored_name}" for stored_name in best_names]
        for data, path in zip(self.key_values.get_many(paths), paths, strict=True):
            record = self._parse_usable_record(data, path, sequence)
            if record is not None:
                self._cache_record_name(record, sequence.block_tokens)
                yield UnitSlice(record.unit, 0, count_common_entries(record.ids, next_ids), record.has_loss)

    def _parse_usable_record(self, data: bytes | None, name: str, sequence: TokenSequence) -> UnitRecord | None:
        record = parse_record_at(data, name, sequence.block_tokens, sequence.secret)
        return (
            None
            if record is None or record.namespace_key != sequence.namespace_key or record.unit in self._damaged_units
            else record
        )

    def _cache_record_name(self, record: UnitRecord, block_tokens: int) -> None:
        with self._lock:
            if len(self._record_names) > 1 << 16:
                self._record_names.clear()
            self._record_names[record.unit] = record.make_name(block_tokens)


def _count_added(records: Sequence[UnitRecord]) -> AddResult:
    """Return bytes, first token and tokens of the units of records, which are in order."""
    return AddResult(
        sum(record.nbytes for record in records),
        0,
        stored_from=records[0].start if records else None,
        stored_tokens=sum(int(record.ids.size) for record in records),
    )
