"""The codec of numcodecs, which Zarr version 2 and others use: a buffer of words becomes a frame."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
from numcodecs.abc import Codec

from ..dtypes import Bytes, DType, by_name
from ..errors import KvmnnError
from .chunks import NAME, check_effort, decode_chunk, encode_chunk, kind_of

_ENDS: Final = ("little", "big")


class Frame(Codec):
    """Compressor for Zarr version 2: ``compressors=kvmnn.codecs.numcodecs_codec.Frame()`` of a Zarr array.

    Parameters
    ----------
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``: what the words of any buffer are. None takes an array's own type (float16,
        float32, bfloat16, uint16 for its words), and refuses buffers that have none.
    effort
        As for `kvmnn.encode`; decoding does not need it.
    endian
        Byte order of the buffers: ``"big"`` for arrays of big-endian words. Frames are little-endian.

    Raises
    ------
    KvmnnError
        A `ValueError`: for options that do not exist, other types, and (`FrameError`) for what is no frame.
    """

    codec_id: ClassVar[str] = NAME

    def __init__(self, dtype: str | None = None, effort: str = "exact", endian: str = "little") -> None:
        if dtype is not None:
            by_name(dtype)
        if endian not in _ENDS:
            raise KvmnnError(f"codec {NAME}: endian is {endian!r}: expected 'little' or 'big'")
        self.dtype = dtype
        self.effort = check_effort(effort)
        self.endian = endian

    def encode(self, buf: Any) -> bytes:
        """The frame of a buffer; of an array in memory order."""
        kind, data = self._words(buf)
        if data.size % kind.itemsize:
            raise KvmnnError(f"codec {NAME}: {data.size} bytes are not a whole number of {kind.name} words")
        return encode_chunk(self._turned(data, kind.itemsize), kind, self.effort)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """The bytes of a frame: a uint8 array, or `out` itself, which must have as many."""
        kind = None if self.dtype is None else by_name(self.dtype)
        target = None if out is None else _bytes_of(out)
        frame = _bytes_of(buf)
        if target is not None and not target.flags.writeable:
            raise KvmnnError(f"codec {NAME}: out cannot be written to")
        found = decode_chunk(frame, kind, None if target is None else target.size)
        words = self._turned(found.view(np.uint8), found.itemsize)
        if target is None:
            return words
        target[:] = words
        return out

    def _words(self, buf: Any) -> tuple[DType, Bytes]:
        if self.dtype is not None:
            return by_name(self.dtype), _bytes_of(buf)
        if not isinstance(buf, np.ndarray) or buf.dtype == np.uint8:
            raise KvmnnError(f"codec {NAME}: a buffer without a type needs one: dtype='fp16', 'bf16' or 'fp32'")
        kind = kind_of(buf.dtype)
        if (buf.dtype.byteorder == ">") != (self.endian == "big"):
            said = "big" if buf.dtype.byteorder == ">" else "little"
            raise KvmnnError(f"codec {NAME}: the words are {said}-endian: say endian={said!r}")
        return kind, _bytes_of(buf)

    def _turned(self, data: Bytes, itemsize: int) -> Bytes:
        return data if self.endian == "little" else data.view(f"u{itemsize}").byteswap().view(np.uint8)


def _bytes_of(buf: Any) -> Bytes:
    """The bytes of a buffer in memory order, 1-D; a view where they are contiguous."""
    array = buf if isinstance(buf, np.ndarray) else np.frombuffer(buf, np.uint8)
    if array.dtype.hasobject:
        raise KvmnnError(f"codec {NAME}: type {array.dtype} has no bytes of its own")
    flat = array.reshape(-1, order="A")
    return flat.view(np.uint8) if flat.itemsize else flat.astype(np.uint8)
