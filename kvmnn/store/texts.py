"""Texts in units: put, found, got and exported, whatever the units lie in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..arrays.completeness import Completeness, LayerState
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from ..checks import shown
from ..dtypes import BY_NAME
from ..errors import KvmnnError, OptionError, SourceError
from ..text import count, short_names
from . import portable
from .exporting import Exporting
from .getting import read_layers, read_state
from .lookup import Found, Text, units_of
from .prefix_state import encode_state
from .putting import Writing, add_text
from .results import Exported, Prefix, Put
from .space import Space, check_model, said_apart
from .token_ids import Ids, block_keys
from .unit import DamagedError, parse_header
from .units import Added, Units
from .updates import ParentGoneError

_TRIES = 3
_NO_ROOM = "the bound (max_bytes) has no room for more"
_GONE = "other processes keep removing what they go on from"


class Stored(NamedTuple):
    """What of a text is stored in a space: its tokens, where they are, and the unit of windows and state at their end.

    0 stands for no such unit.
    """

    tokens: int = 0
    found: Found = Found((), 0)
    state: int = 0

    @property
    def units(self) -> tuple[int, ...]:
        """The units, windows and state first: they are of no use without the others."""
        return (*filter(None, [self.state]), *units_of(self.found.places))


class Longest(NamedTuple):
    """The space in which most of a text is stored, and where; of other precisions that have some of it, how much."""

    space: Space | None
    stored: Stored
    others: dict[str, int]


class NewState(NamedTuple):
    """Windows and state of a text that is put."""

    windows: Sequence[LayerCache] = ()
    states: Sequence[OpaqueState] = ()


class Texts:
    """The texts of a store.

    Parameters
    ----------
    units
        What they lie in.
    how
        How new units are made.
    """

    def __init__(self, units: Units, how: Writing) -> None:
        self._units = units
        self._how = how
        self._threads = how.threads

    def text(self, space: Space, ids: Ids) -> Text:
        """A text with the keys of its blocks."""
        size = self._units.block_tokens
        return Text(space.key, ids, block_keys(space.key, ids, size), size, space.needs_state)

    def spaces_of(self, model: str, dtype: str | None = None) -> list[Space]:
        """The spaces of a model, in this precision or in all."""
        check_model(model)
        if dtype not in (None, *BY_NAME):
            raise OptionError(f"dtype is {shown(dtype)}: expected one of {', '.join(BY_NAME)}")
        return [space for space in self._units.spaces() if space.model == model and dtype in (None, space.dtype)]

    def models(self) -> set[str]:
        """The models of all texts."""
        return {space.model for space in self._units.spaces() if self._units.has_texts(space)}

    def put(self, ids: Ids, caches: Sequence[LayerCache], space: Space, state: NewState | None = None) -> Put:
        """As `PrefixStore.put`; `state` for a space that needs it."""
        started = time.perf_counter()
        text = self.text(space, ids)
        before = self._stored(text, space, with_state=True)
        known, added, begin, raw_bytes = self._units.find(text), Added(0, 0), ids.size, 0
        if max(known.tokens, before.tokens) < ids.size:
            self._check_shapes(space)
        else:
            self._units.keep_space(space)
        for _ in range(_TRIES):
            if known.tokens >= ids.size or not caches:
                break
            try:
                added = add_text(self._units, text, caches, space, known, self._how)
            except ParentGoneError:  # another process removed what these blocks follow: they are put as well
                known = self._units.find(text)
                continue
            begin = known.blocks * text.block_tokens
            raw_bytes = (ids.size - begin) * space.token_bytes
            break
        state_bytes = 0
        if state is not None and before.tokens < ids.size:
            state_bytes, state_raw, more = self._put_state(text, space, state)
            added = Added(added.stored_bytes + state_bytes, added.removed_bytes + more)
            raw_bytes += state_raw
        self._units.touch((*filter(None, [before.state]), *units_of(known.places)))
        removed = added.removed_bytes + self._units.keep_bound()
        is_whole = not removed and state is None and (raw_bytes or known.tokens >= ids.size)
        stored = ids.size if is_whole else self._stored(text, space).tokens
        why = _NO_ROOM if removed else _GONE
        return Put(
            tokens=ids.size,
            known_tokens=known.tokens if state is None else before.tokens,
            stored_from=begin if state is None else min(begin, before.tokens),
            stored_tokens=stored,
            raw_bytes=raw_bytes,
            stored_bytes=added.stored_bytes,
            state_bytes=state_bytes,
            removed_bytes=removed,
            seconds=time.perf_counter() - started,
            notes=() if stored == ids.size else (why,),
        )

    def _put_state(self, text: Text, space: Space, state: NewState) -> tuple[int, int, int]:
        """Store windows and state at the end of a text whose units are stored: bytes of the file, what it holds, and
        what had to go for it; nothing where others keep removing the units.
        """
        parent, rest = text.end(text.ids.size)
        new = encode_state(space, parent, rest, text.ids.size, *state, self._how.options)
        try:
            added = self._units.add_state(space, text, new)
        except ParentGoneError:
            return 0, 0, 0
        return added.stored_bytes, new.raw_bytes if added.stored_bytes else 0, added.removed_bytes

    def _stored(self, text: Text, space: Space, *, with_state: bool = True) -> Stored:
        """What of a text is stored, as far as a model can continue from it; without `with_state` as far as layers with
        full attention are.
        """
        found = self._units.find(text) if space.layers else Found((), 0)
        tokens = found.tokens if space.layers else text.ids.size
        if not space.needs_state:
            return Stored(tokens, found)
        place = self._units.find_state(text, tokens) if tokens else None
        if not with_state:
            tokens = found.tokens
            return Stored(tokens, found, place.unit if place is not None and place.tokens == tokens else 0)
        if place is None:
            return Stored()
        return Stored(place.tokens, found.beginning(place.tokens, text.block_tokens), place.unit)

    def _check_shapes(self, space: Space) -> None:
        """`KvmnnError` where layers of other shapes are stored under the model: two models have one fingerprint."""
        for other in self.spaces_of(space.model):
            is_alike = (other.all_layers, other.states) == (space.all_layers, space.states)  # windows of a short text
            if other.dtype == space.dtype and not is_alike and self._units.has_texts(other):
                stored, given = said_apart(other, space)
                name = short_names([space.model])[space.model]
                raise KvmnnError(
                    f"{self._units.label}: under the model {name} it holds {stored}, these are "
                    f"{given}: another model needs a fingerprint of its own"
                )

    def get(self, ids: Ids, model: str, dtype: str | None, *, partial: bool = False) -> Prefix:
        """As `PrefixStore.get`."""
        notes: list[str] = []
        while True:
            space, stored, others = self.longest(ids, model, dtype, partial=partial)
            if space is None or not stored.tokens:
                return Prefix(tokens=0, asked=ids.size, notes=tuple(notes))
            found, tokens = stored.found, stored.tokens
            layers: list[LayerCache] | None = []
            if space.layers:
                layers = read_layers(self._units, space, found, ids, notes, self._threads)
            windows: list[LayerCache] = []
            states: list[OpaqueState] = []
            if layers is not None and stored.state:
                held = read_state(self._units, space, stored.state, self.text(space, ids).beginning(tokens), notes)
                layers = None if held is None else layers
                windows, states = held or (windows, states)
            if layers is not None:
                self._units.touch(stored.units)
                return Prefix(
                    tokens=tokens,
                    asked=ids.size,
                    layers=sorted([*layers, *windows], key=lambda cache: cache.layer),
                    dtype=space.dtype,
                    others=others,
                    notes=tuple(notes),
                    token_ids=ids[:tokens],
                    states=tuple(states),
                    completeness=(
                        _completeness(space, tokens, has_state=bool(stored.state)) if space.needs_state else None
                    ),
                )

    def longest(self, ids: Ids, model: str, dtype: str | None, *, partial: bool = False) -> Longest:
        """The space of a model in which most of a text is stored; of equals the first that was put.

        With `partial`, as far as layers with full attention are.
        """
        space, stored, tokens = None, Stored(), dict[str, int]()
        for each in self.spaces_of(model, dtype):
            there = self._stored(self.text(each, ids), each, with_state=not partial)
            tokens[each.dtype] = max(tokens.get(each.dtype, 0), there.tokens)
            if there.tokens > stored.tokens:
                space, stored = each, there
        others = {name: n for name, n in tokens.items() if n and space is not None and name != space.dtype}
        return Longest(space, stored, others)

    def wholes(self, ids: Ids, model: str, dtype: str | None) -> list[tuple[Space, Stored]]:
        """The spaces in which all of a text is stored, in the order of their first puts; `KvmnnError` for none."""
        found = [(space, self._stored(self.text(space, ids), space)) for space in self.spaces_of(model, dtype)]
        most = max((each.tokens for _, each in found), default=0)
        if most < ids.size:
            raise KvmnnError(
                f"{self._units.label}: holds {most:,} tokens of this text of {ids.size:,} under this model"
            )
        return [(space, each) for space, each in found if each.tokens == ids.size]

    def export(self, ids: Ids, path: str | os.PathLike[str], model: str, dtype: str | None, *, force: bool) -> Exported:
        """As `PrefixStore.export`."""
        (space, stored), *rest = self.wholes(ids, model, dtype)
        found = stored.found
        if space.needs_state:
            raise KvmnnError(
                f"{self._units.label}: this text has windows or state, which the file of export has no place for: put "
                "its cache into the other store"
            )
        notes: list[str] = []
        layers = read_layers(self._units, space, found, ids, notes, self._threads)
        if layers is None:
            raise SourceError(notes[0] if notes else f"{self._units.label}: this text was evicted meanwhile")
        numbers = units_of(found.places)
        held = {unit: data for unit, data in zip(numbers, self._units.read(numbers), strict=True) if data is not None}
        if len(held) < len(numbers):
            raise SourceError(f"{self._units.label}: this text was evicted meanwhile")
        rotary, options = self._how.rotation.of(space, layers), self._how.options
        try:
            headers = map(parse_header, held.values())
            keys = {header.dense.tables for header in headers if header.dense and header.dense.tables}
            tables = {key: self._units.tables.get(space.key, key) for key in sorted(keys)}
            exporting = Exporting(space, self.text(space, ids), layers, tables, rotary, options, self._threads)
            places = exporting.units(found, held)
        except DamagedError as error:  # since they were read
            raise SourceError(f"{self._units.label}: this text cannot be read any more: {error}") from None
        nbytes = portable.write(path, space, places, list(tables.values()), force=force)
        others = {other.dtype: ids.size for other, _ in rest}
        return Exported(output=os.fspath(path), tokens=ids.size, bytes=nbytes, dtype=space.dtype, others=others)


def _completeness(space: Space, tokens: int, *, has_state: bool) -> Completeness:
    """What a prefix of so many tokens contains of a model that has windows or state."""
    location = "" if has_state else f"not stored at the length of {count(tokens, 'token')}"
    layers = {shape.layer: LayerState(layer=shape.layer) for shape in space.layers}
    for shape in space.windows:
        layers[shape.layer] = LayerState(layer=shape.layer, kind="window", included=has_state, location=location)
    for layer, _ in space.states:
        layers[layer] = LayerState(layer=layer, kind="recurrent", included=has_state, location=location)
    for layer in range(max(layers)):
        layers.setdefault(layer, LayerState(layer=layer, kind="shared", included=False))
    return Completeness(layers=tuple(layers[layer] for layer in sorted(layers)))
