"""What the frames of a cache that a policy left take: LOSSLESS after LOSSY, on the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...arrays.layer_cache import LayerCache
from ...errors import FrameError
from ...frames import decoding, encoding
from ...reports.rows import FrameSizeStats

FrameType = Literal["fp16", "fp32"]


def measure_frame_sizes(layers: Iterable[LayerCache], dtype: FrameType = "fp16", threads: int = 1) -> FrameSizeStats:
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
    full_bytes = kept_bytes = frame_bytes = 0
    is_rounded = False
    name = dtype
    for layer in layers:
        for part, values in (("keys", layer.keys), ("values", layer.values)):
            elements, is_layer_rounded = _to_elements(values, dtype)
            is_rounded |= is_layer_rounded
            name = "fp16" if elements.dtype == np.float16 else "fp32"
            full_bytes += layer.tokens_seen * layer.kv_heads * layer.head_dim * elements.itemsize
            if not elements.size:  # nothing was kept of this layer
                continue
            frame = encoding.encode(elements, threads=threads)
            if not decoding.verify_roundtrip(frame, elements, threads=threads):
                raise FrameError(f"layer {layer.layer}: the frame of its {part} does not decode to them")
            kept_bytes += elements.nbytes
            frame_bytes += len(frame)
    return FrameSizeStats(
        dtype=name, rounded=is_rounded, full_bytes=full_bytes, kept_bytes=kept_bytes, frame_bytes=frame_bytes
    )


def _to_elements(values: npt.NDArray[Any], dtype: FrameType) -> tuple[npt.NDArray[Any], bool]:
    if dtype == "fp16" and values.dtype == np.float32:
        with np.errstate(over="ignore"):
            return values.astype(np.float16), True
    return values, False
