"""What is told of the pieces of a bundle that are no frames, and streams added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .. import dense
from ..frames import FrameInfo, StreamInfo


@dataclass(frozen=True, kw_only=True)
class RawChunkInfo:
    """Words that are stored as they are, because no frame of them was smaller.

    Parameters
    ----------
    dtype
        Of the words.
    raw_bytes
        Their size.
    entropy
        Mean order-0 entropy of their streams in bits for each byte: what a frame could have reached.
    """

    dtype: str
    raw_bytes: int
    entropy: float

    def __str__(self) -> str:
        return f"{self.dtype} words, stored: raw, {self.raw_bytes:,} bytes (entropy {self.entropy:.3f} bits/byte)"


@dataclass(frozen=True, kw_only=True)
class DenseChunkInfo:
    """A dense stream of a bundle.

    Parameters
    ----------
    info
        What it says of itself.
    entropy
        Mean order-0 entropy of the byte lanes of its words in bits for each byte.
    """

    info: dense.DenseInfo
    entropy: float

    def __str__(self) -> str:
        return f"{self.info}\n(entropy {self.entropy:.3f} bits/byte)"


ChunkInfo = FrameInfo | RawChunkInfo | DenseChunkInfo


@dataclass(kw_only=True)
class StreamStats:
    """The streams of one name, of all frames, added up; sizes in bytes."""

    raw_bytes: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    entropy_bits: float = 0.0
    chosen: dict[str, int] = field(default_factory=dict)
    """How often each predictor and codec were chosen, e.g. ``"delta_seq+zstd"``; ``"stored raw"``: no frame at all;
    ``"dense rows"``, ``"dense frame"`` and ``"dense words"``: methods of dense streams."""

    def add_frame_stream(self, stream: StreamInfo) -> None:
        """Count a stream in."""
        self.raw_bytes += stream.raw_bytes
        self.payload_bytes += stream.payload_bytes
        self.header_bytes += stream.HEADER_BYTES
        self.entropy_bits += (stream.entropy or 0.0) * stream.raw_bytes
        self._count(f"{stream.predictor}+{stream.codec}")

    def add_raw(self, raw_info: RawChunkInfo) -> None:
        """Count words in that are stored raw."""
        self.raw_bytes += raw_info.raw_bytes
        self.payload_bytes += raw_info.raw_bytes
        self.entropy_bits += raw_info.entropy * raw_info.raw_bytes
        self._count("stored raw")

    def add_dense(self, dense_info: DenseChunkInfo) -> None:
        """Count a dense stream in."""
        header = dense_info.info.sections["header"]
        self.raw_bytes += dense_info.info.raw_bytes
        self.payload_bytes += dense_info.info.stream_bytes - header
        self.header_bytes += header
        self.entropy_bits += dense_info.entropy * dense_info.info.raw_bytes
        self._count(f"dense {dense_info.info.method}")

    def _count(self, choice: str) -> None:
        self.chosen[choice] = self.chosen.get(choice, 0) + 1

    @property
    def bits_per_byte(self) -> float:
        """Payload bits for each raw byte."""
        return 8 * self.payload_bytes / self.raw_bytes

    @property
    def entropy(self) -> float:
        """Mean order-0 entropy in bits for each raw byte."""
        return self.entropy_bits / self.raw_bytes

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "raw_bytes": self.raw_bytes,
            "payload_bytes": self.payload_bytes,
            "header_bytes": self.header_bytes,
            "bits_per_byte": self.bits_per_byte,
            "entropy": self.entropy,
            "chosen": self.chosen,
        }

    def __str__(self) -> str:
        choices = ", ".join(f"{choice} x{times}" for choice, times in sorted(self.chosen.items()))
        sizes = f"{self.raw_bytes:>13,} {self.payload_bytes:>13,}"
        return f"{sizes} {self.bits_per_byte:>9.3f} {self.entropy:>8.3f}  {choices}"


def sum_streams(infos: Iterable[ChunkInfo]) -> dict[str, StreamStats]:
    """Streams added up, by container and name."""
    stats: dict[str, StreamStats] = {}
    for info in infos:
        if isinstance(info, RawChunkInfo):
            stats.setdefault(f"{info.dtype} raw", StreamStats()).add_raw(info)
            continue
        if isinstance(info, DenseChunkInfo):
            stats.setdefault(f"{info.info.dtype} dense", StreamStats()).add_dense(info)
            continue
        for stream in info.streams:
            stats.setdefault(f"{info.container} {stream.name}", StreamStats()).add_frame_stream(stream)
    return stats


def format_stream_table(streams: dict[str, StreamStats]) -> list[str]:
    """The table of totals."""
    heading = f"    {'bytes of':<11} {'raw':>13} {'stored':>13} {'bits/byte':>9} {'entropy':>8}  chosen"
    return [heading, *(f"    {name:<11} {total}" for name, total in streams.items())]
