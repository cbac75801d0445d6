"""Open anything that kvmnn reads: files, folders, packed caches, frames and streams, by content, then by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from .._util.text import pluralize
from ..arrays import engine_metadata, engine_transforms
from ..arrays.axes import AxisSpec, apply_axis_spec, declared_axes, list_padding
from ..arrays.float8 import decode_array
from ..arrays.layers import ModelHalf
from ..arrays.naming import array_name_from_path, check_name
from ..arrays.source import FILE_KEY, PACKED_FILES_KEY, Source, parse_cache_info, parse_completeness
from ..bundle import manifest
from ..bundle.frame_set import DecodeOptions, FrameSet, open_frames
from ..bundle.passthrough import parse_passthrough
from ..dtypes import FLOAT8_NAMES
from ..errors import KvmnnError, LimitError, ManifestError, MissingOptionError, OptionError, SourceError
from ..files.mapped_file import STDIN, MappedFile, is_stream, read_head
from ..files.urls import is_url
from . import llama, mlx, npy, npz, raw, safetensors, sidecars, vllm, zarr
from .array_formats import ARRAY_FORMATS, find_array_format
from .base import FileBytes
from .detection_errors import HEAD_BYTES, explain_unknown_file, explain_unknown_folder
from .frames import make_frame_source
from .hf import in_memory, saved
from .lmcache import parse_page_name
from .mnn import dump
from .mnn.packed_reader import find_packed, open_packed_files
from .options import PackedOptions, ReadOptions
from .passthrough import apply_recorded_options, reopen_original
from .tensor_selection import check_tensor_names, drop_whole_file_metadata, select_from_source


class EngineFormat(NamedTuple):
    """A kind of file."""

    #: In documents.
    name: str
    #: Whether the file at a path is one, by its first bytes.
    detect: Callable[[str], bool]
    #: The same of what was read from a stream.
    detect_stream: Callable[[MappedFile], bool]
    #: K and V of every layer.
    read: Callable[[FileBytes, ReadOptions], Source]
    #: All that the file holds (`EngineOptions.passthrough`); None where the same file is not written again.
    capture: Callable[[MappedFile, ReadOptions], Source] | None


def _is_saved_cache_stream(file: MappedFile) -> bool:
    return saved.is_torch_head(file.read_head(saved.DETECT_HEAD_BYTES))


def _read_saved_cache(file: FileBytes, options: ReadOptions) -> Source:
    if not isinstance(file, MappedFile):
        raise ManifestError(f"{file.label}: metadata {FILE_KEY!r}: a file of torch's is never kept whole")
    return saved.read(file, options)


ENGINE_FORMATS = (
    EngineFormat(llama.FORMAT_NAME, llama.is_state_file, llama.is_state_stream, llama.read, llama.capture),
    EngineFormat(mlx.FORMAT_NAME, mlx.is_prompt_cache_file, mlx.is_prompt_cache_stream, mlx.read, mlx.capture),
    EngineFormat("torch-cache", saved.contains_cache, _is_saved_cache_stream, _read_saved_cache, None),
)


def find_engine_format(path: str) -> EngineFormat | None:
    """What a file is; None for all others, for directories and for standard input."""
    if path == STDIN or not os.path.isfile(path):
        return None
    return next((engine_format for engine_format in ENGINE_FORMATS if engine_format.detect(path)), None)


def find_stream_format(stream: MappedFile) -> EngineFormat | None:
    """What was read from a stream; None for all others."""
    return next((engine_format for engine_format in ENGINE_FORMATS if engine_format.detect_stream(stream)), None)


def detect_engine_name(path: str) -> str | None:
    """The name of the kind of a file, or of the file that frames were made from."""
    engine_format = find_engine_format(path)
    if engine_format is not None:
        return engine_format.name
    try:
        document = open_frames(path).document if _has_manifest(path) else None
        passthrough = document and parse_passthrough(document.metadata, path)
        return passthrough.format if passthrough else None
    except (KvmnnError, OSError):
        return None  # and what is wrong with it is said when it is read


def _has_manifest(path: str) -> bool:
    """Whether there is a manifest at a path."""
    return any(os.path.isfile(path + suffix) for suffix in (f"/{manifest.MANIFEST_NAME}", manifest.SIDECAR_SUFFIX))


def read_engine_file(path: str, engine_format: EngineFormat, options: ReadOptions) -> Source:
    """The arrays of such a file."""
    return read_mapped_engine_file(engine_format, MappedFile(path, max_bytes=options.max_bytes), options)


def read_mapped_engine_file(engine_format: EngineFormat, file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
    return (
        engine_format.capture(file, options)
        if engine_format.capture and options.engine.passthrough
        else engine_format.read(file, options)
    )


def recover_original_options(frames: FrameSet, options: ReadOptions) -> ReadOptions:
    """Return the options that read a file as it was read for frames of it: their manifest has what was specified."""
    metadata = dict(frames.document.metadata) if frames.document else {}
    passthrough = parse_passthrough(metadata, frames.path)
    if passthrough is None or passthrough.layer_numbers is None:
        return options
    names = [array.name for array in frames.arrays]
    options = apply_recorded_options(options, passthrough, parse_completeness(metadata, names, frames.path))
    split_heads = not any(name.startswith("window.") for name in names)
    return replace(options, engine=replace(options.engine, split_heads=split_heads))


def read_original_arrays(frames: Source, path: str, options: ReadOptions) -> Source:
    """K and V of such a file again, where frames are of one that was kept whole; else what the frames decode to."""
    file = None if options.engine.passthrough else reopen_original(frames, path)
    if file is None:
        return frames
    engine_format = next(
        (engine_format for engine_format in ENGINE_FORMATS if engine_format.name == file.passthrough.format), None
    )
    if engine_format is None:
        raise ManifestError(f"{path}: metadata {FILE_KEY!r}: the format {file.passthrough.format!r:.80} is not known")
    completeness = parse_completeness(frames.metadata, frames, path)
    original = engine_format.read(file, apply_recorded_options(options, file.passthrough, completeness))
    original.opened_files = frames.opened_files
    return original


FolderKind = Literal["zarr", "packed", "packed dump", "dump", "npy", "vllm"]
_MAX_SCANNED_NAMES = 1000
_PACKED_SUFFIXES = (".k", ".v")
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
    """Open anything that kvmnn reads: its arrays, by name, read or decoded when they are asked for.

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
        All that follows in one object, and what only that has. A keyword that is given replaces the field of that name.
    dtype, tensors, skip_unsupported, packed, decode_frames, threads, codes
        As in `ReadOptions`, with the same defaults.
    axes, shape, batch, half
        As in `kvmnn.arrays.Laid`: of plain arrays a letter for each axis (l layer, b batch, h kv_head, t token, d
        dimension, 2 K and V), what they are taken as first, which text of a batch is wanted, and of an encoder-decoder
        cache which K and V (``"decoder"``, ``"encoder"``).
    kv_heads, model
        Of a llama.cpp file: how many heads a row of K is of, or the ``.gguf`` file that says it. The same as
        `PackedOptions.model` and ``PackedOptions.geometry.kv_heads``. Other K and V must have as many as `kv_heads`.
    invert
        What llama.cpp did to K and V that is to be undone: ``"k-order"``, ``"k-rotation"``, ``"v-rotation"``
        (`kvmnn.arrays.undo`), or ``["none"]``. By default words are as they lie in the file.
    stream, sequence, window_cache
        Of a llama.cpp file: which of several streams, the cells of which sequence, and of two caches that of the
        sliding-window layers, as in `EngineOptions`.

    Returns
    -------
    Source
        Its `cache` is set where the input says what packed cache it holds or was made from.

    Raises
    ------
    KvmnnError
        When the input is missing, damaged, lacks an array in `tensors`, or holds something no frame can hold:
        `SourceError`, or for frames `FrameError` and `ManifestError`; `OptionError` where `kv_heads` is not so.

    Examples
    --------
    >>> source = kvmnn.open("cache.safetensors")
    >>> for name in source:
    ...     print(name, source[name].dtype, source[name].shape)
    >>> keys = source["layer_0.key"].to_numpy()
    >>> session = kvmnn.open("chat.session", model="llama.gguf", invert=["k-order"])
    """
    read_overrides: dict[str, Any] = {
        "dtype": dtype,
        "tensors": tuple(tensors) or None,
        "skip_unsupported": skip_unsupported,
        "packed": packed,
        "decode_frames": decode_frames,
        "threads": threads,
        "codes": codes,
    }
    options = replace(
        options or ReadOptions(), **{name: value for name, value in read_overrides.items() if value is not None}
    )
    if any(override is not None for override in (axes, shape, batch, half)):
        options = replace(options, axis_spec=AxisSpec(axes, shape, batch, half=half))
    options = _apply_model_options(options, kv_heads, model)
    engine_values: dict[str, Any] = {
        "invert": invert and tuple(invert),
        "stream": stream,
        "sequence": sequence,
        "window_cache": window_cache,
    }
    override = {name: value for name, value in engine_values.items() if value is not None}
    if override:
        options = replace(options, engine=replace(options.engine, **override))
    mapped_file = path if isinstance(path, MappedFile) else None
    path = mapped_file.path if mapped_file else path
    if not isinstance(path, str | bytes | os.PathLike):
        return _invert_requested(
            _validate_kv_heads(_add_code_note(in_memory.read_in_memory(path, options)), kv_heads), options
        )
    path = os.fsdecode(path)
    if is_url(path):
        source = zarr.read(path, options)
        path = source.inputs[0]
    else:
        decode_frames = (
            mapped_file is None and options.decode_frames and (is_frames(path) or _is_unnamed_frame(path, options))
        )
        source = _read_frames(path, options) if decode_frames else _read_path(path, options, mapped_file)
    if options.tensors:
        drop_whole_file_metadata(source, path)
    if options.decode_frames and source.cache is None:
        source.cache = parse_cache_info(source.metadata, path)
    engine_metadata.restore_metadata(source, path, is_subset=bool(options.tensors))
    source = apply_axis_spec(source, options.axis_spec, path)
    if options.max_bytes is not None and source.nbytes > options.max_bytes:
        raise LimitError(f"{path}: holds {source.nbytes} raw bytes, above the limit of {options.max_bytes}")
    _check_array_names(source, path)
    source = _add_code_note(source)
    source.notes += list_padding(source.engine_cache)
    _note_other_numbers(source, options)
    source.inputs = (path,)
    return _invert_requested(_validate_kv_heads(source, kv_heads), options)


def _note_other_numbers(source: Source, options: ReadOptions) -> None:
    """Note where ``--dtype`` takes the words of a floating point type as another type: the numbers are others then."""
    for array in source.arrays if options.dtype else ():
        if array.array_dtype in ("<f2", ">f2") and array.dtype == "bf16":
            source.notes.append(f"{array.name}: its float16 words are taken as {array.dtype}, other numbers (--dtype)")
            return


def _apply_model_options(
    options: ReadOptions, kv_heads: int | None, model: str | os.PathLike[str] | None
) -> ReadOptions:
    """The options, with what was said of heads and model."""
    if kv_heads is None and model is None:
        return options
    packed_options = options.packed or PackedOptions()
    if kv_heads is not None:
        packed_options = replace(packed_options, geometry=replace(packed_options.geometry, kv_heads=kv_heads))
    if model is not None:
        packed_options = replace(packed_options, model=os.fsdecode(model))
    return replace(options, packed=packed_options)


def _add_code_note(source: Source) -> Source:
    """The source, with a note where its numbers were made of codes."""
    if source.elements:
        source.notes.append(
            f"{' and '.join(source.elements)} codes read as the fp32 numbers that they stand for, without scales: "
            "sizes and ratios are of these"
        )
    return source


def _validate_kv_heads(source: Source, kv_heads: int | None) -> Source:
    """The source; `OptionError` where its K and V have another number of heads than the caller says, or say none."""
    has_row_heads = (
        source.engine_cache is not None and source.engine_cache.engine == llama.ENGINE
    )  # which were told already
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
    """The source, with what is to be undone of it."""
    engine_options = options.engine
    if engine_options.invert is None:
        return source
    if engine_options.passthrough or engine_options.raw_blocks:
        raise OptionError(f"{' '.join(source.inputs)}: --undo is about numbers, not about a whole file or its blocks")
    return engine_transforms.invert_source_transforms(source, engine_options.invert)


def _check_array_names(source: Source, path: str) -> None:
    """`SourceError` for a name that arrays may not have; a note for one that the file's was changed to."""
    for name in source:
        check_name(name, path)
    if len(source) == 1 and source.names == (array_name_from_path(path),) and PurePath(path).stem != source.names[0]:
        source.notes.append(f"the array is called {source.names[0]}: no name of an array has all that the file's has")


