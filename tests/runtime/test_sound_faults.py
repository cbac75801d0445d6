"""Every point at which a worker, the codec or memory can fail: counted, retried or raised, never silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plain_cache import new_rows
from store_options import store_options

from kvmnn import KvmnnError
from kvmnn.runtime import LosslessRuntime, RestoreError, RuntimeConfig

CONFIG = store_options(front_n=2, hot_recent_tokens=8)
HEADS, HEAD_DIM, BLOCKS = 2, 8, 3
PROMPT = 4 + 16 * BLOCKS + 8


class Run:
    """Two layers, their rows, and the runtime that holds them."""

    def __init__(self, config: RuntimeConfig = CONFIG) -> None:
        self.rng = np.random.default_rng(5)
        self.runtime = LosslessRuntime(config, layers=2, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16")
        self.inner: Any = self.runtime._runtime
        self.rows = [np.empty((2, HEADS, 0, HEAD_DIM), "<f2") for _ in range(2)]

    def step(self, tokens: int = 1) -> None:
        for layer in range(2):
            self.call(layer, tokens)
        self.runtime.end_step()

    def call(self, layer: int, tokens: int = 1) -> None:
        new = new_rows(self.rng, HEADS, tokens, HEAD_DIM, "<f2", "smooth")
        keys, values = self.runtime.begin_call(layer, new[0], new[1])
        self.rows[layer] = np.concatenate([self.rows[layer], new], axis=2)
        assert keys.tobytes() == self.rows[layer][0].tobytes()
        assert values.tobytes() == self.rows[layer][1].tobytes()
        self.runtime.end_call()

    def stored(self) -> int:
        return sum(layer.blocks for layer in self.runtime.collect_metrics().layers)

    @property
    def fallbacks(self) -> int:
        return self.runtime.collect_metrics().h2o_lossless_fallback_count

    def check(self) -> None:
        for layer in range(2):
            cache = self.runtime.read_layer(layer)
            assert np.stack([cache.keys, cache.values]).tobytes() == self.rows[layer].tobytes()

    def stored_pieces(self, layer: int = 0) -> list[Any]:
        return [piece for piece in self.inner._layers[layer].rows.segments if piece.state == "stored"]


@contextmanager
def failing(codec: Any, name: str, error: BaseException, times: int = 1 << 30) -> Iterator[None]:
    """`codec.name` raises `error` for its first calls."""
    working: Callable[..., Any] = getattr(codec, name)
    left = [times]

    def call(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return working(*arguments)

    setattr(codec, name, call)
    try:
        yield
    finally:
        delattr(codec, name)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", ["encode", "to_verified_frames"])
@pytest.mark.parametrize("error", [KvmnnError("no"), MemoryError(), RuntimeError("worker")])
def test_strict_failed_encoding_is_retried(threads: int, name: str, error: Exception) -> None:
    run = Run(replace(CONFIG, async_threads=threads))
    with run.runtime:
        run.step(PROMPT)
        with failing(run.inner._codec, name, error, times=2):
            run.step()
            run.runtime.wait()
        run.step()
        run.runtime.wait()
        assert run.fallbacks == 2
        assert run.stored() == 2 * BLOCKS
        run.step()
        run.check()


@pytest.mark.parametrize("threads", [0, 2])
def test_strict_always_failing_encoding_stays_raw(threads: int) -> None:
    run = Run(replace(CONFIG, async_threads=threads))
    with run.runtime:
        run.step(PROMPT)
        with failing(run.inner._codec, "encode", RuntimeError("worker")):
            for _ in range(10):
                run.step()
                run.runtime.wait()
        assert run.stored() == 0
        assert run.fallbacks == 3 * 2 * BLOCKS
        run.check()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_strict_ended_worker_is_counted(error: BaseException) -> None:
    run = Run(replace(CONFIG, async_threads=2))
    with run.runtime:
        run.step(PROMPT)
        with failing(run.inner._codec, "encode", error, times=1):
            run.step()
            run.runtime.wait()
        for _ in range(3):
            run.step()
            run.runtime.wait()
        assert (run.fallbacks, run.stored()) == (1, 2 * BLOCKS)
        run.check()


def test_strict_shut_down_pool_is_replaced_by_calling_thread() -> None:
    run = Run(replace(CONFIG, async_threads=1))
    with run.runtime:
        run.step(PROMPT)
        run.inner._workers.submit(int).result()
        run.inner._workers._executor.shutdown()
        for _ in range(3):
            run.step()
        run.runtime.wait()
        assert (run.fallbacks, run.stored()) == (0, 2 * BLOCKS)
        run.check()


def test_strict_wrong_frame_never_replaces_rows() -> None:
    run = Run()
    run.step(PROMPT)
    codec = run.inner._codec
    working = codec.encode
    codec.encode = lambda rows: working(rows[::-1])  # K and V swapped
    for _ in range(5):
        run.step()
    assert run.stored() == 0 and run.fallbacks == 3 * 2 * BLOCKS
    run.check()


@pytest.mark.parametrize("part", ["key_frame", "value_frame", "checksum"])
@pytest.mark.parametrize("threads", [0, 2])
def test_strict_damaged_frame_error_names_its_place(part: str, threads: int) -> None:
    run = Run(replace(CONFIG, async_threads=threads))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        piece = run.stored_pieces()[1]
        right = piece.frames
        wrong = getattr(right, part)
        if part != "checksum":
            wrong = bytes([wrong[0], wrong[1]]) + bytes([wrong[2] ^ 1]) + wrong[3:]
            wrong = wrong[:-1] + bytes([wrong[-1] ^ 16])
        else:
            wrong ^= 1
        piece.frames = replace(right, **{part: wrong})
        run.inner._restorer.reset()
        with pytest.raises(RestoreError, match="layer 0: tokens 20 to 36 cannot be restored: its frames") as caught:
            run.call(0)
        assert (caught.value.layer, caught.value.start, caught.value.count) == (0, 20, 16)
        with pytest.raises(RestoreError):
            run.runtime.read_layer(0)
        with pytest.raises(RestoreError):
            run.runtime.erase(0, 25)
        piece.frames = right  # nothing has changed: with the right bytes the run goes on
        run.step()
        run.check()


def test_strict_hash_mismatch_is_an_error() -> None:
    run = Run(replace(CONFIG, verify="hash"))
    run.step(PROMPT)
    codec = run.inner._codec
    working = codec.encode
    codec.encode = lambda rows: replace(working(rows[::-1]), raw_hash=working(rows).raw_hash)
    with pytest.raises(RestoreError, match="decode to other rows than they were made of"):
        for _ in range(3):
            run.step()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x")])
def test_strict_failed_restore_changes_nothing(threads: int, error: Exception) -> None:
    run = Run(replace(CONFIG, async_threads=threads))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        with failing(run.inner._codec, "decode_into", error), pytest.raises(RestoreError, match=type(error).__name__):
            run.call(0)
        run.step()
        run.check()


def test_strict_failed_prefetch_is_retried() -> None:
    run = Run(replace(CONFIG, async_threads=1))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        codec, pieces = run.inner._codec, run.stored_pieces(1)
        with failing(codec, "decode_into", MemoryError(), times=len(pieces)):
            run.inner._restorer.prefetch(pieces)
            for _, future in list(run.inner._restorer._prefetches.values()):
                future.exception()
        run.step()
        run.check()


def test_strict_memory_error_in_append_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step(PROMPT)

    def none_left(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvmnn.runtime.strict.layer_storage.allocate", none_left)
        with pytest.raises(MemoryError):
            run.call(0, 5000)
    run.step()
    run.check()


@pytest.mark.parametrize("place", ["layer_storage.copy_rows", "encoder.partial"])
def test_strict_memory_error_in_submit_is_retried(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    run = Run()
    run.step(PROMPT)

    def none_left(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(f"kvmnn.runtime.strict.{place}", none_left)
        for layer in range(2):
            with pytest.raises(MemoryError):
                run.call(layer)
    run.runtime.end_step()
    run.check()
    run.step()
    run.step()
    assert run.stored() == 2 * BLOCKS
    run.check()


@pytest.mark.parametrize("drop", ["erase", "evict"])
def test_strict_memory_error_in_erase_changes_nothing(monkeypatch: pytest.MonkeyPatch, drop: str) -> None:
    run = Run()
    run.step(PROMPT)
    run.step()
    calls = {"erase": lambda: run.runtime.erase(10, 30), "evict": lambda: run.runtime.evict(0, [(0, 10), (30, 20)])}

    def none_left(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvmnn.runtime.strict.layer_storage.allocate", none_left)
        with pytest.raises(MemoryError):
            calls[drop]()
    run.step()
    run.check()


def test_strict_half_failed_call_poisons_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step(PROMPT)

    def broken(*arguments: Any) -> None:
        raise MemoryError("here")

    with monkeypatch.context() as patch:
        patch.setattr(type(run.inner._layers[0].rows), "append", broken)
        with pytest.raises(MemoryError):
            run.call(0)
    for call in (lambda: run.call(0), lambda: run.runtime.read_layer(0), run.runtime.end_step, run.runtime.end_call):
        with pytest.raises(KvmnnError, match=r"failed half-way \(MemoryError: here\): expected reset"):
            call()
    run.runtime.reset()
    run.rows = [rows[:, :, :0] for rows in run.rows]
    run.step(PROMPT)
    run.step()
    run.check()


def test_strict_calls_out_of_order_are_refused() -> None:
    run = Run()
    run.step(PROMPT)
    new = new_rows(run.rng, HEADS, 1, HEAD_DIM, "<f2", "smooth")
    begin = run.runtime.begin_call
    for layer, keys, values, message in (
        (2, new[0], new[1], "layer is 2"),
        (0, new[0][:1], new[1], "keys have shape"),
        (0, new[0], new[1][:, :, :3], "values have shape"),
        (0, new[0], np.concatenate([new[1], new[1]], axis=1), "values have shape"),
    ):
        with pytest.raises(KvmnnError, match=message):
            begin(layer, keys, values)
    with pytest.raises(TypeError, match="keys are float32"):
        begin(0, new[0].astype("<f4"), new[1])
    for call, message in (
        (run.runtime.end_call, "no call was begun"),
        (run.runtime.end_step, "layers 0, 1 were not called"),
        (lambda: run.runtime.erase(5, 5), "cannot erase"),
        (lambda: run.runtime.erase(0, 1000), "cannot erase"),
    ):
        with pytest.raises(KvmnnError, match=message):
            call()
    run.call(0)
    with pytest.raises(KvmnnError, match="layer 0 was called twice"):
        begin(0, new[0], new[1])
    with pytest.raises(KvmnnError, match="erase: expected between two steps"):
        run.runtime.erase(0, 1)
    with pytest.raises(KvmnnError, match="gets 2 tokens, the layers before it 1"):
        begin(1, *new_rows(run.rng, HEADS, 2, HEAD_DIM, "<f2", "smooth"))
    run.call(1)
    run.runtime.end_step()
    run.step()
    run.check()


def test_strict_results_of_earlier_request_are_dropped() -> None:
    run = Run(replace(CONFIG, async_threads=2))
    with run.runtime:
        for _ in range(20):
            run.step(PROMPT)
            run.step()
            run.runtime.reset()
            run.rows = [rows[:, :, :0] for rows in run.rows]
        run.step(10)
        run.runtime.wait()
        assert run.runtime.collect_metrics().h2o_lossless_raw_bytes == 0
        run.check()


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 12])
def test_strict_copy_layers_reads_several_layers(threads: int, cache_bytes: int) -> None:
    run = Run(replace(CONFIG, async_threads=threads, decode_cache_bytes=cache_bytes))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        before = run.runtime.collect_metrics()
        for _ in range(3):
            for cache, rows in zip(run.runtime.read_layers([1, 0]), run.rows[::-1], strict=True):
                assert np.stack([cache.keys, cache.values]).tobytes() == rows.tobytes()
        after = run.runtime.collect_metrics()
        asked = 3 * 2 * BLOCKS
        counts = [m.h2o_lossless_decode_cache_hit + m.h2o_lossless_decode_cache_miss for m in (before, after)]
        assert counts[1] - counts[0] == asked
        assert after.decompress.count - before.decompress.count + after.h2o_lossless_decode_cache_hit == asked
        with pytest.raises(KvmnnError, match="layer is 2"):
            run.runtime.read_layers([0, 2])


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x")])
def test_strict_copy_layers_of_different_lengths_is_refused(threads: int, error: Exception) -> None:
    run = Run(replace(CONFIG, async_threads=threads))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        with (
            failing(run.inner._codec, "decode_into", error),
            pytest.raises(RestoreError, match="layer 0: tokens 4 to 20"),
        ):
            run.runtime.read_layers([0, 1])
        run.check()


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(1)])
def test_strict_failed_thread_reads_are_repeated_by_the_caller(error: BaseException) -> None:
    run = Run(replace(CONFIG, async_threads=2))
    with run.runtime:
        run.step(PROMPT)
        run.runtime.flush()
        codec, failed = run.inner._codec, threading.Event()
        working = codec.decode_into

        def decode(*arguments: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                failed.set()
                raise error
            failed.wait(10)  # a thread takes a piece before this one goes on
            working(*arguments)

        codec.decode_into = decode
        caches = run.runtime.read_layers([0, 1])
        del codec.decode_into
        assert failed.is_set()
        for cache, rows in zip(caches, run.rows, strict=True):
            assert np.stack([cache.keys, cache.values]).tobytes() == rows.tobytes()
