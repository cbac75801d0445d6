"""The codec for numcodecs and Zarr version 2: it encodes a buffer of elements as a frame."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
from numcodecs.abc import Codec

from ..dtypes import Bytes, DType, parse_dtype
from ..errors import KvmnnError
from ..frames import Effort
from .chunk_codec import CODEC_NAME, check_effort, decode_chunk, encode_chunk, get_element_type

_BYTE_ORDERS: Final = ("little", "big")


class FrameCompressor(Codec):
    """Compressor for Zarr version 2: ``compressors=kvmnn.integrations.numcodecs.Frame()`` of a Zarr array.

    Parameters
    ----------
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``: what the words of any buffer are. None takes an array's own type (float16,
        float32, bfloat16, uint16 for its words), and refuses buffers that have none.
    effort
        As for `kvmnn.encode`; decoding does not need it.
    endian
        Byte order of the buffers: ``"big"`` for arrays of big-endian words. Frames are little-endian.
    """

    codec_id: ClassVar[str] = CODEC_NAME

    def __init__(self, dtype: str | None = None, effort: Effort = "exact", endian: str = "little") -> None:
        if dtype is not None:
            parse_dtype(dtype)
        if endian not in _BYTE_ORDERS:
            raise KvmnnError(f"codec {CODEC_NAME}: endian is {endian!r}: expected 'little' or 'big'")
        self.dtype = dtype
        self.effort = check_effort(effort)
        self.endian = endian

    def encode(self, buf: Any) -> bytes:
        """Encode a buffer, or an array in memory order, as a frame."""
        element_type, data = self._to_elements(buf)
        if data.size % element_type.itemsize:
            raise KvmnnError(
                f"codec {CODEC_NAME}: {data.size} bytes are not a whole number of {element_type.name} words"
            )
        return encode_chunk(self._swap_big_endian(data, element_type.itemsize), element_type, self.effort)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a frame to a uint8 array, or into `out`, which must have the same size."""
        element_type = None if self.dtype is None else parse_dtype(self.dtype)
        target = None if out is None else _as_bytes(out)
        frame = _as_bytes(buf)
        if target is not None and not target.flags.writeable:
            raise KvmnnError(f"codec {CODEC_NAME}: out cannot be written to")
        elements = decode_chunk(frame, element_type, None if target is None else target.size)
        raw_bytes = self._swap_big_endian(elements.view(np.uint8), elements.itemsize)
        if target is None:
            return raw_bytes
        target[:] = raw_bytes
        return out

    def _to_elements(self, buf: Any) -> tuple[DType, Bytes]:
        if self.dtype is not None:
            return parse_dtype(self.dtype), _as_bytes(buf)
        if not isinstance(buf, np.ndarray) or buf.dtype == np.uint8:
            raise KvmnnError(f"codec {CODEC_NAME}: a buffer without a type needs one: dtype='fp16', 'bf16' or 'fp32'")
        element_type = get_element_type(buf.dtype)
        if (buf.dtype.byteorder == ">") != (self.endian == "big"):
            byte_order = "big" if buf.dtype.byteorder == ">" else "little"
            raise KvmnnError(f"codec {CODEC_NAME}: the words are {byte_order}-endian: say endian={byte_order!r}")
        return element_type, _as_bytes(buf)

    def _swap_big_endian(self, data: Bytes, itemsize: int) -> Bytes:
        return data if self.endian == "little" else data.view(f"u{itemsize}").byteswap().view(np.uint8)


def _as_bytes(buf: Any) -> Bytes:
    """Return the bytes of a buffer in memory order, 1-D; a view where they are contiguous."""
    array = buf if isinstance(buf, np.ndarray) else np.frombuffer(buf, np.uint8)
    if array.dtype.hasobject:
        raise KvmnnError(f"codec {CODEC_NAME}: type {array.dtype} has no bytes of its own")
    flat = array.reshape(-1, order="A")
    return flat.view(np.uint8) if flat.itemsize else flat.astype(np.uint8)
