"""Block sums and their mean, bit by bit."""

from __future__ import annotations

import math

import h2o_model
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvmnn import KvmnnError
from kvmnn.policies.h2o import sum_by_block, update_ema_scores

NUMBERS = st.floats(width=32)


def same(a, b) -> bool:
    """Equal bits, every NaN being as good as another."""
    a, b = (np.asarray(x, np.float64).astype(np.float32) for x in (a, b))
    return a.shape == b.shape and bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


@settings(deadline=None)
@given(
    st.data(),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 90)),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 100),
)
def test_sum_by_block_equals_the_model(data, shape, block, threads, tile):
    numbers = st.floats(0, 1, width=32) if data.draw(st.booleans()) else NUMBERS
    rows = data.draw(hnp.arrays(np.float32, shape, elements=numbers))
    expected = h2o_model.sums(rows.astype(float).tolist(), block, threads, min(tile, shape[2]))
    assert same(sum_by_block(rows, block, threads=threads, tile=tile), expected)


@pytest.mark.parametrize("block", [1, 7, 8, 16, 48, 64])
@pytest.mark.parametrize("tile", [8, 16, 64, None])
@pytest.mark.parametrize("queries", [1, 3])
def test_sum_by_block_every_kernel_path_equals_the_model(block, tile, queries):
    """Blocks in tiles, tiles in blocks, neither; eight blocks side by side and the rest."""
    rows = np.random.default_rng(block).random((3, queries, 1100), dtype=np.float32)
    expected = h2o_model.sums(rows.astype(float).tolist(), block, 2, tile or 1100)
    assert same(sum_by_block(rows, block, threads=2, tile=tile), expected)


def test_sum_by_block_result_depends_on_addition_order():
    rows = np.random.default_rng(1).random((6, 3, 200), dtype=np.float32)
    results = {sum_by_block(rows, 64, threads=t, tile=tile).tobytes() for t in (1, 2, 3, 6) for tile in (None, 32)}
    assert len(results) == 8


def test_sum_by_block_strided_and_other_floats_are_accepted():
    whole = np.random.default_rng(2).random((4, 5, 100)).astype(np.float16)
    expected = sum_by_block(whole.astype(np.float32), 8)
    assert same(sum_by_block(whole, 8), expected)
    assert same(sum_by_block(whole.astype(np.float64), 8), expected)
    floats = whole.astype(np.float32)
    assert same(sum_by_block(floats[::-1, ::-1], 8), sum_by_block(np.ascontiguousarray(floats[::-1, ::-1]), 8))
    assert same(sum_by_block(floats[..., ::2], 8), sum_by_block(np.ascontiguousarray(floats[..., ::2]), 8))
    assert same(sum_by_block(np.asfortranarray(floats), 8), expected)
    assert same(sum_by_block(floats[:, 0], 8), sum_by_block(floats[:, :1], 8))
    frozen = floats.copy()
    frozen.flags.writeable = False
    assert same(sum_by_block(frozen, 8), expected)
    unaligned = np.frombuffer(b"x" + floats.tobytes(), np.uint8)[1:].view(np.float32).reshape(floats.shape)
    assert same(sum_by_block(unaligned, 8), expected)


def test_sum_by_block_out_is_filled_and_returned():
    out = np.full(13, 7, np.float32)
    assert sum_by_block(np.ones((2, 100), np.float32), 8, out=out) is out
    assert out.tolist() == [16.0] * 12 + [8.0]


def test_sum_by_block_non_finite_values_stay_in_their_block():
    rows = np.ones((1, 40), np.float32)
    rows[0, [1, 11, 21, 22]] = np.inf, -np.inf, np.inf, -np.inf
    rows[0, 33] = np.nan
    found = sum_by_block(rows, 10)
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert np.isnan(found[2:]).all()
    assert sum_by_block(np.full((1, 3), -0.0, np.float32), 3).tobytes() == np.float32(0).tobytes()


def test_sum_by_block_block_size_is_clamped():
    rows = np.ones((2, 5), np.float32)
    assert sum_by_block(rows, 2**31 - 1).tolist() == [10.0]
    assert sum_by_block(rows, 0).tolist() == sum_by_block(rows, -4).tolist() == [2.0] * 5
    assert sum_by_block(np.ones((0, 1, 5), np.float32), 2).tolist() == [0.0] * 3
    assert sum_by_block(np.ones((2, 0, 5), np.float32), 2).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.ones(5, np.float32), {}, "shape"),
        (np.ones((1, 1, 1, 5), np.float32), {}, "shape"),
        (np.ones((2, 0), np.float32), {}, "0 keys"),
        (np.ones((2, 5), np.int32), {}, "expected floats"),
        (np.array([["a"]]), {}, "expected floats"),
        (np.ones((2, 5), np.float32), {"out": np.ones(3, np.float64)}, "out"),
        (np.ones((2, 5), np.float32), {"out": np.ones(2, np.float32)}, "out"),
        (np.ones((2, 5), np.float32), {"out": np.ones(6, np.float32)[::2]}, "out"),
        (np.ones((2, 5), np.float32), {"threads": 0}, "threads"),
        (np.ones((2, 5), np.float32), {"tile": 0}, "tile"),
    ],
)
def test_sum_by_block_invalid_attention_is_refused(rows, options, message):
    with pytest.raises(KvmnnError, match=message):
        sum_by_block(rows, 2, **options)


@given(
    st.lists(NUMBERS, max_size=12),
    st.lists(NUMBERS, min_size=1, max_size=12),
    st.integers(-1, 1 << 30),
    st.floats(-0.5, 1.5),
)
def test_update_ema_scores_equals_the_model(old, added, count, alpha):
    assert same(update_ema_scores(old, added, count=count, alpha=alpha), h2o_model.mean(old, added, count, alpha))


def test_update_ema_scores_first_step_has_no_bias_correction():
    assert update_ema_scores([], [8.0], count=8, alpha=0.9).tolist() == [np.float32(1) - np.float32(0.9)]


@pytest.mark.parametrize("sums", [[["a"]], "abc", [[1.0]], [None], [1j]])
def test_update_ema_scores_invalid_sums_are_refused(sums):
    with pytest.raises(KvmnnError, match="sums"):
        update_ema_scores([], sums, count=1, alpha=0.5)
