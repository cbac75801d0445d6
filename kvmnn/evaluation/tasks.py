"""Evaluate tasks with one right answer under policies: accuracy with intervals (docs/lm.md)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from .._util.packages import get_version
from ..lm.documents import Document, TextOptions, read_documents
from ..lm.generation import check_positions
from ..lm.runner import Runner
from ..lm.tokenizer import Tokenizer
from ..lm.warm_start import read_model_interface
from ..reports.records import Refusal
from .measure import CellMeasurer, UnsupportedConfigurationError
from .runner import CellStore, EvaluationProgress, PathLike, drop_duplicates, hash_model
from .scoring import list_steps
from .settings import FULL_POLICY, Configuration, EvaluationSettings, PolicyLike, resolve_configurations
from .task_items import TaskItem, TaskTexts, draw_items
from .task_result import TaskEvaluation, TaskOptions, TaskRow, TaskScore

_TASKS_VERSION = 1
"""Raised whenever items are drawn or answered differently, so that stored answers are not reused."""

_TEXT_CONTEXTS = 16
"""Number of contexts in the part of a text that items are drawn from."""


def evaluate_tasks(
    model: PathLike,
    texts: PathLike | Document | Sequence[Document | PathLike],
    policies: PolicyLike | Sequence[PolicyLike] = (),
    budgets: int | str | Sequence[int | str] = (),
    *,
    tasks: TaskOptions | str = "all",
    settings: EvaluationSettings | None = None,
    tokenizer: PathLike | None = None,
    text_options: TextOptions | None = None,
    store: CellStore | PathLike | None = None,
    progress: EvaluationProgress | None = None,
) -> TaskEvaluation:
    """Ask a model questions about contexts that it read under every policy and budget, and with the full cache.

    The context is fed in the steps of the settings (`EvaluationSettings.chunk` and `prompt`) and cut after each, then
    the question; an answer is right if all of its tokens are the most probable ones in turn. With the full cache a
    context is read at once.

    Parameters
    ----------
    model, texts, policies, tokenizer, text_options
        As for `kvmnn.evaluation.evaluate`. Items are drawn from the beginnings of the texts.
    budgets
        Likewise; shares are of the tokens of a context.
    tasks
        `TaskOptions`, or their spec such as ``"copy,retrieval,items=40,tokens=1024"``.
    settings
        Settings of the measurement, and the seed of the items.
    store
        Where answers are taken from and put.
    progress
        Receives finished tokens and items.

    Raises
    ------
    OptionError
        For tasks that do not exist, and contexts of more tokens than the model has positions.
    KvmnnError
        For texts that are too short, and as `evaluate` does.
    """
    options = TaskOptions.parse(tasks) if isinstance(tasks, str) else tasks
    settings = settings or EvaluationSettings()
    configurations = [Configuration(FULL_POLICY), *resolve_configurations(policies, budgets, options.tokens)]
    entries = [texts] if isinstance(texts, Document | str | os.PathLike) else texts
    opened = Tokenizer.open_for_model(tokenizer or model)
    notes: list[str] = []
    documents = [entry for entry in entries if isinstance(entry, Document)]
    if paths := [entry for entry in entries if not isinstance(entry, Document)]:
        num_tokens = options.tokens * _TEXT_CONTEXTS
        documents += read_documents(paths, opened, num_tokens, text_options, notes=notes)
    task_texts = TaskTexts(documents, opened, options.tokens)
    items_by_task = {name: draw_items(name, task_texts, options.items, settings.seed) for name in options.names}
    interface = read_model_interface(model)
    max_tokens = max(len(item.context) + len(item.query) for items in items_by_task.values() for item in items)
    check_positions(
        interface.label, interface.max_positions, max_tokens, max(map(_count_answer, items_by_task.values()))
    )
    with ExitStack() as stack:
        measurer = stack.enter_context(closing(CellMeasurer(os.fspath(model), settings)))
        if not isinstance(store, CellStore):
            store = stack.enter_context(CellStore(store))
        run = _TaskRun(items_by_task, measurer, store, hash_model(model))
        return run.measure(drop_duplicates(configurations, notes), options, notes, progress)


def _count_answer(items: Sequence[TaskItem]) -> int:
    return max(len(item.answer) for item in items)


@dataclass
class _TaskRun:
    """Answers items under configurations."""

    items_by_task: Mapping[str, Sequence[TaskItem]]
    measurer: CellMeasurer
    store: CellStore
    model_sha256: str

    def measure(
        self,
        configurations: Sequence[Configuration],
        options: TaskOptions,
        notes: list[str],
        progress: EvaluationProgress | None,
    ) -> TaskEvaluation:
        items = [item for items in self.items_by_task.values() for item in items]
        if progress is not None:
            tokens = sum(len(item.context) + len(item.query) for item in items)
            progress.start(tokens * len(configurations), len(items) * len(configurations), 0)
        rows: list[TaskRow] = []
        refused: list[Refusal] = []
        full_answers: dict[str, list[bool]] = {}
        for configuration in configurations:
            try:
                answers, stored_shares = self._answer_all(configuration, progress)
            except UnsupportedConfigurationError as error:
                refused.append(Refusal(label=configuration.label, reason=str(error)))
                continue
            full_answers = full_answers or answers
            scores = [
                TaskScore.from_answers(task, self.items_by_task[task], answers[task], full_answers[task])
                for task in options.names
            ]
            rows.append(TaskRow(configuration=configuration, scores=tuple(scores), stored_share=fmean(stored_shares)))
        settings = self.measurer.settings
        return TaskEvaluation(
            kvmnn=get_version(),
            options=options,
            chunk=settings.chunk,
            prompt=settings.prompt,
            seed=settings.seed,
            rows=tuple(rows),
            notes=(*notes, *_build_notes(rows, options, settings)),
            refused=tuple(refused),
        )

    def _answer_all(
        self, configuration: Configuration, progress: EvaluationProgress | None
    ) -> tuple[dict[str, list[bool]], list[float]]:
        answers: dict[str, list[bool]] = {}
        stored_shares: list[float] = []
        for task, items in self.items_by_task.items():
            for item in items:
                key = self._compute_key(configuration, item)
                stored = self.store.get(key)
                if stored is None:
                    is_right, stored_share = self._answer(configuration, item)
                    stored = {"right": is_right, "kept": stored_share}
                    self.store.put(key, stored)
                entry: Any = stored
                answers.setdefault(task, []).append(bool(entry["right"]))
                stored_shares.append(float(entry["kept"]))
                if progress is not None:
                    progress.advance(len(item.context) + len(item.query), 1)
        return answers, stored_shares

    def _compute_key(self, configuration: Configuration, item: TaskItem) -> str:
        description = {
            "tasks": _TASKS_VERSION,
            "model": self.model_sha256,
            "configuration": configuration.identity,
            "item": item.digest,
            "settings": self.measurer.settings.select_cell_settings("score"),
        }
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    def _answer(self, configuration: Configuration, item: TaskItem) -> tuple[bool, float]:
        """Return whether an item is answered, and the share of its context that is left before the question."""
        runner = self._create_runner(configuration, item)
        settings, num_tokens = self.measurer.settings, len(item.context)
        chunk = settings.chunk if runner.policy.can_evict else num_tokens
        for begin, end in list_steps(num_tokens, chunk, settings.prompt if runner.policy.can_evict else 0):
            runner.step(item.context[begin:end], end_chunk=max(chunk, end - begin) > 1)
        stored_share = fmean(runner.cache.tokens) / num_tokens
        logits = runner.step(item.query, end_chunk=True)[-1]
        if item.choices:
            best = max(item.choices, key=lambda token: float(logits[token]))
            return best == item.answer[0], stored_share
        for token, following in zip(item.answer, [*item.answer[1:], None], strict=True):
            if int(logits.argmax()) != token:
                return False, stored_share
            if following is not None:
                logits = runner.step([token])[-1]
        return True, stored_share

    def _create_runner(self, configuration: Configuration, item: TaskItem) -> Runner:
        document = Document("item", np.asarray(item.context, np.int64), 0, item.digest)
        return self.measurer.create_runner(configuration, document)


def _build_notes(rows: Sequence[TaskRow], options: TaskOptions, settings: EvaluationSettings) -> Iterator[str]:
    steps_text = f"{settings.chunk:,} tokens at a time"
    steps_text = f"{settings.prompt:,} tokens at once, then {steps_text}" if settings.prompt else steps_text
    yield (
        f"A context of about {options.tokens:,} tokens is read first ({steps_text}), then the question; kept is what "
        "all layers hold then. An answer is right if every token of it is the most probable one; of a classification "
        "one of two labels is, by chance half of them."
    )
    if rows:
        weak = [score.task for score in rows[0].scores if score.low < (0.5 if score.task == "classification" else 0.2)]
        if weak:
            yield f"The full cache is not clearly above chance in {', '.join(weak)}: a drop there shows little."
    uncut = [row.configuration.label for row in rows[1:] if row.stored_share >= 1]
    if uncut:
        yield f"Nothing was evicted from the contexts by {', '.join(uncut[:4])}{' ...' if len(uncut) > 4 else ''}."
