"""Threads: the same bytes on any number of them, no GIL in the kernels, and a pool that survives a fork."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from codec_samples import STRIDE, kv_like

import kvmnn
from kvmnn import FrameError, KvmnnError
from kvmnn._util import parallel

LARGE = {dtype: kv_like((3 << 20) // STRIDE[dtype] + 5, dtype) for dtype in ("fp16", "fp32")}


@pytest.mark.parametrize("dtype", sorted(LARGE))
@pytest.mark.parametrize("effort", ["exact", "balanced", "fast"])
def test_encode_any_thread_count_gives_the_same_frame(dtype: str, effort: str) -> None:
    data = LARGE[dtype]
    options = {"dtype": dtype, "effort": effort}
    one = kvmnn.encode(data, threads=1, **options)
    for threads in (None, 2, 3, 8):
        assert kvmnn.encode(data, threads=threads, **options) == one
        assert kvmnn.decode(one, threads=threads).tobytes() == data
    assert kvmnn.decode(one, threads=1).tobytes() == data


@pytest.mark.parametrize(("processors", "threads"), [(5, 5), (None, 1)])
def test_cpu_count_without_affinity_uses_all_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int | None, threads: int
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    assert parallel.cpu_count() == parallel.resolve_threads(None) == threads


def test_encode_fewer_candidates_than_threads_gives_the_same_frame() -> None:
    for options in ({"predictors": "raw"}, {"predictors": "raw", "hi_predictors": "xor_seq"}, {"codecs": ("rle",)}):
        one = kvmnn.encode(LARGE["fp16"], dtype="fp16", threads=1, **options)
        assert kvmnn.encode(LARGE["fp16"], dtype="fp16", threads=6, **options) == one


def test_encode_max_any_thread_count_gives_the_same_frame() -> None:
    data = LARGE["fp16"][:40_000]
    frames = {kvmnn.encode(data, dtype="fp16", effort="max", threads=n) for n in (1, 2, 5)}
    assert len(frames) == 1


def test_encode_tied_predictors_do_not_depend_on_threads() -> None:
    """Constant lanes: all predictors but raw, and raw itself, come out equally small."""
    for data in (bytes(3 << 20), b"\xff\x00" * (3 << 19), b"\x01\x01" * (3 << 19)):
        one = kvmnn.encode(data, dtype="fp16", threads=1)
        assert all(kvmnn.encode(data, dtype="fp16", threads=4) == one for _ in range(3))


@pytest.mark.parametrize("words", [64, 20_000, 1 << 20])
def test_decode_one_buffer_from_eight_threads_is_right(words: int) -> None:
    data = kv_like(words)
    frame = bytearray(kvmnn.encode(data, dtype="fp16"))
    bad = bytes(frame[:-1])
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait()
        good = True
        for turn in range(4):
            good &= kvmnn.decode(frame, threads=1 + (number + turn) % 2).tobytes() == data
            good &= kvmnn.inspect(frame, entropy=turn == 0).words == words
            with pytest.raises(FrameError):
                kvmnn.decode(bad)
        return good

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, range(8)))


def test_encode_one_array_from_eight_threads_gives_the_same_frame() -> None:
    array = np.frombuffer(kv_like(30_000), np.float16)
    frame = kvmnn.encode(array)
    with ThreadPoolExecutor(8) as executor:
        assert set(executor.map(lambda _: kvmnn.encode(array), range(32))) == {frame}


def test_encode_many_nested_calls_do_not_deadlock() -> None:
    """Every worker of the pool needs workers of the pool: nobody may wait for ever."""
    arrays = [np.frombuffer(LARGE["fp16"], np.float16)] * 6

    def nested(_: int) -> list[bytes]:
        return kvmnn.encode_many(arrays[:2], predictors="raw", effort="fast", threads=4)

    results = parallel.parallel_map(nested, range(6), 6)
    assert len({frame for frames in results for frame in frames}) == 1


@pytest.mark.parametrize("name", ["encode", "decode", "fnv1a64"])
def test_encode_and_decode_release_the_gil(name: str) -> None:
    data = kv_like(4 << 20)
    frame = kvmnn.encode(data, dtype="fp16", effort="fast")
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: kvmnn.encode(data, dtype="fp16", threads=1),
        "decode": lambda: [kvmnn.decode(frame, threads=1) for _ in range(8)],
        "fnv1a64": lambda: kvmnn.fnv1a64(data * 4),
    }
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        start = time.perf_counter()
        calls[name]()
        end = time.perf_counter()
    finally:
        stop.set()
        ticker.join()
    inside = [at for at in ticks if start + 0.1 * (end - start) < at < end - 0.1 * (end - start)]
    assert len(inside) >= 3, f"{len(inside)} ticks in {end - start:.3f} s"


# -- map_pulled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_parallel_map_keeps_order(threads: int) -> None:
    def slow(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert parallel.parallel_map(slow, range(20), threads) == [i * i for i in range(20)]
    assert parallel.parallel_map(slow, [], threads) == []


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_parallel_map_first_failure_stops_the_rest(threads: int) -> None:
    done = []

    def work(item: int) -> None:
        if item == 3:
            raise KvmnnError(f"item {item}")
        time.sleep(0.001)
        done.append(item)

    with pytest.raises(KvmnnError, match="item 3"):
        parallel.parallel_map(work, range(1000), threads)
    assert len(done) < 100
    assert parallel.parallel_map(str, range(3), threads) == ["0", "1", "2"]


def test_resolve_threads_defaults_to_processors() -> None:
    assert parallel.resolve_threads(None) == parallel.cpu_count() >= 1
    assert parallel.resolve_threads(5) == 5


# -- fork -------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading
import numpy as np
import kvmnn
data = np.frombuffer(np.random.default_rng(1).integers(0, 60, 3 << 20, np.uint8), np.float16)
frame = kvmnn.encode(data, predictors="raw", threads=4)
stop = threading.Event()
def busy():
    while not stop.is_set():
        kvmnn.encode(data, predictors="raw", threads=4)
background = [threading.Thread(target=busy) for _ in range(2)]
for thread in background:
    thread.start()
failed = 0
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        same = kvmnn.encode(data, predictors="raw", threads=4) == frame
        same &= kvmnn.decode(frame, threads=4).tobytes() == data.tobytes()
        os._exit(0 if same else 1)
    failed += os.waitpid(pid, 0)[1] != 0
stop.set()
for thread in background:
    thread.join()
assert kvmnn.encode(data, predictors="raw", threads=4) == frame
sys.exit(failed)
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork on this system")
def test_pool_forked_child_gets_its_own_pool() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", FORK], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_stop_idle_threads_leaves_none_and_later_calls_start_their_own() -> None:
    def list_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvmnn_")]

    assert parallel.parallel_map(abs, [-1, -2, -3], 2) == [1, 2, 3]
    assert list_threads()
    parallel.stop_idle_threads()
    assert not list_threads()
    assert parallel.parallel_map(abs, [-1, -2, -3], 2) == [1, 2, 3]
