"""`l2_compress` and `fix_size_l2_compress` on torch's tensors and on caches of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvmnn.policies import fix_size_l2_compress, l2_compress

torch = pytest.importorskip("torch")


def made(dtype: Any) -> list[Any]:
    draws = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 3, 60, 8, generator=draws).to(dtype) for _ in range(2)) for _ in range(4)]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_l2_compress_torch_tensors_equal_numpy(name: str) -> None:
    pairs = made(getattr(torch, name))
    ours = l2_compress(pairs, keep_ratio=0.3, prune_after=20, skip_layers=[1])
    for layer, ((keys, values), (old_keys, old_values)) in enumerate(zip(ours, pairs, strict=True)):
        if layer == 1:
            assert keys is old_keys and values is old_values
            continue
        norms = old_keys.float().norm(dim=-1)
        chosen = torch.argsort(norms, dim=-1, stable=True)[..., : math.ceil(0.3 * 60)].sort(dim=-1).values
        index = chosen[..., None].expand(-1, -1, -1, 8)
        assert keys.dtype == old_keys.dtype and torch.equal(keys, old_keys.gather(2, index))
        assert torch.equal(values, old_values.gather(2, index))
    for mine, theirs in zip(
        fix_size_l2_compress(pairs, 16, 0.25), fix_size_l2_compress(as_numpy(pairs), 16, 0.25), strict=True
    ):
        assert all(np.array_equal(a.float().numpy(), b) for a, b in zip(mine, theirs, strict=True))


def as_numpy(pairs: list[Any]) -> list[Any]:
    return [tuple(part.float().numpy() for part in pair) for pair in pairs]


def test_l2_compress_transformers_cache_equals_pairs() -> None:
    transformers = pytest.importorskip("transformers")
    pairs = made(torch.float32)
    cache = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer)
    ours = l2_compress(cache, keep_ratio=0.5, prune_after=20)
    expected = l2_compress(pairs, keep_ratio=0.5, prune_after=20)
    assert all(
        torch.equal(a, b) for mine, other in zip(ours, expected, strict=True) for a, b in zip(mine, other, strict=True)
    )
    again = transformers.DynamicCache(ours)
    assert again.get_seq_length(2) == 30 and cache.get_seq_length(2) == 60
