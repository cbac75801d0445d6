"""Encode: a source into a frame file, a bundle or a stream."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.completeness import Completeness, build_completeness_document, format_missing
from ..arrays.engine_notes import add_completeness_metadata, dump_metadata
from ..arrays.source import FILE_KEY, Source
from ..errors import OptionError
from ..files.names import describe_renamed_files, is_directory_output, make_file_names
from ..files.output import BinaryStream, DirectoryOutput, FileOutput, is_device
from ..packed.cache_info import CacheInfo
from ..packed.summary import build_cache_document, format_cache_summary
from ..text import LOSSLESS, LOSSY, compute_ratio, format_rate, pluralize
from ..threads.pipeline import Progress
from . import manifest
from .dense_pieces import DensePlan, plan_arrays
from .encoding import NO_PLANS, EncodeOptions, encode_to_directory, encode_to_file, encode_to_memory
from .kept_file import (
    PassthroughFile,
    count_bundle_bytes,
    count_valid_bytes,
    count_valid_bytes_by_array,
    describe_passthrough,
    describe_unused_bytes,
    parse_passthrough,
)
from .manifest import Manifest, SizeStats, array_to_dict, describe_storage, describe_unused_arrays, format_ratio


@dataclass(frozen=True, kw_only=True)
class EncodeResult(SizeStats):
    """Frames that were written.

    Parameters
    ----------
    output
        File or directory; None for a stream.
    manifest
        What was written; no file of frames has a name in it where there is no output.
    is_verified
        Whether every frame was decoded and compared with its input.
    seconds
        Time that it took.
    cache
        The packed cache that the arrays were read from, if it was one.
    dequantised_types
        Types whose codes the words were made from, before they were encoded.
    completeness
        The state of the model that the arrays contain, where that is known.
    inference_notes
        What was inferred of packed files, as sentences.
    """

    output: str | None
    manifest: Manifest
    is_verified: bool
    seconds: float
    cache: CacheInfo | None = None
    dequantised_types: tuple[str, ...] = ()
    completeness: Completeness | None = None
    inference_notes: tuple[str, ...] = ()

    @property
    def passthrough(self) -> PassthroughFile | None:
        """The file that is kept whole, if one is."""
        return parse_passthrough(self.manifest.metadata, self.output or "frames")

    @property
    def valid_bytes(self) -> int:
        """Bytes of all arrays without room behind the valid tokens."""
        return count_valid_bytes(self.manifest)

    @property
    def bundle_bytes(self) -> int:
        """Bytes of frames and manifest together."""
        return count_bundle_bytes(self.manifest)

    @property
    def byte_exact(self) -> bool | None:
        """Whether all frames are MNN's own bytes; None where there is no frame, but dense streams and raw words."""
        bundle_manifest = self.manifest
        has_frames = any(frame.stored == "frame" for array in bundle_manifest.arrays for frame in array.frames)
        return bundle_manifest.zstd_byte_exact and bundle_manifest.effort == "exact" if has_frames else None

    @property
    def label(self) -> str | None:
        """``LOSSLESS`` if that was proved, ``LOSSY`` where something of packed files was left out, else None."""
        record = self.manifest.packed_record
        if record is not None and record.left_out:
            return LOSSY
        return LOSSLESS if self.is_verified else None

    @property
    def verification_text(self) -> str:
        """What was compared, for people."""
        record = self.manifest.packed_record
        if record is not None and record.left_out:
            return "live elements, decoded and compared; the files are not covered"
        if not self.is_verified:
            return "not verified"
        if record is not None:
            return f"decoded and compared; {pluralize(len(record.files), 'packed file')} rebuilt in memory, every byte"
        return "decoded and compared" if self.cache is None else "live elements, decoded and compared"

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the ratio, in lines."""
        notes = (
            self._dequantisation_notes
            + describe_passthrough(self.manifest, self.output or "frames")
            + describe_unused_arrays(self.manifest)
        )
        return [*self.inference_notes, *notes]

    @property
    def _dequantisation_notes(self) -> list[str]:
        return [f"words dequantised from {', '.join(self.dequantised_types)}"] if self.dequantised_types else []

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        bundle_manifest, passthrough, valid_bytes_by_name = (
            self.manifest,
            self.passthrough,
            count_valid_bytes_by_array(self.manifest),
        )
        return {
            "output": self.output,
            "label": self.label,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "valid_bytes": self.valid_bytes,
            "ratio": self.ratio,
            "notes": self.notes,
            "seconds": self.seconds,
            "effort": bundle_manifest.effort,
            "rope": bundle_manifest.rope,
            "kvmnn_version": bundle_manifest.kvmnn_version,
            "zstd_version": bundle_manifest.zstd_version,
            "byte_exact": self.byte_exact,
            "cache": build_cache_document(self.cache),
            **self._packed_files_document(),
            **({"file": self._file_document(passthrough)} if passthrough else {}),
            **build_completeness_document(self.completeness),
            "arrays": [
                {**array_to_dict(array), "ratio": compute_ratio(valid_bytes_by_name[array.name], array.stored_bytes)}
                for array in bundle_manifest.arrays
            ],
        }

    def __str__(self) -> str:
        return self.text()

    def _packed_files_document(self) -> dict[str, Any]:
        """What was compared of packed files, for JSON."""
        record, unused_arrays = self.manifest.packed_record, self.manifest.unused_arrays
        if record is None:
            return {}
        document = {
            "files": len(record.files),
            "bytes": record.nbytes,
            "rebuilt": not record.left_out,
            "left_out": record.left_out,
            "room_bytes": sum(array.nbytes for array in unused_arrays),
            "room_stored_bytes": sum(array.stored_bytes for array in unused_arrays),
        }
        return {"packed_files": document}

    def _file_document(self, passthrough: PassthroughFile) -> dict[str, Any]:
        return {
            "name": passthrough.name,
            "format": passthrough.format,
            "bytes": passthrough.nbytes,
            "stored_bytes": self.bundle_bytes,
            "room_bytes": passthrough.room_bytes,
        }

    def _describe_renames(self) -> str:
        arrays = self.manifest.arrays
        return describe_renamed_files((array.name, array.frames[0].file) for array in arrays if len(arrays) > 1)

    def _describe_contents(self) -> str:
        storage_kinds = {frame.stored for array in self.manifest.arrays for frame in array.frames}
        return (
            "the dense streams"
            if storage_kinds == {"dense"}
            else "the frames"
            if "dense" not in storage_kinds
            else "what is stored"
        )

    def text(self, *, verbose: bool = False) -> str:
        """One line; with `verbose` also one for each array."""
        arrays, valid_bytes_by_name = self.manifest.token_arrays, count_valid_bytes_by_array(self.manifest)
        lines = []
        if verbose and self.output is not None:
            lines += [
                f"{array.name}: {array.type_name} {list(array.shape)}, "
                f"{array.nbytes:,} -> {array.stored_bytes:,} bytes, "
                f"{format_ratio(array.nbytes, valid_bytes_by_name[array.name], array.stored_bytes)}, "
                f"{describe_storage([array])}"
                for array in self.manifest.arrays
            ]
        rename_text = self._describe_renames()
        name = self.output or arrays[0].name
        if len(arrays) > 1:
            name += f" ({pluralize(len(arrays), 'array')})"
        missing_texts = format_missing(self.completeness)
        scope = f" for {'this array' if len(arrays) == 1 else 'these arrays'}" if missing_texts else ""
        verification_text = f"{self.label}{scope} ({self.verification_text})" if self.label else self.verification_text
        lines.append(
            f"{name}: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, {self.ratio_text}, "
            f"{describe_storage(arrays)}, {verification_text}"
            f"{format_rate(self.raw_bytes, self.seconds)}"
        )
        if rename_text:
            lines.append(f"  {rename_text}")
        lines += [
            f"  {line}"
            for line in (*missing_texts, *self._dequantisation_notes, *describe_unused_arrays(self.manifest))
        ]
        if self.passthrough:
            bundle_bytes = self.bundle_bytes
            lines += [f"  {line}" for line in describe_unused_bytes(self.passthrough, self.manifest)]
            lines.append(
                f"  {self.passthrough.name} has {self.passthrough.nbytes:,} bytes, frames and manifest have "
                f"{bundle_bytes:,}"
                f"{', which is more' if bundle_bytes > self.passthrough.nbytes else ''}; decode writes the same file "
                f"again"
            )
        if self.cache:
            packed_bytes = self.cache.file_bytes
            size_ratio = compute_ratio(packed_bytes, self.manifest.stored_bytes)
            inferred_text = " (partly inferred)" if any("inferred" in note for note in self.inference_notes) else ""
            lines.append(f"  read as {format_cache_summary(self.cache)}{inferred_text}")
            lines.append(
                f"  the packed files have {packed_bytes:,} bytes, {size_ratio:.2f} times as many as "
                f"{self._describe_contents()}"
            )
        return "\n".join(lines)


def encode_source(
    source: Source,
    output: str | os.PathLike[str] | BinaryStream,
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EncodeResult:
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
    start_time = time.perf_counter()
    # A file that is kept whole says itself what engine it is of, but not which layers its caches have.
    metadata = add_completeness_metadata(source) if FILE_KEY in source.metadata else dump_metadata(source)
    source = replace(source, metadata=metadata)
    plans = plan_arrays(source, options.dense) if options.dense else NO_PLANS
    if isinstance(output, str | os.PathLike):
        path = os.fspath(output)
        bundle_manifest = _write_to_path(source, path, options, plans, force, progress)
    else:
        path = None
        bundle_manifest = _write_to_stream(source, output, options, plans, progress)
    seconds = time.perf_counter() - start_time
    return EncodeResult(
        output=path,
        manifest=bundle_manifest,
        is_verified=options.verify,
        seconds=seconds,
        cache=source.cache,
        dequantised_types=source.dequantised_types,
        completeness=source.completeness,
        inference_notes=tuple(source.notes) if source.cache else (),
    )


def check_encode_output(source: Source, path: str, *, force: bool = False) -> None:
    """Raise what `encode_source` would raise about a file or directory that it cannot write, before anything is worked
    out.

    Raises
    ------
    OutputError
        As for `encode_source`.
    """
    if is_device(path):
        return
    if len(source) > 1 or is_directory_output(path):
        with DirectoryOutput(path, force=force, exclude=source.files, index=manifest.MANIFEST_NAME) as directory:
            directory.check_names([*make_file_names(source.names, manifest.FRAME_SUFFIX), manifest.MANIFEST_NAME])
        return
    with FileOutput(path, force=force, exclude=source.files) as file:
        file.check_sidecar(manifest.SIDECAR_SUFFIX)


def _write_to_path(
    source: Source,
    path: str,
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    force: bool,
    progress: Progress | None,
) -> Manifest:
    if FILE_KEY in source.metadata and not options.block:  # no engine reads these frames: what counts are bytes
        options = replace(options, allow_raw=True)
    if len(source) > 1 or is_directory_output(path):
        with DirectoryOutput(path, force=force, exclude=source.files, index=manifest.MANIFEST_NAME) as directory:
            bundle_manifest = encode_to_directory(
                source.arrays, directory, options, metadata=source.metadata, plans=plans, progress=progress
            )
            directory.commit()
        return bundle_manifest
    with FileOutput(path, force=force, exclude=source.files) as file:
        bundle_manifest = encode_to_file(
            source.arrays, file, options, metadata=source.metadata, plans=plans, progress=progress
        )
        file.commit()
    return bundle_manifest


def _write_to_stream(
    source: Source,
    stream: BinaryStream,
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
    options = options.resolve_for_stream()
    if not plan and array.count_chunks(options.max_frame_bytes) > 1:
        raise OptionError(
            f"a stream carries one frame, but {array.nbytes} bytes are above --frame-bytes: "
            "use --frame-bytes 0 or -o FILE"
        )
    frame, bundle_manifest = encode_to_memory(array, options, progress, plans)
    stream.write(frame)
    stream.flush()
    return bundle_manifest
