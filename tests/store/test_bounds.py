"""Limits of a store: the largest and smallest accepted values, and the first refused ones."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same

from kvmnn import LayerCache
from kvmnn.errors import KvmnnError, SourceError
from kvmnn.store import PrefixStore
from kvmnn.store.namespace import (
    MAX_ID,
    MAX_LAYERS,
    MAX_TOKENS,
    build_namespace,
    count_common_entries,
    count_common_ids,
    count_ids_in_sort_key,
    parse_namespace,
    to_sort_key,
    to_token_ids,
)
from kvmnn.store.remote.records import UnitRecord, parse_record
from kvmnn.store.unit import DamagedUnitError, count_header_bytes, parse_header


def caches(count: int, heads: int = 1, dims: int = 1) -> list[LayerCache]:
    words = np.zeros((heads, 1, dims), np.float16)
    return [LayerCache(layer=layer, keys=words, values=words) for layer in range(count)]


def test_build_namespace_number_of_layers_is_bounded() -> None:
    assert len(build_namespace(caches(MAX_LAYERS), MODEL).layers) == MAX_LAYERS
    for count in (0, MAX_LAYERS + 1):
        with pytest.raises(KvmnnError, match=f"there are {count:,} layers: expected 1 to {MAX_LAYERS:,}"):
            build_namespace(caches(count), MODEL)


@pytest.mark.parametrize(("heads", "dims"), [(1 << 16, 1), (1, 1 << 20)])
def test_parse_namespace_shapes_are_bounded(heads: int, dims: int) -> None:
    space = build_namespace(caches(1, heads, dims), MODEL)
    assert parse_namespace(space.to_json(), "x") == space
    most = max(heads, dims)
    with pytest.raises(KvmnnError, match=r"x: layer 0 has .* kv heads x .* dims"):
        parse_namespace(space.to_json().replace(str(most), str(most + 1)), "x")


@pytest.mark.parametrize("layers", [[[0, 0, 1]], [[0, 1, 0]], [[0, 1]], [], [[1, 1, 1], [0, 1, 1]], [[-1, 1, 1]]])
def test_parse_namespace_invalid_layers_are_refused(layers: list[list[int]]) -> None:
    with pytest.raises(KvmnnError, match=r"^x"):
        parse_namespace(json.dumps({"model": MODEL, "dtype": "fp16", "layers": layers}), "x")


def test_to_token_ids_count_and_values_are_bounded() -> None:
    assert MAX_TOKENS == 1 << 24 and MAX_ID == (1 << 32) - 1
    assert to_token_ids(np.zeros(MAX_TOKENS, np.uint8)).size == MAX_TOKENS
    with pytest.raises(KvmnnError, match="there are 16,777,217, expected at most 16,777,216"):
        to_token_ids(np.zeros(MAX_TOKENS + 1, np.uint8))
    assert to_token_ids([MAX_ID, 0]).tolist() == [MAX_ID, 0]
    for wrong, found in ((MAX_ID + 1, "4,294,967,296"), (-1, "-1")):
        with pytest.raises(KvmnnError, match=f"number 2: expected one from 0 to 4,294,967,295, found {found}$"):
            to_token_ids([7, wrong])
    for ids, there in (([], "none"), ([1.5], r"float64 of shape \[1\]"), ([[1], [1, 2]], "no numbers")):
        with pytest.raises(KvmnnError, match=f"expected a list of at least one whole number, found {there}$"):
            to_token_ids(ids)  # type: ignore[arg-type]


def test_unit_record_of_one_token_round_trips(tmp_path: Path) -> None:
    record = UnitRecord(b"s" * 16, b"p" * 16, 77, 1000, MAX_TOKENS, np.arange(1, dtype="<u4"))
    found = parse_record(record.to_bytes())
    assert found is not None and (found.ids.tolist(), found.start) == ([0], MAX_TOKENS)
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        store.put([7], layers_of([7]), model=MODEL)
        assert same(store.get([7, 8], model=MODEL).layers, [7], 1)
    (file,) = tmp_path.glob("s/units/*/*.unit")
    data = np.fromfile(file, np.uint8)
    head = count_header_bytes(1, 4, 0)
    assert parse_header(data[:head]).ids.tolist() == [7]
    with pytest.raises(DamagedUnitError, match=f"has {head - 1} bytes: its header alone has {head}"):
        parse_header(data[: head - 1])


def test_unit_record_length_is_bounded() -> None:
    ids = np.zeros(MAX_TOKENS + 1, "<u4")
    for tokens, is_one in ((MAX_TOKENS, True), (MAX_TOKENS + 1, False)):
        data = UnitRecord(b"s" * 16, b"p" * 16, 77, 1000, 0, ids[:tokens]).to_bytes()
        assert (parse_record(data) is not None) == is_one


def test_stats_memory_store_has_no_index() -> None:
    pytest.importorskip("fsspec")
    with PrefixStore("memory://test_bounds", block_tokens=4) as store:
        store.put(range(9), layers_of(range(9)), model=MODEL)
        found = store.stats()
    assert (found.index_bytes, found.units, found.blocks, found.tokens) == (None, 1, 2, 9)
    assert "index" not in str(found)


def test_open_foreign_database_is_unchanged(tmp_path: Path) -> None:
    """A foreign database at the path of the index is not changed."""
    (tmp_path / "s").mkdir()
    path = tmp_path / "s" / "index.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SourceError, match="is not a prefix store"):
        PrefixStore(tmp_path / "s", block_tokens=4)
    assert path.read_bytes() == before
    assert [entry.name for entry in (tmp_path / "s").iterdir()] == ["index.sqlite"]


@pytest.mark.parametrize("most", [1 << 16, (0xFF << 16) + 3, 1 << 31, 1 << 32])
def test_to_sort_key_sorts_like_the_ids(most: int) -> None:
    rng = np.random.default_rng(most)
    for _ in range(300):
        shared = rng.integers(max(0, most - 4), most, rng.integers(0, 6)).tolist()
        one, other = (
            to_token_ids([*shared, *rng.integers(low, most, rng.integers(1, 5)).tolist()])
            for low in (0, max(0, most - 2))
        )
        texts = to_sort_key(one), to_sort_key(other)
        assert (texts[0] < texts[1]) == (one.tolist() < other.tolist())
        assert count_common_ids(*texts) == count_common_entries(one, other)
        assert count_ids_in_sort_key(texts[0]) == one.size
        assert not most <= 0xFF << 16 or len(texts[0]) == 3 * one.size  # as earlier versions wrote them
