"""Anything that kvmnn reads, opened by what it is: files, directories, packed caches, and frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

from ..arrays import engine_notes, own_order
from ..arrays.axes import Laid, laid_out, own_axes
from ..arrays.float8 import decode_array
from ..arrays.halves import Half
from ..arrays.padding import list_padding
from ..arrays.source import FILE_KEY, PACKED_FILES_KEY, Source, described_by
from ..arrays.valid_names import check_name, name_of_file
from ..bundle import manifest
from ..bundle.frame_set import DecodeOptions, open_frames
from ..dtypes import FLOAT8_NAMES
from ..errors import KvmnnError, LimitError, MissingOptionError, OptionError, SourceError
from ..files.mapped import MappedFile, head_of, is_stream
from ..files.urls import is_url
from ..text import count
from . import beside, engine_files, llama, npy, npy_folder, npz, raw, safetensors, vllm, zarr
from .array_formats import ARRAY_FORMATS, array_format
from .frames import of_frames
from .hf import live, saved
from .mnn import dump, packed_dump
from .mnn.describing import describe_files
from .mnn.finding import find_packed
from .options import PackedOptions, ReadOptions
from .raw_pages import page_in
from .reading import check_names, chosen, drop_description
from .unknown import HEAD_BYTES, file_not_known, folder_not_known

FolderKind = Literal["zarr", "packed", "packed dump", "dump", "npy", "vllm"]
_MOST_NAMES = 1000
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
    frames: bool | None = None,
    threads: int | None = None,
    axes: str | None = None,
    shape: tuple[int, ...] | None = None,
    batch: int | None = None,
    half: Half | None = None,
    codes: bool | None = None,
    kv_heads: int | None = None,
    model: str | os.PathLike[str] | None = None,
    undo: Sequence[str] | None = None,
    stream: int | None = None,
    sequence: int | None = None,
    window: bool | None = None,
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
    dtype, tensors, skip_unsupported, packed, frames, threads, codes
        As in `ReadOptions`, with the same defaults.
    axes, shape, batch, half
        As in `kvmnn.arrays.Laid`: of plain arrays a letter for each axis (l layer, b batch, h kv_head, t token, d
        dimension, 2 K and V), what they are taken as first, which text of a batch is wanted, and of an encoder-decoder
        cache which K and V (``"decoder"``, ``"encoder"``).
    kv_heads, model
        Of a llama.cpp file: how many heads a row of K is of, or the ``.gguf`` file that says it. The same as
        `PackedOptions.model` and ``PackedOptions.geometry.kv_heads``. Other K and V must have as many as `kv_heads`.
    undo
        What llama.cpp did to K and V that is to be undone: ``"k-order"``, ``"k-rotation"``, ``"v-rotation"``
        (`kvmnn.arrays.undo`), or ``["none"]``. By default words are as they lie in the file.
    stream, sequence, window
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
    >>> session = kvmnn.open("chat.session", model="llama.gguf", undo=["k-order"])
    """
    given: dict[str, Any] = {
        "dtype": dtype,
        "tensors": tuple(tensors) or None,
        "skip_unsupported": skip_unsupported,
        "packed": packed,
        "frames": frames,
        "threads": threads,
        "codes": codes,
    }
    options = replace(options or ReadOptions(), **{name: value for name, value in given.items() if value is not None})
    if any(said is not None for said in (axes, shape, batch, half)):
        options = replace(options, laid=Laid(axes, shape, batch, half=half))
    options = _with_model(options, kv_heads, model)
    wanted: dict[str, Any] = {"undo": undo and tuple(undo), "stream": stream, "sequence": sequence, "window": window}
    said = {name: value for name, value in wanted.items() if value is not None}
    if said:
        options = replace(options, engine=replace(options.engine, **said))
    opened = path if isinstance(path, MappedFile) else None
    path = opened.path if opened else path
    if not isinstance(path, str | bytes | os.PathLike):
        return _undone(_with_heads(_with_code_note(live.read(path, options)), kv_heads), options)
    path = os.fsdecode(path)
    if is_url(path):
        source = zarr.read(path, options)
        path = source.inputs[0]
    else:
        frames = opened is None and options.frames and (is_frames(path) or _is_unnamed_frame(path, options))
        source = _decoded(path, options) if frames else _read(path, options, opened)
    if options.tensors:
        drop_description(source, path)
    if options.frames and source.cache is None:
        source.cache = described_by(source.metadata, path)
    engine_notes.apply(source, path, part=bool(options.tensors))
    source = laid_out(source, options.laid, path)
    if options.max_bytes is not None and source.nbytes > options.max_bytes:
        raise LimitError(f"{path}: holds {source.nbytes} raw bytes, above the limit of {options.max_bytes}")
    _check_array_names(source, path)
    source = _with_code_note(source)
    source.notes += list_padding(source.engine_cache)
    _note_other_numbers(source, options)
    source.inputs = (path,)
    return _undone(_with_heads(source, kv_heads), options)


