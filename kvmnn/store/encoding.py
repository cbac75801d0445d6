"""K and V of a text cut into units and encoded, each unit handed on as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes, Elements
from ..frames import CodecOptions
from ..frames.encoding import encode_elements, with_selected_predictors
from ..frames.hashing import checksum_rows, copy_with_checksum, integrity_checksum
from ..frames.options import LaneOptions
from ..frames.words import as_elements
from ..threads.pool import parallel_map, resolve_threads
from .space import Namespace, list_parts
from .unit import UnitFrame

MAX_UNIT_TOKENS = 512
"""Blocks of one put are kept together up to so many tokens: frames of 64 tokens alone would be a twentieth larger."""
MAX_UNIT_RAW_BYTES = 64 << 20
"""And up to so many raw bytes, but for a single block."""

TokenSpan = tuple[int, int]
"""First token of a unit, and the token behind it."""


def count_blocks_per_unit(namespace: Namespace, block_tokens: int) -> int:
    """The most whole blocks that a unit has; a tail that is shorter than a block may follow them."""
    max_blocks_by_bytes = MAX_UNIT_RAW_BYTES // (block_tokens * namespace.token_bytes)
    return max(1, min(MAX_UNIT_TOKENS // block_tokens, max_blocks_by_bytes))


def plan_unit_spans(start: int, tokens: int, block_tokens: int, unit_blocks: int) -> list[TokenSpan]:
    """The units for the tokens from `start`, where a block begins, up to `tokens`; the tail goes with the last one."""
    step = unit_blocks * block_tokens
    whole_tokens = max((tokens - start) // block_tokens * block_tokens, 1)  # without a whole block the tail is a unit
    end_tokens = [
        min(begin_token + step, start + whole_tokens) for begin_token in range(start, start + whole_tokens, step)
    ]
    end_tokens[-1] = tokens
    return list(zip([start, *end_tokens[:-1]], end_tokens, strict=True))


def encode_frame_units(
    layers: Sequence[LayerCache],
    spans: Sequence[TokenSpan],
    options: CodecOptions,
    on_unit: Callable[[int, tuple[UnitFrame, ...]], object],
    threads: int | None = None,
) -> None:
    """Encode K and V of all layers unit by unit; predictors that are sampled are those of the unit in the middle.

    Parameters
    ----------
    on_unit
        Called with the number of a unit and its frames, on the thread that finished it, in any order.
    """
    lanes = options.to_lane_options(as_elements(layers[0].keys[:, :0], None)[0])
    parts = list_parts(layers)
    open_units: dict[int, list[UnitFrame | None]] = {}
    lock = threading.Lock()
    scratch, cores = _FrameScratch(), resolve_threads(threads)

    def select_lanes(elements: Elements) -> LaneOptions:
        begin_token, end_token = spans[len(spans) // 2]
        return with_selected_predictors(
            scratch.copy_with_checksum(elements[:, begin_token:end_token])[0].reshape(-1), lanes
        )

    lanes_of_parts = parallel_map(select_lanes, parts, cores) if options.effort == "balanced" else [lanes] * len(parts)

    def encode_part(job: tuple[int, int]) -> None:
        unit_index, part = job
        begin_token, end_token = spans[unit_index]
        rows, rows_sum = scratch.copy_with_checksum(parts[part][:, begin_token:end_token])
        data = encode_elements(rows.reshape(-1), lanes_of_parts[part], 1)
        frame = UnitFrame(data, integrity_checksum(data), rows_sum)
        with lock:
            frames = open_units.setdefault(unit_index, [None] * len(parts))
            frames[part] = frame
            complete_frames = [frame_or_none for frame_or_none in frames if frame_or_none is not None]
            if len(complete_frames) < len(parts):
                return
            del open_units[unit_index]
        on_unit(unit_index, tuple(complete_frames))

    parallel_map(encode_part, _plan_frame_jobs(len(spans), len(parts), cores), cores)


def _plan_frame_jobs(units: int, parts: int, cores: int) -> list[tuple[int, int]]:
    """Parts of units in order, but of the last units by turns, so that each thread has one to write at the end."""
    first_interleaved = max(units - cores, 0)
    jobs = [(unit_index, part) for unit_index in range(first_interleaved) for part in range(parts)]
    return jobs + [(unit_index, part) for part in range(parts) for unit_index in range(first_interleaved, units)]


class ThreadScratch(threading.local):
    """Memory of a thread, for one thing after another."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    def get_buffer(self, nbytes: int) -> Bytes:
        """So many bytes: good until the next call."""
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


class _FrameScratch(ThreadScratch):
    """Memory for the rows of one frame after another on a thread."""

    def copy_with_checksum(self, elements: Elements) -> tuple[Bytes, int]:
        """``[kv_head, byte]``, little-endian, contiguous: good until the next call; and their checksum."""
        token_rows = view_token_bytes(elements)
        if token_rows.flags.c_contiguous:
            rows = token_rows.reshape(len(token_rows), -1)
            return rows, checksum_rows(rows)
        buffer_rows = self.get_buffer(elements.nbytes).reshape(len(elements), -1)
        return buffer_rows, copy_with_checksum(token_rows, buffer_rows)


def view_token_bytes(elements: Elements) -> Bytes:
    """The bytes of ``[kv_head, token, word]``, little-endian, those of a token together: a view where they are that."""
    little_endian = elements if elements.dtype.isnative else elements.astype(elements.dtype.newbyteorder("<"))
    return (
        little_endian if little_endian.strides[2] == little_endian.itemsize else np.ascontiguousarray(little_endian)
    ).view(np.uint8)
