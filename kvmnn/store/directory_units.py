"""A directory as the units of a store: finding and storing, and all that looks after them."""

from __future__ import annotations

from . import catalog, upkeep
from .directory import DirectoryBackendBase
from .lookup import TokenSequence
from .results import CleanupResult, StoreListing, StoreStats, StoreVerifyResult
from .space import Namespace
from .token_ids import Ids


class DirectoryBackend(DirectoryBackendBase):
    """As `StoreBackend`; parameters and errors as `DirectoryBackendBase`."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """As `upkeep.delete`."""
        return upkeep.delete_sequence(self, sequence)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """As `upkeep.clean`."""
        return upkeep.collect_garbage(self, max_bytes)

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """As `upkeep.verify`."""
        return upkeep.verify_units(self, threads)

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        """As `catalog.stats`."""
        return catalog.collect_stats(self, requested_tokens, hit_tokens)

    def list_entries(self) -> StoreListing:
        """As `catalog.entries`."""
        return catalog.list_entries(self)

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `catalog.pin`."""
        return catalog.pin(self, namespace, ids)

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `catalog.unpin`."""
        return catalog.unpin(self, namespace, ids)

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """As `catalog.note_session`."""
        catalog.save_session(self, name, namespace, ids)

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """As `catalog.session`."""
        return catalog.get_session(self, name)

    def list_sessions(self) -> list[str]:
        """As `catalog.sessions`."""
        return catalog.list_sessions(self)

    def delete_session(self, name: str) -> None:
        """As `catalog.forget_session`."""
        catalog.delete_session(self, name)
