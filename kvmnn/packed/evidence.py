"""What the words of packed files tell about their layout, whatever model computed them.

Two things differ between the right layout and a wrong one. The engine writes rows of tokens into files of zeros, so in
the right layout each row is either full or empty, and the empty ones come last, in K and V of every head alike; a wrong
layout mixes both. And dimensions of K and V have means of their own: the variance between the means of the dimensions,
over the variance of all words, is highest where a dimension is taken for one (`LayoutEvidence.contrast`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import PARTS, Bytes, Part, parse_dtype
from .layout import PackLayout
from .rows import HeadRowAccessor, get_head_bytes, get_row_bytes

ReadBytes = Callable[[int, int], Bytes]
"""Gives bytes of a packed file: ``view(offset, nbytes)``."""

MAX_SAMPLED_HEADS = 8
MAX_SAMPLED_LAYERS = 4
_MAX_FIRST_ROWS = 512
_MAX_LAST_ROWS = 192  # three blocks of V: where a wrong layout leaves holes
_PROBE_STEP_ROWS = 32  # the engine leaves room for 64 tokens
_MAX_PROBES = 256
_SCAN_BYTES = 1 << 20
_FILL_SAMPLE_BYTES = 64

# A word that is zero by itself is rare in K and V; a row of which more than this share is empty was not written as one.
_MAX_EMPTY_FRACTION = 0.2


@dataclass(frozen=True)
class LayerEvidence:
    """What one layer tells about a layout.

    Parameters
    ----------
    num_rows
        Rows up to the last one that is not empty, of any head, in K or V.
    has_equal_ends
        Whether that row is the same in all heads, of K and of V.
    num_misplaced_rows
        Rows before it that are empty, or partly so, or that have words where padding is.
    key_contrast, value_contrast
        Variance between the means of the dimensions over the variance of all words; 0 where words are no numbers.
    """

    num_rows: int
    has_equal_ends: bool
    num_misplaced_rows: int
    key_contrast: float
    value_contrast: float

    @property
    def contrast(self) -> float:
        """Geometric mean of both."""
        return float(np.sqrt(self.key_contrast * self.value_contrast))


@dataclass(frozen=True)
class LayoutEvidence:
    """What some layers tell about a layout."""

    layers: tuple[LayerEvidence, ...]

    @property
    def num_rows(self) -> int:
        """Rows up to the last one that is not empty, in any layer."""
        return max(layer.num_rows for layer in self.layers)

    @property
    def num_misplaced_rows(self) -> int:
        """Rows that are empty, or partly so, before one that is not."""
        return sum(layer.num_misplaced_rows for layer in self.layers)

    @property
    def has_equal_ends(self) -> bool:
        """Whether K and V of all heads of a layer end with the same row."""
        return all(layer.has_equal_ends for layer in self.layers)

    @property
    def is_consistent(self) -> bool:
        """Whether rows are full or empty, and the empty ones last, in all heads alike."""
        return self.has_equal_ends and not self.num_misplaced_rows

    @property
    def contrast(self) -> float:
        """Geometric mean over the layers."""
        values = [layer.contrast for layer in self.layers]
        return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def choose_sampled_layers(count: int) -> list[int]:
    """Indices of the layers that are looked at, of so many."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(count, MAX_SAMPLED_LAYERS))})


def measure_layer(views: dict[Part, ReadBytes], layout: PackLayout, capacity: int) -> LayerEvidence:
    """Measure what K and V of a layer tell about a float layout.

    Parameters
    ----------
    views
        Access to the two files.
    layout, capacity
        What the files are taken for, and for how many tokens they have room.
    """
    ends: set[int] = set()
    num_misplaced = 0
    contrasts: dict[Part, float] = {}
    for part in PARTS:
        sampler = _HeadSampler(views[part], layout, part, capacity)
        last_rows = sampler.find_last_rows()
        ends.update(last_rows)
        num_misplaced += sampler.count_misplaced_rows(max(last_rows))
        contrasts[part] = sampler.measure_contrast(max(last_rows))
    return LayerEvidence(max(ends), len(ends) == 1, num_misplaced, contrasts["key"], contrasts["value"])


def is_consistent_layer(views: dict[Part, ReadBytes], layout: PackLayout, capacity: int) -> bool:
    """Whether rows are full or empty, and the empty ones last, in all heads alike: `measure_layer` without means."""
    samplers = [_HeadSampler(views[part], layout, part, capacity) for part in PARTS]
    ends = {row for sampler in samplers for row in sampler.find_last_rows()}
    return len(ends) == 1 and not any(sampler.count_misplaced_rows(max(ends)) for sampler in samplers)


def find_last_row(view: ReadBytes, layout: PackLayout, part: Part, capacity: int) -> int:
    """Return the number of rows up to the last one that is not empty, in any head; 0 where all are.

    Empty rows have one byte over and over: zero, or what memory was filled with.
    """
    return max(_HeadSampler(view, layout, part, capacity, sample=False).find_last_rows())


