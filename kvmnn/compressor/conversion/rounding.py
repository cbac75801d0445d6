"""Elements of any type as fp16, bf16 or fp32, bit for bit as torch makes them."""

from __future__ import annotations

import numpy as np

from ...dtypes import BF16, FP16, FP32, DType, Elements
from ...errors import CheckpointError
from ...formats.torch.tensors import TorchTensor
from ..kvcm.words import round_float32

_DTYPE_BY_ELEMENT = {"float16": FP16, "bfloat16": BF16, "float32": FP32}


def convert_elements(tensor: TorchTensor, dtype: DType) -> Elements:
    """The elements of `tensor` as words of `dtype`, with its shape.

    Elements of the same type keep their bits. All others become float32 first and are rounded from there to the
    nearest, ties to even, beyond the range to infinity; float64 is therefore rounded twice, as torch does it.

    Raises
    ------
    CheckpointError
        For a tensor that has no such words; see `check_convertible`.
    """
    if not _has_dtype(tensor, dtype):
        return round_float32(tensor.to_float32(), dtype)
    check_convertible(tensor, dtype)
    elements = tensor.read_elements().astype(dtype.numpy_dtype, copy=False)
    if tensor.is_negated:
        bits = np.dtype(f"u{dtype.itemsize}")
        elements = (elements.view(bits) ^ bits.type(1 << 8 * dtype.itemsize - 1)).view(dtype.numpy_dtype)
    return elements


def check_convertible(tensor: TorchTensor, dtype: DType) -> None:
    """Refuse what the published converter cannot write, although the elements can be read.

    torch hands a tensor with the negation bit to numpy only after it had a reason to copy it: another type, or strides.

    Raises
    ------
    CheckpointError
        For a contiguous tensor of the type `dtype` with the negation bit.
    """
    if tensor.is_negated and tensor.is_contiguous and _has_dtype(tensor, dtype):
        raise CheckpointError(
            f"a {tensor.element_type.name} tensor with torch's negation bit, which the published converter cannot "
            f"write as "
            f"{dtype.name}: save what resolve_neg() gives, or choose another dtype"
        )


def _has_dtype(tensor: TorchTensor, dtype: DType) -> bool:
    return _DTYPE_BY_ELEMENT.get(tensor.element_type.name) == dtype


_EXPONENT_MASKS = {FP16: 0x7C00, BF16: 0x7F80, FP32: 0x7F80_0000}


def count_non_finite(elements: Elements, dtype: DType) -> int:
    """How many of the words are infinite or no number."""
    exponent = np.array(_EXPONENT_MASKS[dtype], f"u{dtype.itemsize}")
    bits = elements.view(exponent.dtype)
    return int(np.count_nonzero((bits & exponent) == exponent))
