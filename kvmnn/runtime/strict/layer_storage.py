"""Storage of one layer's tokens: segments, most of them compressed to frames, followed by raw rows.

The memory of large arrays is returned to the operating system when they are freed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ...dtypes import DType, Elements, KVPair
from ...packed.compaction import ReservePair
from ..positions import PositionRuns
from ..schedule import ColdRange
from .codec import KVFrames

MIN_MMAP_BYTES = 256 << 10
"""From here on an array gets pages of its own: what the C library's heap frees, a process may keep for good."""


def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Elements:
    """Allocate an array like `numpy.empty`; a large one is zero, and is unmapped with its last view."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < MIN_MMAP_BYTES:
        return np.empty(shape, kind)
    if hasattr(mmap, "MAP_PRIVATE"):  # a forked child must not write into its parent's rows
        pages: Any = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        pages = mmap.mmap(-1, nbytes)
    return np.frombuffer(pages, kind, math.prod(shape)).reshape(shape)


def copy_rows(rows: Elements) -> Elements:
    """Copy `rows` to a new array."""
    copy = allocate(rows.shape, rows.dtype)
    copy[...] = rows
    return copy


def to_read_only(rows: Elements) -> KVPair:
    """Return K and V of ``[2, ...]`` as read-only views."""
    keys, values = rows[0], rows[1]
    keys.flags.writeable = values.flags.writeable = False
    return keys, values


SegmentState = Literal["raw", "due", "queued", "stored", "settled"]
"""Raw; cold and waiting for a place in the queue; in encoding; frames only; raw for good, as frames do not gain."""


@dataclass(eq=False)
class TokenSegment:
    """Tokens that are stored, dropped, encoded and restored as one."""

    #: Number of tokens.
    count: int
    #: ``[2, kv_head, token, head_dim]``, never written to; None if there are only `frames`.
    rows: Elements | None
    state: SegmentState = "raw"
    frames: KVFrames | None = None
    #: Encodings that failed.
    attempts: int = 0
    #: Whether the segment still belongs to its layer.
    is_alive: bool = True

    @property
    def resident_bytes(self) -> int:
        """Number of bytes of the rows or the frames, whichever exist."""
        if self.rows is not None:
            return self.rows.nbytes
        return self.frames.nbytes if self.frames is not None else 0

    @property
    def owns_rows(self) -> bool:
        """Return whether the rows have their own memory, instead of being a view that retains a larger array."""
        return self.rows is None or self.rows.base is None or self.rows.flags.c_contiguous

    def own_rows(self) -> None:
        """Copy rows that are a view."""
        if self.rows is not None and not self.owns_rows:
            self.rows = self.rows.copy()


MIN_GROWTH_TOKENS = 64
"""Minimum spare capacity when the array grows; an eighth of the required size if that is more."""


class HotBuffer:
    """A buffer of rows ``[2, kv_head, token, head_dim]`` with `count` tokens; append only."""

    def __init__(self, rows: Elements) -> None:
        self.count = int(rows.shape[2])
        self._set_buffer(rows)

    def _set_buffer(self, rows: Elements) -> None:
        self._rows, self._capacity = rows, int(rows.shape[2])
        self._keys, self._values = rows[0], rows[1]
        self._read_only = to_read_only(rows)

    @property
    def rows(self) -> Elements:
        """A view of all rows."""
        return self._rows[:, :, : self.count]

    def to_read_only(self) -> KVPair:
        """Return K and V as read-only views."""
        keys, values = self._read_only
        return keys[:, : self.count], values[:, : self.count]

    @property
    def resident_bytes(self) -> int:
        """Size of the array in bytes, spare capacity included."""
        return int(self._rows.nbytes)

    def reserve(self, num_new: int) -> None:
        """Reserve capacity for `num_new` more tokens."""
        required_tokens = self.count + num_new
        if required_tokens > self._capacity:
            capacity = required_tokens + max(MIN_GROWTH_TOKENS, required_tokens // 8)
            _, heads, _, head_dim = self._rows.shape
            grown_buffer = allocate((2, heads, capacity, head_dim), self._rows.dtype)
            grown_buffer[:, :, : self.count] = self.rows
            self._set_buffer(grown_buffer)

    def append(self, keys: Elements, values: Elements) -> None:
        """Append tokens."""
        begin, end = self.count, self.count + keys.shape[1]
        if end > self._capacity:
            self.reserve(end - begin)
        self._keys[:, begin:end] = keys
        self._values[:, begin:end] = values
        self.count = end


ReadRows = Callable[[TokenSegment], Elements]
"""The rows of a piece, decoded where it has none."""

WriteRows = Callable[[TokenSegment, Elements], None]
"""Writes the rows of a piece to an array of their shape."""


class LayerStorage:
    """Tokens of one layer: older ones in `segments`, the latest in `hot_buffer`, with the positions of all."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self.segments: list[TokenSegment] = []
        self.hot_buffer = HotBuffer(np.empty((2, kv_heads, 0, head_dim), dtype.numpy_dtype))
        self.positions = PositionRuns()
        self._segment_tokens = 0
        self._token_bytes = 2 * kv_heads * head_dim * dtype.itemsize

    @property
    def tokens(self) -> int:
        """Number of tokens of the layer."""
        return self._segment_tokens + self.hot_buffer.count

    @property
    def raw_bytes(self) -> int:
        """Number of bytes of all tokens as rows."""
        return self.tokens * self._token_bytes

    @property
    def resident_bytes(self) -> int:
        """Number of bytes of the current rows and frames."""
        return sum(segment.resident_bytes for segment in self.segments) + self.hot_buffer.resident_bytes

    @property
    def all_ranges(self) -> list[ReservePair]:
        """All tokens as pairs of index and count."""
        return [(0, self.tokens)] if self.tokens else []

    def iter_segments(self) -> Iterator[tuple[int, TokenSegment]]:
        """Yield every segment with the index of its first token."""
        offset = 0
        for segment in self.segments:
            yield offset, segment
            offset += segment.count

    def find_start(self, target: TokenSegment) -> int:
        """Return the index of the first token of a segment; 0 for an unknown one."""
        return next((start for start, segment in self.iter_segments() if segment is target), 0)

    def append(self, keys: Elements, values: Elements, position: int) -> None:
        """Append tokens, the first at text position `position`."""
        self.hot_buffer.append(keys, values)
        self.positions.append(position, keys.shape[1])

    def copy_to(self, out: Elements, write_rows: WriteRows) -> None:
        """Write all rows into ``out[:, :, :tokens]``."""
        offset = 0
        for segment in self.segments:
            write_rows(segment, out[:, :, offset : offset + segment.count])
            offset += segment.count
        out[:, :, offset : offset + self.hot_buffer.count] = self.hot_buffer.rows

    # -- blocks --------------------------------------------------------------------------------------------------------

    def split_cold(self, cold_tokens: ColdRange, block_tokens: int) -> list[TokenSegment]:
        """Split the raw rows in `cold_tokens` into blocks, which become due.

        Blocks have `block_tokens` tokens. A shorter run between two segments can never grow and becomes a shorter
        block; a remainder at the end of the cold range waits.
        """
        due_segments: list[TokenSegment] = []
        segments: list[TokenSegment] = []
        for offset, segment in self.iter_segments():
            cold_part = ColdRange(cold_tokens.begin - offset, cold_tokens.end - offset)
            segments += self._split_segment(segment, cold_part, block_tokens, due_segments)
        offset = sum(segment.count for segment in segments)
        first = max(0, cold_tokens.begin - offset)
        blocks = max(0, cold_tokens.end - offset - first) // block_tokens
        if blocks:
            rows = self.hot_buffer.rows
            if first:
                segments.append(TokenSegment(first, rows[:, :, :first].copy()))
            end = first + blocks * block_tokens
            new_segments = [
                TokenSegment(block_tokens, rows[:, :, start : start + block_tokens], "due")
                for start in range(first, end, block_tokens)
            ]
            due_segments += new_segments
            segments += new_segments
            self.hot_buffer = HotBuffer(copy_rows(rows[:, :, end:]))
        self.segments, self._segment_tokens = segments, sum(segment.count for segment in segments)
        return due_segments

    def find_next_due_end(self, begin: int, block_tokens: int) -> int:
        """Return the end from which a cold range starting at `begin` contains a block for `split_cold`."""
        due_end = max(self._segment_tokens, begin) + block_tokens
        for offset, segment in self.iter_segments():
            first = max(0, begin - offset)
            if segment.state == "raw" and first < segment.count:
                due_end = min(due_end, offset + min(segment.count, first + block_tokens))
        return due_end

    def _split_segment(
        self, segment: TokenSegment, cold_tokens: ColdRange, block_tokens: int, due_segments: list[TokenSegment]
    ) -> list[TokenSegment]:
        """Split a segment where it is raw and cold; `cold_tokens` counts from its first token."""
        first, cold_end = max(0, cold_tokens.begin), min(segment.count, cold_tokens.end)
        if cold_end < segment.count:
            cold_end = first + max(0, cold_end - first) // block_tokens * block_tokens
        if segment.state != "raw" or segment.rows is None or first >= cold_end:
            return [segment]
        bounds = [0, *range(first, cold_end, block_tokens), cold_end, segment.count]
        parts = []
        for begin, end in pairwise(bounds):
            if begin == end:
                continue
            is_cold = first <= begin < cold_end
            rows = segment.rows[:, :, begin:end].copy()
            parts.append(TokenSegment(end - begin, rows, "due" if is_cold else "raw"))
            if is_cold:
                due_segments.append(parts[-1])
        return parts

    # -- evictions and erasures ----------------------------------------------------------------------------------------

    def select(
        self, ranges: list[ReservePair], read_rows: ReadRows, *, block_tokens: int, hot_sink: int
    ) -> LayerContents:
        """Return the contents of the layer after keeping only `ranges` (index and count, ascending).

        Segments whose tokens all stay are unchanged. Those that are cut become raw, and so do neighbours that fit into
        one block with them. Nothing is modified before `replace_contents`.
        """
        groups: list[_SegmentGroup] = []
        start = 0
        for segment in self._iter_selected(ranges, read_rows):
            if not groups or not groups[-1].accepts(segment, block_tokens=block_tokens, hot_sink=hot_sink):
                groups.append(_SegmentGroup(start))
            groups[-1].segments.append(segment)
            start += segment.count
        raw_group = groups.pop() if groups and groups[-1].is_raw else None
        hot_buffer = HotBuffer(raw_group.concat_rows(read_rows) if raw_group else self.hot_buffer.rows[:, :, :0].copy())
        return LayerContents([group.merge(read_rows) for group in groups], hot_buffer, self.positions.select(ranges))

    def replace_contents(self, contents: LayerContents) -> None:
        """Replace the contents by those that `select` returned; segments that are not in them are no longer alive."""
        remaining_ids = {id(segment) for segment in contents.segments}
        for segment in self.segments:
            segment.is_alive = id(segment) in remaining_ids
        self.segments, self.hot_buffer, self.positions = contents.segments, contents.hot_buffer, contents.positions
        self._segment_tokens = sum(segment.count for segment in self.segments)

    def clear(self) -> None:
        """Drop everything."""
        self.replace_contents(LayerContents([], HotBuffer(self.hot_buffer.rows[:, :, :0].copy()), PositionRuns()))

    def _iter_selected(self, ranges: list[ReservePair], read_rows: ReadRows) -> Iterator[TokenSegment]:
        """Yield the selected segments unchanged, and raw segments of the partly selected ones."""
        range_iterator = iter(ranges)
        begin, end = _get_bounds(next(range_iterator, None))
        hot_segment = TokenSegment(self.hot_buffer.count, self.hot_buffer.rows)
        offset = 0
        for segment in [*self.segments, hot_segment]:
            segment_end = offset + segment.count
            while begin < segment_end:
                low, high = max(begin, offset), min(end, segment_end)
                if low == offset and high == segment_end and segment is not hot_segment:
                    yield segment
                elif low < high:
                    yield TokenSegment(high - low, read_rows(segment)[:, :, low - offset : high - offset])
                if end > segment_end:
                    break
                begin, end = _get_bounds(next(range_iterator, None))
            offset = segment_end


