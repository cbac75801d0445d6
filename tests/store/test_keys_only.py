"""Latent attention as llama.cpp stores it: K without V, in all layers or in some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL

from kvmnn import LayerCache
from kvmnn.errors import OptionError
from kvmnn.packed.inference import PackedGeometry
from kvmnn.store import PrefixStore, write_prefix

RNG = np.random.default_rng(8)
TOKENS = 700


def caches(values: tuple[int, ...], dtype: str = "f2") -> list[LayerCache]:
    """Layers of smooth K, and V of so many words in a head."""

    def words(dims: int) -> np.ndarray:
        steps = RNG.standard_normal((2, TOKENS, dims)).cumsum(axis=1) / 16
        return steps.round(2).astype(dtype)

    return [LayerCache(layer=layer, keys=words(24), values=words(dims)) for layer, dims in enumerate(values)]


def first(layers: list[LayerCache], tokens: int) -> list[LayerCache]:
    return [LayerCache(layer=each.layer, keys=each.keys[:, :tokens], values=each.values[:, :tokens]) for each in layers]


def assert_same(found: list[LayerCache], put: list[LayerCache], tokens: int) -> None:
    for one, other in zip(found, put, strict=True):
        assert np.array_equal(one.keys, other.keys[:, :tokens])
        assert np.array_equal(one.values, other.values[:, :tokens])
        assert one.value_dim == other.value_dim


@pytest.mark.parametrize("values", [(0, 0, 0), (24, 0, 16), (0,)])
@pytest.mark.parametrize("options", [{}, {"codec": "frames"}, {"codec": "frames", "effort": "balanced"}], ids=str)
def test_store_keys_only_layers_round_trip(tmp_path: Path, values: tuple[int, ...], options: dict[str, str]) -> None:
    layers, ids = caches(values), [*range(TOKENS)]
    with PrefixStore(tmp_path / "s", **options) as store:
        for tokens in (20, 300, TOKENS):  # after rows that are stored, too
            put = store.put(ids[:tokens], first(layers, tokens), model=MODEL)
            assert put.stored_bytes < put.raw_bytes
        assert store.stats().raw_bytes >= sum(each.nbytes for each in layers)
        for asked in (17, 400, TOKENS):
            found = store.get([*ids[:asked], 9999], model=MODEL)
            assert (found.tokens, found.notes) == (asked, ())
            assert_same(found.layers, layers, asked)
        assert store.verify().damaged == ()
        store.export(ids, tmp_path / "one", model=MODEL)
    (tmp_path / "s" / "index.sqlite").unlink()
    with PrefixStore(tmp_path / "s") as store:
        assert_same(store.get(ids, model=MODEL).layers, layers, TOKENS)
    with PrefixStore(f"memory://{tmp_path.name}", **options) as other:
        other.import_file(tmp_path / "one")
        assert_same(other.get(ids, model=MODEL).layers, layers, TOKENS)


def test_write_prefix_keys_only_as_mnn_is_refused(tmp_path: Path) -> None:
    layers, ids = caches((0, 0)), [*range(TOKENS)]
    with PrefixStore(tmp_path / "s") as store:
        store.put(ids, layers, model=MODEL)
        prefix = store.get(ids, model=MODEL)
        with pytest.raises(OptionError, match="this text has K alone, no V: MNN takes no such prefix"):
            write_prefix(
                prefix, ids, str(tmp_path / "p"), where="s", geometry=PackedGeometry(backend="x86-avx2"), name="p"
            )
        write_prefix(prefix, ids, str(tmp_path / "p.npz"), where="s")
    with np.load(tmp_path / "p.npz") as found:
        assert sorted(found) == ["layer_0.key", "layer_1.key"]
        assert np.array_equal(found["layer_1.key"], layers[1].keys)
