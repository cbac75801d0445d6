"""`LayerState`: fields that are refused, and values that it derives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvmnn import KvmnnError
from kvmnn.policies import LayerState, PolicyInput, Trigger, compute_key_norms


def test_layer_state_invalid_fields_are_refused() -> None:
    with pytest.raises(KvmnnError, match="tokens is -1"):
        LayerState(tokens=-1)
    with pytest.raises(KvmnnError, match=r"keys have shape \[1, 4, 2\]: expected \[kv_head, 5, head_dim\]"):
        LayerState(tokens=5, keys=np.zeros((1, 4, 2), np.float32))
    with pytest.raises(KvmnnError, match=r"layer 2: scores have shape \[4\]: expected \[5\]"):
        LayerState(tokens=5, layer=2, scores=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="layer 0: values must be a numpy array, not list"):
        LayerState(tokens=1, values=[[[1.0]]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scores are <U1"):
        LayerState(tokens=1, scores=np.array(["a"]))  # type: ignore[arg-type]
    assert LayerState(tokens=2, scores=np.array([1e300, 1])).scores.tolist() == [math.inf, 1]  # type: ignore[union-attr]


def test_get_row_scores_shape_is_rows_by_tokens() -> None:
    assert LayerState(tokens=2, scores=np.ones(2)).get_row_scores().shape == (1, 2)
    assert PolicyInput(tokens=2, scores=np.ones((3, 2), np.float32)).get_row_scores().shape == (3, 2)
    with pytest.raises(KvmnnError, match="layer 4: no scores are known"):
        PolicyInput(tokens=2, layer=4).get_row_scores()


def test_layer_state_norms_are_passed_or_computed_from_keys() -> None:
    keys = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    norms = compute_key_norms(keys)
    for view in (
        LayerState(tokens=3, keys=keys),
        PolicyInput(tokens=3, norms=norms),
        LayerState(tokens=3, norms=norms),
    ):
        assert view.has_norms and view.num_key_rows == 2
        assert np.array_equal(view.get_key_norms(), norms) and np.array_equal(view.get_key_norms(2), norms[:, :2])
    for view in (PolicyInput(tokens=3, layer=1), LayerState(tokens=3, layer=1)):
        assert not view.has_norms
        with pytest.raises(KvmnnError, match="layer 1: neither keys nor their norms are known"):
            view.get_key_norms()


def test_with_trigger_copies_only_on_change() -> None:
    view = LayerState(tokens=3, num_new=3)
    assert view.with_trigger(Trigger.AFTER_ATTENTION) is view
    other = view.with_trigger(Trigger.CHUNK_END)
    assert (other.trigger, other.tokens, other.num_new, view.trigger) == (
        Trigger.CHUNK_END,
        3,
        3,
        Trigger.AFTER_ATTENTION,
    )
