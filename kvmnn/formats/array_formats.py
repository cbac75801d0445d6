"""The formats of files of arrays, by the names of the files. A new one is a module here and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import NamedTuple

from ..arrays.source import Source
from . import npy, npz, safetensors
from .base import ArrayWriter
from .options import ReadOptions


class ArrayFormat(NamedTuple):
    """How files of a format are read and written."""

    read: Callable[[str, ReadOptions], Source]
    write: ArrayWriter
    is_multi_array: bool
    """Whether a file holds any number of arrays, or one."""


ARRAY_FORMATS = {
    ".npy": ArrayFormat(npy.read, npy.write_npy, False),
    ".npz": ArrayFormat(npz.read, npz.write_npz, True),
    ".safetensors": ArrayFormat(safetensors.read, safetensors.write_safetensors, True),
}
"""By suffix, in lower case."""


def find_array_format(name: str) -> ArrayFormat | None:
    """The format that a file of this name has; None for all other names."""
    return ARRAY_FORMATS.get(PurePath(name).suffix.lower())