def _note_other_numbers(source: Source, options: ReadOptions) -> None:
    """Note where ``--dtype`` takes the words of a floating point type as another type: the numbers are others then."""
    for array in source.arrays if options.dtype else ():
        if array.array_dtype in ("<f2", ">f2") and array.dtype == "bf16":
            source.notes.append(f"{array.name}: its float16 words are taken as {array.dtype}, other numbers (--dtype)")
            return


def _with_model(options: ReadOptions, kv_heads: int | None, model: str | os.PathLike[str] | None) -> ReadOptions:
    """The options, with what was said of heads and model."""
    if kv_heads is None and model is None:
        return options
    said = options.packed or PackedOptions()
    if kv_heads is not None:
        said = replace(said, geometry=replace(said.geometry, kv_heads=kv_heads))
    if model is not None:
        said = replace(said, model=os.fsdecode(model))
    return replace(options, packed=said)


def _with_code_note(source: Source) -> Source:
    """The source, with a note where its numbers were made of codes."""
    if source.elements:
        source.notes.append(
            f"{' and '.join(source.elements)} codes read as the fp32 numbers that they stand for, without scales: "
            "sizes and ratios are of these"
        )
    return source


def _with_heads(source: Source, kv_heads: int | None) -> Source:
    """The source; `OptionError` where its K and V have another number of heads than the caller says, or say none."""
    of_rows = source.engine_cache is not None and source.engine_cache.engine == llama.ENGINE  # which were told already
    if kv_heads is None or of_rows or FILE_KEY in source.metadata:
        return source
    where, axes = " ".join(source.inputs), own_axes(source)
    if axes is None:
        raise OptionError(f"{where}: nothing says which axis its heads are: leave kv_heads out")
    for array in source.arrays:
        heads = array.shape[axes.index("h")]
        if heads != kv_heads:
            raise OptionError(f"{where}: array {array.name!r} has {count(heads, 'kv head')}, not {kv_heads} (kv_heads)")
    return source


def _undone(source: Source, options: ReadOptions) -> Source:
    """The source, with what is to be undone of it."""
    said = options.engine
    if said.undo is None:
        return source
    if said.whole or said.blocks:
        raise OptionError(f"{' '.join(source.inputs)}: --undo is about numbers, not about a whole file or its blocks")
    return own_order.undo(source, said.undo)


def _check_array_names(source: Source, path: str) -> None:
    """`SourceError` for a name that arrays may not have; a note for one that the file's was changed to."""
    for name in source:
        check_name(name, path)
    if len(source) == 1 and source.names == (name_of_file(path),) and PurePath(path).stem != source.names[0]:
        source.notes.append(f"the array is called {source.names[0]}: no name of an array has all that the file's has")


