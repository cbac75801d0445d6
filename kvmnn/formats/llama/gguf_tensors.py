"""The tensors of a ``.gguf`` model: names, shapes, and weights as float32, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...dtypes import Bytes, Floats
from ...errors import SourceError
from ...files.mapped_file import MappedFile
from .gguf import GgufHeader
from .k_quants import WEIGHT_BLOCK_TYPES
from .state import GGML_TYPES, UNSUPPORTED_TYPES, dequantize

_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
# Rows of a chunk are dequantized at once: large enough for numpy, small next to any model.
_CHUNK_VALUES: Final = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry in the header."""

    name: str
    #: As numpy has it: ggml's axes in reverse.
    shape: tuple[int, ...]
    #: ggml's name of the element type.
    type_name: str
    values_per_block: int
    block_bytes: int
    type_number: int
    #: Of the first byte, from the beginning of the file.
    offset: int

    @property
    def num_rows(self) -> int:
        """Number of rows: products of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.shape[-1] // self.values_per_block * self.block_bytes


class GgufModel:
    """A ``.gguf`` file with weights.

    Parameters
    ----------
    path
        The file; it is mapped, and its header is read within bounds.

    Attributes
    ----------
    fields : dict
        All values of the header by key. Lists of numbers that are no integers are raw bytes.
    tensors : mapping
        `GgufTensor` by name.

    Raises
    ------
    SourceError
        When the file is no GGUF model, is cut, or has tensors that lie outside of it or are of an unknown type.
    """

    def __init__(self, path: str) -> None:
        header = GgufHeader(path)
        self.label = header.label
        self.fields: dict[str, Any] = header.read_fields(include_all=True)
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise SourceError(f"{self.label}: general.alignment is {alignment!r:.40}")
        entries = list(header.iter_tensor_entries())
        self._file = MappedFile(path)
        begin = -(-header.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_number, offset in entries:
            if name in tensors:
                raise SourceError(f"{self.label}: has two tensors {name!r:.80}")
            tensors[name] = self._build_tensor(name, shape[::-1], type_number, begin + offset)
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        value = self.fields.get("general.architecture")
        if not isinstance(value, str):
            raise SourceError(f"{self.label}: does not say its architecture")
        return value

    def read_rows(self, tensor: GgufTensor) -> Iterator[Floats]:
        """Dequantize a tensor, float32 ``[row, value]``, in chunks of whole rows."""
        rows_per_chunk = max(1, _CHUNK_VALUES // max(1, tensor.shape[-1]))
        chunk_bytes = rows_per_chunk * tensor.row_bytes
        for data in self._file.iter_chunks(tensor.offset, tensor.num_rows * tensor.row_bytes, chunk_bytes):
            yield _dequantize_rows(tensor, data)

    def read_tensor(self, name: str) -> Floats:
        """Dequantize a whole tensor, float32 in its shape."""
        tensor = self.tensors[name]
        return np.concatenate(list(self.read_rows(tensor))).reshape(tensor.shape)

    def _build_tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> GgufTensor:
        where = f"{self.label}: tensor {name!r:.80}"
        if type_number in GGML_TYPES:
            element = GGML_TYPES[type_number]
            type_name, values, nbytes = element.name, element.values_per_block, element.nbytes
        elif type_number in WEIGHT_BLOCK_TYPES:
            block = WEIGHT_BLOCK_TYPES[type_number]
            type_name, values, nbytes = block.name, block.values_per_block, block.nbytes
        else:
            type_text = UNSUPPORTED_TYPES.get(type_number, f"number {type_number}")
            raise SourceError(f"{where} is of the element type {type_text}, which is not read")
        if not shape or 0 in shape:
            raise SourceError(f"{where} has the shape {list(shape)}: expected axes of at least 1")
        if shape[-1] % values:
            raise SourceError(f"{where}: rows of {shape[-1]} values are no whole blocks of {values} ({type_name})")
        tensor = GgufTensor(name, shape, type_name, values, nbytes, type_number, offset)
        end = offset + tensor.num_rows * tensor.row_bytes
        if end > self._file.size:
            raise SourceError(
                f"{where} ends at byte {end:,}, the file has {pluralize(self._file.size, 'byte')}: it is cut or damaged"
            )
        return tensor


def _dequantize_rows(tensor: GgufTensor, data: Bytes) -> Floats:
    num_rows = len(data) // tensor.row_bytes
    block_type = GGML_TYPES.get(tensor.type_number)
    if block_type is None:
        blocks = data.reshape(-1, tensor.block_bytes)
        return WEIGHT_BLOCK_TYPES[tensor.type_number].dequantize(blocks).reshape(num_rows, -1)
    if block_type.is_block_quantized:
        out = np.empty((num_rows, tensor.shape[-1]), np.float32)
        dequantize(block_type, np.ascontiguousarray(data).reshape(num_rows, -1, block_type.nbytes), out)
        return out
    words = np.ascontiguousarray(data)
    if block_type.name == "bf16":
        return (words.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(num_rows, -1)
    dtype = "<f4" if block_type.name == "f32" else "<f2"
    return words.view(dtype).astype(np.float32).reshape(num_rows, -1)
