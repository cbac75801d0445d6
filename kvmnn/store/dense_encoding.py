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
from ..dense.encoding import ReferenceHints, encode_next
from ..dense.header import MAX_RAW_BYTES, MAX_ROW_ELEMENTS, METHOD_FRAME, read_checksum, read_method
from ..dtypes import Elements
from ..frames import CodecOptions, encode_many
from ..threads.pool import parallel_map, resolve_threads
from .behind import HistoryRef, checksum_part_blocks, combine_block_sums
from .encoding import ThreadScratch, TokenSpan
from .space import Namespace, list_parts
from .table_sets import TableSets, select_rotary
from .unit import DenseUnitInfo, UnitFrame

DENSE_MAX_SIZE_RATIO = 0.97
"""Of the bytes of frames at most so many: frames are decoded two to three times as fast."""
FRAME_RETRY_RATIO = 1.05
"""A frame of at most so many times the bytes of a stream may be smaller in another layer."""
SHARED_TABLES_MAX_OVERHEAD = 1.01
"""Of the bytes with tables of their own at most so many: to make them takes a quarter more time, in short units up to
three quarters.
"""


class StreamKind(NamedTuple):
    """Of streams: K or V of which layer, and whether they refer to rows before them."""

    part: int
    has_history: bool


class FrameComparison(NamedTuple):
    """A stream that was compared with a frame: its bytes a raw byte, and whether it is a frame now."""

    kind: StreamKind
    compressed_fraction: float
    is_frame: bool


class LayerTrial(NamedTuple):
    """Streams of one layer of a unit, by their part, and what the last of them found to be alike."""

    unit_index: int
    streams: dict[int, UnitFrame]
    reference_hints: ReferenceHints | None

    def list_stream_bytes(self) -> list[int]:
        """Bytes of each stream."""
        return [len(stream.data) for stream in self.streams.values()]


class DenseUnitPlan(NamedTuple):
    """A unit on its way in: where it is cut, what it refers to, and the tables of its streams, if not their own."""

    cut: TokenSpan
    history: HistoryRef
    tables: TableSets | None


def supports_dense(namespace: Namespace, tokens: int) -> bool:
    """Whether dense streams can hold units of so many tokens, on this machine."""
    max_row_elements = max(shape.kv_heads * max(shape.dims) for shape in namespace.layers)
    max_axis = max(max(shape.kv_heads, *shape.dims) for shape in namespace.layers)
    is_small_enough = max_row_elements <= MAX_ROW_ELEMENTS and max_axis < MAX_ROW_ELEMENTS
    return (
        sys.byteorder == "little"
        and is_small_enough
        and tokens * max_row_elements * namespace.element_dtype.itemsize <= MAX_RAW_BYTES
    )


def find_middle(units: Sequence[DenseUnitPlan]) -> int:
    """The unit in the middle; not the last one, which may be shorter, where there are others."""
    return (len(units) - 1) // 2


