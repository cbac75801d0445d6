"""The engine's bookkeeping of a step: how many tokens there were, go, stay and come (docs/layout.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..checks import validate_int
from ..errors import KvmnnError
from .reserve import ReservePair, parse_pairs, validate_dialect

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
    reserve: tuple[ReservePair, ...] = ()
    dialect: str = "fork"

    def __post_init__(self) -> None:
        validate_dialect(self.dialect)
        for name in ("previous", "add", "remove"):
            setattr(self, name, validate_int(getattr(self, name), name, 0, _MAX_COUNT))
        self.reserve = parse_pairs(self.reserve)

    def set_info(self, add: int, remove: int, reserve: Iterable[ReservePair] = ()) -> None:
        """What ``setKVCacheInfo`` does: `remove` is cut to what there is, nothing else is looked at."""
        pairs = parse_pairs(reserve)
        self.add = validate_int(add, "add", 0, _MAX_COUNT)
        self.remove = min(validate_int(remove, "remove", 0, _MAX_COUNT), self.previous)
        self.reserve = pairs

    def erase(self, begin: int, end: int = 0) -> None:
        """What ``eraseHistory`` does: drop the tokens ``[begin, end)`` at the next step; end 0 means all from `begin`.

        Raises
        ------
        KvmnnError
            For a range that is empty or ends behind the cache; the engine prints a message and ignores the call.
        """
        self.remove, self.reserve = plan_erase(self.previous, begin, end)

    def compute_reserve_size(self) -> int:
        """Sum of the sizes of the pairs, -1 where one of them is not above 0 (``computeReserveSize``)."""
        return -1 if any(size <= 0 for _, size in self.reserve) else sum(size for _, size in self.reserve)

    def sync(self) -> int:
        """End the step: the new `previous`, which is returned; everything else is cleared.

        The fork drops all pairs where one is not inside the window by itself, whatever their order, and cuts `remove`
        to what there was. Upstream computes with what it was given.
        """
        sizes = self.compute_reserve_size()
        remove = self.remove
        if self.dialect == "fork":
            if any(begin < 0 or size <= 0 or begin + size > remove for begin, size in self.reserve):
                sizes = 0
            if remove > self.previous + self.add:
                remove, sizes = self.previous + self.add, 0
        self.previous = self.previous - remove + self.add + sizes
        self.add, self.remove, self.reserve = 0, 0, ()
        return self.previous


def plan_erase(past_length: int, begin: int, end: int = 0) -> tuple[int, tuple[ReservePair, ...]]:
    """`remove` and the pairs with which the engine erases the tokens ``[begin, end)`` of `past_length`; end 0 means
    `past_length`.
    """
    validate_int(begin, "begin", 0)
    stop = validate_int(end, "end", 0) or past_length
    if begin >= stop or stop > past_length:
        raise KvmnnError(
            f"cannot erase tokens {begin} to {stop}: expected a range inside the {past_length} tokens there are"
        )
    return past_length - begin, ((stop - begin, past_length - stop),) if stop < past_length else ()