def classify_path(path: str) -> Literal["frames", "arrays"] | None:
    """What lies at a path, by its name and by what lies beside it or in it; None for a name that does not say."""
    if os.path.isdir(path):
        return "frames" if os.path.exists(os.path.join(path, manifest.MANIFEST_NAME)) else "arrays"
    suffix = PurePath(path).suffix.lower()
    if find_engine_format(path):
        return "arrays"
    if suffix in ARRAY_FORMATS or suffix in _PACKED_SUFFIXES or parse_page_name(path) is not None:
        return "arrays"
    return "frames" if suffix in _FRAME_SUFFIXES or os.path.exists(path + manifest.SIDECAR_SUFFIX) else None


def classify_folder(path: str, packed_options: PackedOptions | None = None) -> FolderKind | None:
    """What a directory holds that is no bundle of frames; None for nothing that is known.

    Raises
    ------
    SourceError
        As for `find_packed`, and where the directory cannot be read.
    """
    if zarr.is_zarr_store(path):
        return "zarr"
    if _contains_packed_files(path, packed_options):
        return "packed"
    root = Path(path)
    packed_meta, dump_meta = (next(root.rglob(pattern), None) for pattern in (dump.PACKED_META_GLOB, dump.META_GLOB))
    if packed_meta and ((packed_options and packed_options.prefer_packed_dump) or not dump_meta):
        return "packed dump"
    if dump_meta:
        return "dump"
    if npy.list_npy_files(path):
        return "npy"
    if vllm.is_vllm_folder(path):
        return "vllm"
    return "zarr" if zarr.find_orphaned_arrays(path) else None


