"""Files of MNN: dumps, prefix caches, live cache files, model directories."""

from typing import TYPE_CHECKING

from ..._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .compaction import CompactionPlan, CompactResult, compact, read_compaction_plans
    from .dump import has_packed_dump, restore_dump
    from .inspection import PackedInspectionReport, inspect_packed
    from .model import compute_fingerprint
    from .packed_files import PackedFiles
    from .packed_reader import (
        PackedCacheReader,
        check_recorded_provenance,
        find_packed,
        open_packed,
        open_packed_files,
    )
    from .packer import pack, repack
    from .prefix_restorer import RestorePrefixResult, can_restore_prefix, list_provenance_mismatches, restore_prefix
    from .prefix_writer import PackResult
    from .token_ids import fingerprint_token_ids, load_token_ids
    from .unpacker import OUTPUT_FORMS, UnpackResult, unpack
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "compaction": "CompactionPlan CompactResult compact read_compaction_plans",
            "dump": "has_packed_dump restore_dump",
            "inspection": "PackedInspectionReport inspect_packed",
            "model": "compute_fingerprint",
            "packed_files": "PackedFiles",
            "packed_reader": "PackedCacheReader check_recorded_provenance find_packed open_packed open_packed_files",
            "packer": "pack repack",
            "prefix_restorer": "RestorePrefixResult can_restore_prefix list_provenance_mismatches restore_prefix",
            "prefix_writer": "PackResult",
            "token_ids": "fingerprint_token_ids load_token_ids",
            "unpacker": "OUTPUT_FORMS UnpackResult unpack",
        },
    )

__all__ = [
    "OUTPUT_FORMS",
    "CompactResult",
    "CompactionPlan",
    "PackResult",
    "PackedCacheReader",
    "PackedFiles",
    "PackedInspectionReport",
    "RestorePrefixResult",
    "UnpackResult",
    "can_restore_prefix",
    "check_recorded_provenance",
    "compact",
    "compute_fingerprint",
    "find_packed",
    "fingerprint_token_ids",
    "has_packed_dump",
    "inspect_packed",
    "list_provenance_mismatches",
    "load_token_ids",
    "open_packed",
    "open_packed_files",
    "pack",
    "read_compaction_plans",
    "repack",
    "restore_dump",
    "restore_prefix",
    "unpack",
]
