"""Streams that are cut, changed or lie: an error of the documented kind, never other words."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from dense_samples import DTYPES, sample, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn import dense
from kvmnn.dense import _rows, _stream
from kvmnn.dense.decoder import _NUMPY_TYPES
from kvmnn.errors import FrameError, KvmnnError, LimitError

Words = np.ndarray[Any, Any]


STREAMS = streams()


def test_damage_streams_cover_every_method() -> None:
    infos = [dense.inspect(stream) for stream, _, _ in STREAMS]
    for dtype in DTYPES:
        of_dtype = [info for info in infos if info.dtype == dtype]
        assert {info.method for info in of_dtype} == {"words", "frame", "rows"}
        assert any(info.rotary for info in of_dtype) and any(info.history for info in of_dtype)
        assert any(info.table_set is not None for info in of_dtype)
    assert {name for info in infos for name, size in info.sections.items() if size} >= {
        "exponents",
        "escapes",
        "low coded",
    }


@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_decode_short_block_equals_long_decoder(number: int) -> None:
    stream, array, given = STREAMS[number]
    info, tables = dense.inspect(stream), given.get("tables")
    quick = _rows.decode_short_block(stream, tables and tables.table_set, array.nbytes, np.empty, _NUMPY_TYPES)
    assert (quick is not None) == (info.method == "rows" and not info.history)
    if quick is not None:
        assert (
            quick.transpose(1, 0, 2).tobytes() == array.tobytes() == dense.decode(bytearray(stream), **given).tobytes()
        )
        assert (
            _rows.decode_short_block(stream, tables and tables.table_set, array.nbytes - 1, np.empty, _NUMPY_TYPES)
            is None
        )
        if tables:
            assert _rows.decode_short_block(stream, None, array.nbytes, np.empty, _NUMPY_TYPES) is None


@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_decode_truncated_stream_is_refused(number: int) -> None:
    stream, _, given = STREAMS[number]
    for length in range(len(stream)):
        with pytest.raises(FrameError):
            dense.decode(stream[:length], **given)
    with pytest.raises(FrameError):
        dense.decode(stream + b"\0", **given)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_decode_changed_byte_is_refused(number: int) -> None:
    stream, _, given = STREAMS[number]
    rng = np.random.default_rng(number)
    for i in range(len(stream)):
        for change in {1 << int(rng.integers(0, 8)), *((128, 255, 1) if i < 60 else ())}:
            broken = bytearray(stream)
            broken[i] ^= change
            with pytest.raises(KvmnnError):
                dense.decode(bytes(broken), max_bytes=1 << 20, **given)


@settings(max_examples=400, deadline=None)
@given(number=st.integers(0, len(STREAMS) - 1), data=st.data())
def test_decode_several_changed_bytes_give_same_elements_or_error(number: int, data: st.DataObject) -> None:
    """Several bytes at once: what decodes at all decodes to the words."""
    stream, array, given = STREAMS[number]
    broken = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = dense.decode(bytes(broken), max_bytes=1 << 20, **given)
    except KvmnnError:
        return
    assert found.tobytes() == array.tobytes()


def header(method: int, tokens: int, payload: bytes, heads: int = 1, dim: int = 1, flags: int = 0) -> bytes:
    return struct.pack("<4sBBBBHHIIQ", b"KVMD", 1, method, 0, flags, heads, dim, tokens, len(payload), 0) + payload


def test_decode_huge_header_takes_no_memory() -> None:
    tracked = pytest.importorskip("tracemalloc")
    tracked.start()
    try:
        for stream in (
            header(2, (1 << 32) - 1, bytes(40)),
            header(2, 20_000, bytes(2000), 65535, 1),
            header(2, 1 << 16, b"\0\0\0" + b"\xff\xff\x03" + bytes(40), 16, 64),
            header(0, (1 << 31) - 1, b""),
            header(1, (1 << 31) - 1, bytes(28)),
        ):
            with pytest.raises(KvmnnError):
                dense.decode(stream)
        assert tracked.get_traced_memory()[1] < 4 << 20
    finally:
        tracked.stop()


@pytest.mark.parametrize("method", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 299, 301, 5000])
def test_decode_payload_of_unexpected_size_is_a_frame_error(method: int, tokens: int) -> None:
    """`LimitError` is about the caller's limit alone, whatever the method."""
    stream = dense.encode(sample({0: "words", 1: "zeros", 2: "cache"}[method], "fp16", 2, 300, 8, 4))
    assert stream[5] == method
    with pytest.raises(FrameError):
        dense.decode(stream[:12] + struct.pack("<I", tokens) + stream[16:])
    with pytest.raises(LimitError):
        dense.decode(stream, max_bytes=100)


