"""The formats people have their caches in, one file each, read and written; ``mnn/`` has the engine's own files."""

from .mnn.describing import Described, describe_files
from .mnn.packed_files import PackedFiles
from .opening import ARRAY_FORMATS, ArrayFormat, array_format, find_packed, is_frames, kind_of, open
from .options import PackedOptions, ReadOptions
from .reading import chosen

__all__ = [
    "ARRAY_FORMATS",
    "ArrayFormat",
    "Described",
    "PackedFiles",
    "PackedOptions",
    "ReadOptions",
    "array_format",
    "chosen",
    "describe_files",
    "find_packed",
    "is_frames",
    "kind_of",
    "open",
]
