"""Ranges of tokens: either end outside of what there is is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn import KvmnnError, PackLayout
from kvmnn.packed.layout import TokenRange

LAYOUT = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=8)
CAPACITY = 16


def of(start: int, count: int, past: int = 10) -> TokenRange:
    buffers = (np.zeros(size, np.uint8) for size in (LAYOUT.key_bytes(CAPACITY), LAYOUT.value_bytes(CAPACITY)))
    return TokenRange.from_buffers(LAYOUT, *buffers, start, count, past_length=past, capacity=CAPACITY)


def test_token_range_inside_is_accepted() -> None:
    for start, count in ((0, 1), (0, 10), (9, 1)):
        assert (of(start, count).start, of(start, count).count) == (start, count)
    assert of(15, 1, past=20).capacity == CAPACITY


@pytest.mark.parametrize(
    ("start", "count", "past"), [(-1, 1, 10), (0, 0, 10), (-1, 0, 10), (9, 2, 10), (10, 1, 10), (15, 2, 20)]
)
def test_token_range_outside_is_refused(start: int, count: int, past: int) -> None:
    with pytest.raises(KvmnnError, match=f"range of {count} tokens from {start}"):
        of(start, count, past)
