"""MNN KV dumps: a directory of ``meta_*.json`` files, each naming the binary files of its K and V; read and written.

A plain file contains the words of one tensor, ``[token, kv_head, head_dim]`` in C order. A packed one
(``packed_meta_*.json``) contains, head by head, the tiles of the tokens in use; its metadata has the pack numbers,
which no other file of MNN has. The metadata files are stored with the arrays as one JSON text under `DUMP_KEY`
(docs/manifest.md), from which a dump is restored byte for byte.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final

import numpy as np

from ... import dtypes
from ..._util.named_tuple import NamedTuple
from ..._util.parallel import Progress
from ...arrays.array import Chunk, LazyArray, UnsupportedArrayError
from ...arrays.layers import LayerArray, require_common_geometry
from ...arrays.source import DUMP_KEY, Source
from ...bundle.decoder import decode_frames
from ...bundle.frame_set import DecodeOptions, FrameSet
from ...bundle.manifest import ArrayEntry
from ...dtypes import PARTS, Part
from ...errors import ManifestError, OutputError, SourceError, build_read_error
from ...files.atomic import DirectoryOutput, StagedFile, wrap_os_errors
from ...files.change_detection import FileState
from ...files.mapped_file import iter_file_chunks
from ...files.schema import JsonReader, parse_document, parse_object, read_bounded
from ...packed.cache_info import LayerInfo
from ...packed.layout import PackLayout, get_head_bytes
from ..base import PathFormat, mark_first_chunks
from ..options import ReadOptions
from ..restorer import RestoreResult
from ..sidecars import add_sidecars, check_all_moved, write_sidecars
from ..tensor_selection import make_reinterpretation_error, select_tensors, validate_array
from ..writer import WrittenFile, verify_written
from .packed_files import get_file_size
from .packed_io import PackedPartWriter, make_packed_array, reserve_file_size

DUMP_SCHEMA: Final = "kvmnn-dump"
DUMP_SCHEMA_VERSION: Final = 1
MAX_DUMP_METADATA_BYTES = 32 << 20
"""Limit of the text: the metadata of some 60,000 pairs of K and V."""

_NON_UTF8_ERRORS = "surrogateescape"
"""Metadata need not be UTF-8; other bytes are restored unchanged."""


def build_source_metadata(metadata_by_name: Mapping[str, bytes], label: str) -> tuple[dict[str, str], list[str]]:
    """Return `Source.metadata` and `Source.notes` for metadata files, whose bytes are given by file name."""
    document_text = dump_metadata_files(metadata_by_name)
    try:
        load_metadata_files(document_text, label)
    except ManifestError as error:
        return {}, [f"a bundle of this dump cannot become it again (decode --output-kind dump): {error}"]
    return {DUMP_KEY: document_text}, []


def dump_metadata_files(metadata_by_name: Mapping[str, bytes]) -> str:
    """Return metadata files as a JSON document, in ASCII."""
    decoded_by_name = {name: data.decode("utf-8", _NON_UTF8_ERRORS) for name, data in metadata_by_name.items()}
    return json.dumps({"schema": DUMP_SCHEMA, "schema_version": DUMP_SCHEMA_VERSION, "metadata_files": decoded_by_name})


def load_metadata_files(text: str, label: str) -> dict[str, bytes]:
    """Return the bytes of metadata files by name; names are relative and stay within the dump."""
    root = parse_document(text, label, MAX_DUMP_METADATA_BYTES)
    root.check_schema(DUMP_SCHEMA, DUMP_SCHEMA_VERSION)
    metadata_by_name: dict[str, bytes] = {}
    files = root.get("metadata_files")
    for name, content in files.read_str_map().items():
        JsonReader(name, label, files.path).read_file_name()
        try:
            metadata_by_name[name] = content.encode("utf-8", _NON_UTF8_ERRORS)
        except UnicodeEncodeError:
            raise files.get(name).error("the text of a file") from None
    return metadata_by_name


_DTYPE_BY_ITEMSIZE = {2: dtypes.FP16, 4: dtypes.FP32}
META_GLOB = "meta_*.json"
MAX_META_BYTES = 1 << 20  # no metadata of MNN is that large


class KvDumpTensor(NamedTuple):
    """K or V as described by a metadata file: array name, file, ``[token, kv_head, head_dim]``, type.

    The type is declared (`is_dtype_declared`), or inferred from the word size.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: dtypes.DType
    is_dtype_declared: bool = False


