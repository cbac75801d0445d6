"""The prefix store: K and V of any text, found again by the longest beginning that was ever put."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .adapters import GetResult, read_layer_caches, resolve_token_ids, write_prefix
    from .backend import BackendUnavailableError
    from .encryption import StoreKey, load_key
    from .export import read_exported
    from .read_path import DamagedPrefixError
    from .results import (
        CleanupResult,
        LayerwisePrefix,
        MatchResult,
        PinResult,
        PutResult,
        StoreCopyResult,
        StoredPrefix,
        StoreEntry,
        StoreExportResult,
        StoreListing,
        StoreSession,
        StoreStats,
        StoreUsage,
        StoreVerifyResult,
    )
    from .store import PrefixStore
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "adapters": "GetResult read_layer_caches resolve_token_ids write_prefix",
            "backend": "BackendUnavailableError",
            "encryption": "StoreKey load_key",
            "export": "read_exported",
            "read_path": "DamagedPrefixError",
            "results": (
                "CleanupResult LayerwisePrefix MatchResult PinResult PutResult StoreCopyResult StoredPrefix StoreEntry "
                "StoreExportResult StoreListing StoreSession StoreStats StoreUsage StoreVerifyResult"
            ),
            "store": "PrefixStore",
        },
    )

__all__ = [
    "BackendUnavailableError",
    "CleanupResult",
    "DamagedPrefixError",
    "GetResult",
    "LayerwisePrefix",
    "MatchResult",
    "PinResult",
    "PrefixStore",
    "PutResult",
    "StoreCopyResult",
    "StoreEntry",
    "StoreExportResult",
    "StoreKey",
    "StoreListing",
    "StoreSession",
    "StoreStats",
    "StoreUsage",
    "StoreVerifyResult",
    "StoredPrefix",
    "load_key",
    "read_exported",
    "read_layer_caches",
    "resolve_token_ids",
    "write_prefix",
]
