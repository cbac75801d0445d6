"""A decoder in plain Python, written from docs/format-linear.md, gives the same words."""

from __future__ import annotations

import numpy as np
import pytest
from linear_model import TYPES, decode
from linear_samples import DTYPES, make_cache, make_profile

import kvmnn.linear.encoder as encoder
from kvmnn import linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [0, 1, 2])
def test_plain_decoder_gives_the_same_words(dtype, below, monkeypatch):
    monkeypatch.setattr(encoder, "_NUM_DENSE_LAYERS", 0)
    monkeypatch.setattr(encoder, "_MAX_LINEAR_FRACTION", 9)
    positions = np.delete(np.arange(40), [3, 4, 20, 21, 22])
    cache = make_cache(35, dtype, positions=positions, is_odd=below == 2)
    lower = {}
    for layer, stream in zip(cache, linear.encode_layers(cache, make_profile(), below=below), strict=True):
        lower[layer.layer] = decode(stream, make_profile(), lower)
        number, found_positions, rows = lower[layer.layer]
        assert (number, found_positions) == (layer.layer, positions.tolist())
        size = TYPES[DTYPES.index(dtype)].size
        for side, array in (("key", layer.keys), ("value", layer.values)):
            words = np.ascontiguousarray(array.transpose(1, 0, 2)).view(f"u{size}").reshape(layer.tokens, -1)
            assert rows[side] == words.tolist()
