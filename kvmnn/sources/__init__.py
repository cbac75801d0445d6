"""The formats people have their caches in, one module each: ``.npy``, ``.npz``, ``.safetensors``, MNN dumps, raw."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePath

from ..errors import SourceError
from . import mnn_dump, npy, npz, raw, safetensors
from .base import ArrayInfo, NamedArray, Piece, ReadOptions, Source, UnsupportedArrayError
from .mapped import STDIN, MappedFile

__all__ = [
    "STDIN",
    "ArrayInfo",
    "MappedFile",
    "NamedArray",
    "Piece",
    "ReadOptions",
    "Source",
    "UnsupportedArrayError",
    "open_source",
]

_READERS: dict[str, Callable[[str, ReadOptions], Source]] = {
    ".npy": npy.read,
    ".npz": npz.read,
    ".safetensors": safetensors.read,
}


def open_source(path: str, options: ReadOptions | None = None) -> Source:
    """Open a file or directory of arrays by what its name says it is.

    Parameters
    ----------
    path
        A ``.npy``, ``.npz`` or ``.safetensors`` file, the directory of an MNN KV dump, any other file of raw words
        (``options.dtype`` says of which), or ``"-"``: raw words or a ``.npy`` file on standard input.
    options
        dtype, choice of tensors, what to do with unsupported ones.

    Raises
    ------
    SourceError
        When the input is missing, damaged, or holds something no frame can hold.
    """
    options = options or ReadOptions()
    if path == STDIN:
        source = _stdin(options)
    elif os.path.isdir(path):
        source = mnn_dump.read(path, options)
    else:
        source = _READERS.get(PurePath(path).suffix.lower(), raw.read)(path, options)
    if options.tensors:
        _check_names(path, source, options)
    return source


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
