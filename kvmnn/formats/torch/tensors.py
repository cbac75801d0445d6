"""Tensors of a checkpoint: a location in a storage, validated when created, read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import float8
from ...dtypes import Bytes, Floats
from ...errors import CheckpointError, LimitError

MAX_AXES = 64
MAX_ELEMENTS = 100_000_000
"""Maximum size of a tensor that is read at once: the largest weight that loaders of compressors accept."""

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class ElementType:
    """The encoding of a storage's elements."""

    #: The torch name, without ``torch.``.
    name: str
    #: numpy type without byte order; ``u2`` for bfloat16, ``u1`` for float8, that of the real part for complex types.
    #: Empty if torch cannot convert the type to floats; then it cannot be read.
    numpy_code: str
    #: Bytes from one element to the next.
    itemsize: int
    #: Why elements of the type cannot be read, if the name does not explain it.
    refusal_text: str = ""

    @property
    def is_bfloat16(self) -> bool:
        """Return whether the elements are bfloat16, the upper halves of float32."""
        return self.name == "bfloat16"

    @property
    def is_complex(self) -> bool:
        """Return whether the elements have imaginary parts, which no conversion retains."""
        return self.name.startswith("complex")

    def to_numpy_dtype(self, *, is_big_endian: bool) -> np.dtype[Any]:
        """Return the numpy type of the stored elements."""
        return np.dtype((">" if is_big_endian else "<") + self.numpy_code)


