"""The engine's 64-bit hash, and the checksum for memory."""

import codec_model
import numpy as np
import pytest
from codec_samples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

import kvmnn
from kvmnn import KvmnnError, fnv1a64
from kvmnn.errors import FrameError
from kvmnn.frames.buffers import checksum_blocks, checksum_rows, copy_with_checksum, integrity_checksum
from kvmnn.frames.decoder import FrameDecoder

RNG = np.random.default_rng(11)


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0x14650FB0739D0383), (b"a", 0x44BD8AD473CD9906), (b"foobar", 0x88FAD7C0A8FF07F2)],
)
def test_fnv1a64_equals_published_values(data: bytes, value: int) -> None:
    assert fnv1a64(data) == value == codec_model.fnv1a64(data)


@EXAMPLES
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_fnv1a64_chaining_equals_concatenation(first: bytes, second: bytes) -> None:
    whole = codec_model.fnv1a64(first + second)
    assert fnv1a64(second, fnv1a64(first)) == fnv1a64(first + second) == whole


def test_fnv1a64_array_is_hashed_in_c_order() -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    assert fnv1a64(array) == fnv1a64(array.tobytes())
    assert fnv1a64(array.T) == fnv1a64(array.T.tobytes()) != fnv1a64(array)
    assert fnv1a64(np.asfortranarray(array)) == fnv1a64(array)
    assert fnv1a64(memoryview(array.tobytes())[::2]) == fnv1a64(array.tobytes()[::2])


def test_fnv1a64_seed_out_of_range_is_refused() -> None:
    assert fnv1a64(b"", 0) == 0
    assert fnv1a64(b"x", (1 << 64) - 1) == codec_model.fnv1a64(b"x", (1 << 64) - 1)
    for seed in (-1, 1 << 64):
        with pytest.raises(KvmnnError, match="unsigned 64-bit"):
            fnv1a64(b"", seed)


@pytest.mark.parametrize("data", ["text", 5, None, [1, 2]])
def test_fnv1a64_non_buffer_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        kvmnn.fnv1a64(data)
    with pytest.raises(TypeError, match="no bytes"):
        kvmnn.fnv1a64(np.array([data], dtype=object))


@EXAMPLES
@given(st.binary(min_size=1, max_size=300), st.data())
def test_integrity_checksum_detects_change_within_a_word(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    for offset in range(at, min(len(data), at // 8 * 8 + 8)):
        changed[offset] ^= draw.draw(st.integers(1, 255))
    assert integrity_checksum(changed) != integrity_checksum(data) == integrity_checksum(bytearray(data))


def test_integrity_checksum_depends_on_order_length_and_seed() -> None:
    data = RNG.integers(0, 256, 4096, np.uint8)
    words = data.reshape(-1, 8)
    seen = {
        integrity_checksum(data),
        integrity_checksum(words[::-1]),
        integrity_checksum(np.roll(words, 8, axis=0)),
        integrity_checksum(data, 1),
    }
    seen |= {integrity_checksum(bytes(count)) for count in range(200)}
    assert len(seen) == 204


@pytest.mark.parametrize("flips", [1, 2, 3])
def test_integrity_checksum_detects_flipped_bits(flips: int) -> None:
    data = RNG.integers(0, 256, 2000, np.uint8)
    whole = integrity_checksum(data)
    for _ in range(2000):
        changed = data.copy()
        for bit in RNG.choice(8 * data.size, flips, replace=False):
            changed[bit // 8] ^= 1 << (bit % 8)
        assert integrity_checksum(changed) != whole


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("words", [1, 7, 4096, 4100, 9000])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_decoder_compares_both_checksums(rows: int, words: int, dtype: str) -> None:
    """Tiles of 4,096 words and what is left of them give the checksum of the whole row."""
    array = RNG.standard_normal((rows, words)).astype(dtype)
    frame = kvmnn.encode(array)
    total = 0
    for row in array:
        total = integrity_checksum(row, total)
    assert checksum_rows(array.view(np.uint8)) == total
    decoder, out = FrameDecoder("fp16" if dtype == "float16" else "fp32"), np.zeros((rows, 2 * words), dtype)[:, words:]
    decoder.decode_verified(frame, integrity_checksum(frame), total, out)
    assert out.tobytes() == array.tobytes()
    with pytest.raises(FrameError, match="does not match its checksum"):
        decoder.decode_verified(frame, integrity_checksum(frame) ^ 1, total, out)
    with pytest.raises(FrameError, match="other words than went into it"):
        decoder.decode_verified(frame, integrity_checksum(frame), total ^ 1, out)
    with pytest.raises(
        FrameError, match=f"holds {array.nbytes} bytes: expected {array.nbytes + array.itemsize * rows}"
    ):
        decoder.decode_verified(frame, integrity_checksum(frame), total, np.zeros((rows, words + 1), dtype))
    with pytest.raises(KvmnnError, match="expected rows that are each contiguous"):  # where a view would be a copy
        decoder.decode_verified(
            frame, integrity_checksum(frame), total, np.zeros((2, words, 2, rows), dtype).transpose(3, 1, 2, 0)
        )
    with pytest.raises(KvmnnError, match="expected contiguous ones"):
        checksum_rows(np.zeros((2, 8), np.uint8)[:, ::2])


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("size", [1, 8, 60, 64, 100, 256])
@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_copy_rows_checksum_does_not_depend_on_strides(axes: tuple[int, int, int], size: int, tokens: int) -> None:
    together = RNG.integers(0, 256, (3, tokens, size), np.uint8)
    room = np.zeros(tuple(together.shape[axis] + 1 for axis in axes), np.uint8).transpose(axes)
    rows = room[:3, :tokens, :size]
    rows[:] = together
    out = np.zeros((3, tokens * size), np.uint8)
    assert copy_with_checksum(rows, out) == checksum_rows(together.reshape(3, -1))
    assert out.tobytes() == together.tobytes()
    blocks = [together[:, begin : begin + 5].reshape(3, -1) for begin in range(0, tokens, 5)]
    assert checksum_blocks(rows, 5) == [checksum_rows(block) for block in blocks]


def test_copy_rows_mismatched_output_is_refused() -> None:
    rows = np.zeros((2, 3, 8), np.uint8)
    with pytest.raises(KvmnnError, match="out has 2 rows of 23 bytes: expected 2 of 24"):
        copy_with_checksum(rows, np.zeros((2, 23), np.uint8))
    with pytest.raises(KvmnnError, match="expected contiguous ones"):
        copy_with_checksum(rows[:, :, ::2], np.zeros((2, 12), np.uint8))
    assert checksum_blocks(rows[:, :0], 4) == checksum_blocks(rows[:, :, :0], 4) == []
