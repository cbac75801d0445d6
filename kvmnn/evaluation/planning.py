"""Which cells an evaluation needs, and which of them are there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..lm.documents import Document
from .running.cell_store import CellStore, compute_cell_key
from .running.tasks import EvaluationTask, MissingCell
from .setup.configurations import Configuration
from .setup.settings import EvaluationSettings


@dataclass
class EvaluationPlan:
    """The cells of an evaluation by their keys, for each configuration by its index; and tasks for the missing ones."""

    tasks: list[EvaluationTask] = field(default_factory=list)
    score_keys: dict[int, list[str]] = field(default_factory=dict)
    project_keys: dict[int, list[str]] = field(default_factory=dict)
    timing_keys: dict[int, str] = field(default_factory=dict)

    @property
    def num_cells(self) -> int:
        """How many cells there are, those that are there already included."""
        lists = (*self.score_keys.values(), *self.project_keys.values(), self.timing_keys.values())
        return len({key for keys in lists for key in keys})


def drop_duplicates(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Each once; labels that mean different things are told apart."""
    unique: dict[tuple[str, str], Configuration] = {}
    for entry in configurations:
        unique.setdefault((entry.label + "\0" + str(entry.preset), get_identity_key(entry)), entry)
    used_labels: set[str] = set()
    labelled = []
    for entry in unique.values():
        label, number = entry.label, 1
        if label in used_labels and entry.preset is not None:
            label = f"{entry.label} ({entry.preset})"
        while label in used_labels:
            number += 1
            label = f"{entry.label} ({number})"
        used_labels.add(label)
        labelled.append(replace(entry, label=label))
    return labelled


def get_identity_key(configuration: Configuration) -> str:
    return json.dumps(configuration.to_identity, sort_keys=True)


def plan_evaluation(
    digest: str,
    configurations: Sequence[Configuration],
    documents: Sequence[Document],
    settings: EvaluationSettings,
    store: CellStore,
    jobs: int,
    start: str | None = None,
) -> EvaluationPlan:
    """Keys of all cells, and tasks for those that are missing; `start` is the SHA-256 of what texts begin with."""
    evaluation_plan = EvaluationPlan()
    planned_keys: set[str] = set()
    groups: dict[str, list[int]] = {}
    for number, entry in enumerate(configurations):
        groups.setdefault(get_identity_key(entry), []).append(number)
    tasks_per_configuration = max(1, jobs // len(groups))
    for numbers in groups.values():
        times_project = settings.project_definitions and any(_has_speed(configurations[number]) for number in numbers)
        numbers.sort(key=lambda number: not _has_speed(configurations[number]))
        for number in numbers:
            cells = _list_cells(
                evaluation_plan, number, configurations[number], digest, documents, settings, times_project, start
            )
            missing_cells = [cell for cell in cells if cell.key not in planned_keys and store.get(cell.key) is None]
            planned_keys.update(cell.key for cell in missing_cells)
            evaluation_plan.tasks += _split_tasks(
                configurations[number], documents, missing_cells, tasks_per_configuration
            )
    return evaluation_plan


def _list_cells(
    evaluation_plan: EvaluationPlan,
    number: int,
    configuration: Configuration,
    digest: str,
    documents: Sequence[Document],
    settings: EvaluationSettings,
    times_project: bool,
    start: str | None,
) -> list[MissingCell]:
    """All cells of one configuration; their keys go into the plan."""
    cells = []
    for index, document in enumerate(documents):
        trace = settings.traces and index == 0
        start_settings = {} if start is None else {"start": start, "begin": document.scored_from}
        key = compute_cell_key("score", digest, configuration, document, settings, {"trace": trace, **start_settings})
        cells.append(MissingCell("score", key, index, trace))
    evaluation_plan.score_keys[number] = [cell.key for cell in cells]
    if settings.timing:
        key = compute_cell_key(
            "timing", digest, configuration, documents[0], settings, {"as_seed": times_project, "attention": True}
        )
        evaluation_plan.timing_keys[number] = key
        cells.append(MissingCell("timing", key, 0))
    if settings.project_definitions and configuration.definition is not None:
        definition_settings = {
            "evaluation": configuration.definition.evaluation,
            "chunk": configuration.definition.chunk,
        }
        keys = [
            compute_cell_key("seed", digest, configuration, document, settings, definition_settings)
            for document in documents
        ]
        evaluation_plan.project_keys[number] = keys
        cells += [MissingCell("seed", key, index) for index, key in enumerate(keys)]
    return cells


def _split_tasks(
    configuration: Configuration, documents: Sequence[Document], cells: Sequence[MissingCell], max_tasks: int
) -> list[EvaluationTask]:
    """The cells as tasks: one, or where there are more processes than configurations one for each share of them."""
    documents_per_task = -(-len(documents) // min(max_tasks, len(documents)))
    tasks = []
    for begin in range(0, len(documents), documents_per_task):
        task_cells = tuple(
            MissingCell(cell.kind, cell.key, cell.document - begin, cell.trace)
            for cell in cells
            if begin <= cell.document < begin + documents_per_task
        )
        if task_cells:
            tasks.append(
                EvaluationTask(configuration, tuple(documents[begin : begin + documents_per_task]), task_cells)
            )
    return tasks


def _has_speed(entry: Configuration) -> bool:
    return entry.definition is not None and entry.definition.speed
