"""Open anything that kvmnn reads: files, folders, packed caches, frames and streams, by content, then by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from .._util.parallel import Progress
from .._util.text import pluralize
from ..arrays import engine_metadata, engine_transforms
from ..arrays.axes import AXES_AS_STORED, AxisSpec, apply_axis_spec, declared_axes, list_padding
from ..arrays.float8 import decode_array
from ..arrays.layers import ModelHalf
from ..arrays.naming import array_name_from_path, check_name
from ..arrays.source import (
    CAST_TEXT,
    FILE_KEY,
    LOSSY_KEY,
    PACKED_FILES_KEY,
    Source,
    join_losses,
    list_losses,
    parse_cache_info,
    parse_completeness,
)
from ..bundle import manifest
from ..bundle.frame_set import DecodeOptions, FrameSet, open_frames
from ..bundle.passthrough import parse_passthrough
from ..dtypes import FLOAT8_NAMES
from ..errors import KvmnnError, LimitError, ManifestError, OptionError, SourceError
from ..files.atomic import BinaryStream
from ..files.mapped_file import FileHead, MappedFile
from . import llama, mlx, npy, raw, vllm, zarr
from .base import FileFormat, Format, PathFormat, has_format
from .detection_errors import explain_unknown_file, explain_unknown_folder
from .frames import make_frame_source
from .hf import in_memory, saved
from .layer_streams.reader import LAYER_STREAMS, restore_layers
from .mnn import dump, restore_dump
from .mnn.packed_reader import PACKED, is_named_as_packed
from .mnn.prefix_restorer import RestorePrefixResult, can_restore_prefix, restore_prefix
from .options import EngineOptions, PackedOptions, ReadOptions
from .passthrough import apply_recorded_options, can_restore_file, reopen_original, restore_file
from .raw import parse_page_name
from .restorer import RestoreResult, restore_arrays
from .tensor_selection import drop_whole_file_metadata, select_from_source
from .writer import ARRAY_FORMATS, find_array_format

ENGINE_FORMATS = (llama.LLAMA_STATE, mlx.MLX_PROMPT_CACHE, saved.TORCH_CACHE)
"""Formats of other engines' files, which are detected by content."""


def find_engine_format(head: FileHead) -> FileFormat | None:
    """Return the format of another engine's file, or of a stream with one; None for all others."""
    return next((engine_format for engine_format in ENGINE_FORMATS if engine_format.detect(head)), None)


def detect_engine_name(path: str) -> str | None:
    """Return the name of a file's format, or of the file that frames were made from."""
    engine_format = find_engine_format(FileHead.from_path(path))
    if engine_format is not None:
        return engine_format.name
    try:
        manifests = (os.path.join(path, manifest.MANIFEST_NAME), path + manifest.SIDECAR_SUFFIX)
        document = open_frames(path).document if any(map(os.path.isfile, manifests)) else None
        passthrough = document and parse_passthrough(document.metadata, path)
        return passthrough.format if passthrough else None
    except (KvmnnError, OSError):
        return None  # the reader reports the error


def recover_original_options(frames: FrameSet, options: ReadOptions) -> ReadOptions:
    """Return the options that were used to read a file for its frames, from their manifest."""
    metadata = dict(frames.document.metadata) if frames.document else {}
    passthrough = parse_passthrough(metadata, frames.path)
    if passthrough is None or passthrough.layer_numbers is None:
        return options
    options = apply_recorded_options(options, passthrough, frames.completeness)
    split_heads = not any(array.name.startswith("window.") for array in frames.arrays)
    return replace(options, engine=replace(options.engine, split_heads=split_heads))


def read_original_arrays(frames: Source, path: str, options: ReadOptions) -> Source:
    """Return K and V of the whole file that frames store; for other frames, the arrays that they decode to."""
    file = None if options.engine.passthrough else reopen_original(frames, path)
    if file is None:
        return frames
    engine_format = next((entry for entry in ENGINE_FORMATS if entry.name == file.passthrough.format), None)
    if engine_format is None:
        raise ManifestError(f"{path}: metadata {FILE_KEY!r}: the format {file.passthrough.format!r:.80} is not known")
    if engine_format.read_original is None:
        raise ManifestError(f"{file.label}: metadata {FILE_KEY!r}: a file of torch's is never kept whole")
    completeness = parse_completeness(frames.metadata, frames, path)
    original = engine_format.read_original(file, apply_recorded_options(options, file.passthrough, completeness))
    original.opened_files = frames.opened_files
    return original


