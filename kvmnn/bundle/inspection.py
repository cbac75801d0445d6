"""Inspect frames and bundles: every byte is counted, by frame, by array and by stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import field
from typing import Any, ClassVar

from .. import dense
from .._util.dataclass import dataclass
from .._util.text import compute_ratio, pluralize
from ..arrays.array import Chunk
from ..arrays.completeness import Completeness
from ..arrays.positions import describe_layer_states
from ..arrays.source import list_losses, parse_completeness
from ..dense import DenseInfo
from ..errors import FrameError, ManifestError
from ..files.schema import Record, json_key
from ..frames import FrameInfo, StreamInfo
from ..frames import inspect as inspect_frame
from ..frames.inspection import compute_entropies
from ..packed.cache_info import CacheInfo, build_cache_document, describe_evicted_layers, format_cache_summary
from .dense import decode_stream, inspect_stream
from .frame_set import DecodeOptions, FrameSet
from .manifest import (
    ArrayEntry,
    Manifest,
    SizeStats,
    describe_storage,
    describe_unused_arrays,
    format_ratio,
)
from .passthrough import count_valid_bytes, count_valid_bytes_by_array, describe_passthrough


@dataclass(frozen=True, kw_only=True)
class RawChunkInfo:
    """Words that are stored raw, because a frame would not be smaller."""

    #: Element type.
    dtype: str
    #: Size of the words.
    raw_bytes: int
    #: Mean order-0 entropy of the byte lanes in bits per byte: the bound of a frame.
    entropy: float

    def __str__(self) -> str:
        return f"{self.dtype} words, stored: raw, {self.raw_bytes:,} bytes (entropy {self.entropy:.3f} bits/byte)"


@dataclass(frozen=True, kw_only=True)
class DenseChunkInfo:
    """A dense stream of a bundle."""

    #: Contents of its header.
    info: dense.DenseInfo
    #: Mean order-0 entropy of the byte lanes in bits per byte.
    entropy: float

    def __str__(self) -> str:
        return f"{self.info}\n(entropy {self.entropy:.3f} bits/byte)"


ChunkInfo = FrameInfo | RawChunkInfo | DenseChunkInfo


@dataclass(kw_only=True)
class StreamStats(Record):
    """Totals over all streams of one name; sizes in bytes."""

    raw_bytes: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    entropy_bits: float = field(default=0.0, metadata={"json": False})
    chosen: dict[str, int] = field(default_factory=dict)
    """How often each predictor and codec were chosen, e.g. ``"delta_seq+zstd"``; ``"stored raw"`` counts raw pieces;
    ``"dense rows"``, ``"dense frame"`` and ``"dense words"`` are methods of dense streams."""

    def add_frame_stream(self, stream: StreamInfo) -> None:
        """Add a stream of a frame."""
        self.raw_bytes += stream.raw_bytes
        self.payload_bytes += stream.payload_bytes
        self.header_bytes += stream.HEADER_BYTES
        self.entropy_bits += (stream.entropy or 0.0) * stream.raw_bytes
        self._count(f"{stream.predictor}+{stream.codec}")

    def add_raw(self, raw_info: RawChunkInfo) -> None:
        """Add words that are stored raw."""
        self.raw_bytes += raw_info.raw_bytes
        self.payload_bytes += raw_info.raw_bytes
        self.entropy_bits += raw_info.entropy * raw_info.raw_bytes
        self._count("stored raw")

    def add_dense(self, dense_info: DenseChunkInfo) -> None:
        """Add a dense stream."""
        header = dense_info.info.sections["header"]
        self.raw_bytes += dense_info.info.raw_bytes
        self.payload_bytes += dense_info.info.stream_bytes - header
        self.header_bytes += header
        self.entropy_bits += dense_info.entropy * dense_info.info.raw_bytes
        self._count(f"dense {dense_info.info.method}")

    def _count(self, choice: str) -> None:
        self.chosen[choice] = self.chosen.get(choice, 0) + 1

    @property
    @json_key(after="header_bytes")
    def bits_per_byte(self) -> float:
        """Return the payload bits per raw byte."""
        return 8 * self.payload_bytes / self.raw_bytes

    @property
    @json_key(after="bits_per_byte")
    def entropy(self) -> float:
        """Return the mean order-0 entropy in bits per raw byte."""
        return self.entropy_bits / self.raw_bytes

    def __str__(self) -> str:
        choices = ", ".join(f"{choice} x{times}" for choice, times in sorted(self.chosen.items()))
        sizes = f"{self.raw_bytes:>13,} {self.payload_bytes:>13,}"
        return f"{sizes} {self.bits_per_byte:>9.3f} {self.entropy:>8.3f}  {choices}"


def sum_streams(infos: Iterable[ChunkInfo]) -> dict[str, StreamStats]:
    """Return totals of the streams by container and name."""
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
    """Format the totals of `sum_streams` as a table."""
    heading = f"    {'bytes of':<11} {'raw':>13} {'stored':>13} {'bits/byte':>9} {'entropy':>8}  chosen"
    return [heading, *(f"    {name:<11} {total}" for name, total in streams.items())]


@dataclass(frozen=True, kw_only=True)
class BareFrameInfo(Record):
    """A frame, or a dense stream, without a manifest."""

    json_keys = "input=path kind **info"

    path: str
    info: FrameInfo | DenseInfo

    @property
    def kind(self) -> str:
        """Return ``"frame"`` or ``"dense"``."""
        return "frame" if isinstance(self.info, FrameInfo) else "dense"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the table of its streams."""
        return f"{self.path}: {self.info}"


