"""Caches of transformers that hold a part of a model's state: what is missing is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_files import KINDS, Instance, cache_object, dynamic_cache, in_memory, old_cache, pairs, save

import kvmnn

STATE = np.ones((1, 8, 4), "<f4")


def layer(kind: str, **state: Any) -> Instance:
    return Instance(KINDS + kind, {"is_initialized": True, **state})


def missing(path: Path, value: Any) -> list[str]:
    """What both the saved file and the object in memory say."""
    said = [kvmnn.open(save(path, value)).completeness, kvmnn.open(in_memory(value)).completeness]
    assert said[0] == said[1] and said[0] is not None
    return said[0].missing


def test_completeness_names_linear_attention_layers(tmp_path: Path) -> None:
    ((keys, values),) = pairs(1, layers=1)
    full = layer("DynamicLayer", keys=keys, values=values)
    states = {"conv_states": {0: STATE}, "recurrent_states": {0: STATE}, "has_previous_state": {0: True}}
    linear = layer("LinearAttentionLayer", **states)
    conv = layer("LinearAttentionLayer", conv_states={0: STATE}, recurrent_states={0: None})
    other = layer("NewLayer", memory=[STATE])
    path = tmp_path / "cache.pt"
    for layers, expected in (
        (
            [linear, linear, full],
            ["2 of 3 layers have linear attention and are kept in conv_states and recurrent_states"],
        ),
        ([conv, full], ["1 of 2 layers has recurrent or convolution state and is kept in conv_states"]),
        ([full, other], ["1 of 2 layers has state of an unknown kind and is kept in memory"]),
        ([full, layer("DummyLayer", keys=None, values=None)], []),
    ):
        said = missing(path, Instance(KINDS + "DynamicCache", {"layers": layers}))
        assert said == [f"{each}, not as K and V" for each in expected]


def test_completeness_names_states_next_to_keys_and_values(tmp_path: Path) -> None:
    ((keys, values),) = pairs(1, layers=1)
    both = layer("LinearAttentionAndFullAttentionLayer", keys=keys, values=values, conv_states={0: STATE})
    index = layer("DynamicIndexedLayer", keys=keys, values=values, indexer_keys=STATE)
    value = Instance(KINDS + "DynamicCache", {"layers": [both, both, index]})
    assert missing(tmp_path / "cache.pt", value) == [
        "2 of 3 layers have conv_states in addition to K and V, not included",
        "1 of 3 layers has indexer_keys in addition to K and V, not included",
    ]


@pytest.mark.parametrize("as_dict", [False, True])
def test_completeness_names_state_lists_of_hybrid_caches(tmp_path: Path, as_dict: bool) -> None:
    """Jamba, Zamba and MiniMax of transformers 4 and 5."""
    ((keys, values),) = pairs(1, layers=1)
    empty = np.empty((1, 0), "<f4")
    states: Any = [STATE, empty]
    value = old_cache(
        "HybridMambaAttentionDynamicCache",
        [empty, keys],
        [empty, values],
        conv_states=dict(enumerate(states)) if as_dict else states,
        ssm_states=states,
        transformer_layers=[1],
    )
    expected = [
        "1 of 2 layers has recurrent or convolution state and is kept in conv_states and ssm_states, not as K and V"
    ]
    assert missing(tmp_path / "cache.pt", value) == expected
    minimax = cache_object(
        "MiniMaxCache", "DynamicLayer", [{"keys": None, "values": None}, {"keys": keys, "values": values}]
    )
    minimax.state["linear_cache"] = [STATE, []]
    assert missing(tmp_path / "cache.pt", minimax) == [
        "1 of 2 layers has linear attention and is kept in linear_cache, not as K and V"
    ]


def test_completeness_of_truncated_cache_counts_missing_tokens(tmp_path: Path) -> None:
    made = pairs(2, shape=(1, 2, 8, 4))
    lists = [[pair[part] for pair in made] for part in (0, 1)]
    value = old_cache("DynamicCache", *lists, _seen_tokens=20)
    assert missing(tmp_path / "cache.pt", value) == [
        "8 of 20 tokens that the model has seen are stored, and nothing tells which"
    ]
    cache = kvmnn.open(tmp_path / "cache.pt").engine_cache
    assert cache is not None and not cache.is_contiguous_prefix and cache.positions is None
    assert "8 tokens, bfloat16, positions unknown" in str(cache)
    whole = old_cache("DynamicCache", *lists, _seen_tokens=8)
    assert missing(tmp_path / "cache.pt", whole) == []


def test_completeness_full_layers_of_different_lengths_were_cut(tmp_path: Path) -> None:
    """As by L2 compression, which leaves the first layers alone: transformers 5 counts nothing."""
    made = [*pairs(1, shape=(1, 2, 20, 4)), *pairs(2, layers=3, shape=(1, 2, 8, 4))]
    assert missing(tmp_path / "cache.pt", dynamic_cache(made)) == [
        "in 3 of 5 layers 8 of 20 tokens that the model has seen are stored, and nothing tells which"
    ]


def test_completeness_ids_or_mask_longer_than_cache(tmp_path: Path) -> None:
    made = pairs(2, shape=(1, 2, 8, 4))
    for beside in ({"input_ids": np.arange(20)[None]}, {"attention_mask": np.ones((1, 20), "<i8")}):
        value = {"past_key_values": dynamic_cache(made), **beside}
        (said,) = missing(tmp_path / "cache.pt", value)
        assert said.startswith("8 tokens are stored and ") and "of 20 were saved with them" in said


@pytest.mark.parametrize("is_rerotated", [False, True])
@pytest.mark.parametrize("seen", [8, 12, 13, 20, 1000])
def test_completeness_sink_cache_holds_first_and_last_tokens(tmp_path: Path, seen: int, is_rerotated: bool) -> None:
    """Of models with RoPE it rotates K whenever it drops a token: K has no positions of the text then."""
    made = pairs(2, shape=(1, 2, min(seen, 12), 4))
    lists = [[pair[part] for pair in made] for part in (0, 1)]
    more = {"_cos_cache": np.ones((12, 4), "<f4")} if is_rerotated else {"_cos_cache": None}
    value = old_cache("SinkCache", *lists, _seen_tokens=seen, num_sink_tokens=4, window_length=12, **more)
    said = missing(tmp_path / "cache.pt", value)
    cache = kvmnn.open(tmp_path / "cache.pt").engine_cache
    assert cache is not None and cache.is_contiguous_prefix == (seen <= 12)
    if seen > 12:
        assert cache.position_runs == (None if is_rerotated else ((0, 4), (seen - 8, 8)))
        assert cache.positions_unknown == is_rerotated
        kept = f"a SinkCache holds the first 4 and the last 8 of {seen:,} tokens"
        assert said == [kept + (", with K rotated to their places in the cache" if is_rerotated else "")]


def test_completeness_is_recorded_in_frames(tmp_path: Path, run: Any) -> None:
    made = pairs(2, shape=(1, 2, 8, 4))
    value = old_cache("DynamicCache", *([pair[part] for pair in made] for part in (0, 1)), _seen_tokens=20)
    run("encode", save(tmp_path / "cache.pt", value), "-o", tmp_path / "frames/")
    cache = kvmnn.open(tmp_path / "frames").engine_cache
    assert cache is not None and cache.positions_unknown and not cache.is_contiguous_prefix
