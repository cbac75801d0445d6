"""PackedCache with int8 keys and values, against a slow model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_model import Int8Head

from kvmnn import KvmnnError, PackedCache, PackLayout


def state(cache: PackedCache) -> tuple[Any, ...]:
    return cache.past_length, cache.capacity, cache.key_buffer.tobytes(), cache.value_buffer.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_int8_cache_equals_the_model(data: st.DataObject) -> None:
    both = data.draw(st.booleans())
    layout = PackLayout(
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1, 3, 7, 8, 18])),
        "fp32",
        1,
        4,
        data.draw(st.sampled_from([64, 16])),
        lP8=data.draw(st.sampled_from([4, 8, 16, 3])),
        hP8=data.draw(st.sampled_from([4, 8, 32, 5])),
        int8_keys=True,
        int8_values=both,
    )
    steps = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    capacity = sum(steps)
    cache = PackedCache(layout, expand_chunk=capacity - steps[0])
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    scale = data.draw(st.sampled_from([1.0, 100.0, 1e-8]))
    numbers = layout.head_dim, layout.lP8, layout.hP8, layout.flash_block, capacity
    heads = [Int8Head(*numbers) for _ in range(layout.kv_heads)]
    for count in steps:
        rows = [
            (rng.standard_normal((layout.kv_heads, count, layout.head_dim)) * scale).astype(np.float32) for _ in "kv"
        ]
        cache.append(*rows)
        for head, model in enumerate(heads):
            model.append(rows[0][head], rows[1][head])
    sums = cache.int8_sums
    assert sums is not None and cache.capacity == capacity
    assert cache.key_buffer.tobytes() == b"".join(bytes(head.keys) for head in heads)
    assert sums.key_sum.tobytes() == b"".join(head.key_sum.tobytes() for head in heads)
    assert sums.key_max.tobytes() == b"".join(head.key_max.tobytes() for head in heads)
    if both:
        assert cache.value_buffer.tobytes() == b"".join(bytes(head.values) for head in heads)
        assert sums.value_sum is not None
        assert sums.value_sum.tobytes() == b"".join(head.value_sum.tobytes() for head in heads)


@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "arm64-fp32", "generic", "arm64-sme2-fp32", "arm32-fp32"])
def test_int8_cache_reads_back_without_channel_maximum(name: str) -> None:
    layout = PackLayout.from_backend(name, kv_heads=2, head_dim=24, int8_keys=True, int8_values=True)
    cache = PackedCache(layout)
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((2, 90, 24)).astype(np.float32) for _ in "kv"]
    cache.append(*rows)
    file = PackedCache.from_buffers(layout, cache.key_buffer.tobytes(), cache.value_buffer.tobytes(), 90)
    keys, values = file.to_arrays()
    assert keys.dtype == values.dtype == np.float32
    shifted = rows[0] - rows[0].max(axis=1, keepdims=True)
    step = (shifted.max(axis=2) - shifted.min(axis=2))[:, :, None] / 255
    assert (np.abs(keys - shifted) <= 0.51 * step).all()
    step = (rows[1].max(axis=1) - rows[1].min(axis=1))[:, None] / 255
    assert (np.abs(values - rows[1]) <= 0.51 * step).all()
    assert len(layout.unrecoverable_parts) == 2
    assert "maxim" in layout.unrecoverable_parts[0]
    assert PackLayout.from_backend(name, kv_heads=2, head_dim=24).unrecoverable_parts == ()


def test_int8_keys_with_float_values() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=10, int8_keys=True)
    cache = PackedCache(layout)
    rows = [np.random.default_rng(1).standard_normal((2, 20, 10)).astype(np.float32) for _ in "kv"]
    cache.append(*rows)
    assert np.array_equal(cache.to_arrays()[1], rows[1])
    assert len(layout.unrecoverable_parts) == 1
    assert layout.infer_capacity(cache.key_buffer.size, cache.value_buffer.size) >= cache.capacity


def test_int8_first_step_of_one_token_loses_its_key() -> None:
    """The maxima rise in steps of several tokens only; before, keys are taken against the least float."""
    layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8, int8_keys=True, int8_values=True)
    cache = PackedCache(layout)
    cache.append(np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32))
    keys, values = cache.to_arrays()
    assert (keys == np.finfo(np.float32).max).all()
    assert (values == 1).all()


def test_int8_cache_applies_plans() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8, int8_keys=True)
    rows = [np.random.default_rng(1).standard_normal((1, 20, 8)).astype(np.float32) for _ in "kv"]
    cache, engine = PackedCache(layout), PackedCache(layout, on_invalid="engine")
    cache.append(*rows)
    engine.append(*rows)
    with pytest.raises(KvmnnError, match="ignores the pairs"):
        cache.realloc(5, [(0, 2)])
    engine.realloc(5, [(0, 2)])
    cache.realloc(5)
    assert state(cache) == state(engine)
    assert cache.past_length == 15


def test_int8_cache_from_buffers_keeps_missing_maxima_when_resized() -> None:
    """Room for more does not bring back maxima that are in no file; a fresh cache has them from its first room on."""
    layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8, int8_keys=True)
    rows = [np.random.default_rng(1).standard_normal((1, 5, 8)).astype(np.float32) for _ in "kv"]
    cache = PackedCache(layout)
    cache.realloc(add=5)
    assert cache.int8_sums is not None
    cache.push(*rows)
    adopted = PackedCache.from_buffers(layout, cache.key_buffer, cache.value_buffer, 5)
    adopted.realloc(add=200)
    assert adopted.capacity > cache.capacity and adopted.int8_sums is None
    with pytest.raises(KvmnnError, match="in no file"):
        adopted.push(*rows)
    for part, before in zip(adopted.to_arrays(), cache.to_arrays(), strict=True):
        assert part.tobytes() == before.tobytes()
    plain = PackedCache(PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8))
    plain.realloc(add=5)
    assert plain.int8_sums is None


def test_int8_unsupported_operations_are_refused() -> None:
    layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8, int8_keys=True)
    cache = PackedCache(layout)
    rows = [np.ones((1, 5, 8), np.float32) for _ in "kv"]
    cache.append(*rows)
    adopted = PackedCache.from_buffers(layout, cache.key_buffer, cache.value_buffer, 5, capacity=69)
    before = state(adopted)
    for call in (adopted.append, adopted.push):
        with pytest.raises(KvmnnError, match="in no file"):
            call(*rows)
    assert state(adopted) == before
    adopted.append(*rows, remove=5)
    assert adopted.past_length == 5
    for call in (
        lambda: layout.pack(*rows),
        lambda: layout.scatter(*rows, cache.key_buffer, cache.value_buffer, 0, past_length=5, capacity=69),
        lambda: layout.zero(cache.key_buffer, cache.value_buffer, 0, 5, past_length=5, capacity=69),
    ):
        with pytest.raises(KvmnnError, match="made by appending"):
            call()
    half = PackedCache(PackLayout.from_backend("arm64-fp16", kv_heads=1, head_dim=8, int8_keys=True))
    with pytest.raises(KvmnnError, match="for fp32 only"):
        half.append(*(row.astype(np.float16) for row in rows))
