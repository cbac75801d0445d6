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
from .decoder import OnnxDecoder

UnequalLengthSupport = Literal["chunks", "single", "none"]

_PROBE_LONG_TOKENS, _PROBE_SHORT_TOKENS, _PROBE_NEW_TOKENS = (
    8,
    3,
    4,
)  # tokens in the past, in the past of a layer that was cut, in the chunk


def try_unequal_lengths(decoder: OnnxDecoder) -> UnequalLengthSupport:
    """How tokens may be fed while layers hold different numbers of tokens.

    Returns
    -------
    ``"chunks"``: several at once; they equal the same tokens one by one, whichever layer is the longer one.
    ``"single"``: one at a time, at least while the first layer is the longest. ``"none"``: not at all.
    """
    interface = decoder.interface
    if not interface.has_positions or interface.derives_positions_from_length:
        return "none"
    if interface.layers == 1:
        return "chunks"
    ids, positions = (
        probe_tokens(_PROBE_LONG_TOKENS + _PROBE_NEW_TOKENS, interface.vocab_size),
        np.arange(_PROBE_LONG_TOKENS + _PROBE_NEW_TOKENS),
    )
    past = decoder.run_step(
        ids[:_PROBE_LONG_TOKENS], positions[:_PROBE_LONG_TOKENS], decoder.create_empty_past()
    ).present_pairs
    long_slots, short_slots = (
        np.arange(_PROBE_LONG_TOKENS),
        np.linspace(0, _PROBE_LONG_TOKENS - 1, _PROBE_SHORT_TOKENS).astype(np.int64),
    )
    last_layer = interface.layers - 1
    slots_by_case = [
        [long_slots if layer == 0 else short_slots for layer in range(interface.layers)],
        [short_slots if layer == 0 else long_slots for layer in range(interface.layers)],
        [short_slots if layer == last_layer else long_slots for layer in range(interface.layers)],
    ]
    new_ids, new_positions = ids[_PROBE_LONG_TOKENS:], positions[_PROBE_LONG_TOKENS:]
    results = [_try_lengths(decoder, new_ids, new_positions, past, slots_by_layer) for slots_by_layer in slots_by_case]
    if results[0] == "none" or "wrong" in results:
        return "none"
    return "chunks" if all(result == "chunks" for result in results) else "single"


def probe_tokens(count: int, vocab: int) -> NDArray[np.int64]:
    """Tokens spread over the vocabulary, all different where it is large enough."""
    return (np.arange(count, dtype=np.int64) * 37 + 11) % vocab


def are_close(actual: NDArray[np.float32], expected: NDArray[np.float32], dtype: type[np.generic]) -> bool:
    """Whether two computations of the same logits agree as far as the arithmetic allows."""
    tolerance = 2e-2 if dtype == np.float16 else 1e-3
    scale = float(np.abs(expected).max(initial=0.0))
    return bool(
        np.isfinite(actual).all() and np.abs(actual - expected).max(initial=0.0) <= tolerance * max(scale, 1e-3)
    )


def select_slots(past: Sequence[KVPair], slots_by_layer: Sequence[NDArray[np.int64]]) -> list[KVPair]:
    """The slots `slots_by_layer` of each layer."""
    return [
        (np.ascontiguousarray(keys[:, :, slots]), np.ascontiguousarray(values[:, :, slots]))
        for (keys, values), slots in zip(past, slots_by_layer, strict=True)
    ]


def _try_lengths(
    decoder: OnnxDecoder,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    past: Sequence[KVPair],
    slots_by_layer: Sequence[NDArray[np.int64]],
) -> Literal["chunks", "single", "none", "wrong"]:
    dtype = decoder.interface.dtype
    cut_past = select_slots(past, slots_by_layer)
    rows = []
    try:
        # Attention does not care for the order of its slots. A graph that overlooks some of them does.
        first = decoder.run_step(ids[:1], positions[:1], cut_past)
        reversed_step = decoder.run_step(
            ids[:1], positions[:1], select_slots(past, [slots[::-1] for slots in slots_by_layer])
        )
        if not are_close(reversed_step.logits, first.logits, dtype):
            return "wrong"
        grown_past = cut_past
        for index in range(len(ids)):
            step = decoder.run_step(ids[index : index + 1], positions[index : index + 1], grown_past)
            rows.append(step.logits)
            grown_past = step.present_pairs
    except ModelError:
        return "none"
    try:
        chunk = decoder.run_step(ids, positions, cut_past)
    except ModelError:
        return "single"
    return "chunks" if are_close(chunk.logits, np.concatenate(rows), dtype) else "single"