_Options = TypeVar("_Options", ReadOptions, EngineOptions)
_MAX_SCANNED_NAMES = 1000
_FRAME_SUFFIXES = (manifest.FRAME_SUFFIX, ".json")


def open(
    path: str | os.PathLike[str] | MappedFile | object,
    options: ReadOptions | None = None,
    *,
    dtype: str | None = None,
    tensors: tuple[str, ...] = (),
    skip_unsupported: bool | None = None,
    packed: PackedOptions | None = None,
    decode_frames: bool | None = None,
    threads: int | None = None,
    axes: str | None = None,
    shape: tuple[int, ...] | None = None,
    batch: int | None = None,
    half: ModelHalf | None = None,
    codes: bool | None = None,
    kv_heads: int | None = None,
    model: str | os.PathLike[str] | None = None,
    invert: Sequence[str] | None = None,
    stream: int | None = None,
    sequence: int | None = None,
    window_cache: bool | None = None,
) -> Source:
    """Open anything that kvmnn reads: its arrays by name, read or decoded on demand.

    Parameters
    ----------
    path
        A ``.npy``, ``.npz`` or ``.safetensors`` file; a frame or dense stream, under any name where no `dtype` is given
        for raw words; a manifest or a directory of frames with its manifest; a
        state file of llama.cpp, a prompt cache of mlx-lm, a file of ``torch.save`` with a cache of transformers; the
        directory of an MNN KV dump, of a prefix cache or of live cache files, or one of their ``.k`` and ``.v`` files;
        a Zarr store, which may be at a URL that fsspec opens; a directory of ``.npy`` files; any other file of raw
        words, which need a `dtype`; or ``"-"``: raw words, or any of these files but packed caches and frames, on
        standard input, and the same from a pipe whose name has no suffix that says what it is. One that was opened
        already (`MappedFile`) is read on.

        Or a cache in memory: a ``DynamicCache`` or ``StaticCache`` of transformers, a list or tuple of (K, V) by
        layer, a dict of arrays by name, a ``Generator`` of ONNX Runtime GenAI. Its arrays are read when they are asked
        for: what a model overwrites meanwhile is read as it is then.
    options
        All following options and more in one object; a keyword replaces its field of the same name.
    dtype, tensors, skip_unsupported, packed, decode_frames, threads, codes
        As in `ReadOptions`, with the same defaults.
    axes, shape, batch, half
        As in `kvmnn.arrays.AxisSpec`, for plain arrays: a letter for each axis (l layer, b batch, h kv_head, t token, d
        dimension, 2 K and V), a shape to reshape them to first, the text of a batch, and the half of an encoder-decoder
        cache (``"decoder"``, ``"encoder"``).
    kv_heads, model
        For a llama.cpp file: number of kv heads in a row, or the ``.gguf`` file that has it; as
        ``PackedOptions.geometry.kv_heads`` and `PackedOptions.model`. Other K and V must have `kv_heads` heads.
    invert
        llama.cpp's transforms of K and V to invert: ``"k-order"``, ``"k-rotation"``, ``"v-rotation"``
        (`kvmnn.arrays.invert_source_transforms`), or ``["none"]``. By default elements are as stored in the file.
    stream, sequence, window_cache
        For a llama.cpp file, as in `EngineOptions`: the stream, the sequence, and the cache of the sliding-window
        layers.

    Returns
    -------
    Source
        Its `cache` is set if the input describes the packed cache that it contains or was made from.

    Raises
    ------
    KvmnnError
        When the input is missing, damaged, lacks an array in `tensors`, or contains what frames cannot store:
        `SourceError`, or for frames `FrameError` and `ManifestError`; `OptionError` where `kv_heads` is not so.

    Examples
    --------
    >>> source = kvmnn.open("cache.safetensors")
    >>> for name in source:
    ...     print(name, source[name].dtype, source[name].shape)
    >>> keys = source["layer_0.key"].to_numpy()
    >>> session = kvmnn.open("chat.session", model="llama.gguf", invert=["k-order"])
    """
    options = _override(
        options or ReadOptions(),
        dtype=dtype,
        tensors=tuple(tensors) or None,
        skip_unsupported=skip_unsupported,
        packed=packed,
        decode_frames=decode_frames,
        threads=threads,
        codes=codes,
    )
    if any(override is not None for override in (axes, shape, batch, half)):
        options = replace(options, axis_spec=AxisSpec(axes, shape, batch, half=half))
    options = _apply_model_options(options, kv_heads, model)
    invert = invert and tuple(invert)
    engine = _override(options.engine, invert=invert, stream=stream, sequence=sequence, window_cache=window_cache)
    options = replace(options, engine=engine)
    if not isinstance(path, str | bytes | os.PathLike | MappedFile):
        source = _add_code_note(in_memory.read_in_memory(path, options))
        engine_metadata.restore_completeness(source, " ".join(source.inputs))
        return _invert_requested(_validate_kv_heads(source, kv_heads), options)
    head = FileHead.from_stream(path) if isinstance(path, MappedFile) else FileHead.from_path(os.fsdecode(path))
    source = _read(head, options)
    path = source.inputs[0] if head.kind == "url" else head.path
    if options.tensors:
        drop_whole_file_metadata(source, path)
    if options.decode_frames and source.cache is None:
        source.cache = parse_cache_info(source.metadata, path)
    engine_metadata.restore_metadata(source, path, is_subset=bool(options.tensors))
    if options.axis_spec is not AXES_AS_STORED:
        source = apply_axis_spec(source, options.axis_spec, path)
    if options.max_bytes is not None and source.nbytes > options.max_bytes:
        raise LimitError(f"{path}: holds {source.nbytes} raw bytes, above the limit of {options.max_bytes}")
    _check_array_names(source, path)
    source = _add_code_note(source)
    _note_loss(source)
    if source.engine_cache is not None:
        source.notes += list_padding(source.engine_cache)
    _note_other_numbers(source, options)
    source.inputs = (path,)
    return _invert_requested(_validate_kv_heads(source, kv_heads), options)


