"""K and V of a text cut into units of dense streams, each unit handed on as soon as it is complete."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .. import dense
from ..arrays.layer_cache import LayerCache
from ..dense.header import MOST_RAW_BYTES, MOST_ROW_WORDS, read_header
from ..dtypes import Words
from ..frames import CodecOptions, encode_many
from ..threads.pool import map_pulled, resolve_threads
from .behind import Behind
from .encoding import Cut
from .space import Space
from .table_sets import TableSets, fitting
from .unit import Dense, Frame

WORTH = 0.97
"""Of the bytes of frames at most so many: frames are decoded two to three times as fast."""
SHARED = 1.01
"""Of the bytes with tables of their own at most so many: those that are shared save a fifth of the time."""


class Tried(NamedTuple):
    """Streams of one layer of a unit, by their part."""

    number: int
    streams: dict[int, Frame]

    def nbytes(self, *, only_keys: bool = False) -> int:
        """Of the streams, or of those of K."""
        return sum(len(each.data) for part, each in self.streams.items() if not (only_keys and part % 2))


class DenseUnit(NamedTuple):
    """A unit on its way in: where it is cut, what it refers to, and the tables of its streams, if not their own."""

    cut: Cut
    behind: Behind
    tables: TableSets | None


def fits(space: Space, tokens: int) -> bool:
    """Whether dense streams can hold units of so many tokens, on this machine."""
    most = max(shape.kv_heads * shape.head_dim for shape in space.layers)
    longest = max(max(shape.kv_heads, shape.head_dim) for shape in space.layers)
    small = most <= MOST_ROW_WORDS and longest < MOST_ROW_WORDS
    return sys.byteorder == "little" and small and tokens * most * space.words.itemsize <= MOST_RAW_BYTES


def middle_of(units: Sequence[DenseUnit]) -> int:
    """The unit in the middle; not the last one, which may be shorter, where there are others."""
    return (len(units) - 1) // 2


def try_layer(
    layers: Sequence[LayerCache],
    units: Sequence[DenseUnit],
    space: Space,
    rotary: dense.Rotary | None,
    *,
    only_keys: bool = False,
) -> Tried:
    """K and V of the middle layer in the unit in the middle, or K alone."""
    number, layer = middle_of(units), len(layers) // 2
    run = (2 * layer,) if only_keys else (2 * layer, 2 * layer + 1)
    return Tried(number, _streams(list(_parts(layers)), run, units[number], space, rotary))


def frames_of_layer(
    layers: Sequence[LayerCache], units: Sequence[DenseUnit], space: Space, options: CodecOptions
) -> int:
    """Bytes of frames of the same as `try_layer`."""
    (begin, end), layer = units[middle_of(units)].cut, layers[len(layers) // 2]
    words = [np.ascontiguousarray(each[:, begin:end]) for each in (layer.keys, layer.values)]
    return sum(map(len, encode_many(words, dtype=space.dtype, effort=options.effort, threads=1)))


def encode_dense_units(
    layers: Sequence[LayerCache],
    units: Sequence[DenseUnit],
    space: Space,
    rotary: dense.Rotary | None,
    done: Callable[[int, tuple[Frame, ...]], object],
    threads: int | None = None,
    tried: Tried | None = None,
) -> None:
    """Encode K and V of all layers unit by unit.

    Parameters
    ----------
    rotary
        How K was rotated; tables know it themselves.
    done
        Called with the number of a unit and its streams, on the thread that finished it, in any order.
    tried
        Streams that are there already.
    """
    parts = list(_parts(layers))
    cores = resolve_threads(threads)
    # what one array found to be alike serves the next ones: a unit stays on one thread where others have work as well
    runs = _runs(len(parts), -(-cores // len(units)))
    open_units: dict[int, dict[int, Frame]] = {}
    if tried is not None:
        open_units[tried.number] = dict(tried.streams)
    lock = threading.Lock()

    def one(job: tuple[int, range]) -> None:
        number, run = job
        known = open_units.get(number, {})
        made = _streams(parts, [part for part in run if part not in known], units[number], space, rotary)
        with lock:
            found = open_units.setdefault(number, {})
            found.update(made)
            if len(found) < len(parts):
                return
            del open_units[number]
        done(number, tuple(found[part] for part in range(len(parts))))

    map_pulled(one, [(number, run) for number in range(len(units)) for run in runs], cores)


def _streams(
    parts: Sequence[Words],
    run: Sequence[int],
    unit: DenseUnit,
    space: Space,
    rotary: dense.Rotary | None,
) -> dict[int, Frame]:
    (begin, end), behind, tables = unit
    before = begin - behind.history
    # without token ids: they change no size by a tenth of a percent, and take a sixth to a third of the time
    streams = dense.encode_many(
        [parts[part][:, begin:end] for part in run],
        dtype=space.dtype,
        rotary=None if tables else [None if part % 2 else fitting(rotary, parts[part]) for part in run],
        history=[parts[part][:, before:begin] for part in run] if behind.history else None,
        tables=[tables.sets[part] for part in run] if tables else None,
    )
    return {part: Frame(data, read_header(data).checksum, 0) for part, data in zip(run, streams, strict=True)}


def dense_of(unit: DenseUnit, sums: tuple[int, ...]) -> Dense:
    """What the header of a unit says of its streams."""
    key = unit.tables.key if unit.tables else b""
    return Dense(sums, unit.behind.history, unit.behind.chain, key)


def _parts(layers: Sequence[LayerCache]) -> chain[Words]:
    return chain.from_iterable((cache.keys, cache.values) for cache in layers)


def _runs(count: int, pieces: int) -> list[range]:
    step = -(-count // min(pieces, count))
    return [range(begin, min(begin + step, count)) for begin in range(0, count, step)]
