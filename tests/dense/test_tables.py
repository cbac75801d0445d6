"""Table sets: blocks that share them, and streams that are given the wrong one."""

from __future__ import annotations

import struct
from typing import Any

import dense_decoder
import numpy as np
import pytest
from dense_samples import DTYPES, near_rows, rotated, sample, to_dtype
from dense_tables import Reader, Reject, read_table_set
from dense_texts import ROTARY, layers_of, text
from xxh64_model import xxh64

import kvmnn
from kvmnn import dense
from kvmnn.errors import FrameError, KvmnnError

TOKENS, BLOCK = 640, 64


def keys(dtype: str, seed: int) -> Any:
    plain = near_rows(np.random.default_rng(seed), 4, TOKENS, 32, 60)
    return to_dtype(rotated(plain, 32, 10000.0, np.arange(TOKENS), "half"), dtype)


def blocks(array: Any, rotary: dense.RopeConfig | None, history: bool, **options: Any) -> int:
    size = 0
    for begin in range(0, TOKENS, BLOCK):
        own = array[:, begin : begin + BLOCK]
        before = array[:, :begin] if history and begin else None
        at = np.arange(begin, begin + BLOCK) if rotary or options else None
        stream = dense.encode(own, rotary=rotary, positions=at, history=before, **options)
        assert dense.decode(stream, history=before, **options).tobytes() == own.tobytes()
        size += len(stream)
    return size


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_tables_with_history_reduce_size(dtype: str) -> None:
    array, rotary = keys(dtype, 1), dense.RopeConfig(dims=32)
    tables = dense.SharedTables.from_arrays([keys(dtype, 2), keys(dtype, 3)], rotary=rotary)
    assert (tables.dtype, tables.rotary_dims) == (dtype, 32)
    alone, shared = blocks(array, rotary, False), blocks(array, None, False, tables=tables)
    assert shared < alone
    assert blocks(array, None, True, tables=tables) < blocks(array, rotary, True) < alone


def test_shared_tables_bytes_define_the_set() -> None:
    array = keys("bf16", 4)
    tables = dense.SharedTables.from_arrays([array], rotary=dense.RopeConfig(dims=32))
    again = dense.SharedTables(tables.data)
    assert again.id == tables.id and again.data == tables.data
    stream = dense.encode(array[:, :64], tables=tables)
    assert dense.inspect(stream).table_set == tables.id
    assert dense.decode(stream, tables=again).tobytes() == array[:, :64].tobytes()
    assert f"{tables.id:016x}: bf16, 32 words of a head rotated" in repr(tables)


