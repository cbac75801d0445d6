"""Sources: names to arrays, and several inputs joined into one."""

from __future__ import annotations

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.source import Source, merge_sources, parse_cache_info
from kvmnn.errors import ManifestError
from kvmnn.packed.cache_info import METADATA_KEY

KEYS = np.random.default_rng(6).standard_normal((2, 3, 4)).astype(np.float16)


@pytest.fixture
def both(tmp_path):
    np.savez(tmp_path / "both.npz", k=KEYS, v=-KEYS.astype(np.float32))
    return tmp_path / "both.npz"


def test_source_is_a_mapping_of_names_to_arrays(both):
    source = kvmnn.open(both)
    assert list(source) == ["k", "v"] == list(source.names)
    assert len(source) == 2
    assert "k" in source
    assert "w" not in source
    assert source.nbytes == KEYS.nbytes * 3
    np.testing.assert_array_equal(source["v"].to_numpy(), -KEYS)
    with pytest.raises(KeyError, match="no array named 'w'; there are 'k', 'v'"):
        source["w"]
    assert repr(source) == f"<Source {both} (144 bytes) k: fp16 [2, 3, 4]; v: fp32 [2, 3, 4]>"


def test_source_repr_of_many_arrays_is_short(tmp_path):
    np.savez(tmp_path / "many.npz", **{f"layer_{number}": KEYS for number in range(40)})
    assert repr(kvmnn.open(tmp_path / "many.npz")).endswith("layer_7: fp16 [2, 3, 4]; 32 more>")


def test_merge_sources_single_source_is_returned(both):
    source = kvmnn.open(both)
    assert merge_sources([source]) is source


def test_merge_sources_gives_distinct_names(both, tmp_path):
    np.save(tmp_path / "k.npy", KEYS)
    source = merge_sources([kvmnn.open(both), kvmnn.open(tmp_path / "k.npy"), kvmnn.open(both)])
    assert source.names == ("k", "v", "k~2", "k~3", "v~2")
    assert source.inputs == (str(both), str(tmp_path / "k.npy"), str(both))


def test_merge_sources_merges_metadata():
    first = Source([], {"a": "1", METADATA_KEY: "{}"}, ["left out"], token_major=True)
    second = Source([], {"a": "2", "b": "3"}, notes=["inferred"], lossy=True)
    found = merge_sources([first, second])
    assert (found.metadata, found.skipped_arrays, found.notes) == ({"a": "1", "b": "3"}, ["left out"], ["inferred"])
    assert (found.cache, found.token_major, found.lossy) == (None, True, True)


def test_parse_cache_info_malformed_metadata_is_refused():
    assert parse_cache_info({}, "x") is None
    with pytest.raises(ManifestError, match=r"x: metadata 'kvmnn\.cache': is not valid JSON"):
        parse_cache_info({METADATA_KEY: "{"}, "x")
