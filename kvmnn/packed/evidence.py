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

from ..dtypes import PARTS, Bytes, Part, by_name
from .layout import PackLayout
from .rows import HeadRows, head_bytes, row_bytes

View = Callable[[int, int], Bytes]
"""Gives bytes of a packed file: ``view(offset, nbytes)``."""

MAX_SAMPLED_HEADS = 8
MAX_SAMPLED_LAYERS = 4
_FIRST_ROWS = 512
_LAST_ROWS = 192  # three blocks of V: where a wrong layout leaves holes
_PROBE_STEP = 32  # the engine leaves room for 64 tokens
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
    rows
        Rows up to the last one that is not empty, of any head, in K or V.
    is_even
        Whether that row is the same in all heads, of K and of V.
    misplaced_rows
        Rows before it that are empty, or partly so, or that have words where padding is.
    key_contrast, value_contrast
        Variance between the means of the dimensions over the variance of all words; 0 where words are no numbers.
    """

    rows: int
    is_even: bool
    misplaced_rows: int
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
    def rows(self) -> int:
        """Rows up to the last one that is not empty, in any layer."""
        return max(layer.rows for layer in self.layers)

    @property
    def misplaced_rows(self) -> int:
        """Rows that are empty, or partly so, before one that is not."""
        return sum(layer.misplaced_rows for layer in self.layers)

    @property
    def is_even(self) -> bool:
        """Whether K and V of all heads of a layer end with the same row."""
        return all(layer.is_even for layer in self.layers)

    @property
    def is_consistent(self) -> bool:
        """Whether rows are full or empty, and the empty ones last, in all heads alike."""
        return self.is_even and not self.misplaced_rows

    @property
    def contrast(self) -> float:
        """Geometric mean over the layers."""
        values = [layer.contrast for layer in self.layers]
        return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def sample_layers(count: int) -> list[int]:
    """Indices of the layers that are looked at, of so many."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(count, MAX_SAMPLED_LAYERS))})


def measure_layer(views: dict[Part, View], layout: PackLayout, capacity: int) -> LayerEvidence:
    """Measure what K and V of a layer tell about a float layout.

    Parameters
    ----------
    views
        Access to the two files.
    layout, capacity
        What the files are taken for, and for how many tokens they have room.
    """
    ends: set[int] = set()
    misplaced = 0
    contrasts: dict[Part, float] = {}
    for part in PARTS:
        heads = _Heads(views[part], layout, part, capacity)
        last = heads.find_last_rows()
        ends.update(last)
        misplaced += heads.count_misplaced_rows(max(last))
        contrasts[part] = heads.measure_contrast(max(last))
    return LayerEvidence(max(ends), len(ends) == 1, misplaced, contrasts["key"], contrasts["value"])


def is_consistent_layer(views: dict[Part, View], layout: PackLayout, capacity: int) -> bool:
    """Whether rows are full or empty, and the empty ones last, in all heads alike: `measure_layer` without means."""
    heads = [_Heads(views[part], layout, part, capacity) for part in PARTS]
    ends = {row for each in heads for row in each.find_last_rows()}
    return len(ends) == 1 and not any(each.count_misplaced_rows(max(ends)) for each in heads)


def find_last_row(view: View, layout: PackLayout, part: Part, capacity: int) -> int:
    """Return the number of rows up to the last one that is not empty, in any head; 0 where all are.

    Empty rows have one byte over and over: zero, or what memory was filled with.
    """
    return max(_Heads(view, layout, part, capacity, sample=False).find_last_rows())


