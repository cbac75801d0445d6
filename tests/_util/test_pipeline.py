"""The ordered pipeline: order, its bound on memory, failures, threads."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn._util import parallel
from kvmnn.errors import KvmnnError


@given(sizes=st.lists(st.integers(0, 40), max_size=30), threads=st.integers(1, 4))
@settings(deadline=None)
def test_ordered_map_keeps_order_and_memory_bound(sizes, threads):
    scale = parallel.MAX_IN_FLIGHT_BYTES // 20
    running, peak, lock = 0, 0, threading.Lock()

    def work(item: tuple[int, int], allowed: int | None) -> int:
        nonlocal running, peak
        with lock:
            running += item[1] * scale
            peak = max(peak, running)
        with lock:
            running -= item[1] * scale
        return item[0]

    items = list(enumerate(sizes))
    done = list(parallel.ordered_map(work, items, lambda item: item[1] * scale, threads))
    assert done == [(item, item[0]) for item in items]
    assert peak <= max([parallel.MAX_IN_FLIGHT_BYTES, *(size * scale for size in sizes)])


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_ordered_map_next_item_counts_against_the_bound(share):
    """Items are submitted only while they fit with those that are running or wait for their turn."""
    nbytes = int(share * parallel.MAX_IN_FLIGHT_BYTES)
    most = parallel.MAX_IN_FLIGHT_BYTES // nbytes
    begun, lock, wait = [], threading.Lock(), threading.Event()

    def work(item: int, allowed: int | None) -> int:
        with lock:
            begun.append(item)
        wait.wait(0.2)
        return item

    results = parallel.ordered_map(work, range(9), lambda _: nbytes, 9)
    for number, (item, result) in enumerate(results):
        assert item == result == number
        wait.set()
        with lock:
            assert len(begun) <= number + most
    assert sorted(begun) == list(range(9))


@pytest.mark.parametrize("nbytes", [0, 1, 30])
@pytest.mark.parametrize("threads", [2, 40])
def test_ordered_map_tiny_items_are_bounded_by_number(nbytes, threads):
    """Where the reader of results is slow, or the first item is, no more than so many are pulled and done."""
    most = parallel.compute_max_in_flight_jobs(threads)
    pulled, held, turns = 0, 0, 3 * most

    def items():
        nonlocal pulled
        for number in range(turns):
            pulled += 1
            yield number

    for number, (item, result) in enumerate(parallel.ordered_map(lambda n, _: n, items(), lambda _: nbytes, threads)):
        assert item == result == number
        held = max(held, pulled - number)
    assert pulled == turns and most <= held <= most + 2  # the next item, and the look at whether it is the last


def test_ordered_map_first_failure_is_raised():
    def work(item: int, threads: int | None) -> int:
        if item >= 5:
            raise KvmnnError(f"item {item}")
        return item

    seen = []
    with pytest.raises(KvmnnError, match="item 5"):
        seen.extend(item for item, _ in parallel.ordered_map(work, range(10), lambda _: 1, 2) if item < 100)
    assert threading.active_count() < 40


def test_ordered_map_items_share_the_threads():
    """As many threads for each as leave none idle while `MAX_IN_FLIGHT_BYTES` is full."""
    for size, threads, shares in (
        (parallel.MAX_IN_FLIGHT_BYTES // 2, 2, 1),
        (parallel.MAX_IN_FLIGHT_BYTES // 2, 7, 3),
        (parallel.MAX_IN_FLIGHT_BYTES // 2 + 1, 7, 7),
        (parallel.MAX_IN_FLIGHT_BYTES // 8, 16, 2),
        (1, 16, 1),
    ):
        made = parallel.ordered_map(lambda _, allowed: allowed, [1, 2, 3], lambda _, n=size: n, threads)
        assert [allowed for _, allowed in made] == [shares] * 3


def test_ordered_map_single_item_gets_all_threads():
    assert [r for _, r in parallel.ordered_map(lambda _, threads: threads, [1], lambda _: 1, 3)] == [3]
    assert [r for _, r in parallel.ordered_map(lambda _, threads: threads, [1, 2], lambda _: 1, 3)] == [1, 1]
    assert [
        r
        for _, r in parallel.ordered_map(lambda _, threads: threads, [1, 2], lambda _: parallel.MAX_IN_FLIGHT_BYTES, 3)
    ] == [
        3,
        3,
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 5])
def test_ordered_map_interrupt_does_not_wait_for_running_work(threads, count):
    """The caller's thread is free while items are worked on; what has begun hears of it, the rest does not begin."""
    begun, go_on, heard, before = threading.Event(), threading.Event(), threading.Event(), parallel.any_alive()
    seen: list[int] = []

    def look(number: int) -> None:
        seen.append(number)
        begun.set()
        go_on.wait(30)
        if parallel.is_cancelled():
            heard.set()

    def work(item: int, allowed: int | None) -> None:
        parallel.parallel_map(look, [item, item], 1)

    def interrupt() -> None:
        begun.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(parallel.ordered_map(work, range(count), lambda _: parallel.MAX_IN_FLIGHT_BYTES // 2, threads))
    assert not before and parallel.any_alive()
    go_on.set()
    assert heard.wait(30)
    deadline = time.monotonic() + 30
    while parallel.any_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not parallel.any_alive()
    assert len(seen) == len(set(seen)) <= threads  # neither the second half of an item nor another one


def test_wait_for_result_polls_for_interrupts(monkeypatch):
    """An interrupt that comes right before a wait begins would not end it; the next look does."""
    future: Future[int] = Future()
    looks: list[float] = []

    def wait(futures, seconds):
        looks.append(seconds)
        if len(looks) == 3:
            future.set_result(7)

    monkeypatch.setattr(parallel, "wait", wait)
    assert parallel.wait_for_result(future) == 7
    assert len(looks) == 3 and max(looks) < 0.5
