"""Streams that are decoded where they belong: the words of `dense.decode`, or a plain refusal."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from dense_samples import DTYPES, sample, streams

from kvmnn import dense
from kvmnn.dense.decoder import RowDecoder
from kvmnn.errors import KvmnnError

Words = np.ndarray[Any, Any]
AFTER = 3
STREAMS = streams()


def placed(stream: bytes, like: Words, given: dict[str, Any], **said: Any) -> tuple[bool, Words]:
    """Whether the stream is decoded after its history, and all rows: some lie after it."""
    history = given.get("history", like[:, :0])
    before = history.shape[1]
    rows = np.zeros((before + like.shape[1] + AFTER, like.shape[0], like.shape[2]), like.dtype).transpose(1, 0, 2)
    rows[:, :before] = history
    begin, tokens = said.pop("begin", before), said.pop("tokens", like.shape[1])
    checksum = said.pop("checksum", struct.unpack_from("<Q", stream, 20)[0])
    said = {"history": before, "tables": given.get("tables")} | said
    places = RowDecoder(rows, dense.inspect(stream).dtype if stream[:4] == b"KVMD" else "fp16")
    return places.decode(np.frombuffer(stream, np.uint8), checksum, begin, tokens, **said), rows


@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_row_decoder_equals_decode(number: int) -> None:
    stream, array, given = STREAMS[number]
    done, rows = placed(stream, array, given)
    assert done == (dense.inspect(stream).method == "rows")
    if done:
        before = rows.shape[1] - array.shape[1] - AFTER
        assert rows[:, before : before + array.shape[1]].tobytes() == array.tobytes()
        assert not rows[:, before + array.shape[1] :].view(np.uint8).any()


def needing() -> list[tuple[bytes, Words, dict[str, Any]]]:
    """Streams that refer to rows before them and to tables."""
    return [each for each in STREAMS if "tables" in each[2]]


@pytest.mark.parametrize("number", range(len(DTYPES)))
def test_row_decoder_contradicted_properties_are_refused(number: int) -> None:
    stream, array, given = needing()[number]
    needed = dense.inspect(stream).history
    assert needed and placed(stream, array, given)[0]
    right = struct.unpack_from("<Q", stream, 20)[0]
    others: list[dict[str, Any]] = [
        {"checksum": right ^ 1},
        {"tokens": array.shape[1] - 1},
        {"tokens": array.shape[1] + 1},
        {"tokens": 0},
        {"history": needed - 1},
        {"begin": needed - 1},
        {"begin": 10**6},
        {"tables": None},
        {"tables": dense.SharedTables.from_arrays([sample("cache", DTYPES[number], 2, 200, 16, 9)])},
    ]
    for said in others:
        assert not placed(stream, array, given, **said)[0], said


@pytest.mark.parametrize("number", range(len(DTYPES)))
def test_row_decoder_changed_stream_gives_no_other_elements(number: int) -> None:
    stream, array, given = needing()[number]
    rng = np.random.default_rng(number)
    for at in rng.integers(0, len(stream), 300).tolist():
        changed = bytearray(stream)
        changed[at] ^= 1 << int(rng.integers(8))
        checksum = struct.unpack_from("<Q", stream, 20)[0]
        assert not placed_as(bytes(changed), stream, array, given, checksum)
    for size in (0, 5, 27, 28, len(stream) - 1):
        assert not placed_as(stream[:size], stream, array, given, 0)


def placed_as(changed: bytes, stream: bytes, array: Words, given: dict[str, Any], checksum: int) -> bool:
    history = given["history"]
    rows = np.zeros((history.shape[1] + array.shape[1], array.shape[0], array.shape[2]), array.dtype)
    rows.transpose(1, 0, 2)[:, : history.shape[1]] = history
    places = RowDecoder(rows.transpose(1, 0, 2), dense.inspect(stream).dtype)
    said = {"history": history.shape[1], "tables": given["tables"]}
    return places.decode(np.frombuffer(changed, np.uint8), checksum, history.shape[1], array.shape[1], **said)


def test_row_decoder_unsupported_rows_are_refused() -> None:
    with pytest.raises(KvmnnError, match="token by token"):
        RowDecoder(np.zeros((2, 5, 8), np.float32), "fp32")
    with pytest.raises(KvmnnError, match="no stream"):
        RowDecoder(np.zeros((1, 1, 65536), np.float16), "fp16")


@pytest.mark.parametrize("number", range(len(DTYPES)))
def test_row_decoder_more_history_than_preceding_rows_is_refused(number: int) -> None:
    """Also where the stream needs none of it, and would decode."""
    (stream, array, given) = next(
        each
        for each in STREAMS
        if dense.inspect(each[0]).method == "rows"
        and dense.inspect(each[0]).dtype == DTYPES[number]
        and not dense.inspect(each[0]).history
    )
    assert placed(stream, array, given, begin=0, history=0)[0]
    assert placed(stream, array, given, begin=1, history=1)[0]
    assert not placed(stream, array, given, begin=0, history=1)[0]
    assert not placed(stream, array, given, begin=1, history=2)[0]
