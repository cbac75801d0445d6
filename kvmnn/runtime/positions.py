"""Text positions of a layer's tokens, as runs."""

from __future__ import annotations

import numpy as np

from ..dtypes import Positions
from ..packed.compaction import ReservePair


class PositionRuns:
    """Text positions of a layer's tokens, in their order."""

    def __init__(self, runs: list[ReservePair] | None = None) -> None:
        self._runs: list[ReservePair] = runs or []

    def append(self, begin: int, count: int) -> None:
        """Append `count` tokens at position `begin` and after it."""
        if self._runs:
            first, previous_count = self._runs[-1]
            if first + previous_count == begin:
                self._runs[-1] = first, previous_count + count
                return
        if count:
            self._runs.append((begin, count))

    def select(self, pairs: list[ReservePair]) -> PositionRuns:
        """Return the positions of the tokens in `pairs` (index and count, ascending)."""
        result = PositionRuns()
        offset, pending = 0, list(reversed(pairs))
        for begin, count in self._runs:
            while pending and pending[-1][0] < offset + count:
                first, size = pending.pop()
                num_inside = min(size, offset + count - first)
                result.append(begin + first - offset, num_inside)
                if num_inside < size:
                    pending.append((first + num_inside, size - num_inside))
            offset += count
        return result

    def exclude_positions(self, begin: int, end: int) -> list[ReservePair]:
        """Return index and count of the tokens whose position is not in ``[begin, end)``."""
        pairs: list[ReservePair] = []
        offset = 0
        for first, count in self._runs:
            low, high = min(max(begin, first), first + count), min(max(end, first), first + count)
            for start, part_end in ((first, low), (max(high, low), first + count)):
                if start < part_end:
                    index = offset + start - first
                    if pairs and sum(pairs[-1]) == index:
                        pairs[-1] = (pairs[-1][0], pairs[-1][1] + part_end - start)
                    else:
                        pairs.append((index, part_end - start))
            offset += count
        return pairs

    @property
    def end(self) -> int:
        """The position after the last token."""
        return sum(self._runs[-1]) if self._runs else 0

    def to_array(self) -> Positions:
        """Return the position of each token."""
        runs = [np.arange(begin, begin + count, dtype=np.int64) for begin, count in self._runs]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)
