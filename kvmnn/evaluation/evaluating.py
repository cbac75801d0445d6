"""What eviction costs a language model: every configuration on every document, the same tokens in the same chunks.

Teacher-forced: the text itself is fed, whatever the model would have said, and the log-probability of each next token
is added up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..arrays.source import Source
from ..errors import KvmnnError, OptionError
from ..lm.documents import Document, Ids, TextOptions, read_documents
from ..lm.graph.model_files import OPERATED, find_model
from ..lm.start import Start, model_interface, read_start
from ..lm.tokenizer import Tokenizer
from ..store import PrefixStore
from .assembling import Evaluation
from .planning import EvaluationPlan, distinct, identity, plan
from .result import EvaluationResult
from .running.cell_store import CellStore
from .running.processes import events
from .setup.configurations import FULL, Compared, Configuration, compared
from .setup.settings import Settings
from .start_order import settle_order
from .starting import begun_configurations, begun_documents, check_settings

Path = str | os.PathLike[str]


class EvaluationProgress(Protocol):
    """Who is told how far an evaluation is."""

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """How much there is to do, and how many cells were there already."""

    def advance(self, tokens: int, cells: int) -> None:
        """How much more is done."""


def evaluate(
    model: Path,
    texts: Path | Document | Sequence[Document | Path],
    policies: Compared | Sequence[Compared] = (),
    budgets: int | str | Sequence[int | str] = (),
    *,
    settings: Settings | None = None,
    tokenizer: Path | None = None,
    text_options: TextOptions | None = None,
    jobs: int = 1,
    store: CellStore | Path | None = None,
    progress: EvaluationProgress | None = None,
    start: Path | Source | Start | object | None = None,
    token_ids: Sequence[int] | Ids | None = None,
) -> EvaluationResult:
    """Run a model over texts under every policy and budget, and compare with the full cache, always the first row.

    With a `start` every other row goes on from K and V that were computed elsewhere, and only the tokens behind them
    are scored, of the first row as well.

    Parameters
    ----------
    model
        ONNX file or folder.
    texts
        Files and folders as `kvmnn.lm.documents.read_documents` takes them, or documents that were read before. At
        least one. Texts of the same tokens count once.
    policies
        What is compared: specs as the command takes them (``"streaming"``, ``"l2_fixed:recent_ratio=0.5"``), with every
        budget, which holds in every layer unless ``skip_layers`` is said; policies, as they are; configurations
        (`kvmnn.evaluation.preset` makes those of the projects). The same one twice is measured once; none: the full
        cache alone.
    budgets
        Tokens kept in each layer, or shares of the tokens scored such as ``"25%"``, for specs.
    settings
        How it is measured.
    tokenizer
        ``tokenizer.json`` for texts that are files; by default the one beside the model.
    text_options
        Which texts are taken of files and folders; all by default.
    jobs
        Processes at a time, a configuration in each; 0 measures in this process, which leaves `process_peak_bytes` out.
    store
        Where finished cells are taken from and put: a store or its file.
    progress
        Told of tokens and cells.
    start
        A cache that texts begin with: anything that `kvmnn.open` takes or gives, or what `kvmnn.lm.read_start` made of
        it. Nothing is timed then.
    token_ids
        Of the text that the start stands for, where it does not say them.

    Returns
    -------
    EvaluationResult
        Typed rows; ``.table()``, ``.to_csv()`` and ``.plot(directory)`` show them.

    Raises
    ------
    OptionError
        For layers to skip that the model does not have, texts of more tokens than it has positions, and budgets that no
        policy takes; with a start for presets, a prefix store, a cache of another model, texts that do not begin with
        its tokens, or end with them, and K or V in an order that is not the model's (`read_start`'s `undo`).
    SourceError
        For a start whose K or V are no roundings of the model's own in any order.
    KvmnnError
        For models, texts, budgets and policies that cannot be used at all. A configuration that the model cannot run is
        named in `EvaluationResult.refused`.
    """
    settings = settings or Settings()
    if token_ids is not None and (start is None or isinstance(start, Start)):
        raise OptionError("token_ids are those of a start that is read: expected a start that is a cache")
    configurations = compared(policies, budgets, settings.tokens)
    wanted = [Configuration(FULL), *(entry for entry in configurations if (entry.label, entry.policy) != (FULL, FULL))]
    with ExitStack() as stack:
        notes: list[str] = []
        last_notes: list[str] = []
        documents = [texts] if isinstance(texts, Document | str | os.PathLike) else texts
        begun = None
        if start is not None:
            check_settings(settings, configurations)
            settings = replace(settings, timing=False)
            made = start if isinstance(start, Start) else read_start(start, model_interface(model), token_ids)
            begun = made if made is start else stack.enter_context(made)
            wanted = begun_configurations(begun, configurations)
        read = _documents(model, documents, tokenizer, settings.tokens, text_options, notes, last_notes)
        _check(model, wanted, read)
        if begun is not None:
            read = begun_documents(begun, read, tokenizer or model)
            settled = settle_order(begun, model, read[0].ids, settings)
            begun = begun if settled is begun else stack.enter_context(settled)
        if settings.prefix_store is not None:  # one that cannot be used is better known now
            PrefixStore(settings.prefix_store).close()
        if not isinstance(store, CellStore):
            store = stack.enter_context(CellStore(store))
        evaluation = Evaluation(
            model=os.fspath(model),
            sha256=model_sha256(model),
            wanted=distinct(wanted),
            documents=read,
            settings=settings,
            jobs=jobs,
            text_notes=tuple(notes),
            last_notes=tuple(last_notes),
            start=begun,
        )
        known = None if begun is None else begun.sha256
        planned = plan(evaluation.sha256, evaluation.wanted, read, settings, store, jobs, known)
        refused = _carry_out(planned, evaluation, store, progress)
        return evaluation.result(planned, store, refused)


def _check(path: Path, wanted: Sequence[Configuration], documents: Sequence[Document]) -> None:
    """Refuse, before anything is measured, what the model's size makes senseless."""
    model = model_interface(path)
    for entry in wanted:
        entry.make().check_layers(model.layers)
    longest = max(documents, key=lambda document: document.fed)
    if model.max_positions is not None and longest.fed > model.max_positions:
        raise OptionError(
            f"{longest.name}: {longest.fed:,} tokens are to be scored, {model.label} was made for "
            f"{model.max_positions:,} positions: expected at most --tokens {model.max_positions}"
        )


