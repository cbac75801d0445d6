"""K and V of several layers encoded together: where rows of one are alike, those of the next are as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np

from .. import dense, dtypes
from ..arrays.named_array import NamedArray, Piece
from ..dtypes import Indices, Words
from ..errors import KvmnnError
from ..threads.helpers import Helpers, result_of
from ..threads.pool import resolve_threads
from .dense_pieces import DensePlan, words_of

T = TypeVar("T")
R = TypeVar("R")

GROUP_BYTES = 32 << 20
"""Raw bytes that are encoded together; one piece of more is alone. Streams of a group are held until it is done."""
_MOST_AT_WORK = 256 << 20
"""Raw bytes of all groups in work, where there is more than one."""
_LEAST_SHARED = 4
"""Fewer pieces are encoded one by one, so that two threads have work."""
_PIECES, _MOST_GROUPS = 4, 16
"""More become groups of four, and of more where there are more than 16 of them; an even number, for two threads."""


class Groups(NamedTuple):
    """How the pieces of arrays that become dense streams are encoded together.

    Parameters
    ----------
    sizes
        How many of the next pieces each group has.
    largest
        Raw bytes of the largest group.
    """

    sizes: Sequence[int]
    largest: int

    def gathered(self, items: Iterable[T], is_dense: Callable[[T], bool]) -> Iterator[list[T]]:
        """Items of pieces in order, those of a group together, those that become frames alone."""
        sizes = iter(self.sizes)
        group: list[T] = []
        size = 0
        for item in items:
            size = size or (next(sizes) if is_dense(item) else 1)
            group.append(item)
            del item  # or it would live on while the next one is taken
            if len(group) == size:
                yield group
                group, size = [], 0


def groups_of(arrays: Iterable[tuple[NamedArray, DensePlan | None]]) -> Groups:
    """Pieces of the same tokens that lie one behind the other share groups, where there are four or more.

    The bytes of streams depend on the groups, and so they depend on nothing but the arrays.
    """
    sizes: list[int] = []
    run: list[DensePlan] = []
    largest = 0

    def end() -> None:
        nonlocal largest
        for group in cut([each.nbytes for each in run]):
            sizes.append(len(group))
            largest = max(largest, sum(group))
        run.clear()

    for array, plan in arrays:
        if plan is None:
            end()
            continue
        for _ in range(array.piece_count(plan.nbytes)):
            if run and not _is_of_same_tokens(run, plan):
                end()
            run.append(plan)
    end()
    return Groups(sizes, largest)


def _is_of_same_tokens(run: Sequence[DensePlan], plan: DensePlan) -> bool:
    """Whether rows of a piece are those of the same text as the pieces before it: what is not known is taken so."""
    first, rotated = run[0], next((each for each in run if each.rotary), plan)
    return (
        (first.dtype, first.tokens, first.is_batch, plan.is_batch) == (plan.dtype, plan.tokens, False, False)
        and all(plan.layer is None or (each.layer, each.part) != (plan.layer, plan.part) for each in run)
        and (not plan.rotary or _is_same(rotated.positions, plan.positions))
        and _is_same(first.token_ids, plan.token_ids)
    )


def _is_same(one: Indices | None, other: Indices | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def cut(nbytes: Sequence[int]) -> list[list[int]]:
    """Pieces of a run, by their bytes, in groups of nearly equal bytes."""
    total, count = sum(nbytes), len(nbytes)
    if count < _LEAST_SHARED:
        return [[each] for each in nbytes]
    groups = max(2, min(_MOST_GROUPS, count // _PIECES))
    groups = max(groups + groups % 2, -(-total // GROUP_BYTES))
    found: dict[int, list[int]] = {}
    before = 0
    for each in nbytes:
        found.setdefault((before + each // 2) * groups // total, []).append(each)
        before += each
    return list(found.values())


def encode_group(pieces: Sequence[tuple[DensePlan, Piece]], *, verify: bool) -> list[bytes]:
    """The streams of a group, each of which decodes alone.

    Raises
    ------
    KvmnnError
        With `verify`, if a stream does not decode to its input, which would be a defect of kvmnn or of the machine.
    """
    first = pieces[0][0]
    streams = dense.encode_many(
        [_rows(plan, piece) for plan, piece in pieces],
        dtype=first.dtype,
        rotary=[plan.rotary for plan, _ in pieces],
        positions=next((plan.positions for plan, _ in pieces if plan.rotary), None),
        token_ids=first.token_ids,
        choose_rotation=True,
    )
    for (plan, piece), made in zip(pieces, streams, strict=True) if verify else ():
        if not np.array_equal(words_of(made, plan.axes), piece):
            raise KvmnnError("a dense stream did not decode to its own input; nothing was written (please report this)")
    return streams


def _rows(plan: DensePlan, piece: Piece) -> Words:
    words = piece.view(dtypes.by_name(plan.dtype).numpy).reshape(plan.shape)
    return words if plan.axes == "htd" else words.transpose(1, 0, 2)


def at_once(largest: int, threads: int | None) -> int:
    """How many groups are in work at a time, where the largest has so many raw bytes; one thread does each."""
    return max(1, min(resolve_threads(threads), _MOST_AT_WORK // max(1, largest)))


def side_by_side(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """``(item, work(item))`` in the order of `items`; `workers` and one more of them are held.

    None runs on the caller's thread, so that an interrupt ends this at once.
    """
    waiting: deque[tuple[T, Future[R]]] = deque()
    ahead = workers if workers > 1 else 0
    with Helpers(workers, "kvmnn-group") as helpers:
        for item in items:
            waiting.append((item, helpers.submit(work, item)))
            del item  # or it would live on while the next one is taken
            while len(waiting) > ahead:
                yield _oldest(waiting)
        while waiting:
            yield _oldest(waiting)


def _oldest(waiting: deque[tuple[T, Future[R]]]) -> tuple[T, R]:
    item, future = waiting.popleft()
    return item, result_of(future)
