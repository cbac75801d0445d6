"""Elements of any type as fp16, bf16 or fp32, bit for bit as torch makes them."""

from __future__ import annotations

import numpy as np

from ...dtypes import BF16, FP16, FP32, DType, Words
from ...errors import CheckpointError
from ...formats.torch.tensors import Tensor
from ..kvcm.words import rounded

_SAME = {"float16": FP16, "bfloat16": BF16, "float32": FP32}


def words_of(tensor: Tensor, dtype: DType) -> Words:
    """The elements of `tensor` as words of `dtype`, with its shape.

    Elements of the same type keep their bits. All others become float32 first and are rounded from there to the
    nearest, ties to even, beyond the range to infinity; float64 is therefore rounded twice, as torch does it.

    Raises
    ------
    CheckpointError
        For a tensor that has no such words; see `check_convertible`.
    """
    if not _is_same(tensor, dtype):
        return rounded(tensor.float32(), dtype)
    check_convertible(tensor, dtype)
    words = tensor.words().astype(dtype.numpy, copy=False)
    if tensor.negated:
        bits = np.dtype(f"u{dtype.itemsize}")
        words = (words.view(bits) ^ bits.type(1 << 8 * dtype.itemsize - 1)).view(dtype.numpy)
    return words


def check_convertible(tensor: Tensor, dtype: DType) -> None:
    """Refuse what the published converter cannot write, although the elements can be read.

    torch hands a tensor with the negation bit to numpy only after it had a reason to copy it: another type, or strides.

    Raises
    ------
    CheckpointError
        For a contiguous tensor of the type `dtype` with the negation bit.
    """
    if tensor.negated and tensor.is_contiguous and _is_same(tensor, dtype):
        raise CheckpointError(
            f"a {tensor.element.name} tensor with torch's negation bit, which the published converter cannot write as "
            f"{dtype.name}: save what resolve_neg() gives, or choose another dtype"
        )


def _is_same(tensor: Tensor, dtype: DType) -> bool:
    return _SAME.get(tensor.element.name) == dtype


_EXPONENTS = {FP16: 0x7C00, BF16: 0x7F80, FP32: 0x7F80_0000}


def count_non_finite(words: Words, dtype: DType) -> int:
    """How many of the words are infinite or no number."""
    exponent = np.array(_EXPONENTS[dtype], f"u{dtype.itemsize}")
    bits = words.view(exponent.dtype)
    return int(np.count_nonzero((bits & exponent) == exponent))
