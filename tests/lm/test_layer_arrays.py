"""The cache of a model as arrays of another type."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.errors import KvmnnError
from kvmnn.lm.kv_dump import build_layer_arrays


def test_build_layer_arrays_beyond_fp16_is_refused() -> None:
    keys = np.full((1, 2, 4), 7e4, np.float32)
    cache = LayerCache(layer=3, keys=keys, values=np.zeros_like(keys))
    with pytest.raises(KvmnnError, match=r"layer 3: 8 of its keys are beyond fp16 \(65504\): dump them as fp32"):
        build_layer_arrays([cache], "fp16")
    keys[0, 0, 0] = np.inf  # what was infinite stays so
    keys[keys == 7e4] = 1.0
    arrays, cast = build_layer_arrays([LayerCache(layer=3, keys=keys, values=keys)], "fp16")
    assert len(arrays) == 2 and cast.changed == 0


def test_build_layer_arrays_fp16_as_fp32_is_lossless() -> None:
    words = np.arange(24, dtype=np.float16).reshape(2, 3, 4) / 7
    arrays, cast = build_layer_arrays([LayerCache(layer=0, keys=words, values=-words)], "fp32")
    assert (cast.changed, cast.label) == (0, "LOSSLESS")
    assert [(entry.array.name, entry.array.dtype, entry.geometry) for entry in arrays] == [
        ("layer_0.key", "fp32", (2, 3, 4)),
        ("layer_0.value", "fp32", (2, 3, 4)),
    ]
    (piece,) = arrays[1].array.iter_chunks()
    assert np.array_equal(piece.view(np.float32).reshape(2, 3, 4), (-words).astype(np.float32))
