"""The formats people have their caches in, one file each, read and written; ``mnn/`` has the engine's own files."""

from .array_formats import ARRAY_FORMATS, ArrayFormat, find_array_format
from .frames import TranscodeResult, transcode
from .hf.saved import describe_damage
from .hf.to_cache import to_cache
from .inspection import ArraysInfo, inspect
from .mnn.packed_files import PackedFiles
from .mnn.packed_reader import PackedCacheReader, find_packed, open_packed_files
from .options import EngineOptions, PackedOptions, ReadOptions
from .passthrough import RestoreFileResult, can_restore_file, restore_file, verify_file
from .registry import (
    classify_folder,
    classify_path,
    detect_engine_name,
    explain_not_frames,
    find_readable_entry,
    is_array_stream,
    is_frames,
    open,
)
from .restorer import RestoreResult, restore
from .rope_config import read_config_rotary
from .tensor_selection import select_from_source
from .writer import write_arrays
from .zarr import encode_store, has_zarr_suffix, inspect_store, is_zarr_store, restore_store, verify_store

__all__ = [
    "ARRAY_FORMATS",
    "ArrayFormat",
    "ArraysInfo",
    "EngineOptions",
    "PackedCacheReader",
    "PackedFiles",
    "PackedOptions",
    "ReadOptions",
    "RestoreFileResult",
    "RestoreResult",
    "TranscodeResult",
    "can_restore_file",
    "classify_folder",
    "classify_path",
    "describe_damage",
    "detect_engine_name",
    "encode_store",
    "explain_not_frames",
    "find_array_format",
    "find_packed",
    "find_readable_entry",
    "has_zarr_suffix",
    "inspect",
    "inspect_store",
    "is_array_stream",
    "is_frames",
    "is_zarr_store",
    "open",
    "open_packed_files",
    "read_config_rotary",
    "restore",
    "restore_file",
    "restore_store",
    "select_from_source",
    "to_cache",
    "transcode",
    "verify_file",
    "verify_store",
    "write_arrays",
]
