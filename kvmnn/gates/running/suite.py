"""A suite on a model: runs side by side, contents compared, perplexity measured, and the verdicts in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

from ...errors import KvmnnError, OutputError
from ...evaluation.evaluating import model_sha256
from ...files.json_document import read_object
from ...files.output import FileOutput, failures
from ...lm.documents import Document, read_documents
from ...lm.session import DecoderSession
from ...lm.tokenizer import Tokenizer
from ...policies.full import Full
from ...version import version
from ..logs.demo_records import quantity
from ..summary.collecting import ABOUT, collect, stamps_of
from ..summary.saving import write_round
from .figures import Pair
from .manifests import prompt_files
from .measuring import Comparison, RunRecord, compare_contents, run_once
from .past import has_take
from .quality import Quality, measure_quality
from .run_cases import RunCase
from .run_store import RunStore, key_of
from .settings import RunSettings
from .work import Workload, needles, real_prompts, several_turns, synthetic, text_beginnings

RUNS, CELLS = "runs.jsonl", "cells.jsonl"
"""Files of a folder of runs: what is done, and the perplexity's."""

_SIDES = ("without", "candidate")

_WARM_UP = 4
"""Tokens that are generated before anything is timed."""


class SuiteProgress(Protocol):
    """Who is told how far a suite is."""

    def start(self, runs: int, steps: int) -> None:
        """How many runs there are, and how many decode steps of those that are not there already."""

    def advance(self, steps: int, case: str) -> None:
        """That a run is done, and how many of these steps it took."""


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
        self._plain = DecoderSession.open(model, threads=settings.threads)
        self._sessions: dict[bool, DecoderSession] = {False: self._plain}
        self._tokenizer = Tokenizer.open(tokenizer or model)
        self._notes: list[str] = []
        longest = max(*settings.buckets, *settings.prompts, settings.quality_tokens, 4 * min(settings.buckets))
        self._documents: list[Document] = []
        if texts:
            self._documents = read_documents(texts, self._tokenizer, longest, notes=[])
        self._prompts = self._documents
        if settings.prompt_manifest:
            listed = prompt_files(settings.prompt_manifest, texts)
            self._prompts = read_documents(listed, self._tokenizer, longest, notes=[])
        self._sha256 = model_sha256(model)
        self._qualities: dict[str, Quality] = {}
        with failures(directory):
            self._directory.mkdir(parents=True, exist_ok=True)
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
        """The cases one after another; what is there already is not run again."""
        work = {case.name: self._work(case) for case in cases}
        self._note_down(cases, rounds)
        if progress is not None:
            left = [steps for case in cases for steps in self._steps(case, work[case.name][0], rounds)]
            progress.start(len(left), sum(left))
        for case in cases:
            found, notes = work[case.name]
            yield self._measured(case, found, notes, rounds, progress)

    def _steps(self, case: RunCase, works: list[Workload], rounds: int) -> Iterator[int]:
        """Of each run of a case the decode steps that it takes, which is most of the time; 0 where it is there."""
        for work in works:
            if case.mode:
                yield 0 if self._key(case, work, side="comparison") in self.store else 2 * work.steps
            for place, repeat, side in product(range(rounds), range(case.settings.repeats), _SIDES):
                yield 0 if self._run_key(case, work, side, repeat, place) in self.store else work.steps
        if case.evicts and self._documents:
            yield self._quality_steps(case)

    def _quality_steps(self, case: RunCase) -> int:
        """With and without eviction; what other cases evaluated already is not known beforehand."""
        settings = case.settings
        texts = min(settings.quality_texts, len(self._documents))
        return 2 * texts * (settings.quality_tokens - settings.quality_prompt)

    def _work(self, case: RunCase) -> tuple[list[Workload], list[str]]:
        interface, notes = self._plain.interface, list[str]()
        limit, settings = interface.max_positions, case.settings
        if case.kind == "runtime" and settings.synthetic:
            if case.mode:
                notes.append(
                    "The prompts of the runtime cases are one token repeated, whose K and V compress better than those "
                    "of texts (synthetic)."
                )
            return synthetic(settings, interface.vocab, self._tokenizer.bos), notes
        if not (self._prompts if case.kind == "llm_demo" else self._documents):
            raise KvmnnError(f"{case.name} needs texts: expected --prompts DIR or FILE")
        if case.kind == "runtime":
            return text_beginnings(self._documents, settings), notes
        if case.kind == "llm_demo":
            return real_prompts(self._prompts, settings, limit, notes), notes
        if case.kind == "multi_turn":
            return several_turns(self._documents, settings, limit), notes
        return needles(self._documents, self._tokenizer, settings, limit), notes

    def _measured(
        self, case: RunCase, works: list[Workload], notes: list[str], rounds: int, progress: SuiteProgress | None
    ) -> Measured:
        def done(steps: int) -> None:
            if progress is not None:
                progress.advance(steps, case.name)

        session = self._session(case)
        made = tuple(tuple(self._round(case, session, works, place, done)) for place in range(rounds))
        comparisons = []
        for work in works if case.mode else ():
            there = self._key(case, work, side="comparison") in self.store
            comparisons.append(self._comparison(case, session, work))
            done(0 if there else 2 * work.steps)
        quality = None
        if case.evicts and self._documents:
            quality = self._quality(case)
            done(self._quality_steps(case))
        return Measured(
            case=case,
            rounds=made,
            comparisons=tuple(comparisons),
            quality=quality,
            notes=tuple(notes),
            stamp=self.stamps[case.name],
        )

    def _round(
        self, case: RunCase, session: DecoderSession, works: list[Workload], place: int, done: Callable[[int], None]
    ) -> Iterator[Pair]:
        """Both sides of each piece of work one after the other, the first of them in turns."""
        warm = False
        for work in works:
            for repeat in range(case.settings.repeats):
                sides: dict[str, RunRecord] = {}
                for side in _SIDES if (repeat + place) % 2 == 0 else _SIDES[::-1]:
                    key = self._run_key(case, work, side, repeat, place)
                    stored = self.store.get(key)
                    if stored is None and not warm:
                        self._warm_up(case, session, work)
                        warm = True
                    sides[side] = self._side(case, session, work, side, key, stored)
                    done(work.steps if stored is None else 0)
                yield Pair(work=work, without=sides["without"], candidate=sides["candidate"])

    def _side(
        self, case: RunCase, session: DecoderSession, work: Workload, side: str, key: str, stored: Any
    ) -> RunRecord:
        if stored is not None:
            return RunRecord.from_dict(stored, RUNS)
        if side == "without":
            made = run_once(self._plain, Full(), None, work)
        else:
            made = run_once(session, case.policy, case.lossless, work)
        self.store.put(key, made.to_dict())
        return made

    def _warm_up(self, case: RunCase, session: DecoderSession, work: Workload) -> None:
        short = Workload(name="warm-up", bucket="", turns=(work.turns[0],), new_tokens=_WARM_UP)
        run_once(self._plain, Full(), None, short)
        if case.mode:
            run_once(session, case.policy, case.lossless, short)

    def _comparison(self, case: RunCase, session: DecoderSession, work: Workload) -> Comparison:
        lossless = case.lossless
        key = self._key(case, work, side="comparison")
        stored = self.store.get(key)
        if stored is not None:
            return Comparison.from_dict(stored, RUNS)
        if lossless is None:
            raise KvmnnError(f"{case.name}: nothing is stored, so nothing can be compared")
        made = compare_contents(session, case.policy, lossless, work)
        self.store.put(key, made.to_dict())
        return made

    def _quality(self, case: RunCase) -> Quality:
        """The change of perplexity; cases that evict alike share it."""
        about = json.dumps([case.policy_keys, case.settings.to_dict()], sort_keys=True)
        if about not in self._qualities:
            store = self._directory / CELLS
            self._qualities[about] = measure_quality(self._model, self._documents, case, jobs=self._jobs, store=store)
        return self._qualities[about]

    def _session(self, case: RunCase) -> DecoderSession:
        """With attention probabilities where the policy needs them: their price is part of the candidate's speed."""
        attentions = case.policy.needs_attention
        if attentions not in self._sessions:
            self._sessions[attentions] = DecoderSession.open(
                self._model, attentions=attentions, threads=self._settings.threads
            )
        return self._sessions[attentions]

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
        texts = dict.fromkeys(document.sha256 for document in (*self._documents, *self._prompts))
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
