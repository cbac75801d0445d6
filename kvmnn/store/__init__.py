"""The prefix store: K and V of any text, found again by the longest beginning that was ever put."""

from .portable import read_exported
from .prefix_store import PrefixStore
from .remote import OutageError
from .results import Cleaned, Entry, Exported, Listing, Matched, Pinned, Prefix, Put, Session, Stats, Verified
from .sources import Got, layers_of, token_ids_of, write_prefix

__all__ = [
    "Cleaned",
    "Entry",
    "Exported",
    "Got",
    "Listing",
    "Matched",
    "OutageError",
    "Pinned",
    "Prefix",
    "PrefixStore",
    "Put",
    "Session",
    "Stats",
    "Verified",
    "layers_of",
    "read_exported",
    "token_ids_of",
    "write_prefix",
]