@dataclass(frozen=True, eq=False)
class LayerContents:
    """The contents of a layer after an eviction."""

    segments: list[TokenSegment]
    hot_buffer: HotBuffer
    positions: PositionRuns


@dataclass(eq=False)
class _SegmentGroup:
    """Adjacent segments to merge."""

    start: int
    segments: list[TokenSegment] = field(default_factory=list)

    @property
    def is_raw(self) -> bool:
        """Return whether the merged segment has rows instead of frames: its segment has, or there are several."""
        return len(self.segments) > 1 or self.segments[0].state == "raw"

    def accepts(self, segment: TokenSegment, *, block_tokens: int, hot_sink: int) -> bool:
        """Return whether `segment` belongs to the group."""
        if self.is_raw and segment.state == "raw":
            return True
        if self.start < hot_sink or any(member.state == "queued" for member in (*self.segments, segment)):
            return False
        return sum(member.count for member in self.segments) + segment.count <= block_tokens

    def concat_rows(self, read_rows: ReadRows) -> Elements:
        """Concatenate the rows of all segments in a new array."""
        parts = [read_rows(segment) for segment in self.segments]
        heads, head_dim = parts[0].shape[1], parts[0].shape[3]
        count = sum(segment.count for segment in self.segments)
        out = allocate((2, heads, count, head_dim), parts[0].dtype)
        return np.concatenate(parts, axis=2, out=out)

    def merge(self, read_rows: ReadRows) -> TokenSegment:
        """Merge the group to one segment."""
        first_segment = self.segments[0]
        if len(self.segments) == 1 and (first_segment.state != "raw" or first_segment.owns_rows):
            return first_segment
        rows = self.concat_rows(read_rows)
        return TokenSegment(rows.shape[2], rows)


def _get_bounds(token_range: ReservePair | None) -> ReservePair:
    """Return begin and end of a range; for None, bounds after all tokens."""
    return (token_range[0], sum(token_range)) if token_range is not None else (1 << 62, 1 << 62)
