"""What a store is built on: units that are found, read, taken in and looked after, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from ..dtypes import Bytes
from .lookup import Found, StatePlace, Text
from .prefix_state import PrefixState
from .results import Cleaned, Listing, Stats, Verified
from .space import Space
from .table_sets import KeptTables, TableSets
from .token_ids import Ids
from .updates import NewUnit


class Added(NamedTuple):
    """What became of new units: bytes that the store holds more, and bytes that had to go for them."""

    stored_bytes: int
    removed_bytes: int


class Staging(Protocol):
    """Where the bytes of new units lie until they are taken in."""

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path | bytes:
        """Keep the bytes of a unit; where, or the bytes themselves."""


class Units(Protocol):
    """The units of a store; every call may raise `KvmnnError`, and `OutageError` past one machine."""

    label: str
    read_only: bool
    notes: list[str]
    tables: KeptTables

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def codec(self) -> str:
        """What new units are made of, ``"dense"`` or ``"frames"``."""

    def spaces(self) -> list[Space]:
        """All spaces."""

    def keep_space(self, space: Space) -> None:
        """Note a space down that has units, if it is noted down no more."""

    def has_texts(self, space: Space) -> bool:
        """Whether anything of a space is stored."""

    def find(self, text: Text) -> Found:
        """The longest stored beginning of a text."""

    def read(self, units: Sequence[int]) -> list[Bytes | None]:
        """The bytes of units; None for those that are not there."""

    def at_hand(self, unit: int) -> Bytes | None:
        """The bytes of a unit where nothing has to be asked for them."""

    def stage(self) -> AbstractContextManager[Staging]:
        """A place for new units."""

    def add(self, space: Space, text: Text, new: Sequence[NewUnit], tables: TableSets | None) -> Added:
        """Take in units of a text, in order, and the tables that some of them need."""

    def keep_bound(self) -> int:
        """Remove what is above the bound, if there is one: bytes."""

    def find_state(self, text: Text, tokens: int) -> StatePlace | None:
        """The state of the longest beginning of at most `tokens` tokens that has one."""

    def add_state(self, space: Space, text: Text, state: PrefixState) -> Added:
        """Take in the state of a text, whose units are stored.

        Raises
        ------
        ParentGoneError
            Where they are not there any more.
        """

    def touch(self, units: Iterable[int]) -> None:
        """Units were used."""

    def discard(self, unit: int, reason: str, notes: list[str]) -> object:
        """Remove a unit that is not what it should be, and say so; it is not found again."""

    def delete(self, text: Text) -> Cleaned:
        """Remove what only this text needs."""

    def clean(self, max_bytes: int | None) -> Cleaned:
        """Remove what nothing refers to, and what has to go for `max_bytes`."""

    def verify(self, threads: int | None) -> Verified:
        """Read, decode and compare every unit."""

    def stats(self, asked: int, found: int) -> Stats:
        """Counts of everything."""

    def entries(self) -> Listing:
        """The stored texts."""

    def pin(self, space: Space, ids: Ids) -> bool:
        """Keep a text whatever the bound; whether it was not kept before."""

    def unpin(self, space: Space, ids: Ids) -> bool:
        """Keep it no longer; whether it was."""

    def note_session(self, name: str, space: Space, ids: Ids) -> None:
        """Keep the text of a session under its name."""

    def session(self, name: str) -> tuple[Space, Ids]:
        """Space and text of a session."""

    def sessions(self) -> list[str]:
        """All names."""

    def forget_session(self, name: str) -> None:
        """Forget a session."""

    def check_open(self) -> None:
        """`KvmnnError` for a store that was closed."""

    def close(self) -> None:
        """Let go of everything; twice does nothing."""