@dataclass(frozen=True, kw_only=True)
class BareSequenceInfo(Record):
    """Concatenated frames without a manifest."""

    json_keys = (
        "input=path kind dtype=entry.dtype raw_bytes=entry.nbytes stored_bytes=entry.stored_bytes ratio "
        "streams frames=_frame_documents"
    )

    kind: ClassVar = "frames"

    #: Path of the file.
    path: str
    #: The array of all words: the file's name, and no known shape.
    entry: ArrayEntry
    #: Information about each frame, in order.
    frames: tuple[FrameInfo, ...]
    #: Properties that are not recorded, as text.
    unknown_properties: str

    @property
    def ratio(self) -> float:
        """Return raw bytes divided by stored bytes."""
        return compute_ratio(self.entry.nbytes, self.entry.stored_bytes)

    @property
    def streams(self) -> dict[str, StreamStats]:
        """Return totals by container and stream, e.g. ``"fp16 hi"``."""
        return sum_streams(self.frames)

    @property
    def _frame_documents(self) -> list[dict[str, Any]]:
        return [{"offset": e.offset, **i.to_dict()} for e, i in zip(self.entry.frames, self.frames, strict=True)]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the totals and each stream's share; with `verbose` the table of every frame."""
        array = self.entry
        lines = [
            f"{self.path}: {self.unknown_properties}",
            f"  {array.dtype}, {array.shape[0]:,} words, {array.nbytes:,} -> {array.stored_bytes:,} bytes, "
            f"ratio {self.ratio:.4f}",
        ]
        for entry, info in zip(array.frames, self.frames, strict=True) if verbose else ():
            lines.append(f"  at {entry.offset}: {info}".replace("\n", "\n    "))
        return "\n".join(lines + format_stream_table(self.streams))


@dataclass(frozen=True, kw_only=True)
class ArrayFramesInfo(Record):
    """An array of a bundle, and information about its frames, dense streams and raw pieces, in order."""

    json_keys = "**entry frames=_frame_documents ratio"

    entry: ArrayEntry
    frames: tuple[ChunkInfo, ...]
    valid_bytes: int

    @property
    def ratio(self) -> float:
        """Return valid bytes divided by stored bytes."""
        return compute_ratio(self.valid_bytes, self.entry.stored_bytes)

    @property
    def _frame_documents(self) -> list[dict[str, Any]]:
        frames = zip(self.entry.frames, self.frames, strict=True)
        return [{**entry.to_dict(), **_chunk_document(info)} for entry, info in frames]

    def format_line(self, width: int) -> str:
        """Format name, shape and sizes as one line."""
        array = self.entry
        return (
            f"{array.name:<{width}}  {array.type_name} {list(array.shape)} {array.order}  {array.nbytes:,} -> "
            f"{array.stored_bytes:,}  {format_ratio(array.nbytes, self.valid_bytes, array.stored_bytes)}  "
            f"{describe_storage([array])}"
        )


