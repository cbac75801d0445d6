"""Run a suite on a model: paired runs, compared contents, perplexity, and the verdicts in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

from ..._util.dataclass import dataclass
from ..._util.packages import get_version
from ...errors import REPLACE_HINT, KvmnnError, OutputError
from ...evaluation.runner import hash_model
from ...files.atomic import FileOutput, wrap_os_errors
from ...files.journal import JournalFormat, KeyedJournal
from ...files.schema import read_object
from ...lm.runner import Runner
from ...lm.session import DecoderSession
from ...policies.policy import FullCache
from ..logs import get_number
from ..summary import RUN_INFO_FILE, collect_cases, compare_case_stamps, write_round_files
from .cases import RunCase
from .history import has_finished_rerun
from .measurement import (
    ContentComparison,
    ModelSessions,
    PerplexityChange,
    PerplexityProgress,
    RunRecord,
    compare_contents,
    measure_perplexity_change,
    measure_run,
)
from .settings import RunSettings
from .verdict import PairedRuns
from .workloads import PromptTexts, Workload

RUN_STORE_VERSION = 3
"""Raised whenever a run measures anything differently, so that runs of before are not reused."""

_JOURNAL_FORMAT = JournalFormat(
    tag="kvmnn_run",
    version=1,
    process_name="gate run",
    entry_description="a run of a gate suite",
    remedy="it is run again",
    skips_damage=True,
)


class RunStore(KeyedJournal):
    """Results of runs, by the digest of everything that they depend on.

    Parameters
    ----------
    path
        A journal, made where it is not there; a line that a crash tore, or that somebody changed, is not used. None:
        in memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__(path, _JOURNAL_FORMAT)
        self.num_reused = 0

    def get(self, key: str) -> Any | None:
        """Return the entry of a key; None if there is none."""
        value = super().get(key)
        self.num_reused += value is not None
        return value


def compute_key(**about: Any) -> str:
    """Compute the digest of everything a run depends on."""
    return hashlib.sha256(json.dumps({"version": RUN_STORE_VERSION, **about}, sort_keys=True).encode()).hexdigest()


RUNS_JOURNAL, CELLS_JOURNAL = "runs.jsonl", "cells.jsonl"
"""Files of a folder of runs: what is done, and the perplexity's."""

_SIDE_NAMES = ("without", "candidate")

_WARM_UP_TOKENS = 4
"""Tokens that are generated before anything is timed."""


class SuiteProgress(Protocol):
    """Receiver of a suite's progress."""

    def start(self, runs: int, steps: int) -> None:
        """Start, given the number of runs and the decode steps of those that are not stored."""

    def begin_run(self, run_description: str) -> None:
        """Announce the next run."""

    def advance(self, steps: int) -> None:
        """Count decode steps; 0 after a step of a prompt."""

    def end_run(self) -> None:
        """Count a run."""


