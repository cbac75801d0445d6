"""Words of one dtype as words of another, and an honest count of what that changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..text import LOSSLESS, LOSSY
from .named_array import NamedArray, Piece


class Cast:
    """Casts runs of words; rounds to nearest, ties to even, and counts what does not come back.

    Parameters
    ----------
    source, target
        Names of dtypes.

    Attributes
    ----------
    words
        Words cast so far.
    changed
        How many of them do not give the same bits when cast back.
    overflowed
        How many of those were finite and are infinite, as they are beyond the target's range.
    largest_error
        The largest absolute difference among the finite ones that changed: infinite where some overflowed.
    """

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self.words = self.changed = self.overflowed = 0
        self.largest_error = 0.0

    @property
    def label(self) -> str:
        """``LOSSLESS`` where every word, cast back, was what it had been, as it was compared; else ``LOSSY``."""
        return LOSSY if self.changed else LOSSLESS

    def to_dict(self) -> dict[str, Any]:
        """The counts, for JSON, which has no infinity: there is no ``largest_error`` where words overflowed."""
        return {
            "from": self.source,
            "to": self.target,
            "words": self.words,
            "changed": self.changed,
            "overflowed": self.overflowed,
            "largest_error": None if self.overflowed else self.largest_error,
        }

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.source} -> {self.target}: none of {self.words:,} words changed"
        error = f"{self.largest_error:.3g}"
        if self.overflowed:
            error = f"infinite: {self.overflowed:,} overflowed, beyond what {self.target} can say"
        changed = f"{self.changed:,} of {self.words:,} words changed"
        return f"{self.source} -> {self.target}: {changed}, largest error {error}"

    def run(self, words: Piece) -> Piece:
        """A run of words as bytes, cast; no word may be cut."""
        if self.source == self.target:
            self.words += words.size // dtypes.by_name(self.source).itemsize
            return words
        before = floats(words, self.source)
        made = round_words(before, self.target)
        back = floats(round_words(floats(made, self.target), self.source), self.source)
        differs = before.view(np.uint32) != back.view(np.uint32)
        self.words += before.size
        self.changed += int(np.count_nonzero(differs))
        before, became = before[differs], floats(made, self.target)[differs]
        finite = np.isfinite(before)
        self.overflowed += int(np.count_nonzero(finite & ~np.isfinite(became)))
        errors = np.abs(before[finite].astype(np.float64) - became[finite])
        self.largest_error = max(self.largest_error, float(errors.max(initial=0.0)))
        return made


def sum_of(casts: Sequence[Cast]) -> Cast:
    """What one cast of all runs of several, at least one and all of the same dtypes, would have counted."""
    total = Cast(casts[0].source, casts[0].target)
    total.words = sum(cast.words for cast in casts)
    total.changed = sum(cast.changed for cast in casts)
    total.overflowed = sum(cast.overflowed for cast in casts)
    total.largest_error = max(cast.largest_error for cast in casts)
    return total


def widened(array: NamedArray) -> NamedArray:
    """The array as fp32, which holds every value of every dtype; its words become so as they are read."""
    if array.dtype == "fp32":
        return array

    def runs(step: int) -> Iterator[Piece]:
        cast = Cast(array.dtype, "fp32")
        return (cast.run(run) for run in array.pieces(max(4, step // 2)))

    return replace(array, dtype="fp32", array_dtype="<f4", reader=runs)


def floats(words: Piece, dtype: str) -> npt.NDArray[np.float32]:
    """As float32, which holds every value of every dtype."""
    if dtype == "fp32":
        return words.view("<f4")
    if dtype == "bf16":
        return (words.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    with np.errstate(invalid="ignore"):
        return words.view("<f2").astype("<f4")


def round_words(values: npt.NDArray[np.float32], dtype: str) -> Piece:
    """Return float32 values as words of a dtype, rounded to nearest, ties to even."""
    if dtype == "fp32":
        return values.view(np.uint8)
    if dtype == "fp16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype("<f2").view(np.uint8)
    bits = values.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    cut = bits >> np.uint32(16)
    nan = np.where(cut & np.uint32(0x7F), cut, cut | np.uint32(0x40))  # never an infinity
    return np.where(np.isnan(values), nan, rounded).astype("<u2").view(np.uint8)
