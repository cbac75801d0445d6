"""Evaluate eviction: run every configuration on every document, on the same tokens in the same chunks.

Scoring is teacher-forced: the text is fed, and the log-probability of each next token is summed.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

from .._util.dataclass import dataclass
from .._util.packages import get_version
from .._util.text import pluralize
from ..arrays.source import Source
from ..errors import KvmnnError, OptionError
from ..files.journal import JournalFormat, KeyedJournal
from ..files.urls import redact_url
from ..lm.documents import Document, Ids, TextOptions, read_documents
from ..lm.importer.import_result import describe_weights
from ..lm.kv_store import LosslessStore
from ..lm.onnx.model_files import CACHED_GRAPH_MARK, find_model
from ..lm.tokenizer import Tokenizer
from ..lm.warm_start import InitialCache, read_initial_cache, read_model_interface
from ..quantization import CacheShape, create_codec
from ..reports.records import UNCUT_LABEL, DocumentInfo, DocumentTrace, EvaluatedModelInfo, ModelInfo, Refusal
from ..store import PrefixStore, load_key
from .initial_cache import (
    build_start_configurations,
    build_start_info,
    check_start_settings,
    format_start_notes,
    match_layout,
    trim_documents,
)
from .measure import PEAK_DESCRIPTION
from .notes import build_notes, group_by_reason
from .records import CellKind, RefusedCell, TimingCell, read_cell
from .result import BootstrapInfo, EvaluationResult, EvaluationSettingsInfo
from .row_builder import ConfigurationCells, build_row
from .scoring import CONFIDENCE_LEVEL, NUM_RESAMPLES
from .settings import (
    FULL_POLICY,
    Configuration,
    EvaluationSettings,
    PolicyLike,
    build_configuration,
    combine_codecs,
    resolve_configurations,
)
from .timing import MAX_DECODED_TOKENS, PROMPT_CHUNK_TOKENS
from .workers import EvaluationTask, MissingCell, run_tasks

NUMBERS_VERSION = 10
"""Raised whenever kvmnn computes any number of a cell differently, so that cells of before are not reused."""

_JOURNAL_FORMAT = JournalFormat(
    tag="kvmnn_cell",
    version=3,
    process_name="evaluation",
    entry_description="a cell of an evaluation",
    remedy="its cell is measured again",
)


def compute_cell_key(
    kind: CellKind,
    model_sha256: str,
    configuration: Configuration,
    document: Document,
    settings: EvaluationSettings,
    extra: Mapping[str, object],
) -> str:
    """Compute the digest under which a cell is stored."""
    description = {
        "numbers": NUMBERS_VERSION,
        "kind": kind,
        "model": model_sha256,
        "configuration": configuration.identity,
        "document": document.sha256,
        "ids": hashlib.sha256(document.ids.astype("<i8").tobytes()).hexdigest(),
        "settings": settings.select_cell_settings(kind),
        "extra": dict(extra),
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


class CellStore(KeyedJournal):
    """Cells as JSON objects by key, in memory and, if there is a path, in a file.

    Parameters
    ----------
    path
        File of cells; made where it is not there, continued where it is. None: memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(path, _JOURNAL_FORMAT)


@dataclass
class EvaluationPlan:
    """The keys of an evaluation's cells by index of the configuration, and the tasks that compute the missing cells."""

    tasks: list[EvaluationTask] = field(default_factory=list)
    score_keys: dict[int, list[str]] = field(default_factory=dict)
    project_keys: dict[int, list[str]] = field(default_factory=dict)
    timing_keys: dict[int, str] = field(default_factory=dict)
    #: Whether any task compares distributions with those of the full cache.
    needs_references: bool = False

    @property
    def num_cells(self) -> int:
        """Number of cells, those that are stored already included."""
        lists = (*self.score_keys.values(), *self.project_keys.values(), self.timing_keys.values())
        return len({key for keys in lists for key in keys})


