"""State that is not K and V, as bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmnn.arrays.completeness import Completeness, LayerStateInfo
from kvmnn.arrays.opaque_state import include_states, make_state
from kvmnn.errors import SourceError


def test_opaque_state_unexpected_size_is_refused() -> None:
    state = make_state(3, "conv_states", bytes(24), dtype="float32", shape=(1, 2, 3))
    assert state.read() == bytes(24)
    with pytest.raises(SourceError, match=r"layer 3: state 'conv_states' has 24 bytes where 25 were announced"):
        replace(state, nbytes=25).read()


def test_include_states_of_some_layers_leaves_remaining_layers_missing() -> None:
    layers = (
        LayerStateInfo(layer=0),
        LayerStateInfo(layer=1, kind="linear", included=False),
        LayerStateInfo(layer=2, kind="recurrent", included=False),
        LayerStateInfo(layer=3, kind="index", included=False),
    )
    states = [make_state(number, "state", b"1234") for number in (1, 3)]
    found = include_states(Completeness(layers=layers), states)
    assert [state.included for state in found.layers] == [True, True, False, False]
    assert make_state(1, "state", b"1234").shape == (4,)
