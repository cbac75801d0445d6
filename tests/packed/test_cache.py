"""PackedCache: growth and plans as the engine does them, against a slow model."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_model import Cache, Numbers

from kvmnn import CacheDroppedWarning, KVMeta, KvmnnError, LimitError, PackedCache, PackLayout
from kvmnn.packed.compaction import check_reserve

WORDS = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}


def plain(layout: PackLayout, tokens: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (layout.kv_heads, tokens, layout.head_dim)
    words = [rng.integers(0, 1 << 8 * layout.itemsize, shape, np.uint64) for _ in "kv"]
    return [part.astype(f"<u{layout.itemsize}").view(WORDS[layout.dtype]) for part in words]


def state(cache: PackedCache) -> tuple[Any, ...]:
    return cache.past_length, cache.capacity, cache.key_buffer.tobytes(), cache.value_buffer.tobytes()


def filled(tokens: int, **options: Any) -> PackedCache:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=6)
    cache = PackedCache(layout, **options)
    cache.append(*plain(layout, tokens))
    return cache


# -- against the model ------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn, dialect: str) -> tuple[PackLayout, dict[str, Any], list[tuple[Any, ...]]]:
    layout = PackLayout(
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 3, 7, 8, 12, 16])),
        dtype=draw(st.sampled_from(["fp16", "fp32"])),
        lP=draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
        hP=draw(st.sampled_from([1, 4, 5, 8, 16, 64])),
        flash_block=draw(st.sampled_from([64, 64, 16, None, 6])),
    )
    options = {"expand_chunk": draw(st.sampled_from([0, 4, 64])), "fill_byte": draw(st.sampled_from([0, 0xA5]))}
    steps: list[tuple[Any, ...]] = []
    past = 0
    for number in range(draw(st.integers(1, 5))):
        add = draw(st.integers(1, 60))
        if number == 0:
            steps.append((0, [], add))
            past = add
            continue
        remove = draw(st.integers(0, past + (5 if dialect == "fork" else 0)))
        pairs, at = [], 0
        for _ in range(draw(st.integers(0, 4))):
            begin = draw(st.integers(at, max(at, remove)))
            size = draw(st.integers(1, max(1, remove - begin)))
            pairs.append((begin, size))
            at = begin + size
        if dialect == "fork" and draw(st.integers(0, 4)) == 0:
            pairs = draw(st.permutations(pairs)) + draw(st.sampled_from([[], [(0, 0)], [(-1, 2)], [(0, 1)]]))
        if dialect == "upstream":
            pairs = [(b, s) for b, s in draw(st.permutations(pairs)) if b + s <= remove]
        steps.append((remove, pairs, add))
        past = max(0, past - remove + sum(size for _, size in pairs) + add)
    return layout, options, steps


def replay(layout: PackLayout, options: dict[str, Any], steps: list[tuple[Any, ...]], dialect: str) -> None:
    cache = PackedCache(layout, dialect=dialect, on_invalid="engine", threads=2, **options)
    n = Numbers(layout.kv_heads, layout.head_dim, layout.itemsize, layout.lP, layout.hP, layout.flash_block)
    slow = Cache(n, options["expand_chunk"], options["fill_byte"], dialect)
    for seed, (wish, pairs, add) in enumerate(steps):
        remove = wish if dialect == "fork" else min(wish, cache.past_length)
        pairs = [pair for pair in pairs if dialect == "fork" or sum(pair) <= remove]
        rows = plain(layout, add, seed)
        words = [part.view(f"<u{layout.itemsize}") for part in rows]
        fresh = remove == cache.past_length and (not pairs or dialect == "upstream")
        if remove > cache.past_length and add > room_after(cache, remove, pairs, add, options["expand_chunk"]):
            before = state(cache)
            with pytest.raises(KvmnnError, match="the engine would make room for"):
                cache.append(*rows, remove=remove, reserve=pairs)
            assert state(cache) == before
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheDroppedWarning)
            messages = cache.append(*rows, remove=remove, reserve=pairs)
        if fresh:
            slow.alloc(add)
        else:
            assert len(messages) == slow.realloc(remove, pairs, add)
        slow.push(*words)
        assert (cache.past_length, cache.capacity) == (slow.past, slow.capacity)
        assert cache.key_buffer.tobytes() == slow.keys.tobytes()
        assert cache.value_buffer.tobytes() == slow.values.tobytes()
        for array, expected in zip(cache.to_arrays(), slow.arrays(), strict=True):
            assert array.tobytes() == expected.tobytes()


def room_after(cache: PackedCache, remove: int, pairs: list[tuple[int, int]], add: int, expand: int) -> int:
    """What the fork makes room for where `remove` is more than there is: everything goes, yet it counts on."""
    need = cache.past_length + add - remove
    if need >= 0 and all(size > 0 for _, size in pairs):
        need += sum(size for _, size in pairs)
    return need + expand if need > cache.capacity else cache.capacity


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(histories("fork"))
def test_packed_cache_fork_dialect_equals_the_model(history: tuple[Any, ...]) -> None:
    replay(*history, "fork")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(histories("upstream"))
def test_packed_cache_upstream_dialect_equals_the_model(history: tuple[Any, ...]) -> None:
    """Pairs in any order, overlapping ones too: upstream copies them one after the other, in place."""
    replay(*history, "upstream")


@settings(max_examples=60, deadline=None)
@given(histories("fork"), st.integers(1, 3))
def test_packed_cache_accepts_exactly_the_plans_the_fork_applies_fully(history: tuple[Any, ...], threads: int) -> None:
    layout, options, steps = history
    strict = PackedCache(layout, threads=threads, **options)
    loose = PackedCache(layout, on_invalid="engine", **options)
    for seed, (remove, pairs, add) in enumerate(steps):
        before = state(strict)
        rows = plain(layout, add, seed)
        try:
            assert strict.append(*rows, remove=remove, reserve=pairs) == ()
        except KvmnnError:
            assert state(strict) == before
            probe = PackedCache.from_buffers(
                layout, before[2], before[3], before[0], capacity=before[1], on_invalid="engine", **options
            )
            assert probe.realloc(remove, pairs, add) != ()
            return
        assert loose.append(*rows, remove=remove, reserve=pairs) == ()
        assert state(strict) == state(loose)


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remove", "reserve", "message"),
    [
        (41, [], "expected at most the 40 live tokens"),
        (2**40, [], "expected at most the 40 live tokens"),
        (-1, [], "remove is -1"),
        (20, [(0, 5), (4, 3)], "where the pair before it ends"),
        (20, [(10, 3), (0, 4)], "where the pair before it ends"),
        (20, [(18, 4)], "the window's 20 tokens"),
        (20, [(-1, 4)], "expected begin at 0"),
        (20, [(0, 0)], "size of at least 1"),
        (20, [(0, -3)], "size of at least 1"),
        (20, [(0, 4), (6, 2), (30, 9)], r"reserve\[2\] is \(30, 9\)"),
        (20, [(2**31 - 1, 1)], "the window's 20 tokens"),
        (20, [(2**31 - 1, 2**31 - 1)], "the window's 20 tokens"),
        (20, [(2**31, 1)], "begin of reserve"),
        (20, [(0, 2**31)], "size of reserve"),
        (20, [(-(2**31) - 1, 1)], "begin of reserve"),
        (20, [(2**64, 1)], "begin of reserve"),
        (20, [(1, 2, 3)], "has 3 numbers"),
    ],
)
def test_packed_cache_refused_plan_changes_nothing(remove: int, reserve: list[Any], message: str) -> None:
    cache = filled(40)
    before = state(cache)
    with pytest.raises(KvmnnError, match=message):
        cache.realloc(remove, reserve, 1)
    with pytest.raises(KvmnnError, match=message):
        cache.append(*plain(cache.layout, 1), remove=remove, reserve=reserve)
    assert state(cache) == before


def test_packed_cache_non_integer_arguments_are_refused() -> None:
    cache = filled(10)
    for remove, reserve in ((1.0, []), (True, []), ("1", []), (5, [(0.0, 1)]), (5, [(0, None)])):
        with pytest.raises(TypeError, match="must be an integer"):
            cache.realloc(remove, reserve)
    with pytest.raises(TypeError, match="PackLayout"):
        PackedCache("x86-avx2")


@pytest.mark.parametrize(
    ("remove", "reserve", "add", "errors", "past"),
    [
        (20, [(0, 5), (4, 3)], 1, 1, 20),
        (20, [(0, 4), (30, 9)], 1, 1, 20),
        (20, [(0, 0), (5, 3)], 1, 1, 20),
        (45, [], 1, 2, 0),
        (42, [(0, 2)], 5, 1, 0),
        (2**63, [], 0, 1, 0),
    ],
)
def test_packed_cache_invalid_plan_gives_the_outcome_of_the_fork(
    remove: int, reserve: list[Any], add: int, errors: int, past: int
) -> None:
    cache = filled(40, on_invalid="engine")
    assert len(cache.realloc(remove, reserve, add)) == errors
    assert cache.past_length == past


def test_packed_cache_pairs_before_invalid_pair_are_copied() -> None:
    cache = filled(40, on_invalid="engine")
    rows = cache.to_arrays()
    cache.realloc(40, [(10, 5), (12, 3)])
    assert cache.past_length == 0
    moved = cache.layout.gather(cache.key_buffer, cache.value_buffer, 0, 5, past_length=5, capacity=cache.capacity)
    assert all(np.array_equal(a, b[:, 10:15], equal_nan=True) for a, b in zip(moved, rows, strict=True))


def test_packed_cache_capacity_above_32_bits_is_refused() -> None:
    cache = filled(10)
    before = state(cache)
    with pytest.raises(LimitError, match="counts in 32 bits"):
        cache.realloc(add=2**31)
    engine = filled(10, on_invalid="engine")
    with pytest.raises(LimitError, match="counts in 32 bits"):
        engine.realloc(10, [(0, 2**31 - 1), (5, 2**31 - 1)])
    assert state(cache) == state(engine) == before


def test_packed_cache_push_beyond_capacity_is_refused() -> None:
    cache = filled(10)
    with pytest.raises(KvmnnError, match="no room for 65 tokens after 10"):
        cache.push(*plain(cache.layout, 65))
    cache.push(*plain(cache.layout, 64))
    assert (cache.past_length, cache.capacity) == (74, 74)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (3, 3), (5, 3), (0, 41), (40, 0), (41, 0)])
def test_packed_cache_erase_outside_range_is_refused(begin: int, end: int) -> None:
    cache = filled(40)
    with pytest.raises(KvmnnError):
        cache.erase(begin, end)
    assert cache.past_length == 40


def test_packed_cache_erase_removes_tokens() -> None:
    for begin, end, kept in ((5, 9, [*range(5), *range(9, 40)]), (30, 0, range(30)), (30, 40, range(30)), (0, 0, [])):
        cache = filled(40)
        rows = cache.to_arrays()
        cache.erase(begin, end)
        assert len(cache) == len(kept)
        for part, whole in zip(cache.to_arrays(), rows, strict=True):
            assert part.tobytes() == whole[:, list(kept)].tobytes()


def test_packed_cache_emptied_cache_is_reallocated() -> None:
    cache = filled(200)
    cache.erase(0)
    assert (cache.past_length, cache.capacity) == (0, 264)
    cache.append(*plain(cache.layout, 3))
    assert (cache.past_length, cache.capacity) == (3, 67)


def test_packed_cache_upstream_drops_where_fork_compacts() -> None:
    fork, upstream = filled(80), filled(80, dialect="upstream")
    row = plain(fork.layout, 1)
    fork.append(*row, remove=80, reserve=[(0, 32), (64, 16)])
    with pytest.warns(CacheDroppedWarning, match="drops all 80 tokens"):
        upstream.append(*row, remove=80, reserve=[(0, 32), (64, 16)])
    assert (fork.past_length, fork.capacity) == (49, 144)
    assert (upstream.past_length, upstream.capacity) == (1, 65)
    meta = KVMeta(80, dialect="upstream")
    meta.set_info(1, 80, [(0, 32), (64, 16)])
    assert meta.sync() == 49


def test_packed_cache_upstream_uses_the_shared_count() -> None:
    """After the drop the counts say 49 where there is one token; 100 more are room for 149."""
    cache = filled(1, dialect="upstream")
    meta = KVMeta(49, dialect="upstream")
    cache.step(meta, *plain(cache.layout, 100))
    assert (cache.past_length, cache.capacity, meta.sync()) == (101, 149 + 64, 149)


@pytest.mark.parametrize(
    ("remove", "reserve", "message"),
    [
        (41, [], "count below zero"),
        (30, [(1000, 4)], "outside its buffers"),
        (30, [(-20, 4)], "outside its buffers"),
        (40, [(0, 4)], None),
        (39, [(0, -5)], "below zero"),
    ],
)
def test_packed_cache_upstream_stays_within_its_buffers(remove: int, reserve: list[Any], message: str | None) -> None:
    cache = filled(40, dialect="upstream", on_invalid="engine")
    before = state(cache)
    if message is None:
        with pytest.warns(CacheDroppedWarning):
            cache.realloc(remove, reserve)
        assert cache.capacity == 0
        return
    with pytest.raises(KvmnnError, match=message):
        cache.realloc(remove, reserve)
    assert state(cache) == before


@pytest.mark.parametrize(
    ("begin", "size", "fits"),
    [(-10, 4, True), (-11, 4, False), (90, 4, True), (91, 4, False), (0, 94, True)],
)
def test_packed_cache_upstream_copies_up_to_buffer_edge(begin: int, size: int, fits: bool) -> None:
    """40 tokens, the last 30 of which are the window, in room for 104: a pair may reach from 10 before to 94 after."""
    cache = filled(40, dialect="upstream", on_invalid="engine")
    if not fits:
        with pytest.raises(KvmnnError, match="outside its buffers"):
            cache.realloc(30, [(begin, size)])
        return
    rows = cache.layout.gather(cache.key_buffer, cache.value_buffer, 10 + begin, size, past_length=104, capacity=104)
    cache.realloc(30, [(begin, size)])
    assert cache.past_length == 10 + size
    for part, expected in zip(cache.to_arrays(), rows, strict=True):
        assert part[:, 10:].tobytes() == expected.tobytes()


def test_packed_cache_upstream_checks_plans_by_default() -> None:
    cache = filled(40, dialect="upstream")
    with pytest.raises(KvmnnError, match="where the pair before it ends"):
        cache.realloc(30, [(10, 5), (0, 5)])
    check_reserve(40, 30, ((0, 5), (5, 25)), is_quantized=False)


def test_packed_cache_from_buffers_equals_original() -> None:
    cache = filled(40)
    again = PackedCache.from_buffers(cache.layout, cache.key_buffer, cache.value_buffer, 40, capacity=104)
    assert state(again) == state(cache)
    again.realloc(40, [(4, 30)])
    assert state(again) != state(cache)
    keys, values = bytearray(cache.key_buffer), bytearray(cache.value_buffer)
    inside = PackedCache.from_buffers(cache.layout, keys, values, 40, capacity=104, copy=False)
    inside.realloc(40, [(4, 30)])
    assert (bytes(keys), bytes(values)) == state(again)[2:]
    assert PackedCache.from_buffers(cache.layout, keys, values, 30).capacity == 104
    for past, message in ((105, "past is 105"), (-1, "past is -1")):
        with pytest.raises(KvmnnError, match=message):
            PackedCache.from_buffers(cache.layout, keys, values, past, capacity=104)
    with pytest.raises(KvmnnError, match="writable"):
        PackedCache.from_buffers(cache.layout, bytes(keys), values, 30, copy=False)
    with pytest.raises(KvmnnError, match="for a capacity of 108"):
        PackedCache.from_buffers(cache.layout, keys, values, 30, capacity=108)


def test_packed_cache_to_arrays_fills_given_outputs() -> None:
    cache = filled(40)
    out = np.empty((2, 40, 6), np.float32), np.empty((2, 40, 6), np.float32)
    assert cache.to_arrays(out) is out
    assert all(a.tobytes() == b.tobytes() for a, b in zip(out, plain(cache.layout, 40), strict=True))
    cache.gather(30, 10, tuple(part[:, :10] for part in out))
    assert all(a[:, :10].tobytes() == b[:, 30:].tobytes() for a, b in zip(out, plain(cache.layout, 40), strict=True))


def test_packed_cache_unknown_options_are_refused() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=6)
    for options in ({"dialect": "other"}, {"on_invalid": "ignore"}, {"expand_chunk": -1}, {"fill_byte": 256}):
        with pytest.raises(KvmnnError):
            PackedCache(layout, **options)


def test_packed_cache_empty_cache_has_no_capacity() -> None:
    cache = PackedCache(PackLayout.from_backend("arm64-fp16", kv_heads=2, head_dim=6))
    assert (len(cache), cache.capacity) == (0, 0)
    assert [part.shape for part in cache.to_arrays()] == [(2, 0, 6)] * 2
    with pytest.raises(KvmnnError, match="the cache is empty"):
        cache.gather(0, 1)
    for dialect in ("fork", "upstream"):
        for on_invalid in ("raise", "engine"):
            empty = PackedCache(cache.layout, dialect=dialect, on_invalid=on_invalid)
            for remove, reserve in ((1, []), (0, [(0, 1)])):
                with pytest.raises(KvmnnError, match="nothing was allocated"):
                    empty.realloc(remove, reserve)
                with pytest.raises(KvmnnError, match="nothing was allocated"):
                    empty.append(*plain(cache.layout, 1), remove=remove, reserve=reserve)
    cache.realloc(add=10)
    assert (len(cache), cache.capacity) == (0, 74)


# -- as an object -----------------------------------------------------------------------------------------------------


def test_packed_cache_equality_compares_geometry_and_rows():
    one, same = filled(70), filled(70, dialect="upstream", expand_chunk=8, fill_byte=7)
    assert one == same and one.capacity != same.capacity
    assert one != filled(69) and one != "a cache"
    assert PackedCache(one.layout) == PackedCache(one.layout) != one
    keys = one.to_arrays()[0]
    same.realloc(remove=1, reserve=[])
    assert one != same
    same.append(keys[:, -1:], keys[:, -1:])
    assert one != same  # other values


@pytest.mark.parametrize(
    ("backend", "equal"), [("x86-sse", True), ("x86-avx512", False), ("arm64-fp32", False), ("arm32-fp32", True)]
)
def test_packed_cache_backends_of_equal_geometry_are_equal(backend, equal):
    one = filled(20)
    other = PackedCache(PackLayout.from_backend(backend, kv_heads=2, head_dim=6))
    other.append(*one.to_arrays())
    assert (one == other) is equal


def test_packed_cache_repr_is_one_line():
    assert repr(filled(3)).startswith("<PackedCache of 3 tokens, room for 67, fork, ") and "\n" not in repr(filled(3))