def kind_of(path: str) -> Literal["frames", "arrays"] | None:
    """What lies at a path, by its name and by what lies beside it or in it; None for a name that does not say."""
    if os.path.isdir(path):
        return "frames" if os.path.exists(os.path.join(path, manifest.FILE_NAME)) else "arrays"
    suffix = PurePath(path).suffix.lower()
    if engine_files.engine_file(path):
        return "arrays"
    if suffix in ARRAY_FORMATS or suffix in _PACKED_SUFFIXES or page_in(path) is not None:
        return "arrays"
    return "frames" if suffix in _FRAME_SUFFIXES or os.path.exists(path + manifest.SIDE_SUFFIX) else None


def folder_kind(path: str, packed: PackedOptions | None = None) -> FolderKind | None:
    """What a directory holds that is no bundle of frames; None for nothing that is known.

    Raises
    ------
    SourceError
        As for `find_packed`, and where the directory cannot be read.
    """
    if zarr.is_store(path):
        return "zarr"
    if _has_packed(path, packed):
        return "packed"
    root = Path(path)
    packed_meta, meta = (next(root.rglob(pattern), None) for pattern in (packed_dump.GLOB, dump.GLOB))
    if packed_meta and ((packed and packed.packed_dump) or not meta):
        return "packed dump"
    if meta:
        return "dump"
    if npy_folder.files_in(path):
        return "npy"
    if vllm.is_folder(path):
        return "vllm"
    return "zarr" if zarr.lost_group(path) else None


def readable_within(path: str) -> str | None:
    """The first name in a directory that `open` would read; None where there is none among the first thousand."""
    try:
        names = sorted(os.listdir(path))[:_MOST_NAMES]
    except OSError:
        return None
    for name in names:
        inside = os.path.join(path, name)
        if os.path.isdir(inside):
            with suppress(KvmnnError):
                if is_frames(inside) or folder_kind(inside) is not None:
                    return name
        elif array_format(inside) is not None or engine_files.engine_file(inside) is not None:
            return name
    return None


def _has_packed(path: str, packed: PackedOptions | None) -> bool:
    """Whether a directory holds packed files, even where nothing says which of them are meant."""
    try:
        return find_packed(path, packed) is not None
    except MissingOptionError:
        return True


def not_a_frame(path: str, found: KvmnnError) -> KvmnnError:
    """What to raise for an input that was read as a frame and is none: `found`, unless its name says nothing."""
    if os.path.isdir(path) and (lost := zarr.lost_group(path)):
        return SourceError(lost)
    if engine_files.engine_file(path) is not None:
        return SourceError(f"{path}: is a cache of another engine, no frames: kvmnn encode makes frames of it")
    if isinstance(found, LimitError) or kind_of(path) is not None or not os.path.isfile(path):
        return found
    reason = str(found).removeprefix(f"{path}: ")
    return SourceError(f"{path}: {file_not_known(path, head_of(path, HEAD_BYTES), f'; as a frame: {reason}')}")


def is_frames(path: str) -> bool:
    """Whether a path is a bundle, a manifest, or a frame."""
    return kind_of(path) == "frames"


def _is_unnamed_frame(path: str, options: ReadOptions) -> bool:
    """Whether a file whose name does not say what it is holds frames to its last byte, and is not said to be words."""
    if options.dtype or options.fallbacks or not os.path.isfile(path) or kind_of(path) is not None:
        return False
    return _holds_frames(path)


def _decoded(path: str, options: ReadOptions) -> Source:
    of_codes = options.dtype in FLOAT8_NAMES
    frames = open_frames(path, options=DecodeOptions(dtype=None if of_codes else options.dtype))
    for entry in frames.arrays if options.dtype is not None else ():
        if (entry.element or entry.dtype) != options.dtype:
            raise OptionError(
                f"{path}: the manifest says {entry.element or entry.dtype}, not {options.dtype} (--dtype)"
            )
    source = of_frames(frames.without_room(), DecodeOptions(threads=options.threads))
    source.metadata.pop(PACKED_FILES_KEY, None)
    if not options.codes:
        source.arrays = [decode_array(array) if array.element else array for array in source.arrays]
    return chosen(engine_files.reread(source, path, options), path, options)


