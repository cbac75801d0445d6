"""Anything that kvmnn reads, as a source of arrays: files, directories, packed caches, and frames, decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import PurePath

from . import cache_info, manifest
from .bundle import FRAME_SUFFIX
from .cache_info import CacheInfo
from .manifest import ArrayEntry
from .restore import DecodeOptions, FrameSet, decode_frames, open_frames
from .sources import SUFFIXES, NamedArray, Piece, ReadOptions, Source, chosen, open_source
from .sources.base import rechunked


def is_frames(path: str) -> bool:
    """Whether a path is a bundle, a manifest, or a frame, by what it is called and what lies beside it."""
    if os.path.isdir(path):
        return os.path.exists(os.path.join(path, manifest.FILE_NAME))
    suffix = PurePath(path).suffix.lower()
    if suffix in SUFFIXES:
        return False
    return suffix in (FRAME_SUFFIX, ".json") or os.path.exists(path + manifest.SIDE_SUFFIX)


def open_any(path: str, options: ReadOptions | None = None, threads: int | None = None) -> Source:
    """Open a source, or frames as if they were one; `Source.cache` is set wherever the input tells.

    Raises
    ------
    KvmnnError
        As `open_source` and `open_frames`.
    """
    options = options or ReadOptions()
    if is_frames(path):
        frames = open_frames(path, options=DecodeOptions(dtype=options.dtype))
        source = chosen(of_frames(frames, DecodeOptions(threads=threads)), path, options)
    else:
        source = open_source(path, options)
    if source.cache is None:
        source.cache = described_by(source.metadata, path)
    return source


def of_frames(frames: FrameSet, options: DecodeOptions) -> Source:
    """Frames as a source: each array is decoded when its pieces are asked for, and its hashes are checked."""
    arrays = [_array(frames, entry, options) for entry in frames.arrays]
    return Source(arrays, dict(frames.document.metadata) if frames.document else {})


def described_by(metadata: dict[str, str], where: str) -> CacheInfo | None:
    """The description of a packed cache that travels in metadata; None if there is none."""
    text = metadata.get(cache_info.METADATA_KEY)
    return None if text is None else cache_info.from_json(text, f"{where}: metadata {cache_info.METADATA_KEY!r}")


def _array(frames: FrameSet, entry: ArrayEntry, options: DecodeOptions) -> NamedArray:
    """An array whose pieces are decoded as they are asked for; its words are little-endian whatever they were."""
    return NamedArray(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        array_dtype=entry.array_dtype.replace(">", "<"),
        order=entry.order,
        reader=partial(_decoded, frames.only(entry), options),
    )


def _decoded(frames: FrameSet, options: DecodeOptions, step: int) -> Iterator[Piece]:
    runs = (data for _, data in decode_frames(frames, options, check_frames=True))
    yield from rechunked(runs, step, frames.raw_bytes)
    for _ in runs:
        pass  # the hash of the array is compared behind its last byte
