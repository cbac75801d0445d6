"""The results of an evaluation, put together from its cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import KvmnnError
from ..lm.documents import Document
from .measuring.memory import WHAT
from .measuring.timing import DECODED, PIECE
from .planning import Plan, identity
from .rows import LOSSLESS, Measured, make_row
from .running.cell_store import NUMBERS_VERSION, CellStore
from .setup.configurations import FULL, Configuration
from .setup.settings import Settings
from .statistics import LEVEL, RESAMPLES


def results(
    model: str | os.PathLike[str],
    digest: str,
    wanted: Sequence[Configuration],
    documents: Sequence[Document],
    settings: Settings,
    plan: Plan,
    store: CellStore,
    refused: dict[str, str],
    jobs: int,
) -> dict[str, Any]:
    from ..version import version

    measured: dict[int, Measured] = {}
    for number, entry in enumerate(wanted):
        if identity(entry) in refused:
            continue
        seeds = plan.seeds.get(number)
        timing = plan.timings.get(number)
        measured[number] = Measured(
            _found(store, plan.scores[number]),
            None if seeds is None else _found(store, seeds),
            None if timing is None else _found(store, [timing])[0],
        )
    full = measured[0].scores
    facts = dict(full[0]["model"])
    rows = [make_row(wanted[number], found, full, documents, settings) for number, found in measured.items()]
    return {
        "kvmnn": version(),
        "model": {"path": os.fspath(model), "name": Path(model).name, "sha256": digest, **facts},
        "settings": settings.to_dict()
        | {
            "jobs": jobs,
            "numbers_version": NUMBERS_VERSION,
            "bootstrap": {"resamples": RESAMPLES, "level": LEVEL, "over": "documents"},
            "process_peak": WHAT,
            "timing_prompt_piece": PIECE,
            "timing_decoded": DECODED,
        },
        "documents": [document.to_dict() for document in documents],
        "rows": rows,
        "traces": [
            {"label": wanted[number].label, "document": documents[0].name, **found.scores[0]["trace"]}
            for number, found in measured.items()
            if "trace" in found.scores[0]
        ],
        "notes": _notes(rows, documents, settings, facts)
        + [
            f"{wanted[number].label}: not timed: {found.timing['refused']}"
            for number, found in measured.items()
            if found.timing is not None and "refused" in found.timing
        ],
        "refused": [
            {"label": entry.label, "reason": refused[identity(entry)]} for entry in wanted if identity(entry) in refused
        ],
    }


def _found(store: CellStore, keys: Sequence[str]) -> list[dict[str, Any]]:
    cells = [store.get(key) for key in keys]
    if any(cell is None for cell in cells):
        raise KvmnnError("a cell of the evaluation was not measured: run it again with the same --resume file")
    return [cell for cell in cells if cell is not None]


def _notes(
    rows: Sequence[dict[str, Any]], documents: Sequence[Document], settings: Settings, facts: dict[str, Any]
) -> list[str]:
    """What a reader of the numbers must know."""
    notes = [
        f"{document.name} has only {document.tokens:,} tokens to score, {settings.tokens:,} were asked for: "
        "all of it was scored."
        for document in documents
        if document.tokens < settings.tokens
    ]
    shortest = min(document.tokens for document in documents)
    for row in rows:
        if row["policy"] != FULL and row["kind"] == LOSSLESS:
            fits = row["budget"] is not None and row["budget"] >= shortest
            why = f"a text of {shortest:,} tokens fits its budget" if fits else "it never had reason to"
            notes.append(f"{row['label']}: nothing was evicted: {why}.")
    if len(documents) == 1:
        notes.append("One document: there is no interval for the differences to the full cache.")
    limit = facts.get("max_positions")
    longest = max(len(document.ids) - 1 for document in documents)
    if limit is not None and longest > limit:
        notes.append(f"The texts reach position {longest - 1:,}; the model was made for {limit:,}.")
    return notes
