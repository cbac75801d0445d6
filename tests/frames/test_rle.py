"""The RLE codec against the reference, token by token."""

import codec_model
import pytest
from codec_samples import EXAMPLES, run_bytes
from hypothesis import given
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.frames import _streams

LENGTHS = sorted({*range(1, 12), *range(124, 140), *(131 * k + r for k in (1, 2, 3, 5) for r in range(-2, 7))})


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"aaa", b"\x02aaa"),
        (b"aaaa", b"\x80a"),
        (b"a" * 131, b"\xffa"),
        (b"a" * 132, b"\xffa\x00a"),
        (b"a" * 134, b"\xffa\x02aaa"),
        (b"a" * 135, b"\xffa\x80a"),
        (b"a" * 262, b"\xffa\xffa"),
        (b"a" * 265, b"\xffa\xffa\x02aaa"),
        (b"a" * 266, b"\xffa\xffa\x80a"),
        (b"aaabaaaa", b"\x03aaab\x80a"),
        (b"abababab", b"\x07abababab"),
    ],
)
def test_encode_rle_hand_written_tokens(data: bytes, payload: bytes) -> None:
    assert codec_model.rle_encode(data) == payload
    assert _streams.encode_rle(data) == payload
    assert _streams.decode_rle(payload, len(data)) == data


def test_encode_rle_runs_of_critical_lengths() -> None:
    for length in LENGTHS:
        for before in (0, 1, 3, 126, 127, 128, 129):
            for after in (0, 2):
                data = bytes(i % 7 + 1 for i in range(before)) + bytes(length) + b"xy"[:after]
                payload = _streams.encode_rle(data)
                assert payload == codec_model.rle_encode(data), (before, length, after)
                assert _streams.decode_rle(payload, len(data)) == data


def test_encode_rle_literal_block_may_end_inside_short_run() -> None:
    for at in range(120, 132):
        data = bytes(range(at)) + b"\xff\xff\xff" + bytes(range(40))
        assert _streams.encode_rle(data) == codec_model.rle_encode(data)


def test_encode_rle_worst_case_size() -> None:
    for n in (1, 127, 128, 129, 256, 257, 1000):
        data = bytes(i % 251 for i in range(n))
        assert len(_streams.encode_rle(data)) == n + -(-n // 128)


@EXAMPLES
@given(run_bytes() | st.binary(min_size=1, max_size=600))
def test_encode_rle_equals_the_reference(data: bytes) -> None:
    payload = _streams.encode_rle(data)
    assert payload == codec_model.rle_encode(data)
    assert _streams.decode_rle(payload, len(data)) == data


@st.composite
def token_streams(draw: st.DrawFn) -> tuple[bytes, int]:
    """Payloads of any tokens, canonical or not, sometimes cut, and an expected size near the true one."""
    payload, size = b"", 0
    for control, byte in draw(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=12)):
        repeated = control >= 128
        payload += bytes([control]) + bytes([byte]) * (1 if repeated else control + 1)
        size += (control & 127) + 4 if repeated else control + 1
    cut = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return payload[: len(payload) - cut], max(0, size + draw(st.sampled_from([0, 0, 0, 1, -1, 4])))


@EXAMPLES
@given(token_streams())
def test_decode_rle_any_tokens_like_the_reference(case: tuple[bytes, int]) -> None:
    payload, expected = case
    try:
        wanted = codec_model.rle_decode(payload, expected)
    except codec_model.Reject:
        with pytest.raises(KvmnnError, match="RLE"):
            _streams.decode_rle(payload, expected)
    else:
        assert _streams.decode_rle(payload, expected) == wanted


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", 0),
        (b"", 1),
        (b"\x00a", 0),
        (b"\x00a", 2),
        (b"\x01ab", 1),
        (b"\x01a", 2),
        (b"\x80", 4),
        (b"\x80a", 3),
        (b"\x80a", 5),
        (b"\x80a\x00", 4),  # output complete, but a lone control byte follows
        (b"\x80a\xff", 4),
        (b"\xffa", 1 << 32),
    ],
)
def test_decode_rle_damaged_payload_is_refused(payload: bytes, expected: int) -> None:
    with pytest.raises(KvmnnError, match="RLE"):
        _streams.decode_rle(payload, expected)


@pytest.mark.parametrize(
    ("payload", "data"),
    [(b"\x03aaaa", b"aaaa"), (b"\x00a\x00a\x00a", b"aaa"), (b"\x80a\x80a", b"a" * 8), (b"\x00a\x80a", b"a" * 5)],
)
def test_decode_rle_uncanonical_payload_is_accepted(payload: bytes, data: bytes) -> None:
    assert _streams.decode_rle(payload, len(data)) == data


def test_encode_rle_empty_input_is_refused() -> None:
    with pytest.raises(KvmnnError, match="at least 1 byte"):
        _streams.encode_rle(b"")
