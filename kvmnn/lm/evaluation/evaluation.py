"""What eviction costs a language model: every configuration on every document, the same tokens in the same chunks.

Teacher-forced: the text itself is fed, whatever the model would have said, and the log-probability of each next token
is added up. The results document is what `kvmnn.lm.reports.report` and `kvmnn.lm.reports.plots` take.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...errors import KvmnnError
from ..graph.model_files import OPERATED, find_model
from .cells import NUMBERS_VERSION, CellStore, cell_key
from .configurations import FULL, Configuration
from .documents import Document
from .memory import WHAT
from .processes import events
from .rows import LOSSLESS, Measured, make_row
from .settings import Settings
from .statistics import LEVEL, RESAMPLES
from .tasks import Cell, Task
from .timing import DECODED, PIECE


class Progress(Protocol):
    """Who is told how far an evaluation is."""

    def start(self, tokens: int, cells: int) -> None:
        """So much is left to do."""

    def advance(self, tokens: int, cells: int) -> None:
        """So much more is done."""


@dataclass
class Plan:
    """Which cells an evaluation consists of, by their keys."""

    tasks: list[Task] = field(default_factory=list)
    scores: dict[int, list[str]] = field(default_factory=dict)
    seeds: dict[int, list[str]] = field(default_factory=dict)
    timings: dict[int, str] = field(default_factory=dict)


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
    wanted = _distinct(wanted)
    digest = model_sha256(model)
    store = store if store is not None else CellStore()
    plan = _plan(digest, wanted, documents, settings, store, jobs)
    if progress is not None:
        progress.start(sum(task.tokens for task in plan.tasks), sum(len(task.cells) for task in plan.tasks))
    refused: dict[str, str] = {}
    for event in events(plan.tasks, os.fspath(model), settings, jobs):
        if event.key is not None and event.cell is not None:
            store.put(event.key, event.cell)
        if event.refused is not None:
            refused[_identity(event.task.configuration)] = event.refused
        if progress is not None:
            progress.advance(event.tokens, int(event.key is not None))
    return _results(model, digest, wanted, documents, settings, plan, store, refused, jobs)


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


# -- planning ---------------------------------------------------------------------------------------------------------


def _distinct(wanted: Sequence[Configuration]) -> list[Configuration]:
    """Each once; labels that mean different things are told apart."""
    found: dict[tuple[str, str], Configuration] = {}
    for entry in wanted:
        found.setdefault((entry.label + "\0" + str(entry.preset), _identity(entry)), entry)
    taken: set[str] = set()
    named = []
    for entry in found.values():
        label, number = entry.label, 1
        if label in taken and entry.preset is not None:
            label = f"{entry.label} ({entry.preset})"
        while label in taken:
            number += 1
            label = f"{entry.label} ({number})"
        taken.add(label)
        named.append(
            Configuration(label, entry.policy, entry.options, entry.preset, entry.seed_method, entry.positions)
        )
    return named


def _identity(configuration: Configuration) -> str:
    return json.dumps(configuration.identity, sort_keys=True)


def _plan(
    digest: str,
    wanted: Sequence[Configuration],
    documents: Sequence[Document],
    settings: Settings,
    store: CellStore,
    jobs: int,
) -> Plan:
    """Keys of all cells, and tasks for those that are missing."""
    plan = Plan()
    planned: set[str] = set()
    groups: dict[str, list[int]] = {}
    for number, entry in enumerate(wanted):
        groups.setdefault(_identity(entry), []).append(number)
    parts = max(1, jobs // len(groups))
    for numbers in groups.values():
        speed = settings.as_seed and any(
            method is not None and method.speed for method in (wanted[number].seed_method for number in numbers)
        )
        numbers.sort(key=lambda number: not _has_speed(wanted[number]))
        for number in numbers:
            missing = _cells(plan, number, wanted[number], digest, documents, settings, speed)
            todo = [cell for cell in missing if cell.key not in planned and store.get(cell.key) is None]
            planned.update(cell.key for cell in todo)
            plan.tasks += _tasks(wanted[number], documents, todo, parts)
    return plan


def _cells(
    plan: Plan,
    number: int,
    entry: Configuration,
    digest: str,
    documents: Sequence[Document],
    settings: Settings,
    speed: bool,
) -> list[Cell]:
    """All cells of one configuration; their keys go into the plan."""
    cells = []
    for index, document in enumerate(documents):
        trace = settings.traces and index == 0
        key = cell_key("score", digest, entry, document, settings, {"trace": trace})
        cells.append(Cell("score", key, index, trace))
    plan.scores[number] = [cell.key for cell in cells]
    if settings.timing:
        key = cell_key("timing", digest, entry, documents[0], settings, {"as_seed": speed})
        plan.timings[number] = key
        cells.append(Cell("timing", key, 0))
    if settings.as_seed and entry.seed_method is not None:
        how = {"evaluation": entry.seed_method.evaluation, "chunk": entry.seed_method.chunk}
        keys = [cell_key("seed", digest, entry, document, settings, how) for document in documents]
        plan.seeds[number] = keys
        cells += [Cell("seed", key, index) for index, key in enumerate(keys)]
    return cells


def _tasks(entry: Configuration, documents: Sequence[Document], cells: Sequence[Cell], parts: int) -> list[Task]:
    """The cells as tasks: one, or where there are more processes than configurations one for each share of them."""
    size = -(-len(documents) // min(parts, len(documents)))
    found = []
    for begin in range(0, len(documents), size):
        mine = tuple(
            Cell(cell.kind, cell.key, cell.document - begin, cell.trace)
            for cell in cells
            if begin <= cell.document < begin + size
        )
        if mine:
            found.append(Task(entry, tuple(documents[begin : begin + size]), mine))
    return found


def _has_speed(entry: Configuration) -> bool:
    return entry.seed_method is not None and entry.seed_method.speed


# -- results ----------------------------------------------------------------------------------------------------------


def _results(
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
    from ... import __version__

    measured: dict[int, Measured] = {}
    for number, entry in enumerate(wanted):
        if _identity(entry) in refused:
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
        "kvmnn": __version__,
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
            {"label": entry.label, "reason": refused[_identity(entry)]}
            for entry in wanted
            if _identity(entry) in refused
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
