"""Table sets: blocks that share them, and streams that are given the wrong one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_samples import DTYPES, near_rows, rotated, sample, to_dtype
from dense_texts import ROTARY, layers_of, text

import kvmnn
from kvmnn import dense
from kvmnn.errors import FrameError, KvmnnError

TOKENS, BLOCK = 640, 64


def keys(dtype: str, seed: int) -> Any:
    plain = near_rows(np.random.default_rng(seed), 4, TOKENS, 32, 60)
    return to_dtype(rotated(plain, 32, 10000.0, np.arange(TOKENS), "half"), dtype)


def blocks(array: Any, rotary: dense.Rotary | None, history: bool, **options: Any) -> int:
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
def test_shared_tables_and_history_pay(dtype: str) -> None:
    array, rotary = keys(dtype, 1), dense.Rotary(dims=32)
    tables = dense.Tables.made_of([keys(dtype, 2), keys(dtype, 3)], rotary=rotary)
    assert (tables.dtype, tables.rotary_dims) == (dtype, 32)
    alone, shared = blocks(array, rotary, False), blocks(array, None, False, tables=tables)
    assert shared < alone
    assert blocks(array, None, True, tables=tables) < blocks(array, rotary, True) < alone


def test_the_bytes_are_the_set() -> None:
    array = keys("bf16", 4)
    tables = dense.Tables.made_of([array], rotary=dense.Rotary(dims=32))
    again = dense.Tables(tables.data)
    assert again.id == tables.id and again.data == tables.data
    stream = dense.encode(array[:, :64], tables=tables)
    assert dense.inspect(stream).table_set == tables.id
    assert dense.decode(stream, tables=again).tobytes() == array[:, :64].tobytes()
    assert f"{tables.id:016x}: bf16, 32 words of a head rotated" in repr(tables)


@pytest.mark.parametrize("kind", ["noise", "words", "spikes", "zeros", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_not_like_those_of_the_set(kind: str, dtype: str) -> None:
    tables = dense.Tables.made_of([sample("cache", dtype, 2, 300, 16, 5)])
    array = sample(kind, dtype, 2, 50, 16, 6)
    stream = dense.encode(array, tables=tables)
    assert dense.decode(stream, tables=tables).tobytes() == array.tobytes()
    assert len(stream) <= array.nbytes + 28


def test_wrong_or_missing_tables() -> None:
    array = keys("fp16", 7)
    rotary = dense.Rotary(dims=32)
    right, wrong = (dense.Tables.made_of([keys("fp16", seed)], rotary=rotary) for seed in (8, 9))
    stream = dense.encode(array[:, :64], tables=right)
    with pytest.raises(FrameError, match=f"was made with the table set {right.id:016x}: give it"):
        dense.decode(stream)
    with pytest.raises(FrameError, match=f"found {wrong.id:016x}"):
        dense.decode(stream, tables=wrong)
    with pytest.raises(TypeError, match=r"must be a kvmnn\.dense\.Tables"):
        dense.decode(stream, tables=right.data)
    with pytest.raises(KvmnnError, match="tables are for fp16: the array is bf16"):
        dense.encode(array[:, :64].view(np.uint16), tables=right)
    with pytest.raises(KvmnnError, match="rotary differs from that of the tables"):
        dense.encode(array[:, :64], tables=right, rotary=dense.Rotary(dims=16))
    with pytest.raises(KvmnnError, match="rotary has 32 dims"):
        dense.encode(array[:, :64, :16], tables=right)
    assert dense.encode(array[:, :64], tables=right, rotary=rotary) == stream


def test_damaged_sets_are_refused() -> None:
    data = dense.Tables.made_of([keys("fp32", 10)], rotary=dense.Rotary(dims=8)).data
    array = keys("fp32", 11)[:, :64]
    stream = dense.encode(array, tables=dense.Tables(data))
    for length in range(len(data)):
        with pytest.raises(FrameError):
            dense.Tables(data[:length])
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << i % 8
        with pytest.raises(FrameError):  # refused at once, or by its id
            dense.decode(stream, tables=dense.Tables(broken))


def test_a_set_without_escapes() -> None:
    """One that no kvmnn makes: rows with symbols that it has no frequency for are stored as words."""
    held, count = 0, 0

    def put(value: int, bits: int) -> None:
        nonlocal held, count
        held, count = held | value << count, count + bits

    put(0, 6)  # one table
    for _ in range(10):
        put(63, 6)  # of all 640 contexts, 64 at a time
    put(1, 32), put(0b11, 8)  # of symbols 0 and 1
    put(0b001, 3), put(0b0001, 4)  # frequencies 1, and what is left
    put(0, 5)  # no low parts
    tables = dense.Tables(b"KVMT" + bytes([1, 0, 0, 0]) + held.to_bytes(-(-count // 8), "little"))
    words = np.random.default_rng(2).integers(0, 1 << 16, (2, 64, 16), np.uint16).view("<f2")
    stream = dense.encode(words, tables=tables)
    assert dense.inspect(stream).method == "words" and dense.decode(stream).tobytes() == words.tobytes()


def test_sets_are_made_of_arrays_of_one_kind() -> None:
    with pytest.raises(KvmnnError, match="no arrays"):
        dense.Tables.made_of([])
    with pytest.raises(KvmnnError, match="several dtypes"):
        dense.Tables.made_of([keys("fp16", 1), keys("bf16", 1)])
    with pytest.raises(KvmnnError, match="positions of 2 arrays: expected 1"):
        dense.Tables.made_of([keys("fp16", 1)], rotary=dense.Rotary(dims=8), positions=[None, None])


@pytest.mark.parametrize("history", [100, 128])
def test_rows_that_repeat_in_their_high_bytes_alone_are_not_longer_than_a_frame(history: int) -> None:
    """Tables of few rows fit badly, and no words repeat: only a frame that is tried shows what lanes gain."""
    words = layers_of(text(history + 230))[1].keys
    tables = dense.Tables.made_of([words], rotary=ROTARY)
    rows = words[:, history:]
    stream = dense.encode(rows, history=words[:, :history], tables=tables)
    frame = kvmnn.encode(np.ascontiguousarray(rows.transpose(1, 0, 2)), effort="fast")
    assert len(stream) <= len(frame) + 28 and dense.inspect(stream).method == "frame"
    assert np.array_equal(dense.decode(stream, history=words[:, :history], tables=tables), rows)
