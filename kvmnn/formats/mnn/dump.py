"""MNN KV dumps: a directory of ``meta_*.json`` files, each naming the binary files of its K and V.

A binary file holds the words of one tensor, ``[token, kv_head, head_dim]`` in C order, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ... import dtypes
from ...arrays.named_array import Chunk, LazyArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import SourceError
from ...files.changes import FileState
from ...files.json_document import parse_object, read_bounded
from ...files.mapped import MappedFile
from ..options import ReadOptions
from ..reading import make_reinterpretation_error, select_tensors, validate_array
from . import dump_metadata

_DTYPE_BY_ITEMSIZE = {2: dtypes.FP16, 4: dtypes.FP32}
META_GLOB = "meta_*.json"
MAX_META_BYTES = 1 << 20  # no metadata of MNN is that large


class KvDumpTensor(NamedTuple):
    """What a metadata file says of its K or V: the array's name, its file, ``[token, kv_head, head_dim]``, its type.

    The type is `is_dtype_declared`, or only taken from the size of the words.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: dtypes.DType
    is_dtype_declared: bool = False


def read(path: str, options: ReadOptions) -> Source:
    """K and V of every dump below the directory, sorted by metadata path, e.g. ``run/layer_0/k_t0_16``.

    The texts of all metadata files go with them (`dump_metadata`), unless an array was left out.
    """
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
        source.metadata, source.notes = dump_metadata.build_source_metadata(metadata_by_name, path)
    return source


def iter_meta_tensors(root: Path, meta: Path, fields: dict[str, Any]) -> Iterator[KvDumpTensor]:
    """K and V of the metadata file `meta`, which has `fields`, in a dump whose directory is `root`.

    Raises
    ------
    SourceError
        When the fields are not those of a dump, or name a file outside the directory.
    """
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
        raise SourceError(f"{file}: cannot be read: {exc.strerror}") from exc
    array = LazyArray(
        name=name,
        dtype=dtype.name,
        shape=shape,
        array_dtype=dtype.numpy_dtype.str,
        reader=partial(_iter_file_chunks, file, state),
    )
    if state.size != array.nbytes:
        raise SourceError(
            f"{file}: has {state.size} bytes, its metadata says {array.nbytes} "
            f"({' x '.join(map(str, shape))} x {native_dtype.itemsize})"
        )
    return validate_array(array, str(file), options)


def _iter_file_chunks(file: Path, state: FileState, chunk_bytes: int) -> Iterator[Chunk]:
    """The file's bytes, mapped only while they are read: a dump may have more files than a process may map."""
    mapped_file = MappedFile(file, expected_state=state)
    yield from mapped_file.iter_chunks(0, mapped_file.size, chunk_bytes)


def read_meta(meta: Path) -> dict[str, Any]:
    """The fields of a metadata file."""
    return parse_object(_read_meta_bytes(meta), str(meta))


def _read_meta_bytes(meta: Path) -> bytes:
    try:
        return read_bounded(meta, MAX_META_BYTES)
    except OSError as exc:
        raise SourceError(f"{meta}: cannot be read: {exc.strerror}") from exc


def parse_positive_int(meta: Path, fields: dict[str, Any], key: str) -> int:
    """A field that is an integer above zero."""
    value = fields.get(key)
    if type(value) is not int or value <= 0:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a positive integer")
    return value


def parse_element_type(meta: Path, fields: dict[str, Any]) -> dtypes.DType:
    """The type of the words, by their size."""
    itemsize = parse_positive_int(meta, fields, "bytes_per_elem")
    if itemsize not in _DTYPE_BY_ITEMSIZE:
        raise SourceError(f"{meta}: bytes_per_elem is {itemsize}, expected 2 (fp16) or 4 (fp32)")
    return _DTYPE_BY_ITEMSIZE[itemsize]


def resolve_inside(root: Path, meta: Path, key: str, value: Any) -> Path:
    """The file a metadata file names, if it lies below the dump directory."""
    if not isinstance(value, str) or not value:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a file name")
    is_plain = "\0" not in value and ".." not in PurePosixPath(value).parts and ".." not in PureWindowsPath(value).parts
    is_absolute = PurePosixPath(value).is_absolute() or bool(PureWindowsPath(value).anchor)
    file = meta.parent / value
    if not is_plain or is_absolute or escapes_root(root, file):
        raise SourceError(f"{meta}: {key} {value!r:.200} leads out of the dump directory")
    return file


def escapes_root(root: Path, file: Path) -> bool:
    """Whether a file lies outside the directory `root`, links followed, or has a name that none can have."""
    try:
        return not file.resolve().is_relative_to(root.resolve())
    except (ValueError, OSError, RuntimeError):  # a lone surrogate, links that lead in circles
        return True
