"""A directory as the units of a store: finding and storing, and all that looks after them."""

from __future__ import annotations

from . import catalog, upkeep
from .directory import Directory
from .lookup import Text
from .results import Cleaned, Listing, Stats, Verified
from .space import Space
from .token_ids import Ids


class DirectoryUnits(Directory):
    """As `Units`; parameters and errors as `Directory`."""

    def delete(self, text: Text) -> Cleaned:
        """As `upkeep.delete`."""
        return upkeep.delete(self, text)

    def clean(self, max_bytes: int | None) -> Cleaned:
        """As `upkeep.clean`."""
        return upkeep.clean(self, max_bytes)

    def verify(self, threads: int | None) -> Verified:
        """As `upkeep.verify`."""
        return upkeep.verify(self, threads)

    def stats(self, asked: int, found: int) -> Stats:
        """As `catalog.stats`."""
        return catalog.stats(self, asked, found)

    def entries(self) -> Listing:
        """As `catalog.entries`."""
        return catalog.entries(self)

    def pin(self, space: Space, ids: Ids) -> bool:
        """As `catalog.pin`."""
        return catalog.pin(self, space, ids)

    def unpin(self, space: Space, ids: Ids) -> bool:
        """As `catalog.unpin`."""
        return catalog.unpin(self, space, ids)

    def note_session(self, name: str, space: Space, ids: Ids) -> None:
        """As `catalog.note_session`."""
        catalog.note_session(self, name, space, ids)

    def session(self, name: str) -> tuple[Space, Ids]:
        """As `catalog.session`."""
        return catalog.session(self, name)

    def sessions(self) -> list[str]:
        """As `catalog.sessions`."""
        return catalog.sessions(self)

    def forget_session(self, name: str) -> None:
        """As `catalog.forget_session`."""
        catalog.forget_session(self, name)
