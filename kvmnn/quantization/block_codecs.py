"""llama.cpp's and MNN's block formats and KIVI as codecs of a cache, bit for bit.

In block formats 32 consecutive numbers of a row share a scale in fp16, and a least number in some of llama.cpp's. MNN's
TQ3 and TQ4 rotate them first (`kvmnn.packed.rotated_codes`). KIVI groups K by channel over `group` tokens, and V by
token over channels, each with a scale and a least number in fp16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import PARTS, Floats, Part
from ..errors import KvmnnError
from ..packed.rotated_codes import TQ3, TQ4, RotatedFormat
from .codec import CacheCodec, CacheShape, Field, FieldSizes, QuantizedRows, TextCoder, measure_streams, split_bytes

BLOCK_VALUES = 32
_FP16_BYTES = 2


@dataclass(frozen=True)
class BlockFormat:
    """How a block format of ggml makes codes: of a scale by the largest magnitude, or of the range from the least."""

    bits: int
    has_minimum: bool

    def quantize(self, values: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
        """Quantise blocks ``[block, 32]``: codes of the same shape, and ``[block, 1 or 2]`` scales and least numbers.

        All arithmetic is in float32, as in ggml's reference; codes come from the scale before it is rounded.
        """
        levels = (1 << self.bits) - 1
        if self.has_minimum:
            low = values.min(axis=1, keepdims=True)
            scale = (values.max(axis=1, keepdims=True) - low) / np.float32(levels)
            codes = np.trunc((values - low) * _invert(scale) + np.float32(0.5))
            parameters = np.concatenate([scale, low], axis=1)
        elif self.bits == _BYTE_BITS:
            scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(levels >> 1)
            scaled = values * _invert(scale)
            codes = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled) + np.float32(self.offset)
            parameters = scale
        else:
            largest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
            scale = largest / np.float32(-self.offset)
            codes = np.trunc(values * _invert(scale) + np.float32(self.offset + 0.5))
            parameters = scale
        return np.clip(codes, 0, levels).astype(np.uint8), parameters.astype(np.float16)

    def dequantize(self, codes: npt.NDArray[np.uint8], parameters: npt.NDArray[np.float16]) -> Floats:
        """Return what ggml reads, float32 ``[block, 32]``."""
        scale = parameters[:, :1].astype(np.float32)
        if self.has_minimum:
            return codes.astype(np.float32) * scale + parameters[:, 1:].astype(np.float32)
        return (codes.astype(np.float32) - np.float32(self.offset)) * scale

    @property
    def offset(self) -> int:
        """The code of 0."""
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.bits * BLOCK_VALUES // 8 + _FP16_BYTES * (1 + self.has_minimum)


_BYTE_BITS = 8


def _invert(scale: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


class _BlockCoder(TextCoder):
    def __init__(self, block_format: BlockFormat | RotatedFormat, recent: int, parts: Sequence[Part]) -> None:
        self._format = block_format
        self._recent = recent
        self._parts = parts

    def count_due(self, part: Part, num_pending: int) -> int:
        return max(num_pending - self._recent, 0) if part in self._parts else 0

    def quantize(
        self, layer: int, part: Part, rows: Floats, positions: npt.NDArray[np.int64], head: int = 0
    ) -> QuantizedRows:
        codes, parameters = self._format.quantize(rows.reshape(-1, BLOCK_VALUES))
        values = self._format.dequantize(codes, parameters)
        shape = rows.shape[:2]
        return QuantizedRows(values.reshape(rows.shape), (codes.reshape(rows.shape), parameters.reshape(*shape, -1)))

    def measure(self, layer: int, part: Part, fields: Sequence[Field]) -> FieldSizes:
        codes, parameters = fields
        plain_bytes = codes.size // BLOCK_VALUES * self._format.nbytes
        packed_bytes = plain_bytes - parameters.nbytes  # codes of few bits may be larger coded, a byte for each
        coded_bytes = min(measure_streams([codes]), packed_bytes) + measure_streams(split_bytes(parameters))
        return FieldSizes(plain_bytes, coded_bytes)


@dataclass(frozen=True, kw_only=True)
class BlockCodec(CacheCodec):
    """A block format: each row of a head in blocks of 32 numbers."""

    block_format: ClassVar[BlockFormat | RotatedFormat]

    @property
    def quantized_parts(self) -> Sequence[Part]:
        """Return whether K, V or both are quantised."""
        return PARTS

    def start_text(self, shape: CacheShape) -> TextCoder:
        if shape.head_dim % BLOCK_VALUES:
            raise KvmnnError(f"{self.name}: blocks of {BLOCK_VALUES} numbers do not fit a head_dim of {shape.head_dim}")
        return _BlockCoder(self.block_format, self.recent, self.quantized_parts)


def make_block_codec(name: str, bits: int, *, has_minimum: bool = False) -> type[BlockCodec]:
    """Make the codec of a block format."""
    members = {"name": name, "block_format": BlockFormat(bits, has_minimum), "__module__": __name__}
    return dataclass(frozen=True, kw_only=True)(type(f"BlockCodec_{name}", (BlockCodec,), members))


BLOCK_CODECS = (
    make_block_codec("q8_0", 8),
    make_block_codec("q5_1", 5, has_minimum=True),
    make_block_codec("q5_0", 5),
    make_block_codec("q4_1", 4, has_minimum=True),
    make_block_codec("q4_0", 4),
)


@dataclass(frozen=True, kw_only=True)
class RotatedCodec(BlockCodec):
    """MNN's TQ3 or TQ4: K and V as ``attention_mode`` 12 and 14 store them, or K alone, as 11 and 13 do.

    Parameters
    ----------
    parts
        ``"both"``, or ``"keys"``: V are counted as 16 bits for each number.

    Notes
    -----
    Where it differs: the model attends what is decoded, which costs what the format does. MNN 3.6.1 divides the scores
    of these modes by the square root of head_dim twice, and answers nonsense.
    """

    parts: Literal["both", "keys"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts not in ("both", "keys"):
            raise KvmnnError(f"{self.name}: parts is {self.parts!r}: expected 'both' or 'keys'")

    @property
    def quantized_parts(self) -> Sequence[Part]:
        return PARTS if self.parts == "both" else PARTS[:1]


@dataclass(frozen=True, kw_only=True)
class TQ4Codec(RotatedCodec):
    """MNN's TQ4, 4.5 bits for each number."""

    name: ClassVar[str] = "tq4"
    block_format: ClassVar[RotatedFormat] = TQ4


