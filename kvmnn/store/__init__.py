"""The prefix store: K and V of any text, found again by the longest beginning that was ever put."""

from .prefix_store import PrefixStore
from .results import Cleaned, Entry, Prefix, Put, Session, Stats, Verified

__all__ = ["Cleaned", "Entry", "Prefix", "PrefixStore", "Put", "Session", "Stats", "Verified"]
