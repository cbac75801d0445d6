"""A suite on a model: runs side by side, contents compared, perplexity measured, and the verdicts in a folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import KvmnnError, OutputError
from ...evaluation import Settings, evaluate
from ...evaluation.evaluating import model_sha256
from ...evaluation.setup.configurations import named
from ...files.output import FileOutput, failures
from ...lm.documents import Document, read_documents
from ...lm.session import DecoderSession
from ...lm.tokenizer import Tokenizer
from ...policies.full import Full
from ...policies.h2o_engine import H2OEngine
from ...version import version
from .case_gates import Pair, Quality
from .manifests import prompt_files
from .measuring import Comparison, RunRecord, compare_contents, run_once
from .run_cases import RunCase
from .run_store import RunStore, key_of
from .settings import RunSettings
from .work import Workload, needles, real_prompts, several_turns, synthetic, text_beginnings

RUNS, ABOUT, CELLS = "runs.jsonl", "run.json", "cells.jsonl"
"""Files of a folder of runs: what is done, of which model and settings, and the perplexity's."""

_WARM_UP = 4
"""Tokens that are generated before anything is timed."""


class SuiteProgress(Protocol):
    """Who is told how far a suite is."""

    def start(self, runs: int) -> None:
        """How many runs there are."""

    def advance(self, runs: int, case: str) -> None:
        """That a run is done."""


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
    """

    case: RunCase
    rounds: tuple[tuple[Pair, ...], ...]
    comparisons: tuple[Comparison, ...]
    quality: Quality | None
    notes: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[Pair]:
        """Those of all rounds."""
        return [pair for part in self.rounds for pair in part]


class Suite:
    """Cases on one model, with what is done kept in a folder.

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

    def measure(
        self, cases: Sequence[RunCase], rounds: int, progress: SuiteProgress | None = None
    ) -> Iterator[Measured]:
        """The cases one after another; what is there already is not run again."""
        work = {case.name: self._work(case) for case in cases}
        self._note_down(cases)
        if progress is not None:
            progress.start(sum(self._runs(case, len(work[case.name][0]), rounds) for case in cases))
        for case in cases:
            found, notes = work[case.name]
            yield self._measured(case, found, notes, rounds, progress)

    def _runs(self, case: RunCase, works: int, rounds: int) -> int:
        compared = works if case.mode else 0
        quality = 1 if case.mode and self._documents else 0
        return 2 * works * case.settings.repeats * rounds + compared + quality

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
        def done() -> None:
            if progress is not None:
                progress.advance(1, case.name)

        session = self._session(case)
        made = tuple(tuple(self._round(case, session, works, place, done)) for place in range(rounds))
        comparisons = []
        for work in works if case.mode else ():
            comparisons.append(self._comparison(case, session, work))
            done()
        quality = None
        if case.mode and self._documents:
            quality = self._quality(case)
            done()
        return Measured(case=case, rounds=made, comparisons=tuple(comparisons), quality=quality, notes=tuple(notes))

    def _round(
        self, case: RunCase, session: DecoderSession, works: list[Workload], place: int, done: Callable[[], None]
    ) -> Iterator[Pair]:
        """Both sides of each piece of work one after the other, the first of them in turns."""
        warm = False
        for work in works:
            for repeat in range(case.settings.repeats):
                sides: dict[str, RunRecord] = {}
                for side in ("without", "candidate") if (repeat + place) % 2 == 0 else ("candidate", "without"):
                    key = self._key(case, work, side=side, repeat=repeat, round=place)
                    stored = self.store.get(key)
                    if stored is None and not warm:
                        self._warm_up(case, session, work)
                        warm = True
                    sides[side] = self._side(case, session, work, side, key, stored)
                    done()
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
        """The change of perplexity by what is evicted; what is stored changes no bit, which the comparison shows."""
        about = json.dumps([case.policy_keys, case.settings.to_dict()], sort_keys=True)
        if about not in self._qualities:
            self._qualities[about] = self._evaluated(case)
        return self._qualities[about]

    def _evaluated(self, case: RunCase) -> Quality:
        settings = case.settings
        documents = [_cut(document, settings.quality_tokens) for document in self._documents[: settings.quality_texts]]
        wanted = named(H2OEngine.name, H2OEngine.options_from_engine(case.engine))
        result = evaluate(
            self._model,
            documents,
            [wanted],
            settings=Settings(
                tokens=settings.quality_tokens,
                prompt=settings.quality_prompt,
                threads=settings.threads,
                seed=settings.seed,
                timing=False,
            ),
            jobs=self._jobs,
            store=self._directory / CELLS,
        )
        if result.refused:
            raise KvmnnError(f"{case.name}: {result.refused[0].reason}")
        row, texts = result.rows[-1], result.documents
        return _quality_of(row.versus_full, len(texts), sum(text.tokens for text in texts), row.lossy_ratio or 1.0)

    def _session(self, case: RunCase) -> DecoderSession:
        """With attention probabilities where the policy needs them: their price is part of the candidate's speed."""
        attentions = case.policy.needs_attention
        if attentions not in self._sessions:
            self._sessions[attentions] = DecoderSession.open(
                self._model, attentions=attentions, threads=self._settings.threads
            )
        return self._sessions[attentions]

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

    def _note_down(self, cases: Sequence[RunCase]) -> None:
        about = {
            "kvmnn_gate_run": 1,
            "command": self._command,
            "model": os.fspath(self._model),
            "model_sha256": self._sha256,
            "kvmnn": version(),
            "python": platform.python_version(),
            "machine": platform.platform(),
            "processors": os.cpu_count(),
            "settings": self._settings.to_dict(),
            "cases": {
                case.name: {"mode": case.mode, "engine": case.engine, "limits": case.limits.to_dict()} for case in cases
            },
        }
        with FileOutput(self._directory / ABOUT, force=True) as output:
            output.file.write(json.dumps(about, indent=2).encode())
            output.commit()


def _quality_of(difference: Any, texts: int, tokens: int, lossy_ratio: float) -> Quality:
    from math import expm1

    def share(nats: float | None) -> float | None:
        return None if nats is None else expm1(nats)

    return Quality(
        mean=expm1(difference.nll),
        low=share(difference.low),
        high=share(difference.high),
        texts=texts,
        tokens=tokens,
        lossy_ratio=lossy_ratio,
    )


def _cut(document: Document, tokens: int) -> Document:
    """The beginning of a text; bytes are then those of all of it, which perplexity does not use."""
    if document.tokens <= tokens:
        return document
    return Document(
        name=document.name,
        ids=document.ids[: tokens + 1],
        nbytes=document.nbytes,
        sha256=document.sha256,
        begins_with_bos=document.begins_with_bos,
        asked=tokens,
    )


def _check_directory(directory: Path, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    there = directory.is_dir() and any(directory.iterdir())
    if there and not (directory / ABOUT).is_file() and not force:
        raise OutputError(
            f"{directory}: holds something else than runs of gate run (-f or --force takes it all the same)"
        )
