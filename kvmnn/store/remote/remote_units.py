"""Another engine as the units of a store: finding and storing, and all that looks after them."""

from __future__ import annotations

from ..lookup import TokenSequence
from ..results import CleanupResult, StoreListing, StoreStats, StoreVerifyResult
from ..space import Namespace
from ..token_ids import Ids
from . import bounding, sessions, upkeep
from .shelf import RemoteBackendBase


class RemoteBackend(RemoteBackendBase):
    """As `StoreBackend`; parameters and errors as `RemoteBackendBase`."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """As `upkeep.delete`."""
        self.check_writable()
        return upkeep.delete_sequence(self, sequence)

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """As `upkeep.clean`."""
        self.check_writable()
        return upkeep.collect_garbage(self, max_bytes)

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """As `upkeep.verify`."""
        return upkeep.verify_units(self, threads)

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        """As `upkeep.stats`."""
        return upkeep.collect_stats(self, requested_tokens, hit_tokens)

    def list_entries(self) -> StoreListing:
        """As `upkeep.entries`."""
        return upkeep.list_entries(self)

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `bounding.pin`."""
        self.check_writable()
        return bounding.pin(self, namespace, ids)

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """As `bounding.unpin`."""
        self.check_writable()
        return bounding.unpin(self, namespace, ids)

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """Keep the text of a session under its name."""
        self.check_writable()
        sessions.save_session(self.key_values, name, namespace, ids)

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """Space and text of a session."""
        return sessions.read_session(self.key_values, name)

    def list_sessions(self) -> list[str]:
        """All names."""
        return sessions.list_session_names(self.key_values)

    def delete_session(self, name: str) -> None:
        """Forget a session."""
        self.check_writable()
        sessions.delete_session(self.key_values, name)
