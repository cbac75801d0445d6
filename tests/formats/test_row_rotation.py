"""K rotated by distances: against complex numbers in float64, in every dtype."""

from __future__ import annotations

import numpy as np
import pytest
from rope_model import plain_frequencies, rotate

from kvmnn import KvmnnError
from kvmnn.arrays.array import from_numpy
from kvmnn.arrays.cast import CastStats, to_float32
from kvmnn.dense import RopeConfig
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.formats.key_rotation import RotationErrorStats, expand_position_runs, rotate_array, rotate_rows

STEPS = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Of a number between 1 and 2, at most half of which rounding changes."""


def rope(theta: float, dims: int, pairing: str = "half") -> RopeFrequencies:
    return RopeFrequencies.from_config(RopeConfig(theta=theta, dims=dims, pairing=pairing))


def words_of(values: np.ndarray, dtype: str) -> np.ndarray:
    return CastStats("fp32", dtype).cast(np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize(("dims", "pairing"), [(16, "half"), (16, "interleaved"), (8, "half"), (6, "interleaved")])
def test_rotate_rows_matches_complex_numbers(dtype: str, dims: int, pairing: str) -> None:
    rng = np.random.default_rng(3)
    words = words_of(rng.standard_normal((200, 16)), dtype)
    rows = to_float32(words, dtype).reshape(1, 200, 16)
    distances = rng.integers(-100_000, 100_000, 200)
    distances[::7] = 0
    error = RotationErrorStats()
    rotated = rotate_rows(words, dtype, distances, rope(1e4, dims, pairing), error)
    expected = rotate(rows, distances, plain_frequencies(1e4, dims), interleaved=pairing == "interleaved")
    errors = np.abs(to_float32(rotated, dtype).reshape(rows.shape) - expected)
    lengths = np.abs(rows).max() * 2
    assert errors.max() <= lengths * STEPS[dtype]
    assert errors.max() == pytest.approx(error.max_abs_error, rel=0.05, abs=1e-7)
    assert 0 < error.max_relative_error <= 1.5 * STEPS[dtype]
    np.testing.assert_array_equal(rotated.reshape(200, -1)[::7], words.reshape(200, -1)[::7])


def test_rotate_rows_by_zero_keeps_every_bit() -> None:
    words = np.frombuffer(np.random.default_rng(0).bytes(4 * 64), np.uint8)  # NaN of all kinds among them
    error = RotationErrorStats()
    assert rotate_rows(words, "fp32", np.zeros(4, np.int64), rope(1e4, 16), error) is words
    some = rotate_rows(words, "fp32", np.array([0, 5, 0, 0]), rope(1e4, 16), error)
    kept = [0, 2, 3]
    np.testing.assert_array_equal(some.reshape(4, -1)[kept], words.reshape(4, -1)[kept])


def test_rotate_rows_overflow_is_refused() -> None:
    words = words_of(np.full((1, 2), 65000.0), "fp16")
    with pytest.raises(KvmnnError, match="become infinite by the rotation"):
        rotate_rows(
            words, "fp16", np.array([-1]), RopeFrequencies.from_radians([np.pi / 4], "half"), RotationErrorStats()
        )


@pytest.mark.parametrize("token_major", [False, True])
def test_rotate_array_read_twice_is_equal(token_major: bool) -> None:
    keys = np.random.default_rng(1).standard_normal((3, 40, 8)).astype(np.float16)
    distances = -np.arange(40) // 3
    array = from_numpy("layer_0.key", np.ascontiguousarray(keys.transpose(1, 0, 2)) if token_major else keys)
    error = RotationErrorStats()
    rotated = rotate_array(array, token_major, distances, rope(1e4, 8), error)
    expected = rotate(keys, distances, plain_frequencies(1e4, 8))
    found = rotated.to_numpy()
    np.testing.assert_allclose(found.transpose(1, 0, 2) if token_major else found, expected, atol=4e-3)
    first = error.max_abs_error, error.max_relative_error
    for step in (16, 48, 1000):
        assert b"".join(piece.tobytes() for piece in rotated.iter_chunks(step)) == found.tobytes()
    assert (error.max_abs_error, error.max_relative_error) == first


def test_expand_position_runs_of_two_runs() -> None:
    assert expand_position_runs(((0, 2), (7, 3))).tolist() == [0, 1, 7, 8, 9]


def test_rope_frequencies_from_radians_equal_theta() -> None:
    radians = plain_frequencies(5e5, 64).astype(np.float32)
    found = RopeFrequencies.from_radians(radians.tolist(), "half")
    assert found.is_equivalent(rope(5e5, 64)) and found.label == "theta=500000,dims=64"
    assert not found.is_equivalent(rope(4.99e5, 64)) and not found.is_equivalent(rope(5e5, 64, "interleaved"))
    divided = found.divide_by([1.0] * 16 + [8.0] * 16)
    assert divided.turns[15] == found.turns[15] and divided.turns[16] == round(int(found.turns[16]) / 8)