def read(path: str, options: ReadOptions) -> Source:
    """Read K and V of every dump below the directory, sorted by metadata path, e.g. ``run/layer_0/k_t0_16``.

    The contents of all metadata files are included (`dump_metadata`), unless an array was left out.
    `PackedOptions.prefer_packed_dump` selects a packed dump if there are both.
    """
    if options.packed and options.packed.prefer_packed_dump and has_packed_dump(path):
        return read_packed_dump(path, options)
    check_all_moved(path)  # whose metadata would be read with the others
    root = Path(path)
    entries: list[tuple[str, Callable[[], LazyArray]]] = []
    opened: list[str] = []
    metadata_by_name: dict[str, bytes] = {}
    for meta in sorted(root.rglob(META_GLOB)):
        opened.append(str(meta))
        metadata = metadata_by_name[meta.relative_to(root).as_posix()] = _read_meta_bytes(meta)
        for tensor in iter_meta_tensors(root, meta, parse_object(metadata, str(meta))):
            opened.append(str(tensor.file))
            entries.append((tensor.name, partial(_make_dump_array, tensor, options)))
    arrays, skipped = select_tensors(path, entries, options)
    source = Source(arrays, skipped_arrays=skipped, token_major=True, opened_files=tuple(opened))
    if len(arrays) == len(entries):
        source.metadata, source.notes = build_source_metadata(metadata_by_name, path)
    add_sidecars(source, path, is_whole=not options.tensors)
    return source


def iter_meta_tensors(root: Path, meta: Path, fields: dict[str, Any]) -> Iterator[KvDumpTensor]:
    """Yield K and V of the metadata file `meta` with these `fields`, in a dump whose directory is `root`."""
    shape = tuple(parse_positive_int(meta, fields, key) for key in ("seq_len", "kv_heads", "head_dim"))
    dtype = parse_element_type(meta, fields)
    declared_dtype = fields.get("dtype", "unknown")
    if declared_dtype not in ("unknown", dtype.name):
        raise SourceError(f"{meta}: dtype is {declared_dtype!r}, but bytes_per_elem is {dtype.itemsize}")
    for key in ("k_file", "v_file"):
        data_path = resolve_inside(root, meta, key, fields.get(key))
        name = PurePath(data_path.relative_to(root)).with_suffix("").as_posix()
        yield KvDumpTensor(name, data_path, shape, dtype, declared_dtype != "unknown")


def _make_dump_array(tensor: KvDumpTensor, options: ReadOptions) -> LazyArray:
    name, file, shape, native_dtype, is_dtype_declared = tensor
    dtype = dtypes.parse_dtype(options.dtype) if options.dtype else native_dtype
    if dtype.itemsize != native_dtype.itemsize:
        raise UnsupportedArrayError(f"{file}: holds {native_dtype.itemsize}-byte words, which are not {dtype.name}")
    if options.forbid_reinterpretation and is_dtype_declared and dtype != native_dtype:
        raise UnsupportedArrayError(f"{file}: {make_reinterpretation_error(native_dtype.name, dtype.name)}")
    try:
        state = FileState.from_path(file)
    except OSError as exc:
        raise build_read_error(file, exc) from exc
    array = LazyArray(
        name=name,
        dtype=dtype.name,
        shape=shape,
        array_dtype=dtype.numpy_dtype.str,
        reader=partial(iter_file_chunks, file, state),
    )
    if state.size != array.nbytes:
        raise SourceError(
            f"{file}: has {state.size} bytes, its metadata says {array.nbytes} "
            f"({' x '.join(map(str, shape))} x {native_dtype.itemsize})"
        )
    return validate_array(array, str(file), options)


def read_meta(meta: Path) -> dict[str, Any]:
    """Return the fields of a metadata file."""
    return parse_object(_read_meta_bytes(meta), str(meta))