def drop_duplicates(configurations: Sequence[Configuration], notes: list[str]) -> list[Configuration]:
    """Drop repeated configurations, with a note, and make the labels of different ones distinct."""
    unique: dict[tuple[str, str], Configuration] = {}
    repeated_labels: dict[str, None] = {}
    for entry in configurations:
        key = (entry.label + "\0" + str(entry.preset), get_identity_key(entry))
        if key in unique:
            repeated_labels[entry.label] = None
        unique.setdefault(key, entry)
    if repeated_labels:
        notes.append(
            f"Specified more than once, as a number and as a share of the tokens can be, and measured once: "
            f"{'; '.join(repeated_labels)}."
        )
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
    return json.dumps(configuration.identity, sort_keys=True)


def plan_evaluation(
    digest: str,
    configurations: Sequence[Configuration],
    documents: Sequence[Document],
    settings: EvaluationSettings,
    store: CellStore,
    jobs: int,
    start: str | None = None,
) -> EvaluationPlan:
    """Plan all cells, and tasks for the missing ones; `start` is the SHA-256 of the initial cache."""
    evaluation_plan = EvaluationPlan()
    planned_keys: set[str] = set()
    groups: dict[str, list[int]] = {}
    for number, entry in enumerate(configurations):
        groups.setdefault(get_identity_key(entry), []).append(number)
    tasks_per_configuration = max(1, jobs // len(groups))
    for numbers in groups.values():
        is_baseline = configurations[numbers[0]].is_baseline
        times_project = settings.project_definitions and any(_has_speed(configurations[number]) for number in numbers)
        numbers.sort(key=lambda number: not _has_speed(configurations[number]))
        for number in numbers:
            cells = _list_cells(
                evaluation_plan, number, configurations[number], digest, documents, settings, times_project, start
            )
            missing_cells = [cell for cell in cells if cell.key not in planned_keys and store.get(cell.key) is None]
            planned_keys.update(cell.key for cell in missing_cells)
            max_tasks = jobs if is_baseline and len(groups) > 1 else tasks_per_configuration
            evaluation_plan.tasks += _split_tasks(configurations[number], documents, missing_cells, max(1, max_tasks))
    _plan_references(evaluation_plan, configurations, documents, jobs)
    return evaluation_plan


def _plan_references(
    evaluation_plan: EvaluationPlan, configurations: Sequence[Configuration], documents: Sequence[Document], jobs: int
) -> None:
    """Let tasks wait for the full cache's distributions on their documents, and plan what writes those.

    Documents are scored by the full cache again where its cells are known already, as its distributions are not kept.
    """
    number = next((number for number, entry in enumerate(configurations) if entry.is_baseline), None)
    if number is None:
        return
    baseline = configurations[number]
    keys = dict(zip((id(document) for document in documents), evaluation_plan.score_keys[number], strict=True))
    needed_keys, planned_keys = set[str](), set[str]()
    tasks = []
    for task in evaluation_plan.tasks:
        scored = frozenset(keys[id(task.documents[cell.document])] for cell in task.cells if cell.kind == "score")
        if task.configuration.is_baseline:
            planned_keys |= scored
        else:
            needed_keys |= scored
            task = replace(task, required_keys=scored)
        tasks.append(task)
    evaluation_plan.needs_references = bool(needed_keys)
    cells = [
        MissingCell("reference", key, index)
        for index, key in enumerate(evaluation_plan.score_keys[number])
        if key in needed_keys - planned_keys
    ]
    evaluation_plan.tasks = _split_tasks(baseline, documents, cells, max(1, jobs)) + tasks


def _list_cells(
    evaluation_plan: EvaluationPlan,
    configuration_index: int,
    configuration: Configuration,
    digest: str,
    documents: Sequence[Document],
    settings: EvaluationSettings,
    times_project: bool,
    start: str | None,
) -> list[MissingCell]:
    """List all cells of one configuration; add their keys to the plan."""
    cells = []
    for index, document in enumerate(documents):
        trace = settings.traces and index == 0
        start_settings = {} if start is None else {"start": start, "begin": document.scored_from}
        key = compute_cell_key("score", digest, configuration, document, settings, {"trace": trace, **start_settings})
        cells.append(MissingCell("score", key, index, trace))
    evaluation_plan.score_keys[configuration_index] = [cell.key for cell in cells]
    if settings.timing:
        key = compute_cell_key(
            "timing", digest, configuration, documents[0], settings, {"as_seed": times_project, "attention": True}
        )
        evaluation_plan.timing_keys[configuration_index] = key
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
        evaluation_plan.project_keys[configuration_index] = keys
        cells += [MissingCell("seed", key, index) for index, key in enumerate(keys)]
    return cells


def _split_tasks(
    configuration: Configuration, documents: Sequence[Document], cells: Sequence[MissingCell], max_tasks: int
) -> list[EvaluationTask]:
    """Split cells into tasks: one, or more if there are more processes than configurations."""
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


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """What is evaluated: the model and its digest, the configurations (the full cache first), the documents,
    what was left out of their files (`text_notes`) and what was put before them (`bos_notes`)."""

    model: str
    sha256: str
    configurations: Sequence[Configuration]
    documents: Sequence[Document]
    settings: EvaluationSettings
    jobs: int
    text_notes: tuple[str, ...] = ()
    bos_notes: tuple[str, ...] = ()
    start: InitialCache | None = None

    def to_result(self, plan: EvaluationPlan, store: CellStore, refusal_reasons: Mapping[str, str]) -> EvaluationResult:
        """Build the result, once every cell of the plan is in the store."""
        cells_by_index = {
            number: _read_cells(plan, store, number)
            for number, entry in enumerate(self.configurations)
            if get_identity_key(entry) not in refusal_reasons
        }
        full_cells = cells_by_index[0].score_cells
        rows = [
            build_row(
                self.configurations[number],
                cells,
                full_cells,
                self.documents,
                self.settings,
                self._get_start_name(number),
            )
            for number, cells in cells_by_index.items()
        ]
        start_info = None if self.start is None else build_start_info(self.start, full_cells[0])
        return EvaluationResult(
            kvmnn=get_version(),
            model=self._build_model_info(full_cells[0].model),
            settings=self._describe_settings(),
            documents=tuple(
                DocumentInfo(name=text.name, tokens=text.num_scored, bytes=text.nbytes, sha256=text.sha256)
                for text in self.documents
            ),
            rows=tuple(rows),
            traces=tuple(self._iter_traces(cells_by_index)),
            start=start_info,
            notes=(
                *self.text_notes,
                *(
                    format_start_notes(start_info, self.start.notes)
                    if start_info is not None and self.start is not None
                    else ()
                ),
                *build_notes(rows, self.documents, self.settings),
                *self._describe_missing_timings(cells_by_index),
                *self._describe_store_use(cells_by_index),
                *self.bos_notes,
            ),
            refused=tuple(
                Refusal(
                    label=entry.label,
                    reason=refusal_reasons[get_identity_key(entry)].removeprefix(f"{entry.label}: "),
                )
                for entry in self.configurations
                if get_identity_key(entry) in refusal_reasons
            ),
        )

    def _get_start_name(self, configuration_index: int) -> str | None:
        uses_start = self.configurations[configuration_index].uses_initial_cache
        return self.start.name if self.start is not None and uses_start else None

    def _build_model_info(self, model_info: ModelInfo) -> EvaluatedModelInfo:
        files = find_model(self.model)
        return EvaluatedModelInfo(
            path=self.model,
            name=Path(self.model).name,
            sha256=self.sha256,
            **describe_weights(files.graph.parent, files.config),
            **model_info.to_dict(),
        )

    def _describe_settings(self) -> EvaluationSettingsInfo:
        return EvaluationSettingsInfo(
            **{
                entry.name: getattr(self.settings, entry.name)
                for entry in fields(EvaluationSettings)
                if entry.name != "prefix_store"
            },
            prefix_store=None if self.settings.prefix_store is None else redact_url(self.settings.prefix_store),
            jobs=self.jobs,
            numbers_version=NUMBERS_VERSION,
            bootstrap=BootstrapInfo(resamples=NUM_RESAMPLES, level=CONFIDENCE_LEVEL, over="documents"),
            process_peak=PEAK_DESCRIPTION,
            timing_prompt_piece=PROMPT_CHUNK_TOKENS,
            timing_decoded=MAX_DECODED_TOKENS,
        )

    def _iter_traces(self, cells_by_index: Mapping[int, ConfigurationCells]) -> Iterator[DocumentTrace]:
        for number, cells in cells_by_index.items():
            time_series = cells.score_cells[0].trace
            if time_series is not None:
                yield DocumentTrace(
                    label=self.configurations[number].label,
                    document=self.documents[0].name,
                    step_tokens=time_series.step_tokens,
                    cache_bytes=time_series.cache_bytes,
                    keep_map=time_series.keep_map,
                    kept=time_series.kept,
                )

    def _describe_missing_timings(self, cells_by_index: Mapping[int, ConfigurationCells]) -> Iterator[str]:
        yield from group_by_reason(
            (self.configurations[number].label, f"not timed: {cells.timing_cell.refused}")
            for number, cells in cells_by_index.items()
            if isinstance(cells.timing_cell, RefusedCell)
        )
        yield from _describe_missing_attention_times([cells.timing_cell for cells in cells_by_index.values()])

    def _describe_store_use(self, cells_by_index: Mapping[int, ConfigurationCells]) -> Iterator[str]:
        """Describe how much a prefix store provided, if there was one."""
        if self.settings.prefix_store is None:
            return
        cells = [cell for configuration_cells in cells_by_index.values() for cell in configuration_cells.score_cells]
        num_from_store, num_scored = (
            sum(cell.stored_tokens or 0 for cell in cells),
            sum(cell.every.tokens for cell in cells),
        )
        yield (
            f"Of {num_scored:,} tokens that were scored K, V and scores of {num_from_store:,} came from the prefix "
            "store; the other numbers are those of a run without it. Seconds and the process's peak are of what was "
            "computed; prompts that are timed are always computed."
        )
        labels = [
            self.configurations[number].label
            for number, configuration_cells in cells_by_index.items()
            if all(cell.stored_tokens is None for cell in configuration_cells.score_cells)
        ]
        if labels:
            yield (
                f"Computed from the beginning, store or not: {'; '.join(labels)}: these rank tokens by attention, "
                "cut before tokens are attended, or quantise the cache."
            )
        if any(
            cell.divergence is None
            for number, entry in cells_by_index.items()
            if not self.configurations[number].is_baseline
            for cell in entry.score_cells
        ):
            yield (
                "KL and same top-1 are not known where scores of the full cache came from the store, which has no "
                "distributions: a run without --store measures them."
            )
        yield from dict.fromkeys(note for cell in cells for note in cell.stored_notes or ())


def _describe_missing_attention_times(timings: Sequence[TimingCell | RefusedCell | None]) -> Iterator[str]:
    """Explain why rows have no attention time, each reason once."""
    timing_cells = [entry for entry in timings if isinstance(entry, TimingCell)]
    for reason in dict.fromkeys(entry.no_attention for entry in timing_cells if entry.no_attention is not None):
        rows = sum(entry.no_attention == reason for entry in timing_cells)
        yield f"No attention time in {pluralize(rows, 'row')}: {reason}"


def _read_cells(plan: EvaluationPlan, store: CellStore, configuration_index: int) -> ConfigurationCells:
    project_keys, timing = plan.project_keys.get(configuration_index), plan.timing_keys.get(configuration_index)
    location = f"{store.path or 'a store of cells'}: cell"
    return ConfigurationCells(
        [read_cell("score", _get_cell(store, key), location) for key in plan.score_keys[configuration_index]],
        None if project_keys is None else [read_cell("seed", _get_cell(store, key), location) for key in project_keys],
        None if timing is None else read_cell("timing", _get_cell(store, timing), location),
    )


def _get_cell(store: CellStore, key: str) -> object:
    document = store.get(key)
    if document is None:
        raise KvmnnError("a cell of the evaluation was not measured: run it again with the same --resume file")
    return document


PathLike = str | os.PathLike[str]


class EvaluationProgress(Protocol):
    """Interface that receives the progress of an evaluation."""

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """Start, given the total work and the number of cells that were stored already."""

    def advance(self, tokens: int, cells: int) -> None:
        """Count finished tokens and cells."""


def evaluate(
    model: PathLike,
    texts: PathLike | Document | Sequence[Document | PathLike],
    policies: PolicyLike | Sequence[PolicyLike] = (),
    budgets: int | str | Sequence[int | str] = (),
    *,
    codecs: str | Sequence[str] = (),
    settings: EvaluationSettings | None = None,
    tokenizer: PathLike | None = None,
    text_options: TextOptions | None = None,
    jobs: int = 1,
    store: CellStore | PathLike | None = None,
    progress: EvaluationProgress | None = None,
    initial_source: PathLike | Source | InitialCache | object | None = None,
    token_ids: Sequence[int] | Ids | None = None,
) -> EvaluationResult:
    """Run a model on texts under every policy and budget, and compare with the full cache, which is the first row.

    With `initial_source`, every row but the first continues from K and V that were computed elsewhere; all rows score
    only the tokens after them.

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
        (`presets.expand_preset` makes those of the projects). The same one twice is measured once; none: the full
        cache alone.
    budgets
        Tokens kept in each layer, or shares of the tokens scored such as ``"25%"``, for specs.
    codecs
        Lossy codecs that hold the cache, such as ``"q8_0"`` (`kvmnn.quantization`): rows of each alone and with every
        policy; ``"none"`` for the policies without any.
    settings
        Settings of the measurement.
    tokenizer
        ``tokenizer.json`` for texts that are files; by default the one next to the model.
    text_options
        Which texts of files and folders are used; all by default.
    jobs
        Processes at a time, a configuration in each; 0 measures in this process, which leaves `process_peak_bytes` out.
        Policies that a script or a notebook defines are measured in this process.
    store
        Where finished cells are taken from and put: a store or its file.
    progress
        Told of tokens and cells.
    initial_source
        A cache that texts begin with: anything that `kvmnn.open` takes or gives, or an initial cache that was read from
        it. Nothing is timed then.
    token_ids
        Token ids of the initial cache, if it does not contain them.

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
        named in `EvaluationResult.refused`, and in a `RefusalWarning`.
    """
    settings = settings or EvaluationSettings()
    if token_ids is not None and (initial_source is None or isinstance(initial_source, InitialCache)):
        raise OptionError("token_ids are those of a start that is read: expected a start that is a cache")
    policy_configurations = combine_codecs(resolve_configurations(policies, budgets, settings.tokens), codecs)
    if (settings.packed or settings.lossless) and any(entry.codec is not None for entry in policy_configurations):
        raise OptionError(
            f"codecs (--quant) and {'--layout' if settings.packed else '--lossless'}: a cache is held in one of them"
        )
    if not policy_configurations and settings.runtime_config is not None and settings.runtime_config.is_lossy:
        # The full cache stays as the model computes it, for comparison: this one evicts nothing either.
        uncut = build_configuration("recent_only", {"budget": settings.tokens})
        policy_configurations = [replace(uncut, label=UNCUT_LABEL)]
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
        _check_model_limits(model, configurations, loaded_documents, settings)
        if initial_cache is not None:
            loaded_documents = trim_documents(initial_cache, loaded_documents, tokenizer or model)
            oriented_cache = match_layout(initial_cache, model, loaded_documents[0].ids, settings)
            initial_cache = initial_cache if oriented_cache is initial_cache else stack.enter_context(oriented_cache)
        if settings.prefix_store is not None:  # one that cannot be used is better known now
            PrefixStore(settings.prefix_store, key=load_key()).close()
        if not isinstance(store, CellStore):
            store = stack.enter_context(CellStore(store))
        evaluation = EvaluationRun(
            model=os.fspath(model),
            sha256=hash_model(model),
            configurations=drop_duplicates(configurations, notes),
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
        result = evaluation.to_result(cell_plan, store, refusal_reasons)
    for refusal in result.refused:
        warnings.warn(f"{refusal.label} was not run: {refusal.reason}", RefusalWarning, stacklevel=2)
    return result


class RefusalWarning(UserWarning):
    """A configuration that `evaluate` could not run and has no row of."""


@contextmanager
def ignore_refusals() -> Iterator[None]:
    """Ignore the warnings of `evaluate`, for callers that tell of `EvaluationResult.refused` in their own way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusalWarning)
        yield


def _check_model_limits(
    path: PathLike,
    configurations: Sequence[Configuration],
    documents: Sequence[Document],
    settings: EvaluationSettings,
) -> None:
    """Raise an error for settings that exceed the model's size, and for bad files, before anything is measured."""
    model = read_model_interface(path)
    for entry in configurations:
        entry.create_policy().check_layers(model.layers)
    if settings.runtime_config is not None:  # a profile that is missing or unfit would be refused after the full cache
        LosslessStore(model, settings.runtime_config, per_head=False)
    for spec in dict.fromkeys(entry.codec for entry in configurations if entry.codec is not None):
        codec = create_codec(spec)
        if codec is not None and codec.reads_file:  # formats that do not fit the model are refused row by row
            codec.start_text(CacheShape(model.layers, model.kv_heads, model.head_dim))
    longest_document = max(documents, key=lambda document: document.num_fed)
    if model.max_positions is not None and longest_document.num_fed > model.max_positions:
        raise OptionError(
            f"{longest_document.name}: {longest_document.num_fed:,} tokens are to be scored, {model.label} was made "
            f"for {model.max_positions:,} positions: expected at most --max-tokens {model.max_positions}"
        )


def hash_model(model: PathLike) -> str:
    """Compute the SHA-256 of the model's graph and of the weight files next to it that belong to it."""
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
    """Drop documents with the tokens of another one, which would make intervals too narrow."""
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
            f"{', '.join(duplicates[:_MAX_NAMED_DUPLICATES])}{more_text}. An interval is over different texts."
        )
    return list(unique.values())


_MAX_NAMED_DUPLICATES = 5
"""Texts that a note names."""


def _run_plan(
    cell_plan: EvaluationPlan, evaluation: EvaluationRun, store: CellStore, progress: EvaluationProgress | None
) -> dict[str, str]:
    """Measure the missing cells; return the reasons of refused configurations by their identity."""
    if progress is not None:
        cells = sum(cell.kind != "reference" for task in cell_plan.tasks for cell in task.cells)
        progress.start(sum(task.num_tokens for task in cell_plan.tasks), cells, cell_plan.num_cells - cells)
    refusal_reasons: dict[str, str] = {}
    start = None if evaluation.start is None else str(evaluation.start.directory)
    with ExitStack() as stack:
        references = None
        if cell_plan.needs_references:
            folder = TemporaryDirectory(prefix="kvmnn-full-cache-", ignore_cleanup_errors=True)
            references = stack.enter_context(folder)
        # Closed before the folder goes, also by an interruption: workers read what is in it.
        events = run_tasks(cell_plan.tasks, evaluation.model, evaluation.settings, evaluation.jobs, start, references)
        for event in stack.enter_context(closing(events)):
            if event.key is not None and event.cell is not None:
                store.put(event.key, event.cell.to_dict())
            if event.refusal_reason is not None:
                refusal_reasons[get_identity_key(event.task.configuration)] = event.refusal_reason
            if progress is not None:
                progress.advance(event.tokens, int(event.cell is not None))
    return refusal_reasons