class _Heads:
    """The rows of some heads of a file."""

    def __init__(self, view: View, layout: PackLayout, part: Part, capacity: int, *, sample: bool = True) -> None:
        self._view = view
        self._capacity = capacity
        self._dims = layout.head_dim
        padded = replace(layout, head_dim=_round_up(layout.head_dim, layout.pack_numbers(part)[part == "value"]))
        self._access = HeadRows(padded, part, capacity)  # rows with the padding behind their dimensions
        self._row, self._size = row_bytes(padded, part), head_bytes(padded, part, capacity)
        self._dtype = layout.dtype
        count = min(layout.kv_heads, MAX_SAMPLED_HEADS) if sample else layout.kv_heads
        self._numbers = sorted({int(head) for head in np.linspace(0, layout.kv_heads - 1, count)})
        self._fill = _read_fill_byte(view, self._size * layout.kv_heads)

    def _read(self, head: int, begin: int, end: int) -> Bytes:
        """Rows of a head, ``[row, byte]``."""
        rows = np.empty((end - begin, self._row), np.uint8)
        self._access.read(self._view(head * self._size, self._size), begin, rows.reshape(-1))
        return rows

    def find_last_rows(self) -> list[int]:
        """For each head the number of rows up to the last one that is not empty."""
        return [self._find_last_row(head) for head in self._numbers]

    def _find_last_row(self, head: int) -> int:
        step = 2 * _LAST_ROWS  # most files end soon behind their last token
        end = self._capacity
        while end:
            begin = max(0, end - step)
            rows = self._read(head, begin, end)
            words = rows[:, : self._row_of_dims]
            used = np.flatnonzero((words != words[:, :1]).any(axis=1))
            if used.size:
                return begin + int(used[-1]) + 1
            end, step = begin, max(step, _SCAN_BYTES // self._row)
        return 0

    @property
    def _row_of_dims(self) -> int:
        """Bytes of a row without padding."""
        return self._dims * by_name(self._dtype).itemsize

    def _windows(self, rows: int) -> Iterator[tuple[int, int]]:
        """Runs of the first `rows` rows that are looked at."""
        first = min(rows, _FIRST_ROWS)
        if first:
            yield 0, first
        last = max(first, rows - _LAST_ROWS)
        if first < last:  # heads taken for one have the room of the first in the middle
            step = max(_PROBE_STEP, (last - first) // _MAX_PROBES)
            yield from ((row, row + 1) for row in range(first, last, step))
        if last < rows:
            yield last, rows

    def count_misplaced_rows(self, rows: int) -> int:
        """Count the rows before `rows` that are empty, or partly so, or have words where padding is."""
        count, unsigned = 0, np.dtype(f"<u{by_name(self._dtype).itemsize}")
        filled = np.frombuffer(bytes([self._fill]) * unsigned.itemsize, unsigned)[0]
        for head in self._numbers:
            for begin, end in self._windows(rows):
                words = self._read(head, begin, end).view(unsigned)
                blank = (words == 0) | (words == filled)
                empty, padding = blank[:, : self._dims].mean(axis=1), blank[:, self._dims :].all(axis=1)
                count += int(np.count_nonzero((empty > _MAX_EMPTY_FRACTION) | ~padding))
        return count

    def measure_contrast(self, rows: int) -> float:
        """Return the variance between the means of dimensions over the variance of all words, in the first rows."""
        end = min(rows, _FIRST_ROWS)
        if end < 2:
            return 0.0
        heads = [self._read(head, 0, end)[:, : self._row_of_dims] for head in self._numbers]
        words = _as_numbers(heads, self._dtype)
        with np.errstate(all="ignore"):
            total = float(words.var())
            between = float(words.mean(axis=1).var())
            contrast = between / total if total > 0 else 0.0
        return contrast if np.isfinite(contrast) else 0.0


def _as_numbers(heads: Iterable[Bytes], dtype: str) -> npt.NDArray[np.float64]:
    """Rows of heads as numbers, ``[head, row, dim]``."""
    rows: npt.NDArray[Any] = np.ascontiguousarray(np.stack(list(heads))).view(by_name(dtype).numpy)
    if dtype == "bf16":
        rows = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return rows.astype(np.float64)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _read_fill_byte(view: View, size: int) -> int:
    """What never-written bytes of a file are: the byte that it ends with over and over, else zero."""
    tail = view(size - min(size, _FILL_SAMPLE_BYTES), min(size, _FILL_SAMPLE_BYTES))
    return int(tail[-1]) if (tail == tail[-1]).all() else 0


def measure_layers(views: Sequence[dict[Part, View]], layout: PackLayout, capacities: Sequence[int]) -> LayoutEvidence:
    """Measure what layers tell about a layout; `measure_layer` of each."""
    pairs = zip(views, capacities, strict=True)
    return LayoutEvidence(tuple(measure_layer(each, layout, capacity) for each, capacity in pairs))
