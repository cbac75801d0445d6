"""The result of an evaluation, put together from its cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import KvmnnError
from ..files.urls import redact_url
from ..lm.documents import Document
from ..lm.start import InitialCache
from ..reports.results import DocumentInfo, DocumentTrace, Refusal
from ..text import pluralize
from ..version import get_version
from .measuring.cells import ModelInfo, RefusedCell, TimingCell, read_cell
from .measuring.memory import PEAK_DESCRIPTION
from .measuring.timing import MAX_DECODED_TOKENS, PROMPT_CHUNK_TOKENS
from .notes import build_notes, group_by_reason
from .planning import EvaluationPlan, get_identity_key
from .result import BootstrapInfo, EvaluatedModelInfo, EvaluationResult, EvaluationSettingsInfo
from .rows import ConfigurationCells, build_row
from .running.cell_store import NUMBERS_VERSION, CellStore
from .setup.configurations import Configuration
from .setup.settings import EvaluationSettings
from .starting import build_start_info, format_start_notes
from .statistics import CONFIDENCE_LEVEL, NUM_RESAMPLES


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
        """The result, once every cell of the plan is in the store.

        Parameters
        ----------
        refusal_reasons
            Reasons, by the identity of the configuration.

        Raises
        ------
        KvmnnError
            Where a cell is not there.
        """
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
                Refusal(label=entry.label, reason=refusal_reasons[get_identity_key(entry)])
                for entry in self.configurations
                if get_identity_key(entry) in refusal_reasons
            ),
        )

    def _get_start_name(self, number: int) -> str | None:
        return self.start.name if self.start is not None and self.configurations[number].begun else None

    def _build_model_info(self, model_info: ModelInfo) -> EvaluatedModelInfo:
        return EvaluatedModelInfo(
            path=self.model, name=Path(self.model).name, sha256=self.sha256, **model_info.to_dict()
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
        """What a prefix store did, where there was one."""
        if self.settings.prefix_store is None:
            return
        cells = [cell for configuration_cells in cells_by_index.values() for cell in configuration_cells.score_cells]
        num_from_store, num_scored = (
            sum(cell.stored_tokens or 0 for cell in cells),
            sum(cell.every.tokens for cell in cells),
        )
        yield (
            f"Of {num_scored:,} tokens that were scored K, V and scores of {num_from_store:,} came from the prefix "
            f"store; the other "
            "numbers are those of a run without it. Seconds and the process's peak are of what was computed; prompts "
            "that are timed are always computed."
        )
        labels = [
            self.configurations[number].label
            for number, configuration_cells in cells_by_index.items()
            if all(cell.stored_tokens is None for cell in configuration_cells.score_cells)
        ]
        if labels:
            yield (
                f"Computed from the beginning, store or not: {'; '.join(labels)}: these rank tokens by attention, or "
                "cut before tokens are attended."
            )
        yield from dict.fromkeys(note for cell in cells for note in cell.stored_notes or ())


def _describe_missing_attention_times(timings: Sequence[TimingCell | RefusedCell | None]) -> Iterator[str]:
    """Why rows have none, each reason once."""
    timing_cells = [entry for entry in timings if isinstance(entry, TimingCell)]
    for reason in dict.fromkeys(entry.no_attention for entry in timing_cells if entry.no_attention is not None):
        rows = sum(entry.no_attention == reason for entry in timing_cells)
        yield f"No attention time in {pluralize(rows, 'row')}: {reason}"


def _read_cells(plan: EvaluationPlan, store: CellStore, number: int) -> ConfigurationCells:
    project_keys, timing = plan.project_keys.get(number), plan.timing_keys.get(number)
    location = f"{store.path or 'a store of cells'}: cell"
    return ConfigurationCells(
        [read_cell("score", _get_cell(store, key), location) for key in plan.score_keys[number]],
        None if project_keys is None else [read_cell("seed", _get_cell(store, key), location) for key in project_keys],
        None if timing is None else read_cell("timing", _get_cell(store, timing), location),
    )


def _get_cell(store: CellStore, key: str) -> object:
    document = store.get(key)
    if document is None:
        raise KvmnnError("a cell of the evaluation was not measured: run it again with the same --resume file")
    return document
