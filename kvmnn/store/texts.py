"""Texts in units: put, found, got and exported, whatever the units lie in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..arrays.layer_cache import LayerCache
from ..checks import shown
from ..dtypes import BY_NAME
from ..errors import KvmnnError, OptionError, SourceError
from ..text import short_names
from . import portable
from .exporting import Exporting
from .getting import read_layers
from .lookup import Found, Text, units_of
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


class Longest(NamedTuple):
    """The space in which most of a text is stored, and where; of other precisions that have some of it, how much."""

    space: Space | None
    found: Found
    others: dict[str, int]


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
        return Text(space.key, ids, block_keys(space.key, ids, size), size)

    def spaces_of(self, model: str, dtype: str | None = None) -> list[Space]:
        """The spaces of a model, in this precision or in all."""
        check_model(model)
        if dtype not in (None, *BY_NAME):
            raise OptionError(f"dtype is {shown(dtype)}: expected one of {', '.join(BY_NAME)}")
        return [space for space in self._units.spaces() if space.model == model and dtype in (None, space.dtype)]

    def models(self) -> set[str]:
        """The models of all texts."""
        return {space.model for space in self._units.spaces() if self._units.has_texts(space)}

    def put(self, ids: Ids, caches: Sequence[LayerCache], space: Space) -> Put:
        """As `PrefixStore.put`."""
        started = time.perf_counter()
        text = self.text(space, ids)
        known, added, begin, raw_bytes = self._units.find(text), Added(0, 0), ids.size, 0
        if known.tokens < ids.size:
            self._check_shapes(space)
        else:
            self._units.keep_space(space)
        for _ in range(_TRIES):
            if known.tokens >= ids.size:
                break
            try:
                added = add_text(self._units, text, caches, space, known, self._how)
            except ParentGoneError:  # another process removed what these blocks follow: they are put as well
                known = self._units.find(text)
                continue
            begin = known.blocks * text.block_tokens
            raw_bytes = (ids.size - begin) * space.token_bytes
            break
        self._units.touch(units_of(known.places))
        removed = added.removed_bytes + self._units.keep_bound()
        is_whole = not removed and (raw_bytes or known.tokens >= ids.size)
        stored = ids.size if is_whole else self._units.find(text).tokens
        why = _NO_ROOM if removed else _GONE
        return Put(
            tokens=ids.size,
            known_tokens=known.tokens,
            stored_from=begin,
            stored_tokens=stored,
            raw_bytes=raw_bytes,
            stored_bytes=added.stored_bytes,
            removed_bytes=removed,
            seconds=time.perf_counter() - started,
            notes=() if stored == ids.size else (why,),
        )

    def _check_shapes(self, space: Space) -> None:
        """`KvmnnError` where layers of other shapes are stored under the model: two models have one fingerprint."""
        for other in self.spaces_of(space.model):
            if other.dtype == space.dtype and other.key != space.key and self._units.has_texts(other):
                stored, given = said_apart(other, space)
                name = short_names([space.model])[space.model]
                raise KvmnnError(
                    f"{self._units.label}: under the model {name} it holds {stored}, these are "
                    f"{given}: another model needs a fingerprint of its own"
                )

    def get(self, ids: Ids, model: str, dtype: str | None) -> Prefix:
        """As `PrefixStore.get`."""
        notes: list[str] = []
        while True:
            space, found, others = self.longest(ids, model, dtype)
            if space is None or not found.places:
                return Prefix(tokens=0, asked=ids.size, notes=tuple(notes))
            layers = read_layers(self._units, space, found, ids, notes, self._threads)
            if layers is not None:
                self._units.touch(units_of(found.places))
                return Prefix(
                    tokens=found.tokens,
                    asked=ids.size,
                    layers=layers,
                    dtype=space.dtype,
                    others=others,
                    notes=tuple(notes),
                    token_ids=ids[: found.tokens],
                )

    def longest(self, ids: Ids, model: str, dtype: str | None) -> Longest:
        """The space of a model in which most of a text is stored; of equals the first that was put."""
        space, found, tokens = None, Found((), 0), dict[str, int]()
        for each in self.spaces_of(model, dtype):
            there = self._units.find(self.text(each, ids))
            tokens[each.dtype] = max(tokens.get(each.dtype, 0), there.tokens)
            if there.tokens > found.tokens:
                space, found = each, there
        others = {name: n for name, n in tokens.items() if n and space is not None and name != space.dtype}
        return Longest(space, found, others)

    def wholes(self, ids: Ids, model: str, dtype: str | None) -> list[tuple[Space, Found]]:
        """The spaces in which all of a text is stored, in the order of their first puts; `KvmnnError` for none."""
        found = [(space, self._units.find(self.text(space, ids))) for space in self.spaces_of(model, dtype)]
        most = max((each.tokens for _, each in found), default=0)
        if most < ids.size:
            raise KvmnnError(
                f"{self._units.label}: holds {most:,} tokens of this text of {ids.size:,} under this model"
            )
        return [(space, each) for space, each in found if each.tokens == ids.size]

    def export(self, ids: Ids, path: str | os.PathLike[str], model: str, dtype: str | None, *, force: bool) -> Exported:
        """As `PrefixStore.export`."""
        (space, found), *rest = self.wholes(ids, model, dtype)
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
