"""Inspect: every byte of frames accounted for, by frame, by array and by stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..arrays.named_array import Piece
from ..errors import FrameError, ManifestError
from ..frames import FrameInfo, StreamInfo
from ..frames import inspect as inspect_frame
from ..frames.inspection import entropies
from ..packed.cache_info import CacheInfo
from ..packed.summary import cache_document, cache_summary, kept_tokens
from ..text import count, ratio
from .frame_set import DecodeOptions, FrameSet
from .manifest import ArrayEntry, Manifest, Sizes, array_to_dict, frames_of


@dataclass(frozen=True, kw_only=True)
class LoneFrame:
    """A frame without a manifest."""

    path: str
    info: FrameInfo

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"input": self.path, "kind": "frame", **self.info.to_dict()}

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """The table of its streams."""
        return f"{self.path}: {self.info}"


@dataclass(frozen=True, kw_only=True)
class LoneFrames:
    """Frames one after another, without a manifest.

    Parameters
    ----------
    path
        The file.
    entry
        The array of all their words: its name is the file's, its shape unknown.
    frames
        Their accounts, in order.
    unknown
        What nothing says, for people.
    """

    path: str
    entry: ArrayEntry
    frames: tuple[FrameInfo, ...]
    unknown: str

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return ratio(self.entry.nbytes, self.entry.stored_bytes)

    @property
    def streams(self) -> dict[str, StreamTotal]:
        """Totals by container and stream, e.g. ``"fp16 hi"``."""
        return _totals(self.frames)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "input": self.path,
            "kind": "frames",
            "dtype": self.entry.dtype,
            "raw_bytes": self.entry.nbytes,
            "stored_bytes": self.entry.stored_bytes,
            "ratio": self.ratio,
            "streams": {name: total.to_dict() for name, total in self.streams.items()},
            "frames": [
                {"offset": entry.offset, **info.to_dict()}
                for entry, info in zip(self.entry.frames, self.frames, strict=True)
            ],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """The totals and each stream's share; with `verbose` the table of every frame."""
        array = self.entry
        lines = [
            f"{self.path}: {self.unknown}",
            f"  {array.dtype}, {array.shape[0]:,} words, {array.nbytes:,} -> {array.stored_bytes:,} bytes, "
            f"ratio {self.ratio:.4f}",
        ]
        for entry, info in zip(array.frames, self.frames, strict=True) if verbose else ():
            lines.append(f"  at {entry.offset}: {info}".replace("\n", "\n    "))
        return "\n".join(lines + _total_lines(self.streams))


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
class ArrayFrames:
    """An array of a bundle, and the accounts of its frames, or of words stored raw, in order."""

    entry: ArrayEntry
    frames: tuple[FrameInfo | RawInfo, ...]

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return ratio(self.entry.nbytes, self.entry.stored_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As in the manifest, with the streams of each frame."""
        document = array_to_dict(self.entry)
        frames = [
            {**frame, "streams": [] if isinstance(info, RawInfo) else info.to_dict()["streams"]}
            for frame, info in zip(document["frames"], self.frames, strict=True)
        ]
        return {**document, "frames": frames, "ratio": self.ratio}

    def line(self, width: int) -> str:
        """Name, shape and sizes."""
        array = self.entry
        return (
            f"{array.name:<{width}}  {array.dtype} {list(array.shape)} {array.order}  {array.nbytes:,} -> "
            f"{array.stored_bytes:,}  ratio {self.ratio:.4f}  {frames_of([array])}"
        )


@dataclass(kw_only=True)
class StreamTotal:
    """The streams of one name, of all frames, added up; sizes in bytes."""

    raw_bytes: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    entropy_bits: float = 0.0
    chosen: dict[str, int] = field(default_factory=dict)
    """How often each predictor and codec were chosen, e.g. ``"delta_seq+zstd"``; ``"stored raw"``: no frame at all."""

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


@dataclass(frozen=True, kw_only=True)
class BundleInfo(Sizes):
    """Frames with a manifest: arrays, and streams added up.

    Parameters
    ----------
    path
        What was opened.
    manifest
        Its manifest.
    arrays
        In order.
    streams
        Totals by container and stream, e.g. ``"fp16 hi"``; ``"fp16 raw"`` for words stored raw.
    cache
        The packed cache that the arrays were read from, if the manifest says so.
    """

    path: str
    manifest: Manifest
    arrays: tuple[ArrayFrames, ...]
    streams: dict[str, StreamTotal]
    cache: CacheInfo | None = None

    @property
    def entropy_ratio(self) -> float | None:
        """The ratio at the order-0 entropy of all streams; None for data without entropy."""
        bits = sum(total.entropy_bits for total in self.streams.values())
        return 8 * sum(total.raw_bytes for total in self.streams.values()) / bits if bits else None

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "input": self.path,
            "kind": "bundle",
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": self.ratio,
            "entropy_ratio": self.entropy_ratio,
            "kvmnn_version": self.manifest.kvmnn_version,
            "zstd_version": self.manifest.zstd_version,
            "effort": self.manifest.effort,
            "cache": cache_document(self.cache),
            "streams": {name: total.to_dict() for name, total in self.streams.items()},
            "arrays": [array.to_dict() for array in self.arrays],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """A line for each array, the totals, and each stream's share; with `verbose` the table of every frame."""
        made = self.manifest
        lines = [
            f"{self.path}: {count(len(self.arrays), 'array')}, made by kvmnn {made.kvmnn_version}, "
            f"zstd {made.zstd_version}, effort {made.effort}"
        ]
        if self.cache:
            name = f" {self.cache.name!r}" if self.cache.name else ""
            told = cache_summary(self.cache)
            lines.append(f"  {self.cache.kind} cache{name}: {told}, {self.cache.file_bytes:,} bytes as packed files")
            lines += [f"  {line}" for line in kept_tokens(self.cache)]
        tables = verbose or sum(len(array.frames) for array in self.arrays) == 1
        width = max(len(array.entry.name) for array in self.arrays)
        for array in self.arrays:
            lines.append(f"  {array.line(width)}")
            for entry, info in zip(array.entry.frames, array.frames, strict=True) if tables else ():
                lines.append(f"  {entry.file} at {entry.offset}: {info}".replace("\n", "\n    "))
        limit = "" if self.entropy_ratio is None else f" (order-0 limit {self.entropy_ratio:.4f})"
        lines.append(f"  total: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, ratio {self.ratio:.4f}{limit}")
        return "\n".join(lines + _total_lines(self.streams))


def inspect(frames: FrameSet, options: DecodeOptions | None = None) -> BundleInfo | LoneFrame | LoneFrames:
    """Account for every byte of frames; they are decoded for it.

    Parameters
    ----------
    frames
        `open_frames`.
    options
        Limits and codecs.

    Raises
    ------
    FrameError
        When a frame does not decode; the message names its array and number.
    ManifestError
        When a frame is not what the manifest says: its bytes, its words, its predictors and codecs.
    LimitError
        When there are more raw bytes than `options.max_bytes`.
    """
    options = options or DecodeOptions()
    frames.check_size(options)
    if frames.document is None:
        entry = frames.arrays[0]
        alone = tuple(_frame(frames, entry, number, options) for number in range(len(entry.frames)))
        if len(alone) == 1:
            return LoneFrame(path=frames.path, info=alone[0])
        return LoneFrames(path=frames.path, entry=entry, frames=alone, unknown=frames.unknown)
    arrays = tuple(
        ArrayFrames(
            entry=entry,
            frames=tuple(
                _raw(frames, entry, number) if stored.is_raw else _frame(frames, entry, number, options)
                for number, stored in enumerate(entry.frames)
            ),
        )
        for entry in frames.arrays
    )
    streams = _totals(info for array in arrays for info in array.frames)
    return BundleInfo(path=frames.path, manifest=frames.document, arrays=arrays, streams=streams, cache=frames.cache)


def _raw(frames: FrameSet, array: ArrayEntry, number: int) -> RawInfo:
    stored, _ = _stored(frames, array, number)
    streams = entropies(stored, array.dtype)
    return RawInfo(dtype=array.dtype, raw_bytes=stored.size, entropy=sum(streams) / len(streams))


def _stored(frames: FrameSet, array: ArrayEntry, number: int) -> tuple[Piece, str]:
    """What a file holds of a frame, as the manifest has it, and the beginning of messages about it."""
    entry = array.frames[number]
    stored = frames.frame(entry)
    where = f"{frames.path}: array {array.name!r}: frame {number}:"
    if entry.sha256 not in (None, hashlib.sha256(stored.data).hexdigest()):
        raise ManifestError(f"{where} does not match the manifest's sha256")
    return stored, where


def _frame(frames: FrameSet, array: ArrayEntry, number: int, options: DecodeOptions) -> FrameInfo:
    entry = array.frames[number]
    stored, where = _stored(frames, array, number)
    try:
        info = inspect_frame(stored, dtype=array.dtype, codecs=options.codecs)
    except FrameError as exc:
        raise FrameError(f"{where} {exc}") from None
    if info.raw_bytes != entry.raw_bytes:
        raise ManifestError(f"{where} holds {info.raw_bytes} bytes, the manifest says {entry.raw_bytes}")
    if frames.document is not None:
        _check_streams(frames.document, info, where)
    return info


def _check_streams(document: Manifest, info: FrameInfo, where: str) -> None:
    """`ManifestError` for a stream that was not made with what the manifest says the encoder might use."""
    for stream in info.streams:
        of_hi = stream.name == "hi" and document.hi_predictors is not None
        predictors = (document.hi_predictors if of_hi else document.predictors) or ("raw",)
        for what, used, said in (("predictor", stream.predictor, predictors), ("codec", stream.codec, document.codecs)):
            if used not in said:
                raise ManifestError(
                    f"{where} stream {stream.name} has {what} {used}, the manifest says {', '.join(said)}"
                )


def _totals(infos: Iterable[FrameInfo | RawInfo]) -> dict[str, StreamTotal]:
    found: dict[str, StreamTotal] = {}
    for info in infos:
        if isinstance(info, RawInfo):
            found.setdefault(f"{info.dtype} raw", StreamTotal()).add_raw(info)
            continue
        for stream in info.streams:
            found.setdefault(f"{info.container} {stream.name}", StreamTotal()).add(stream)
    return found


def _total_lines(streams: dict[str, StreamTotal]) -> list[str]:
    heading = f"    {'bytes of':<11} {'raw':>13} {'stored':>13} {'bits/byte':>9} {'entropy':>8}  chosen"
    return [heading, *(f"    {name:<11} {total}" for name, total in streams.items())]
