"""A decoder in plain Python, written from docs/format-v2.md alone gives the same words and refuses the same."""

from __future__ import annotations

import json
from typing import Any

import dense_decoder
import numpy as np
import pytest
from dense_samples import DTYPES, KINDS, near_rows, rotated, sample, to_dtype
from dense_tables import Reject
from xxh64_model import xxh64

from kvmnn import dense
from kvmnn.errors import FrameError

Words = np.ndarray[Any, Any]
HALF, NEIGHBOURS, PART = (
    dense.RopeConfig(dims=16),
    dense.RopeConfig(dims=16, pairing="interleaved"),
    dense.RopeConfig(theta=500.0, dims=6, pairing="interleaved"),
)


def bits(array: Words) -> Words:
    return np.ascontiguousarray(array).view(np.uint32 if array.itemsize == 4 else np.uint16)


def agree(array: Words, *, history: Words | None = None, **options: Any) -> dense.DenseInfo:
    stream = dense.encode(array, history=history, **options)
    info = dense.inspect(stream)
    given = history[:, history.shape[1] - info.history :] if history is not None and info.history else None
    found = dense_decoder.decode(stream, history=None if given is None else bits(given))
    assert np.array_equal(found, bits(array))
    assert np.array_equal(bits(dense.decode(stream, history=history)), bits(array))
    return info


def test_plain_decoder_hash_is_xxh64() -> None:
    """Values of xxHash's own documentation and test suites."""
    known = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}
    known[b"Nobody inspects the spammish repetition"] = 0xFBCEA83C8A378BF1
    assert {text: xxh64(text) for text in known} == known


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoder_agrees_on_every_kind_of_array(kind: str, dtype: str) -> None:
    for shape in ((2, 60, 16), (1, 7, 5), (3, 1, 2), (1, 1, 1), (4, 130, 8)):
        agree(sample(kind, dtype, *shape, seed=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [HALF, NEIGHBOURS, PART], ids=["half", "interleaved", "partial"])
def test_plain_decoder_agrees_on_rotated_rows(rotary: dense.RopeConfig, dtype: str) -> None:
    rng = np.random.default_rng(5)
    positions = np.sort(rng.choice(2000, 120, replace=False))
    values = near_rows(rng, 3, 120, 20)
    values += 0.002 * rng.standard_normal(values.shape, np.float32)  # or frames of fp32 are smaller
    array = to_dtype(rotated(values, rotary.dims, rotary.theta, positions, rotary.pairing), dtype)
    array[0, 7] = array[0, 3]
    array[:, 50] = array[:, 49]
    bits(array)[1, 20, ::3] |= 0x7F00
    with_rows = agree(array, rotary=rotary, positions=positions)
    assert with_rows.method == "rows" and with_rows.rotary
    without = agree(array)
    assert with_rows.stream_bytes < without.stream_bytes or without.method == "frame"
    agree(array[:, ::-1], rotary=rotary, positions=positions[::-1])
    agree(array, rotary=rotary, token_ids=rng.integers(0, 9, 120))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 30, 300])
