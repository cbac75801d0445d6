"""Window layers of transformers: the tokens that they hold, with their true positions, saved and in memory alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_files import cache_object, hybrid_cache, in_memory, pairs, save

import kvmnn

TOKENS, WINDOW, ROWS = 20, 8, 32


def both(tmp_path: Path, value: Any) -> list[Any]:
    return [kvmnn.open(save(tmp_path / "cache.pt", value)), kvmnn.open(in_memory(value))]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("is_sliding", [list, np.array, lambda said: [int(each) for each in said]])
def test_hybrid_cache_has_positions_per_layer(tmp_path: Path, dtype: str, first: bool, is_sliding: Any) -> None:
    made = pairs(5, layers=4, shape=(2, 2, TOKENS, 4), dtype=dtype)
    sliding = [(number % 2 == 0) == first for number in range(4)]
    value = hybrid_cache(made, sliding, window=WINDOW, rows=ROWS, said=is_sliding(sliding))
    for source in both(tmp_path, value):
        cache = source.engine_cache
        assert cache is not None
        assert cache.layer_position_runs == tuple(((12, 8),) if each else ((0, 20),) for each in sliding)
        for number, (pair, each) in enumerate(zip(made, sliding, strict=True)):
            for part, words in zip(("key", "value"), pair, strict=True):
                expected = words[:, :, -WINDOW:] if each else words
                assert source[f"layer_{number}.{part}"].to_numpy().tobytes() == expected.tobytes()
        said = source.completeness
        assert said is not None
        assert [state.kind for state in said.layers] == ["window" if each else "full" for each in sliding]
        assert [state.window for state in said.layers if state.kind == "window"] == [WINDOW, WINDOW]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 31, 32])
def test_hybrid_cache_of_any_length_has_last_tokens(tmp_path: Path, tokens: int) -> None:
    made = pairs(tokens, layers=2, shape=(1, 2, tokens, 4), dtype="fp16")
    for source in both(tmp_path, hybrid_cache(made, [True, False], window=WINDOW, rows=ROWS)):
        stored = min(tokens, WINDOW)
        assert source["layer_0.key"].to_numpy().tobytes() == made[0][0][:, :, -stored:].tobytes()
        assert source["layer_1.key"].shape == (1, 2, tokens, 4)
        cache = source.engine_cache
        assert cache is not None and cache.is_contiguous_prefix == (tokens <= WINDOW)
        if tokens > WINDOW:
            assert cache.layer_position_runs == (((tokens - WINDOW, WINDOW),), ((0, tokens),))


def test_hybrid_cache_zero_row_in_window_is_no_token(tmp_path: Path) -> None:
    """Transformers 4.42 to 4.51 leave such a row where a window fills token by token."""
    made = pairs(3, layers=2, shape=(1, 2, 9, 4), dtype="fp16")
    value = hybrid_cache(made, [True, False], window=WINDOW, rows=ROWS)
    for lists, part in zip(("key_cache", "value_cache"), made[0], strict=True):
        rows = [part[:, :, 2:7], np.zeros_like(part[:, :, :1]), part[:, :, 7:9]]
        value.state[lists][0] = np.concatenate(rows, axis=2)
    for source in both(tmp_path, value):
        assert source["layer_0.value"].to_numpy().tobytes() == made[0][1][:, :, 2:].tobytes()
        assert source.engine_cache is not None and source.engine_cache.layer_position_runs == (((2, 7),), ((0, 9),))


@pytest.mark.parametrize("kind", ["SlidingWindowCache", "HybridCache"])
@pytest.mark.parametrize("tokens", [5, 8, 20])
def test_hybrid_cache_windows_alone_leave_length_unknown(tmp_path: Path, kind: str, tokens: int) -> None:
    made = pairs(4, layers=2, shape=(1, 2, tokens, 4), dtype="fp16")
    for source in both(tmp_path, hybrid_cache(made, [True, True], window=WINDOW, rows=ROWS, kind=kind)):
        cache, said = source.engine_cache, source.completeness
        assert cache is not None and said is not None and cache.tokens == min(tokens, WINDOW)
        assert cache.is_contiguous_prefix == said.is_complete == (tokens < WINDOW)
        if tokens >= WINDOW:
            assert said.missing == [
                "windows of 8 tokens are full, and nothing tells how many tokens the model has seen"
            ]


def test_chunked_cache_has_cumulative_length_per_window(tmp_path: Path) -> None:
    made = pairs(4, layers=3, shape=(1, 2, TOKENS, 4), dtype="fp16")
    value = hybrid_cache(made, [True, True, False], window=WINDOW, rows=ROWS, said=[1, 1, 0], kind="HybridChunkedCache")
    value.state["cumulative_length"] = [TOKENS, TOKENS, 0]
    for source in both(tmp_path, value):
        assert source.engine_cache is not None
        assert source.engine_cache.layer_position_runs == (((12, 8),), ((12, 8),), ((0, 20),))


@pytest.mark.parametrize("says", ["cumulative_length_int", "cumulative_length", ""])
def test_static_windows_of_transformers_5(tmp_path: Path, says: str) -> None:
    """The tensor of a full window is no longer counted on; versions before 4.56 say no length at all."""
    made = pairs(6, layers=2, shape=(1, 2, TOKENS, 4), dtype="fp16")
    window = {"keys": made[0][0][:, :, -WINDOW:].copy(), "values": made[0][1][:, :, -WINDOW:].copy()}
    window |= {"max_cache_len": WINDOW, "is_initialized": True}
    window |= {says: TOKENS} if says else {}
    window |= {"cumulative_length": np.array(0, "<i8")} if says.endswith("int") else {}
    full = [np.concatenate([part, np.zeros_like(part)], axis=2) for part in made[1]]
    value = cache_object("StaticCache", "StaticSlidingWindowLayer", [window])
    rest = {
        "keys": full[0],
        "values": full[1],
        "max_cache_len": 2 * TOKENS,
        "cumulative_length": np.array(TOKENS, "<i8"),
    }
    value.state["layers"] += cache_object("StaticCache", "StaticLayer", [rest]).state["layers"]
    source = kvmnn.open(save(tmp_path / "cache.pt", value))
    assert source.engine_cache is not None and source.engine_cache.layer_position_runs == (((12, 8),), ((0, 20),))
    assert source["layer_0.key"].to_numpy().tobytes() == window["keys"].tobytes()


def test_pairs_with_a_window_between_full_layers(tmp_path: Path) -> None:
    """What iterating over a DynamicCache of transformers 5 gives."""
    made = pairs(7, layers=2, shape=(1, 2, TOKENS, 4), dtype="fp16")
    window = np.array(WINDOW, "<i8")
    value = [(*(part[:, :, -7:].copy() for part in made[0]), window), (*made[1], None)]
    for given in (value, tuple(value)):
        source = kvmnn.open(save(tmp_path / "cache.pt", given))
        assert source.engine_cache is not None and source.engine_cache.layer_position_runs == (((13, 7),), ((0, 20),))
    alone = kvmnn.open(save(tmp_path / "cache.pt", value[:1]))
    assert alone.engine_cache is not None and alone.engine_cache.positions_unknown


@pytest.mark.parametrize("tokens", [6, 14, 20])
def test_hybrid_cache_tokens_with_zero_keys_are_tokens(tmp_path: Path, tokens: int) -> None:
    """K and V of a token with the embedding of padding are zeros in the first layer."""
    made = pairs(tokens, layers=4, shape=(1, 2, tokens, 4), dtype="fp16")
    for part in (*made[0], *made[1]):
        part[:, :, [0, -1]] = 0
    value = hybrid_cache(made, [True, False, True, False], window=WINDOW, rows=ROWS)
    for source in both(tmp_path, value):
        stored = min(tokens, WINDOW)
        assert source["layer_0.key"].to_numpy().tobytes() == made[0][0][:, :, -stored:].tobytes()
        assert source["layer_1.value"].to_numpy().tobytes() == made[1][1].tobytes()
        assert source.completeness is not None and source.completeness.is_complete