@dataclass(frozen=True, kw_only=True)
class TQ3Codec(RotatedCodec):
    """MNN's TQ3, 3.5 bits for each number."""

    name: ClassVar[str] = "tq3"
    block_format: ClassVar[RotatedFormat] = TQ3


@dataclass(frozen=True, kw_only=True)
class KiviCodec(CacheCodec):
    """KIVI: K by channel over groups of tokens, V by token over groups of channels.

    Paper: arXiv:2402.02750. Original: ``quant_and_pack_kcache``, ``quant_and_pack_vcache`` and the cache of
    ``LlamaAttention_KIVI``.

    Parameters
    ----------
    k, v
        Bits of a number.
    group
        Tokens of a group of K, and channels of one of V; at most `head_dim` channels.
    v_group
        Channels of a group of V, where they are not `group`.
    recent
        Tokens that are not quantised (the paper's residual length): K are quantised when so many have come together,
        all of them, V one by one as they are older. 0: K as soon as a group is complete.

    Notes
    -----
    Where it differs: a group whose numbers are equal has code 0 (a division by 0 in the original); 3 bits are counted
    as such, while the original packs 2, 4 and 8.
    """

    k: int = 4
    v: int = 4
    group: int = 32
    v_group: int = 0
    recent: int = 128
    name: ClassVar[str] = "kivi"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("k", "v"):
            if getattr(self, option) not in range(1, 9):
                raise KvmnnError(f"kivi: {option} is {getattr(self, option)}: expected 1 to 8 bits")
        if self.group < 1 or self.v_group < 0:
            raise KvmnnError(f"kivi: group is {self.group} and v_group {self.v_group}: expected at least 1")
        if self.recent % self.group:
            raise KvmnnError(f"kivi: recent is {self.recent}: expected a multiple of group, {self.group}")

    def start_text(self, shape: CacheShape) -> TextCoder:
        channels = self.v_group or min(self.group, shape.head_dim)
        if shape.head_dim % channels:
            raise KvmnnError(f"kivi: groups of {channels} channels do not fit a head_dim of {shape.head_dim}")
        return _KiviCoder(self, channels)