def _override(options: _Options, **values: Any) -> _Options:
    """Return the options with the values that are specified (not None)."""
    return replace(options, **{name: value for name, value in values.items() if value is not None})


def _note_loss(source: Source) -> None:
    """Record in the metadata, with a note, what K and V have lost, by any record of the input or by their type."""
    loss = join_losses(source.metadata.get(LOSSY_KEY, ""), source.cache.loss if source.cache is not None else "")
    source.notes += list_losses(loss)  # readers note themselves what they dequantise
    if source.code_types:  # as of a cast, engines of these types compute with such K and V
        loss = join_losses(loss, f"{CAST_TEXT}quantised to {' and '.join(source.code_types)}")
    if loss:
        source.metadata[LOSSY_KEY] = loss


def _note_other_numbers(source: Source, options: ReadOptions) -> None:
    """Add a note if ``--dtype`` reinterprets words of a floating point type as another type, which changes values."""
    for array in source.arrays if options.dtype else ():
        if array.array_dtype in ("<f2", ">f2") and array.dtype == "bf16":
            source.notes.append(f"{array.name}: its float16 words are taken as {array.dtype}, other numbers (--dtype)")
            return


def _apply_model_options(
    options: ReadOptions, kv_heads: int | None, model: str | os.PathLike[str] | None
) -> ReadOptions:
    """Return the options with the specified number of kv heads and model."""
    packed = options.packed or PackedOptions()
    if kv_heads is not None:
        packed = replace(packed, geometry=replace(packed.geometry, kv_heads=kv_heads))
    if model is not None:
        packed = replace(packed, model=os.fsdecode(model))
    return options if kv_heads is None and model is None else replace(options, packed=packed)


