"""Which cells an evaluation needs, and which of them are there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..lm.documents import Document
from .running.cell_store import CellStore, cell_key
from .running.tasks import MissingCell, Task
from .setup.configurations import Configuration
from .setup.settings import Settings


@dataclass
class EvaluationPlan:
    """The cells of an evaluation by their keys, for each configuration by its index; and tasks for the missing ones."""

    tasks: list[Task] = field(default_factory=list)
    scores: dict[int, list[str]] = field(default_factory=dict)
    by_definition: dict[int, list[str]] = field(default_factory=dict)
    timings: dict[int, str] = field(default_factory=dict)

    @property
    def cells(self) -> int:
        """How many cells there are, those that are there already included."""
        lists = (*self.scores.values(), *self.by_definition.values(), self.timings.values())
        return len({key for keys in lists for key in keys})


def distinct(wanted: Sequence[Configuration]) -> list[Configuration]:
    """Each once; labels that mean different things are told apart."""
    found: dict[tuple[str, str], Configuration] = {}
    for entry in wanted:
        found.setdefault((entry.label + "\0" + str(entry.preset), identity(entry)), entry)
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
        named.append(replace(entry, label=label))
    return named


def identity(configuration: Configuration) -> str:
    return json.dumps(configuration.identity, sort_keys=True)


def plan(
    digest: str,
    wanted: Sequence[Configuration],
    documents: Sequence[Document],
    settings: Settings,
    store: CellStore,
    jobs: int,
    start: str | None = None,
) -> EvaluationPlan:
    """Keys of all cells, and tasks for those that are missing; `start` is the SHA-256 of what texts begin with."""
    plan = EvaluationPlan()
    planned: set[str] = set()
    groups: dict[str, list[int]] = {}
    for number, entry in enumerate(wanted):
        groups.setdefault(identity(entry), []).append(number)
    parts = max(1, jobs // len(groups))
    for numbers in groups.values():
        speed = settings.project_definitions and any(_has_speed(wanted[number]) for number in numbers)
        numbers.sort(key=lambda number: not _has_speed(wanted[number]))
        for number in numbers:
            missing = _cells(plan, number, wanted[number], digest, documents, settings, speed, start)
            todo = [cell for cell in missing if cell.key not in planned and store.get(cell.key) is None]
            planned.update(cell.key for cell in todo)
            plan.tasks += _tasks(wanted[number], documents, todo, parts)
    return plan


def _cells(
    plan: EvaluationPlan,
    number: int,
    entry: Configuration,
    digest: str,
    documents: Sequence[Document],
    settings: Settings,
    speed: bool,
    start: str | None,
) -> list[MissingCell]:
    """All cells of one configuration; their keys go into the plan."""
    cells = []
    for index, document in enumerate(documents):
        trace = settings.traces and index == 0
        begun = {} if start is None else {"start": start, "begin": document.begin}
        key = cell_key("score", digest, entry, document, settings, {"trace": trace, **begun})
        cells.append(MissingCell("score", key, index, trace))
    plan.scores[number] = [cell.key for cell in cells]
    if settings.timing:
        key = cell_key("timing", digest, entry, documents[0], settings, {"as_seed": speed, "attention": True})
        plan.timings[number] = key
        cells.append(MissingCell("timing", key, 0))
    if settings.project_definitions and entry.definition is not None:
        how = {"evaluation": entry.definition.evaluation, "chunk": entry.definition.chunk}
        keys = [cell_key("seed", digest, entry, document, settings, how) for document in documents]
        plan.by_definition[number] = keys
        cells += [MissingCell("seed", key, index) for index, key in enumerate(keys)]
    return cells


def _tasks(entry: Configuration, documents: Sequence[Document], cells: Sequence[MissingCell], parts: int) -> list[Task]:
    """The cells as tasks: one, or where there are more processes than configurations one for each share of them."""
    size = -(-len(documents) // min(parts, len(documents)))
    found = []
    for begin in range(0, len(documents), size):
        mine = tuple(
            MissingCell(cell.kind, cell.key, cell.document - begin, cell.trace)
            for cell in cells
            if begin <= cell.document < begin + size
        )
        if mine:
            found.append(Task(entry, tuple(documents[begin : begin + size]), mine))
    return found


def _has_speed(entry: Configuration) -> bool:
    return entry.definition is not None and entry.definition.speed
