"""Tensors of a checkpoint: a place in a storage, checked when made, read only when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, LimitError
from .header import ELEMENTS_MOST, Floats, float32_of

AXES_MOST = 64

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ElementType:
    """How a storage's elements are coded.

    Parameters
    ----------
    name
        As torch calls it, without ``torch.``.
    code
        numpy type without byte order; ``u2`` for bfloat16. Empty for types whose values kvmnn does not read.
    itemsize
        Bytes.
    """

    name: str
    code: str
    itemsize: int

    @property
    def is_bfloat16(self) -> bool:
        """Whether the words are the upper halves of float32."""
        return self.name == "bfloat16"

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
        ElementType("complex128", "c16", 16),
        ElementType("complex64", "c8", 8),
        *(
            ElementType(name, "", size)
            for name, size in {
                "complex32": 4,
                "float8_e4m3fn": 1,
                "float8_e5m2": 1,
                "float8_e4m3fnuz": 1,
                "float8_e5m2fnuz": 1,
                "float8_e8m0fnu": 1,
                "float4_e2m1fn_x2": 1,
                "qint8": 1,
                "quint8": 1,
                "qint32": 4,
                "quint4x2": 1,
                "quint2x4": 1,
            }.items()
        ),
    )
}
"""By torch's name."""

UNTYPED = ElementType("untyped", "", 1)
"""Bytes without a type; the tensor brings one."""


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
    """

    key: str
    element: ElementType
    nbytes: int
    read: Callable[[], Bytes]
    big_endian: bool = False


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
    """

    storage: Storage
    element: ElementType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def words(self) -> Array:
        """The elements as stored, with the tensor's shape; a view of the storage, possibly unaligned.

        Raises
        ------
        LimitError
            Above 100 million elements.
        CheckpointError
            For a type whose values kvmnn does not read, or a storage that is damaged.
        """
        if self.numel > ELEMENTS_MOST:
            raise LimitError(f"a tensor of shape {_short(list(self.shape))} has more than {ELEMENTS_MOST} elements")
        if not self.element.code:
            raise CheckpointError(f"elements of type {self.element.name} are not supported")
        words = self.element.numpy(big_endian=self.storage.big_endian)
        if self.numel == 0:
            return np.empty(self.shape, words)
        data = self.storage.read()
        begin = self.offset * words.itemsize
        if self.strides == _contiguous(self.shape):
            end = begin + self.numel * words.itemsize
            return data[begin:end].view(words).reshape(self.shape)
        flat = data[begin : begin + (data.size - begin) // words.itemsize * words.itemsize].view(words)
        strides = tuple(stride * words.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)

    def float32(self) -> Floats:
        """The elements as float32: every type becomes that first; the real part of complex ones."""
        words = self.words()
        if words.dtype == np.float32:
            return words
        if self.element.is_bfloat16:
            return float32_of(words)
        if self.element.name == "bool":
            words = words != 0
        if words.dtype.kind == "c":
            words = words.real
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
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= AXES_MOST):
        raise CheckpointError(f"storage {storage.key[:80]!r}: a tensor whose shape and strides do not go together")
    element = element or storage.element
    numel, last = 1, _whole(storage, offset)
    for length, stride in zip(shape, strides, strict=True):
        numel *= _whole(storage, length)
        last += (length - 1) * _whole(storage, stride)
    if numel and last >= (held := storage.nbytes // element.itemsize):
        raise CheckpointError(
            f"storage {storage.key[:80]!r}: a tensor of shape {_short(list(shape))} reaches element {_short(last)}: "
            f"the storage holds {held}"
        )
    return Tensor(storage, element, _whole(storage, offset), shape, strides)


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