def find_readable_entry(path: str) -> str | None:
    """The first name in a directory that `open` would read; None where there is none among the first thousand."""
    try:
        names = sorted(os.listdir(path))[:_MAX_SCANNED_NAMES]
    except OSError:
        return None
    for name in names:
        entry_path = os.path.join(path, name)
        if os.path.isdir(entry_path):
            with suppress(KvmnnError):
                if is_frames(entry_path) or classify_folder(entry_path) is not None:
                    return name
        elif find_array_format(entry_path) is not None or find_engine_format(entry_path) is not None:
            return name
    return None


def _contains_packed_files(path: str, packed_options: PackedOptions | None) -> bool:
    """Whether a directory holds packed files, even where nothing says which of them are meant."""
    try:
        return find_packed(path, packed_options) is not None
    except MissingOptionError:
        return True


def explain_not_frames(path: str, error: KvmnnError) -> KvmnnError:
    """What to raise for an input that was read as a frame and is none: `error`, unless its name says nothing."""
    if os.path.isdir(path) and (orphans_text := zarr.find_orphaned_arrays(path)):
        return SourceError(orphans_text)
    if find_engine_format(path) is not None:
        return SourceError(f"{path}: is a cache of another engine, no frames: kvmnn encode makes frames of it")
    if isinstance(error, LimitError) or classify_path(path) is not None or not os.path.isfile(path):
        return error
    reason = str(error).removeprefix(f"{path}: ")
    return SourceError(f"{path}: {explain_unknown_file(path, read_head(path, HEAD_BYTES), f'; as a frame: {reason}')}")


