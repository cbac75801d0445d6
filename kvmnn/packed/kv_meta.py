"""The engine's bookkeeping of a step: how many tokens there were, go, stay and come (docs/layout.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..checks import whole
from ..errors import KvmnnError
from .reserve import Pair, as_dialect, as_pairs

_MAX_COUNT = (1 << 63) - 1


@dataclass
class KVMeta:
    """Counts of one conversation, shared by all layers, as the engine's ``KVMeta`` holds them.

    Attributes
    ----------
    previous
        Tokens in the cache before this step, as the engine believes: after a layer was compacted on its own, or
        upstream dropped the cache, it is not what a layer really holds.
    add
        Tokens of this step.
    remove
        Tokens at the tail that form the window.
    reserve
        Pairs (begin, size) inside the window that stay; begin counts from the window's start.
    dialect
        ``"fork"`` or ``"upstream"``.
    """

    previous: int = 0
    add: int = 0
    remove: int = 0
    reserve: tuple[Pair, ...] = ()
    dialect: str = "fork"

    def __post_init__(self) -> None:
        as_dialect(self.dialect)
        for name in ("previous", "add", "remove"):
            setattr(self, name, whole(getattr(self, name), name, 0, _MAX_COUNT))
        self.reserve = as_pairs(self.reserve)

    def set_info(self, add: int, remove: int, reserve: Iterable[Pair] = ()) -> None:
        """What ``setKVCacheInfo`` does: `remove` is cut to what there is, nothing else is looked at."""
        pairs = as_pairs(reserve)
        self.add = whole(add, "add", 0, _MAX_COUNT)
        self.remove = min(whole(remove, "remove", 0, _MAX_COUNT), self.previous)
        self.reserve = pairs

    def erase(self, begin: int, end: int = 0) -> None:
        """What ``eraseHistory`` does: drop the tokens ``[begin, end)`` at the next step; end 0 means all from `begin`.

        Raises
        ------
        KvmnnError
            For a range that is empty or ends behind the cache; the engine prints a message and ignores the call.
        """
        self.remove, self.reserve = erase_plan(self.previous, begin, end)

    def reserve_size(self) -> int:
        """Sum of the sizes of the pairs, -1 where one of them is not above 0 (``computeReserveSize``)."""
        return -1 if any(size <= 0 for _, size in self.reserve) else sum(size for _, size in self.reserve)

    def sync(self) -> int:
        """End the step: the new `previous`, which is returned; everything else is cleared.

        The fork drops all pairs where one is not inside the window by itself, whatever their order, and cuts `remove`
        to what there was. Upstream computes with what it was given.
        """
        sizes = self.reserve_size()
        remove = self.remove
        if self.dialect == "fork":
            if any(begin < 0 or size <= 0 or begin + size > remove for begin, size in self.reserve):
                sizes = 0
            if remove > self.previous + self.add:
                remove, sizes = self.previous + self.add, 0
        self.previous = self.previous - remove + self.add + sizes
        self.add, self.remove, self.reserve = 0, 0, ()
        return self.previous


def erase_plan(past: int, begin: int, end: int = 0) -> tuple[int, tuple[Pair, ...]]:
    """`remove` and the pairs with which the engine erases the tokens ``[begin, end)`` of `past`; end 0 means `past`."""
    whole(begin, "begin", 0)
    stop = whole(end, "end", 0) or past
    if begin >= stop or stop > past:
        raise KvmnnError(f"cannot erase tokens {begin} to {stop}: expected a range inside the {past} tokens there are")
    return past - begin, ((stop - begin, past - stop),) if stop < past else ()