class _HeadSampler:
    """The rows of some heads of a file."""

    def __init__(self, view: ReadBytes, layout: PackLayout, part: Part, capacity: int, *, sample: bool = True) -> None:
        self._view = view
        self._capacity = capacity
        self._head_dim = layout.head_dim
        padded_layout = replace(layout, head_dim=_round_up(layout.head_dim, layout.pack_numbers(part)[part == "value"]))
        self._accessor = HeadRowAccessor(padded_layout, part, capacity)  # rows with the padding behind their dimensions
        self._row_bytes, self._head_bytes = (
            get_row_bytes(padded_layout, part),
            get_head_bytes(padded_layout, part, capacity),
        )
        self._dtype = layout.dtype
        num_heads = min(layout.kv_heads, MAX_SAMPLED_HEADS) if sample else layout.kv_heads
        self._head_indices = sorted({int(head) for head in np.linspace(0, layout.kv_heads - 1, num_heads)})
        self._fill_byte = _read_fill_byte(view, self._head_bytes * layout.kv_heads)

    def _read_rows(self, head: int, begin: int, end: int) -> Bytes:
        """Rows of a head, ``[row, byte]``."""
        rows = np.empty((end - begin, self._row_bytes), np.uint8)
        self._accessor.read_rows(self._view(head * self._head_bytes, self._head_bytes), begin, rows.reshape(-1))
        return rows

    def find_last_rows(self) -> list[int]:
        """For each head the number of rows up to the last one that is not empty."""
        return [self._find_last_row(head) for head in self._head_indices]

    def _find_last_row(self, head: int) -> int:
        step = 2 * _MAX_LAST_ROWS  # most files end soon behind their last token
        end = self._capacity
        while end:
            begin = max(0, end - step)
            rows = self._read_rows(head, begin, end)
            elements = rows[:, : self._unpadded_row_bytes]
            used_rows = np.flatnonzero((elements != elements[:, :1]).any(axis=1))
            if used_rows.size:
                return begin + int(used_rows[-1]) + 1
            end, step = begin, max(step, _SCAN_BYTES // self._row_bytes)
        return 0

    @property
    def _unpadded_row_bytes(self) -> int:
        """Bytes of a row without padding."""
        return self._head_dim * parse_dtype(self._dtype).itemsize

    def _iter_sampled_ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Runs of the first `rows` rows that are looked at."""
        first_end = min(rows, _MAX_FIRST_ROWS)
        if first_end:
            yield 0, first_end
        last_begin = max(first_end, rows - _MAX_LAST_ROWS)
        if first_end < last_begin:  # heads taken for one have the room of the first in the middle
            step = max(_PROBE_STEP_ROWS, (last_begin - first_end) // _MAX_PROBES)
            yield from ((row, row + 1) for row in range(first_end, last_begin, step))
        if last_begin < rows:
            yield last_begin, rows

    def count_misplaced_rows(self, rows: int) -> int:
        """Count the rows before `rows` that are empty, or partly so, or have words where padding is."""
        num_misplaced, bits_dtype = 0, np.dtype(f"<u{parse_dtype(self._dtype).itemsize}")
        fill_element = np.frombuffer(bytes([self._fill_byte]) * bits_dtype.itemsize, bits_dtype)[0]
        for head in self._head_indices:
            for begin, end in self._iter_sampled_ranges(rows):
                elements = self._read_rows(head, begin, end).view(bits_dtype)
                is_blank = (elements == 0) | (elements == fill_element)
                empty_fraction = is_blank[:, : self._head_dim].mean(axis=1)
                padding = elements[:, self._head_dim :]
                # Files without unused rows do not end with the byte that memory was filled with: padding that has one
                # value throughout was not written either.
                is_padding_blank = (padding == padding[:1, :1]).all(axis=1) | is_blank[:, self._head_dim :].all(axis=1)
                num_misplaced += int(np.count_nonzero((empty_fraction > _MAX_EMPTY_FRACTION) | ~is_padding_blank))
        return num_misplaced

    def measure_contrast(self, rows: int) -> float:
        """Return the variance between the means of dimensions over the variance of all words, in the first rows."""
        end = min(rows, _MAX_FIRST_ROWS)
        if end < 2:
            return 0.0
        heads = [self._read_rows(head, 0, end)[:, : self._unpadded_row_bytes] for head in self._head_indices]
        elements = _to_float64(heads, self._dtype)
        with np.errstate(all="ignore"):
            total_variance = float(elements.var())
            variance_of_means = float(elements.mean(axis=1).var())
            contrast = variance_of_means / total_variance if total_variance > 0 else 0.0
        return contrast if np.isfinite(contrast) else 0.0


def _to_float64(heads: Iterable[Bytes], dtype: str) -> npt.NDArray[np.float64]:
    """Rows of heads as numbers, ``[head, row, dim]``."""
    rows: npt.NDArray[Any] = np.ascontiguousarray(np.stack(list(heads))).view(parse_dtype(dtype).numpy_dtype)
    if dtype == "bf16":
        rows = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return rows.astype(np.float64)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _read_fill_byte(view: ReadBytes, size: int) -> int:
    """What never-written bytes of a file are: the byte that it ends with over and over, else zero."""
    tail = view(size - min(size, _FILL_SAMPLE_BYTES), min(size, _FILL_SAMPLE_BYTES))
    return int(tail[-1]) if (tail == tail[-1]).all() else 0


def measure_layers(
    views: Sequence[dict[Part, ReadBytes]], layout: PackLayout, capacities: Sequence[int]
) -> LayoutEvidence:
    """Measure what layers tell about a layout; `measure_layer` of each."""
    pairs = zip(views, capacities, strict=True)
    return LayoutEvidence(tuple(measure_layer(layer_views, layout, capacity) for layer_views, capacity in pairs))
