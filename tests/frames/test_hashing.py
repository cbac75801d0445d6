"""The engine's 64-bit hash."""

import codec_model
import numpy as np
import pytest
from codec_samples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

import kvmnn
from kvmnn import KvmnnError, fnv1a64


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0x14650FB0739D0383), (b"a", 0x44BD8AD473CD9906), (b"foobar", 0x88FAD7C0A8FF07F2)],
)
def test_known_values(data: bytes, value: int) -> None:
    assert fnv1a64(data) == value == codec_model.fnv1a64(data)


@EXAMPLES
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_chaining_is_the_hash_of_the_concatenation(first: bytes, second: bytes) -> None:
    whole = codec_model.fnv1a64(first + second)
    assert fnv1a64(second, fnv1a64(first)) == fnv1a64(first + second) == whole


def test_arrays_are_hashed_in_c_order() -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    assert fnv1a64(array) == fnv1a64(array.tobytes())
    assert fnv1a64(array.T) == fnv1a64(array.T.tobytes()) != fnv1a64(array)
    assert fnv1a64(np.asfortranarray(array)) == fnv1a64(array)
    assert fnv1a64(memoryview(array.tobytes())[::2]) == fnv1a64(array.tobytes()[::2])


def test_seed_range() -> None:
    assert fnv1a64(b"", 0) == 0
    assert fnv1a64(b"x", (1 << 64) - 1) == codec_model.fnv1a64(b"x", (1 << 64) - 1)
    for seed in (-1, 1 << 64):
        with pytest.raises(KvmnnError, match="unsigned 64-bit"):
            fnv1a64(b"", seed)


@pytest.mark.parametrize("data", ["text", 5, None, [1, 2]])
def test_what_has_no_bytes(data: object) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        kvmnn.fnv1a64(data)
    with pytest.raises(TypeError, match="no bytes"):
        kvmnn.fnv1a64(np.array([data], dtype=object))
