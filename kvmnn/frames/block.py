"""The engine's unit of lossless storage: frames of K and V of one token range, stored only if both together gain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import parse_dtype
from ..errors import KvmnnError
from .buffers import as_elements, as_raw_bytes, fnv1a64
from .decoder import decode
from .encoder import encode
from .options import CODECS, Effort


@dataclass(frozen=True)
class Block:
    """The engine's record of one token range of one layer (spec: codec, section 9)."""

    dtype: str | None
    """fp16, bf16 or fp32; None if no container supports the elements (then `fallback` is set)."""
    raw_bytes: int
    """Bytes of K and V together."""
    attempted_bytes: int
    """Bytes of both frames, stored or not."""
    compressed_bytes: int
    """Bytes that are stored: those of the frames, or the raw ones if the frames do not gain."""
    fallback: bool
    """Whether encoding failed; frames that only do not gain are dropped without this flag."""
    key_frame: bytes | None
    value_frame: bytes | None
    raw_hash: int
    """`fnv1a64` over K's bytes and then V's; 0 without `strict_roundtrip_check`."""
    blob_hash: int
    """`fnv1a64` over K's frame and then V's; 0 if none is stored."""

    @property
    def is_stored(self) -> bool:
        """Return whether the frames are stored."""
        return self.key_frame is not None

    @property
    def ratio(self) -> float:
        """Return raw bytes divided by compressed bytes, rounded to float32 as in MNN; 1 if no frames are stored."""
        return _compute_float32_ratio(self.raw_bytes, self.compressed_bytes) if self.is_stored else 1.0

    @property
    def attempted_ratio(self) -> float:
        """Return raw bytes divided by attempted bytes, rounded to float32; 1 after a failure."""
        return 1.0 if self.fallback else _compute_float32_ratio(self.raw_bytes, self.attempted_bytes)

    def __repr__(self) -> str:
        """Return one line: the frames and their sizes, not their bytes."""
        summary = (
            f"{self.dtype or 'no dtype'}, {self.raw_bytes:,} -> {self.compressed_bytes:,} bytes, ratio {self.ratio:.4f}"
        )
        if self.key_frame is None or self.value_frame is None:
            return f"<Block {summary}, kept raw{', fallback' if self.fallback else ''}>"
        return f"<Block {summary}, key frame {len(self.key_frame):,}, value frame {len(self.value_frame):,}>"

    def decode(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Decode K and V as 1-D arrays; `KvmnnError` if the block has no frames."""
        if self.key_frame is None or self.value_frame is None:
            raise KvmnnError("the block keeps no frames: its K and V stayed raw")
        return decode(self.key_frame, dtype=self.dtype), decode(self.value_frame, dtype=self.dtype)


def encode_block(
    keys: Any,
    values: Any,
    *,
    dtype: str | None = None,
    predictors_k: str | Iterable[str] | None = None,
    predictors_v: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: Effort = "exact",
    strict_roundtrip_check: bool = True,
    threads: int | None = None,
) -> Block:
    """Encode K and V of one token range under the engine's joint rule.

    Parameters
    ----------
    keys, values
        As for `encode`, of the same dtype; the engine's order is ``[kv_head, token, head_dim]``.
    dtype, codecs, effort, threads
        As for `encode`.
    predictors_k, predictors_v
        Predictor sets for K and for V, each for all lanes.
    strict_roundtrip_check
        Compute `Block.raw_hash`, as the engine does under the option of this name.

    Returns
    -------
    Block
        With both frames if together they are smaller than K and V, else with none. Data that the engine cannot encode
        (empty, a size that is not a multiple of the element size, elements of other than 2 or 4 bytes) gives a fallback
        block, as in the engine, and no error.

    Raises
    ------
    TypeError
        If values are neither arrays nor bytes-like, or are raw bytes without a dtype.
    KvmnnError
        If K and V have different types, or an option does not exist.
    """
    byte_views = as_raw_bytes(keys, "keys"), as_raw_bytes(values, "values")
    raw_bytes = sum(data.size for data in byte_views)
    element_type = _resolve_common_dtype(keys, values, dtype)
    frames: list[bytes] = []
    if element_type is not None and all(
        data.size and data.size % parse_dtype(element_type).itemsize == 0 for data in byte_views
    ):
        frames = [
            encode(array, dtype=element_type, predictors=predictors, codecs=codecs, effort=effort, threads=threads)
            for array, predictors in ((keys, predictors_k), (values, predictors_v))
        ]
    is_fallback = not frames
    attempted_bytes = raw_bytes if is_fallback else sum(map(len, frames))
    is_stored = not is_fallback and attempted_bytes < raw_bytes
    little_endian_views = (
        list(byte_views) if element_type is None else [as_elements(array, element_type)[1] for array in (keys, values)]
    )
    return Block(
        dtype=element_type,
        raw_bytes=raw_bytes,
        attempted_bytes=attempted_bytes,
        compressed_bytes=attempted_bytes if is_stored else raw_bytes,
        fallback=is_fallback,
        key_frame=frames[0] if is_stored else None,
        value_frame=frames[1] if is_stored else None,
        raw_hash=_hash_pair(*little_endian_views) if strict_roundtrip_check else 0,
        blob_hash=_hash_pair(*frames) if is_stored else 0,
    )


def _resolve_common_dtype(keys: Any, values: Any, dtype: str | None) -> str | None:
    type_names: list[str | None] = []
    for array in (keys, values):
        if isinstance(array, np.ndarray) and array.dtype != np.uint8 and array.dtype.itemsize not in (2, 4):
            type_names.append(None)
        else:
            type_names.append(as_elements(array, dtype)[0].name)
    if type_names[0] != type_names[1]:
        raise KvmnnError(
            f"keys are {type_names[0] or keys.dtype}, values are {type_names[1] or values.dtype}: expected one dtype"
        )
    return type_names[0]


def _hash_pair(first: Any, second: Any) -> int:
    return fnv1a64(second, fnv1a64(first))


def _compute_float32_ratio(raw_bytes: int, stored_bytes: int) -> float:
    return float(np.float32(raw_bytes / stored_bytes))
