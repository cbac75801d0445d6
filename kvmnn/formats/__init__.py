"""Readers and writers of the file formats of KV caches, one module each; ``mnn/`` has MNN's own files."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .base import FileFormat, Format, PathFormat, has_format
    from .frames import TranscodeResult, transcode
    from .hf.saved import describe_damage
    from .hf.to_cache import to_cache
    from .inspection import ArraysInfo, inspect
    from .layer_streams.codecs import LayerStreamOptions
    from .mnn.packed_files import PackedFiles
    from .mnn.packed_reader import PackedCacheReader, find_packed, open_packed_files
    from .options import EngineOptions, PackedOptions, ReadOptions
    from .passthrough import can_restore_file, restore_file, verify_file
    from .registry import (
        FORMATS,
        classify_path,
        detect,
        detect_engine_name,
        explain_not_frames,
        find_readable_entry,
        find_restored_form,
        open,
        restore,
    )
    from .restorer import RestoreResult, restore_arrays
    from .rope_config import read_config_rotary
    from .tensor_selection import select_from_source
    from .writer import ARRAY_FORMATS, find_array_format, write_arrays
    from .zarr import ZARR, encode_store, has_zarr_suffix, inspect_store, restore_store, verify_store
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "base": "FileFormat Format PathFormat has_format",
            "frames": "TranscodeResult transcode",
            "hf.saved": "describe_damage",
            "hf.to_cache": "to_cache",
            "inspection": "ArraysInfo inspect",
            "layer_streams.codecs": "LayerStreamOptions",
            "mnn.packed_files": "PackedFiles",
            "mnn.packed_reader": "PackedCacheReader find_packed open_packed_files",
            "options": "EngineOptions PackedOptions ReadOptions",
            "passthrough": "can_restore_file restore_file verify_file",
            "registry": (
                "FORMATS classify_path detect detect_engine_name explain_not_frames find_readable_entry "
                "find_restored_form open restore"
            ),
            "restorer": "RestoreResult restore_arrays",
            "rope_config": "read_config_rotary",
            "tensor_selection": "select_from_source",
            "writer": "ARRAY_FORMATS find_array_format write_arrays",
            "zarr": "ZARR encode_store has_zarr_suffix inspect_store restore_store verify_store",
        },
    )

__all__ = [
    "ARRAY_FORMATS",
    "FORMATS",
    "ZARR",
    "ArraysInfo",
    "EngineOptions",
    "FileFormat",
    "Format",
    "LayerStreamOptions",
    "PackedCacheReader",
    "PackedFiles",
    "PackedOptions",
    "PathFormat",
    "ReadOptions",
    "RestoreResult",
    "TranscodeResult",
    "can_restore_file",
    "classify_path",
    "describe_damage",
    "detect",
    "detect_engine_name",
    "encode_store",
    "explain_not_frames",
    "find_array_format",
    "find_packed",
    "find_readable_entry",
    "find_restored_form",
    "has_format",
    "has_zarr_suffix",
    "inspect",
    "inspect_store",
    "open",
    "open_packed_files",
    "read_config_rotary",
    "restore",
    "restore_arrays",
    "restore_file",
    "restore_store",
    "select_from_source",
    "to_cache",
    "transcode",
    "verify_file",
    "verify_store",
    "write_arrays",
]
