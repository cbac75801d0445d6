"""Files of the MNN engine: dumps, prefix caches, live cache files, model directories."""

from .compaction import Compacted, compact
from .compaction_plans import CompactionPlan, read_plans
from .describing import Described, describe_files
from .dump_restoring import RestoredDump, restore_dump
from .finding import describe_packed, find_packed
from .inspection import PackedInspection, inspect_packed
from .model import fingerprint
from .packed_dump import has_packed_dump
from .packed_files import PackedFiles
from .packing import pack, repack
from .prefix_writing import Packed
from .restoring import RestoredPrefix, is_prefix, origin_differences, restore_prefix
from .token_ids import load_token_ids, read_token_ids
from .unpacking import FORMS, Unpacked, unpack

__all__ = [
    "FORMS",
    "Compacted",
    "CompactionPlan",
    "Described",
    "Packed",
    "PackedFiles",
    "PackedInspection",
    "RestoredDump",
    "RestoredPrefix",
    "Unpacked",
    "compact",
    "describe_files",
    "describe_packed",
    "find_packed",
    "fingerprint",
    "has_packed_dump",
    "inspect_packed",
    "is_prefix",
    "load_token_ids",
    "origin_differences",
    "pack",
    "read_plans",
    "read_token_ids",
    "repack",
    "restore_dump",
    "restore_prefix",
    "unpack",
]
