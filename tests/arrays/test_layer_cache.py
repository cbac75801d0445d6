"""LayerCache: what fits together and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmnn import LayerCache
from kvmnn.arrays.layer_cache import check_kv_pair
from kvmnn.errors import KvmnnError


def words(heads: int = 2, tokens: int = 3, head_dim: int = 4) -> np.ndarray:
    return np.zeros((heads, tokens, head_dim), np.float16)


def cache(**more: Any) -> LayerCache:
    return LayerCache(**{"layer": 0, "keys": words(), "values": words(), **more})


def test_layer_cache_defaults_describe_a_whole_prefix() -> None:
    found = cache(layer=7)
    assert (found.layer, found.kv_heads, found.tokens, found.head_dim, found.dtype) == (7, 2, 3, 4, "fp16")
    assert (found.positions.tolist(), found.ends.tolist(), found.tokens_seen) == ([0, 1, 2], [1, 2, 3], 3)
    assert found.nbytes == 2 * 2 * 3 * 4 * 2
    assert cache(keys=words(tokens=0), values=words(tokens=0)).tokens_seen == 0


def test_layer_cache_positions_may_differ_by_head() -> None:
    assert cache(positions=[0, 4, 9]).ends.tolist() == [1, 5, 10]
    apart = cache(positions=[[0, 4, 9], [0, 1, 2]], ends=[[4, 9, 12], [1, 2, 12]], tokens_seen=12)
    assert apart.tokens_seen == 12 and apart.positions.shape == (2, 3)
    assert cache(positions=[0, 4, 9], tokens_seen=20).tokens_seen == 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": [-1, 0, 1]},
        {"positions": [0, 1, 2], "ends": [1, 1, 3]},
        {"positions": [0, 1, 2], "ends": [1, 0, 3]},
        {"positions": [0, 1, 2], "ends": [1, 2, 5], "tokens_seen": 4},
        {"tokens_seen": 2},
        {"tokens_seen": 0},
    ],
)
def test_layer_cache_impossible_positions_are_refused(wrong: dict[str, Any]) -> None:
    """Each rule by itself: not below 0, ends after their positions, nothing after the tokens seen."""
    with pytest.raises(KvmnnError, match="positions must not be below 0, ends must lie after them"):
        cache(**wrong)


def test_layer_cache_values_may_have_another_head_dim() -> None:
    found = cache(values=words(head_dim=6))
    assert (found.head_dim, found.value_dim, found.nbytes) == (4, 6, 2 * 3 * (4 + 6) * 2)
    assert cache(values=words(head_dim=0)).nbytes == 2 * 3 * 4 * 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer": -1}, "layers count from 0"),
        ({"positions": [0, 1]}, "do not fit 2 heads of 3 tokens"),
        ({"positions": [[0, 1, 2]]}, "do not fit 2 heads of 3 tokens"),
        ({"positions": [0, 1, 2], "ends": [[1, 2, 3]] * 2}, "do not fit 2 heads of 3 tokens"),
        ({"positions": [0.0, 1.0, 2.0]}, "positions are float64: expected integers"),
        ({"values": words(tokens=2)}, r"keys have shape \[2, 3, 4\], values \[2, 2, 4\]"),
        ({"values": words().astype(np.float32)}, "keys are float16, values float32"),
        ({"keys": words()[0]}, r"keys have shape \[3, 4\]: expected 3 axes"),
        ({"keys": words(0), "values": words(0)}, "has no heads or no head_dim"),
        ({"keys": words(head_dim=0), "values": words(head_dim=0)}, "has no heads or no head_dim"),
        ({"keys": words(head_dim=0)}, r"shape \[2, 3, 0\] has no heads or no head_dim"),
    ],
)
def test_layer_cache_mismatched_arrays_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(KvmnnError, match=said):
        cache(**wrong)


def test_check_kv_pair_heads_are_third_axis_from_end() -> None:
    batch = np.zeros((0, 2, 3, 4), np.float16)
    check_kv_pair("x", batch, batch, num_axes=4)
    with pytest.raises(KvmnnError, match="has no heads"):
        check_kv_pair("x", np.zeros((1, 0, 3, 4), np.float16), np.zeros((1, 0, 3, 4), np.float16), num_axes=4)
    with pytest.raises(TypeError, match="keys must be a numpy array, not list"):
        check_kv_pair("x", [], batch, num_axes=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "c8"])
def test_layer_cache_unsupported_dtype_is_refused(dtype: str) -> None:
    """Bad input as any other, and a wrong type."""
    words = np.zeros((2, 3, 4), dtype)
    for error in (KvmnnError, TypeError):
        with pytest.raises(
            error, match=f"layer 5: keys are {words.dtype}: expected float16, float32, or uint16 for bf"
        ):
            LayerCache(layer=5, keys=words, values=words)
