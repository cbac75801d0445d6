"""What a store is built on: units that are found, read, taken in and looked after, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from ..dtypes import Bytes
from .directory.index_updates import NewUnit
from .lookup import PrefixMatch, StateLocation, TokenSequence
from .namespace import Ids, Namespace
from .results import CleanupResult, StoreListing, StoreStats, StoreVerifyResult
from .unit import TableSetCache, TableSets
from .unit_codec import PrefixState


class AddResult(NamedTuple):
    """What became of new units: bytes that the store holds more, and bytes that had to go for them."""

    stored_bytes: int
    removed_bytes: int


class Staging(Protocol):
    """Where the bytes of new units lie until they are taken in."""

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path | bytes:
        """Keep the bytes of a unit; where, or the bytes themselves."""


class StoreBackend(Protocol):
    """The units of a store; every call may raise `KvmnnError`, and `BackendUnavailableError` past one machine."""

    label: str
    read_only: bool
    notes: list[str]
    tables: TableSetCache

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def codec(self) -> str:
        """What new units are made of, ``"dense"`` or ``"frames"``."""

    def list_namespaces(self) -> list[Namespace]:
        """All spaces."""

    def ensure_namespace(self, namespace: Namespace) -> None:
        """Note a space down that has units, if it is noted down no more."""

    def has_sequences(self, namespace: Namespace) -> bool:
        """Whether anything of a space is stored."""

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest stored beginning of a text."""

    def read_units(self, units: Sequence[int]) -> list[Bytes | None]:
        """The bytes of units; None for those that are not there."""

    def get_cached(self, unit: int) -> Bytes | None:
        """The bytes of a unit where nothing has to be asked for them."""

    def stage(self) -> AbstractContextManager[Staging]:
        """A place for new units."""

    def add_units(
        self, namespace: Namespace, sequence: TokenSequence, new: Sequence[NewUnit], tables: TableSets | None
    ) -> AddResult:
        """Take in units of a text, in order, and the tables that some of them need."""

    def enforce_limit(self) -> int:
        """Remove what is above the bound, if there is one: bytes."""

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """The state of the longest beginning of at most `tokens` tokens that has one."""

    def add_state(self, namespace: Namespace, sequence: TokenSequence, state: PrefixState) -> AddResult:
        """Take in the state of a text, whose units are stored.

        Raises
        ------
        ParentGoneError
            Where they are not there any more.
        """

    def touch(self, units: Iterable[int]) -> None:
        """Units were used."""

    def quarantine(self, unit: int, reason: str, notes: list[str]) -> object:
        """Remove a unit that is not what it should be, and say so; it is not found again."""

    def delete(self, sequence: TokenSequence) -> CleanupResult:
        """Remove what only this text needs."""

    def collect_garbage(self, max_bytes: int | None) -> CleanupResult:
        """Remove what nothing refers to, and what has to go for `max_bytes`."""

    def verify(self, threads: int | None) -> StoreVerifyResult:
        """Read, decode and compare every unit."""

    def collect_stats(self, requested_tokens: int, hit_tokens: int) -> StoreStats:
        """Counts of everything."""

    def list_entries(self) -> StoreListing:
        """The stored texts."""

    def pin(self, namespace: Namespace, ids: Ids) -> bool:
        """Keep a text whatever the bound; whether it was not kept before."""

    def unpin(self, namespace: Namespace, ids: Ids) -> bool:
        """Keep it no longer; whether it was."""

    def save_session(self, name: str, namespace: Namespace, ids: Ids) -> None:
        """Keep the text of a session under its name."""

    def get_session(self, name: str) -> tuple[Namespace, Ids]:
        """Space and text of a session."""

    def list_sessions(self) -> list[str]:
        """All names."""

    def delete_session(self, name: str) -> None:
        """Forget a session."""

    def check_open(self) -> None:
        """`KvmnnError` for a store that was closed."""

    def close(self) -> None:
        """Let go of everything; twice does nothing."""
