"""MNN KV dumps: a directory of ``meta_*.json`` files, each naming the binary files of its K and V.

A binary file holds the words of one tensor, ``[token, kv_head, head_dim]`` in C order, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ... import dtypes
from ...arrays.named_array import NamedArray, Piece, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import SourceError
from ...files.changes import FileState
from ...files.json_document import as_object, read_bounded
from ...files.mapped import MappedFile
from ..options import ReadOptions
from ..reading import checked, other_numbers, select
from . import dump_metadata

_BY_BYTES = {2: dtypes.FP16, 4: dtypes.FP32}
GLOB = "meta_*.json"
MAX_META_BYTES = 1 << 20  # no metadata of MNN is that large


class Tensor(NamedTuple):
    """What a metadata file says of its K or V: the array's name, its file, ``[token, kv_head, head_dim]``, its type.

    The type is `said`, or only taken from the size of the words.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: dtypes.DType
    said: bool = False


def read(path: str, options: ReadOptions) -> Source:
    """K and V of every dump below the directory, sorted by metadata path, e.g. ``run/layer_0/k_t0_16``.

    The texts of all metadata files go with them (`dump_metadata`), unless an array was left out.
    """
    root = Path(path)
    entries: list[tuple[str, Callable[[], NamedArray]]] = []
    opened: list[str] = []
    texts: dict[str, bytes] = {}
    for meta in sorted(root.rglob(GLOB)):
        opened.append(str(meta))
        text = texts[meta.relative_to(root).as_posix()] = _text(meta)
        for tensor in tensors(root, meta, as_object(text, str(meta))):
            opened.append(str(tensor.file))
            entries.append((tensor.name, partial(_array, tensor, options)))
    arrays, skipped = select(path, entries, options)
    source = Source(arrays, skipped=skipped, token_major=True, opened=tuple(opened))
    if len(arrays) == len(entries):
        source.metadata, source.notes = dump_metadata.of(texts, path)
    return source


def tensors(root: Path, meta: Path, fields: dict[str, Any]) -> Iterator[Tensor]:
    """K and V of the metadata file `meta`, which has `fields`, in a dump whose directory is `root`.

    Raises
    ------
    SourceError
        When the fields are not those of a dump, or name a file outside the directory.
    """
    shape = tuple(positive(meta, fields, key) for key in ("seq_len", "kv_heads", "head_dim"))
    dtype = word_type(meta, fields)
    said = fields.get("dtype", "unknown")
    if said not in ("unknown", dtype.name):
        raise SourceError(f"{meta}: dtype is {said!r}, but bytes_per_elem is {dtype.itemsize}")
    for key in ("k_file", "v_file"):
        file = inside(root, meta, key, fields.get(key))
        name = PurePath(file.relative_to(root)).with_suffix("").as_posix()
        yield Tensor(name, file, shape, dtype, said != "unknown")


def _array(tensor: Tensor, options: ReadOptions) -> NamedArray:
    name, file, shape, native, said = tensor
    dtype = dtypes.by_name(options.dtype) if options.dtype else native
    if dtype.itemsize != native.itemsize:
        raise UnsupportedArrayError(f"{file}: holds {native.itemsize}-byte words, which are not {dtype.name}")
    if options.as_numbers and said and dtype != native:
        raise UnsupportedArrayError(f"{file}: {other_numbers(native.name, dtype.name)}")
    try:
        state = FileState.of(file)
    except OSError as exc:
        raise SourceError(f"{file}: cannot be read: {exc.strerror}") from exc
    array = NamedArray(
        name=name, dtype=dtype.name, shape=shape, array_dtype=dtype.numpy.str, reader=partial(_runs, file, state)
    )
    if state.size != array.nbytes:
        raise SourceError(
            f"{file}: has {state.size} bytes, its metadata says {array.nbytes} "
            f"({' x '.join(map(str, shape))} x {native.itemsize})"
        )
    return checked(array, str(file), options)


def _runs(file: Path, state: FileState, step: int) -> Iterator[Piece]:
    """The file's bytes, mapped only while they are read: a dump may have more files than a process may map."""
    mapped = MappedFile(file, expected=state)
    yield from mapped.runs(0, mapped.size, step)


def load_meta(meta: Path) -> dict[str, Any]:
    """The fields of a metadata file."""
    return as_object(_text(meta), str(meta))


def _text(meta: Path) -> bytes:
    try:
        return read_bounded(meta, MAX_META_BYTES)
    except OSError as exc:
        raise SourceError(f"{meta}: cannot be read: {exc.strerror}") from exc


def positive(meta: Path, fields: dict[str, Any], key: str) -> int:
    """A field that is an integer above zero."""
    value = fields.get(key)
    if type(value) is not int or value <= 0:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a positive integer")
    return value


def word_type(meta: Path, fields: dict[str, Any]) -> dtypes.DType:
    """The type of the words, by their size."""
    width = positive(meta, fields, "bytes_per_elem")
    if width not in _BY_BYTES:
        raise SourceError(f"{meta}: bytes_per_elem is {width}, expected 2 (fp16) or 4 (fp32)")
    return _BY_BYTES[width]


def inside(root: Path, meta: Path, key: str, value: Any) -> Path:
    """The file a metadata file names, if it lies below the dump directory."""
    if not isinstance(value, str) or not value:
        raise SourceError(f"{meta}: {key} is {value!r:.80}, expected a file name")
    plain = "\0" not in value and ".." not in PurePosixPath(value).parts and ".." not in PureWindowsPath(value).parts
    absolute = PurePosixPath(value).is_absolute() or bool(PureWindowsPath(value).anchor)
    file = meta.parent / value
    if not plain or absolute or leaves(root, file):
        raise SourceError(f"{meta}: {key} {value!r:.200} leads out of the dump directory")
    return file


def leaves(root: Path, file: Path) -> bool:
    """Whether a file lies outside the directory `root`, links followed, or has a name that none can have."""
    try:
        return not file.resolve().is_relative_to(root.resolve())
    except (ValueError, OSError, RuntimeError):  # a lone surrogate, links that lead in circles
        return True
