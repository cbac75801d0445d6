"""Operations on whole sequences, independent of the backend: put, search, get and export."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from heapq import merge
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from .._util.text import pluralize, shorten_names
from .._util.validation import repr_short
from ..arrays.completeness import Completeness, LayerStateInfo
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..dtypes import DTYPES
from ..errors import KvmnnError, OptionError, SourceError
from .backend import UNREADABLE_LOSS, AddResult, ConcurrentUpdateError, PrefixMatch, StoreBackend, StoredText
from .namespace import Ids, Namespace, TokenSequence, describe_difference, validate_model
from .read_path import UnitLosses, iter_layers, join_unit_losses, load_slices, read_layers, read_state
from .results import MIN_HANDLE_LETTERS, LayerwisePrefix, PutResult, StoredPrefix, StoreExportResult
from .unit import DamagedUnitError, ReadyUnits, parse_header, parse_unit
from .unit_codec import LoadedSlice, encode_state
from .write_path import WriteOptions, add_sequence, make_layer_encoder

_MAX_PUT_TRIES = 3
_CONCURRENT_REMOVAL_REASON = "other processes keep removing what they go on from"


class StoredPart(NamedTuple):
    """The stored part of a sequence in one namespace."""

    #: Length of the stored prefix.
    tokens: int = 0
    #: Where its units are.
    prefix_match: PrefixMatch = PrefixMatch((), 0)
    #: Number of the unit with windows and state at its end; 0 for none.
    state_unit: int = 0

    @property
    def unit_ids(self) -> tuple[int, ...]:
        """The units, the state unit first: it is of no use without the others."""
        return (*filter(None, [self.state_unit]), *self.prefix_match.list_units())


class StateToPut(NamedTuple):
    """Windows and state of a sequence that is put."""

    windows: Sequence[LayerCache] = ()
    states: Sequence[OpaqueState] = ()


class SequenceStore:
    """Sequences of a store."""

    def __init__(self, backend: StoreBackend, write_options: WriteOptions) -> None:
        self._backend = backend
        self._write_options = write_options
        self._threads = write_options.threads

    def make_sequence(self, namespace: Namespace, ids: Ids) -> TokenSequence:
        """Return a sequence with the keys of its blocks."""
        return namespace.make_sequence(ids, self._backend.block_tokens)

    def list_namespaces(self, model: str | None, dtype: str | None = None) -> list[Namespace]:
        """Return the namespaces of a model or (None) of all, in one precision or in all."""
        if model is not None:
            validate_model(model)
        if dtype not in (None, *DTYPES):
            raise OptionError(f"dtype is {repr_short(dtype)}: expected one of {', '.join(DTYPES)}")
        return [
            namespace
            for namespace in self._backend.list_namespaces()
            if namespace.tenant == self._backend.tenant
            and model in (None, namespace.model)
            and dtype in (None, namespace.dtype)
        ]

    def list_models(self) -> set[str]:
        """Return the fingerprints of all models that have stored sequences."""
        return {
            namespace.model
            for namespace in self._backend.list_namespaces()
            if namespace.tenant == self._backend.tenant and self._backend.has_sequences(namespace)
        }

    def put(
        self,
        ids: Ids,
        caches: Sequence[LayerCache],
        namespace: Namespace,
        state: StateToPut | None = None,
        attention: npt.NDArray[Any] | None = None,
        ready_units: ReadyUnits | None = None,
        *,
        is_rounded: bool = False,
    ) -> PutResult:
        """Store a sequence, as `PrefixStore.put`; `state` is required if the namespace needs it."""
        started = time.perf_counter()
        sequence = self.make_sequence(namespace, ids)
        notes: list[str] = []
        stored_before, stored_prefix = self._find_readable_parts(sequence, namespace, notes)
        state_units = tuple(filter(None, [stored_before.state_unit]))
        added = AddResult(0, 0)
        begin_token, known_tokens, is_added = ids.size, stored_prefix.tokens, False
        if max(stored_prefix.tokens, stored_before.tokens) < ids.size:
            self._check_shapes(namespace)
        else:
            self._backend.ensure_namespace(namespace)
        # before anything is added: what a put writes is newer than what it reuses, which may be of another text
        self._backend.touch((*state_units, *stored_prefix.list_units()), num_uses=0)
        for _ in range(_MAX_PUT_TRIES):
            if stored_prefix.tokens >= ids.size or not caches:
                break
            try:
                for batch_added in add_sequence(
                    self._backend,
                    sequence,
                    caches,
                    namespace,
                    stored_prefix,
                    self._write_options,
                    attention,
                    ready_units,
                    is_rounded=is_rounded,
                ):
                    added = added.merge(batch_added)
            except ConcurrentUpdateError as error:  # removed or put by another process: the rest is put now
                added = added if error.added is None else added.merge(error.added)
                stored_prefix = self._backend.find_prefix(sequence)
                known_tokens = stored_prefix.tokens
                if added.stored_from is not None:  # own units are in it
                    known_tokens = min(known_tokens, added.stored_from)
                continue
            is_added = True
            break
        known_tokens = max(known_tokens, added.known_tokens or 0)
        if added.stored_from is not None:
            begin_token = added.stored_from
        elif is_added and known_tokens < ids.size:  # no unit has room
            begin_token = stored_prefix.num_blocks * sequence.block_tokens
        state_bytes = state_raw_bytes = 0
        if state is not None and stored_before.tokens < ids.size and not added.exceeded_limit:
            state_added, state_raw_bytes = self._put_state_unit(sequence, namespace, state, is_rounded=is_rounded)
            state_bytes = state_added.stored_bytes
            added = added._replace(
                stored_bytes=added.stored_bytes + state_bytes,
                removed_bytes=added.removed_bytes + state_added.removed_bytes,
                exceeded_limit=state_added.exceeded_limit,
            )
        removed_bytes, exceeded_limit = added.removed_bytes, added.exceeded_limit
        if added.stored_bytes or not added.exceeded_limit:  # for what has no room nothing goes
            evicted_bytes, evicting_limit = self._backend.enforce_limit()
            removed_bytes += evicted_bytes
            exceeded_limit = exceeded_limit or evicting_limit
        is_cut = bool(removed_bytes or exceeded_limit)
        is_whole = not is_cut and state is None and (is_added or stored_prefix.tokens >= ids.size)
        stored_tokens = ids.size if is_whole else self._find_stored_part(sequence, namespace).tokens
        raw_tokens = added.stored_tokens
        if is_cut and raw_tokens:
            end_token = self._find_stored_part(sequence, namespace, with_state=False).tokens
            raw_tokens = min(raw_tokens, max(end_token - begin_token, 0))
        raw_bytes = raw_tokens * namespace.token_bytes + state_raw_bytes
        if added.bits_factor is not None:
            notes.append(
                f"{added.bits_factor:.1f} times the bits that the profile predicts: its texts are unlike this one, or "
                "of another model, or K is of other positions than from 0 on; its nats do not hold then"
            )
        reason = _CONCURRENT_REMOVAL_REASON if exceeded_limit is None else str(exceeded_limit)
        return PutResult(
            tokens=ids.size,
            known_tokens=known_tokens if state is None else stored_before.tokens,
            stored_from=begin_token if state is None else min(begin_token, stored_before.tokens),
            stored_tokens=stored_tokens,
            raw_bytes=raw_bytes,
            stored_bytes=added.stored_bytes,
            state_bytes=state_bytes,
            removed_bytes=removed_bytes,
            seconds=time.perf_counter() - started,
            notes=tuple(notes) if stored_tokens == ids.size else (*notes, reason),
            is_lossy=self._backend.settings.is_lossy,
            predicted_kl=None if added.bits_factor is not None else added.predicted_kl,
        )

    def _put_state_unit(
        self, sequence: TokenSequence, namespace: Namespace, state: StateToPut, *, is_rounded: bool
    ) -> tuple[AddResult, int]:
        """Store windows and state; return what was added and the bytes of its contents, 0 if it fails."""
        size = sequence.ids.size
        options = self._write_options.options
        prefix_state = encode_state(namespace, *sequence.get_end(size), size, *state, options, is_rounded=is_rounded)
        try:
            added = self._backend.add_state(namespace, sequence, prefix_state)
        except ConcurrentUpdateError:
            return AddResult(0, 0), 0
        return added, prefix_state.raw_bytes if added.stored_bytes else 0

    def _find_stored_part(
        self, sequence: TokenSequence, namespace: Namespace, *, with_state: bool = True
    ) -> StoredPart:
        """Find the stored prefix from which a model can continue; `with_state=False` ignores windows and state."""
        prefix_match = self._backend.find_prefix(sequence) if namespace.layers else PrefixMatch((), 0)
        tokens = prefix_match.tokens if namespace.layers else sequence.ids.size
        if not namespace.needs_state:
            return StoredPart(tokens, prefix_match)
        state_location = self._backend.find_state(sequence, tokens) if tokens else None
        if not with_state:
            has_state = state_location is not None and state_location.tokens == prefix_match.tokens
            state_unit = state_location.unit if state_location is not None and has_state else 0
            return StoredPart(prefix_match.tokens, prefix_match, state_unit)
        if state_location is None:
            return StoredPart()
        return StoredPart(
            state_location.tokens,
            prefix_match.take_prefix(state_location.tokens, sequence.block_tokens),
            state_location.unit,
        )

    def _find_readable_parts(
        self, sequence: TokenSequence, namespace: Namespace, notes: list[str]
    ) -> tuple[StoredPart, PrefixMatch]:
        """Find what is stored of a sequence, with its state and without, after the removal as of `find_readable`."""
        while True:
            stored_part = self._find_stored_part(sequence, namespace)
            stored_prefix = self._backend.find_prefix(sequence)
            state_units = filter(None, [stored_part.state_unit])
            damaged = self._backend.find_unreadable((*state_units, *stored_prefix.list_units()))
            if damaged is None:
                return stored_part, stored_prefix
            self._backend.quarantine(*damaged, notes)  # else it would count as stored

    def find_deletable(self, ids: Ids, model: str, dtype: str | None, notes: list[str]) -> list[Namespace]:
        """Return the namespaces that contain a whole sequence, or its label, after the removal as of `find_readable`.

        A label shows that it was put as a whole: the rest was evicted since, or is damaged.
        """
        label_keys = set(self._backend.list_label_keys())
        namespaces = []
        for namespace in self.list_namespaces(model, dtype):
            stored_part, _ = self._find_readable_parts(self.make_sequence(namespace, ids), namespace, notes)
            if stored_part.tokens == ids.size or StoredText(namespace, ids).key in label_keys:
                namespaces.append(namespace)
        if not namespaces:
            self.find_complete(ids, model, dtype)  # which says how much is missing
        return namespaces

    def _check_shapes(self, namespace: Namespace) -> None:
        """Raise `KvmnnError` if the model has layers of other shapes in the store: two models share a fingerprint."""
        for stored_namespace in self.list_namespaces(namespace.model):
            # windows of a short sequence are stored as layers: `all_layers` contains both
            has_same_layers = stored_namespace.all_layers == namespace.all_layers
            is_alike = has_same_layers and stored_namespace.states == namespace.states
            has_same_dtype = stored_namespace.dtype == namespace.dtype
            if has_same_dtype and not is_alike and self._backend.has_sequences(stored_namespace):
                stored_text, given_text = describe_difference(stored_namespace, namespace)
                name = shorten_names([namespace.model])[namespace.model]
                raise KvmnnError(
                    f"{self._backend.label}: under the model {name} it holds {stored_text}, these are "
                    f"{given_text}: another model needs a fingerprint of its own"
                )

    def get(self, ids: Ids, model: str, dtype: str | None, *, partial: bool = False) -> StoredPrefix:
        """Return the longest stored prefix, as `PrefixStore.get`."""
        notes: list[str] = []
        while True:
            namespace, stored_part, other_precisions = self.find_longest(ids, model, dtype, partial=partial)
            if namespace is None or not stored_part.tokens:
                return StoredPrefix(tokens=0, requested_tokens=ids.size, notes=tuple(notes))
            tokens, prefix_match, _ = stored_part
            layers: list[LayerCache] | None = []
            losses = UnitLosses()
            if namespace.layers:
                layers, losses = read_layers(self._backend, namespace, prefix_match, ids, notes, self._threads)
            state_result = self._read_state(namespace, ids, stored_part, notes) if layers is not None else None
            if layers is None or state_result is None:
                continue  # a damaged unit was removed: the next search does not find it
            windows, states, is_state_rounded = state_result
            completeness = None
            if namespace.needs_state:
                completeness = _build_completeness(namespace, tokens, has_state=bool(stored_part.state_unit))
            self._backend.touch(stored_part.unit_ids)
            loss = self._read_loss(namespace, losses, is_state_rounded=is_state_rounded)
            return StoredPrefix(
                tokens=tokens,
                requested_tokens=ids.size,
                layers=sorted([*layers, *windows], key=lambda cache: cache.layer),
                dtype=namespace.dtype,
                other_precisions=other_precisions,
                notes=tuple(notes),
                token_ids=ids[:tokens],
                states=tuple(states),
                completeness=completeness,
                is_lossy=self._backend.settings.is_lossy or losses.is_lossy,
                loss=loss,
                predicted_kl=losses.select_predicted_kl(loss),
            )

    def _read_state(
        self, namespace: Namespace, ids: Ids, stored_part: StoredPart, notes: list[str]
    ) -> tuple[list[LayerCache], list[OpaqueState], bool] | None:
        """Read windows and state as `read_state`, none where a prefix needs none; None if they are damaged."""
        if not stored_part.state_unit:
            return [], [], False
        prefix = self.make_sequence(namespace, ids).take_prefix(stored_part.tokens)
        return read_state(self._backend, namespace, stored_part.state_unit, prefix, notes)

    def get_by_layer(self, ids: Ids, model: str, dtype: str | None) -> LayerwisePrefix:
        """Return the longest stored prefix, as `PrefixStore.get_by_layer`."""
        notes: list[str] = []
        while True:
            namespace, stored_part, _ = self.find_longest(ids, model, dtype)
            if namespace is None or not stored_part.tokens:
                return LayerwisePrefix(tokens=0, requested_tokens=ids.size, notes=tuple(notes))
            slices: list[LoadedSlice] | None = []
            if namespace.layers:
                slices = load_slices(self._backend, namespace, stored_part.prefix_match, ids, notes)
            state_result = self._read_state(namespace, ids, stored_part, notes) if slices is not None else None
            if slices is None or state_result is None:
                continue
            self._backend.touch(stored_part.unit_ids)
            layers = iter_layers(self._backend, namespace, stored_part.prefix_match, slices, self._threads)
            windows, states, is_state_rounded = state_result
            losses = join_unit_losses(slices)
            return LayerwisePrefix(
                tokens=stored_part.tokens,
                requested_tokens=ids.size,
                num_layers=len(namespace.all_layers),
                layers=merge(layers if slices else iter(()), windows, key=lambda cache: cache.layer),
                dtype=namespace.dtype,
                notes=tuple(notes),
                states=tuple(states),
                is_lossy=self._backend.settings.is_lossy or losses.is_lossy,
                loss=self._read_loss(namespace, losses, is_state_rounded=is_state_rounded),
            )

    def _read_loss(self, namespace: Namespace, losses: UnitLosses, *, is_state_rounded: bool = False) -> str:
        """Return what K and V of a prefix had lost before they were put; empty for nothing.

        The sentence is one for all of a namespace, and may be gone: whether it is about this prefix is what units say.
        """
        if not (losses.is_rounded or is_state_rounded):
            return ""
        return self._backend.get_loss(namespace) or UNREADABLE_LOSS

    def find_longest(
        self, ids: Ids, model: str, dtype: str | None, *, partial: bool = False
    ) -> tuple[Namespace | None, StoredPart, dict[str, int]]:
        """Find the namespace with the longest stored prefix, that prefix, and the tokens that other precisions have.

        Of equally long ones, the first that was put is returned. With `partial`, only layers with full attention count.
        """
        best_namespace, best_part, tokens_by_dtype = None, StoredPart(), dict[str, int]()
        for namespace in self.list_namespaces(model, dtype):
            stored_part = self._find_stored_part(self.make_sequence(namespace, ids), namespace, with_state=not partial)
            tokens_by_dtype[namespace.dtype] = max(tokens_by_dtype.get(namespace.dtype, 0), stored_part.tokens)
            if stored_part.tokens > best_part.tokens:
                best_namespace, best_part = namespace, stored_part
        other_precisions = {
            name: num_tokens
            for name, num_tokens in tokens_by_dtype.items()
            if num_tokens and best_namespace is not None and name != best_namespace.dtype
        }
        return best_namespace, best_part, other_precisions

    def find_readable(
        self, ids: Ids, model: str, dtype: str | None, notes: list[str], *, partial: bool
    ) -> tuple[Namespace | None, StoredPart, dict[str, int]]:
        """Find as `find_longest`, after the removal of units that are damaged as far as that shows without a read."""
        while True:
            lookup = self.find_longest(ids, model, dtype, partial=partial)
            damaged = self._backend.find_unreadable(lookup[1].unit_ids)
            if damaged is None:
                return lookup
            self._backend.quarantine(*damaged, notes)

    def is_stored(self, text: StoredText) -> bool:
        """Return whether all of a sequence is stored."""
        return self.find_in_namespace(text).tokens == text.ids.size

    def find_in_namespace(self, text: StoredText) -> StoredPart:
        """Find the stored prefix of a sequence in its own namespace."""
        return self._find_stored_part(self.make_sequence(text.namespace, text.ids), text.namespace)

    def find_complete(self, ids: Ids, model: str | None, dtype: str | None) -> list[tuple[Namespace, StoredPart]]:
        """Return the namespaces that contain a whole sequence, in the order of their first puts."""
        parts = [
            (namespace, self._find_stored_part(self.make_sequence(namespace, ids), namespace))
            for namespace in self.list_namespaces(model, dtype)
        ]
        max_stored_tokens = max((stored_part.tokens for _, stored_part in parts), default=0)
        if max_stored_tokens < ids.size:
            under_text = "" if model is None else " under this model"
            raise KvmnnError(
                f"{self._backend.label}: holds {max_stored_tokens:,} tokens of this text of {ids.size:,}{under_text}"
                f"{self._name_stored_text(ids[:max_stored_tokens], [namespace for namespace, _ in parts])}"
            )
        return [(namespace, stored_part) for namespace, stored_part in parts if stored_part.tokens == ids.size]

    def read_losses(self, ids: Ids, namespace: Namespace) -> tuple[UnitLosses, str]:
        """Return what the units of a stored sequence lost, and what K and V had lost before they were put."""
        prefix_match = self._backend.find_prefix(self.make_sequence(namespace, ids))
        data = self._backend.read_units(prefix_match.list_units())
        try:
            units = {
                unit: parse_unit(unit_data)
                for unit, unit_data in zip(prefix_match.list_units(), data, strict=True)
                if unit_data is not None
            }
        except DamagedUnitError:
            return UnitLosses(), ""
        slices = [
            LoadedSlice(units[unit_slice.unit], unit_slice.skip, unit_slice.take)
            for unit_slice in prefix_match.slices
            if unit_slice.unit in units
        ]
        losses = join_unit_losses(slices)
        return losses, self._read_loss(namespace, losses)

    def _name_stored_text(self, ids: Ids, namespaces: Sequence[Namespace]) -> str:
        """Return the handle of the shortest text that begins with `ids`, for a message that refuses a longer one."""
        keys = {namespace.key for namespace in namespaces} if ids.size else set()
        texts = (text for text in self._backend.iter_texts() if text.namespace.key in keys)
        texts_by_size = sorted(texts, key=lambda text: text.ids.size)
        text = next((text for text in texts_by_size if np.array_equal(text.ids[: ids.size], ids)), None)
        if text is None:
            return " (kvmnn store ls lists the texts)"
        return (
            f", of the text {text.key.hex()[:MIN_HANDLE_LETTERS]} of {text.ids.size:,}: name that, by its handle "
            "(kvmnn store ls)"
        )

    def export(
        self, ids: Ids, path: str | os.PathLike[str], model: str, dtype: str | None, *, force: bool
    ) -> StoreExportResult:
        """Write a sequence to a file, as `PrefixStore.export`."""
        (namespace, stored_part), *other_matches = self.find_complete(ids, model, dtype)
        prefix_match = stored_part.prefix_match
        if namespace.needs_state:
            raise KvmnnError(
                f"{self._backend.label}: this text has windows or state, which the file of export has no place for: "
                f"put "
                "its cache into the other store"
            )
        notes: list[str] = []
        layers, losses = read_layers(self._backend, namespace, prefix_match, ids, notes, self._threads)
        if layers is None:
            raise SourceError(notes[0] if notes else f"{self._backend.label}: this text was evicted meanwhile")
        if losses.is_lossy and not self._backend.settings.is_lossy:  # what is encoded again would not say so
            raise SourceError(
                f"{self._backend.label}: this text has LOSSY units, of transform streams, and the settings of the "
                f"store say codec {self._backend.codec}: expected transform"
            )
        unit_ids = prefix_match.list_units()
        units = zip(unit_ids, self._backend.read_units(unit_ids), strict=True)
        data_by_unit = {unit: data for unit, data in units if data is not None}
        if len(data_by_unit) < len(unit_ids):
            raise SourceError(f"{self._backend.label}: this text was evicted meanwhile")
        from .export import SequenceExporter, write_exported

        options, rotary = self._write_options.options, None
        if self._backend.settings.profile is None:
            rotary = self._write_options.rope_state.get_rope(namespace, layers)
        try:
            headers = map(parse_header, data_by_unit.values())
            keys = {header.dense.tables_key for header in headers if header.dense and header.dense.tables_key}
            tables = {key: self._backend.tables.get(namespace.key, key) for key in sorted(keys)}
            layer_encoder = make_layer_encoder(self._backend, layers, self._threads)
            sequence = self.make_sequence(namespace, ids)
            exporting = SequenceExporter(
                namespace, sequence, layers, tables, rotary, options, layer_encoder, self._threads
            )
            unit_slices = exporting.build_units(prefix_match, data_by_unit)
        except DamagedUnitError as error:  # damaged since `read_layers`
            raise SourceError(f"{self._backend.label}: this text cannot be read any more: {error}") from None
        is_rounded_again = losses.is_lossy and any(data is not data_by_unit[part.unit] for part, data in unit_slices)
        key = StoredText(namespace, ids).key
        loss = self._read_loss(namespace, losses)
        nbytes = write_exported(
            path,
            namespace,
            unit_slices,
            list(tables.values()),
            label=next((label for label, text in self._backend.iter_labels() if text.key == key), ""),
            loss=loss,
            codec_options=None if self._backend.settings.profile is None else self._backend.settings.profile.options,
            is_rounded_again=is_rounded_again,
            force=force,
            cipher=self._backend.cipher,
        )
        note = "units that have other texts as well were rounded once more without them"
        other_precisions = {other_namespace.dtype: ids.size for other_namespace, _ in other_matches}
        return StoreExportResult(
            output=os.fspath(path),
            tokens=ids.size,
            bytes=nbytes,
            dtype=namespace.dtype,
            other_precisions=other_precisions,
            is_lossy=self._backend.settings.is_lossy,
            loss=loss,
            notes=(note,) if is_rounded_again else (),
        )


def _build_completeness(namespace: Namespace, tokens: int, *, has_state: bool) -> Completeness:
    """Describe what a prefix contains of a model with windows or state."""
    location = "" if has_state else f"not stored at the length of {pluralize(tokens, 'token')}"
    layers = {shape.layer: LayerStateInfo(layer=shape.layer) for shape in namespace.layers}
    for shape in namespace.windows:
        layers[shape.layer] = LayerStateInfo(layer=shape.layer, kind="window", included=has_state, location=location)
    for layer, _ in namespace.states:
        layers[layer] = LayerStateInfo(layer=layer, kind="recurrent", included=has_state, location=location)
    for layer in range(max(layers)):
        layers.setdefault(layer, LayerStateInfo(layer=layer, kind="shared", included=False))
    return Completeness(layers=tuple(layers[layer] for layer in sorted(layers)))