@dataclass(frozen=True, kw_only=True)
class BundleInfo(SizeStats, Record):
    """A bundle with its manifest: arrays, and totals of the streams."""

    json_keys = (
        "input=path kind raw_bytes stored_bytes valid_bytes ratio entropy_ratio notes "
        "kvmnn_version=manifest.kvmnn_version zstd_version=manifest.zstd_version effort=manifest.effort "
        "rope=manifest.rope cache completeness streams arrays"
    )

    kind: ClassVar = "bundle"

    #: The path that was opened.
    path: str
    #: Its manifest.
    manifest: Manifest
    #: Information about each array, in order.
    arrays: tuple[ArrayFramesInfo, ...]
    #: Totals by container and stream, e.g. ``"fp16 hi"``; ``"fp16 raw"`` for words stored raw, ``"fp16 dense"`` for
    #: dense streams.
    streams: dict[str, StreamStats]
    #: The packed cache that the arrays were read from; None if the manifest names none.
    cache: CacheInfo | None = field(default=None, metadata={"convert": build_cache_document})

    @property
    def valid_bytes(self) -> int:
        """Return the number of bytes of all arrays without unused capacity after the valid tokens."""
        return count_valid_bytes(self.manifest)

    @property
    def _encoder_text(self) -> str:
        """Return the frame options as text; empty if there are no frames."""
        if all(frame.is_dense for array in self.manifest.arrays for frame in array.frames):
            return "dense streams alone"
        return f"zstd {self.manifest.zstd_version}, effort {self.manifest.effort}"

    @property
    def entropy_ratio(self) -> float | None:
        """Return the ratio at the order-0 entropy of all streams; None for data without entropy."""
        bits = sum(total.entropy_bits for total in self.streams.values())
        return 8 * sum(total.raw_bytes for total in self.streams.values()) / bits if bits else None

    @property
    def notes(self) -> list[str]:
        """Return lines about what qualifies the ratio."""
        losses = list_losses(self.manifest.metadata)
        return losses + describe_passthrough(self.manifest, self.path) + describe_unused_arrays(self.manifest)

    @property
    @json_key(omit=True)
    def completeness(self) -> Completeness | None:
        """Return how much of the model's state the arrays contain; None if the manifest does not record it."""
        return parse_completeness(self.manifest.metadata, [array.entry.name for array in self.arrays], self.path)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return a line per array, the totals, and each stream's share; with `verbose` the table of every frame."""
        bundle_manifest = self.manifest
        lines = [
            f"{self.path}: {pluralize(len(self.arrays), 'array')}, made by kvmnn {bundle_manifest.kvmnn_version}, "
            f"{self._encoder_text}"
        ]
        if self.cache:
            name = f" {self.cache.name!r}" if self.cache.name else ""
            cache_text = format_cache_summary(self.cache)
            lines.append(
                f"  {self.cache.kind} cache{name}: {cache_text}, {self.cache.file_bytes:,} bytes as packed files"
            )
            lines += [f"  {line}" for line in describe_evicted_layers(self.cache)]
        lines += [f"  {line}" for line in describe_layer_states(self.completeness)]
        has_tables = verbose or sum(len(array.frames) for array in self.arrays) == 1
        width = max(len(array.entry.name) for array in self.arrays)
        for array in self.arrays:
            lines.append(f"  {array.format_line(width)}")
            for entry, info in zip(array.entry.frames, array.frames, strict=True) if has_tables else ():
                lines.append(f"  {entry.file} at {entry.offset}: {info}".replace("\n", "\n    "))
        has_room = self.valid_bytes != self.raw_bytes  # then the entropy is that of zeros, mostly
        has_limit = self.entropy_ratio is not None and not has_room
        limit_text = f" (order-0 byte entropy: {self.entropy_ratio:.4f})" if has_limit else ""
        lines.append(f"  total: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, {self.ratio_text}{limit_text}")
        lines += [f"  {line}" for line in self.notes]
        return "\n".join(lines + format_stream_table(self.streams))


def inspect_frame_set(
    frames: FrameSet, options: DecodeOptions | None = None
) -> BundleInfo | BareFrameInfo | BareSequenceInfo:
    """Account for every byte of frames, which are decoded for that.

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
        When a frame or a dense stream contradicts the manifest: its bytes, words, predictors or codecs.
    LimitError
        When there are more raw bytes than `options.max_bytes`.
    """
    options = options or DecodeOptions()
    frames.check_size(options)
    if frames.document is None:
        entry = frames.arrays[0]
        if entry.frames[0].is_dense:
            return BareFrameInfo(path=frames.path, info=_inspect_dense_stream(frames, entry, 0).info)
        bare_frames = tuple(
            _inspect_frame(frames, entry, chunk_index, options) for chunk_index in range(len(entry.frames))
        )
        if len(bare_frames) == 1:
            return BareFrameInfo(path=frames.path, info=bare_frames[0])
        return BareSequenceInfo(
            path=frames.path, entry=entry, frames=bare_frames, unknown_properties=frames.unknown_properties
        )
    valid_bytes_by_name = count_valid_bytes_by_array(frames.document)
    arrays = tuple(
        ArrayFramesInfo(
            valid_bytes=valid_bytes_by_name[entry.name],
            entry=entry,
            frames=tuple(
                _inspect_chunk(frames, entry, chunk_index, options) for chunk_index in range(len(entry.frames))
            ),
        )
        for entry in frames.arrays
    )
    unused_names = {entry.name for entry in frames.document.unused_arrays}
    streams = sum_streams(info for array in arrays for info in array.frames if array.entry.name not in unused_names)
    return BundleInfo(path=frames.path, manifest=frames.document, arrays=arrays, streams=streams, cache=frames.cache)


