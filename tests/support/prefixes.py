"""Texts and their K and V for tests of the prefix store: every row depends on all ids up to its own, as in a model."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from kvmnn import LayerCache

LAYERS, HEADS, DIMS = 2, 2, 4
MODEL = "a model"
WORD = (1 << 64) - 1


def layers_of(ids: Sequence[int], *, dtype: str = "<f2", layers: int = LAYERS, seed: bytes = b"") -> list[LayerCache]:
    """K and V of a text, ``[kv_head, token, head_dim]``."""
    state, rows = seed, []
    for number in ids:
        state = hashlib.blake2b(state + int(number).to_bytes(4, "little"), digest_size=32).digest()
        rows.append(np.frombuffer(state, np.uint8))
    small = np.array(rows, np.uint8).reshape(len(rows), 32)
    found = []
    for layer in range(layers):
        words = ((small.astype(np.int32) * (layer + 3)) % 251 - 125).astype(dtype) / np.asarray(8, dtype)
        words = words.astype(dtype).reshape(len(rows), 2, 2, HEADS, DIMS)[:, 0]
        keys, values = (np.ascontiguousarray(words[:, part].transpose(1, 0, 2)) for part in range(2))
        found.append(LayerCache(layer=layer, keys=keys, values=values))
    return found


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts have in common from the beginning."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def same(found: Sequence[LayerCache], ids: Sequence[int], tokens: int, **options: object) -> bool:
    """Whether the layers hold the first `tokens` tokens of a text, and nothing else, bit for bit."""
    wanted = layers_of(list(ids)[:tokens], **options)  # type: ignore[arg-type]
    return len(found) == len(wanted) and all(
        a.layer == b.layer
        and a.keys.shape == b.keys.shape
        and a.keys.tobytes() == b.keys.tobytes()
        and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(found, wanted, strict=True)
    )


def checksum_model(data: bytes, seed: int = 0) -> int:
    """Sums, and sums of the sums, of eight columns of 64-bit words."""
    padded = data + bytes(-len(data) % 64)
    sums, weighted = [0] * 8, [0] * 8
    for at, word in enumerate(struct.unpack(f"<{len(padded) // 8}Q", padded)):
        sums[at % 8] = (sums[at % 8] + word) & WORD
        weighted[at % 8] = (weighted[at % 8] + sums[at % 8]) & WORD
    found = seed ^ len(data)
    for one, other in zip(sums, weighted, strict=True):
        found = ((found ^ one) * 0x9E3779B97F4A7C15) & WORD
        found = (((found ^ (found >> 29)) ^ other) * 0xBF58476D1CE4E5B9) & WORD
    return found
