"""The formats people have their caches in, one file each, read and written; ``mnn/`` has the engine's own files."""

from .mnn.describing import Described, describe_files
from .mnn.packed_files import PackedFiles
from .opening import SUFFIXES, find_packed, is_frames, open_any, open_source
from .opening import open_any as open
from .options import PackedOptions, ReadOptions
from .reading import chosen

__all__ = [
    "SUFFIXES",
    "Described",
    "PackedFiles",
    "PackedOptions",
    "ReadOptions",
    "chosen",
    "describe_files",
    "find_packed",
    "is_frames",
    "open",
    "open_any",
    "open_source",
]
