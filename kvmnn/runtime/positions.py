"""Which tokens of the text a layer holds, as runs."""

from __future__ import annotations

import numpy as np

from ..dtypes import Positions
from ..packed.reserve import Pair


class PositionRuns:
    """True positions of a layer's tokens, in their order."""

    def __init__(self, runs: list[Pair] | None = None) -> None:
        self._runs: list[Pair] = runs or []

    def append(self, begin: int, count: int) -> None:
        """Tokens that stand at `begin` and after it."""
        if self._runs:
            first, before = self._runs[-1]
            if first + before == begin:
                self._runs[-1] = first, before + count
                return
        if count:
            self._runs.append((begin, count))

    def kept(self, pairs: list[Pair]) -> PositionRuns:
        """Those of the tokens in `pairs` (index and count, ascending)."""
        result = PositionRuns()
        offset, todo = 0, list(reversed(pairs))
        for begin, count in self._runs:
            while todo and todo[-1][0] < offset + count:
                first, size = todo.pop()
                inside = min(size, offset + count - first)
                result.append(begin + first - offset, inside)
                if inside < size:
                    todo.append((first + inside, size - inside))
            offset += count
        return result

    def outside(self, begin: int, end: int) -> list[Pair]:
        """Index and count of the tokens whose position is not in ``[begin, end)``."""
        pairs: list[Pair] = []
        offset = 0
        for first, count in self._runs:
            low, high = min(max(begin, first), first + count), min(max(end, first), first + count)
            for start, stop in ((first, low), (max(high, low), first + count)):
                if start < stop:
                    index = offset + start - first
                    if pairs and sum(pairs[-1]) == index:
                        pairs[-1] = (pairs[-1][0], pairs[-1][1] + stop - start)
                    else:
                        pairs.append((index, stop - start))
            offset += count
        return pairs

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return sum(self._runs[-1]) if self._runs else 0

    def array(self) -> Positions:
        """All positions, one for each token."""
        runs = [np.arange(begin, begin + count, dtype=np.int64) for begin, count in self._runs]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)
