"""Encode and decode a chunk of an array as one frame, for both Zarr codecs."""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np

from ..dtypes import BF16, FP16, FP32, Bytes, DType, Elements
from ..errors import FrameError, KvmnnError, LimitError
from ..frames import CodecOptions, Effort, decode
from ..frames.encoder import encode_for_file

# Chunks are frames of words, not of bytes: the codec takes the place of `bytes`, as it must know the size of a word. An
# array's type then says everything, and a frame is the same on every machine. bfloat16 is `uint16` with an attribute in
# stores that kvmnn writes: readers without the extension type, zarr 3.1 among them, would refuse it.

CODEC_NAME: Final = "kvmnn.frame"
"""The codec, in documents of zarr and numcodecs."""
MAX_CHUNK_BYTES: Final = 1 << 30
"""Raw bytes of a chunk; larger ones are refused."""

_ELEMENT_TYPES: dict[str, DType] = {"float16": FP16, "float32": FP32, "bfloat16": BF16, "uint16": BF16}


def get_element_type(array_dtype: np.dtype[Any]) -> DType:
    """Return the element type of a chunk of numpy type float16, float32, bfloat16 (of ml_dtypes) or uint16 (bfloat16
    bits).
    """
    element_type = _ELEMENT_TYPES.get(array_dtype.name)
    if element_type is None:
        raise KvmnnError(
            f"codec {CODEC_NAME}: type {array_dtype} is none that frames hold: expected float16, float32, bfloat16 or "
            f"uint16 "
            "(its words)"
        )
    return element_type


def check_effort(effort: object) -> Effort:
    """Return the effort; raise `KvmnnError` if it does not exist."""
    if not isinstance(effort, str):
        raise KvmnnError(f"codec {CODEC_NAME}: effort is {effort!r}: expected a string")
    effort = cast("Effort", effort)
    CodecOptions(effort=effort).check()
    return effort


def check_size(nbytes: int) -> None:
    """Raise `LimitError` for a chunk of more than `MAX_CHUNK_BYTES` bytes."""
    if nbytes > MAX_CHUNK_BYTES:
        raise LimitError(f"codec {CODEC_NAME}: a chunk has {nbytes:,} bytes: expected at most {MAX_CHUNK_BYTES:,}")


def encode_chunk(elements: Bytes, element_type: DType, effort: Effort) -> bytes:
    """Encode a chunk's little-endian elements, 1-D, as a frame."""
    check_size(elements.size)
    if not elements.size:
        raise KvmnnError(f"codec {CODEC_NAME}: a chunk is empty, there is nothing to encode")
    return encode_for_file(elements, element_type.name, CodecOptions(effort=effort), threads=1)


def decode_chunk(frame: Any, element_type: DType | None, nbytes: int | None) -> Elements:
    """Decode a chunk to its little-endian elements, 1-D: `nbytes` bytes, or as many as its frame states (None).

    The array has the numpy type of `element_type`; float16 or float32 where that is None.
    """
    if nbytes is not None:
        check_size(nbytes)
    try:
        elements = decode(
            frame,
            dtype=None if element_type is None else element_type.name,
            max_bytes=MAX_CHUNK_BYTES if nbytes is None else nbytes,
            threads=1,
        )
    except FrameError as error:
        raise FrameError(f"codec {CODEC_NAME}: not the frame of a chunk: {error}") from None
    except LimitError as error:
        if nbytes is None:
            raise
        raise FrameError(f"codec {CODEC_NAME}: {error}, as the chunk's shape says") from None
    if nbytes is not None and elements.nbytes != nbytes:
        raise FrameError(f"codec {CODEC_NAME}: the frame holds {elements.nbytes} bytes: the chunk has {nbytes}")
    return elements
