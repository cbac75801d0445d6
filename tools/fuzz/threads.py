"""Frames encoded and decoded by many threads at once, alone and in the lossless runtime.

What tools/fuzz/threads.sh runs under the thread sanitizer.

With --race two threads decode into one array, which is the caller's own race: the sanitizer has to report it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np

import kvmnn
from kvmnn.frames import tuning
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

RNG = np.random.default_rng(0)
LARGE = np.cumsum(RNG.normal(size=(1 << 19) + 5)).astype(np.float16)
SMALL = [np.cumsum(RNG.normal(size=n)).astype(kind) for n in (1, 100, 5000, 30_000) for kind in ("f2", "f4")]
FRAMES = kvmnn.encode_many(SMALL, threads=4)


def one_frame_on_many_threads() -> None:
    alone = kvmnn.encode(LARGE, threads=1)
    for threads in (2, 4, 8):
        assert kvmnn.encode(LARGE, threads=threads) == alone
        assert kvmnn.decode(alone, threads=threads).tobytes() == LARGE.tobytes()


def long_frames() -> None:
    """Of many pieces, most of them ready before those in front of them."""
    tuning.SEGMENT_LANE_BYTES, tuning.FAST_SEGMENT_BYTES = 20_000, 60_000
    noise = RNG.normal(size=LARGE.size).astype(np.float16)
    for values in (LARGE, noise, noise.astype(np.float32), np.tile(noise[:50_000], 8)):
        for effort in ("balanced", "fast"):
            alone = kvmnn.encode(values, effort=effort, threads=1)
            for threads in (2, 8, 8):
                assert kvmnn.encode(values, effort=effort, threads=threads) == alone
                found = kvmnn.decode(alone, dtype="fp32" if values.itemsize == 4 else "fp16", threads=threads)
                assert found.tobytes() == values.tobytes()


def many_frames() -> None:
    for array, frame in zip(SMALL, FRAMES, strict=True):
        found = kvmnn.decode_many(FRAMES, threads=4)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in SMALL]
        assert kvmnn.encode(array) == frame
        try:
            kvmnn.decode(frame[:-1])
        except kvmnn.FrameError:
            continue
        raise AssertionError("a cut frame was decoded")


def runtime_with_workers() -> None:
    """Encoding, checking and reading ahead by 4 threads, while calls read, drop tokens, and begin again."""
    keys = {"enable": True, "runtime_enable": True, "codec": "gear_delta", "runtime_mode": "store", "front_n": 4}
    keys |= {"block_tokens": 16, "hot_recent_tokens": 8, "hot_sink_tokens": 4, "async_threads": 4, "max_queue": 6}
    document = {f"kv_lossless_{name}": value for name, value in keys.items()}
    config = RuntimeConfig.from_engine(document | {"kv_h2o_trigger_min_tokens": 1, "kv_h2o_update_interval": 1})
    rows = (np.linspace(0.5, 1, 16) + np.arange(400)[:, None] % 3 / 64).astype(np.float16)[None].repeat(2, 0)
    with LosslessRuntime(config, layers=4, kv_heads=2, head_dim=16, dtype="fp16") as runtime:
        for request in range(3):
            end = 0
            for count in (150, *[1] * 60):
                end += count
                for layer in range(4):
                    found, _ = runtime.begin_call(layer, rows[:, end - count : end], rows[:, end - count : end])
                    assert found.tobytes() == rows[:, :end].tobytes()
                    runtime.end_call()
                runtime.end_step()
            runtime.evict(0, [(0, 40), (70, end - 70)])
            assert runtime.read_layer(0).keys[:, 40:].tobytes() == rows[:, 70:end].tobytes()
            metrics = runtime.collect_metrics()
            assert metrics.h2o_lossless_fallback_count == 0 and metrics.restores_ahead > 0
            if request < 2:
                runtime.reset()
        runtime.flush()


def race() -> None:
    for _ in range(20):
        kvmnn.decode(FRAMES[-2], out=SHARED, threads=1)


SHARED = np.empty_like(SMALL[-2])


def on_threads(work: Callable[[], None], count: int) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    if "--help" in sys.argv[1:]:
        print(f"usage: {sys.argv[0]} [--race]\n{__doc__}")
    elif "--race" in sys.argv[1:]:
        on_threads(race, 2)
    else:
        one_frame_on_many_threads()
        long_frames()
        on_threads(many_frames, 8)
        runtime_with_workers()
        on_threads(runtime_with_workers, 2)
        print(f"{kvmnn.frames._decoder.__file__}: done")
