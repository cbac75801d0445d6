"""Encode rows as frames and decode them, with verification of both directions."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import DType, Elements, Positions
from ...errors import FrameError, KvmnnError
from ...frames import Block, encode_block, fnv1a64, verify_roundtrip
from ...frames.buffers import integrity_checksum
from ...frames.decoder import FrameDecoder
from ..config import RuntimeConfig


@dataclass(frozen=True)
class KVFrames:
    """K and V of a segment as two frames."""

    key_frame: bytes
    value_frame: bytes
    #: Checksum over both frames, compared at each decoding, because a frame contains none.
    checksum: int
    #: Hash of the rows; 0 if they were compared instead.
    raw_hash: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of both frames."""
        return len(self.key_frame) + len(self.value_frame)


@dataclass(frozen=True, eq=False)
class SegmentEncodeResult:
    """Result of encoding a segment."""

    #: Verified frames; None if they do not save space.
    frames: KVFrames | None
    #: Duration of encoding and verifying.
    compress_ns: int
    verify_ns: int


class SegmentCodec(Protocol):
    """Encodes and decodes the rows of segments."""

    needs_positions: bool

    def encode_segment(self, rows: Elements, layer: int, positions: Positions) -> SegmentEncodeResult:
        """Encode rows of a layer and verify that the frames decode to them; raise `KvmnnError` if either fails."""

    def decode_into(self, frames: KVFrames, out: Elements) -> None:
        """Write the rows to `out`, ``[2, kv_head, token, head_dim]``."""

    def decode(self, frames: KVFrames, count: int) -> Elements:
        """Decode the rows of `count` tokens into a new array."""


class RowCodec:
    """Encodes, verifies and decodes rows ``[2, kv_head, token, head_dim]`` (K, then V) of one cache."""

    needs_positions = False

    def __init__(self, config: RuntimeConfig, dtype: DType, kv_heads: int, head_dim: int) -> None:
        self._config = config
        self._dtype = dtype
        self._shape = (kv_heads, head_dim)
        self._decoder = FrameDecoder(dtype.name)

    def encode_segment(self, rows: Elements, layer: int, positions: Positions) -> SegmentEncodeResult:
        """Encode rows and verify that the frames decode to them; raise `KvmnnError` if either fails."""
        start_ns = time.perf_counter_ns()
        rows = np.ascontiguousarray(rows)  # once; every step below would do it again for itself
        block = self.encode(rows)
        if block.fallback:
            raise KvmnnError("the rows cannot be encoded")
        encoded_ns = time.perf_counter_ns()
        frames = self.to_verified_frames(block, rows)
        return SegmentEncodeResult(frames, encoded_ns - start_ns, time.perf_counter_ns() - encoded_ns)

    def encode(self, rows: Elements) -> Block:
        """Encode K and V under the engine's joint rule."""
        return encode_block(
            rows[0],
            rows[1],
            dtype=self._dtype.name,
            predictors_k=self._config.predictors_k,
            predictors_v=self._config.predictors_v,
            codecs=self._config.sound_codecs,
            effort=self._config.sound_effort,
            strict_roundtrip_check=self._config.verify == "hash",
            threads=1,
        )

    def to_verified_frames(self, block: Block, rows: Elements) -> KVFrames | None:
        """Return the verified frames of a block; None if they do not save space."""
        key, value = block.key_frame, block.value_frame
        if key is None or value is None:
            return None
        if self._config.verify == "compare":
            for frame, part_rows in ((key, rows[0]), (value, rows[1])):
                if not verify_roundtrip(frame, part_rows, dtype=self._dtype.name, threads=1):
                    raise KvmnnError("the frame decodes to other bytes than it was made of")
        return KVFrames(key, value, compute_checksum(key, value), block.raw_hash)

    def decode_into(self, frames: KVFrames, out: Elements) -> None:
        """Write the rows to `out`, ``[2, kv_head, token, head_dim]``, contiguous after the first two axes."""
        try:
            self._decoder.decode_into((frames.key_frame, frames.value_frame), out, frames.checksum)
        except FrameError:
            if compute_checksum(frames.key_frame, frames.value_frame) != frames.checksum:
                raise KvmnnError("its frames were changed in memory") from None
            raise
        if frames.raw_hash and fnv1a64(out[1], fnv1a64(out[0])) != frames.raw_hash:
            raise KvmnnError("its frames decode to other rows than they were made of")

    def decode(self, frames: KVFrames, count: int) -> Elements:
        """Decode the rows of `count` tokens into a new array; raise the errors of `decode_into`."""
        heads, head_dim = self._shape
        rows = np.empty((2, heads, count, head_dim), self._dtype.numpy_dtype)
        self.decode_into(frames, rows)
        return rows


def compute_checksum(key: bytes, value: bytes) -> int:
    """Compute one checksum over two frames."""
    return integrity_checksum(value, integrity_checksum(key))
