"""A suite on a model: runs side by side, contents compared, perplexity measured, and the verdicts in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

from ...errors import KvmnnError, OutputError
from ...evaluation.evaluating import model_sha256
from ...files.json_document import read_object
from ...files.output import FileOutput, failures
from ...lm.runner import Runner
from ...lm.session import DecoderSession
from ...policies.full import Full
from ...version import version
from ..logs.demo_records import quantity
from ..summary.collecting import ABOUT, collect, stamps_of
from ..summary.saving import write_round
from .figures import Pair
from .measuring import Comparison, RunRecord, compare_contents, run_once
from .model_sessions import ModelSessions
from .past import has_take
from .prompt_texts import PromptTexts
from .quality import Quality, QualityProgress, measure_quality
from .run_cases import RunCase
from .run_store import RunStore, key_of
from .settings import RunSettings
from .work import Workload

RUNS, CELLS = "runs.jsonl", "cells.jsonl"
"""Files of a folder of runs: what is done, and the perplexity's."""

_SIDES = ("without", "candidate")

_WARM_UP = 4
"""Tokens that are generated before anything is timed."""


class SuiteProgress(Protocol):
    """Who is told how far a suite is."""

    def start(self, runs: int, steps: int) -> None:
        """Begin: this many runs, and decode steps of those that are not there already."""

    def begin_run(self, what: str) -> None:
        """Name what runs now."""

    def advance(self, steps: int) -> None:
        """Count decode steps; 0 after a step of a prompt."""

    def end_run(self) -> None:
        """Count a run."""


