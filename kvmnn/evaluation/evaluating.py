"""What eviction costs a language model: every configuration on every document, the same tokens in the same chunks.

Teacher-forced: the text itself is fed, whatever the model would have said, and the log-probability of each next token
is added up. The results document is what `kvmnn.reports.tables` and `kvmnn.reports.plots` take.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import KvmnnError
from ..lm.documents import Document
from ..lm.graph.model_files import OPERATED, find_model
from .planning import distinct, identity, plan
from .results import results
from .running.cell_store import CellStore
from .running.processes import events
from .setup.configurations import FULL, Configuration
from .setup.settings import Settings


class Progress(Protocol):
    """Who is told how far an evaluation is."""

    def start(self, tokens: int, cells: int) -> None:
        """So much is left to do."""

    def advance(self, tokens: int, cells: int) -> None:
        """So much more is done."""


def evaluate(
    model: str | os.PathLike[str],
    documents: Sequence[Document],
    configurations: Sequence[Configuration],
    settings: Settings,
    *,
    jobs: int = 1,
    store: CellStore | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure and compare; the full cache is always among what is compared, first.

    Parameters
    ----------
    model
        ONNX file or folder.
    documents
        At least one.
    configurations
        What is compared. The same one twice is measured once.
    settings
        How.
    jobs
        Processes at a time, a configuration in each; 0 measures in this process, which leaves `process_peak_bytes` out.
    store
        Where finished cells are taken from and put.
    progress
        Told of tokens and cells.

    Returns
    -------
    dict
        ``kvmnn``, ``model``, ``settings``, ``documents``, ``rows``, ``traces``, ``notes`` (sentences), ``refused``
        (``label`` and ``reason`` of configurations that the model cannot run; they have no row).

    Raises
    ------
    KvmnnError
        For models, texts and policies that cannot be used at all.
    """
    if not documents:
        raise KvmnnError("expected at least one text")
    wanted = [Configuration(FULL)] + [entry for entry in configurations if entry.label != FULL or entry.policy != FULL]
    wanted = distinct(wanted)
    digest = model_sha256(model)
    store = store if store is not None else CellStore()
    planned = plan(digest, wanted, documents, settings, store, jobs)
    if progress is not None:
        progress.start(sum(task.tokens for task in planned.tasks), sum(len(task.cells) for task in planned.tasks))
    refused: dict[str, str] = {}
    for event in events(planned.tasks, os.fspath(model), settings, jobs):
        if event.key is not None and event.cell is not None:
            store.put(event.key, event.cell)
        if event.refused is not None:
            refused[identity(event.task.configuration)] = event.refused
        if progress is not None:
            progress.advance(event.tokens, int(event.key is not None))
    return results(model, digest, wanted, documents, settings, planned, store, refused, jobs)


def model_sha256(model: str | os.PathLike[str]) -> str:
    """SHA-256 of the model's graph, and of the files of weights beside it that belong to it."""
    graph = find_model(model).graph
    digest = hashlib.sha256()
    beside = [
        path
        for path in sorted(graph.parent.iterdir())
        if path.name.startswith(graph.name) and path != graph and OPERATED not in path.name and path.is_file()
    ]
    for path in [graph, *beside]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