def test_plain_decoder_agrees_with_history(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(6)
    values = rotated(near_rows(rng, 2, rows + 50, 16), 16, 10000.0, np.arange(rows + 50), "half")
    array = to_dtype(values, dtype)
    before, own = array[:, :rows], array[:, rows:]
    info = agree(own, history=before, rotary=HALF, positions=np.arange(rows, rows + 50))
    assert info.history == min(rows, 256)
    agree(before[:, -5:], history=before)


def test_plain_decoder_cases_cover_every_method() -> None:
    noise = sample("words", "fp32", 2, 40, 8, 1)
    found = {
        agree(array).method for array in (noise, sample("cache", "fp16", 2, 60, 16, 3), np.zeros((1, 900, 2), "f4"))
    }
    assert found == {"words", "frame", "rows"}


def damaged() -> dict[str, bytes]:
    """Small streams of all methods; of rows with a copy and an escape."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((2, 2, 16))[:, rng.integers(0, 2, 30)] + 0.1 * rng.standard_normal((2, 30, 16))
    turned = rotated(rows.astype(np.float32), 8, 10000.0, np.arange(30), "half")
    made = {}
    for dtype in DTYPES:
        array = to_dtype(turned, dtype)
        array[:, 10] = array[:, 9]
        bits(array)[0, 20, 3] |= 0x7F80 << 8 * (array.itemsize - 2)
        made[f"rows {dtype}"] = dense.encode(array, rotary=dense.RopeConfig(dims=8))
    made["words"] = dense.encode(sample("words", "fp16", 1, 20, 4, 1))
    made["frame"] = dense.encode(np.zeros((1, 900, 2), np.float32))
    return made


DAMAGED = damaged()


def refused(stream: bytes) -> tuple[bool, bool]:
    try:
        dense.decode(stream)
        here = False
    except FrameError:
        here = True
    try:
        dense_decoder.decode(stream)
        there = False
    except Reject:
        there = True
    return here, there


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_plain_decoder_damage_is_refused_by_both(name: str) -> None:
    stream = DAMAGED[name]
    assert refused(stream) == (False, False)
    assert dense.inspect(stream).method == name.split()[0]
    rng = np.random.default_rng(8)
    for at in range(len(stream)):
        if at > 200 and at % 9:  # of symbols, low parts and tails some: it is slow, and kvmnn by itself is tried on all
            continue
        assert refused(stream[:at]) == (True, True), (name, at)
        changed = bytearray(stream)
        changed[at] ^= int(rng.integers(1, 256))
        assert refused(bytes(changed)) == (True, True), (name, at, changed[at])
    for more in (b"\0", b"\xff", stream):
        assert refused(stream + more) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_decoder_damage_with_valid_checksum_agrees(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is refused, and what is not has the same words: all else that a decoder checks."""
    hashes: list[int] = []

    def noted(data: bytes, seed: int = 0) -> int:
        hashes.append(xxh64(data, seed))
        return hashes[-1]

    monkeypatch.setattr(dense_decoder, "xxh64", noted)
    stream, accepted = DAMAGED[f"rows {dtype}"], 0
    rng = np.random.default_rng(DTYPES.index(dtype))
    for at in [*rng.integers(4, 20, 10), *rng.integers(28, 200, 30), *rng.integers(28, len(stream), 30)]:
        changed = bytearray(stream)
        changed[at] ^= 1 << int(rng.integers(8))
        try:
            dense_decoder.decode(bytes(changed))
        except Reject as error:
            if str(error) == "the checksum":
                changed[20:28] = hashes[-1].to_bytes(8, "little")
        here, there = refused(bytes(changed))
        assert here == there, (at, changed[at])
        if not here:
            accepted += 1
            assert np.array_equal(bits(dense.decode(bytes(changed))), dense_decoder.decode(bytes(changed)))
    assert accepted > 3


def test_plain_decoder_wrong_history_is_refused_by_both() -> None:
    array = sample("cache", "fp16", 2, 60, 16, 4)
    before, own = array[:, :20], array[:, 20:]
    stream = dense.encode(own, history=before)
    assert dense.inspect(stream).history == 20
    other = before.copy()
    bits(other)[:, :, 3] ^= 0x100
    for given in (other, before[:, :19], None):
        with pytest.raises(FrameError):
            dense.decode(stream, history=given)
        with pytest.raises(Reject):
            dense_decoder.decode(stream, history=None if given is None else bits(given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [None, HALF, PART], ids=["none", "half", "partial"])
def test_plain_decoder_agrees_with_shared_tables(rotary: dense.RopeConfig | None, dtype: str) -> None:
    rng = np.random.default_rng(9)
    values = near_rows(rng, 2, 300, 16)
    if rotary:
        values = rotated(values, rotary.dims, rotary.theta, np.arange(300), rotary.pairing)
    array = to_dtype(values, dtype)
    tables = dense.SharedTables.from_arrays([array[:, :150]], rotary=rotary)
    before, own = array[:, 100:180], array[:, 180:250]
    stream = dense.encode(own, tables=tables, history=before, positions=np.arange(180, 250) if rotary else None)
    info = dense.inspect(stream)
    assert info.method == "rows" and info.table_set == xxh64(tables.data) and info.history == 80
    found = dense_decoder.decode(stream, history=bits(before), tables=tables.data)
    assert np.array_equal(found, bits(own)) and np.array_equal(
        found, bits(dense.decode(stream, history=before, tables=tables))
    )
    other = dense.SharedTables.from_arrays([array[:, 150:]], rotary=rotary)
    for wrong in (other.data, None):
        with pytest.raises(Reject):
            dense_decoder.decode(stream, history=bits(before), tables=wrong)
    with pytest.raises(FrameError):
        dense.decode(stream, history=before, tables=other)


@pytest.mark.slow
def test_plain_decoder_damaged_tables_are_refused_by_both() -> None:
    array = sample("rotated", "bf16", 1, 200, 16, 2)
    data = dense.SharedTables.from_arrays([array], rotary=HALF).data
    stream = dense.encode(array[:, :40], tables=dense.SharedTables(data))
    assert dense.inspect(stream).table_set is not None
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        for given in (bytes(changed), data[:at]):
            with pytest.raises(Reject):
                dense_decoder.decode(stream, tables=given)
            with pytest.raises(FrameError):
                dense.decode(stream, tables=dense.SharedTables(given))


def test_plain_decoder_agrees_on_golden_streams(unpacked) -> None:
    """The golden streams of fixtures/dense, those that must be refused included."""
    folder = unpacked("dense")
    cases = json.loads((folder / "index.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 39 and sum(case["refused"] for case in cases) == 16
    for case in cases:
        kind = np.uint32 if case["dtype"] == "fp32" else np.uint16
        history = tables = None
        if "history" in case:
            history = np.fromfile(folder / case["history"], kind).reshape(case["kv_heads"], -1, case["head_dim"])
        if "table_set" in case:
            tables = (folder / case["table_set"]).read_bytes()
        stream = (folder / case["stream"]).read_bytes()
        if case["refused"]:
            with pytest.raises(Reject):
                dense_decoder.decode(stream, history=history, tables=tables)
            continue
        found = dense_decoder.decode(stream, history=history, tables=tables)
        assert found.tobytes() == (folder / case["words"]).read_bytes(), case["name"]
