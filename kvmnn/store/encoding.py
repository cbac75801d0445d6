"""K and V of a text cut into units and encoded, each unit handed on as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes, Words
from ..frames import CodecOptions
from ..frames.encoding import encode_words, sampled
from ..frames.hashing import checksum, copied, rows_checksum
from ..frames.options import LaneOptions
from ..frames.words import words_of
from ..threads.pool import map_pulled, resolve_threads
from .space import Space, parts_of
from .unit import Frame

UNIT_TOKENS = 512
"""Blocks of one put are kept together up to so many tokens: frames of 64 tokens alone would be a twentieth larger."""
UNIT_BYTES = 64 << 20
"""And up to so many raw bytes, but for a single block."""

Cut = tuple[int, int]
"""First token of a unit, and the token behind it."""


def blocks_in_unit(space: Space, block_tokens: int) -> int:
    """The most whole blocks that a unit has; a tail that is shorter than a block may follow them."""
    by_bytes = UNIT_BYTES // (block_tokens * space.token_bytes)
    return max(1, min(UNIT_TOKENS // block_tokens, by_bytes))


def cuts(start: int, tokens: int, block_tokens: int, unit_blocks: int) -> list[Cut]:
    """The units for the tokens from `start`, where a block begins, up to `tokens`; the tail goes with the last one."""
    step = unit_blocks * block_tokens
    whole = max((tokens - start) // block_tokens * block_tokens, 1)  # without a whole block the tail is a unit
    ends = [min(begin + step, start + whole) for begin in range(start, start + whole, step)]
    ends[-1] = tokens
    return list(zip([start, *ends[:-1]], ends, strict=True))


def encode_units(
    layers: Sequence[LayerCache],
    found_cuts: Sequence[Cut],
    options: CodecOptions,
    done: Callable[[int, tuple[Frame, ...]], object],
    threads: int | None = None,
) -> None:
    """Encode K and V of all layers unit by unit; predictors that are sampled are those of the unit in the middle.

    Parameters
    ----------
    done
        Called with the number of a unit and its frames, on the thread that finished it, in any order.
    """
    lanes = options.for_words(words_of(layers[0].keys[:, :0], None)[0])
    parts = parts_of(layers)
    open_units: dict[int, list[Frame | None]] = {}
    lock = threading.Lock()
    scratch, cores = _Scratch(), resolve_threads(threads)

    def lanes_of(words: Words) -> LaneOptions:
        begin, end = found_cuts[len(found_cuts) // 2]
        return sampled(scratch.summed(words[:, begin:end])[0].reshape(-1), lanes)

    lanes_of_parts = map_pulled(lanes_of, parts, cores) if options.effort == "balanced" else [lanes] * len(parts)

    def one(job: tuple[int, int]) -> None:
        number, part = job
        begin, end = found_cuts[number]
        rows, rows_sum = scratch.summed(parts[part][:, begin:end])
        data = encode_words(rows.reshape(-1), lanes_of_parts[part], 1)
        frame = Frame(data, checksum(data), rows_sum)
        with lock:
            frames = open_units.setdefault(number, [None] * len(parts))
            frames[part] = frame
            complete = [each for each in frames if each is not None]
            if len(complete) < len(parts):
                return
            del open_units[number]
        done(number, tuple(complete))

    map_pulled(one, _jobs(len(found_cuts), len(parts), cores), cores)


def _jobs(units: int, parts: int, cores: int) -> list[tuple[int, int]]:
    """Parts of units in order, but of the last units by turns, so that each thread has one to write at the end."""
    last = max(units - cores, 0)
    jobs = [(number, part) for number in range(last) for part in range(parts)]
    return jobs + [(number, part) for part in range(parts) for number in range(last, units)]


class Memory(threading.local):
    """Memory of a thread, for one thing after another."""

    def __init__(self) -> None:
        self._held: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """So many bytes: good until the next call."""
        if self._held.size < nbytes:
            self._held = np.empty(nbytes, np.uint8)
        return self._held[:nbytes]


class _Scratch(Memory):
    """Memory for the rows of one frame after another on a thread."""

    def summed(self, words: Words) -> tuple[Bytes, int]:
        """``[kv_head, byte]``, little-endian, contiguous: good until the next call; and their checksum."""
        tokens = token_bytes(words)
        if tokens.flags.c_contiguous:
            rows = tokens.reshape(len(tokens), -1)
            return rows, rows_checksum(rows)
        held = self.take(words.nbytes).reshape(len(words), -1)
        return held, copied(tokens, held)


def token_bytes(words: Words) -> Bytes:
    """The bytes of ``[kv_head, token, word]``, little-endian, those of a token together: a view where they are that."""
    little = words if words.dtype.isnative else words.astype(words.dtype.newbyteorder("<"))
    return (little if little.strides[2] == little.itemsize else np.ascontiguousarray(little)).view(np.uint8)