def _add_code_note(source: Source) -> Source:
    """Add a note to a source whose numbers were converted from one-byte codes."""
    if source.elements:
        source.notes.append(
            f"{' and '.join(source.elements)} codes read as the fp32 numbers that they stand for, without scales: "
            "sizes and ratios are of these"
        )
    return source


def _validate_kv_heads(source: Source, kv_heads: int | None) -> Source:
    """Return the source; raise `OptionError` if the number of kv heads differs from `kv_heads` or is unknown."""
    # Of llama.cpp's rows they were specified already.
    has_row_heads = source.engine_cache is not None and source.engine_cache.engine == llama.ENGINE
    if kv_heads is None or has_row_heads or FILE_KEY in source.metadata:
        return source
    label, axes = " ".join(source.inputs), declared_axes(source)
    if axes is None:
        raise OptionError(f"{label}: nothing says which axis its heads are: leave kv_heads out")
    for array in source.arrays:
        num_heads = array.shape[axes.index("h")]
        if num_heads != kv_heads:
            raise OptionError(
                f"{label}: array {array.name!r} has {pluralize(num_heads, 'kv head')}, not {kv_heads} (kv_heads)"
            )
    return source


def _invert_requested(source: Source, options: ReadOptions) -> Source:
    """Invert the transforms of the source that the options name."""
    engine_options = options.engine
    if engine_options.invert is None:
        return source
    if engine_options.passthrough or engine_options.raw_blocks:
        raise OptionError(f"{' '.join(source.inputs)}: --invert is about numbers, not about a whole file or its blocks")
    return engine_transforms.invert_source_transforms(source, engine_options.invert)


def _check_array_names(source: Source, path: str) -> None:
    """Raise `SourceError` for an invalid array name; add a note for a name that was changed."""
    for name in source:
        check_name(name, path)
    if len(source) == 1 and source.names == (array_name_from_path(path),) and PurePath(path).stem != source.names[0]:
        source.notes.append(f"the array is called {source.names[0]}: no name of an array has all that the file's has")


def classify_path(path: str) -> Literal["frames", "arrays"] | None:
    """Classify a path by its name and by the files next to it or in it; None if its name is ambiguous.

    In a folder without a manifest no files are read; `detect` does that.
    """
    head = FileHead.from_path(path)
    if head.kind == "folder":
        return "frames" if FRAMES.detect(head) else "arrays"
    file_format = detect(head)
    if file_format is FRAMES:
        return "frames"
    return None if file_format is RAW or head.kind == "url" else "arrays"


def find_readable_entry(path: str) -> str | None:
    """Return the first name in a directory that `open` can read; None if the first thousand contain none."""
    try:
        names = sorted(os.listdir(path))[:_MAX_SCANNED_NAMES]
    except OSError:
        return None
    for name in names:
        entry_path = os.path.join(path, name)
        if os.path.isdir(entry_path):
            with suppress(KvmnnError):
                if detect(entry_path) is not UNKNOWN_FOLDER:
                    return name
        elif find_array_format(entry_path) or find_engine_format(FileHead.from_path(entry_path)):
            return name
    return None


def explain_not_frames(path: str, error: KvmnnError) -> KvmnnError:
    """Return the error for an input that is not a frame: `error`, or a better explanation of the content."""
    if os.path.isdir(path) and (orphans_text := zarr.find_orphaned_arrays(path)):
        return SourceError(orphans_text)
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, manifest.MANIFEST_NAME)):
        if is_named_as_packed(FileHead.from_path(path)):
            return SourceError(
                f"{path}: is a cache of MNN, no bundle: kvmnn encode makes a bundle of it, kvmnn verify BUNDLE "
                f"--against {path} compares the two"
            )
        if any(name.endswith(manifest.FRAME_SUFFIX) for name in os.listdir(path)):
            return ManifestError(
                f"{path}: holds frames, but no {manifest.MANIFEST_NAME} that says of what: kvmnn verify {path} --jobs "
                "1 shows which of them decode"
            )
    head = FileHead.from_path(path)
    if find_engine_format(head) is not None:
        return SourceError(f"{path}: is a cache of another engine, no frames: kvmnn encode makes frames of it")
    if isinstance(error, LimitError) or classify_path(path) is not None or not os.path.isfile(path):
        return error
    reason = str(error).removeprefix(f"{path}: ")
    return SourceError(f"{path}: {explain_unknown_file(path, head.data, f'; as a frame: {reason}')}")


