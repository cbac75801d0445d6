"""K and V of several layers encoded together: where rows of one are alike, those of the next are as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np

from .. import dense, dtypes
from ..arrays.named_array import Chunk, LazyArray
from ..dtypes import Elements, Indices
from ..errors import KvmnnError
from ..threads.helpers import InterruptibleExecutor, wait_for_result
from ..threads.pool import resolve_threads
from .dense_pieces import DensePlan, decode_elements

T = TypeVar("T")
R = TypeVar("R")

GROUP_BYTES = 32 << 20
"""Raw bytes that are encoded together; one piece of more is alone. Streams of a group are held until it is done."""
_MAX_ACTIVE_BYTES = 256 << 20
"""Raw bytes of all groups in work, where there is more than one."""
_MIN_GROUPED_CHUNKS = 4
"""Fewer pieces are encoded one by one, so that two threads have work."""
_CHUNKS_PER_GROUP, _MAX_PREFERRED_GROUPS = 4, 16
"""More become groups of four, and of more where there are more than 16 of them; an even number, for two threads."""


class LayerGroups(NamedTuple):
    """How the pieces of arrays that become dense streams are encoded together.

    Parameters
    ----------
    sizes
        How many of the next pieces each group has.
    max_group_bytes
        Raw bytes of the largest group.
    """

    sizes: Sequence[int]
    max_group_bytes: int

    def collect(self, items: Iterable[T], is_dense: Callable[[T], bool]) -> Iterator[list[T]]:
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


def plan_groups(arrays: Iterable[tuple[LazyArray, DensePlan | None]]) -> LayerGroups:
    """Pieces of the same tokens that lie one behind the other share groups, where there are four or more.

    The bytes of streams depend on the groups, and so they depend on nothing but the arrays.
    """
    sizes: list[int] = []
    pending: list[DensePlan] = []
    largest = 0

    def close_group_run() -> None:
        nonlocal largest
        for group in split_into_groups([pending_plan.nbytes for pending_plan in pending]):
            sizes.append(len(group))
            largest = max(largest, sum(group))
        pending.clear()

    for array, plan in arrays:
        if plan is None:
            close_group_run()
            continue
        for _ in range(array.count_chunks(plan.nbytes)):
            if pending and not _has_same_tokens(pending, plan):
                close_group_run()
            pending.append(plan)
    close_group_run()
    return LayerGroups(sizes, largest)


def _has_same_tokens(pending: Sequence[DensePlan], plan: DensePlan) -> bool:
    """Whether rows of a piece are those of the same text as the pieces before it: what is not known is taken so."""
    first_plan, rotary_plan = pending[0], next((pending_plan for pending_plan in pending if pending_plan.rotary), plan)
    return (
        (first_plan.dtype, first_plan.tokens, first_plan.is_batch, plan.is_batch)
        == (plan.dtype, plan.tokens, False, False)
        and all(
            plan.layer is None or (pending_plan.layer, pending_plan.part) != (plan.layer, plan.part)
            for pending_plan in pending
        )
        and (not plan.rotary or _is_equal_or_none(rotary_plan.positions, plan.positions))
        and _is_equal_or_none(first_plan.token_ids, plan.token_ids)
    )


def _is_equal_or_none(left: Indices | None, right: Indices | None) -> bool:
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def split_into_groups(nbytes: Sequence[int]) -> list[list[int]]:
    """Pieces of a run, by their bytes, in groups of nearly equal bytes."""
    total, num_chunks = sum(nbytes), len(nbytes)
    if num_chunks < _MIN_GROUPED_CHUNKS:
        return [[num_bytes] for num_bytes in nbytes]
    num_groups = max(2, min(_MAX_PREFERRED_GROUPS, num_chunks // _CHUNKS_PER_GROUP))
    num_groups = max(num_groups + num_groups % 2, -(-total // GROUP_BYTES))
    sizes_by_group: dict[int, list[int]] = {}
    offset = 0
    for num_bytes in nbytes:
        sizes_by_group.setdefault((offset + num_bytes // 2) * num_groups // total, []).append(num_bytes)
        offset += num_bytes
    return list(sizes_by_group.values())


def encode_group(chunks: Sequence[tuple[DensePlan, Chunk]], *, verify: bool) -> list[bytes]:
    """The streams of a group, each of which decodes alone.

    Raises
    ------
    KvmnnError
        With `verify`, if a stream does not decode to its input, which would be a defect of kvmnn or of the machine.
    """
    first_plan = chunks[0][0]
    streams = dense.encode_many(
        [_to_head_major(plan, chunk) for plan, chunk in chunks],
        dtype=first_plan.dtype,
        rotary=[plan.rotary for plan, _ in chunks],
        positions=next((plan.positions for plan, _ in chunks if plan.rotary), None),
        token_ids=first_plan.token_ids,
        choose_rotation=True,
    )
    for (plan, chunk), stream in zip(chunks, streams, strict=True) if verify else ():
        if not np.array_equal(decode_elements(stream, plan.axes), chunk):
            raise KvmnnError("a dense stream did not decode to its own input; nothing was written (please report this)")
    return streams


def _to_head_major(plan: DensePlan, chunk: Chunk) -> Elements:
    elements = chunk.view(dtypes.parse_dtype(plan.dtype).numpy_dtype).reshape(plan.shape)
    return elements if plan.axes == "htd" else elements.transpose(1, 0, 2)


def compute_num_workers(max_group_bytes: int, threads: int | None) -> int:
    """How many groups are in work at a time, where the largest has so many raw bytes; one thread does each."""
    return max(1, min(resolve_threads(threads), _MAX_ACTIVE_BYTES // max(1, max_group_bytes)))


def map_in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """``(item, work(item))`` in the order of `items`; `workers` and one more of them are held.

    None runs on the caller's thread, so that an interrupt ends this at once.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    max_pending = workers if workers > 1 else 0
    with InterruptibleExecutor(workers, "kvmnn-group") as helpers:
        for item in items:
            pending.append((item, helpers.submit(work, item)))
            del item  # or it would live on while the next one is taken
            while len(pending) > max_pending:
                yield _pop_oldest_result(pending)
        while pending:
            yield _pop_oldest_result(pending)


def _pop_oldest_result(pending: deque[tuple[T, Future[R]]]) -> tuple[T, R]:
    item, future = pending.popleft()
    return item, wait_for_result(future)
