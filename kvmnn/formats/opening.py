"""Anything that kvmnn reads, opened by what it is: files, directories, packed caches, and frames."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePath

from ..arrays.source import Source
from ..bundle import manifest
from ..bundle.frame_set import DecodeOptions, open_frames
from ..bundle.manifest import FRAME_SUFFIX
from ..files.mapped import STDIN, MappedFile
from . import npy, npz, raw, safetensors
from .frames import described_by, of_frames
from .mnn import dump, live, packed_dump, prefix
from .mnn.describing import describe_files
from .mnn.packed_files import PackedFiles
from .options import PackedOptions, ReadOptions
from .reading import check_names, chosen


def is_frames(path: str) -> bool:
    """Whether a path is a bundle, a manifest, or a frame, by what it is called and what lies beside it."""
    if os.path.isdir(path):
        return os.path.exists(os.path.join(path, manifest.FILE_NAME))
    suffix = PurePath(path).suffix.lower()
    if suffix in SUFFIXES:
        return False
    return suffix in (FRAME_SUFFIX, ".json") or os.path.exists(path + manifest.SIDE_SUFFIX)


def open_any(path: str, options: ReadOptions | None = None, threads: int | None = None) -> Source:
    """Open a source, or frames as if they were one; `Source.cache` is set wherever the input tells.

    Raises
    ------
    KvmnnError
        As `open_source` and `open_frames`.
    """
    options = options or ReadOptions()
    if is_frames(path):
        frames = open_frames(path, options=DecodeOptions(dtype=options.dtype))
        source = chosen(of_frames(frames, DecodeOptions(threads=threads)), path, options)
    else:
        source = open_source(path, options)
    if source.cache is None:
        source.cache = described_by(source.metadata, path)
    return source


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
        check_names(path, source, options)
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
    if live.is_live(listing):
        return live.find(path, options.layer_order, options.pid)
    return prefix.find(path, options.name) if prefix.names_in(listing) else None


def _packed(path: str, options: ReadOptions) -> Source:
    files = find_packed(path, options.packed)
    if files is None:
        return raw.read(path, options)
    return chosen(describe_files(files, options.packed or PackedOptions()).to_source(options.dtype), path, options)


def _directory(path: str, options: ReadOptions) -> Source:
    if find_packed(path, options.packed):
        return _packed(path, options)
    root = Path(path)
    packed = next(root.rglob(packed_dump.GLOB), None)
    if packed and ((options.packed and options.packed.packed_dump) or not next(root.rglob("meta_*.json"), None)):
        return packed_dump.read(path, options)
    return dump.read(path, options)


def _stdin(options: ReadOptions) -> Source:
    file = MappedFile(STDIN)
    if file.head(len(npy.MAGIC)) == npy.MAGIC:
        return npy.read_mapped(file, options)
    return raw.read_mapped(file, options)
