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
from ..lm.graph.model_files import CACHED_GRAPH_MARK, find_model
from ..lm.start import InitialCache, read_initial_cache, read_model_interface
from ..lm.tokenizer import Tokenizer
from ..store import PrefixStore
from .assembling import EvaluationRun
from .planning import EvaluationPlan, drop_duplicates, get_identity_key, plan_evaluation
from .result import EvaluationResult
from .running.cell_store import CellStore
from .running.processes import run_tasks
from .setup.configurations import FULL_POLICY, Configuration, PolicyLike, resolve_configurations
from .setup.settings import EvaluationSettings
from .start_order import match_layout
from .starting import build_start_configurations, check_start_settings, trim_documents

PathLike = str | os.PathLike[str]


class EvaluationProgress(Protocol):
    """Who is told how far an evaluation is."""

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """How much there is to do, and how many cells were there already."""

    def advance(self, tokens: int, cells: int) -> None:
        """How much more is done."""


def evaluate(
    model: PathLike,
    texts: PathLike | Document | Sequence[Document | PathLike],
    policies: PolicyLike | Sequence[PolicyLike] = (),
    budgets: int | str | Sequence[int | str] = (),
    *,
    settings: EvaluationSettings | None = None,
    tokenizer: PathLike | None = None,
    text_options: TextOptions | None = None,
    jobs: int = 1,
    store: CellStore | PathLike | None = None,
    progress: EvaluationProgress | None = None,
    initial_source: PathLike | Source | InitialCache | object | None = None,
    token_ids: Sequence[int] | Ids | None = None,
) -> EvaluationResult:
    """Run a model over texts under every policy and budget, and compare with the full cache, always the first row.

    With a `initial_source` every other row goes on from K and V that were computed elsewhere, and only the tokens
    behind them are scored, of the first row as well.

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
    initial_source
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
        its tokens, or end with them, and K or V in an order that is not the model's (`read_initial_cache`'s `invert`).
    SourceError
        For a start whose K or V are no roundings of the model's own in any order.
    KvmnnError
        For models, texts, budgets and policies that cannot be used at all. A configuration that the model cannot run is
        named in `EvaluationResult.refused`.
    """
    settings = settings or EvaluationSettings()
    if token_ids is not None and (initial_source is None or isinstance(initial_source, InitialCache)):
        raise OptionError("token_ids are those of a start that is read: expected a start that is a cache")
    policy_configurations = resolve_configurations(policies, budgets, settings.tokens)
    configurations = [
        Configuration(FULL_POLICY),
        *(entry for entry in policy_configurations if (entry.label, entry.policy) != (FULL_POLICY, FULL_POLICY)),
    ]
    with ExitStack() as stack:
        notes: list[str] = []
        bos_notes: list[str] = []
        documents = [texts] if isinstance(texts, Document | str | os.PathLike) else texts
        initial_cache = None
        if initial_source is not None:
            check_start_settings(settings, policy_configurations)
            settings = replace(settings, timing=False)
            loaded_cache = (
                initial_source
                if isinstance(initial_source, InitialCache)
                else read_initial_cache(initial_source, read_model_interface(model), token_ids)
            )
            initial_cache = loaded_cache if loaded_cache is initial_source else stack.enter_context(loaded_cache)
            configurations = build_start_configurations(initial_cache, policy_configurations)
        loaded_documents = _load_documents(model, documents, tokenizer, settings.tokens, text_options, notes, bos_notes)
        _check_model_limits(model, configurations, loaded_documents)
        if initial_cache is not None:
            loaded_documents = trim_documents(initial_cache, loaded_documents, tokenizer or model)
            oriented_cache = match_layout(initial_cache, model, loaded_documents[0].ids, settings)
            initial_cache = initial_cache if oriented_cache is initial_cache else stack.enter_context(oriented_cache)
        if settings.prefix_store is not None:  # one that cannot be used is better known now
            PrefixStore(settings.prefix_store).close()
        if not isinstance(store, CellStore):
            store = stack.enter_context(CellStore(store))
        evaluation = EvaluationRun(
            model=os.fspath(model),
            sha256=hash_model(model),
            configurations=drop_duplicates(configurations),
            documents=loaded_documents,
            settings=settings,
            jobs=jobs,
            text_notes=tuple(notes),
            bos_notes=tuple(bos_notes),
            start=initial_cache,
        )
        start_sha256 = None if initial_cache is None else initial_cache.sha256
        cell_plan = plan_evaluation(
            evaluation.sha256, evaluation.configurations, loaded_documents, settings, store, jobs, start_sha256
        )
        refusal_reasons = _run_plan(cell_plan, evaluation, store, progress)
        return evaluation.to_result(cell_plan, store, refusal_reasons)


