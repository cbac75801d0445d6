"""The prefix store: K and V of any text, found again by the longest beginning that was ever put."""

from .portable import read_exported
from .prefix_store import PrefixStore
from .remote import BackendUnavailableError
from .results import (
    CleanupResult,
    MatchResult,
    PinResult,
    PutResult,
    StoredPrefix,
    StoreEntry,
    StoreExportResult,
    StoreListing,
    StoreSession,
    StoreStats,
    StoreVerifyResult,
)
from .sources import GetResult, read_layer_caches, resolve_token_ids, write_prefix

__all__ = [
    "BackendUnavailableError",
    "CleanupResult",
    "GetResult",
    "MatchResult",
    "PinResult",
    "PrefixStore",
    "PutResult",
    "StoreEntry",
    "StoreExportResult",
    "StoreListing",
    "StoreSession",
    "StoreStats",
    "StoreVerifyResult",
    "StoredPrefix",
    "read_exported",
    "read_layer_caches",
    "resolve_token_ids",
    "write_prefix",
]
