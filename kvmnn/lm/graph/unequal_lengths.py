"""What a graph does with layers that hold different numbers of tokens.

Exporters build one mask for all layers. Some cut it to the first columns that a layer needs: right for a single query,
but of several queries each then sees later tokens of its own chunk, without any error. Others fail. Nothing in the
names of a graph tells, so it is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...dtypes import KVPair
from ...errors import ModelError
from .decoder import Decoder

Lengths = Literal["chunks", "single", "none"]

_HELD, _SHORT, _FED = 8, 3, 4  # tokens in the past, in the past of a layer that was cut, in the chunk


def try_unequal_lengths(decoder: Decoder) -> Lengths:
    """How tokens may be fed while layers hold different numbers of tokens.

    Returns
    -------
    ``"chunks"``: several at once; they equal the same tokens one by one, whichever layer is the longer one.
    ``"single"``: one at a time, at least while the first layer is the longest. ``"none"``: not at all.
    """
    interface = decoder.interface
    if not interface.has_positions or interface.counts_length:
        return "none"
    if interface.layers == 1:
        return "chunks"
    ids, positions = probe_tokens(_HELD + _FED, interface.vocab), np.arange(_HELD + _FED)
    past = decoder.run(ids[:_HELD], positions[:_HELD], decoder.empty()).present
    long, short = np.arange(_HELD), np.linspace(0, _HELD - 1, _SHORT).astype(np.int64)
    last = interface.layers - 1
    ways = [
        [long if layer == 0 else short for layer in range(interface.layers)],
        [short if layer == 0 else long for layer in range(interface.layers)],
        [short if layer == last else long for layer in range(interface.layers)],
    ]
    fed, at = ids[_HELD:], positions[_HELD:]
    results = [_try(decoder, fed, at, past, way) for way in ways]
    if results[0] == "none" or "wrong" in results:
        return "none"
    return "chunks" if all(result == "chunks" for result in results) else "single"


def probe_tokens(count: int, vocab: int) -> NDArray[np.int64]:
    """Tokens spread over the vocabulary, all different where it is large enough."""
    return (np.arange(count, dtype=np.int64) * 37 + 11) % vocab


def alike(got: NDArray[np.float32], expected: NDArray[np.float32], kind: type[np.generic]) -> bool:
    """Whether two computations of the same logits agree as far as the arithmetic allows."""
    share = 2e-2 if kind == np.float16 else 1e-3
    scale = float(np.abs(expected).max(initial=0.0))
    return bool(np.isfinite(got).all() and np.abs(got - expected).max(initial=0.0) <= share * max(scale, 1e-3))


def cut(past: Sequence[KVPair], kept: Sequence[NDArray[np.int64]]) -> list[KVPair]:
    """The slots `kept` of each layer."""
    return [
        (np.ascontiguousarray(keys[:, :, slots]), np.ascontiguousarray(values[:, :, slots]))
        for (keys, values), slots in zip(past, kept, strict=True)
    ]


def _try(
    decoder: Decoder,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    past: Sequence[KVPair],
    kept: Sequence[NDArray[np.int64]],
) -> Literal["chunks", "single", "none", "wrong"]:
    kind = decoder.interface.dtype
    held = cut(past, kept)
    rows = []
    try:
        # Attention does not care for the order of its slots. A graph that overlooks some of them does.
        first = decoder.run(ids[:1], positions[:1], held)
        turned = decoder.run(ids[:1], positions[:1], cut(past, [slots[::-1] for slots in kept]))
        if not alike(turned.logits, first.logits, kind):
            return "wrong"
        grown = held
        for place in range(len(ids)):
            step = decoder.run(ids[place : place + 1], positions[place : place + 1], grown)
            rows.append(step.logits)
            grown = step.present
    except ModelError:
        return "none"
    try:
        chunk = decoder.run(ids, positions, held)
    except ModelError:
        return "single"
    return "chunks" if alike(chunk.logits, np.concatenate(rows), kind) else "single"