@pytest.mark.parametrize("kind", ["noise", "words", "spikes", "zeros", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_tables_dissimilar_arrays_round_trip(kind: str, dtype: str) -> None:
    tables = dense.SharedTables.from_arrays([sample("cache", dtype, 2, 300, 16, 5)])
    array = sample(kind, dtype, 2, 50, 16, 6)
    stream = dense.encode(array, tables=tables)
    assert dense.decode(stream, tables=tables).tobytes() == array.tobytes()
    assert len(stream) <= array.nbytes + 28


def test_decode_wrong_or_missing_tables_are_refused() -> None:
    array = keys("fp16", 7)
    rotary = dense.RopeConfig(dims=32)
    right, wrong = (dense.SharedTables.from_arrays([keys("fp16", seed)], rotary=rotary) for seed in (8, 9))
    stream = dense.encode(array[:, :64], tables=right)
    with pytest.raises(FrameError, match=f"was made with the table set {right.id:016x}: give it"):
        dense.decode(stream)
    with pytest.raises(FrameError, match=f"found {wrong.id:016x}"):
        dense.decode(stream, tables=wrong)
    with pytest.raises(TypeError, match=r"must be a kvmnn\.dense\.SharedTables"):
        dense.decode(stream, tables=right.data)
    with pytest.raises(KvmnnError, match="tables are for fp16: the array is bf16"):
        dense.encode(array[:, :64].view(np.uint16), tables=right)
    with pytest.raises(KvmnnError, match="rotary differs from that of the tables"):
        dense.encode(array[:, :64], tables=right, rotary=dense.RopeConfig(dims=16))
    with pytest.raises(KvmnnError, match="rotary has 32 dims"):
        dense.encode(array[:, :64, :16], tables=right)
    assert dense.encode(array[:, :64], tables=right, rotary=rotary) == stream


def test_shared_tables_damaged_data_is_refused() -> None:
    data = dense.SharedTables.from_arrays([keys("fp32", 10)], rotary=dense.RopeConfig(dims=8)).data
    array = keys("fp32", 11)[:, :64]
    stream = dense.encode(array, tables=dense.SharedTables(data))
    for length in range(len(data)):
        with pytest.raises(FrameError):
            dense.SharedTables(data[:length])
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << i % 8
        with pytest.raises(FrameError):  # refused at once, or by its id
            dense.decode(stream, tables=dense.SharedTables(broken))


def test_shared_tables_error_names_the_field() -> None:
    data = dense.SharedTables.from_arrays([keys("bf16", 10)]).data
    for at, value, said in (
        (5, 3, "table set has dtype 3: expected 0 to 2"),
        (6, 225, "table set has base 225: expected at most 224"),
        (7, 2, "table set has flags 0x02: expected 0 or 1"),
    ):
        with pytest.raises(FrameError, match=f"^{said}$"):
            dense.SharedTables(data[:at] + bytes([value]) + data[at + 1 :])
    with pytest.raises(FrameError, match=r"^table set has base 1: expected at most 0$"):
        dense.SharedTables(data[:5] + b"\0\1" + data[7:])
    for cut in (data[:9], data[: len(data) // 2], data[:-1], data + b"\0"):
        with pytest.raises(FrameError, match=r"^table set is cut, or longer than what it holds$"):
            dense.SharedTables(cut)


def table_set(dtype: int, *fields: tuple[int, int]) -> bytes:
    """A set of base 0, from values and their bits."""
    held, count = 0, 0
    for value, bits in fields:
        held, count = held | value << count, count + bits
    return b"KVMT" + bytes([1, dtype, 0, 0]) + held.to_bytes(-(-count // 8), "little")


ONE_TABLE = ((0, 6), *[(63, 6)] * 10)
"""Of all 640 contexts, 64 at a time."""


def test_shared_tables_without_escapes_round_trip() -> None:
    """One that no kvmnn makes: rows with symbols that it has no frequency for are stored as words."""
    used, table = ((1, 32), (0b11, 8)), ((0b001, 3), (0b0001, 4))  # frequencies of symbols 0 and 1: 1, what is left
    tables = dense.SharedTables(table_set(0, *ONE_TABLE, *used, *table, (0, 5)))
    words = np.random.default_rng(2).integers(0, 1 << 16, (2, 64, 16), np.uint16).view("<f2")
    stream = dense.encode(words, tables=tables)
    assert dense.inspect(stream).method == "words" and dense.decode(stream).tobytes() == words.tobytes()


def test_shared_tables_every_form_of_the_format_is_read() -> None:
    """An empty group, two runs for one table, a table of no context, other codes for an *e*, low parts above 31."""
    used, table = ((0b11, 32), (0b11, 8), (0, 8)), ((0b001, 3), (0b0001, 4))
    longer = ((0b111, 3), (1, 4), (0b111, 3), (2, 4), (0, 1))  # the same: each *e* is said as a number
    low = ((0b10, 5), (1 << 5, 32), (0b11, 8), *table)  # of bucket 1: symbols 40 and 41
    runs = [field for _ in range(10) for field in ((63, 6), (0, 1))]
    data = table_set(1, (1, 6), *runs, *used, *table, *longer, *low)
    assert dense.SharedTables(data).dtype == "bf16" and sorted(read_table_set(data).model.low) == [1]
    unused = table_set(1, (1, 6), *runs, *used, *table, (0, 2), (0, 5))  # a table without any frequency
    exponents = (((0b101, 3),), *(((0b111, 3), (e, 4)) for e in (12, 15)))  # -1, 12, 15
    for broken in (unused, *(table_set(1, *ONE_TABLE, *used, *one, (0, 9)) for one in exponents)):
        with pytest.raises(FrameError, match="tables that break their rules"):
            dense.SharedTables(broken)
        with pytest.raises(Reject):
            read_table_set(broken)


def test_decode_surplus_number_bytes_are_refused() -> None:
    array = keys("fp16", 3)[:, :64]
    stream = dense.encode(array)
    assert stream[5] == 2 and stream[30] == 0  # rows without history
    (size,) = struct.unpack_from("<I", stream, 16)
    header, payload = stream[:16] + struct.pack("<I", size + 1), stream[28:30] + b"\x80\0" + stream[31:]
    reader = Reader(payload)
    reader.take(2)
    history, head, *_ = [reader.varint() for _ in range(5 + 2 * stream[29].bit_count())]
    words = np.ascontiguousarray(array.transpose(1, 0, 2)).tobytes()
    checksum = xxh64(words, xxh64(payload[: reader.at + head], xxh64(header)))
    made = header + struct.pack("<Q", checksum) + payload
    assert history == 0 and dense.decode(made).tobytes() == array.tobytes()
    assert np.ascontiguousarray(dense_decoder.decode(made)).tobytes() == array.tobytes()


def test_shared_tables_mixed_arrays_are_refused() -> None:
    with pytest.raises(KvmnnError, match="no arrays"):
        dense.SharedTables.from_arrays([])
    with pytest.raises(KvmnnError, match="several dtypes"):
        dense.SharedTables.from_arrays([keys("fp16", 1), keys("bf16", 1)])
    with pytest.raises(KvmnnError, match="positions of 2 arrays: expected 1"):
        dense.SharedTables.from_arrays([keys("fp16", 1)], rotary=dense.RopeConfig(dims=8), positions=[None, None])


@pytest.mark.parametrize("history", [100, 128])
def test_encode_rows_repeating_in_high_bytes_are_no_larger_than_a_frame(history: int) -> None:
    """Tables of few rows fit badly, and no words repeat: only a frame that is tried shows what lanes gain."""
    words = layers_of(text(history + 230))[1].keys
    tables = dense.SharedTables.from_arrays([words], rotary=ROTARY)
    rows = words[:, history:]
    stream = dense.encode(rows, history=words[:, :history], tables=tables)
    frame = kvmnn.encode(np.ascontiguousarray(rows.transpose(1, 0, 2)), effort="fast")
    assert len(stream) <= len(frame) + 28 and dense.inspect(stream).method == "frame"
    assert np.array_equal(dense.decode(stream, history=words[:, :history], tables=tables), rows)