class _Silent:
    """Progress that nobody wants to see."""

    def start(self, runs: int, steps: int) -> None: ...
    def begin_run(self, what: str) -> None: ...
    def advance(self, steps: int) -> None: ...
    def end_run(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a case measured.

    Attributes
    ----------
    case
        Which.
    rounds
        Pairs of runs, of each round.
    comparisons
        Of contents, a piece of work each.
    quality
        Change of perplexity; None without texts.
    notes
        What a reader must know.
    stamp
        Of its round: of everything that it was measured and judged by.
    """

    case: RunCase
    rounds: tuple[tuple[Pair, ...], ...]
    comparisons: tuple[Comparison, ...]
    quality: Quality | None
    notes: tuple[str, ...] = ()
    stamp: str = ""

    @property
    def pairs(self) -> list[Pair]:
        """Those of all rounds."""
        return [pair for part in self.rounds for pair in part]


class Suite:
    """Cases on one model, with what is done kept in a folder, which is this suite's while it is open.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, its ``tokenizer.json`` beside it.
    directory
        Where runs are kept; made if it is not there.
    texts
        Files and folders of texts, as `kvmnn.lm.documents.read_documents` takes them.
    tokenizer
        Its ``tokenizer.json``; by default the one beside the model.
    jobs
        Processes for the perplexity, which is not timed; 0: this one.
    force
        Take a folder that holds something else.
    again
        Measure anew what is timed, where the runs that are there came to their end.
    command
        Noted down beside model, machine and settings; empty: not known.

    Raises
    ------
    OutputError
        For a folder that holds something else.
    SourceError, ModelError
        For models, tokenizers and texts that cannot be used.
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
        again: bool = False,
        command: str = "",
    ) -> None:
        self._command = command
        self._model, self._directory, self._jobs, self._settings = model, Path(directory), jobs, settings
        _check_directory(self._directory, force)
        self._texts = PromptTexts(model, settings, texts, tokenizer)
        self._sessions = ModelSessions(model, settings.threads)
        self._sha256 = model_sha256(model)
        self._qualities: dict[str, Quality] = {}
        self.store = RunStore(self._directory / RUNS)
        self.take = _take(self._directory, again)
        self.settings_of_cases: dict[str, dict[str, Any]] = {}
        self.stamps: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    @property
    def about(self) -> dict[str, Any]:
        """Of which version, model and machine runs are."""
        return {
            "kvmnn": version(),
            "model_sha256": self._sha256,
            "machine": platform.platform(),
            "processors": os.cpu_count(),
        }

    def measure(
        self, cases: Sequence[RunCase], rounds: int, progress: SuiteProgress | None = None
    ) -> Iterator[Measured]:
        """The cases one after another; what is there already is not run again.

        The folder is made when all cases are known to have work that the model can do.
        """
        self._progress = progress or _Silent()
        work = {case.name: self._texts.work(case, self._sessions.interface) for case in cases}
        for case in cases:
            Runner(self._session(case), case.policy, lossless=case.lossless)  # refuses what the model cannot do
        with failures(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._note_down(cases, rounds)
        left = [steps for case in cases for steps in self._steps(case, work[case.name][0], rounds)]
        self._progress.start(len(left), sum(left))
        for case in cases:
            found, notes = work[case.name]
            yield self._measured(case, found, notes, rounds)

    def _steps(self, case: RunCase, works: list[Workload], rounds: int) -> Iterator[int]:
        """Of each run of a case the decode steps that it takes, which is most of the time; 0 where it is there."""
        for work in works:
            if case.mode:
                yield 0 if self._key(case, work, side="comparison") in self.store else 2 * work.steps
            for place, repeat, side in product(range(rounds), range(case.settings.repeats), _SIDES):
                yield 0 if self._run_key(case, work, side, repeat, place) in self.store else work.steps
        if case.evicts and self._texts.documents:
            yield self._quality_steps(case)

    def _quality_steps(self, case: RunCase) -> int:
        """With and without eviction; what other cases evaluated already is not known beforehand."""
        settings = case.settings
        texts = min(settings.quality_texts, len(self._texts.documents))
        return 2 * texts * (settings.quality_tokens - settings.quality_prompt)

    def _measured(self, case: RunCase, works: list[Workload], notes: list[str], rounds: int) -> Measured:
        made = tuple(tuple(self._round(case, works, place)) for place in range(rounds))
        if case.mode:
            self._sessions.release(keep=case.policy.needs_attention)
        comparisons = tuple(self._comparison(case, work) for work in (works if case.mode else ()))
        if case.mode:
            self._sessions.release()  # its memory grew with two caches, and the next case opens another beside it
        return Measured(
            case=case,
            rounds=made,
            comparisons=comparisons,
            quality=self._quality(case) if case.evicts and self._texts.documents else None,
            notes=tuple(notes),
            stamp=self.stamps[case.name],
        )

    def _round(self, case: RunCase, works: list[Workload], place: int) -> Iterator[Pair]:
        """Both sides of each piece of work one after the other, the first of them in turns."""
        warm = False
        for work in works:
            for repeat in range(case.settings.repeats):
                sides: dict[str, RunRecord] = {}
                for side in _SIDES if (repeat + place) % 2 == 0 else _SIDES[::-1]:
                    key = self._run_key(case, work, side, repeat, place)
                    stored = self.store.get(key)
                    if stored is None and not warm:
                        self._warm_up(case, work)
                        warm = True
                    which = "with" if side == "candidate" else "without"
                    self._progress.begin_run(f"{case.name}, {work.name}, {which} compression, run {repeat + 1}")
                    sides[side] = self._side(case, work, side, key, stored)
                    self._progress.end_run()
                yield Pair(work=work, without=sides["without"], candidate=sides["candidate"])

    def _side(self, case: RunCase, work: Workload, side: str, key: str, stored: Any) -> RunRecord:
        if stored is not None:
            return RunRecord.from_dict(stored, RUNS)
        if side == "without":
            made = run_once(self._sessions.get(attentions=False), Full(), None, work, self._progress.advance)
        else:
            made = run_once(self._session(case), case.policy, case.lossless, work, self._progress.advance)
        self.store.put(key, made.to_dict())
        return made

    def _warm_up(self, case: RunCase, work: Workload) -> None:
        short = Workload(name="warm-up", bucket="", turns=(work.turns[0],), new_tokens=_WARM_UP)
        self._progress.begin_run(f"{case.name}, {work.name}, not timed")
        run_once(self._sessions.get(attentions=False), Full(), None, short, lambda steps: self._progress.advance(0))
        if case.mode:
            session = self._session(case)
            run_once(session, case.policy, case.lossless, short, lambda steps: self._progress.advance(0))

    def _comparison(self, case: RunCase, work: Workload) -> Comparison:
        lossless = case.lossless
        key = self._key(case, work, side="comparison")
        stored = self.store.get(key)
        self._progress.begin_run(f"{case.name}, {work.name}, K and V compared")
        if stored is not None:
            found = Comparison.from_dict(stored, RUNS)
        elif lossless is None:
            raise KvmnnError(f"{case.name}: nothing is stored, so nothing can be compared")
        else:
            found = compare_contents(self._session(case), case.policy, lossless, work, self._progress.advance)
            self.store.put(key, found.to_dict())
        self._progress.end_run()
        return found

    def _quality(self, case: RunCase) -> Quality:
        """The change of perplexity; cases that evict alike share it."""
        about = json.dumps([case.policy_keys, case.settings.to_dict()], sort_keys=True)
        steps = self._quality_steps(case)
        self._progress.begin_run(f"{case.name}, perplexity")
        if about not in self._qualities:
            self._sessions.release()  # the evaluation opens its own
            told = QualityProgress(steps, self._progress.advance)
            documents, store = self._texts.documents, self._directory / CELLS
            self._qualities[about] = measure_quality(
                self._model, documents, case, jobs=self._jobs, store=store, progress=told
            )
            steps = told.left
        self._progress.advance(steps)
        self._progress.end_run()
        return self._qualities[about]

    def _session(self, case: RunCase) -> DecoderSession:
        return self._sessions.get(attentions=case.policy.needs_attention)

    def _run_key(self, case: RunCase, work: Workload, side: str, repeat: int, place: int) -> str:
        return self._key(case, work, side=side, repeat=repeat, round=place, take=self.take)

    def _key(self, case: RunCase, work: Workload, **more: Any) -> str:
        engine = {} if more.get("side") == "without" else case.engine
        return key_of(
            model=self._sha256,
            kvmnn=version(),
            case=case.name,
            engine=engine,
            work=work.digest,
            threads=self._settings.threads,
            **more,
        )

    def _note_down(self, cases: Sequence[RunCase], rounds: int) -> None:
        self.settings_of_cases = {"": self._settings_of_all(rounds), **{case.name: case.changed for case in cases}}
        entries = {
            case.name: {"mode": case.mode, "engine": case.engine, "limits": case.limits.to_dict()} for case in cases
        }
        common = [self.about, self.take, self.settings_of_cases[""], self._settings.to_dict()]
        self.stamps = {
            case.name: key_of(common=common, entry=entries[case.name], work=case.settings.to_dict()) for case in cases
        }
        about = {
            "kvmnn_gate_run": 1,
            "command": self._command,
            "model": os.fspath(self._model),
            "python": platform.python_version(),
            **self.about,
            "take": self.take,
            "settings": self._settings.to_dict(),
            "round": key_of(common=common),
        }
        entries = {name: {**entry, "stamp": self.stamps[name]} for name, entry in entries.items()}
        about["cases"] = {**self._measured_before(str(about["round"]), entries), **entries}
        self._round_begun(about)

    def _measured_before(self, mark: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Cases that earlier commands of the same round have measured."""
        before = _read_about(self._directory)
        cases = before.get("cases")
        if before.get("round") != mark or not isinstance(cases, dict):
            return {}
        there = stamps_of(self._directory, cases)
        return {name: cases[name] for name, same in there.items() if same and name not in entries}

    def _round_begun(self, about: dict[str, Any]) -> None:
        """Note it down; what of it is there first, so that no crash leaves the verdict of an earlier one."""
        write_round(collect(self._directory, about))
        with FileOutput(self._directory / ABOUT, force=True) as output:
            output.file.write(json.dumps(about, indent=2).encode())
            output.commit()

    def _settings_of_all(self, rounds: int) -> dict[str, Any]:
        """Settings that are not the default, texts and tokenizer among them."""
        usual = RunSettings().to_dict()
        found = {name: value for name, value in self._settings.to_dict().items() if usual[name] != value}
        texts = self._texts.sha256s
        found |= {"texts_sha256": hashlib.sha256(" ".join(texts).encode()).hexdigest()} if texts else {}
        return found | ({"rounds": rounds} if rounds != 1 else {})


def _take(directory: Path, again: bool) -> int:
    """How often everything was measured anew: one more than noted down, if that came to its end."""
    take = int(quantity(_read_about(directory), "take")) or 1
    return take + 1 if again and has_take(directory, take) else take


def _read_about(directory: Path) -> dict[str, Any]:
    try:
        return read_object(directory / ABOUT)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _check_directory(directory: Path, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    there = directory.is_dir() and any(directory.iterdir())
    if there and not (directory / ABOUT).is_file() and not force:
        raise OutputError(
            f"{directory}: holds something else than runs of gate run (-f or --force takes it all the same)"
        )
