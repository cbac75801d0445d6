"""`get_by_layer`: the layers of `get`, one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same

from kvmnn import LayerCache
from kvmnn.arrays.opaque_state import make_state
from kvmnn.store import DamagedPrefixError, PrefixStore

IDS = [*range(700)]


@pytest.mark.parametrize("codec", ["dense", "frames"])
@pytest.mark.parametrize("tokens", [700, 650, 64, 3])
def test_get_by_layer_has_the_layers_of_get(tmp_path: Path, codec: str, tokens: int) -> None:
    with PrefixStore(tmp_path, codec=codec) as store:
        store.put(IDS, layers_of(IDS, layers=5), model=MODEL)
        prompt = [*IDS[:tokens], 9, 9]
        prefix = store.get_by_layer(prompt, model=MODEL)
        assert (prefix.tokens, prefix.requested_tokens, prefix.num_layers) == (tokens, tokens + 2, 5)
        assert same(list(prefix.layers), IDS, tokens, layers=5)
        assert store.stats().found_tokens == tokens
        missing = store.get_by_layer([5, 5], model=MODEL)
        assert (missing.tokens, list(missing.layers)) == (0, [])


def test_get_by_layer_damage_is_an_error_and_then_a_shorter_prefix(tmp_path: Path) -> None:
    with PrefixStore(tmp_path, codec="frames") as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        _, last = sorted(tmp_path.glob("units/*/*.unit"))
        data = bytearray(last.read_bytes())
        data[-1] ^= 1  # V of the last layer
        last.write_bytes(data)
        layers = store.get_by_layer(IDS, model=MODEL).layers
        assert next(layers).layer == 0
        with pytest.raises(DamagedPrefixError, match="damaged, was removed"):
            list(layers)
        assert store.get_by_layer(IDS, model=MODEL).tokens == 512
        store.get_by_layer(IDS, model=MODEL).layers.close()  # type: ignore[attr-defined]


def test_get_by_layer_merges_windows(tmp_path: Path) -> None:
    with PrefixStore(tmp_path) as store:
        first, window, last = layers_of(IDS[:90], layers=3)
        rows = np.arange(80, 90)
        keys, values = window.keys[:, rows], window.values[:, rows]
        layers = [first, LayerCache(layer=1, keys=keys, values=values, positions=rows, tokens_seen=90), last]
        state = make_state(3, "recurrent", bytes(range(8)), dtype="float32", shape=(2,))
        store.put(IDS[:90], layers, model=MODEL, windows=[1], states=[state])
        prefix, whole = store.get_by_layer(IDS, model=MODEL), store.get(IDS, model=MODEL)
        found = list(prefix.layers)
        assert [cache.layer for cache in found] == [cache.layer for cache in whole.layers]
        assert all(np.array_equal(a.keys, b.keys) for a, b in zip(found, whole.layers, strict=True))
        assert (prefix.tokens, prefix.states[0].read()) == (90, whole.states[0].read())
