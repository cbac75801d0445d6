"""History rows of a unit from several units: a session that is put turn by turn."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from dense_texts import ROTARY, layers_of, same, text, units
from prefixes import MODEL

from kvmnn.store import PrefixStore
from kvmnn.store.unit import MAX_CHAIN_UNITS, MAX_HISTORY_ROWS, parse_unit
from kvmnn.store.write_path import HistoryRef, HistorySource, plan_history

BLOCK = 16


def put_in_turns(store: PrefixStore, ids: list[int], turn: int, begin: int = 0, shift: float = 0.0) -> None:
    for end in range(begin + turn, len(ids) + 1, turn):
        store.put(ids[:end], layers_of(ids[:end], shift=shift), model=MODEL)


def test_history_short_units_use_rows_of_several(tmp_path: Path) -> None:
    """Up to 256 rows, as long as no chain grows too long; in fewer bytes than with those of one unit."""
    ids = text(64 * 12)
    with PrefixStore(tmp_path / "s", block_tokens=BLOCK, rotary=ROTARY) as store:
        store.put(text(300, 9), layers_of(text(300, 9)), model=MODEL)  # tables
        put_in_turns(store, ids, 64)
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), len(ids))
        assert store.verify().damaged == ()
    heads = [unit.dense for unit in units(tmp_path / "s")[1:] if unit.dense]
    assert [each.history_rows for each in heads] == [0, 64, 128, 192, *[MAX_HISTORY_ROWS] * 5, 0, 64, 128]
    assert [each.chain_length for each in heads] == [*range(MAX_CHAIN_UNITS + 1), 0, 1, 2]


def test_plan_history_is_bounded_by_chain_length() -> None:
    full = HistorySource(4, 0)
    assert plan_history([], 64) == HistoryRef()
    assert plan_history([full, full], 64) == HistoryRef(256, 4, 1)
    short = [HistorySource(1, number) for number in range(MAX_CHAIN_UNITS + 1)]
    assert plan_history(short[:3], 64) == HistoryRef(192, 3, 3)
    assert plan_history(short[:-1], 64) == HistoryRef(256, 4, MAX_CHAIN_UNITS)
    assert plan_history(short, 64) == HistoryRef()
    assert plan_history([*short, HistorySource(1, 0)], 64) == HistoryRef(64, 1, 1)
    assert plan_history([HistorySource(3, 0)] * 2, 100) == HistoryRef(MAX_HISTORY_ROWS, 3, 1)


@pytest.mark.parametrize("where", ["directory", "file"])
def test_history_parallel_growing_sessions_round_trip(tmp_path: Path, where: str) -> None:
    """Units of several texts between each other, from stores that are opened again: what is got, and verified."""
    url = str(tmp_path / "s")
    if where == "file":
        pytest.importorskip("fsspec")
        url = f"file://{tmp_path}/s"
    rng = random.Random(4)
    begin = text(150, 5)
    sessions = [[*begin, *text(700, seed)] for seed in range(3)]
    ends = [0, 0, 0]
    store = PrefixStore(url, block_tokens=BLOCK, codec="dense")
    for _ in range(40):
        which = rng.randrange(3)
        ends[which] = min(ends[which] + rng.choice([3, 16, 40, 64, 130]), 850)
        ids = sessions[which][: ends[which]]
        store.put(ids, layers_of(ids), model=MODEL)
        if rng.random() < 0.2:
            store.close()
            store = PrefixStore(url, block_tokens=BLOCK)
    for ids, end in zip(sessions, ends, strict=True):
        found = store.get(ids, model=MODEL)
        assert found.tokens == end and found.notes == ()
        assert same(found.layers, layers_of(ids), end)
    verified = store.verify()
    assert verified.damaged == () and verified.units == store.stats().units
    store.close()


def test_history_stops_at_rows_that_differ(tmp_path: Path) -> None:
    """Row 40 differs: history excludes its block and everything before it."""
    ids = text(64 * 4)
    with PrefixStore(tmp_path / "s", block_tokens=BLOCK, codec="dense") as store:
        store.put(text(300, 9), layers_of(text(300, 9)), model=MODEL)
        put_in_turns(store, ids[:128], 64)
        put = layers_of(ids)
        for cache in put:
            cache.keys[0, 40, 3] += 1
        store.put(ids, put, model=MODEL)
        found = store.get(ids, model=MODEL)
        for got, first, second in zip(found.layers, layers_of(ids), put, strict=True):
            assert got.keys.tobytes() == np.concatenate([first.keys[:, :128], second.keys[:, 128:]], 1).tobytes()
        assert store.verify().damaged == ()
    assert [unit.dense and unit.dense.history_rows for unit in units(tmp_path / "s")][1:] == [0, 64, 80]


def test_history_damaged_middle_unit_loses_its_dependents(tmp_path: Path) -> None:
    ids = text(64 * 6)
    with PrefixStore(tmp_path / "s", block_tokens=BLOCK, codec="dense") as store:
        store.put(text(300, 9), layers_of(text(300, 9)), model=MODEL)
        put_in_turns(store, ids, 64)
    files = sorted(tmp_path.glob("s/units/*/*.unit"))[1:]
    data = bytearray(files[2].read_bytes())
    data[-1] ^= 1
    files[2].write_bytes(data)
    assert parse_unit(np.frombuffer(data, np.uint8)).start == 128
    with PrefixStore(tmp_path / "s") as store:
        damaged = store.verify().damaged
        assert damaged and "layer 1" in damaged[0]
        found = store.get(ids, model=MODEL)
        assert found.tokens == 128 and same(found.layers, layers_of(ids), 128)
        put_in_turns(store, ids, 64, begin=128)
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), len(ids))
        assert store.verify().damaged == ()
