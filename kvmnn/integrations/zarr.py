"""The codec of Zarr version 3: a chunk becomes the frame that MNN would store for its words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec

from .._util.dataclass import dataclass
from ..errors import KvmnnError
from ..frames import Effort
from .chunk_codec import CODEC_NAME, check_effort, check_size, decode_chunk, encode_chunk, get_element_type

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer


@dataclass(frozen=True)
class ZarrFrameCodec(ArrayBytesCodec):
    """Array to bytes: ``codecs=[{"name": "kvmnn.frame", "configuration": {"effort": "exact"}}]`` of a Zarr array.

    For float16, float32, bfloat16 (of ml_dtypes) and uint16 (its words); other types are refused when the array is
    made. Frames are little-endian on every machine. Takes the place of ``bytes`` and of any compressor.
    """

    is_fixed_size = False

    #: As for `kvmnn.encode`; readers do not need it.
    effort: Effort = "exact"

    def __post_init__(self) -> None:
        check_effort(self.effort)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create the codec from the metadata of an array."""
        configuration = data.get("configuration") or {}
        if (
            data.get("name") != CODEC_NAME
            or not isinstance(configuration, Mapping)
            or not set(configuration) <= {"effort"}
        ):
            raise KvmnnError(f"codec {CODEC_NAME}: found {dict(data)!r:.200}: expected a configuration of effort alone")
        return cls(**configuration)

    def to_dict(self) -> dict[str, Any]:
        """Return the codec as in the metadata of an array."""
        return {"name": CODEC_NAME, "configuration": {"effort": self.effort}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Raise `KvmnnError` for an array of an unsupported type, or with chunks that are too large."""
        native_dtype = dtype.to_native_dtype()
        get_element_type(native_dtype)
        chunk_shape = getattr(chunk_grid, "chunk_shape", None)
        if chunk_shape is not None:
            check_size(int(np.prod(chunk_shape, dtype=object)) * native_dtype.itemsize)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise `NotImplementedError`: the size of a frame is unknown before it is encoded."""
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        native_dtype = chunk_spec.dtype.to_native_dtype()
        nbytes = int(np.prod(chunk_spec.shape, dtype=object)) * native_dtype.itemsize
        elements = decode_chunk(chunk_bytes.as_numpy_array(), get_element_type(native_dtype), nbytes)
        array = (
            elements.view(_to_little_endian(native_dtype)).astype(native_dtype, copy=False).reshape(chunk_spec.shape)
        )
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(array)

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        array = chunk_array.as_numpy_array()
        elements = np.ascontiguousarray(array, _to_little_endian(array.dtype)).reshape(-1).view(np.uint8)
        frame = encode_chunk(elements, get_element_type(array.dtype), self.effort)
        return chunk_spec.prototype.buffer.from_bytes(frame)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)


def _to_little_endian(native_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in little-endian order, as in frames; bfloat16 of ml_dtypes only has the machine's order."""
    return native_dtype if native_dtype.kind == "V" else native_dtype.newbyteorder("<")