class _SilentProgress:
    """A progress receiver that does nothing."""

    def start(self, runs: int, steps: int) -> None: ...
    def begin_run(self, run_description: str) -> None: ...
    def advance(self, steps: int) -> None: ...
    def end_run(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CaseMeasurement:
    """The measurements of a case."""

    #: The measured case.
    case: RunCase
    #: Pairs of runs, of each round.
    rounds: tuple[tuple[PairedRuns, ...], ...]
    #: Comparisons of contents, one for each workload.
    comparisons: tuple[ContentComparison, ...]
    #: Change of perplexity; None without texts.
    quality: PerplexityChange | None
    #: Notes that a reader of the result needs.
    notes: tuple[str, ...] = ()
    #: Stamp of its round: a digest of everything that it was measured and judged by.
    stamp: str = ""

    @property
    def pairs(self) -> list[PairedRuns]:
        """The paired runs of all rounds."""
        return [pair for part in self.rounds for pair in part]


class Suite:
    """The gate cases on one model, with a folder that stores completed runs and is locked while open.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, its ``tokenizer.json`` next to it.
    directory
        The folder of the stored runs; created if missing.
    texts
        Files and folders of texts, as `kvmnn.lm.documents.read_documents` takes them.
    tokenizer
        Its ``tokenizer.json``; by default the one next to the model.
    jobs
        Number of processes for the perplexity, which is not timed; 0: the current process.
    force
        Use a folder that contains other files.
    rerun
        Repeat the timed runs, if the stored ones are complete.
    command
        The command line, recorded with model, machine and settings; empty if unknown.
    """

    def __init__(
        self,
        model: str,
        directory: str,
        *,
        settings: RunSettings,
        texts: Sequence[str] = (),
        tokenizer: str | None = None,
        jobs: int,
        force: bool = False,
        rerun: bool = False,
        command: str = "",
    ) -> None:
        self._command = command
        self._model, self._directory, self._jobs, self._settings = model, Path(directory), jobs, settings
        check_directory(self._directory, force)
        self._texts = PromptTexts(model, settings, texts, tokenizer)
        self._sessions = ModelSessions(model, settings.threads)
        self._sha256 = hash_model(model)
        self._qualities: dict[str, PerplexityChange] = {}
        self.store = RunStore(None)
        self.rerun_number = _choose_rerun_number(self._directory, rerun)
        self.settings_by_case: dict[str, dict[str, Any]] = {}
        self.stamp_by_case: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    @property
    def run_info(self) -> dict[str, Any]:
        """The version, model and machine of the runs."""
        return {
            "kvmnn": get_version(),
            "model_sha256": self._sha256,
            "machine": platform.platform(),
            "processors": os.cpu_count(),
        }

    def measure_cases(
        self, cases: Sequence[RunCase], progress: SuiteProgress | None = None
    ) -> Iterator[CaseMeasurement]:
        """Measure the cases one after another; stored runs are not repeated.

        The folder is made when all cases are known to have work that the model can do.
        """
        self._progress = progress or _SilentProgress()
        workloads_and_notes = {case.name: self._texts.build_workloads(case, self._sessions.interface) for case in cases}
        for case in cases:
            Runner(self._get_session(case), case.policy, lossless=case.lossless)  # refuses what the model cannot do
        with wrap_os_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        self.store.close()
        self.store = RunStore(self._directory / RUNS_JOURNAL)
        self._write_run_info(cases)
        remaining_steps = [
            steps for case in cases for steps in self._iter_steps(case, workloads_and_notes[case.name][0])
        ]
        self._progress.start(len(remaining_steps), sum(remaining_steps))
        for case in cases:
            workloads, notes = workloads_and_notes[case.name]
            yield self._measure_case(case, workloads, notes)

    def _iter_steps(self, case: RunCase, workloads: list[Workload]) -> Iterator[int]:
        """Yield the number of decode steps of each run of a case, which take most of the time; 0 for a stored run."""
        for work in workloads:
            if _compares_contents(case):
                yield 0 if self._compute_key(case, work, side="comparison") in self.store else 2 * work.num_steps
            rounds, repeats = range(case.settings.rounds), range(case.settings.repeats)
            for round_index, repeat, side in product(rounds, repeats, _SIDE_NAMES):
                yield (
                    0 if self._compute_run_key(case, work, side, repeat, round_index) in self.store else work.num_steps
                )
        if case.evicts and self._texts.documents:
            yield self._count_quality_steps(case)

    def _count_quality_steps(self, case: RunCase) -> int:
        """Count the decode steps of both evaluations, with and without eviction."""
        settings = case.settings
        texts = min(settings.quality_texts, len(self._texts.documents))
        return 2 * texts * (settings.quality_tokens - settings.quality_prompt)

    def _measure_case(self, case: RunCase, workloads: list[Workload], notes: list[str]) -> CaseMeasurement:
        rounds_of_pairs = tuple(
            tuple(self._measure_round(case, workloads, round_index)) for round_index in range(case.settings.rounds)
        )
        if case.mode:
            self._sessions.release(kept_kind=case.policy.requires_attention)
        comparisons = tuple(
            self._compare_contents(case, work) for work in (workloads if _compares_contents(case) else ())
        )
        if case.mode:
            self._sessions.release()  # its memory grew with two caches, and the next case opens another next to it
        return CaseMeasurement(
            case=case,
            rounds=rounds_of_pairs,
            comparisons=comparisons,
            quality=self._measure_quality(case) if case.evicts and self._texts.documents else None,
            notes=tuple(notes),
            stamp=self.stamp_by_case[case.name],
        )

    def _measure_round(self, case: RunCase, workloads: list[Workload], round_index: int) -> Iterator[PairedRuns]:
        """Measure both sides of each workload one after the other; which side is first alternates."""
        is_warm = False
        for work in workloads:
            for repeat in range(case.settings.repeats):
                record_by_side: dict[str, RunRecord] = {}
                for side in _SIDE_NAMES if (repeat + round_index) % 2 == 0 else _SIDE_NAMES[::-1]:
                    key = self._compute_run_key(case, work, side, repeat, round_index)
                    stored = self.store.get(key)
                    if stored is None and not is_warm:
                        self._warm_up(case, work)
                        is_warm = True
                    side_text = "with" if side == "candidate" else "without"
                    self._progress.begin_run(f"{case.name}, {work.name}, {side_text} compression, run {repeat + 1}")
                    record_by_side[side] = self._measure_side(case, work, side, key, stored)
                    self._progress.end_run()
                yield PairedRuns(
                    workload=work, without=record_by_side["without"], candidate=record_by_side["candidate"]
                )

    def _measure_side(self, case: RunCase, work: Workload, side: str, key: str, stored: Any) -> RunRecord:
        if stored is not None:
            return RunRecord.from_dict(stored, RUNS_JOURNAL)
        if side == "without":
            record = measure_run(self._sessions.get(attentions=False), FullCache(), None, work, self._progress.advance)
        else:
            record = measure_run(self._get_session(case), case.policy, case.lossless, work, self._progress.advance)
        self.store.put(key, record.to_dict())
        return record

    def _warm_up(self, case: RunCase, work: Workload) -> None:
        warm_up_workload = Workload(name="warm-up", bucket="", turns=(work.turns[0],), new_tokens=_WARM_UP_TOKENS)
        self._progress.begin_run(f"{case.name}, {work.name}, not timed")
        measure_run(
            self._sessions.get(attentions=False),
            FullCache(),
            None,
            warm_up_workload,
            lambda steps: self._progress.advance(0),
        )
        if case.mode:
            session = self._get_session(case)
            measure_run(session, case.policy, case.lossless, warm_up_workload, lambda steps: self._progress.advance(0))

    def _compare_contents(self, case: RunCase, work: Workload) -> ContentComparison:
        lossless = case.lossless
        key = self._compute_key(case, work, side="comparison")
        stored = self.store.get(key)
        self._progress.begin_run(f"{case.name}, {work.name}, K and V compared")
        if stored is not None:
            comparison = ContentComparison.from_dict(stored, RUNS_JOURNAL)
        elif lossless is None:
            raise KvmnnError(f"{case.name}: nothing is stored, so nothing can be compared")
        else:
            comparison = compare_contents(self._get_session(case), case.policy, lossless, work, self._progress.advance)
            self.store.put(key, comparison.to_dict())
        self._progress.end_run()
        return comparison

    def _measure_quality(self, case: RunCase) -> PerplexityChange:
        """Measure the change of perplexity; cases with the same eviction share it."""
        settings_key = json.dumps([case.policy_keys, case.settings.to_dict()], sort_keys=True)
        steps = self._count_quality_steps(case)
        self._progress.begin_run(f"{case.name}, perplexity")
        if settings_key not in self._qualities:
            self._sessions.release()  # the evaluation opens its own
            quality_progress = PerplexityProgress(steps, self._progress.advance)
            documents, store = self._texts.documents, self._directory / CELLS_JOURNAL
            self._qualities[settings_key] = measure_perplexity_change(
                self._model, documents, case, jobs=self._jobs, store=store, progress=quality_progress
            )
            steps = quality_progress.remaining_units
        self._progress.advance(steps)
        self._progress.end_run()
        return self._qualities[settings_key]

    def _get_session(self, case: RunCase) -> DecoderSession:
        return self._sessions.get(attentions=case.policy.requires_attention)

    def _compute_run_key(self, case: RunCase, work: Workload, side: str, repeat: int, round_index: int) -> str:
        return self._compute_key(case, work, side=side, repeat=repeat, round=round_index, take=self.rerun_number)

    def _compute_key(self, case: RunCase, work: Workload, **more: Any) -> str:
        engine = {} if more.get("side") == "without" else case.identity
        return compute_key(
            model=self._sha256,
            kvmnn=get_version(),
            case=case.name,
            engine=engine,
            work=work.digest,
            threads=self._settings.threads,
            **more,
        )

    def _write_run_info(self, cases: Sequence[RunCase]) -> None:
        self.settings_by_case = {
            "": self._list_changed_settings(),
            **{case.name: case.changed_settings for case in cases},
        }
        entries = {
            case.name: {
                "mode": case.mode,
                "base": case.base,
                "engine": case.engine,
                "limits": case.limits.to_dict(),
            }
            for case in cases
        }
        common = [self.run_info, self.rerun_number, self.settings_by_case[""], self._settings.to_dict()]
        self.stamp_by_case = {
            case.name: compute_key(
                common=common, entry=entries[case.name] | {"engine": case.identity}, work=case.settings.to_dict()
            )
            for case in cases
        }
        run_info = {
            "kvmnn_gate_run": 1,
            "command": self._command,
            "model": os.fspath(self._model),
            "python": platform.python_version(),
            **self.run_info,
            "take": self.rerun_number,
            "settings": self._settings.to_dict(),
            "round": compute_key(common=common),
        }
        entries = {name: {**entry, "stamp": self.stamp_by_case[name]} for name, entry in entries.items()}
        run_info["cases"] = {**self._list_measured_cases(str(run_info["round"]), entries), **entries}
        self._write_initial_round(run_info)

    def _list_measured_cases(self, round_digest: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cases that earlier commands of the same round have measured."""
        previous_info = _read_run_info(self._directory)
        cases = previous_info.get("cases")
        if previous_info.get("round") != round_digest or not isinstance(cases, dict):
            return {}
        has_stamp_by_case = compare_case_stamps(self._directory, cases)
        return {name: cases[name] for name, has_stamp in has_stamp_by_case.items() if has_stamp and name not in entries}

    def _write_initial_round(self, run_info: dict[str, Any]) -> None:
        """Write an unfinished round first, so that a crash cannot leave the verdict of an earlier one."""
        write_round_files(collect_cases(self._directory, run_info))
        with FileOutput(self._directory / RUN_INFO_FILE, force=True) as output:
            output.file.write(json.dumps(run_info, indent=2).encode())
            output.commit()

    def _list_changed_settings(self) -> dict[str, Any]:
        """Return settings that differ from the default, texts and tokenizer included."""
        default_settings = RunSettings().to_dict()
        changed_settings = {
            name: value for name, value in self._settings.to_dict().items() if default_settings[name] != value
        }
        texts = self._texts.sha256s
        return changed_settings | (
            {"texts_sha256": hashlib.sha256(" ".join(texts).encode()).hexdigest()} if texts else {}
        )


def _compares_contents(case: RunCase) -> bool:
    """Return whether K and V in the runtime must equal those of a plain cache: not if its codec rounds them."""
    return bool(case.mode) and not case.is_lossy_codec


def _choose_rerun_number(directory: Path, rerun: bool) -> int:
    """Return the number of this repetition: one more than recorded if that one was completed."""
    rerun_number = int(get_number(_read_run_info(directory), "take")) or 1
    return rerun_number + 1 if rerun and has_finished_rerun(directory, rerun_number) else rerun_number


def _read_run_info(directory: Path) -> dict[str, Any]:
    try:
        return read_object(directory / RUN_INFO_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def check_directory(directory: Path, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    is_filled = directory.is_dir() and any(directory.iterdir())
    if is_filled and not (directory / RUN_INFO_FILE).is_file() and not force:
        raise OutputError(
            f"{directory}: holds something else than runs of gate run ({REPLACE_HINT} takes it all the same)"
        )
