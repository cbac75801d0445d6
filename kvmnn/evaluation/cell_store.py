"""Finished cells of an evaluation, kept in a file, so that an interrupted one goes on where it was.

A cell is one configuration on one document. The file is a journal (`kvmnn.files.journal`) of records ``{"key",
"value"}``. The key is a digest of everything that the cell's numbers depend on, so a cell of another model, text or
setting is never taken for this one; it is left in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

from ..files.journal import JournalFormat, KeyedJournal
from ..lm.documents import Document
from .records import CellKind
from .settings import Configuration, EvaluationSettings

NUMBERS_VERSION = 2
"""Raised whenever kvmnn computes any number of a cell differently, so that cells of before are not reused."""

_JOURNAL_FORMAT = JournalFormat(
    tag="kvmnn_cell",
    version=3,
    process_name="evaluation",
    entry_description="a cell of an evaluation",
    remedy="its cell is measured anew",
)


def compute_cell_key(
    kind: CellKind,
    model_sha256: str,
    configuration: Configuration,
    document: Document,
    settings: EvaluationSettings,
    extra: Mapping[str, object],
) -> str:
    """The digest under which a cell is stored."""
    description = {
        "numbers": NUMBERS_VERSION,
        "kind": kind,
        "model": model_sha256,
        "configuration": configuration.to_identity,
        "document": document.sha256,
        "ids": hashlib.sha256(document.ids.astype("<i8").tobytes()).hexdigest(),
        "settings": settings.select_relevant(kind),
        "extra": dict(extra),
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


class CellStore(KeyedJournal):
    """Cells as JSON objects by their keys, in memory and, where there is a path, in a file.

    Parameters
    ----------
    path
        File of cells; made where it is not there, continued where it is. None: memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(path, _JOURNAL_FORMAT)