def is_frames(path: str) -> bool:
    """Whether a path is a bundle, a manifest, or a frame."""
    return classify_path(path) == "frames"


def _is_unnamed_frame(path: str, options: ReadOptions) -> bool:
    """Whether a file whose name does not say what it is holds frames to its last byte, and is not said to be words."""
    if options.dtype or options.fallback_dtypes or not os.path.isfile(path) or classify_path(path) is not None:
        return False
    return contains_frames(path)


def _read_frames(path: str, options: ReadOptions) -> Source:
    are_codes = options.dtype in FLOAT8_NAMES
    frames = open_frames(path, options=DecodeOptions(dtype=None if are_codes else options.dtype))
    for entry in frames.arrays if options.dtype is not None else ():
        if (entry.element or entry.dtype) != options.dtype:
            raise OptionError(
                f"{path}: the manifest says {entry.element or entry.dtype}, not {options.dtype} (--dtype)"
            )
    source = make_frame_source(frames.without_unused_arrays(), DecodeOptions(threads=options.threads))
    source.metadata.pop(PACKED_FILES_KEY, None)
    if not options.codes:
        source.arrays = [decode_array(array) if array.element else array for array in source.arrays]
    return select_from_source(read_original_arrays(source, path, options), path, options)


def _read_path(path: str, options: ReadOptions, stream: MappedFile | None = None) -> Source:
    """A file, directory or stream taken as it is."""
    array_format, engine_format = find_array_format(path), find_engine_format(path)
    if stream is not None or (is_stream(path) and (classify_path(path) is None or _has_safetensors_suffix(path))):
        source = _read_stream(stream or MappedFile(path, max_bytes=options.max_bytes), options)
    elif os.path.isdir(path):
        source = _read_directory(path, options)
    elif engine_format is not None:
        source = select_from_source(read_engine_file(path, engine_format, options), path, options)
    elif array_format is not None:
        source = array_format.read(path, options)
        if array_format.read is npy.read:
            sidecars.add_sidecars(source, os.path.dirname(path))
    elif PurePath(path).suffix.lower() in _PACKED_SUFFIXES:
        source = _read_packed(path, options)
    else:
        if not (options.dtype or options.fallback_dtypes) and contains_frames(path):
            raise SourceError(
                f"{path}: is a frame already: kvmnn decode gives its array back, kvmnn inspect shows it, "
                "--codec dense or mnn encodes it again; --dtype fp16, bf16 or fp32 would take its bytes as raw words"
            )
        if not (options.dtype or options.fallback_dtypes) and (reason := saved.describe_damage(path)):
            raise SourceError(f"{path}: {reason}")
        source = raw.read(path, options)
    if options.tensors:
        check_tensor_names(path, source, options)
    return source


