"""Key norms and top-k against plain Python: every type, SIMD level and 16-bit word, and values that are not finite."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import policy_models as model
import pytest
from hypothesis import HealthCheck, given, settings
from repository import NATIVE, SELFTEST

from kvmnn import KvmnnError, _simd
from kvmnn.policies import _norms, compute_key_norms
from kvmnn.policies.topk import argtopk_highest, argtopk_lowest, sort_by_value


@pytest.fixture(params=_simd.simd_levels())
def level(request: pytest.FixtureRequest) -> str:
    _simd.set_simd_level(request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def level_afterwards() -> Iterator[None]:
    before = _simd.simd_level()
    yield
    _simd.set_simd_level(before)


def bits(values: model.Array) -> list[list[int]]:
    """Of float32, with one NaN for all."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).view(np.uint32).tolist()


@given(model.keys())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_key_norms_equal_plain_python_on_every_simd_level(keys: model.Array) -> None:
    before = keys.tobytes()
    expected = [[model.norm(row) for row in head] for head in model.floats(keys)]
    for name in _simd.simd_levels():
        _simd.set_simd_level(name)
        found = compute_key_norms(keys)
        assert found.dtype == np.float32 and found.shape == keys.shape[:2]
        assert bits(found) == bits(np.array(expected, np.float32).reshape(found.shape)), name
    assert keys.tobytes() == before


