"""The formats people have their caches in, one file each, read and written; ``mnn/`` has the engine's own files."""

from .array_formats import ARRAY_FORMATS, ArrayFormat, array_format
from .engine_files import engine_kind
from .hf.saved import damage
from .hf.to_cache import to_cache
from .kept_restoring import RestoredFile, is_kept, restore_file, verify_file
from .listing import ArraysInfo, inspect
from .mnn.describing import Described, describe_files
from .mnn.finding import find_packed
from .mnn.packed_files import PackedFiles
from .opening import folder_kind, holds_arrays, is_frames, kind_of, not_a_frame, open, readable_within
from .options import EngineOptions, PackedOptions, ReadOptions
from .reading import chosen
from .restoring import Restored, restore
from .rotary_config import read_rotary
from .transcoding import Transcoded, transcode
from .writing import write_arrays
from .zarr import encode_store, inspect_store, is_named_zarr, is_store, restore_store, verify_store

__all__ = [
    "ARRAY_FORMATS",
    "ArrayFormat",
    "ArraysInfo",
    "Described",
    "EngineOptions",
    "PackedFiles",
    "PackedOptions",
    "ReadOptions",
    "Restored",
    "RestoredFile",
    "Transcoded",
    "array_format",
    "chosen",
    "damage",
    "describe_files",
    "encode_store",
    "engine_kind",
    "find_packed",
    "folder_kind",
    "holds_arrays",
    "inspect",
    "inspect_store",
    "is_frames",
    "is_kept",
    "is_named_zarr",
    "is_store",
    "kind_of",
    "not_a_frame",
    "open",
    "read_rotary",
    "readable_within",
    "restore",
    "restore_file",
    "restore_store",
    "to_cache",
    "transcode",
    "verify_file",
    "verify_store",
    "write_arrays",
]