class DenseStreamEncoder:
    """K and V of all layers on their way into streams.

    Parameters
    ----------
    rotary
        How K was rotated; tables know it themselves.
    """

    def __init__(self, layers: Sequence[LayerCache], namespace: Namespace, rotary: dense.RopeConfig | None) -> None:
        self._layers, self._namespace, self._rotary = layers, namespace, rotary
        self._parts = list_parts(layers)
        self._scratch = _DenseScratch()
        self.tries_frames = True, True
        """Whether frames of K, and of V, are tried in units that refer to rows before them, which gain most by that."""
        self.frame_losses: Mapping[StreamKind, float] = {}
        """Of streams that were compared with frames, and were smaller: bytes a raw byte; frames need not be tried again
        where a stream is no larger than `FRAME_RETRY_RATIO` times that.
        """
        self.comparisons: list[FrameComparison] = []
        """The streams that were compared with frames."""

    def try_layer(self, units: Sequence[DenseUnitPlan], *, only_keys: bool = False) -> LayerTrial:
        """K and V of the middle layer in the unit in the middle, or K alone."""
        unit_index, middle_layer = find_middle(units), len(self._layers) // 2
        streams: dict[int, UnitFrame] = {}
        reference_hints = None
        for part, (layer, is_values) in enumerate(self._namespace.parts):
            if layer != middle_layer or (only_keys and is_values):
                continue
            streams[part], reference_hints = self._encode_part(units[unit_index], part, reference_hints)
        return LayerTrial(unit_index, streams, reference_hints)

    def measure_layer_frames(self, units: Sequence[DenseUnitPlan], options: CodecOptions) -> list[int]:
        """Bytes of frames of the same as `try_layer`."""
        (begin_token, end_token), layer = units[find_middle(units)].cut, self._layers[len(self._layers) // 2]
        elements = [
            np.ascontiguousarray(part_elements[:, begin_token:end_token]) for part_elements in list_parts([layer])
        ]
        return list(map(len, encode_many(elements, dtype=self._namespace.dtype, effort=options.effort, threads=1)))

    def encode_units(
        self,
        units: Sequence[DenseUnitPlan],
        block_tokens: int,
        on_unit: Callable[[int, tuple[UnitFrame, ...], tuple[int, ...]], object],
        threads: int | None = None,
        trial: LayerTrial | None = None,
    ) -> None:
        """Encode all units.

        Parameters
        ----------
        on_unit
            Called with the number of a unit, its streams, and checksums of the words of its whole blocks in all layers,
            on the thread that finished it, in any order.
        trial
            Streams that are there already.
        """
        trial = trial or LayerTrial(-1, {}, None)
        open_units: dict[int, dict[int, tuple[UnitFrame, list[int]]]] = {}
        lock = threading.Lock()
        cores = resolve_threads(threads)

        def encode_parts(job: tuple[int, range]) -> None:
            unit_index, part_range = job
            (begin_token, end_token), trial_streams = (
                units[unit_index].cut,
                trial.streams if unit_index == trial.unit_index else {},
            )
            reference_hints = trial.reference_hints if trial_streams else None
            encoded_parts = {}
            for part in part_range:
                frame = trial_streams.get(part)
                if frame is None:
                    frame, reference_hints = self._encode_part(units[unit_index], part, reference_hints)
                encoded_parts[part] = (
                    frame,
                    checksum_part_blocks(self._parts[part][:, begin_token:end_token], block_tokens),
                )
            with lock:
                unit_parts = open_units.setdefault(unit_index, {})
                unit_parts.update(encoded_parts)
                if len(unit_parts) < len(self._parts):
                    return
                del open_units[unit_index]
            frames, sums = zip(*(unit_parts[part] for part in range(len(self._parts))), strict=True)
            on_unit(unit_index, frames, combine_block_sums(sums))

        parallel_map(encode_parts, _plan_dense_jobs(len(units), len(self._parts), cores), cores)

    def _encode_part(
        self, unit: DenseUnitPlan, part: int, reference_hints: ReferenceHints | None
    ) -> tuple[UnitFrame, ReferenceHints]:
        (begin_token, end_token), history, tables = unit
        kind, raw_bytes = StreamKind(part, bool(history.num_rows)), self._parts[part][:, begin_token:end_token].nbytes
        is_values = self._namespace.parts[part][1]
        frame_threshold_bytes = FRAME_RETRY_RATIO * self.frame_losses.get(kind, 0) * raw_bytes
        if history.num_rows and not self.tries_frames[is_values]:
            frame_threshold_bytes = math.inf
        rows = self._scratch.copy_rows(self._parts[part][:, begin_token - history.num_rows : end_token])
        # without token ids: they change no size by a tenth of a percent, and take a sixth to a third of the time
        data, new_hints = encode_next(
            rows,
            history.num_rows,
            reference_hints,
            dtype=self._namespace.dtype,
            rotary=None if tables or is_values else select_rotary(self._rotary, self._parts[part]),
            tables=tables.sets[part] if tables else None,
            frame_trial_min_bytes=frame_threshold_bytes,
        )
        if len(data) > frame_threshold_bytes or read_method(data) == METHOD_FRAME:
            self.comparisons.append(FrameComparison(kind, len(data) / raw_bytes, read_method(data) == METHOD_FRAME))
        return UnitFrame(data, read_checksum(data), 0), new_hints


class _DenseScratch(ThreadScratch):
    """Memory for the rows of one stream after another on a thread."""

    def copy_rows(self, elements: Elements) -> Elements:
        """``[token, kv_head, head_dim]``, token by token in memory, native and aligned: good until the next call."""
        by_token = elements.transpose(1, 0, 2)
        if by_token.flags.c_contiguous and by_token.flags.aligned and elements.dtype.isnative:
            return by_token
        scratch_rows: Elements = (
            self.get_buffer(elements.nbytes).view(elements.dtype.newbyteorder("=")).reshape(by_token.shape)
        )
        np.copyto(scratch_rows, by_token)
        return scratch_rows


def _plan_dense_jobs(units: int, parts: int, cores: int) -> list[tuple[int, range]]:
    """Parts of a unit that a thread works on: all, as what one found to be alike serves the next ones; but units for
    which there are more threads than units left are shared out.
    """
    num_last = units % cores
    jobs = []
    for unit_index in range(units):
        num_pieces = 1 if unit_index < units - num_last else min(-(-cores // num_last), parts)
        step = -(-parts // num_pieces)
        jobs += [(unit_index, range(begin_part, min(begin_part + step, parts))) for begin_part in range(0, parts, step)]
    return jobs


def build_dense_info(unit: DenseUnitPlan, sums: tuple[int, ...]) -> DenseUnitInfo:
    """What the header of a unit says of its streams."""
    key = unit.tables.key if unit.tables else b""
    return DenseUnitInfo(sums, unit.history.num_rows, unit.history.chain_length, key)
