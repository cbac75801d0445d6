"""Work of an evaluation for one process: a configuration, some documents, and which cells of them are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...files.records import Record
from ...lm.documents import Document
from ..measuring.cell import AdvanceCallback, CellMeasurer, UnsupportedConfigurationError
from ..measuring.cells import Cell, CellKind, RefusedCell
from ..setup.configurations import Configuration


@dataclass(frozen=True)
class MissingCell(Record):
    """A cell to measure.

    Parameters
    ----------
    kind
        Of the cell.
    key
        Where it goes (`kvmnn.evaluation.running.cell_store`).
    document
        Which of the task's documents, by index.
    trace
        Whether its course is recorded.
    """

    kind: CellKind
    key: str
    document: int
    trace: bool = False


@dataclass(frozen=True)
class EvaluationTask:
    """Cells of one configuration, measured one after the other by one process."""

    configuration: Configuration
    documents: tuple[Document, ...]
    cells: tuple[MissingCell, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the cells that are counted for progress."""
        documents = [self.documents[cell.document] for cell in self.cells if cell.kind != "timing"]
        return sum(document.num_scored if self.configuration.begun else document.num_fed for document in documents)

    def get_kind(self, key: str) -> CellKind:
        """The kind of one of its cells."""
        return next(cell.kind for cell in self.cells if cell.key == key)

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
                    "requested_tokens": document.requested_tokens,
                    "scored_from": document.scored_from,
                }
                for document in self.documents
            ],
            "cells": [cell.to_dict() for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EvaluationTask:
        """A task from `to_dict`."""
        return cls(
            Configuration.from_dict(document["configuration"]),
            tuple(Document(**{**entry, "ids": np.array(entry["ids"], np.int64)}) for entry in document["documents"]),
            tuple(MissingCell.from_dict(entry) for entry in document["cells"]),
        )


def run_task(task: EvaluationTask, measurer: CellMeasurer, advance: AdvanceCallback) -> Iterator[tuple[str, Cell]]:
    """The task's cells with their keys, each as soon as it is finished.

    What the model cannot do by the definition of a project is a cell too, a `RefusedCell`.

    Raises
    ------
    RefusedError
        Where the model cannot run the configuration at all.
    """
    is_first = True
    for cell in task.cells:
        document = task.documents[cell.document]
        if cell.kind == "score":
            yield (
                cell.key,
                measurer.measure_score(
                    task.configuration, document, advance, record_trace=cell.trace, measure_memory=is_first
                ),
            )
            is_first = False
            continue
        result: Cell
        try:
            if cell.kind == "seed":
                result = measurer.measure_by_definition(task.configuration, document, advance)
            else:
                result = measurer.measure_timing(task.configuration, document)
        except UnsupportedConfigurationError as exc:
            result = RefusedCell(str(exc))
        yield cell.key, result
