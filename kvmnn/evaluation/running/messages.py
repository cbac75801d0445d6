"""What a process that measures says: JSON lines on its standard output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...files.records import Record


@dataclass(frozen=True, kw_only=True)
class WorkerMessage(Record):
    """A line of a worker.

    Attributes
    ----------
    tokens : int or None
        Fed since the last line.
    key, cell : str, mapping
        A cell that is finished.
    refused : str or None
        Why the model cannot run the configuration; the last line.
    error, message : str
        Class and text of what was raised; the last line.
    """

    tokens: int | None = field(default=None, metadata={"omit": True})
    key: str | None = field(default=None, metadata={"omit": True})
    cell: Mapping[str, object] | None = field(default=None, metadata={"omit": True})
    refused: str | None = field(default=None, metadata={"omit": True})
    error: str | None = field(default=None, metadata={"omit": True})
    message: str = field(default="", metadata={"omit": True})
