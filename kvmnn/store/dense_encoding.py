"""K and V of a text cut into units of dense streams, each unit handed on as soon as it is complete."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .. import dense
from ..arrays.layer_cache import LayerCache
from ..dense.encoding import Alike, encode_next
from ..dense.header import FRAME, MOST_RAW_BYTES, MOST_ROW_WORDS, checksum_of, method_of
from ..dtypes import Words
from ..frames import CodecOptions, encode_many
from ..threads.pool import map_pulled, resolve_threads
from .behind import Behind, part_sums, unit_sums
from .encoding import Cut, Memory
from .space import Space, parts_of
from .table_sets import TableSets, fitting
from .unit import Dense, Frame

WORTH = 0.97
"""Of the bytes of frames at most so many: frames are decoded two to three times as fast."""
NEAR = 1.05
"""A frame of at most so many times the bytes of a stream may be smaller in another layer."""
SHARED = 1.01
"""Of the bytes with tables of their own at most so many: to make them takes a quarter more time, in short units up to
three quarters.
"""


class Kind(NamedTuple):
    """Of streams: K or V of which layer, and whether they refer to rows before them."""

    part: int
    has_history: bool


class Compared(NamedTuple):
    """A stream that was compared with a frame: its bytes a raw byte, and whether it is a frame now."""

    kind: Kind
    share: float
    is_frame: bool


class Tried(NamedTuple):
    """Streams of one layer of a unit, by their part, and what the last of them found to be alike."""

    number: int
    streams: dict[int, Frame]
    alike: Alike | None

    def sizes(self) -> list[int]:
        """Bytes of each stream."""
        return [len(each.data) for each in self.streams.values()]


class DenseUnit(NamedTuple):
    """A unit on its way in: where it is cut, what it refers to, and the tables of its streams, if not their own."""

    cut: Cut
    behind: Behind
    tables: TableSets | None


def fits(space: Space, tokens: int) -> bool:
    """Whether dense streams can hold units of so many tokens, on this machine."""
    most = max(shape.kv_heads * max(shape.dims) for shape in space.layers)
    longest = max(max(shape.kv_heads, *shape.dims) for shape in space.layers)
    small = most <= MOST_ROW_WORDS and longest < MOST_ROW_WORDS
    return sys.byteorder == "little" and small and tokens * most * space.words.itemsize <= MOST_RAW_BYTES


def middle_of(units: Sequence[DenseUnit]) -> int:
    """The unit in the middle; not the last one, which may be shorter, where there are others."""
    return (len(units) - 1) // 2


class Streams:
    """K and V of all layers on their way into streams.

    Parameters
    ----------
    rotary
        How K was rotated; tables know it themselves.
    """

    def __init__(self, layers: Sequence[LayerCache], space: Space, rotary: dense.Rotary | None) -> None:
        self._layers, self._space, self._rotary = layers, space, rotary
        self._parts = parts_of(layers)
        self._scratch = _Scratch()
        self.frames_near = True, True
        """Whether frames of K, and of V, are tried in units that refer to rows before them, which gain most by that."""
        self.frames_lost: Mapping[Kind, float] = {}
        """Of streams that were compared with frames, and were smaller: bytes a raw byte; frames need not be tried again
        where a stream is no larger than `NEAR` times that.
        """
        self.compared: list[Compared] = []
        """The streams that were compared with frames."""

    def try_layer(self, units: Sequence[DenseUnit], *, only_keys: bool = False) -> Tried:
        """K and V of the middle layer in the unit in the middle, or K alone."""
        number, middle = middle_of(units), len(self._layers) // 2
        streams: dict[int, Frame] = {}
        alike = None
        for part, (layer, is_values) in enumerate(self._space.parts):
            if layer != middle or (only_keys and is_values):
                continue
            streams[part], alike = self._encode(units[number], part, alike)
        return Tried(number, streams, alike)

    def frames_of_layer(self, units: Sequence[DenseUnit], options: CodecOptions) -> list[int]:
        """Bytes of frames of the same as `try_layer`."""
        (begin, end), layer = units[middle_of(units)].cut, self._layers[len(self._layers) // 2]
        words = [np.ascontiguousarray(each[:, begin:end]) for each in parts_of([layer])]
        return list(map(len, encode_many(words, dtype=self._space.dtype, effort=options.effort, threads=1)))

    def encode(
        self,
        units: Sequence[DenseUnit],
        block_tokens: int,
        done: Callable[[int, tuple[Frame, ...], tuple[int, ...]], object],
        threads: int | None = None,
        tried: Tried | None = None,
    ) -> None:
        """Encode all units.

        Parameters
        ----------
        done
            Called with the number of a unit, its streams, and checksums of the words of its whole blocks in all layers,
            on the thread that finished it, in any order.
        tried
            Streams that are there already.
        """
        tried = tried or Tried(-1, {}, None)
        open_units: dict[int, dict[int, tuple[Frame, list[int]]]] = {}
        lock = threading.Lock()
        cores = resolve_threads(threads)

        def one(job: tuple[int, range]) -> None:
            number, run = job
            (begin, end), known = units[number].cut, tried.streams if number == tried.number else {}
            alike = tried.alike if known else None
            made = {}
            for part in run:
                frame = known.get(part)
                if frame is None:
                    frame, alike = self._encode(units[number], part, alike)
                made[part] = frame, part_sums(self._parts[part][:, begin:end], block_tokens)
            with lock:
                found = open_units.setdefault(number, {})
                found.update(made)
                if len(found) < len(self._parts):
                    return
                del open_units[number]
            frames, sums = zip(*(found[part] for part in range(len(self._parts))), strict=True)
            done(number, frames, unit_sums(sums))

        map_pulled(one, _jobs(len(units), len(self._parts), cores), cores)

    def _encode(self, unit: DenseUnit, part: int, alike: Alike | None) -> tuple[Frame, Alike]:
        (begin, end), behind, tables = unit
        kind, raw_bytes = Kind(part, bool(behind.history)), self._parts[part][:, begin:end].nbytes
        is_values = self._space.parts[part][1]
        above = NEAR * self.frames_lost.get(kind, 0) * raw_bytes
        if behind.history and not self.frames_near[is_values]:
            above = math.inf
        rows = self._scratch.rows(self._parts[part][:, begin - behind.history : end])
        # without token ids: they change no size by a tenth of a percent, and take a sixth to a third of the time
        data, found = encode_next(
            rows,
            behind.history,
            alike,
            dtype=self._space.dtype,
            rotary=None if tables or is_values else fitting(self._rotary, self._parts[part]),
            tables=tables.sets[part] if tables else None,
            frames_above=above,
        )
        if len(data) > above or method_of(data) == FRAME:
            self.compared.append(Compared(kind, len(data) / raw_bytes, method_of(data) == FRAME))
        return Frame(data, checksum_of(data), 0), found


class _Scratch(Memory):
    """Memory for the rows of one stream after another on a thread."""

    def rows(self, words: Words) -> Words:
        """``[token, kv_head, head_dim]``, token by token in memory, native and aligned: good until the next call."""
        by_token = words.transpose(1, 0, 2)
        if by_token.flags.c_contiguous and by_token.flags.aligned and words.dtype.isnative:
            return by_token
        held: Words = self.take(words.nbytes).view(words.dtype.newbyteorder("=")).reshape(by_token.shape)
        np.copyto(held, by_token)
        return held


def _jobs(units: int, parts: int, cores: int) -> list[tuple[int, range]]:
    """Parts of a unit that a thread works on: all, as what one found to be alike serves the next ones; but units for
    which there are more threads than units left are shared out.
    """
    last = units % cores
    jobs = []
    for number in range(units):
        pieces = 1 if number < units - last else min(-(-cores // last), parts)
        step = -(-parts // pieces)
        jobs += [(number, range(begin, min(begin + step, parts))) for begin in range(0, parts, step)]
    return jobs


def dense_of(unit: DenseUnit, sums: tuple[int, ...]) -> Dense:
    """What the header of a unit says of its streams."""
    key = unit.tables.key if unit.tables else b""
    return Dense(sums, unit.behind.history, unit.behind.chain, key)
