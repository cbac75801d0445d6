"""Units decoded one by one, each with the rows before it that its streams refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes
from .decoding import Stretch, check_unit, decode_stretches
from .encoding import blocks_in_unit
from .space import Space
from .table_sets import KeptTables
from .token_ids import Ids, block_keys
from .unit import MOST_CHAIN, DamagedError, Unit, parse


class GoneError(DamagedError):
    """A unit, or one that it refers to, cannot be read."""


Layers = Sequence[LayerCache]


class _Last(NamedTuple):
    """The unit that was decoded last: its number, rows before it (none, or those that it refers to), and its own."""

    number: int
    before: Layers
    layers: Layers


class Verifier:
    """Decodes any unit of a store; what the last one held is kept, as the next mostly refers to it.

    Parameters
    ----------
    read
        The bytes of a unit; None where they cannot be read.
    holder
        The unit that has a block of this key, and how many of its blocks there are up to it; None for none.
    tables
        Of the store.
    block_tokens, threads
        Tokens of a block; for decoding.
    """

    def __init__(
        self,
        read: Callable[[int], Bytes | None],
        holder: Callable[[bytes], tuple[int, int] | None],
        tables: KeptTables,
        block_tokens: int,
        threads: int | None,
    ) -> None:
        self._read, self._holder, self._tables = read, holder, tables
        self._block_tokens, self._threads = block_tokens, threads
        self._last: _Last | None = None

    def verified(self, number: int, space: Space, ids: Ids | None = None) -> Unit:
        """A unit, all of it decoded and compared; with `ids` it must hold these.

        Raises
        ------
        DamagedError
            With what is wrong with it, or with what it refers to.
        """
        unit = self._parsed(number, space, ids)
        before, layers = self._decoded(unit, space)
        self._last = _Last(number, before, layers)
        return unit

    def _parsed(self, number: int, space: Space, ids: Ids | None = None) -> Unit:
        data = self._read(number)
        if data is None:
            raise GoneError("its file is gone or cannot be read")
        unit = parse(data)
        most = (blocks_in_unit(space, self._block_tokens) + 1) * self._block_tokens
        check_unit(unit, space, unit.ids if ids is None else ids, 0, most)
        return unit

    def _decoded(self, unit: Unit, space: Space) -> tuple[Layers, Layers]:
        """Rows before a unit that are known, and its own."""
        own = Stretch(unit, 0, unit.ids.size)
        history = unit.dense.history if unit.dense else 0
        if not history:
            return (), decode_stretches(space, [own], self._threads, tables=self._tables)
        before = self._kept_before(unit, history) or self._decoded_before(unit, space, history)
        return before, decode_stretches(space, [own], self._threads, tables=self._tables, before=before)

    def _decoded_before(self, unit: Unit, space: Space, history: int) -> Layers:
        rows = decode_stretches(space, self._needed(unit, space), self._threads, tables=self._tables)
        return _cut(rows, rows[0].tokens - history, rows[0].tokens)

    def _kept_before(self, unit: Unit, history: int) -> Layers:
        """The rows that a unit refers to, where the last unit has left them; else nothing."""
        found = self._holder(unit.parent)
        if found is None or self._last is None or found[0] != self._last.number:
            return ()
        end = found[1] * self._block_tokens
        own = _cut(self._last.layers, max(end - history, 0), end)
        more = history - own[0].tokens
        if not more:
            return own
        before = self._last.before
        if not before or before[0].tokens < more:
            return ()
        return _joined(_cut(before, before[0].tokens - more, before[0].tokens), own)

    def _needed(self, unit: Unit, space: Space) -> list[Stretch]:
        """What has to be decoded for the rows that a unit refers to: the blocks before it, as the index finds them."""
        assert unit.dense is not None
        size, at, key, begin = self._block_tokens, unit.start, unit.parent, unit.start - unit.dense.history
        found: list[Stretch] = []
        while at > begin:
            if len(found) == MOST_CHAIN:
                raise DamagedError("needs more units before it than are allowed")
            place = self._holder(key)
            if place is None:
                raise GoneError("refers to rows that are not there")
            number, end = place
            held = self._parsed(number, space)
            keys = block_keys(held.parent, held.ids, size)
            if keys[end - 1 : end] != [key] or held.start + end * size != at:
                raise DamagedError("refers to rows that are not there")
            if held.dense and held.dense.history:
                begin = min(begin, held.start - held.dense.history)
            first = end - 1
            while first and held.start + first * size > begin and self._holder(keys[first - 1]) == (number, first):
                first -= 1
            found.insert(0, Stretch(held, first * size, (end - first) * size))
            at, key = held.start + first * size, keys[first - 1] if first else held.parent
        return found


def _cut(layers: Layers, begin: int, end: int) -> Layers:
    """Copies: what is kept of a few rows may not keep all."""
    return [
        LayerCache(layer=each.layer, keys=each.keys[:, begin:end].copy(), values=each.values[:, begin:end].copy())
        for each in layers
    ]


def _joined(first: Layers, second: Layers) -> Layers:
    return [
        LayerCache(
            layer=a.layer,
            keys=np.concatenate([a.keys, b.keys], axis=1),
            values=np.concatenate([a.values, b.values], axis=1),
        )
        for a, b in zip(first, second, strict=True)
    ]
