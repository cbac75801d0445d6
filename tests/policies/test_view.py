"""What a `LayerView` refuses, and what it knows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvmnn import KvmnnError
from kvmnn.policies import LayerView, Moment, View, key_norms


def test_views_refuse() -> None:
    with pytest.raises(KvmnnError, match="tokens is -1"):
        LayerView(tokens=-1)
    with pytest.raises(KvmnnError, match=r"keys have shape \[1, 4, 2\]: expected \[kv_head, 5, head_dim\]"):
        LayerView(tokens=5, keys=np.zeros((1, 4, 2), np.float32))
    with pytest.raises(KvmnnError, match=r"layer 2: scores have shape \[4\]: expected \[5\]"):
        LayerView(tokens=5, layer=2, scores=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="layer 0: values must be a numpy array, not list"):
        LayerView(tokens=1, values=[[[1.0]]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scores are <U1"):
        LayerView(tokens=1, scores=np.array(["a"]))  # type: ignore[arg-type]
    assert LayerView(tokens=2, scores=np.array([1e300, 1])).scores.tolist() == [math.inf, 1]  # type: ignore[union-attr]


def test_scores_come_in_rows() -> None:
    assert LayerView(tokens=2, scores=np.ones(2)).row_scores().shape == (1, 2)
    assert View(tokens=2, scores=np.ones((3, 2), np.float32)).row_scores().shape == (3, 2)
    with pytest.raises(KvmnnError, match="layer 4: no scores are known"):
        View(tokens=2, layer=4).row_scores()


def test_norms_are_given_or_those_of_the_keys() -> None:
    keys = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    norms = key_norms(keys)
    for view in (LayerView(tokens=3, keys=keys), View(tokens=3, norms=norms), LayerView(tokens=3, norms=norms)):
        assert view.has_norms and view.key_rows == 2
        assert np.array_equal(view.key_norms(), norms) and np.array_equal(view.key_norms(2), norms[:, :2])
    for view in (View(tokens=3, layer=1), LayerView(tokens=3, layer=1)):
        assert not view.has_norms
        with pytest.raises(KvmnnError, match="layer 1: neither keys nor their norms are known"):
            view.key_norms()


def test_a_view_at_another_moment() -> None:
    view = LayerView(tokens=3, new=3)
    assert view.at(Moment.ATTENDED) is view
    other = view.at(Moment.CHUNK_END)
    assert (other.moment, other.tokens, other.new, view.moment) == (Moment.CHUNK_END, 3, 3, Moment.ATTENDED)