def _read_meta_bytes(meta: Path) -> bytes:
    try:
        return read_bounded(meta, MAX_META_BYTES)
    except OSError as exc:
        raise build_read_error(meta, exc) from exc


def parse_positive_int(meta: Path, fields: dict[str, Any], key: str) -> int:
    """Return a field that is an integer above zero."""
    value = fields.get(key)
    if type(value) is not int or value <= 0:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a positive integer")
    return value


def parse_element_type(meta: Path, fields: dict[str, Any]) -> dtypes.DType:
    """Return the element type by the size of the words."""
    itemsize = parse_positive_int(meta, fields, "bytes_per_elem")
    if itemsize not in _DTYPE_BY_ITEMSIZE:
        raise SourceError(f"{meta}: bytes_per_elem is {itemsize}, expected 2 (fp16) or 4 (fp32)")
    return _DTYPE_BY_ITEMSIZE[itemsize]


def resolve_inside(root: Path, meta: Path, key: str, value: Any) -> Path:
    """Return the path of a file that a metadata file names; it must lie below the dump directory."""
    if not isinstance(value, str) or not value:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a file name")
    is_plain = "\0" not in value and ".." not in PurePosixPath(value).parts and ".." not in PureWindowsPath(value).parts
    is_absolute = PurePosixPath(value).is_absolute() or bool(PureWindowsPath(value).anchor)
    file = meta.parent / value
    if not is_plain or is_absolute or escapes_root(root, file):
        raise SourceError(f"{meta}: {key} {value!r:.200} leads out of the dump directory")
    return file


def escapes_root(root: Path, file: Path) -> bool:
    """Return whether a file lies outside the directory `root`, links followed, or has an impossible name."""
    try:
        return not file.resolve().is_relative_to(root.resolve())
    except (ValueError, OSError, RuntimeError):  # a lone surrogate, links that lead in circles
        return True


PACKED_META_GLOB = "packed_meta_*.json"


def has_packed_dump(path: str) -> bool:
    """Return whether there is a packed dump below a directory."""
    return os.path.isdir(path) and _has_file_below(path, PACKED_META_GLOB)


def _has_file_below(path: str, glob: str) -> bool:
    return next(Path(path).rglob(glob), None) is not None


def read_packed_dump(path: str, options: ReadOptions) -> Source:
    """Return K and V of every packed dump below the directory, ``[kv_head, token, head_dim]``, by metadata path."""
    check_all_moved(path)
    root = Path(path)
    entries: list[tuple[str, Callable[[], LazyArray]]] = []
    opened: list[str] = []
    for meta in sorted(root.rglob(PACKED_META_GLOB)):
        opened.append(str(meta))
        for name, file, make_array in _iter_packed_tensors(root, meta, options):
            opened.append(str(file))
            entries.append((name, make_array))
    if not entries:
        raise SourceError(f"{path}: has no {PACKED_META_GLOB} file below it, so it is not a packed MNN KV dump")
    arrays, skipped = select_tensors(path, entries, options)
    source = Source(arrays, skipped_arrays=skipped, opened_files=tuple(opened))
    add_sidecars(source, path, is_whole=not options.tensors)
    return source


def _iter_packed_tensors(
    root: Path, meta: Path, options: ReadOptions
) -> Iterator[tuple[str, Path, Callable[[], LazyArray]]]:
    fields = read_meta(meta)
    if fields.get("layout") != "packed":
        raise SourceError(f"{meta}: layout is {fields.get('layout')!r:.80}, expected 'packed'")
    layout = PackLayout(
        parse_positive_int(meta, fields, "kv_heads"),
        parse_positive_int(meta, fields, "head_dim"),
        parse_element_type(meta, fields).name,
        parse_positive_int(meta, fields, "pack_l"),
        parse_positive_int(meta, fields, "pack_h"),
        parse_positive_int(meta, fields, "flash_upper_kv"),
    )
    for part in PARTS:
        file = resolve_inside(root, meta, f"{part[0]}_file", fields.get(f"{part[0]}_file"))
        name = PurePath(file.relative_to(root)).with_suffix("").as_posix()
        yield name, file, partial(_make_packed_array, file, name, meta, fields, layout, part, options)


