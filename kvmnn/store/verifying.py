"""Units decoded one by one, each with the rows before it that its streams refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes
from .decoding import Stretch, check_unit, decode_stretches
from .encoding import blocks_in_unit
from .space import Space
from .table_sets import KeptTables
from .token_ids import Ids
from .unit import MOST_CHAIN, DamagedError, Unit, parse


class GoneError(DamagedError):
    """A unit, or one that it refers to, cannot be read."""


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
        self._last: tuple[int, list[LayerCache]] | None = None

    def verified(self, number: int, space: Space, ids: Ids | None = None) -> Unit:
        """A unit, all of it decoded and compared; with `ids` it must hold these.

        Raises
        ------
        DamagedError
            With what is wrong with it, or with what it refers to.
        """
        unit = self._parsed(number, space, ids)
        self._last = number, self._decoded(unit, space, MOST_CHAIN)
        return unit

    def _parsed(self, number: int, space: Space, ids: Ids | None = None) -> Unit:
        data = self._read(number)
        if data is None:
            raise GoneError("its file is gone or cannot be read")
        unit = parse(data)
        most = (blocks_in_unit(space, self._block_tokens) + 1) * self._block_tokens
        check_unit(unit, space, unit.ids if ids is None else ids, 0, most)
        return unit

    def _decoded(self, unit: Unit, space: Space, most_before: int) -> list[LayerCache]:
        before = self._rows_before(unit, space, most_before) if unit.dense and unit.dense.history else None
        whole = [Stretch(unit, 0, unit.ids.size)]
        return decode_stretches(space, whole, self._threads, tables=self._tables, before=before)

    def _rows_before(self, unit: Unit, space: Space, most_before: int) -> list[LayerCache]:
        assert unit.dense is not None
        found = self._holder(unit.parent)
        if found is None:
            raise GoneError("refers to rows that are not there")
        if not most_before:
            raise DamagedError("needs more units before it than are allowed")
        number, blocks = found
        if self._last is not None and self._last[0] == number:
            layers: Sequence[LayerCache] = self._last[1]
        else:
            layers = self._decoded(self._parsed(number, space), space, most_before - 1)
        end = blocks * self._block_tokens
        begin = end - unit.dense.history
        if begin < 0 or end > layers[0].tokens:
            raise DamagedError("refers to rows that are not there")
        return [
            LayerCache(layer=each.layer, keys=each.keys[:, begin:end], values=each.values[:, begin:end])
            for each in layers
        ]