def _read_frames(path: str, options: ReadOptions) -> Source:
    are_codes = options.dtype in FLOAT8_NAMES
    frames = open_frames(path, options=DecodeOptions(dtype=None if are_codes else options.dtype))
    for entry in frames.arrays if options.dtype is not None else ():
        dtype = entry.element or entry.dtype
        if dtype != options.dtype:
            raise OptionError(f"{path}: the manifest says {dtype}, not {options.dtype} (--dtype)")
    source = make_frame_source(frames.without_unused_arrays(), DecodeOptions(threads=options.threads))
    source.metadata.pop(PACKED_FILES_KEY, None)
    if not options.codes:
        source.arrays = [decode_array(array) if array.element else array for array in source.arrays]
    return read_original_arrays(source, path, options)


def contains_frames(path: str | MappedFile) -> bool:
    """Return whether a file contains frames, whatever its name and the files next to it."""
    try:
        open_frames(path, use_manifest=False)
    except KvmnnError:
        return False
    return True


def _is_named_as_frames(head: FileHead) -> bool:
    """Return whether a folder has a manifest, or a file is named as a frame or a manifest, or has one next to it."""
    if head.kind == "folder":
        return os.path.exists(os.path.join(head.path, manifest.MANIFEST_NAME))
    return head.suffix in _FRAME_SUFFIXES or os.path.exists(head.path + manifest.SIDECAR_SUFFIX)


def _refuse_unknown_folder(path: str, options: ReadOptions) -> Source:
    raise SourceError(f"{path}: {explain_unknown_folder(path)}")


FRAMES = PathFormat(
    name="frames", kinds=("folder", "file", "stream"), check=_is_named_as_frames, read_path=_read_frames
)
LMCACHE_CHUNK = FileFormat(
    name="lmcache",
    check=lambda head: head.file is None and parse_page_name(head.path) is not None,
    read_file=raw.read,
)
RAW = FileFormat(name="raw", read_file=raw.read)
UNKNOWN_FOLDER = PathFormat(name="folder", check=lambda head: True, read_path=_refuse_unknown_folder)
FORMATS: tuple[Format, ...] = (
    *ENGINE_FORMATS,
    *ARRAY_FORMATS.values(),
    PACKED,
    LMCACHE_CHUNK,
    LAYER_STREAMS,
    FRAMES,
    zarr.ZARR,
    dump.KV_DUMP,
    dump.PACKED_KV_DUMP,
    npy.NPY_FOLDER,
    vllm.VLLM,
    zarr.ORPHANED_ARRAYS,
    RAW,
    UNKNOWN_FOLDER,
)
"""All formats that `open` reads, in the order of detection: the first that detects an input reads it."""
_FORMATS_WITHOUT_FRAMES = tuple(entry for entry in FORMATS if entry is not FRAMES)


def detect(path: str | FileHead, formats: Sequence[Format] = FORMATS) -> Format:
    """Return the format of a path; `RAW` or `UNKNOWN_FOLDER` if neither name nor content identifies it.

    Raises
    ------
    SourceError
        For a directory that cannot be read.
    """
    head = path if isinstance(path, FileHead) else FileHead.from_path(path)
    return next(entry for entry in formats if entry.detect(head))


