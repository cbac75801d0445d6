"""Another engine as the units of a store: finding and storing, and all that looks after them."""

from __future__ import annotations

from ..lookup import Text
from ..results import Cleaned, Listing, Stats, Verified
from ..space import Space
from ..token_ids import Ids
from . import bounding, sessions, upkeep
from .shelf import Shelf


class RemoteUnits(Shelf):
    """As `Units`; parameters and errors as `Shelf`."""

    def delete(self, text: Text) -> Cleaned:
        """As `upkeep.delete`."""
        self.check_writable()
        return upkeep.delete(self, text)

    def clean(self, max_bytes: int | None) -> Cleaned:
        """As `upkeep.clean`."""
        self.check_writable()
        return upkeep.clean(self, max_bytes)

    def verify(self, threads: int | None) -> Verified:
        """As `upkeep.verify`."""
        return upkeep.verify(self, threads)

    def stats(self, asked: int, found: int) -> Stats:
        """As `upkeep.stats`."""
        return upkeep.stats(self, asked, found)

    def entries(self) -> Listing:
        """As `upkeep.entries`."""
        return upkeep.entries(self)

    def pin(self, space: Space, ids: Ids) -> bool:
        """As `bounding.pin`."""
        self.check_writable()
        return bounding.pin(self, space, ids)

    def unpin(self, space: Space, ids: Ids) -> bool:
        """As `bounding.unpin`."""
        self.check_writable()
        return bounding.unpin(self, space, ids)

    def note_session(self, name: str, space: Space, ids: Ids) -> None:
        """Keep the text of a session under its name."""
        self.check_writable()
        sessions.note(self.values, name, space, ids)

    def session(self, name: str) -> tuple[Space, Ids]:
        """Space and text of a session."""
        return sessions.found(self.values, name)

    def sessions(self) -> list[str]:
        """All names."""
        return sessions.names(self.values)

    def forget_session(self, name: str) -> None:
        """Forget a session."""
        self.check_writable()
        sessions.forget(self.values, name)