@pytest.mark.parametrize("kind", [np.float16, np.uint16])
@pytest.mark.parametrize("dims", [1, 16, 48])
def test_key_norms_of_every_16_bit_word(level: str, kind: type, dims: int) -> None:
    """Alone in its row, as one of a row of ones, and as a row of its own kind."""
    words = np.arange(1 << 16, dtype=np.uint16)
    one = np.float16(1).view(np.uint16) if kind is np.float16 else np.uint16(0x3F80)
    for filling in (np.uint16(0), one, None):
        keys = np.empty((1, words.size, dims), np.uint16)
        keys[:] = words[:, None] if filling is None else filling
        keys[0, :, dims // 2] = words
        values = model.floats(keys.view(kind))[0]
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.zeros((words.size, 16), np.float32)
            for j in range(dims):
                sums[:, j % 16] += values[:, j] * values[:, j]
            for width in (8, 4, 2, 1):
                sums = sums[:, :width] + sums[:, width : 2 * width]
            expected = np.sqrt(sums[:, 0])
        assert np.array_equal(compute_key_norms(keys.view(kind))[0], expected, equal_nan=True), filling


def test_key_norms_are_close_to_float64_norms() -> None:
    keys = np.random.default_rng(3).standard_normal((4, 500, 128)).astype(np.float16)
    np.testing.assert_allclose(compute_key_norms(keys), np.linalg.norm(keys.astype(np.float64), axis=-1), rtol=3e-7)
    assert _norms.get_level() in _simd.simd_levels()


def test_key_norms_of_unaligned_strided_and_big_endian_arrays() -> None:
    plain = np.random.default_rng(4).standard_normal((2, 9, 20)).astype(np.float32)
    expected = compute_key_norms(plain)
    assert np.array_equal(compute_key_norms(plain.astype(">f4")), expected)
    raw = np.zeros(plain.nbytes + 1, np.uint8)
    raw[1:] = plain.reshape(-1).view(np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(plain.shape)
    assert not unaligned.flags.aligned and np.array_equal(compute_key_norms(unaligned), expected)
    half = plain.astype(np.float16)
    half.flags.writeable = False
    assert np.array_equal(compute_key_norms(half.astype(">f2")), compute_key_norms(half))
    words = (plain.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(compute_key_norms(words.view("V2")), compute_key_norms(words))
    assert np.array_equal(compute_key_norms(np.broadcast_to(plain[:1], plain.shape)), np.stack([expected[0]] * 2))
    assert compute_key_norms(np.empty((2, 3, 0), np.float16)).tolist() == [[0.0] * 3] * 2
    assert compute_key_norms(np.empty((2, 0, 4), np.float32)).shape == (2, 0)


def test_key_norms_invalid_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a numpy array, not list"):
        compute_key_norms([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float64"):
        compute_key_norms(np.zeros((1, 2, 3)))
    with pytest.raises(KvmnnError, match=r"shape \[2, 3\].*expected \[kv_head, token, head_dim\]"):
        compute_key_norms(np.zeros((2, 3), np.float32))


@given(model.rows())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_argtopk_equals_plain_python_on_every_simd_level(values: model.Array) -> None:
    n = values.shape[1]
    orders = {False: [model.ranked(row.tolist()) for row in values]}
    orders[True] = [model.ranked(row.tolist(), highest=True) for row in values]
    for name in _simd.simd_levels():
        _simd.set_simd_level(name)
        for count in {0, 1, 2, n // 2, n - 1, n} & set(range(n + 1)):
            for high, order in orders.items():
                chosen = (argtopk_highest if high else argtopk_lowest)(values, count)
                assert chosen.tolist() == [sorted(row[:count]) for row in order], (name, count, high)
                assert sort_by_value(values, chosen, highest=high).tolist() == [row[:count] for row in order]


@pytest.mark.parametrize("distinct", [1, 2, 300, 1 << 30])
def test_argtopk_long_rows_equal_argsort(level: str, distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    values = (rng.integers(-distinct, distinct, (2, 5001)) / 64).astype(np.float32)
    order = np.argsort(values, axis=1, kind="stable")
    for count in (1, 17, 2500, 5000):
        assert np.array_equal(argtopk_lowest(values, count), np.sort(order[:, :count], axis=1))
    down = np.argsort(-values, axis=1, kind="stable")
    assert np.array_equal(argtopk_highest(values, 1234), np.sort(down[:, :1234], axis=1))


def test_argtopk_nan_is_last_and_zeros_are_equal() -> None:
    values = np.array([[math.nan, -0.0, 0.0, math.inf, -math.inf]], np.float32)
    assert sort_by_value(values, argtopk_lowest(values, 5)).tolist() == [[4, 1, 2, 3, 0]]
    assert sort_by_value(values, argtopk_highest(values, 5), highest=True).tolist() == [[3, 1, 2, 4, 0]]
    assert argtopk_highest(values, 4).tolist() == [[1, 2, 3, 4]]


def test_argtopk_views_equal_plain_python() -> None:
    values = np.random.default_rng(5).standard_normal((3, 40)).astype(np.float32)
    for view in (values[:, 5:30], values[:, ::2], values[::-1], values.T):
        assert argtopk_lowest(view, 3).tolist() == [sorted(model.ranked(row.tolist())[:3]) for row in view]


@pytest.mark.parametrize("count", [-1, 4])
def test_argtopk_invalid_count_is_refused(count: int) -> None:
    with pytest.raises(KvmnnError, match=rf"cannot choose {count} of each row of values of shape \[2, 3\]"):
        argtopk_lowest(np.zeros((2, 3), np.float32), count)


# -- the loops for compilers without vector types ---------------------------------------------------------------------

Norms = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
Rank = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Table(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("fp16", Norms), ("bf16", Norms), ("fp32", Norms), ("rank", Rank))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and SELFTEST.exists()), reason="no C compiler or no sources")
@pytest.mark.parametrize("plain", [[], ["-DKVMNN_PLAIN"]])
def test_key_norms_native_selftest(tmp_path: Path, plain: list[str]) -> None:
    """All warnings as errors; and the plain loops give the bits of the others."""
    library = tmp_path / "norms.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC", *plain]
    subprocess.run(["cc", *flags, str(NATIVE / "policies" / "norms.c"), "-o", str(library), "-lm"], check=True)
    find = ctypes.CDLL(str(library)).kvmnn_norm_kernels_at
    find.argtypes, find.restype = [ctypes.c_int], ctypes.POINTER(Table)
    table = find(0).contents
    assert table.name == b"baseline"
    words = np.random.default_rng(8).integers(0, 1 << 16, (1, 3000, 37), np.uint16)
    singles = np.ascontiguousarray(words[:, :, :36]).view(np.float32)
    for function, keys in ((table.fp16, words.view(np.float16)), (table.bf16, words), (table.fp32, singles)):
        out = np.empty(keys.shape[:2], np.float32)
        function(keys.ctypes.data, keys.strides[1], keys.shape[1], keys.shape[2], out.ctypes.data)
        assert bits(out) == bits(compute_key_norms(keys))
    values = np.array([model.AWKWARD], np.float64).astype(np.float32)
    for high in (False, True):
        ranks = np.empty(values.shape[1], np.uint32)
        table.rank(values.ctypes.data, values.shape[1], high, ranks.ctypes.data)
        order = np.argsort(ranks, kind="stable").tolist()
        assert order == model.ranked(values[0].tolist(), highest=high)