def test_decode_above_max_bytes_is_refused() -> None:
    stream, array, given = STREAMS[0]
    with pytest.raises(LimitError, match=f"holds {array.nbytes} bytes: max_bytes is {array.nbytes - 1}"):
        dense.decode(stream, max_bytes=array.nbytes - 1, **given)
    assert dense.decode(stream, max_bytes=array.nbytes, **given).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0, "no dense stream"),
        (4, 2, "version 2: expected 1"),
        (5, 3, "method 3 and dtype"),
        (6, 3, "dtype 3: expected 0 to 2"),
        (7, 4, "flags 4"),
        (8, 0, "0 heads"),
        (12, 0, "0 tokens"),
        (16, 0, "bytes after its header: expected"),
    ],
)
def test_decode_error_names_the_header_field(at: int, value: int, message: str) -> None:
    broken = bytearray(STREAMS[0][0])
    if at in (8, 12):
        broken[at : at + 2] = bytes(2)
    else:
        broken[at] = value
    with pytest.raises(FrameError, match=message):
        dense.decode(bytes(broken))


@pytest.mark.parametrize("method", ["words", "frame"])
@pytest.mark.parametrize("flags", [1, 2, 3])
def test_read_header_flags_of_methods_without_rows_are_refused(method: str, flags: int) -> None:
    """docs/format-v2.md: rotary and table set are of method 2 alone."""
    stream, given = next((s, given) for s, _, given in STREAMS if dense.inspect(s).method == method)
    dense.decode(stream, **given)
    broken = bytearray(stream)
    broken[7] = flags
    with pytest.raises(FrameError, match=f"flags {flags} with method '{method}': expected none of these"):
        dense.decode(bytes(broken), **given)
    with pytest.raises(FrameError, match=f"flags {flags} with method '{method}'"):
        dense.inspect(bytes(broken))


def test_decode_history_of_other_itemsize_is_refused() -> None:
    """The word size may be what was damaged."""
    stream, _, given = next(one for one in STREAMS if "history" in one[2] and one[0][6] == 0)
    with pytest.raises(FrameError, match="history has words of 2 bytes: expected 4"):
        dense.decode(stream[:6] + b"\x02" + stream[7:], **given)
    with pytest.raises(TypeError, match="history must be a numpy array, not bytes"):
        dense.decode(stream, **{**given, "history": b"1234"})


def test_inspect_data_without_magic_is_refused() -> None:
    for data in (b"", b"KVMD", bytes(28), np.zeros(100, np.uint8)):
        with pytest.raises(FrameError, match="no dense stream"):
            dense.inspect(data)
    with pytest.raises(TypeError):
        dense.decode(7)


def test_xxh64_equals_published_values() -> None:
    """Values of the xxHash specification's reference program."""
    assert _stream.xxh64(b"") == 0xEF46DB3751D8E999
    assert _stream.xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert _stream.xxh64(b"abc") == 0x44BC2CF5AD770999
    assert _stream.xxh64(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1
    assert _stream.xxh64(b"xxhash", 20141025) == 0xB559B98D844E0635
