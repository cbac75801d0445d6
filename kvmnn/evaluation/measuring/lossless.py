"""What the frames of a cache that a policy left take: LOSSLESS after LOSSY, on the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...arrays.layer_cache import LayerCache
from ...errors import FrameError
from ...frames import decoding, encoding
from ...reports.rows import FrameSizes

FrameType = Literal["fp16", "fp32"]


def frame_sizes(layers: Iterable[LayerCache], dtype: FrameType = "fp16", threads: int = 1) -> FrameSizes:
    """Encode K and V of every layer, decode the frames, compare, and count.

    Parameters
    ----------
    layers
        The live tokens of a cache.
    dtype
        ``"fp16"``: as an engine holds it, words of an fp32 cache rounded to nearest (beyond 65,504 to infinity).
        ``"fp32"``: the words of an fp32 cache as they are; an fp16 cache stays fp16.

    Raises
    ------
    FrameError
        If a frame does not decode to the words it was made of.
    """
    full = kept = coded = 0
    rounded = False
    name = dtype
    for layer in layers:
        for part, values in (("keys", layer.keys), ("values", layer.values)):
            words, was_rounded = _words(values, dtype)
            rounded |= was_rounded
            name = "fp16" if words.dtype == np.float16 else "fp32"
            full += layer.tokens_seen * layer.kv_heads * layer.head_dim * words.itemsize
            if not words.size:  # nothing was kept of this layer
                continue
            made = encoding.encode(words, threads=threads)
            if not decoding.matches(made, words, threads=threads):
                raise FrameError(f"layer {layer.layer}: the frame of its {part} does not decode to them")
            kept += words.nbytes
            coded += len(made)
    return FrameSizes(dtype=name, rounded=rounded, full_bytes=full, kept_bytes=kept, frame_bytes=coded)


def _words(values: npt.NDArray[Any], dtype: FrameType) -> tuple[npt.NDArray[Any], bool]:
    if dtype == "fp16" and values.dtype == np.float32:
        with np.errstate(over="ignore"):
            return values.astype(np.float16), True
    return values, False
