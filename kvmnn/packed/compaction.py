"""Reserve plans: which tokens of the window a cache retains at a reallocation, in both dialects.

A plan is `remove`, the number of tokens at the tail that form the window, and pairs (begin, size) of the retained ones,
with begin counted from the window's start. Nothing here touches a buffer.

`KVMeta` is the engine's bookkeeping of a step: tokens before, removed, retained and added (docs/layout.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from .._util.dataclass import dataclass
from .._util.validation import validate_int
from ..errors import KvmnnError, OptionError

ReservePair = tuple[int, int]

DIALECTS = ("fork", "upstream")  # Livia-Tassel/MNN, and alibaba/MNN up to 3.6.1
INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class CompactionOutcome:
    """Result of a reallocation."""

    #: Capacity in tokens that is required before the moves.
    min_capacity: int
    #: Copies of tokens inside each head, (source, destination, count), one after the other.
    moves: tuple[tuple[int, int, int], ...]
    #: Live tokens afterwards.
    past_length: int
    #: The engine's messages, in kvmnn's words.
    messages: tuple[str, ...] = ()


def validate_dialect(dialect: str) -> str:
    """Return `dialect`; raise `KvmnnError` unless it is one of `DIALECTS`."""
    if dialect not in DIALECTS:
        raise KvmnnError(f"unknown dialect {dialect!r}: expected one of {', '.join(DIALECTS)}")
    return dialect


def parse_pairs(reserve: Iterable[Iterable[int]]) -> tuple[ReservePair, ...]:
    """Return `reserve` as pairs of ints."""
    pairs = []
    for number, entry in enumerate(reserve):
        pair = tuple(entry)
        if len(pair) != 2:
            raise KvmnnError(f"reserve[{number}] has {len(pair)} numbers: expected begin and size")
        begin, size = (
            validate_int(value, f"{name} of reserve[{number}]", -INT32_MAX - 1, INT32_MAX)
            for name, value in zip(("begin", "size"), pair, strict=True)
        )
        pairs.append((begin, size))
    return tuple(pairs)


def check_reserve(past_length: int, remove: int, pairs: tuple[ReservePair, ...], is_quantized: bool) -> None:
    """Raise `KvmnnError` unless the plan is one that the MNN fork applies in full."""
    if remove > past_length:
        raise OptionError(f"remove is {remove}: expected at most the {past_length} live tokens")
    if pairs and is_quantized:
        raise KvmnnError("reserve pairs with int8 keys or values: the engine ignores the pairs and drops the window")
    end = 0
    for number, (begin, size) in enumerate(pairs):
        problem = _find_pair_problem(begin, size, end, remove)
        if problem:
            raise OptionError(f"reserve[{number}] is ({begin}, {size}): {problem}")
        end = begin + size


def _find_pair_problem(begin: int, size: int, end: int, remove: int) -> str | None:
    if size <= 0:
        return "expected a size of at least 1"
    if begin < 0:
        return "expected begin at 0 or after"
    if begin + size > remove:
        return f"ends at {begin + size}, expected at most the window's {remove} tokens"
    if begin < end:
        return f"starts before {end}, where the pair before it ends"
    return None


def simulate_fork_realloc(
    past_length: int, remove: int, pairs: tuple[ReservePair, ...], add: int, is_quantized: bool
) -> CompactionOutcome:
    """Simulate the fork's ``onRealloc`` for any plan, also an invalid one."""
    # It repairs invalid plans, with a message each time. It notices an invalid pair after it has copied the earlier
    # pairs: the copies stay, and the cache ends at the window's start.
    messages = []
    if remove > past_length + add:
        messages.append(f"remove is {remove} with {past_length} tokens and {add} to come: cut, pairs dropped")
        remove, pairs = past_length + add, ()
    if any(size <= 0 for _, size in pairs):
        messages.append("a pair has no size: pairs dropped")
        pairs = ()
    min_capacity = past_length + add - remove + sum(size for _, size in pairs)
    start = past_length - remove
    if start < 0:
        messages.append(f"remove is {remove} with {past_length} tokens: everything dropped")
        start, pairs = 0, ()
    if is_quantized:
        pairs = ()
    moves: list[tuple[int, int, int]] = []
    end, destination = 0, start
    for begin, size in pairs:
        if _find_pair_problem(begin, size, end, remove):
            messages.append(f"pair ({begin}, {size}) does not fit: window dropped")
            return CompactionOutcome(min_capacity, tuple(moves), start, tuple(messages))
        moves.append((start + begin, destination, size))
        destination += size
        end = begin + size
    return CompactionOutcome(min_capacity, tuple(moves), destination, tuple(messages))


