"""Which packed files a path stands for."""

from __future__ import annotations

import os
from pathlib import PurePath

from ...errors import OptionError
from ..options import PackedOptions
from . import live, prefix
from .describing import PackedCacheReader, open_packed_files
from .packed_files import PackedFiles


def find_packed(path: str, options: PackedOptions | None = None) -> PackedFiles | None:
    """The packed files that a directory, or one of its ``.k`` and ``.v`` files, belongs to; None if there are none.

    Raises
    ------
    SourceError
        When files of a cache are missing.
    MissingOptionError
        When there are several caches to choose from.
    """
    options = options or PackedOptions()
    if os.path.isdir(path):
        listing = set(os.listdir(path))
    elif PurePath(path).suffix in (".k", ".v"):
        listing = {PurePath(path).name}
    else:
        return None
    if live.has_mmap_files(listing):
        return live.find_mmap_files(path, options.layer_order, options.pid)
    return prefix.find_prefix(path, options.prefix_name) if prefix.list_prefix_names(listing) else None


def open_packed(path: str, options: PackedOptions | None = None) -> PackedCacheReader:
    """The packed files at `path` and all that is known of them, for `compact`; `kvmnn.open` reads their arrays.

    Raises
    ------
    OptionError
        When there are no packed files.
    SourceError
        As `find_packed` and `open_packed_files`.
    """
    options = options or PackedOptions()
    files = find_packed(path, options)
    if files is None:
        raise OptionError(f"{path}: holds no packed files (a prefix cache or live cache files)")
    return open_packed_files(files, options)