def _make_packed_array(
    file: Path, name: str, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part, options: ReadOptions
) -> LazyArray:
    if options.dtype not in (None, layout.dtype):
        raise UnsupportedArrayError(f"{file}: holds {layout.dtype} words, not {options.dtype}")
    num_tokens = parse_positive_int(meta, fields, "used_seq_len")
    capacity = _resolve_capacity(file, meta, fields, layout, part)
    layer = LayerInfo(layer=0, tokens=num_tokens, capacity=capacity, positions=((0, num_tokens),))
    return make_packed_array(name, str(file), layout, part, layer)


def _resolve_capacity(file: Path, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part) -> int:
    """Return the file's capacity in tokens: of the tiles in use, or of the whole buffer."""
    used_tokens, max_tokens = (parse_positive_int(meta, fields, key) for key in ("used_seq_len", "max_seq_len"))
    if used_tokens > max_tokens:
        raise SourceError(f"{meta}: used_seq_len is {used_tokens}, above max_seq_len, {max_tokens}")
    used_bytes, stride_bytes = (parse_positive_int(meta, fields, f"{part}_{key}_bytes") for key in ("used", "stride"))
    if stride_bytes != get_head_bytes(layout, part, max_tokens):
        raise SourceError(
            f"{meta}: {part}_stride_bytes is {stride_bytes}, expected {get_head_bytes(layout, part, max_tokens)} for "
            f"{max_tokens} tokens"
        )
    for capacity in (used_tokens, max_tokens):
        if used_bytes == get_head_bytes(layout, part, capacity):
            file_bytes, expected_bytes = get_file_size(str(file)), used_bytes * layout.kv_heads
            if file_bytes != expected_bytes:
                raise SourceError(f"{file}: has {file_bytes} bytes, its metadata says {expected_bytes}")
            return capacity
    raise SourceError(
        f"{meta}: {part}_used_bytes is {used_bytes}, expected {get_head_bytes(layout, part, used_tokens)} for "
        f"{used_tokens} tokens"
    )


KV_DUMP = PathFormat(name="dump", check=lambda head: _has_file_below(head.path, META_GLOB), read_path=read)
PACKED_KV_DUMP = PathFormat(
    name="packed dump", check=lambda head: _has_file_below(head.path, PACKED_META_GLOB), read_path=read_packed_dump
)


_READ_CHUNK_BYTES = 8 << 20