def _read(path: str, options: ReadOptions, stream: MappedFile | None = None) -> Source:
    """A file, directory or stream taken as it is."""
    known, engines = array_format(path), engine_files.engine_file(path)
    if stream is not None or (is_stream(path) and (kind_of(path) is None or _is_safetensors(path))):
        source = _from_stream(stream or MappedFile(path, max_bytes=options.max_bytes), options)
    elif os.path.isdir(path):
        source = _directory(path, options)
    elif engines is not None:
        source = chosen(engine_files.read(path, engines, options), path, options)
    elif known is not None:
        source = known.read(path, options)
        if known.read is npy.read:
            beside.note_down(source, os.path.dirname(path))
    elif PurePath(path).suffix.lower() in _PACKED_SUFFIXES:
        source = _packed(path, options)
    else:
        if not (options.dtype or options.fallbacks) and _holds_frames(path):
            raise SourceError(
                f"{path}: is a frame already: kvmnn decode gives its array back, kvmnn inspect shows it; "
                "--dtype fp16, bf16 or fp32 would take its bytes as raw words"
            )
        if not (options.dtype or options.fallbacks) and (reason := saved.damage(path)):
            raise SourceError(f"{path}: {reason}")
        source = raw.read(path, options)
    if options.tensors:
        check_names(path, source, options)
    return source


def _holds_frames(path: str) -> bool:
    """Whether the content of a file is frames, whatever its name and whatever lies beside it."""
    try:
        open_frames(path, use_manifest=False)
    except KvmnnError:
        return False
    return True


def _packed(path: str, options: ReadOptions) -> Source:
    files = find_packed(path, options.packed)
    if files is None:
        return raw.read(path, options)
    described = describe_files(files, options.packed or PackedOptions())
    return chosen(described.to_source(options.dtype, whole=options.engine.whole), path, options)


def _directory(path: str, options: ReadOptions) -> Source:
    kind = folder_kind(path, options.packed)
    if kind == "packed":
        return _packed(path, options)
    if kind is None:
        raise SourceError(f"{path}: {folder_not_known(path)}")
    if kind == "zarr" and (lost := zarr.lost_group(path)):
        raise SourceError(lost)
    read = {
        "zarr": zarr.read,
        "packed dump": packed_dump.read,
        "dump": dump.read,
        "npy": npy_folder.read,
        "vllm": vllm.read,
    }[kind]
    source = read(path, options)
    if kind in ("npy", "dump"):
        beside.note_down(source, path)
    return source


def _from_stream(file: MappedFile, options: ReadOptions) -> Source:
    """What can be read only once, by what it holds."""
    otherwise = safetensors.read_mapped if _is_safetensors(file.path) else raw.read_mapped
    read = _reader_of(file) or otherwise
    return read(file, options)


def _is_safetensors(path: str) -> bool:
    """Whether a name is that of plain arrays or of a prompt cache, which only the content tells apart."""
    return PurePath(path).suffix.lower() == ".safetensors"


def holds_arrays(file: MappedFile) -> bool:
    """Whether what was read from a stream says that it is a file of arrays."""
    return _reader_of(file) is not None


def _reader_of(file: MappedFile) -> Callable[[MappedFile, ReadOptions], Source] | None:
    if engine := engine_files.engine_of(file):
        return partial(engine_files.read_mapped, engine)
    head = file.head(HEAD_BYTES)
    if head.startswith(npy.MAGIC):
        return npy.read_mapped
    if npz.is_npz(head):
        return npz.read_mapped
    return safetensors.read_mapped if safetensors.is_safetensors(head) else None
