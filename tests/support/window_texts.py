"""Texts of a model in which some layers have a sliding window and some have state that is not K and V."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import prefixes

from kvmnn import LayerCache
from kvmnn.arrays.opaque_state import OpaqueState, make_state
from kvmnn.store import PrefixStore, PutResult, StoredPrefix

WINDOW = 8
WINDOWS = (1, 2)
STATE_LAYERS = (4, 5)
MODEL = "a hybrid model"


def layers_of(ids: Sequence[int], *, windows: Sequence[int] = WINDOWS, layers: int = 4) -> list[LayerCache]:
    """K and V of a text; those of windows are its last `WINDOW` tokens, of another head_dim."""
    found = []
    for cache in prefixes.layers_of(ids, layers=layers):
        if cache.layer in windows:
            begin = max(len(ids) - WINDOW, 0)
            keys = np.concatenate([cache.keys[:, begin:], cache.values[:, begin:]], axis=2)
            positions = np.arange(begin, len(ids))
            cache = LayerCache(
                layer=cache.layer, keys=keys, values=keys[::-1], positions=positions, tokens_seen=len(ids)
            )
        found.append(cache)
    return found


def states_of(ids: Sequence[int], layers: Sequence[int] = STATE_LAYERS) -> list[OpaqueState]:
    """Two states a layer, each of bytes that depend on all ids."""
    found = []
    for layer in layers:
        seed = hashlib.blake2b(np.array([layer, *ids], "<u4").tobytes()).digest()
        found.append(make_state(layer, "conv_states", seed * 3, dtype="bfloat16", shape=(2, 3, 16)))
        found.append(make_state(layer, "recurrent_states", seed * 2, dtype="float32", shape=(1, 4, 8)))
    return found


def put(store: PrefixStore, ids: Sequence[int], *, states: bool = True, windows: Sequence[int] = WINDOWS) -> PutResult:
    """Put a text with its windows and state."""
    layers = layers_of(ids, windows=windows)
    return store.put(ids, layers, model=MODEL, windows=windows, states=states_of(ids) if states else ())


def assert_whole(
    found: StoredPrefix, ids: Sequence[int], *, states: bool = True, windows: Sequence[int] = WINDOWS
) -> None:
    """Every layer and state is, byte for byte, what was put for all of `ids`."""
    assert (found.tokens, found.is_complete, found.missing) == (len(ids), True, ())
    wanted = layers_of(ids, windows=windows)
    assert [cache.layer for cache in found.layers] == [cache.layer for cache in wanted]
    for one, other in zip(found.layers, wanted, strict=True):
        assert one.keys.dtype == other.keys.dtype and one.keys.shape == other.keys.shape
        assert one.keys.tobytes() == other.keys.tobytes() and one.values.tobytes() == other.values.tobytes()
        assert np.array_equal(one.positions, other.positions) and one.tokens_seen == len(ids)
    expected = states_of(ids) if states else []
    about = [(state.layer, state.name, state.dtype, state.shape, state.read()) for state in expected]
    assert [(state.layer, state.name, state.dtype, state.shape, state.read()) for state in found.states] == about
