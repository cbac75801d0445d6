"""PackLayout: numbers, indexes, and tokens in and out of packed buffers, against a slow model."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_model import Cache, Numbers
from repository import NATIVE, ROOT, SELFTEST

from kvmnn import KvmnnError, LimitError, PackLayout
from kvmnn.packed.backends import BACKENDS

WORDS = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}


@st.composite
def layouts(draw: st.DrawFn) -> PackLayout:
    return PackLayout(
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        lP=draw(st.integers(1, 8)),
        hP=draw(st.integers(1, 64)),
        flash_block=draw(st.sampled_from([64, 64, None, 16, 7])),
    )


def model(layout: PackLayout, capacity: int, fill: int) -> Cache:
    n = Numbers(layout.kv_heads, layout.head_dim, layout.itemsize, layout.lP, layout.hP, layout.flash_block)
    cache = Cache(n, expand=0)
    cache.alloc(capacity)
    for buffer in (cache.keys, cache.values):
        buffer.view(np.uint8)[:] = fill
    return cache


def rows(layout: PackLayout, tokens: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (layout.kv_heads, tokens, layout.head_dim)
    words = [rng.integers(0, 1 << 8 * layout.itemsize, shape, np.uint64) for _ in "kv"]
    return [part.astype(f"<u{layout.itemsize}").view(WORDS[layout.dtype]) for part in words]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("generic", ("fp32", 16, 1, 4, 4, 16, 4)),
        ("x86-sse", ("fp32", 12, 1, 4, 4, 16, 4)),
        ("x86-avx2", ("fp32", 24, 1, 4, 4, 4, 8)),
        ("x86-avx512", ("fp32", 48, 1, 8, 4, 4, 64)),
        ("arm32-fp32", ("fp32", 12, 1, 4, 2, 16, 4)),
        ("arm64-fp32", ("fp32", 12, 1, 8, 4, 16, 4)),
        ("arm64-fp32-sdot", ("fp32", 12, 1, 8, 12, 4, 8)),
        ("arm64-fp32-i8mm", ("fp32", 12, 1, 8, 10, 8, 8)),
        ("arm64-fp16", ("fp16", 12, 1, 16, 12, 4, 8)),
        ("arm64-fp16-i8mm", ("fp16", 12, 1, 16, 10, 8, 8)),
        ("arm32-fp16", ("fp16", 12, 1, 8, None, None, None)),
        ("arm64-sme2-fp32", ("fp32", 16, 1, 64, 16, 4, 32)),
        ("arm64-sme2-fp16", ("fp16", 16, 2, 64, 16, 4, 32)),
        ("arm64-bf16", ("fp32", 12, 1, 8, 4, 16, 4)),
        ("arm64-bf16-v86", ("fp32", 12, 4, 8, 10, 8, 8)),
        ("arm32-bf16", ("fp32", 12, 1, 4, 2, 16, 4)),
        ("riscv-rvv", ("fp32", 16, 1, 4, 8, 16, 4)),
    ],
)
def test_pack_layout_backend_parameters(name: str, expected: tuple[Any, ...]) -> None:
    layout = PackLayout.from_backend(name, kv_heads=8, head_dim=128)
    found = layout.dtype, layout.eP, layout.lP, layout.hP, layout.eP8, layout.lP8, layout.hP8
    assert found == expected
    assert layout.flash_block == 64
    assert PackLayout.from_backend(name, kv_heads=8, head_dim=128, flash=False).flash_block is None
    assert BACKENDS[name].source


def test_pack_layout_every_backend_is_tested_and_unknown_refused() -> None:
    marks = test_pack_layout_backend_parameters.pytestmark[0].args[1]
    assert {name for name, _ in marks} == set(BACKENDS)
    with pytest.raises(KvmnnError, match="unknown backend 'x86'"):
        PackLayout.from_backend("x86", kv_heads=1, head_dim=1)


def test_pack_layout_eP_changes_nothing() -> None:
    one = PackLayout(2, 6, "fp32", 1, 4, eP=24)
    other = PackLayout(2, 6, "fp32", 1, 4, eP=48)
    assert one.key_bytes(70) == other.key_bytes(70)
    assert same(one.pack(*rows(one, 5))[1], other.pack(*rows(one, 5))[1])


def test_pack_layout_repr_evaluates_to_the_layout() -> None:
    layout = PackLayout.from_backend("arm64-fp16", kv_heads=8, head_dim=128, int8_keys=True)
    assert eval(repr(layout)) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"hP": 0}, "hP is 0"),
        ({"flash_block": 0}, "flash_block is 0"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"int8_keys": True}, "need lP8 and hP8"),
        ({"int8_values": True, "lP8": 4, "hP8": 8}, "int8 values without int8 keys"),
        ({"int8_keys": True, "int8_values": True, "lP8": 4, "hP8": 8, "flash_block": None}, "without a flash block"),
    ],
)
def test_pack_layout_invalid_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    numbers: dict[str, Any] = {"kv_heads": 2, "head_dim": 6, "dtype": "fp32", "lP": 1, "hP": 4}
    with pytest.raises(KvmnnError, match=message):
        PackLayout(**(numbers | change))
    with pytest.raises(TypeError, match="hP must be an integer"):
        PackLayout(**(numbers | {"hP": 4.0}))


@given(layouts(), st.integers(1, 300))
def test_pack_layout_sizes_strides_and_indexes_equal_the_model(layout: PackLayout, capacity: int) -> None:
    n = model(layout, capacity, 0).n
    assert layout.key_head_bytes(capacity) == n.key_words(capacity) * layout.itemsize
    assert layout.value_head_bytes(capacity) == n.value_words(capacity) * layout.itemsize
    assert layout.key_head_offset(layout.kv_heads - 1, capacity) + layout.key_head_bytes(capacity) == layout.key_bytes(
        capacity
    )
    assert layout.value_head_offset(0, capacity) == 0
    # every place of the logical shape lies where its strides say, and they fill the head without gaps
    for shape, strides, words in (
        (layout.key_shape(capacity), layout.key_strides(), n.key_words(capacity)),
        (layout.value_shape(capacity), layout.value_strides(capacity), n.value_words(capacity)),
    ):
        assert np.prod(shape) == words
        assert list(strides) == [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tokens = np.arange(0, capacity, 7)[:, None]
    dims = np.arange(layout.head_dim)
    keys, values = layout.key_index(tokens, dims), layout.value_index(tokens, dims, capacity)
    for i, t in enumerate(tokens[:, 0]):
        for d in dims:
            assert keys[i, d] == n.key(int(t), int(d))
            assert values[i, d] == n.value(int(t), int(d), capacity)


@given(layouts(), st.integers(1, 300))
def test_infer_capacity_places_tokens_alike(layout: PackLayout, capacity: int) -> None:
    found = layout.infer_capacity(layout.key_bytes(capacity), layout.value_bytes(capacity))
    assert found >= capacity
    tokens, dims = np.arange(capacity)[:, None], np.arange(layout.head_dim)
    assert same(layout.value_index(tokens, dims, capacity), layout.value_index(tokens, dims, found))
    assert layout.key_bytes(found) == layout.key_bytes(capacity)
    for sizes in ((layout.key_bytes(found) + 1, layout.value_bytes(found)), (layout.key_bytes(found), 0)):
        with pytest.raises(KvmnnError, match="no capacity"):
            layout.infer_capacity(*sizes)


def test_infer_capacity_reads_114_as_116() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=16)
    assert layout.infer_capacity(layout.key_bytes(114), layout.value_bytes(114)) == 116


@pytest.mark.parametrize(
    ("tokens", "dims", "error"),
    [(-1, 0, KvmnnError), (0, 6, KvmnnError), (0, -1, KvmnnError), (0.5, 0, TypeError), ("a", 0, TypeError)],
)
def test_pack_layout_index_out_of_range_is_refused(tokens: Any, dims: Any, error: type[Exception]) -> None:
    layout = PackLayout(2, 6, "fp32", 1, 4)
    with pytest.raises(error):
        layout.key_index(tokens, dims)
    with pytest.raises(error):
        layout.value_index(tokens, dims)


def test_value_index_without_flash_block_needs_capacity() -> None:
    with pytest.raises(KvmnnError, match="say which"):
        PackLayout(2, 6, "fp32", 1, 4, flash_block=None).value_index(0, 0)


# -- tokens in and out ------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 90), st.integers(0, 30), st.booleans(), st.integers(1, 3))
def test_pack_equals_the_model(layout: PackLayout, tokens: int, room: int, clear: bool, threads: int) -> None:
    capacity = max(1, tokens + room)
    plain = rows(layout, tokens)
    expected = model(layout, capacity, 0 if clear else 0x5A)
    expected.push(*(part.view(f"<u{layout.itemsize}") for part in plain))
    out = tuple(np.full(size, 0x5A, np.uint8) for size in (layout.key_bytes(capacity), layout.value_bytes(capacity)))
    padding = "zero" if clear else "keep"
    made = layout.pack(*plain, capacity=capacity, out=out, padding=padding, threads=threads)
    assert same(made[0], expected.keys)
    assert same(made[1], expected.values)
    back = layout.unpack(*made, tokens, capacity=capacity, threads=threads)
    assert all(same(a, b) for a, b in zip(back, plain, strict=True))
    if clear:
        fresh = layout.pack(*plain, capacity=capacity)
        assert all(same(a, b) for a, b in zip(fresh, made, strict=True))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_gather_and_scatter_ranges_equal_the_model(layout: PackLayout, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 100))
    past = data.draw(st.integers(1, capacity))
    start = data.draw(st.integers(0, past - 1))
    count = data.draw(st.integers(1, past - start))
    plain = rows(layout, past)
    cache = model(layout, capacity, 0xC3)
    cache.push(*(part.view(f"<u{layout.itemsize}") for part in plain))
    buffers = cache.keys.reshape(-1).view(np.uint8), cache.values.reshape(-1).view(np.uint8)
    before = [buffer.copy() for buffer in buffers]
    where = {"past_length": past, "capacity": capacity}
    got = layout.gather(*buffers, start, count, **where)
    assert all(same(a, b[:, start : start + count]) for a, b in zip(got, plain, strict=True))
    layout.zero(*buffers, start, count, **where)
    cleared = [part.copy() for part in plain]
    for part in cleared:
        part[:, start : start + count] = 0
    wanted = model(layout, capacity, 0xC3)
    wanted.push(*(part.view(f"<u{layout.itemsize}") for part in cleared))
    assert same(buffers[0], wanted.keys)
    assert same(buffers[1], wanted.values)
    layout.scatter(*got, *buffers, start, **where)
    assert all(same(a, b) for a, b in zip(buffers, before, strict=True))


@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "arm64-fp16", "arm64-sme2-fp32", "arm64-sme2-fp16"])
@pytest.mark.parametrize("misaligned", [0, 4, 16])
def test_pack_nontemporal_output_equals_small_output(name: str, misaligned: int) -> None:
    """Above eight MiB another way of writing takes over; a head at a time is below."""
    layout = PackLayout.from_backend(name, kv_heads=6, head_dim=128)
    tokens = (9 << 20) // (6 * 128 * layout.itemsize) + 13
    plain = rows(layout, tokens)
    capacity = tokens + 5

    def memory(size: int) -> np.ndarray:
        return np.full(size + 64, 0x77, np.uint8)[misaligned : misaligned + size]

    out = memory(layout.key_bytes(capacity)), memory(layout.value_bytes(capacity))
    layout.pack(*plain, capacity=capacity, out=out, padding="keep")
    one = PackLayout.from_backend(name, kv_heads=1, head_dim=128)
    for head in range(6):
        small = tuple(np.full(size, 0x77, np.uint8) for size in (one.key_bytes(capacity), one.value_bytes(capacity)))
        one.pack(*(part[head : head + 1] for part in plain), capacity=capacity, out=small, padding="keep")
        for buffer, expected in zip(out, small, strict=True):
            assert same(buffer.reshape(6, -1)[head], expected)
    back = tuple(memory(part.nbytes).view(part.dtype).reshape(part.shape) for part in plain)
    layout.unpack(*out, tokens, capacity=capacity, out=back)
    assert all(same(a, b) for a, b in zip(back, plain, strict=True))


def test_pack_transposed_view_is_read_without_copy() -> None:
    """K and V come from the model as [token, head, dim]; a transposed view is enough."""
    layout = PackLayout.from_backend("x86-avx512", kv_heads=3, head_dim=10)
    plain = rows(layout, 33)
    turned = [np.ascontiguousarray(part.transpose(1, 0, 2)).transpose(1, 0, 2) for part in plain]
    wide = [np.repeat(part, 2, axis=2)[:, :, ::2] for part in plain]
    mirrored = [np.ascontiguousarray(part[:, ::-1])[:, ::-1] for part in plain]
    expected = layout.pack(*plain)
    for parts in (turned, wide, mirrored, [part.tobytes() for part in plain], [part.view("<u4") for part in plain]):
        assert all(same(a, b) for a, b in zip(layout.pack(*parts), expected, strict=True))
    out = tuple(np.empty((33, 3, 10), np.float32).transpose(1, 0, 2) for _ in "kv")
    layout.unpack(*expected, 33, out=out)
    assert all(same(np.ascontiguousarray(a), b) for a, b in zip(out, plain, strict=True))


def test_pack_default_capacity_is_that_of_the_engine() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=16)
    made = layout.pack(*rows(layout, 50))
    assert (made[0].size, made[1].size) == (layout.key_bytes(114), layout.value_bytes(114))


def test_pack_empty_cache() -> None:
    layout = PackLayout.from_backend("arm64-fp16", kv_heads=2, head_dim=16)
    made = layout.pack(*rows(layout, 0))
    assert not made[0].any()
    assert [part.shape for part in layout.unpack(*made, 0)] == [(2, 0, 16)] * 2


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def packed() -> tuple[PackLayout, np.ndarray, np.ndarray]:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=6)
    return layout, *layout.pack(*rows(layout, 10), capacity=20)


@pytest.mark.parametrize(
    ("start", "count", "past", "capacity", "message"),
    [
        (0, 0, 10, 20, "at least 1 token"),
        (-1, 2, 10, 20, "from 0 on"),
        (9, 2, 10, 20, "ends at 11"),
        (0, 2**63, 2**64, 20, "ends at"),
        (2**62, 1, 10, 20, "ends at"),
        (0, 1, 10, 0, "capacity is 0"),
        (0, 1, 10, -5, "capacity is -5"),
        (0, 1, 10, 24, "expected .* for a capacity of 24"),
        (0, 1, 10, 2**60, "beyond any memory"),
    ],
)
def test_gather_range_out_of_bounds_is_refused(
    packed: Any, start: int, count: int, past: int, capacity: int, message: str
) -> None:
    layout, keys, values = packed
    before = keys.tobytes(), values.tobytes()
    with pytest.raises(KvmnnError, match=message):
        layout.gather(keys, values, start, count, past_length=past, capacity=capacity)
    with pytest.raises(KvmnnError, match=message):
        layout.zero(keys, values, start, count, past_length=past, capacity=capacity)
    assert (keys.tobytes(), values.tobytes()) == before


def test_gather_non_integer_range_is_refused(packed: Any) -> None:
    layout, keys, values = packed
    for start, count in ((0.0, 1), (0, 1.0), (True, 1), ("0", 1), (0, None)):
        with pytest.raises(TypeError, match="must be an integer"):
            layout.gather(keys, values, start, count, past_length=10, capacity=20)
    with pytest.raises(LimitError):
        layout.pack(*rows(layout, 1), capacity=2**50)


def test_gather_buffers_of_wrong_size_are_refused(packed: Any) -> None:
    layout, keys, values = packed
    where: dict[str, int] = {"past_length": 10, "capacity": 20}
    with pytest.raises(KvmnnError, match="key_buffer has"):
        layout.gather(keys[:-1], values, 0, 1, **where)
    with pytest.raises(KvmnnError, match="value_buffer has"):
        layout.gather(keys, values.tobytes() + b"x", 0, 1, **where)
    with pytest.raises(KvmnnError, match="C-contiguous"):
        layout.gather(np.repeat(keys, 2)[::2], values, 0, 1, **where)
    with pytest.raises(KvmnnError, match="writable"):
        layout.zero(keys.tobytes(), values, 0, 1, **where)
    with pytest.raises(TypeError, match="bytes-like"):
        layout.gather([1, 2], values, 0, 1, **where)
    with pytest.raises(KvmnnError, match="no capacity"):
        layout.unpack(keys[:-4], values, 1)


def test_scatter_rows_of_wrong_shape_are_refused(packed: Any) -> None:
    layout, keys, values = packed
    good = rows(layout, 3)
    for bad, message in (
        (good[0][:, :2], "expected as many"),
        (good[0][:1], "expected \\(2, tokens, 6\\)"),
        (good[0][:, :, :5], "expected \\(2, tokens, 6\\)"),
        (np.zeros_like(good[0], np.float64), "expected 4-byte words"),
        (np.zeros_like(good[0], np.float16), "expected 4-byte words"),
        (good[0].tobytes()[:-1], "whole number of tokens"),
    ):
        with pytest.raises(KvmnnError, match=message):
            layout.scatter(bad, good[1], keys, values, 0, past_length=10, capacity=20)
        with pytest.raises(KvmnnError, match=message):
            layout.pack(bad, good[1])
    with pytest.raises(KvmnnError, match="capacity is 2"):
        layout.pack(*good, capacity=2)
    with pytest.raises(KvmnnError, match="padding is 'no'"):
        layout.pack(*good, padding="no")


def test_gather_outputs_of_wrong_shape_are_refused(packed: Any) -> None:
    layout, keys, values = packed
    good = np.empty((2, 10, 6), np.float32)
    locked = good.copy()
    locked.flags.writeable = False
    for bad, message in (
        (np.empty((2, 9, 6), np.float32), "expected 4-byte words"),
        (np.empty((2, 10, 6), np.float16), "expected 4-byte words"),
        (np.empty((2, 10, 12), np.float32)[:, :, ::2], "contiguous last axis"),
        (np.empty((2, 10, 6), np.float32)[:, ::-1], "negative strides"),
        (locked, "writable"),
    ):
        with pytest.raises(KvmnnError, match=message):
            layout.unpack(keys, values, 10, capacity=20, out=(good, bad))
    with pytest.raises(TypeError, match="numpy array"):
        layout.unpack(keys, values, 10, capacity=20, out=(good, bytearray(480)))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and SELFTEST.exists()), reason="no C compiler or no sources")
def test_layout_kernels_native_selftest_passes(tmp_path: Path) -> None:
    program = tmp_path / "selftest"
    sources = ["-I", str(ROOT / "pyx"), str(NATIVE / "packed" / "layout_kernels.c"), str(SELFTEST / "layout_kernels.c")]
    subprocess.run(["cc", "-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unpack_more_tokens_than_capacity_names_the_capacity() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=16)
    rows = np.ones((2, 300, 16), np.float32)
    with pytest.raises(KvmnnError, match=r"ends at 305: expected at most the capacity of 304 tokens$"):
        layout.unpack(*layout.pack(rows, rows, capacity=304), 305)
