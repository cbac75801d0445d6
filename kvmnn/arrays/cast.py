"""Cast words of one dtype to another, and count how many values the cast changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.text import LOSSLESS, LOSSY
from ..files.schema import Record
from .array import Chunk, LazyArray


class CastStats(Record):
    """Casts chunks of words to the nearest value, ties to even, and counts what the cast changed."""

    json_keys = "from=source to=target words changed overflowed largest_error=_finite_error"

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        #: Words so far; words whose bits change when cast there and back; finite ones of these that became infinite.
        self.words = self.changed = self.overflowed = 0
        #: The largest absolute difference of finite words that changed; infinite if one overflowed.
        self.largest_error = 0.0

    @property
    def label(self) -> str:
        """Return ``LOSSLESS`` where every word, cast back, has the same bits; else ``LOSSY``."""
        return LOSSY if self.changed else LOSSLESS

    @property
    def _finite_error(self) -> float | None:
        return None if self.overflowed else self.largest_error

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.source} -> {self.target}: none of {self.words:,} words changed"
        error_text = f"{self.largest_error:.3g}"
        if self.overflowed:
            error_text = f"infinite: {self.overflowed:,} overflowed, beyond what {self.target} can say"
        change_text = f"{self.changed:,} of {self.words:,} words changed"
        return f"{self.source} -> {self.target}: {change_text}, largest error {error_text}"

    def cast(self, elements: Chunk) -> Chunk:
        """Cast a chunk, which contains only whole elements, and update the counts."""
        if self.source == self.target:
            self.words += elements.size // dtypes.parse_dtype(self.source).itemsize
            return elements
        values = to_float32(elements, self.source)
        cast_elements = round_to_dtype(values, self.target)
        restored = to_float32(round_to_dtype(to_float32(cast_elements, self.target), self.source), self.source)
        differs = values.view(np.uint32) != restored.view(np.uint32)
        self.words += values.size
        self.changed += int(np.count_nonzero(differs))
        values, cast_values = values[differs], to_float32(cast_elements, self.target)[differs]
        finite = np.isfinite(values)
        self.overflowed += int(np.count_nonzero(finite & ~np.isfinite(cast_values)))
        errors = np.abs(values[finite].astype(np.float64) - cast_values[finite])
        self.largest_error = max(self.largest_error, float(errors.max(initial=0.0)))
        return cast_elements


def merge_cast_stats(casts: Sequence[CastStats]) -> CastStats:
    """Return the counts of one cast of all chunks of several, of the same dtypes."""
    total = CastStats(casts[0].source, casts[0].target)
    total.words = sum(cast.words for cast in casts)
    total.changed = sum(cast.changed for cast in casts)
    total.overflowed = sum(cast.overflowed for cast in casts)
    total.largest_error = max(cast.largest_error for cast in casts)
    return total


def upcast(array: LazyArray) -> LazyArray:
    """Return the array as fp32, which represents every value of every dtype; cast as it is read."""
    if array.dtype == "fp32":
        return array

    def iter_chunks(chunk_bytes: int) -> Iterator[Chunk]:
        stats = CastStats(array.dtype, "fp32")
        return (stats.cast(chunk) for chunk in array.iter_chunks(max(4, chunk_bytes // 2)))

    return replace(array, dtype="fp32", array_dtype="<f4", reader=iter_chunks)


def to_float32(elements: Chunk, dtype: str) -> npt.NDArray[np.float32]:
    """Convert to float32, which represents every value of every dtype."""
    if dtype == "fp32":
        return elements.view("<f4")
    if dtype == "bf16":
        return (elements.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    with np.errstate(invalid="ignore"):
        return elements.view("<f2").astype("<f4")


def round_to_dtype(values: npt.NDArray[np.float32], dtype: str) -> Chunk:
    """Round float32 values to words of a dtype, to nearest, ties to even."""
    if dtype == "fp32":
        return values.view(np.uint8)
    if dtype == "fp16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype("<f2").view(np.uint8)
    bits = values.view("<u4")
    rounded_bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    truncated_bits = bits >> np.uint32(16)
    # A NaN without bits in the upper half must not become an infinity.
    nan_bits = np.where(truncated_bits & np.uint32(0x7F), truncated_bits, truncated_bits | np.uint32(0x40))
    return np.where(np.isnan(values), nan_bits, rounded_bits).astype("<u2").view(np.uint8)