def _chunk_document(info: ChunkInfo) -> dict[str, Any]:
    """Return the JSON entries of a piece that the manifest does not have."""
    if isinstance(info, FrameInfo):
        return {"streams": info.to_dict()["streams"]}
    return {"streams": []} | ({"dense": info.info.to_dict()} if isinstance(info, DenseChunkInfo) else {})


def _inspect_chunk(frames: FrameSet, array: ArrayEntry, chunk_index: int, options: DecodeOptions) -> ChunkInfo:
    frame_entry = array.frames[chunk_index]
    if frame_entry.is_raw:
        return _inspect_raw_chunk(frames, array, chunk_index)
    return (
        _inspect_dense_stream(frames, array, chunk_index)
        if frame_entry.is_dense
        else _inspect_frame(frames, array, chunk_index, options)
    )


def _inspect_dense_stream(frames: FrameSet, array: ArrayEntry, chunk_index: int) -> DenseChunkInfo:
    data, where = _read_verified(frames, array, chunk_index)
    entry = array.frames[chunk_index]
    try:
        info = inspect_stream(data, array, entry)
        streams = compute_entropies(decode_stream(data, array, entry), array.dtype)
    except FrameError as exc:
        raise FrameError(f"{where} {exc}") from None
    return DenseChunkInfo(info=info, entropy=sum(streams) / len(streams))


def _inspect_raw_chunk(frames: FrameSet, array: ArrayEntry, chunk_index: int) -> RawChunkInfo:
    data, _ = _read_verified(frames, array, chunk_index)
    streams = compute_entropies(data, array.dtype)
    return RawChunkInfo(dtype=array.dtype, raw_bytes=data.size, entropy=sum(streams) / len(streams))


def _read_verified(frames: FrameSet, array: ArrayEntry, chunk_index: int) -> tuple[Chunk, str]:
    """Return the stored bytes of a piece, checked against the manifest, and a prefix for messages about it."""
    entry = array.frames[chunk_index]
    data = frames.read_frame(entry)
    where = f"{frames.path}: array {array.name!r}: frame {chunk_index}:"
    if entry.sha256 not in (None, hashlib.sha256(data.data).hexdigest()):
        raise ManifestError(f"{where} does not match the manifest's sha256")
    return data, where


def _inspect_frame(frames: FrameSet, array: ArrayEntry, chunk_index: int, options: DecodeOptions) -> FrameInfo:
    entry = array.frames[chunk_index]
    data, where = _read_verified(frames, array, chunk_index)
    try:
        info = inspect_frame(data, dtype=array.dtype, codecs=options.codecs)
    except FrameError as exc:
        raise FrameError(f"{where} {exc}") from None
    if info.raw_bytes != entry.raw_bytes:
        raise ManifestError(f"{where} holds {info.raw_bytes} bytes, the manifest says {entry.raw_bytes}")
    if frames.document is not None:
        _check_streams(frames.document, info, where)
    return info


def _check_streams(document: Manifest, info: FrameInfo, where: str) -> None:
    """Raise `ManifestError` for a stream that does not match the encoder options in the manifest."""
    for stream in info.streams:
        is_hi_lane = stream.name == "hi" and document.hi_predictors is not None
        predictors = (document.hi_predictors if is_hi_lane else document.predictors) or ("raw",)
        for property_name, used_value, allowed in (
            ("predictor", stream.predictor, predictors),
            ("codec", stream.codec, document.codecs),
        ):
            if used_value not in allowed:
                raise ManifestError(
                    f"{where} stream {stream.name} has {property_name} {used_value}, the manifest says "
                    f"{', '.join(allowed)}"
                )
