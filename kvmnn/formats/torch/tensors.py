"""Tensors of a checkpoint: a place in a storage, checked when made, read only when asked for."""

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
"""Of a tensor that is read at once; the largest weight that a compressor's loaders take."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ElementType:
    """How a storage's elements are coded.

    Parameters
    ----------
    name
        As torch calls it, without ``torch.``.
    code
        numpy type without byte order; ``u2`` for bfloat16, ``u1`` for float8, that of the real part for complex types.
        Empty where torch has no conversion to floats, so that nothing can be read.
    itemsize
        Bytes from one element to the next.
    refusal
        What is said where nothing can be read, if there is more to say than the name.
    """

    name: str
    code: str
    itemsize: int
    refusal: str = ""

    @property
    def is_bfloat16(self) -> bool:
        """Whether the words are the upper halves of float32."""
        return self.name == "bfloat16"

    @property
    def is_complex(self) -> bool:
        """Whether there are imaginary parts, which no conversion keeps."""
        return self.name.startswith("complex")

    def numpy(self, *, big_endian: bool) -> np.dtype[Any]:
        """The numpy type of the words in a file."""
        return np.dtype((">" if big_endian else "<") + self.code)


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
        *(ElementType(name, "u1", 1) for name in float8.NAMES),
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
"""By torch's name."""

UNTYPED = ElementType("untyped", "", 1)
"""Bytes without a type; the tensor brings one, or takes them as uint8."""


@dataclass(eq=False, slots=True)
class Storage:
    """A run of elements somewhere in a checkpoint.

    Parameters
    ----------
    key
        What the checkpoint calls it.
    element
        Type of its elements.
    nbytes
        Its size.
    read
        Returns all its bytes; checked against the file's checksum where it has one.
    big_endian
        Byte order of the words.
    root, begin
        The storage of which this one is a part, if it is one, and where in it (bytes).
    """

    key: str
    element: ElementType
    nbytes: int
    read: Callable[[], Bytes]
    big_endian: bool = False
    root: Storage | None = None
    begin: int = 0


@dataclass(eq=False, slots=True)
class Tensor:
    """A strided view of a storage. Use `tensor` to make one of numbers that are not trusted.

    Parameters
    ----------
    storage
        Where the elements lie.
    element
        Their type; the storage's own unless that is untyped.
    offset, shape, strides
        In elements.
    negated
        Whether the tensor's values are the negatives of those in the storage (torch's negation bit).
    """

    storage: Storage
    element: ElementType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    negated: bool = False

    @property
    def type_name(self) -> str:
        """Of the elements, as torch calls it, and what else must be known to read them."""
        return f"{self.element.name} (negated)" if self.negated else self.element.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in the storage, in order; as torch's ``is_contiguous``."""
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return self.numel == 0
            step *= length
        return True

    def words(self) -> Array:
        """The elements as stored, with the tensor's shape; a view of the storage, possibly unaligned.

        Of complex elements these are the real parts.

        Raises
        ------
        LimitError
            Above `MAX_ELEMENTS`.
        CheckpointError
            For a type without a conversion to floats, or a storage that is damaged.
        """
        if self.numel > MAX_ELEMENTS:
            raise LimitError(f"a tensor of shape {_short(list(self.shape))} has more than {MAX_ELEMENTS} elements")
        return self.view()

    def view(self) -> Array:
        """As `words`, whatever the size: for what reads a view bit by bit."""
        if not self.element.code:
            unknown = f"elements of type {self.element.name} have no conversion to floats, in torch neither"
            raise CheckpointError(self.element.refusal or unknown)
        words = self.element.numpy(big_endian=self.storage.big_endian)
        step = self.element.itemsize
        if self.numel == 0:
            return np.empty(self.shape, words)
        data = self.storage.read()
        begin = self.offset * step
        if step == words.itemsize and self.strides == _contiguous(self.shape):
            return data[begin : begin + self.numel * step].view(words).reshape(self.shape)
        strides = tuple(stride * step for stride in self.strides)
        return np.ndarray(self.shape, words, data.data, begin, strides)

    def float32(self) -> Floats:
        """The elements as float32: every type becomes that first; the real part of complex ones."""
        words = self.words()
        name = self.element.name
        if name in float8.NAMES:
            return float8.table(name)[words]
        if self.element.is_bfloat16:
            words = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif name == "bool":
            words = words != 0
        if self.negated:
            words = np.negative(words)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(words, np.float32)


def tensor(storage: object, offset: object, shape: object, strides: object, element: ElementType | None) -> Tensor:
    """A `Tensor` from numbers of unknown origin, none of which is used before all are checked.

    Raises
    ------
    CheckpointError
        When the numbers are none, or reach outside the storage.
    """
    if not isinstance(storage, Storage):
        raise CheckpointError(f"a tensor over {type(storage).__name__}: expected a storage")
    if not (
        isinstance(shape, tuple | list) and isinstance(strides, tuple | list) and len(shape) == len(strides) <= MAX_AXES
    ):
        raise CheckpointError(f"storage {storage.key[:80]!r}: a tensor whose shape and strides do not go together")
    shape, strides = tuple(shape), tuple(strides)
    element = element or (ELEMENT_TYPES["uint8"] if storage.element is UNTYPED else storage.element)
    numel, last = 1, _whole(storage, offset)
    for length, stride in zip(shape, strides, strict=True):
        numel *= _whole(storage, length)
        last += (length - 1) * _whole(storage, stride)
    if not numel and math.prod(length or 1 for length in shape) >= 1 << 56:  # which no array has, not even an empty one
        raise CheckpointError(f"storage {storage.key[:80]!r}: a tensor of the shape {_short(list(shape))}")
    if numel and element.code and last >= (held := storage.nbytes // element.itemsize):
        raise CheckpointError(
            f"storage {storage.key[:80]!r}: a tensor of shape {_short(list(shape))} reaches element {_short(last)}: "
            f"the storage holds {held}"
        )
    return Tensor(storage, element, _whole(storage, offset), shape, strides)


def without_values(kind: str, refusal: str, shape: object) -> Tensor:
    """What stands for a tensor whose values are not read: its shape is all that is known.

    Raises
    ------
    CheckpointError
        For what is no shape.
    """
    storage = Storage(kind, ElementType(kind, "", 1, refusal), 0, bytes_of_nothing)
    return tensor(storage, 0, shape, (0,) * len(shape) if isinstance(shape, tuple) else None, None)


def bytes_of_nothing() -> Bytes:
    """For storages that have no bytes."""
    return np.empty(0, np.uint8)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _whole(storage: Storage, value: object) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"storage {storage.key[:80]!r}: a tensor's offset, shape and strides must be whole numbers from 0 on"
        )
    return value


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