def contains_frames(path: str | MappedFile) -> bool:
    """Whether the content of a file is frames, whatever its name and whatever lies beside it."""
    try:
        open_frames(path, use_manifest=False)
    except KvmnnError:
        return False
    return True


def _read_packed(path: str, options: ReadOptions) -> Source:
    files = find_packed(path, options.packed)
    if files is None:
        return raw.read(path, options)
    packed_cache = open_packed_files(files, options.packed or PackedOptions())
    return select_from_source(
        packed_cache.to_source(options.dtype, include_unused=options.engine.passthrough), path, options
    )


def _read_directory(path: str, options: ReadOptions) -> Source:
    kind = classify_folder(path, options.packed)
    if kind == "packed":
        return _read_packed(path, options)
    if kind is None:
        raise SourceError(f"{path}: {explain_unknown_folder(path)}")
    if kind == "zarr" and (orphans_text := zarr.find_orphaned_arrays(path)):
        raise SourceError(orphans_text)
    read_folder = {
        "zarr": zarr.read,
        "packed dump": dump.read_packed_dump,
        "dump": dump.read,
        "npy": npy.read_folder,
        "vllm": vllm.read,
    }[kind]
    source = read_folder(path, options)
    if kind in ("npy", "dump"):
        sidecars.add_sidecars(source, path)
    return source


def _read_stream(file: MappedFile, options: ReadOptions) -> Source:
    """What can be read only once, by what it holds."""
    default_reader = safetensors.read_mapped if _has_safetensors_suffix(file.path) else raw.read_mapped
    reader = _find_stream_reader(file) or default_reader
    return reader(file, options)


def _has_safetensors_suffix(path: str) -> bool:
    """Whether a name is that of plain arrays or of a prompt cache, which only the content tells apart."""
    return PurePath(path).suffix.lower() == ".safetensors"


def is_array_stream(file: MappedFile) -> bool:
    """Whether what was read from a stream says that it is a file of arrays."""
    return _find_stream_reader(file) is not None


def _find_stream_reader(file: MappedFile) -> Callable[[MappedFile, ReadOptions], Source] | None:
    if engine_format := find_stream_format(file):
        return partial(read_mapped_engine_file, engine_format)
    head = file.read_head(HEAD_BYTES)
    if head.startswith(npy.MAGIC):
        return npy.read_mapped
    if npz.is_npz(head):
        return npz.read_mapped
    return safetensors.read_mapped if safetensors.is_safetensors(head) else None