def _check_model_limits(path: PathLike, configurations: Sequence[Configuration], documents: Sequence[Document]) -> None:
    """Refuse, before anything is measured, what the model's size makes senseless."""
    model = read_model_interface(path)
    for entry in configurations:
        entry.create_policy().check_layers(model.layers)
    longest_document = max(documents, key=lambda document: document.num_fed)
    if model.max_positions is not None and longest_document.num_fed > model.max_positions:
        raise OptionError(
            f"{longest_document.name}: {longest_document.num_fed:,} tokens are to be scored, {model.label} was made "
            f"for "
            f"{model.max_positions:,} positions: expected at most --tokens {model.max_positions}"
        )


def hash_model(model: PathLike) -> str:
    """SHA-256 of the model's graph, and of the files of weights beside it that belong to it."""
    graph = find_model(model).graph
    digest = hashlib.sha256()
    weight_files = [
        path
        for path in sorted(graph.parent.iterdir())
        if path.name.startswith(graph.name) and path != graph and CACHED_GRAPH_MARK not in path.name and path.is_file()
    ]
    for path in [graph, *weight_files]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _load_documents(
    model: PathLike,
    documents: Sequence[Document | PathLike],
    tokenizer: PathLike | None,
    tokens: int,
    options: TextOptions | None,
    notes: list[str],
    bos_notes: list[str],
) -> Sequence[Document]:
    loaded = [entry for entry in documents if isinstance(entry, Document)]
    paths = [entry for entry in documents if not isinstance(entry, Document)]
    if paths:
        find_model(model)  # a model that is not there is the better message
        tokenizer_instance = Tokenizer.open_for_model(tokenizer or model)
        file_documents = read_documents(paths, tokenizer_instance, tokens, options, notes=notes)
        note = tokenizer_instance.bos_info.format_note(
            len(file_documents), sum(document.has_own_bos for document in file_documents)
        )
        bos_notes += [] if note is None else [note]
        loaded += file_documents
    if not loaded:
        raise KvmnnError("expected at least one text")
    return _drop_duplicates(loaded, notes)


def _drop_duplicates(documents: Sequence[Document], notes: list[str]) -> list[Document]:
    """Documents without those that have the tokens of another: counted twice they would make intervals too narrow."""
    unique: dict[bytes, Document] = {}
    duplicates = []
    for document in documents:
        original = unique.setdefault(np.ascontiguousarray(document.ids, np.int64).tobytes(), document)
        if original is not document:
            duplicates.append(f"{document.name} those of {original.name}")
    if duplicates:
        more_text = (
            f" and {len(duplicates) - _MAX_NAMED_DUPLICATES:,} more" if len(duplicates) > _MAX_NAMED_DUPLICATES else ""
        )
        subject = "1 text has" if len(duplicates) == 1 else f"{len(duplicates):,} texts have"
        notes.append(
            f"{subject} the same tokens as others before, counted once: "
            f"{', '.join(duplicates[:_MAX_NAMED_DUPLICATES])}{more_text}. An interval is "
            "over different texts."
        )
    return list(unique.values())


_MAX_NAMED_DUPLICATES = 5
"""Texts that a note names."""


def _run_plan(
    cell_plan: EvaluationPlan, evaluation: EvaluationRun, store: CellStore, progress: EvaluationProgress | None
) -> dict[str, str]:
    """Measure the missing cells; the reasons of refused configurations, by their identity."""
    if progress is not None:
        cells = sum(len(task.cells) for task in cell_plan.tasks)
        progress.start(sum(task.num_tokens for task in cell_plan.tasks), cells, cell_plan.num_cells - cells)
    refusal_reasons: dict[str, str] = {}
    start = None if evaluation.start is None else str(evaluation.start.directory)
    for event in run_tasks(cell_plan.tasks, evaluation.model, evaluation.settings, evaluation.jobs, start):
        if event.key is not None and event.cell is not None:
            store.put(event.key, event.cell.to_dict())
        if event.refusal_reason is not None:
            refusal_reasons[get_identity_key(event.task.configuration)] = event.refusal_reason
        if progress is not None:
            progress.advance(event.tokens, int(event.key is not None))
    return refusal_reasons
