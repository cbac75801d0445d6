"""Inspect: every byte of frames accounted for, by frame, by array and by stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ..arrays.completeness import Completeness, completeness_document
from ..arrays.layer_states import list_states
from ..arrays.named_array import Piece
from ..arrays.source import completeness_in
from ..dense import DenseInfo
from ..errors import FrameError, ManifestError
from ..frames import FrameInfo
from ..frames import inspect as inspect_frame
from ..frames.inspection import entropies
from ..packed.cache_info import CacheInfo
from ..packed.summary import cache_document, cache_summary, kept_tokens
from ..text import count, ratio
from .accounts import DensePiece, PieceInfo, RawInfo, StreamTotal, total_lines, totals
from .dense_pieces import decode_stream, inspect_stream
from .frame_set import DecodeOptions, FrameSet
from .kept_file import notes_of, valid_bytes, valid_bytes_by_array
from .manifest import ArrayEntry, Manifest, Sizes, array_to_dict, frames_of, room_notes, text_of_ratio


@dataclass(frozen=True, kw_only=True)
class LoneFrame:
    """A frame, or a dense stream, without a manifest."""

    path: str
    info: FrameInfo | DenseInfo

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        kind = "frame" if isinstance(self.info, FrameInfo) else "dense"
        return {"input": self.path, "kind": kind, **self.info.to_dict()}

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
        return totals(self.frames)

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
        return "\n".join(lines + total_lines(self.streams))


@dataclass(frozen=True, kw_only=True)
class ArrayFrames:
    """An array of a bundle, and the accounts of its frames, dense streams or words stored raw, in order."""

    entry: ArrayEntry
    frames: tuple[PieceInfo, ...]
    valid_bytes: int

    @property
    def ratio(self) -> float:
        """Valid over stored bytes."""
        return ratio(self.valid_bytes, self.entry.stored_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As in the manifest, with the streams of each frame, and what each dense stream says of itself."""
        document = array_to_dict(self.entry)
        frames = [{**frame, **_told(info)} for frame, info in zip(document["frames"], self.frames, strict=True)]
        return {**document, "frames": frames, "ratio": self.ratio}

    def line(self, width: int) -> str:
        """Name, shape and sizes."""
        array = self.entry
        return (
            f"{array.name:<{width}}  {array.type_name} {list(array.shape)} {array.order}  {array.nbytes:,} -> "
            f"{array.stored_bytes:,}  {text_of_ratio(array.nbytes, self.valid_bytes, array.stored_bytes)}  "
            f"{frames_of([array])}"
        )


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
        Totals by container and stream, e.g. ``"fp16 hi"``; ``"fp16 raw"`` for words stored raw, ``"fp16 dense"`` for
        dense streams.
    cache
        The packed cache that the arrays were read from, if the manifest says so.
    """

    path: str
    manifest: Manifest
    arrays: tuple[ArrayFrames, ...]
    streams: dict[str, StreamTotal]
    cache: CacheInfo | None = None

    @property
    def valid_bytes(self) -> int:
        """Bytes of all arrays without room behind the valid tokens."""
        return valid_bytes(self.manifest)

    @property
    def _made_with(self) -> str:
        """What frames were compressed with; nothing was where there are none."""
        if all(frame.is_dense for array in self.manifest.arrays for frame in array.frames):
            return "dense streams alone"
        return f"zstd {self.manifest.zstd_version}, effort {self.manifest.effort}"

    @property
    def entropy_ratio(self) -> float | None:
        """The ratio at the order-0 entropy of all streams; None for data without entropy."""
        bits = sum(total.entropy_bits for total in self.streams.values())
        return 8 * sum(total.raw_bytes for total in self.streams.values()) / bits if bits else None

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the ratio, in lines."""
        return notes_of(self.manifest, self.path) + room_notes(self.manifest)

    @property
    def completeness(self) -> Completeness | None:
        """The state of the model that the arrays contain, where the manifest records it."""
        return completeness_in(self.manifest.metadata, [array.entry.name for array in self.arrays], self.path)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "input": self.path,
            "kind": "bundle",
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "valid_bytes": self.valid_bytes,
            "ratio": self.ratio,
            "entropy_ratio": self.entropy_ratio,
            "notes": self.notes,
            "kvmnn_version": self.manifest.kvmnn_version,
            "zstd_version": self.manifest.zstd_version,
            "effort": self.manifest.effort,
            "rope": self.manifest.rope,
            "cache": cache_document(self.cache),
            **completeness_document(self.completeness),
            "streams": {name: total.to_dict() for name, total in self.streams.items()},
            "arrays": [array.to_dict() for array in self.arrays],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """A line for each array, the totals, and each stream's share; with `verbose` the table of every frame."""
        made = self.manifest
        lines = [
            f"{self.path}: {count(len(self.arrays), 'array')}, made by kvmnn {made.kvmnn_version}, {self._made_with}"
        ]
        if self.cache:
            name = f" {self.cache.name!r}" if self.cache.name else ""
            told = cache_summary(self.cache)
            lines.append(f"  {self.cache.kind} cache{name}: {told}, {self.cache.file_bytes:,} bytes as packed files")
            lines += [f"  {line}" for line in kept_tokens(self.cache)]
        lines += [f"  {line}" for line in list_states(self.completeness)]
        tables = verbose or sum(len(array.frames) for array in self.arrays) == 1
        width = max(len(array.entry.name) for array in self.arrays)
        for array in self.arrays:
            lines.append(f"  {array.line(width)}")
            for entry, info in zip(array.entry.frames, array.frames, strict=True) if tables else ():
                lines.append(f"  {entry.file} at {entry.offset}: {info}".replace("\n", "\n    "))
        has_room = self.valid_bytes != self.raw_bytes  # then the entropy is that of zeros, mostly
        known = self.entropy_ratio is not None and not has_room
        limit = f" (order-0 byte entropy: {self.entropy_ratio:.4f})" if known else ""
        lines.append(f"  total: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, {self.ratio_text}{limit}")
        lines += [f"  {line}" for line in self.notes]
        return "\n".join(lines + total_lines(self.streams))


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
        When a frame or a dense stream is not what the manifest says: its bytes, its words, its predictors and codecs.
    LimitError
        When there are more raw bytes than `options.max_bytes`.
    """
    options = options or DecodeOptions()
    frames.check_size(options)
    if frames.document is None:
        entry = frames.arrays[0]
        if entry.frames[0].is_dense:
            return LoneFrame(path=frames.path, info=_dense(frames, entry, 0).info)
        alone = tuple(_frame(frames, entry, number, options) for number in range(len(entry.frames)))
        if len(alone) == 1:
            return LoneFrame(path=frames.path, info=alone[0])
        return LoneFrames(path=frames.path, entry=entry, frames=alone, unknown=frames.unknown)
    valid = valid_bytes_by_array(frames.document)
    arrays = tuple(
        ArrayFrames(
            valid_bytes=valid[entry.name],
            entry=entry,
            frames=tuple(_piece(frames, entry, number, options) for number in range(len(entry.frames))),
        )
        for entry in frames.arrays
    )
    rooms = {entry.name for entry in frames.document.room}
    streams = totals(info for array in arrays for info in array.frames if array.entry.name not in rooms)
    return BundleInfo(path=frames.path, manifest=frames.document, arrays=arrays, streams=streams, cache=frames.cache)


def _told(info: PieceInfo) -> dict[str, Any]:
    """What the JSON of a piece has besides what is in the manifest."""
    if isinstance(info, FrameInfo):
        return {"streams": info.to_dict()["streams"]}
    return {"streams": []} | ({"dense": info.info.to_dict()} if isinstance(info, DensePiece) else {})


def _piece(frames: FrameSet, array: ArrayEntry, number: int, options: DecodeOptions) -> PieceInfo:
    stored = array.frames[number]
    if stored.is_raw:
        return _raw(frames, array, number)
    return _dense(frames, array, number) if stored.is_dense else _frame(frames, array, number, options)


def _dense(frames: FrameSet, array: ArrayEntry, number: int) -> DensePiece:
    stored, where = _stored(frames, array, number)
    entry = array.frames[number]
    try:
        info = inspect_stream(stored, array, entry)
        streams = entropies(decode_stream(stored, array, entry), array.dtype)
    except FrameError as exc:
        raise FrameError(f"{where} {exc}") from None
    return DensePiece(info=info, entropy=sum(streams) / len(streams))


def _raw(frames: FrameSet, array: ArrayEntry, number: int) -> RawInfo:
    stored, _ = _stored(frames, array, number)
    streams = entropies(stored, array.dtype)
    return RawInfo(dtype=array.dtype, raw_bytes=stored.size, entropy=sum(streams) / len(streams))


def _stored(frames: FrameSet, array: ArrayEntry, number: int) -> tuple[Piece, str]:
    """What a file holds of a piece, as the manifest has it, and the beginning of messages about it."""
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
