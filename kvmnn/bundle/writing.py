"""Encode: a source into a frame file, a bundle or a stream."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.completeness import Completeness, completeness_document, report_missing
from ..arrays.engine_notes import note_completeness, noted
from ..arrays.source import FILE_KEY, Source
from ..errors import OptionError
from ..files.names import file_names, is_directory, renamed
from ..files.output import DirectoryOutput, FileOutput, Stream, is_device
from ..packed.cache_info import CacheInfo
from ..packed.summary import cache_document, cache_summary
from ..text import LOSSLESS, LOSSY, at_rate, count, ratio
from ..threads.pipeline import Progress
from . import manifest
from .dense_pieces import DensePlan, plan_arrays
from .encoding import NO_PLANS, EncodeOptions, encode_to_directory, encode_to_file, encode_to_memory
from .kept_file import (
    KeptFile,
    describe_kept_room,
    kept_file,
    notes_of,
    valid_bytes,
    valid_bytes_by_array,
    whole_bytes,
)
from .manifest import Manifest, Sizes, array_to_dict, frames_of, room_notes, text_of_ratio


@dataclass(frozen=True, kw_only=True)
class Encoded(Sizes):
    """Frames that were written.

    Parameters
    ----------
    output
        File or directory; None for a stream.
    manifest
        What was written; no file of frames has a name in it where there is no output.
    verified
        Whether every frame was decoded and compared with its input.
    seconds
        Time that it took.
    cache
        The packed cache that the arrays were read from, if it was one.
    dequantised
        Types whose codes the words were made from, before they were encoded.
    completeness
        The state of the model that the arrays contain, where that is known.
    inferred
        What was inferred of packed files, as sentences.
    """

    output: str | None
    manifest: Manifest
    verified: bool
    seconds: float
    cache: CacheInfo | None = None
    dequantised: tuple[str, ...] = ()
    completeness: Completeness | None = None
    inferred: tuple[str, ...] = ()

    @property
    def kept(self) -> KeptFile | None:
        """The file that is kept whole, if one is."""
        return kept_file(self.manifest.metadata, self.output or "frames")

    @property
    def valid_bytes(self) -> int:
        """Bytes of all arrays without room behind the valid tokens."""
        return valid_bytes(self.manifest)

    @property
    def whole_bytes(self) -> int:
        """Bytes of frames and manifest together."""
        return whole_bytes(self.manifest)

    @property
    def byte_exact(self) -> bool | None:
        """Whether all frames are MNN's own bytes; None where there is no frame, but dense streams and raw words."""
        made = self.manifest
        has_frames = any(frame.stored == "frame" for array in made.arrays for frame in array.frames)
        return made.zstd_byte_exact and made.effort == "exact" if has_frames else None

    @property
    def label(self) -> str | None:
        """``LOSSLESS`` if that was proved, ``LOSSY`` where something of packed files was left out, else None."""
        record = self.manifest.packed_record
        if record is not None and record.left_out:
            return LOSSY
        return LOSSLESS if self.verified else None

    @property
    def proof(self) -> str:
        """What was compared, for people."""
        record = self.manifest.packed_record
        if record is not None and record.left_out:
            return "live elements, decoded and compared; the files are not covered"
        if not self.verified:
            return "not verified"
        if record is not None:
            return f"decoded and compared; {count(len(record.files), 'packed file')} rebuilt in memory, every byte"
        return "decoded and compared" if self.cache is None else "live elements, decoded and compared"

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the ratio, in lines."""
        notes = self._dequantised + notes_of(self.manifest, self.output or "frames") + room_notes(self.manifest)
        return [*self.inferred, *notes]

    @property
    def _dequantised(self) -> list[str]:
        return [f"words dequantised from {', '.join(self.dequantised)}"] if self.dequantised else []

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        made, kept, valid = self.manifest, self.kept, valid_bytes_by_array(self.manifest)
        return {
            "output": self.output,
            "label": self.label,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "valid_bytes": self.valid_bytes,
            "ratio": self.ratio,
            "notes": self.notes,
            "seconds": self.seconds,
            "effort": made.effort,
            "rope": made.rope,
            "kvmnn_version": made.kvmnn_version,
            "zstd_version": made.zstd_version,
            "byte_exact": self.byte_exact,
            "cache": cache_document(self.cache),
            **self._packed_files(),
            **({"file": self._file(kept)} if kept else {}),
            **completeness_document(self.completeness),
            "arrays": [
                {**array_to_dict(array), "ratio": ratio(valid[array.name], array.stored_bytes)} for array in made.arrays
            ],
        }

    def __str__(self) -> str:
        return self.text()

    def _packed_files(self) -> dict[str, Any]:
        """What was compared of packed files, for JSON."""
        record, room = self.manifest.packed_record, self.manifest.room
        if record is None:
            return {}
        document = {
            "files": len(record.files),
            "bytes": record.nbytes,
            "rebuilt": not record.left_out,
            "left_out": record.left_out,
            "room_bytes": sum(array.nbytes for array in room),
            "room_stored_bytes": sum(array.stored_bytes for array in room),
        }
        return {"packed_files": document}

    def _file(self, kept: KeptFile) -> dict[str, Any]:
        return {
            "name": kept.name,
            "format": kept.format,
            "bytes": kept.nbytes,
            "stored_bytes": self.whole_bytes,
            "room_bytes": kept.room_bytes,
        }

    def _renamed(self) -> str:
        arrays = self.manifest.arrays
        return renamed((array.name, array.frames[0].file) for array in arrays if len(arrays) > 1)

    def _what(self) -> str:
        stored = {frame.stored for array in self.manifest.arrays for frame in array.frames}
        return (
            "the dense streams" if stored == {"dense"} else "the frames" if "dense" not in stored else "what is stored"
        )

    def text(self, *, verbose: bool = False) -> str:
        """One line; with `verbose` also one for each array."""
        arrays, valid = self.manifest.contents, valid_bytes_by_array(self.manifest)
        lines = []
        if verbose and self.output is not None:
            lines += [
                f"{array.name}: {array.type_name} {list(array.shape)}, "
                f"{array.nbytes:,} -> {array.stored_bytes:,} bytes, "
                f"{text_of_ratio(array.nbytes, valid[array.name], array.stored_bytes)}, {frames_of([array])}"
                for array in self.manifest.arrays
            ]
        others = self._renamed()
        name = self.output or arrays[0].name
        if len(arrays) > 1:
            name += f" ({count(len(arrays), 'array')})"
        missing = report_missing(self.completeness)
        scope = f" for {'this array' if len(arrays) == 1 else 'these arrays'}" if missing else ""
        proof = f"{self.label}{scope} ({self.proof})" if self.label else self.proof
        lines.append(
            f"{name}: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, {self.ratio_text}, "
            f"{frames_of(arrays)}, {proof}"
            f"{at_rate(self.raw_bytes, self.seconds)}"
        )
        if others:
            lines.append(f"  {others}")
        lines += [f"  {line}" for line in (*missing, *self._dequantised, *room_notes(self.manifest))]
        if self.kept:
            whole = self.whole_bytes
            lines += [f"  {line}" for line in describe_kept_room(self.kept, self.manifest)]
            lines.append(
                f"  {self.kept.name} has {self.kept.nbytes:,} bytes, frames and manifest have {whole:,}"
                f"{', which is more' if whole > self.kept.nbytes else ''}; decode writes the same file again"
            )
        if self.cache:
            packed = self.cache.file_bytes
            times = ratio(packed, self.manifest.stored_bytes)
            how = " (partly inferred)" if any("inferred" in note for note in self.inferred) else ""
            lines.append(f"  read as {cache_summary(self.cache)}{how}")
            lines.append(f"  the packed files have {packed:,} bytes, {times:.2f} times as many as {self._what()}")
        return "\n".join(lines)


def encode(
    source: Source,
    output: str | os.PathLike[str] | Stream,
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Encoded:
    """Encode all arrays of a source into frames or dense streams, and write the manifest that restores and proves them.

    Parameters
    ----------
    source
        What to encode: `kvmnn.open`.
    output
        For one array a file, which gets the frames, back to back, and its manifest beside it (``<output>.json``); a
        directory (several arrays, a name that ends in a slash, or a directory that exists), which gets one frame file
        for each array and ``manifest.json``; or a binary stream, which gets the one frame of one array and no manifest.
    options
        Predictors, codecs, effort, where arrays are cut (above 16 MiB; for a stream above 64 MiB, which it refuses),
        threads, verification.
    force
        Replace files that exist; the inputs of `source` are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        When a stream would have to carry more than one frame, or words stored raw; when K or V of `options.block` has
        no partner; when no array can be a dense stream, and `options.dense` asks for such.
    KvmnnError
        When an input is damaged, the output exists or cannot be written, or a frame does not decode to its input.
        Nothing is left behind then.
    """
    options = options or EncodeOptions()
    started = time.perf_counter()
    # A file that is kept whole says itself what engine it is of, but not which layers its caches have.
    metadata = note_completeness(source) if FILE_KEY in source.metadata else noted(source)
    source = replace(source, metadata=metadata)
    plans = plan_arrays(source, options.dense) if options.dense else NO_PLANS
    if isinstance(output, str | os.PathLike):
        path = os.fspath(output)
        made = _to_path(source, path, options, plans, force, progress)
    else:
        path = None
        made = _to_stream(source, output, options, plans, progress)
    seconds = time.perf_counter() - started
    return Encoded(
        output=path,
        manifest=made,
        verified=options.verify,
        seconds=seconds,
        cache=source.cache,
        dequantised=source.dequantised,
        completeness=source.completeness,
        inferred=tuple(source.notes) if source.cache else (),
    )


def check_output(source: Source, path: str, *, force: bool = False) -> None:
    """Raise what `encode` would raise about a file or directory that it cannot write, before anything is worked out.

    Raises
    ------
    OutputError
        As for `encode`.
    """
    if is_device(path):
        return
    if len(source) > 1 or is_directory(path):
        with DirectoryOutput(path, force=force, protect=source.files, index=manifest.FILE_NAME) as directory:
            directory.check_names([*file_names(source.names, manifest.FRAME_SUFFIX), manifest.FILE_NAME])
        return
    with FileOutput(path, force=force, protect=source.files) as file:
        file.check_beside(manifest.SIDE_SUFFIX)


def _to_path(
    source: Source,
    path: str,
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    force: bool,
    progress: Progress | None,
) -> Manifest:
    if FILE_KEY in source.metadata and not options.block:  # no engine reads these frames: what counts are bytes
        options = replace(options, allow_raw=True)
    if len(source) > 1 or is_directory(path):
        with DirectoryOutput(path, force=force, protect=source.files, index=manifest.FILE_NAME) as directory:
            made = encode_to_directory(
                source.arrays, directory, options, metadata=source.metadata, plans=plans, progress=progress
            )
            directory.commit()
        return made
    with FileOutput(path, force=force, protect=source.files) as file:
        made = encode_to_file(source.arrays, file, options, metadata=source.metadata, plans=plans, progress=progress)
        file.commit()
    return made


def _to_stream(
    source: Source,
    stream: Stream,
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    progress: Progress | None,
) -> Manifest:
    if len(source) > 1:
        raise OptionError(f"a stream carries one frame, not {len(source)}: write to a directory (-o DIR/)")
    (array,) = source.arrays
    plan = plans.get(array.name)
    if plan and array.nbytes > plan.nbytes:
        raise OptionError(f"a stream carries one layer, array {array.name!r} holds several: use -o FILE")
    options = options.for_stream()
    if not plan and array.piece_count(options.cut_above) > 1:
        raise OptionError(
            f"a stream carries one frame, but {array.nbytes} bytes are above --frame-bytes: "
            "use --frame-bytes 0 or -o FILE"
        )
    frame, made = encode_to_memory(array, options, progress, plans)
    stream.write(frame)
    stream.flush()
    return made
