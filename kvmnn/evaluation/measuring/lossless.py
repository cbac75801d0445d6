"""What the frames of a cache that a policy left take: LOSSLESS after LOSSY, on the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...arrays.layer_cache import LayerCache
from ...errors import FrameError
from ...frames import decoding, encoding

FrameType = Literal["fp16", "fp32"]


@dataclass(frozen=True)
class FrameSizes:
    """Bytes of one cache.

    Attributes
    ----------
    dtype : str
        Of the words in the frames.
    rounded : bool
        Whether the words are the cache's own rounded to fp16 first, which is LOSSY by itself; frames are LOSSLESS for
        the words that they were given.
    full_bytes : int
        The full cache of all tokens seen, in that dtype.
    kept_bytes : int
        What the policy left of it.
    frame_bytes : int
        The frames of that, each decoded and found equal.
    """

    dtype: str
    rounded: bool
    full_bytes: int
    kept_bytes: int
    frame_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As a cell stores it."""
        return asdict(self)


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
    return FrameSizes(name, rounded, full, kept, coded)


def _words(values: npt.NDArray[Any], dtype: FrameType) -> tuple[npt.NDArray[Any], bool]:
    if dtype == "fp16" and values.dtype == np.float32:
        with np.errstate(over="ignore"):
            return values.astype(np.float16), True
    return values, False
