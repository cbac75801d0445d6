"""Frames made from frames: MNN's from dense streams and back, the arrays and what the manifest says of them kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..arrays.engine_notes import apply_completeness
from ..arrays.named_array import NamedArray, Piece, swap_words
from ..arrays.source import Source, described_by
from ..bundle import DecodeOptions, Encoded, EncodeOptions, FrameSet, encode
from ..bundle.manifest import Manifest
from ..errors import KvmnnError, ManifestError
from ..files.mapped import STDIN
from ..files.output import Stream
from ..threads.pipeline import Progress
from .frames import of_frames


@dataclass(frozen=True, kw_only=True)
class Transcoded:
    """Frames that were made from others.

    Parameters
    ----------
    input
        The others.
    input_bytes
        Bytes of all of them.
    made
        What was written.
    """

    input: str
    input_bytes: int
    made: Encoded

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"input": self.input, "input_stored_bytes": self.input_bytes, **self.made.to_dict()}

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """What was written, and what it was made from; with `verbose` also a line for each array."""
        name = "standard input" if self.input == STDIN else self.input
        return f"{self.made.text(verbose=verbose)}\n  {name} has {self.input_bytes:,} bytes for the same arrays"


def transcode(
    frames: FrameSet,
    output: str | os.PathLike[str] | Stream,
    options: EncodeOptions | None = None,
    *,
    decoding: DecodeOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Transcoded:
    """Encode the arrays of frames again: as dense streams with `options.dense`, as MNN's frames without.

    Arrays keep name, shape, type and order, and the manifest its metadata, so that what was made of them is made of the
    result as well. Effort `exact` and cuts where they were before give the very frames that there were before.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`.
    output
        As for `kvmnn.bundle.encode`.
    options
        As for `kvmnn.bundle.encode`; None takes effort, predictors and codecs from the manifest (`options_of`).
    decoding
        Limits and threads.
    force
        Replace files that exist; the frames are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    KvmnnError
        When a frame does not decode, a hash differs from the manifest's, and as `kvmnn.bundle.encode`. Nothing is left
        behind then.
    """
    decoding = decoding or DecodeOptions()
    frames.check_size(decoding)
    source = source_of(frames, decoding)
    made = encode(source, output, options or options_of(frames), force=force, progress=progress)
    return Transcoded(input=frames.path, input_bytes=frames.stored_bytes, made=made)


def options_of(frames: FrameSet) -> EncodeOptions:
    """What the manifest says that frames were encoded with; the defaults where there is none.

    Predictors of their own for K and V are not in a manifest: both have all of them then.

    Raises
    ------
    ManifestError
        For an effort, a codec or a predictor that there is not.
    """
    said: Manifest | None = frames.document  # of dense streams alone it says no effort
    if said is None or said.effort is None:
        return EncodeOptions()
    try:
        return EncodeOptions(
            effort=said.effort,
            predictors=said.predictors or None,
            hi_predictors=said.hi_predictors,
            codecs=said.codecs,
        )
    except KvmnnError as error:
        raise ManifestError(f"{frames.path}: the manifest's options: {error}") from None


def source_of(frames: FrameSet, options: DecodeOptions | None = None) -> Source:
    """The arrays of frames as they were before they were encoded: those of big-endian words are such again."""
    source = of_frames(frames, options or DecodeOptions())
    source.arrays = [
        _as_before(array, entry.array_dtype) for array, entry in zip(source.arrays, frames.arrays, strict=True)
    ]
    source.cache = described_by(source.metadata, frames.path)
    apply_completeness(source, frames.path)
    return source


def _as_before(array: NamedArray, array_dtype: str) -> NamedArray:
    if array.array_dtype == array_dtype:
        return array
    return replace(array, array_dtype=array_dtype, reader=partial(_swapped, array))


def _swapped(array: NamedArray, step: int) -> Iterator[Piece]:
    for piece in array.reader(step):
        yield swap_words(piece, array.itemsize)
