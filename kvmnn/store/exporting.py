"""The units of one text, and nothing of the texts that share them: what is put in a file for another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import Rotary
from ..dtypes import Bytes
from ..frames import CodecOptions
from .behind import Behind
from .dense_encoding import DenseUnit, Streams, dense_of
from .encoding import encode_units
from .lookup import Found, Place, Text
from .space import Space
from .table_sets import TableSets
from .unit import Dense, Frame, Header, Unit, parse_header


class Exporting:
    """Units that are taken as they are, or, where other texts go on in them, made anew of what is asked for.

    Parameters
    ----------
    space, text, layers
        The text, with K and V of its tokens.
    tables
        That its units need, by their keys.
    rotary, options, threads
        How units are made.
    """

    def __init__(
        self,
        space: Space,
        text: Text,
        layers: Sequence[LayerCache],
        tables: Mapping[bytes, TableSets],
        rotary: Rotary | None,
        options: CodecOptions,
        threads: int | None,
    ) -> None:
        self._space, self._text, self._layers, self._tables = space, text, layers, tables
        self._rotary, self._options, self._threads = rotary, options, threads

    def units(self, found: Found, held: Mapping[int, Bytes]) -> list[tuple[Place, Bytes]]:
        """The units with the tokens of a text, and which tokens of each are meant."""
        made = []
        begin = 0
        for place in found.places:
            data = held[place.unit]
            header = parse_header(data)
            if header.ids.size > place.skip + place.take:
                place, data = place._replace(skip=0), self._anew(begin, place, header)
            made.append((place, data))
            begin += place.take
        return made

    def _anew(self, begin: int, place: Place, header: Header) -> Bytes:
        cut = begin, begin + place.take
        size = self._text.block_tokens
        frames, dense = self._frames(cut) if header.dense is None else self._streams(cut, place, header.dense)
        parent = self._text.key_before(begin // size)
        unit = Unit(self._space.key, parent, begin, self._text.ids[begin : cut[1]], frames, dense)
        return np.frombuffer(b"".join(bytes(piece) for piece in unit.pieces()), np.uint8)

    def _frames(self, cut: tuple[int, int]) -> tuple[tuple[Frame, ...], None]:
        made: list[tuple[Frame, ...]] = []
        encode_units(self._layers, [cut], self._options, lambda _, frames: made.append(frames), self._threads)
        return made[0], None

    def _streams(self, cut: tuple[int, int], place: Place, dense: Dense) -> tuple[tuple[Frame, ...], Dense]:
        """As those that it is made of; what is cut at its beginning, too, refers to nothing before it."""
        behind = Behind() if place.skip else Behind(dense.history, 0, dense.chain)
        unit = DenseUnit(cut, behind, self._tables.get(dense.tables))
        made: list[tuple[tuple[Frame, ...], tuple[int, ...]]] = []
        streams = Streams(self._layers, self._space, self._rotary)
        size = self._text.block_tokens
        streams.encode([unit], size, lambda _, frames, sums: made.append((frames, sums)), self._threads)
        frames, sums = made[0]
        return frames, dense_of(unit, sums)
