"""The result of an evaluation, put together from its cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import KvmnnError
from ..files.urls import without_secret
from ..lm.documents import Document
from ..lm.start import Start
from ..reports.results import Refusal, TextFacts, Trace
from ..text import count
from ..version import version
from .measuring.cells import ModelFacts, RefusedCell, TimingCell, read_cell
from .measuring.memory import WHAT
from .measuring.timing import DECODED, PIECE
from .notes import by_reason, notes
from .planning import EvaluationPlan, identity
from .result import Bootstrap, EvaluatedModel, EvaluationResult, SettingsUsed
from .rows import Measured, make_row
from .running.cell_store import NUMBERS_VERSION, CellStore
from .setup.configurations import Configuration
from .setup.settings import Settings
from .starting import start_facts, start_notes
from .statistics import LEVEL, RESAMPLES


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated: the model and its digest, the configurations (the full cache first), the documents,
    what was left out of their files (`text_notes`) and what was put before them (`last_notes`)."""

    model: str
    sha256: str
    wanted: Sequence[Configuration]
    documents: Sequence[Document]
    settings: Settings
    jobs: int
    text_notes: tuple[str, ...] = ()
    last_notes: tuple[str, ...] = ()
    start: Start | None = None

    def result(self, plan: EvaluationPlan, store: CellStore, refused: Mapping[str, str]) -> EvaluationResult:
        """The result, once every cell of the plan is in the store.

        Parameters
        ----------
        refused
            Reasons, by the identity of the configuration.

        Raises
        ------
        KvmnnError
            Where a cell is not there.
        """
        measured = {
            number: _measured(plan, store, number)
            for number, entry in enumerate(self.wanted)
            if identity(entry) not in refused
        }
        full = measured[0].scores
        rows = [
            make_row(self.wanted[number], found, full, self.documents, self.settings, self._start_of(number))
            for number, found in measured.items()
        ]
        start = None if self.start is None else start_facts(self.start, full[0])
        return EvaluationResult(
            kvmnn=version(),
            model=self._model(full[0].model),
            settings=self._settings_used(),
            documents=tuple(
                TextFacts(name=text.name, tokens=text.tokens, bytes=text.nbytes, sha256=text.sha256)
                for text in self.documents
            ),
            rows=tuple(rows),
            traces=tuple(self._traces(measured)),
            start=start,
            notes=(
                *self.text_notes,
                *(start_notes(start, self.start.notes) if start is not None and self.start is not None else ()),
                *notes(rows, self.documents, self.settings),
                *self._not_timed(measured),
                *self._from_store(measured),
                *self.last_notes,
            ),
            refused=tuple(
                Refusal(label=entry.label, reason=refused[identity(entry)])
                for entry in self.wanted
                if identity(entry) in refused
            ),
        )

    def _start_of(self, number: int) -> str | None:
        return self.start.name if self.start is not None and self.wanted[number].begun else None

    def _model(self, facts: ModelFacts) -> EvaluatedModel:
        return EvaluatedModel(path=self.model, name=Path(self.model).name, sha256=self.sha256, **facts.to_dict())

    def _settings_used(self) -> SettingsUsed:
        return SettingsUsed(
            **{
                entry.name: getattr(self.settings, entry.name)
                for entry in fields(Settings)
                if entry.name != "prefix_store"
            },
            prefix_store=None if self.settings.prefix_store is None else without_secret(self.settings.prefix_store),
            jobs=self.jobs,
            numbers_version=NUMBERS_VERSION,
            bootstrap=Bootstrap(resamples=RESAMPLES, level=LEVEL, over="documents"),
            process_peak=WHAT,
            timing_prompt_piece=PIECE,
            timing_decoded=DECODED,
        )

    def _traces(self, measured: Mapping[int, Measured]) -> Iterator[Trace]:
        for number, found in measured.items():
            course = found.scores[0].trace
            if course is not None:
                yield Trace(
                    label=self.wanted[number].label,
                    document=self.documents[0].name,
                    step_tokens=course.step_tokens,
                    cache_bytes=course.cache_bytes,
                    keep_map=course.keep_map,
                    kept=course.kept,
                )

    def _not_timed(self, measured: Mapping[int, Measured]) -> Iterator[str]:
        yield from by_reason(
            (self.wanted[number].label, f"not timed: {found.timing.refused}")
            for number, found in measured.items()
            if isinstance(found.timing, RefusedCell)
        )
        yield from _without_attention_time([found.timing for found in measured.values()])

    def _from_store(self, measured: Mapping[int, Measured]) -> Iterator[str]:
        """What a prefix store did, where there was one."""
        if self.settings.prefix_store is None:
            return
        cells = [cell for found in measured.values() for cell in found.scores]
        taken, scored = sum(cell.stored_tokens or 0 for cell in cells), sum(cell.every.tokens for cell in cells)
        yield (
            f"Of {scored:,} tokens that were scored K, V and scores of {taken:,} came from the prefix store; the other "
            "numbers are those of a run without it. Seconds and the process's peak are of what was computed; prompts "
            "that are timed are always computed."
        )
        labels = [
            self.wanted[number].label
            for number, found in measured.items()
            if all(cell.stored_tokens is None for cell in found.scores)
        ]
        if labels:
            yield (
                f"Computed from the beginning, store or not: {'; '.join(labels)}: these rank tokens by attention, or "
                "cut before tokens are attended."
            )
        yield from dict.fromkeys(note for cell in cells for note in cell.stored_notes or ())


def _without_attention_time(timings: Sequence[TimingCell | RefusedCell | None]) -> Iterator[str]:
    """Why rows have none, each reason once."""
    timed = [entry for entry in timings if isinstance(entry, TimingCell)]
    for reason in dict.fromkeys(entry.no_attention for entry in timed if entry.no_attention is not None):
        rows = sum(entry.no_attention == reason for entry in timed)
        yield f"No attention time in {count(rows, 'row')}: {reason}"


def _measured(plan: EvaluationPlan, store: CellStore, number: int) -> Measured:
    by_definition, timing = plan.by_definition.get(number), plan.timings.get(number)
    where = f"{store.path or 'a store of cells'}: cell"
    return Measured(
        [read_cell("score", _document(store, key), where) for key in plan.scores[number]],
        None if by_definition is None else [read_cell("seed", _document(store, key), where) for key in by_definition],
        None if timing is None else read_cell("timing", _document(store, timing), where),
    )


def _document(store: CellStore, key: str) -> object:
    document = store.get(key)
    if document is None:
        raise KvmnnError("a cell of the evaluation was not measured: run it again with the same --resume file")
    return document
