"""Parameters of MNN's packed K and V buffers: sizes, strides, index of an element and its inverse (docs/layout.md)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_int
from ..dtypes import PARTS, Indices, Part, parse_dtype
from ..errors import KvmnnError, LimitError
from .backends import get_backend

FLASH_BLOCK = 64  # tokens in a block of V with flash attention
EXPAND_CHUNK = 64  # tokens of capacity that the engine allocates beyond its need
MAX_BUFFER_BYTES = 1 << 48  # far beyond any memory, far below any overflow


@dataclass(frozen=True)
class LayoutParams:
    """The parameters that define where an element is stored."""

    #: Geometry of the attention layer.
    kv_heads: int
    head_dim: int
    #: ``fp16``, ``bf16`` or ``fp32``: type of elements that are not int8.
    dtype: str
    #: Pack numbers of the backend.
    lP: int
    hP: int
    #: Tokens in a block of V (64 with flash attention); None without flash attention, where one block spans the
    #: capacity.
    flash_block: int | None = FLASH_BLOCK
    #: Pack numbers of the backend's int8 kernels, required if keys are int8.
    lP8: int | None = None
    hP8: int | None = None
    #: Whether keys and values are int8. Values are quantised only with keys and flash attention.
    int8_keys: bool = False
    int8_values: bool = False
    #: Packing of query tiles, for completeness: it affects no index and no size here.
    eP: int | None = None
    eP8: int | None = None

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        for name in ("kv_heads", "head_dim", "lP", "hP", "flash_block", "lP8", "hP8", "eP", "eP8"):
            value = getattr(self, name)
            if type(value) is int and value >= 1:  # as nearly all are: inference makes thousands of layouts
                continue
            if value is not None or name in ("kv_heads", "head_dim", "lP", "hP"):
                object.__setattr__(self, name, validate_int(value, name, 1))
        if self.int8_keys and (self.lP8 is None or self.hP8 is None):
            raise KvmnnError("int8 keys need lP8 and hP8, the pack numbers of the int8 kernels")
        if self.int8_values and not self.int8_keys:
            raise KvmnnError("int8 values without int8 keys: expected keys only, or both")
        if self.int8_values and self.flash_block is None:
            raise KvmnnError("int8 values without a flash block: the engine quantises values with flash attention only")

    @classmethod
    def from_backend(
        cls,
        name: str,
        *,
        kv_heads: int,
        head_dim: int,
        flash: bool = True,
        int8_keys: bool = False,
        int8_values: bool = False,
    ) -> Self:
        """Return the layout of the backend `name` (the table is `kvmnn.packed.BACKENDS`)."""
        numbers = {key: value for key, value in vars(get_backend(name)).items() if key != "source"}
        return cls(
            kv_heads=kv_heads,
            head_dim=head_dim,
            flash_block=FLASH_BLOCK if flash else None,
            int8_keys=int8_keys,
            int8_values=int8_values,
            **numbers,
        )

    # -- sizes and strides ---------------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Return the number of bytes of an element that is not int8."""
        return parse_dtype(self.dtype).itemsize

    @property
    def is_quantized(self) -> bool:
        """Return whether keys, or keys and values, are int8."""
        return self.int8_keys

    def is_int8(self, part: Part) -> bool:
        """Return whether K (``"key"``) or V (``"value"``) is int8."""
        return self.int8_keys if part == "key" else self.int8_values

    def get_pack_numbers(self, part: Part) -> tuple[int, int]:
        """Return lP and hP of K or V; lP8 and hP8 for int8."""
        return (self.lP8 or 1, self.hP8 or 1) if self.is_int8(part) else (self.lP, self.hP)

    @property
    def placement_key(self) -> tuple[Any, ...]:
        """Return all parameters that determine placement and type of elements; equal if backends have equal buffers."""
        parts = [(self.is_int8(part), self.get_pack_numbers(part)) for part in PARTS]
        return self.kv_heads, self.head_dim, self.dtype, self.flash_block, *parts

    @property
    def unrecoverable_parts(self) -> tuple[str, ...]:
        """Return sentences about what the buffers alone do not contain; empty for float layouts."""
        sentences = []
        if self.int8_keys:
            sentences.append(
                "keys: int8 codes hold each key minus its channel's maximum at the time, rounded to 256 steps, and the "
                "maxima are kept in the engine's memory only, so keys come back shifted by a constant per channel"
            )
        if self.int8_values:
            sentences.append("values: rounded to 256 steps of the first prefill's range, and clamped to it afterwards")
        return tuple(sentences)

    def value_block(self, capacity: int) -> int:
        """Return the number of tokens in a block of V."""
        return self.flash_block if self.flash_block is not None else max(capacity, 1)

    def key_shape(self, capacity: int) -> tuple[int, int, int, int]:
        """Return the shape of one head of K: ``[tile, dims / lP, hP, lP]``, without int8 scales and biases."""
        lP, hP = self.get_pack_numbers("key")
        return _ceil_div(capacity, hP), _ceil_div(self.head_dim, lP), hP, lP

    def value_shape(self, capacity: int) -> tuple[int, int, int, int, int]:
        """Return the shape of one head of V: ``[block, dims / hP, block / lP, hP, lP]``, without int8 parameters."""
        lP, hP = self.get_pack_numbers("value")
        block = self.value_block(capacity)
        return _ceil_div(capacity, block), _ceil_div(self.head_dim, hP), _ceil_div(block, lP), hP, lP

    def key_strides(self) -> tuple[int, int, int, int]:
        """Return the strides of `key_shape` in elements (bytes for int8)."""
        lP, hP = self.get_pack_numbers("key")
        return _ceil_div(self.head_dim, lP) * lP * hP + (8 * hP if self.int8_keys else 0), lP * hP, lP, 1

    def value_strides(self, capacity: int) -> tuple[int, int, int, int, int]:
        """Return the strides of `value_shape` in elements (bytes for int8)."""
        lP, hP = self.get_pack_numbers("value")
        column = _ceil_div(self.value_block(capacity), lP) * lP * hP + (8 * hP if self.int8_values else 0)
        return column * _ceil_div(self.head_dim, hP), column, lP * hP, lP, 1

    def key_head_bytes(self, capacity: int) -> int:
        """Return the number of bytes of one head in the K buffer, for a capacity in tokens."""
        return self.key_shape(capacity)[0] * self.key_strides()[0] * (1 if self.int8_keys else self.itemsize)

    def value_head_bytes(self, capacity: int) -> int:
        """Return the number of bytes of one head in the V buffer, for a capacity in tokens."""
        blocks = self.value_shape(capacity)[0]
        return blocks * self.value_strides(capacity)[0] * (1 if self.int8_values else self.itemsize)

    def key_bytes(self, capacity: int) -> int:
        """Return the number of bytes of the K buffer."""
        return self.kv_heads * self.key_head_bytes(capacity)

    def value_bytes(self, capacity: int) -> int:
        """Return the number of bytes of the V buffer."""
        return self.kv_heads * self.value_head_bytes(capacity)

    def key_head_offset(self, head: int, capacity: int) -> int:
        """Return the byte at which `head` starts in the K buffer."""
        return validate_int(head, "head", 0, self.kv_heads - 1) * self.key_head_bytes(capacity)

    def value_head_offset(self, head: int, capacity: int) -> int:
        """Return the byte at which `head` starts in the V buffer."""
        return validate_int(head, "head", 0, self.kv_heads - 1) * self.value_head_bytes(capacity)

    def infer_capacity(self, key_bytes: int, value_bytes: int) -> int:
        """Return the capacity in tokens of buffers of these sizes, as the engine derives it from a file."""
        capacity = self.find_capacity(key_bytes, value_bytes)
        if capacity is None:
            raise KvmnnError(f"K of {key_bytes} and V of {value_bytes} bytes: no capacity of {self} gives these sizes")
        return capacity

    def find_capacity(self, key_bytes: int, value_bytes: int) -> int | None:
        """Return `infer_capacity`, or None if no capacity gives these sizes."""
        # The allocated capacity may have been smaller, as K comes in tiles and V in blocks; places are the same.
        num_tiles, remainder = divmod(key_bytes, self.key_bytes(1))
        if remainder:
            return None
        capacity = num_tiles * self.key_shape(1)[2]
        if self.flash_block is not None:
            capacity = min(capacity, value_bytes // self.value_bytes(1) * self.flash_block)
        else:
            row = self.kv_heads * self.itemsize * _ceil_div(self.head_dim, self.hP) * self.hP
            capacity = min(capacity, value_bytes // row)
        if capacity < 1 or (self.key_bytes(capacity), self.value_bytes(capacity)) != (key_bytes, value_bytes):
            return None
        return capacity

    # -- indexes -------------------------------------------------------------------------------------------------------

    def key_index(self, tokens: Any, dims: Any) -> Indices:
        """Return the index of K(token, dim) inside its head, in elements (bytes for int8); arguments are broadcast."""
        t, d = self._validate_indices(tokens, dims)
        lP, hP = self.get_pack_numbers("key")
        tile, unit, _, _ = self.key_strides()
        return np.asarray(t // hP * tile + d // lP * unit + t % hP * lP + d % lP)

    def value_index(self, tokens: Any, dims: Any, capacity: int | None = None) -> Indices:
        """Return the index of V(token, dim) inside its head; `capacity` is required only without a flash block."""
        if self.flash_block is None and capacity is None:
            raise KvmnnError("without a flash block the place of a value depends on the capacity: say which")
        t, d = self._validate_indices(tokens, dims)
        lP, hP = self.get_pack_numbers("value")
        block_capacity = validate_int(capacity, "capacity", 1) if capacity is not None else 1
        block = self.value_block(block_capacity)
        s0, s1, s2, _, _ = self.value_strides(block_capacity)
        r = t % block
        return np.asarray(t // block * s0 + d // hP * s1 + r // lP * s2 + d % hP * lP + r % lP)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_capacity(self, capacity: int) -> int:
        """Return `capacity`, in tokens; `KvmnnError` if no buffers of that size are possible."""
        validate_int(capacity, "capacity", 1)
        if max(self.key_bytes(capacity), self.value_bytes(capacity)) > MAX_BUFFER_BYTES:
            raise LimitError(f"capacity {capacity} gives buffers beyond any memory")
        return capacity

    def _validate_indices(self, tokens: Any, dims: Any) -> tuple[Indices, Indices]:
        axes = []
        for name, axis, end in (("tokens", tokens, None), ("dims", dims, self.head_dim)):
            array = np.asarray(axis)
            if array.dtype.kind not in "iu":
                raise TypeError(f"{name} must be integers, not {array.dtype}")
            if array.size and (array.min() < 0 or (end is not None and array.max() >= end)):
                raise KvmnnError(f"{name} reach from {array.min()} to {array.max()}: expected 0 to {end or 'any'}")
            axes.append(array.astype(np.int64))
        return axes[0], axes[1]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def locate_element(layout: LayoutParams, part: Part, element: int, capacity: int) -> tuple[int, int]:
    """Return row and dimension of an element of one head."""
    lP, hP = layout.get_pack_numbers(part)
    if part == "key":
        tile, unit, _, _ = layout.key_strides()
        offset = element % tile
        return element // tile * hP + offset % unit // lP, offset // unit * lP + offset % lP
    block, column, unit, _, _ = layout.value_strides(capacity)
    offset = element % block % column
    row = element // block * layout.value_block(capacity) + offset // unit * lP + offset % lP
    return row, element % block // column * hP + offset % unit // lP