ELEMENT_TYPES = {
    kind.name: kind
    for kind in (
        ElementType("float64", "f8", 8),
        ElementType("float32", "f4", 4),
        ElementType("float16", "f2", 2),
        ElementType("bfloat16", "u2", 2),
        ElementType("int64", "i8", 8),
        ElementType("int32", "i4", 4),
        ElementType("int16", "i2", 2),
        ElementType("int8", "i1", 1),
        ElementType("uint64", "u8", 8),
        ElementType("uint32", "u4", 4),
        ElementType("uint16", "u2", 2),
        ElementType("uint8", "u1", 1),
        ElementType("bool", "u1", 1),
        ElementType("complex128", "f8", 16),
        ElementType("complex64", "f4", 8),
        ElementType("complex32", "f2", 4),
        *(ElementType(name, "u1", 1) for name in float8.DECODABLE_NAMES),
        ElementType("float4_e2m1fn_x2", "", 1),
        *(
            ElementType(name, "", size, f"quantised elements ({name}) cannot be cast: save what dequantize() gives")
            for name, size in {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}.items()
        ),
        *(
            ElementType(name, "", size)
            for name, size in {"bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1}.items()
        ),
        *(ElementType(f"{sign}int{bits}", "", 1) for sign in ("", "u") for bits in range(1, 8)),
    )
}
"""Element types by torch's name."""

UNTYPED = ElementType("untyped", "", 1)
"""Bytes without a type; the tensor defines one, or they are uint8."""


@dataclass(eq=False, slots=True)
class TorchStorage:
    """Consecutive elements in a checkpoint, shared by tensors."""

    #: Its key in the checkpoint.
    key: str
    #: Type of its elements.
    element_type: ElementType
    #: Its size.
    nbytes: int
    #: Returns all its bytes; checked against the file's checksum where it has one.
    read: Callable[[], Bytes]
    #: Byte order of the words.
    is_big_endian: bool = False
    #: The storage of which this one is a part, if it is one, and where in it (bytes).
    root: TorchStorage | None = None
    root_offset: int = 0


@dataclass(eq=False, slots=True)
class TorchTensor:
    """A strided view of a storage. Use `make_tensor` to make one from untrusted numbers."""

    #: The storage with the elements.
    storage: TorchStorage
    #: Element type; that of the storage unless the storage is untyped.
    element_type: ElementType
    #: Offset into the storage, and strides, in elements.
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: Whether the tensor's values are the negatives of those in the storage (torch's negation bit).
    is_negated: bool = False

    @property
    def type_name(self) -> str:
        """Return the torch name of the element type, marked ``(negated)`` if the values must be negated."""
        return f"{self.element_type.name} (negated)" if self.is_negated else self.element_type.name

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements are consecutive in the storage, in order; as torch's ``is_contiguous``."""
        expected_stride = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected_stride:
                return self.numel == 0
            expected_stride *= length
        return True

    def read_elements(self) -> AnyArray:
        """Return the elements as stored, with the tensor's shape; a view of the storage, possibly unaligned.

        For complex elements these are the real parts.
        """
        if self.numel > MAX_ELEMENTS:
            raise LimitError(
                f"a tensor of shape {_shorten_text(list(self.shape))} has more than {MAX_ELEMENTS} elements"
            )
        return self.read_elements_unbounded()

    def read_elements_unbounded(self) -> AnyArray:
        """Return the stored elements without a size limit, for callers that read a view piece by piece."""
        if not self.element_type.numpy_code:
            no_conversion_text = (
                f"elements of type {self.element_type.name} have no conversion to floats, in torch neither"
            )
            raise CheckpointError(self.element_type.refusal_text or no_conversion_text)
        numpy_dtype = self.element_type.to_numpy_dtype(is_big_endian=self.storage.is_big_endian)
        itemsize = self.element_type.itemsize
        if self.numel == 0:
            return np.empty(self.shape, numpy_dtype)
        data = self.storage.read()
        begin = self.offset * itemsize
        if itemsize == numpy_dtype.itemsize and self.strides == _compute_contiguous_strides(self.shape):
            return data[begin : begin + self.numel * itemsize].view(numpy_dtype).reshape(self.shape)
        strides = tuple(stride * itemsize for stride in self.strides)
        return np.ndarray(self.shape, numpy_dtype, data.data, begin, strides)

    def to_float32(self) -> Floats:
        """Convert the elements of any type to float32; of complex ones, the real part."""
        elements = self.read_elements()
        name = self.element_type.name
        if name in float8.DECODABLE_NAMES:
            return float8.build_value_table(name)[elements]
        if self.element_type.is_bfloat16:
            elements = (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif name == "bool":
            elements = elements != 0
        if self.is_negated:
            elements = np.negative(elements)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(elements, np.float32)


def make_tensor(
    storage: object, offset: object, shape: object, strides: object, element_type: ElementType | None = None
) -> TorchTensor:
    """Make a `TorchTensor` from untrusted numbers, all of which are validated before use."""
    if not isinstance(storage, TorchStorage):
        raise CheckpointError(f"a tensor over {type(storage).__name__}: expected a storage")
    if not (
        isinstance(shape, tuple | list) and isinstance(strides, tuple | list) and len(shape) == len(strides) <= MAX_AXES
    ):
        raise CheckpointError(f"storage {storage.key[:80]!r}: a tensor whose shape and strides do not go together")
    shape, strides = tuple(shape), tuple(strides)
    element_type = element_type or (ELEMENT_TYPES["uint8"] if storage.element_type is UNTYPED else storage.element_type)
    numel, last_element = 1, _validate_natural(storage, offset)
    for length, stride in zip(shape, strides, strict=True):
        numel *= _validate_natural(storage, length)
        last_element += (length - 1) * _validate_natural(storage, stride)
    if not numel and math.prod(length or 1 for length in shape) >= 1 << 56:  # which no array has, not even an empty one
        raise CheckpointError(f"storage {storage.key[:80]!r}: a tensor of the shape {_shorten_text(list(shape))}")
    if numel and element_type.numpy_code and last_element >= (num_elements := storage.nbytes // element_type.itemsize):
        raise CheckpointError(
            f"storage {storage.key[:80]!r}: a tensor of shape {_shorten_text(list(shape))} reaches element "
            f"{_shorten_text(last_element)}: the storage holds {num_elements}"
        )
    return TorchTensor(storage, element_type, _validate_natural(storage, offset), shape, strides)


def make_valueless_tensor(kind: str, refusal_text: str, shape: object) -> TorchTensor:
    """Make a placeholder, with a shape only, for a tensor whose values are not read."""
    storage = TorchStorage(kind, ElementType(kind, "", 1, refusal_text), 0, read_empty_storage)
    return make_tensor(storage, 0, shape, (0,) * len(shape) if isinstance(shape, tuple) else None, None)


def read_empty_storage() -> Bytes:
    """Read a storage without bytes."""
    return np.empty(0, np.uint8)


def _shorten_text(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _validate_natural(storage: TorchStorage, value: object) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"storage {storage.key[:80]!r}: a tensor's offset, shape and strides must be whole numbers from 0 on"
        )
    return value


def _compute_contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    stride = 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))
