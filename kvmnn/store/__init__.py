"""The prefix store: K and V of any text, found again by the longest beginning that was ever put."""

from .adapters import GetResult, read_layer_caches, resolve_token_ids, write_prefix
from .export import read_exported
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
from .store import PrefixStore

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
