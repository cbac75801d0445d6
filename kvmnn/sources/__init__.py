"""The formats people have their caches in, one module each: ``.npy``, ``.npz``, ``.safetensors``, raw words, and MNN's
dumps and packed files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath

from ..cache_info import METADATA_KEY
from ..errors import SourceError
from ..mapped import STDIN, MappedFile
from . import mnn_dump, mnn_live, mnn_packed_dump, mnn_prefix, npy, npz, raw, safetensors
from .base import ArrayInfo, NamedArray, Piece, ReadOptions, Source, UnsupportedArrayError
from .packed import Described, PackedFiles, PackedOptions, describe_files

__all__ = [
    "STDIN",
    "SUFFIXES",
    "ArrayInfo",
    "Described",
    "MappedFile",
    "NamedArray",
    "PackedFiles",
    "PackedOptions",
    "Piece",
    "ReadOptions",
    "Source",
    "UnsupportedArrayError",
    "chosen",
    "describe_files",
    "find_packed",
    "open_source",
]

_READERS: dict[str, Callable[[str, ReadOptions], Source]] = {
    ".npy": npy.read,
    ".npz": npz.read,
    ".safetensors": safetensors.read,
    ".k": lambda path, options: _packed(path, options),
    ".v": lambda path, options: _packed(path, options),
}

SUFFIXES = tuple(_READERS)
"""Of files that are known by what they are called."""


def open_source(path: str, options: ReadOptions | None = None) -> Source:
    """Open a file or directory of arrays by what its name says it is.

    Parameters
    ----------
    path
        A ``.npy``, ``.npz`` or ``.safetensors`` file, the directory of an MNN KV dump, of a prefix cache or of live
        cache files, any other file of raw words (``options.dtype`` says of which), or ``"-"``: raw words or a ``.npy``
        file on standard input.
    options
        dtype, choice of tensors, what to do with unsupported ones, what packed files are said to be.

    Raises
    ------
    SourceError
        When the input is missing, damaged, or holds something no frame can hold.
    """
    options = options or ReadOptions()
    if path == STDIN:
        source = _stdin(options)
    elif os.path.isdir(path):
        source = _directory(path, options)
    else:
        source = _READERS.get(PurePath(path).suffix.lower(), raw.read)(path, options)
    if options.tensors:
        _check_names(path, source, options)
    return source


def find_packed(path: str, options: PackedOptions | None = None) -> PackedFiles | None:
    """The packed files that a directory, or one of its ``.k`` and ``.v`` files, belongs to; None if there are none.

    Raises
    ------
    SourceError
        When there are such files but not whole.
    """
    options = options or PackedOptions()
    if os.path.isdir(path):
        listing = set(os.listdir(path))
    elif PurePath(path).suffix in (".k", ".v"):
        listing = {PurePath(path).name}
    else:
        return None
    if mnn_live.is_live(listing):
        return mnn_live.find(path, options.layer_order, options.pid)
    return mnn_prefix.find(path, options.name) if mnn_prefix.names_in(listing) else None


def chosen(source: Source, path: str, options: ReadOptions) -> Source:
    """The source with just the arrays that `options` name; a description of the whole cache goes with the whole only.

    Raises
    ------
    SourceError
        For a name that it does not have.
    """
    if not options.tensors:
        return source
    _check_names(path, source, options)
    arrays = [array for array in source.arrays if array.name in options.tensors]
    if len(arrays) == len(source.arrays):
        return source
    metadata = {key: value for key, value in source.metadata.items() if key != METADATA_KEY}
    return replace(source, arrays=arrays, metadata=metadata, cache=None)


def _packed(path: str, options: ReadOptions) -> Source:
    files = find_packed(path, options.packed)
    if files is None:
        return raw.read(path, options)
    return chosen(describe_files(files, options.packed or PackedOptions()).to_source(options.dtype), path, options)


def _directory(path: str, options: ReadOptions) -> Source:
    if find_packed(path, options.packed):
        return _packed(path, options)
    root = Path(path)
    packed_dump = next(root.rglob(mnn_packed_dump.GLOB), None)
    if packed_dump and ((options.packed and options.packed.packed_dump) or not next(root.rglob("meta_*.json"), None)):
        return mnn_packed_dump.read(path, options)
    return mnn_dump.read(path, options)


def _stdin(options: ReadOptions) -> Source:
    file = MappedFile(STDIN)
    if file.head(len(npy.MAGIC)) == npy.MAGIC:
        return npy.read_mapped(file, options)
    return raw.read_mapped(file, options)


def _check_names(path: str, source: Source, options: ReadOptions) -> None:
    """Files of one array take part in the choice of tensors too."""
    missing = set(options.tensors) - {array.name for array in source.arrays}
    if missing:
        found = ", ".join(repr(array.name) for array in source.arrays[:8])
        raise SourceError(f"{path}: no array named {min(missing)!r}; it has {found}")
