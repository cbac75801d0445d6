"""Reserve plans: which tokens of the window stay when the engine reallocates a cache, in both dialects.

A plan is `remove`, the number of tokens at the tail that form the window, and pairs (begin, size) of what stays of
them, begin counted from the window's start. Nothing here touches a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..checks import validate_int
from ..errors import KvmnnError

ReservePair = tuple[int, int]

DIALECTS = ("fork", "upstream")
"""The fork Livia-Tassel/MNN, and alibaba/MNN up to 3.6.1."""

INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class CompactionOutcome:
    """What a reallocation does.

    Attributes
    ----------
    min_capacity
        Tokens that there must be room for before anything moves.
    moves
        Copies of tokens inside each head, (source, destination, count), one after the other.
    past_length
        Live tokens afterwards.
    messages
        What the engine complains about, in kvmnn's words; one for each message it prints.
    """

    min_capacity: int
    moves: tuple[tuple[int, int, int], ...]
    past_length: int
    messages: tuple[str, ...] = ()


def validate_dialect(dialect: str) -> str:
    """`dialect` if there is such a one."""
    if dialect not in DIALECTS:
        raise KvmnnError(f"unknown dialect {dialect!r}: expected one of {', '.join(DIALECTS)}")
    return dialect


def parse_pairs(reserve: Iterable[Iterable[int]]) -> tuple[ReservePair, ...]:
    """`reserve` as pairs of ints.

    Raises
    ------
    KvmnnError
        For a number that does not fit the 32 bits in which the engine keeps it, and for what is no pair.
    """
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


def check_reserve(past_length: int, remove: int, pairs: tuple[ReservePair, ...], is_quantised: bool) -> None:
    """Raise `KvmnnError` unless the plan is one that the fork applies in full."""
    if remove > past_length:
        raise KvmnnError(f"remove is {remove}: expected at most the {past_length} live tokens")
    if pairs and is_quantised:
        raise KvmnnError("reserve pairs with int8 keys or values: the engine ignores the pairs and drops the window")
    end = 0
    for number, (begin, size) in enumerate(pairs):
        problem = _find_pair_problem(begin, size, end, remove)
        if problem:
            raise KvmnnError(f"reserve[{number}] is ({begin}, {size}): {problem}")
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


def simulate_fork(
    past_length: int, remove: int, pairs: tuple[ReservePair, ...], add: int, is_quantised: bool
) -> CompactionOutcome:
    """What the fork's ``onRealloc`` does with any plan.

    It repairs what it dislikes, a message each time. That a pair does not fit is noticed while the pairs before it have
    been copied already: the copies stay, and the cache ends where the window starts.
    """
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
    if is_quantised:
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


def simulate_upstream(
    past_length: int,
    remove: int,
    pairs: tuple[ReservePair, ...],
    add: int,
    is_quantised: bool,
    previous: int,
    capacity: int,
) -> CompactionOutcome:
    """What upstream's ``onRealloc`` does with any plan: it looks at nothing and copies what it is told.

    Parameters
    ----------
    previous
        Tokens that the shared counts speak of; upstream sizes the cache after them, not after its own `past_length`.
    capacity
        Tokens that there is room for.

    Raises
    ------
    KvmnnError
        Where upstream would read or write outside its buffers, or count below zero.
    """
    sizes = -1 if any(size <= 0 for _, size in pairs) else sum(size for _, size in pairs)
    min_capacity = previous + add - remove + sizes
    start = past_length - remove
    if start < 0 or min_capacity < 0:
        raise KvmnnError(f"remove is {remove} with {past_length} tokens: upstream would count below zero")
    if is_quantised:
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