def write_dump(
    arrays: Sequence[LayerArray],
    output: DirectoryOutput,
    run_id: str,
    *,
    packed_as: PackLayout | None = None,
    flash: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write ``<run_id>/layer_<n>/`` with K, V and metadata of every layer; the caller commits `output`.

    Parameters
    ----------
    packed_as
        The layout of a packed dump; None writes ``[token, kv_head, head_dim]``.
    """
    _, _, dtype = require_common_geometry(arrays)
    if dtype not in ("fp16", "fp32"):
        raise OutputError(f"a KV dump holds fp16 or fp32, not {dtype}")
    if not re.fullmatch(r"[\w.+-]{1,100}", run_id, re.ASCII) or run_id in (".", ".."):
        raise OutputError(f"{run_id!r:.120}: is not a run id: expected letters, digits and . _ + -")
    for key, value in zip(arrays[::2], arrays[1::2], strict=True):
        num_heads, num_tokens, head_dim = key.geometry
        stem = f"t0_{num_tokens}" if packed_as is None else f"packed_t0_{num_tokens}"
        prefix = "" if packed_as is None else "packed_"
        names = {f"{letter}_file": f"{prefix}{letter}_{stem}.bin" for letter in "kv"}
        for entry, name in zip((key, value), names.values(), strict=True):
            file = output.open_file(f"{run_id}/layer_{key.layer}/{name}")
            if packed_as is None:
                _write_token_major(entry, file, progress)
            else:
                _write_packed(entry, file, packed_as, progress)
        shape = {"kv_heads": num_heads, "head_dim": head_dim, "bytes_per_elem": key.array.coded_itemsize}
        meta = {
            **(_describe_plain(key, shape, flash) if packed_as is None else _describe_packed(key, shape, packed_as)),
            "stage": "decode" if num_tokens == 1 else "prefill",
            "run_id": run_id,
            **names,
        }
        meta_file = output.open_file(f"{run_id}/layer_{key.layer}/{prefix}meta_{stem}.json")
        meta_file.write((json.dumps(meta, indent=2) + "\n").encode())


def _describe_plain(key: LayerArray, shape: dict[str, int], flash: bool) -> dict[str, Any]:
    num_tokens = key.geometry[1]
    return {
        "layer_id": key.layer,
        "seq_start": 0,
        "seq_len": num_tokens,
        "seq_end_exclusive": num_tokens,
        **shape,
        "dtype": key.array.dtype,
        "add": num_tokens,
        "tensor_seq_len": num_tokens,
        "quant_key": False,
        "quant_value": False,
        "flash_attention": flash,
    }


def _describe_packed(key: LayerArray, shape: dict[str, int], layout: PackLayout) -> dict[str, Any]:
    num_tokens = key.geometry[1]
    used_bytes = {part: get_head_bytes(layout, part, num_tokens) for part in PARTS}
    return {
        "layout": "packed",
        "layer_id": key.layer,
        "used_seq_len": num_tokens,
        "max_seq_len": num_tokens,
        **shape,
        "pack_h": layout.hP,
        "pack_l": layout.lP,
        "flash_upper_kv": layout.value_block(num_tokens),
        **{f"{part}_stride_bytes": nbytes for part, nbytes in used_bytes.items()},
        **{f"{part}_used_bytes": nbytes for part, nbytes in used_bytes.items()},
    }


def _write_packed(entry: LayerArray, file: StagedFile, layout: PackLayout, progress: Progress | None) -> None:
    num_tokens = entry.geometry[1]
    packed_writer = PackedPartWriter(
        file.target,
        file.path,
        layout,
        entry.part,
        capacity=num_tokens,
        num_tokens=num_tokens,
        order="token" if entry.token_major else "head",
    )
    for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
        packed_writer.write_rows(chunk)
        _report_progress(progress, chunk)
    packed_writer.rewind()
    packed_writer.close()


def _write_token_major(entry: LayerArray, file: StagedFile, progress: Progress | None) -> None:
    if entry.token_major:
        for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
            file.write(chunk.data)
            _report_progress(progress, chunk)
        return
    num_heads, num_tokens, head_dim = entry.geometry
    row_bytes = head_dim * entry.array.coded_itemsize
    with wrap_os_errors(file.target), open(file.path, "r+b") as handle:
        reserve_file_size(handle.fileno(), num_heads * num_tokens * row_bytes)
        mapping = mmap.mmap(handle.fileno(), 0)
    table = np.frombuffer(mapping, np.uint8).reshape(num_tokens, num_heads, row_bytes)
    num_written, remainder = 0, np.empty(0, np.uint8)
    for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
        data = np.concatenate([remainder, chunk]) if remainder.size else chunk
        num_rows = data.size // row_bytes
        remainder = data[num_rows * row_bytes :].copy()
        row_numbers, rows = np.arange(num_written, num_written + num_rows), data[: num_rows * row_bytes]
        table[row_numbers % num_tokens, row_numbers // num_tokens] = rows.reshape(num_rows, row_bytes)
        num_written += num_rows
        _report_progress(progress, chunk)
    del table


def _report_progress(progress: Progress | None, chunk: Chunk) -> None:
    if progress:
        progress(chunk.size)


class _DumpPlan(NamedTuple):
    """Files of a dump: one for each array, in their order, and the bytes of the metadata files by name."""

    files: list[str]
    metadata_by_name: dict[str, bytes]


def restore_dump(
    frames: FrameSet,
    output: str,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode frames into the files of the KV dump that they were made from, byte for byte; all are read back.

    Parameters and errors are those of `restore_arrays`, with a directory as `output`; `SourceError` where the frames
    are not of a whole KV dump, and `ManifestError` where the metadata files do not fit the arrays, or name files
    outside the directory.
    """
    start_time = time.perf_counter()
    options = options or DecodeOptions()
    frames.check_size(options)
    plan = _plan_dump(frames, Path(output))
    with DirectoryOutput(output, force=force, exclude=frames.files) as directory:
        directory.check_names([*plan.files, *plan.metadata_by_name])
        _write_dump_files(frames, plan, directory, options, progress)
        sidecar_names = write_sidecars(directory, frames.document.metadata if frames.document else None)
        directory.commit()
    return RestoreResult(
        input=frames.path,
        output=output,
        arrays=frames.arrays,
        is_verified=True,
        is_read_back=True,
        files=tuple(plan.files),
        metadata_files=(*plan.metadata_by_name, *sidecar_names),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
        losses=frames.losses,
        notes=frames.losses,
    )


def _plan_dump(frames: FrameSet, root: Path) -> _DumpPlan:
    document_text = frames.document.metadata.get(DUMP_KEY) if frames.document else None
    if document_text is None:
        raise SourceError(
            f"{frames.path}: was not made from a whole KV dump, or by a kvmnn that did not keep its metadata "
            "(kvmnn mnn unpack --output-kind dump makes a dump of any K and V)"
        )
    label = f"{frames.path}: metadata {DUMP_KEY!r}"
    metadata_by_name = load_metadata_files(document_text, label)
    arrays = {array.name: array for array in frames.arrays}
    files: dict[str, str] = {}
    for name, content in metadata_by_name.items():
        has_meta_name = fnmatchcase(PurePath(name).name, META_GLOB)
        if not has_meta_name or len(content) > MAX_META_BYTES or escapes_root(root, root / name):
            raise ManifestError(f"{label}: {name!r:.200} is no metadata file of a dump")
        try:
            for tensor in iter_meta_tensors(root, root / name, parse_object(content, f"{name!r:.200}")):
                if tensor.name in files:
                    raise SourceError(f"{name!r:.200}: {tensor.name!r} is of another metadata file, too")
                _check_tensor_matches(label, tensor.name, arrays.get(tensor.name), tensor.shape, tensor.dtype.itemsize)
                files[tensor.name] = tensor.file.relative_to(root).as_posix()
        except SourceError as error:
            raise ManifestError(f"{label}: {error}") from None
    for array in arrays:
        if array not in files:
            raise ManifestError(f"{label}: no metadata file says in which file the array {array!r} lay")
    return _DumpPlan([files[array.name] for array in frames.arrays], metadata_by_name)


def _check_tensor_matches(label: str, name: str, array: ArrayEntry | None, shape: Sequence[int], itemsize: int) -> None:
    actual_form = (array.shape, array.itemsize, array.order) if array else None
    if actual_form != (tuple(shape), itemsize, "C"):
        actual_text = f"has shape {list(array.shape)}, {array.itemsize} bytes each" if array else "is not there"
        raise ManifestError(
            f"{label}: does not fit the arrays: {name!r:.200} {actual_text}, expected {list(shape)}, {itemsize} bytes "
            f"each"
        )


def _write_dump_files(
    frames: FrameSet, plan: _DumpPlan, directory: DirectoryOutput, options: DecodeOptions, progress: Progress | None
) -> None:
    files: list[StagedFile] = []
    for index, data, is_first in mark_first_chunks(decode_frames(frames, options, progress=progress)):
        if is_first:
            files.append(directory.open_file(plan.files[index]))
        files[-1].write(data.data)
        del data
    metadata_files = []
    for name, content in plan.metadata_by_name.items():
        metadata_files.append(directory.open_file(name))
        metadata_files[-1].write(content)
        metadata_files[-1].close()
    written_files = [
        WrittenFile(file.path, file.target, None, [array]) for file, array in zip(files, frames.arrays, strict=True)
    ]
    verify_written(written_files, [array.sha256 or "" for array in frames.arrays], options.threads)
    for file, content in zip(metadata_files, plan.metadata_by_name.values(), strict=True):
        if read_bounded(file.path, MAX_META_BYTES) != content:
            raise OutputError(f"{file.target}: does not read back as it was written")
