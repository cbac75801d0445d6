"""What reports read of an evaluation's results (`kvmnn.evaluation.EvaluationResult` has all of it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..files.records import Record
from .rows import ResultRow


@dataclass(frozen=True, kw_only=True)
class DocumentInfo(Record):
    """A document: its name, tokens scored, their UTF-8 bytes, and the SHA-256 of its file."""

    name: str
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class KeepMap(Record):
    """Which tokens of one KV head live.

    Attributes
    ----------
    steps : tuple of int
        Tokens seen at each sample.
    kept : tuple of tuple of int
        Positions in the text of the tokens that live then.
    """

    layer: int
    kv_head: int
    steps: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class KeptPositions(Record):
    """The tokens that a layer holds at the end of a text.

    Attributes
    ----------
    positions : tuple of tuple of int
        In the text: one list for all KV heads, or one for each where they hold different tokens.
    """

    layer: int
    positions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DocumentTrace(Record):
    """A document's course under one configuration: at each step the tokens seen, and the bytes that the cache holds.

    Attributes
    ----------
    kept : tuple of KeptPositions
        What each layer holds at the end: `kvmnn compact --plan` takes it.
    """

    label: str
    document: str
    step_tokens: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    keep_map: KeepMap | None = None
    kept: tuple[KeptPositions, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A configuration that the model cannot run."""

    label: str
    reason: str


class ModelProtocol(Protocol):
    """The model that was evaluated."""

    @property
    def name(self) -> str:
        """File or folder."""


class SettingsProtocol(Protocol):
    """How it was evaluated (`kvmnn.evaluation.Settings`)."""

    @property
    def chunk(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def deep_from(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def repeats(self) -> int: ...


class EvaluationResultsProtocol(Protocol):
    """What tables and plots are made of."""

    @property
    def kvmnn(self) -> str: ...
    @property
    def model(self) -> ModelProtocol: ...
    @property
    def settings(self) -> SettingsProtocol: ...
    @property
    def documents(self) -> Sequence[DocumentInfo]: ...
    @property
    def rows(self) -> Sequence[ResultRow]: ...
    @property
    def traces(self) -> Sequence[DocumentTrace]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def refused(self) -> Sequence[Refusal]: ...