def model_sha256(model: Path) -> str:
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


def _documents(
    model: Path,
    documents: Sequence[Document | Path],
    tokenizer: Path | None,
    tokens: int,
    options: TextOptions | None,
    notes: list[str],
    last_notes: list[str],
) -> Sequence[Document]:
    read = [entry for entry in documents if isinstance(entry, Document)]
    paths = [entry for entry in documents if not isinstance(entry, Document)]
    if paths:
        find_model(model)  # a model that is not there is the better message
        opened = Tokenizer.open(tokenizer or model)
        found = read_documents(paths, opened, tokens, options, notes=notes)
        note = opened.start.note(len(found), sum(document.has_own_bos for document in found))
        last_notes += [] if note is None else [note]
        read += found
    if not read:
        raise KvmnnError("expected at least one text")
    return _each_once(read, notes)


def _each_once(documents: Sequence[Document], notes: list[str]) -> list[Document]:
    """Documents without those that have the tokens of another: counted twice they would make intervals too narrow."""
    found: dict[bytes, Document] = {}
    again = []
    for document in documents:
        first = found.setdefault(np.ascontiguousarray(document.ids, np.int64).tobytes(), document)
        if first is not document:
            again.append(f"{document.name} those of {first.name}")
    if again:
        more = f" and {len(again) - _NAMED:,} more" if len(again) > _NAMED else ""
        one = "1 text has" if len(again) == 1 else f"{len(again):,} texts have"
        notes.append(
            f"{one} the same tokens as others before, counted once: {', '.join(again[:_NAMED])}{more}. An interval is "
            "over different texts."
        )
    return list(found.values())


_NAMED = 5
"""Texts that a note names."""


def _carry_out(
    planned: EvaluationPlan, evaluation: Evaluation, store: CellStore, progress: EvaluationProgress | None
) -> dict[str, str]:
    """Measure the missing cells; the reasons of refused configurations, by their identity."""
    if progress is not None:
        cells = sum(len(task.cells) for task in planned.tasks)
        progress.start(sum(task.tokens for task in planned.tasks), cells, planned.cells - cells)
    refused: dict[str, str] = {}
    start = None if evaluation.start is None else str(evaluation.start.directory)
    for event in events(planned.tasks, evaluation.model, evaluation.settings, evaluation.jobs, start):
        if event.key is not None and event.cell is not None:
            store.put(event.key, event.cell.to_dict())
        if event.refused is not None:
            refused[identity(event.task.configuration)] = event.refused
        if progress is not None:
            progress.advance(event.tokens, int(event.key is not None))
    return refused