def simulate_upstream_realloc(
    past_length: int,
    remove: int,
    pairs: tuple[ReservePair, ...],
    add: int,
    is_quantized: bool,
    previous: int,
    capacity: int,
) -> CompactionOutcome:
    """Simulate upstream's ``onRealloc`` for any plan: it copies without checks."""
    sizes = -1 if any(size <= 0 for _, size in pairs) else sum(size for _, size in pairs)
    min_capacity = previous + add - remove + sizes
    start = past_length - remove
    if start < 0 or min_capacity < 0:
        raise KvmnnError(f"remove is {remove} with {past_length} tokens: upstream would count below zero")
    if is_quantized:
        return CompactionOutcome(min_capacity, (), start)
    buffer_capacity = max(capacity, min_capacity)
    moves = []
    destination = start
    for begin, size in pairs:
        if size > 0:
            if min(start + begin, destination) < 0 or max(start + begin, destination) + size > buffer_capacity:
                raise KvmnnError(f"pair ({begin}, {size}): upstream would copy outside its buffers")
            moves.append((start + begin, destination, size))
        destination += size
    if destination < 0:
        raise KvmnnError("the pairs' sizes add up to less than zero: upstream would count below zero")
    return CompactionOutcome(min_capacity, tuple(moves), destination)


_MAX_COUNT = (1 << 63) - 1


@dataclass
class KVMeta:
    """Counts of one conversation, shared by all layers, like the engine's ``KVMeta``."""

    #: Tokens in the cache before this step by the engine's count, which is wrong for a layer that was compacted
    #: separately or dropped by upstream.
    previous: int = 0
    #: Tokens of this step.
    add: int = 0
    #: Tokens at the tail that form the window.
    remove: int = 0
    #: Pairs (begin, size) inside the window that stay; begin counts from the window's start.
    reserve: tuple[ReservePair, ...] = ()
    #: ``"fork"`` or ``"upstream"``.
    dialect: str = "fork"

    def __post_init__(self) -> None:
        validate_dialect(self.dialect)
        for name in ("previous", "add", "remove"):
            setattr(self, name, validate_int(getattr(self, name), name, 0, _MAX_COUNT))
        self.reserve = parse_pairs(self.reserve)

    def set_info(self, add: int, remove: int, reserve: Iterable[ReservePair] = ()) -> None:
        """Do what ``setKVCacheInfo`` does: `remove` is cut to what there is, nothing else is checked."""
        pairs = parse_pairs(reserve)
        self.add = validate_int(add, "add", 0, _MAX_COUNT)
        self.remove = min(validate_int(remove, "remove", 0, _MAX_COUNT), self.previous)
        self.reserve = pairs

    def erase(self, begin: int, end: int = 0) -> None:
        """Plan, as ``eraseHistory``, to drop the tokens ``[begin, end)`` at the next step; end 0 means all from
        `begin`.

        Raises
        ------
        KvmnnError
            For a range that is empty or ends after the cache; the engine prints a message and ignores the call.
        """
        self.remove, self.reserve = plan_erase(self.previous, begin, end)

    def compute_reserve_size(self) -> int:
        """Return the sum of the sizes of the pairs, -1 if one of them is not above 0 (``computeReserveSize``)."""
        return -1 if any(size <= 0 for _, size in self.reserve) else sum(size for _, size in self.reserve)

    def sync(self) -> int:
        """End the step: return the new `previous`; everything else is cleared.

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
    """Return `remove` and the pairs by which the engine erases ``[begin, end)``; end 0 means `past_length`."""
    validate_int(begin, "begin", 0)
    stop = validate_int(end, "end", 0) or past_length
    if begin >= stop or stop > past_length:
        raise KvmnnError(
            f"cannot erase tokens {begin} to {stop}: expected a range inside the {past_length} tokens there are"
        )
    return past_length - begin, ((stop - begin, past_length - stop),) if stop < past_length else ()