class _KiviCoder(TextCoder):
    def __init__(self, codec: KiviCodec, channels: int) -> None:
        self._codec = codec
        self._channels = channels
        self._num_groups = 0

    def count_due(self, part: Part, num_pending: int) -> int:
        if part == "value":
            return max(num_pending - self._codec.recent, 0)
        size = self._codec.recent or self._codec.group
        return num_pending // size * size

    def quantize(
        self, layer: int, part: Part, rows: Floats, positions: npt.NDArray[np.int64], head: int = 0
    ) -> QuantizedRows:
        heads, tokens, head_dim = rows.shape
        halves = rows.astype(np.float16)
        if part == "value":
            groups = halves.reshape(heads, tokens, -1, self._channels)
            codes, parameters, values = _quantize_groups(groups, 3, self._codec.v)
            fields = codes.reshape(rows.shape), parameters.reshape(heads, tokens, -1)
            return QuantizedRows(values.reshape(rows.shape).astype(np.float32), fields)
        groups = halves.reshape(heads, -1, self._codec.group, head_dim)
        codes, parameters, values = _quantize_groups(groups, 2, self._codec.k)
        # Tokens of a group share its parameters: each has a copy, and the number of its group, as others may be cut.
        repeated = np.repeat(parameters.reshape(heads, -1, 2 * head_dim), self._codec.group, axis=1)
        numbers = self._num_groups + np.arange(groups.shape[0] * groups.shape[1], dtype=np.int32)
        self._num_groups += len(numbers)
        group_numbers = np.repeat(numbers.reshape(heads, -1, 1), self._codec.group, axis=1)
        key_fields = codes.reshape(rows.shape), repeated, group_numbers
        return QuantizedRows(values.reshape(rows.shape).astype(np.float32), key_fields)

    def measure(self, layer: int, part: Part, fields: Sequence[Field]) -> FieldSizes:
        codes, parameters = fields[0], fields[1]
        bits = self._codec.v
        if part == "key":
            bits = self._codec.k
            _, first_tokens = np.unique(fields[2].reshape(-1), return_index=True)
            parameters = parameters.reshape(-1, parameters.shape[2])[first_tokens]
        coded_bytes = measure_streams([codes, *split_bytes(parameters)])
        return FieldSizes(-(-codes.size * bits // 8) + parameters.nbytes, coded_bytes)


def _quantize_groups(
    groups: npt.NDArray[np.float16], axis: int, bits: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Quantise groups along an axis: codes, the scale and the least number of each, and what is read; all in fp16."""
    levels = np.float16((1 << bits) - 1)
    low = groups.min(axis=axis, keepdims=True)
    scale = (groups.max(axis=axis, keepdims=True) - low) / levels
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = (groups - low) / scale
    scaled[np.isnan(scaled)] = 0
    codes = np.rint(np.clip(scaled, 0, levels))
    values = codes * scale + low
    parameters = np.concatenate([scale, low], axis=3 if axis == 3 else 2)
    return codes.astype(np.uint8), parameters, values
