"""Inspect frames, with every byte accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Bytes, parse_dtype
from ..files.schema import Record, finite_or_none, json_key
from . import _decoder, _streams
from .decoder import open_frame
from .options import CODECS, PREDICTORS


@dataclass(frozen=True)
class StreamInfo(Record):
    """One stream of a frame: ten header bytes at `offset`, then its payload."""

    json_keys = (
        "name offset payload_offset predictor codec raw_bytes payload_bytes entropy header_bytes=HEADER_BYTES "
        "bits_per_byte"
    )

    HEADER_BYTES: ClassVar[int] = 10

    name: str
    """``lo``, ``hi`` of 16-bit words; ``lane0`` to ``lane3`` of 32-bit words, the least significant byte first."""
    offset: int
    payload_offset: int
    predictor: str
    codec: str
    raw_bytes: int
    payload_bytes: int
    entropy: float | None
    """Order-0 entropy of the raw stream in bits per byte: the limit of coders that code each byte by its frequency."""

    @property
    def bits_per_byte(self) -> float:
        """Return the payload bits per raw byte of the stream."""
        return 8 * self.payload_bytes / self.raw_bytes


@dataclass(frozen=True)
class FrameInfo(Record):
    """A frame: the element count and then the `streams`, without gaps."""

    json_keys = "container dtype words raw_bytes frame_bytes header_bytes ratio entropy_ratio streams"

    HEADER_BYTES: ClassVar[int] = 4

    container: str
    """``fp16`` (two streams) or ``fp32`` (four)."""
    dtype: str
    """The container's name, or bf16 if the caller specified it."""
    words: int
    streams: tuple[StreamInfo, ...]

    @property
    def header_bytes(self) -> int:
        """Return the number of bytes of the element count and all stream headers."""
        return self.HEADER_BYTES + StreamInfo.HEADER_BYTES * len(self.streams)

    @property
    def raw_bytes(self) -> int:
        """Return the number of bytes of the elements."""
        return self.words * len(self.streams)

    @property
    def frame_bytes(self) -> int:
        """Return the number of bytes of the frame."""
        return self.header_bytes + sum(stream.payload_bytes for stream in self.streams)

    @property
    def ratio(self) -> float:
        """Return raw bytes divided by frame bytes."""
        return self.raw_bytes / self.frame_bytes

    @property
    @json_key(convert=finite_or_none)
    def entropy_ratio(self) -> float | None:
        """Return the ratio at the order-0 entropy of the raw streams, without headers; None if it was not computed.

        It bounds coders of single bytes, not codecs with predictors and matches.
        """
        bits = [stream.entropy for stream in self.streams if stream.entropy is not None]
        if len(bits) != len(self.streams):
            return None
        return 8 * len(bits) / sum(bits) if sum(bits) else float("inf")

    def __str__(self) -> str:
        limit = self.entropy_ratio
        lines = [
            f"{self.dtype} frame: {self.words:,} words, {self.raw_bytes:,} -> {self.frame_bytes:,} bytes, "
            f"ratio {self.ratio:.4f}" + ("" if limit is None else f" (order-0 byte entropy: {limit:.4f})"),
            f"{'offset':>10}  {'part':<6} {'predictor':<9} {'codec':<5} {'raw bytes':>10} {'stored':>10} "
            f"{'bits/byte':>9} {'entropy':>8}",
            f"{0:>10}  {'words':<6} {'':<9} {'':<5} {'':>10} {self.HEADER_BYTES:>10}",
        ]
        for s in self.streams:
            entropy = "" if s.entropy is None else f"{s.entropy:.3f}"
            lines.append(f"{s.offset:>10,}  {s.name:<6} {'header':<9} {'':<5} {'':>10} {s.HEADER_BYTES:>10}")
            lines.append(
                f"{s.payload_offset:>10,}  {'':<6} {s.predictor:<9} {s.codec:<5} {s.raw_bytes:>10,} "
                f"{s.payload_bytes:>10,} {s.bits_per_byte:>9.3f} {entropy:>8}"
            )
        lines.append(f"{self.frame_bytes:>10,}  end")
        return "\n".join(lines)


def inspect(frame: Any, *, dtype: str | None = None, codecs: Iterable[str] = CODECS, entropy: bool = True) -> FrameInfo:
    """Account for every byte of a frame.

    The frame is decoded, to validate it and to compute the order-0 entropy of its streams. With `entropy` False, only
    its headers are read, and the entropies are None. Errors as `decode`.
    """
    element_type, parsed_frame = open_frame(frame, dtype, codecs)
    if entropy:
        parsed_frame.decode()
    streams = []
    for lane in range(parsed_frame.itemsize):
        mode, codec, raw_len, payload_len, offset = parsed_frame.get_stream(lane)
        streams.append(
            StreamInfo(
                name=_decoder.get_lane_name(parsed_frame.itemsize, lane),
                offset=offset - StreamInfo.HEADER_BYTES,
                payload_offset=offset,
                predictor=PREDICTORS[mode],
                codec=CODECS[codec],
                raw_bytes=raw_len,
                payload_bytes=payload_len,
                entropy=parsed_frame.compute_lane_entropy(lane) if entropy else None,
            )
        )
    parsed_frame.close()
    container = "fp16" if parsed_frame.itemsize == 2 else "fp32"
    return FrameInfo(
        container=container, dtype=element_type.name, words=parsed_frame.num_elements, streams=tuple(streams)
    )


def compute_entropies(elements: Bytes, dtype: str) -> tuple[float, ...]:
    """Return the order-0 entropy, in bits per byte, of each stream of a frame of little-endian `elements`."""
    itemsize = parse_dtype(dtype).itemsize
    return tuple(
        _streams.compute_order0_entropy(np.ascontiguousarray(elements[lane::itemsize])) for lane in range(itemsize)
    )
