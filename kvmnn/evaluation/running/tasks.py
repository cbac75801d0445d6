"""Work of an evaluation for one process: a configuration, some documents, and which cells of them are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...lm.documents import Document
from ..measuring.cell import Advance, Measurer, RefusedError
from ..setup.configurations import Configuration


@dataclass(frozen=True)
class Cell:
    """A cell that is missing.

    Parameters
    ----------
    kind
        ``"score"``, ``"seed"`` or ``"timing"``.
    key
        Where its result goes (`kvmnn.evaluation.running.cell_store`).
    document
        Which of the task's documents, by index.
    trace
        Whether its course is recorded.
    """

    kind: str
    key: str
    document: int
    trace: bool = False


@dataclass(frozen=True)
class Task:
    """Cells of one configuration, measured one after the other by one process."""

    configuration: Configuration
    documents: tuple[Document, ...]
    cells: tuple[Cell, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the cells that are counted for progress."""
        return sum(self.documents[cell.document].tokens for cell in self.cells if cell.kind != "timing")

    def to_dict(self) -> dict[str, Any]:
        """As it is handed to a process; `from_dict` is the way back."""
        return {
            "configuration": self.configuration.to_dict(),
            "documents": [
                {
                    "name": document.name,
                    "ids": document.ids.tolist(),
                    "nbytes": document.nbytes,
                    "sha256": document.sha256,
                    "begins_with_bos": document.begins_with_bos,
                    "asked": document.asked,
                }
                for document in self.documents
            ],
            "cells": [vars(cell) for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Task:
        """A task from `to_dict`."""
        return cls(
            Configuration.from_dict(document["configuration"]),
            tuple(Document(**{**entry, "ids": np.array(entry["ids"], np.int64)}) for entry in document["documents"]),
            tuple(Cell(**entry) for entry in document["cells"]),
        )


def carry_out(task: Task, measurer: Measurer, advance: Advance) -> Iterator[tuple[str, dict[str, Any]]]:
    """The task's cells with their keys, each as soon as it is finished.

    What the model cannot do as the seed did is a cell too, ``{"refused": reason}``.

    Raises
    ------
    RefusedError
        Where the model cannot run the configuration at all.
    """
    first = True
    for cell in task.cells:
        document = task.documents[cell.document]
        if cell.kind == "score":
            found = measurer.score(task.configuration, document, advance, trace=cell.trace, first=first)
            first = False
        else:
            try:
                if cell.kind == "seed":
                    found = measurer.seed(task.configuration, document, advance)
                else:
                    found = measurer.timing(task.configuration, document)
            except RefusedError as exc:
                found = {"refused": str(exc)}
        yield cell.key, found
