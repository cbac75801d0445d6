"""What is told of the pieces of a bundle that are no frames, and streams added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .. import dense
from ..frames import FrameInfo, StreamInfo


@dataclass(frozen=True, kw_only=True)
class RawInfo:
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
class DensePiece:
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


PieceInfo = FrameInfo | RawInfo | DensePiece


@dataclass(kw_only=True)
class StreamTotal:
    """The streams of one name, of all frames, added up; sizes in bytes."""

    raw_bytes: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    entropy_bits: float = 0.0
    chosen: dict[str, int] = field(default_factory=dict)
    """How often each predictor and codec were chosen, e.g. ``"delta_seq+zstd"``; ``"stored raw"``: no frame at all;
    ``"dense rows"``, ``"dense frame"`` and ``"dense words"``: methods of dense streams."""

    def add(self, stream: StreamInfo) -> None:
        """Count a stream in."""
        self.raw_bytes += stream.raw_bytes
        self.payload_bytes += stream.payload_bytes
        self.header_bytes += stream.HEADER_BYTES
        self.entropy_bits += (stream.entropy or 0.0) * stream.raw_bytes
        self._count(f"{stream.predictor}+{stream.codec}")

    def add_raw(self, words: RawInfo) -> None:
        """Count words in that are stored raw."""
        self.raw_bytes += words.raw_bytes
        self.payload_bytes += words.raw_bytes
        self.entropy_bits += words.entropy * words.raw_bytes
        self._count("stored raw")

    def add_dense(self, piece: DensePiece) -> None:
        """Count a dense stream in."""
        header = piece.info.sections["header"]
        self.raw_bytes += piece.info.raw_bytes
        self.payload_bytes += piece.info.stream_bytes - header
        self.header_bytes += header
        self.entropy_bits += piece.entropy * piece.info.raw_bytes
        self._count(f"dense {piece.info.method}")

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


def totals(infos: Iterable[PieceInfo]) -> dict[str, StreamTotal]:
    """Streams added up, by container and name."""
    found: dict[str, StreamTotal] = {}
    for info in infos:
        if isinstance(info, RawInfo):
            found.setdefault(f"{info.dtype} raw", StreamTotal()).add_raw(info)
            continue
        if isinstance(info, DensePiece):
            found.setdefault(f"{info.info.dtype} dense", StreamTotal()).add_dense(info)
            continue
        for stream in info.streams:
            found.setdefault(f"{info.container} {stream.name}", StreamTotal()).add(stream)
    return found


def total_lines(streams: dict[str, StreamTotal]) -> list[str]:
    """The table of totals."""
    heading = f"    {'bytes of':<11} {'raw':>13} {'stored':>13} {'bits/byte':>9} {'entropy':>8}  chosen"
    return [heading, *(f"    {name:<11} {total}" for name, total in streams.items())]