def _read(head: FileHead, options: ReadOptions) -> Source:
    """Return the arrays of an input of any format, restricted to those that `options` name."""
    formats = FORMATS if options.decode_frames else _FORMATS_WITHOUT_FRAMES
    file_format = detect(head, formats)
    if head.kind == "stream" and head.file is None and (file_format is RAW or head.suffix == ".safetensors"):
        head = FileHead.from_stream(MappedFile(head.path, max_bytes=options.max_bytes))
        file_format = detect(head, formats)
    if file_format in (RAW, LMCACHE_CHUNK) and head.kind == "file" and not (options.dtype or options.fallback_dtypes):
        if contains_frames(head.path):
            if file_format is LMCACHE_CHUNK or not options.decode_frames:
                raise SourceError(
                    f"{head.path}: is a frame already: kvmnn decode gives its array back, kvmnn inspect shows it, "
                    "--codec dense or mnn encodes it again; --dtype fp16, bf16 or fp32 would take its bytes as raw "
                    "words"
                )
            file_format = FRAMES
        elif reason := saved.describe_damage(head):
            raise SourceError(f"{head.path}: {reason}")
    return select_from_source(file_format.read(head, options), head.path, options)


RestoredForm = Literal["arrays", "file", "dump", "prefix"]


def find_restored_form(frames: FrameSet, output: str | None) -> RestoredForm:
    """Return the form to decode frames to at a path (None: a stream): their original form, or plain arrays."""
    if can_restore_file(frames, output):
        return "file"
    return "prefix" if output is not None and can_restore_prefix(frames, output) else "arrays"


def restore(
    frames: FrameSet | str | os.PathLike[str],
    output: str | os.PathLike[str] | BinaryStream,
    options: DecodeOptions | None = None,
    *,
    form: RestoredForm | None = None,
    expected: PackedOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult | RestorePrefixResult:
    """Decode frames, and write what they were made from, in one of its forms.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`; or the path of frames, of a bundle, of layer streams or of a Zarr store. The arrays
        of the last two are written; layer streams take no stream as output.
    output, options, force, progress
        See the functions of the forms.
    form
        Plain ``"arrays"`` (`restore_arrays`), the whole ``"file"`` of another engine (`restore_file`), a KV ``"dump"``
        (`restore_dump`), or the files of a ``"prefix"`` cache (`restore_prefix`). Default: what `find_restored_form`
        chooses, as ``kvmnn decode`` does: the form that was encoded, or arrays if the suffix of `output` is of arrays.
    expected
        Expected properties of a prefix cache.

    Raises
    ------
    OptionError
        When a stream would have to carry several files or arrays.
    KvmnnError
        The errors of the functions of the forms; nothing remains of the output then.
    """
    if isinstance(frames, str | os.PathLike):
        path, limits = os.fspath(frames), options or DecodeOptions()
        if has_format(path, LAYER_STREAMS) or has_format(path, zarr.ZARR):
            return _restore_source(path, output, limits, form, force=force, progress=progress)
        frames = open_frames(path, options=limits)
    form = form or find_restored_form(frames, os.fspath(output) if isinstance(output, str | os.PathLike) else None)
    if form in ("dump", "prefix"):
        if not isinstance(output, str | os.PathLike):
            raise OptionError(f"a stream carries one file, not a {form}: use -o DIR/")
        folder = os.fspath(output)
        if form == "dump":
            return restore_dump(frames, folder, options, force=force, progress=progress)
        return restore_prefix(frames, folder, options, expected=expected, force=force, progress=progress)
    restore_form = restore_file if form == "file" else restore_arrays
    return restore_form(frames, output, options, force=force, progress=progress)


def _restore_source(
    path: str,
    output: str | os.PathLike[str] | BinaryStream,
    limits: DecodeOptions,
    form: RestoredForm | None,
    *,
    force: bool,
    progress: Progress | None,
) -> RestoreResult:
    """Write the arrays of layer streams or of a Zarr store, which have no other form."""
    if form not in (None, "arrays"):
        raise OptionError(f"{path}: form is {form!r}: expected 'arrays', as these are no frames")
    options = ReadOptions(threads=limits.threads, max_bytes=limits.max_bytes, decode_frames=False)
    if has_format(path, zarr.ZARR):
        return zarr.restore_store(path, output, options, force=force, progress=progress)
    if not isinstance(output, str | os.PathLike):
        raise OptionError(f"{path}: layer streams are restored into a file or folder, not a stream")
    return restore_layers(path, os.fspath(output), options, force=force, progress=progress)
