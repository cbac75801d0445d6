"""Search settings that reach all targets together: policies, budgets, recent shares and modes of the runtime."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import expm1
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.packages import get_version
from ..._util.text import pluralize, wrap_lines
from ...errors import KvmnnError, OptionError
from ...evaluation import EvaluationSettings, evaluate
from ...evaluation.runner import hash_model, ignore_refusals
from ...evaluation.scoring import MIN_DOCUMENTS_FOR_INTERVAL
from ...evaluation.settings import Configuration, resolve_configurations
from ...files.atomic import FileOutput, wrap_os_errors
from ...files.schema import Record
from ...policies.policy import FullCache
from ...policies.specs import accepts_option
from ...reports.records import ResultRow
from ...reports.table import Column, Table
from ...runtime import RuntimeConfig
from ..slowdown import DecodeSlowdown
from ..verdict import FAIL, NOT_MEASURED, PASS, UNCLEAR, TerminalResult, Verdict, verdict_from
from .cases import build_cases
from .measurement import ModelSessions, PerplexityProgress, RunRecord, measure_run, truncate_document
from .settings import RunConfig, RunSettings
from .suite import CELLS_JOURNAL, RunStore, SuiteProgress, check_directory, compute_key
from .workloads import PromptTexts, Workload

DEFAULT_SETTINGS = RunSettings(prompts=(512,), generate=64, repeats=4, quality_tokens=512, quality_prompt=384)
"""Smaller than those of the cases, as there are many of them."""

DEFAULT_POLICIES = (
    "streaming",
    "h2o_decayed",
    "tova:phase=both,interval=1",  # else all tokens after the prompt stay, and the ratio of a run is not reached
    "keydiff:phase=both,interval=1",
)
_BUDGET_MARGINS = (1.0, 1.25)
"""Budgets without ``--budget``: what the target ratio leaves of the tokens, over these."""

_RECENT_SHARES = ("25%", "50%")
MODES = ("store", "full")
DEFAULT_MAX_CELLS = 8
"""Maximum number of cells that are run by default: the best of each default policy, in both modes."""

MAX_CELLS = 1000
_SCREENING_TEXTS = 2
"""Texts on which all configurations are measured, before the best of each policy are on all texts."""

_PROMPT_TOKENS_PER_STEP = 8
"""Prompt tokens that take the time of one decode step, roughly: a step reads all weights for one token."""

_LOSSLESS_OPTIONS: dict[str, Any] = {
    "kv_lossless_scope": "front_n",
    "kv_lossless_block_tokens": 32,
    "kv_lossless_hot_recent_tokens": 32,
    "kv_lossless_hot_sink_tokens": 4,
    "kv_lossless_store_disable_front": False,
    "kv_lossless_store_grouped_step_tokens": 32,
    "kv_h2o_enable": False,
    "kv_h2o_trigger_min_tokens": 1,
}
"""The cases' options encode nothing of a cache that is cut to 170 tokens; ``--suite-config`` changes these."""

RESULT_FILE, RUNS_FILE = "search.json", "search-runs.jsonl"


@dataclass(frozen=True, kw_only=True)
class SearchTargets(Record):
    """What a setting must reach: least ratios, and largest losses of decode speed and of perplexity, as shares."""

    lossy: float = 3.0
    lossless: float = 1.3
    max_drop: float = 0.05
    max_perplexity: float = 0.05

    def __post_init__(self) -> None:
        for name in ("lossy", "lossless"):
            if not 1 <= getattr(self, name) <= 1000:
                raise OptionError(f"{name}: found {getattr(self, name):g}, expected a ratio from 1 to 1,000")
        for name in ("max_drop", "max_perplexity"):
            if not 0 <= getattr(self, name) <= 1000:
                raise OptionError(f"{name}: found {getattr(self, name):g}, expected a share from 0 on")


@dataclass(frozen=True, kw_only=True)
class SearchCell(Record):
    """One setting, and what was measured of it."""

    label: str
    configuration: Configuration
    #: Mode of the lossless runtime.
    mode: str
    #: Bytes of all tokens over those kept at the end; the least of the runs, of the texts where it was not run.
    lossy_ratio: float
    #: Relative change of perplexity with its 95 % interval over the texts, and KL divergence from the full cache.
    perplexity: float
    perplexity_low: float | None
    perplexity_high: float | None
    kl: float | None
    #: Number of texts of these.
    texts: int = 0
    #: Whether it was run and timed. If not, the figures below are unknown.
    is_timed: bool = False
    #: Raw over compressed bytes of what was encoded; None if nothing was.
    lossless_ratio: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None
    #: Verdict on each target.
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Return whether it reaches all targets."""
        return all(verdict == PASS for verdict in self.verdicts.values())

    @property
    def objectives(self) -> tuple[float, ...]:
        """What is better if larger, for the Pareto front."""
        return self.lossy_ratio, self.lossless_ratio or 1.0, -(self.drop or 0.0), -self.perplexity

    def dominates(self, rival: SearchCell) -> bool:
        """Return whether it is at least as good in everything, and better in something."""
        pairs = list(zip(self.objectives, rival.objectives, strict=True))
        return all(own >= theirs for own, theirs in pairs) and any(own > theirs for own, theirs in pairs)


@dataclass(frozen=True, kw_only=True)
class SearchResult(TerminalResult):
    """What a search tried, what passes, and else what stands in the way."""

    json_keys = "kvmnn model targets passed=has_passed front_labels blocking cells notes"

    kvmnn: str
    model: str
    targets: SearchTargets
    #: Every setting that was considered, those that were timed first.
    cells: tuple[SearchCell, ...]
    notes: tuple[str, ...] = ()

    @property
    def passing(self) -> list[SearchCell]:
        """Settings that reach all targets, the best lossy ratio first."""
        return sorted((cell for cell in self.cells if cell.has_passed), key=lambda cell: -cell.lossy_ratio)

    @property
    def has_passed(self) -> bool:
        """Return whether some setting reaches all targets."""
        return bool(self.passing)

    @property
    def front(self) -> list[SearchCell]:
        """Timed settings that no other one is better than in everything."""
        timed = [cell for cell in self.cells if cell.is_timed]
        return [cell for cell in timed if not any(rival.dominates(cell) for rival in timed)]

    @property
    def front_labels(self) -> list[str]:
        """Labels of these."""
        return [cell.label for cell in self.front]

    @property
    def blocking(self) -> dict[str, int]:
        """For each target, how many timed settings would pass without it."""
        timed = [cell for cell in self.cells if cell.is_timed]
        return {
            target: sum(
                all(verdict == PASS for name, verdict in cell.verdicts.items() if name != target) for cell in timed
            )
            for target in (timed[0].verdicts if timed else ())
        }

    def format_lines(self, width: int) -> list[str]:
        """Format the settings that were run and, if none passes, the target in the way, in `width` columns."""
        targets = self.targets
        num_timed = sum(cell.is_timed for cell in self.cells)
        heading = (
            f"lossy >= {targets.lossy:g}, lossless >= {targets.lossless:g}, decode drop <= {targets.max_drop:.0%}, "
            f"perplexity <= {targets.max_perplexity:+.0%}: {len(self.passing)} of {num_timed} settings that were run "
            f"pass; {len(self.cells) - num_timed} more were not run"
        )
        lines = [f"{'PASS' if self.has_passed else 'FAIL'}: {heading}", ""]
        if not self.has_passed:
            lines += [self._format_blocking(), "", f"Pareto front: {'; '.join(self.front_labels) or 'none'}.", ""]
        (table,) = self.to_tables()
        return [*wrap_lines(lines, width), *table.to_terminal(width).splitlines(), "", *wrap_lines(self.notes, width)]

    def to_tables(self) -> list[Table]:
        """Return the settings that were run: those that pass, the Pareto front, and others."""
        timed, front = [cell for cell in self.cells if cell.is_timed], self.front
        failed = [cell for cell in timed if not cell.has_passed]
        cells = [*self.passing, *sorted(failed, key=lambda cell: cell not in front)]
        return [Table.from_items("", _COLUMNS, cells)]

    def _format_blocking(self) -> str:
        if not self.blocking:
            return "Nothing could be run: the notes say why."
        open_targets = [f"{name} ({number})" for name, number in self.blocking.items() if number]
        if open_targets:
            return f"In the way is one target alone; without it so many would pass: {', '.join(open_targets)}."
        failures = {
            name: sum(cell.verdicts.get(name) != PASS for cell in self.cells if cell.is_timed) for name in self.blocking
        }
        counts = ", ".join(f"{name} {number}" for name, number in failures.items())
        return f"No target alone is in the way: each setting misses two or more. Missed by so many: {counts}."


def _format_drop(cell: SearchCell) -> str | None:
    if cell.drop is None:
        return None
    interval = "" if cell.drop_low is None else f" [{cell.drop_low:+.0%}, {cell.drop_high:+.0%}]"
    return f"{cell.drop:+.0%}{interval}"


def _format_missed(cell: SearchCell) -> str:
    return ", ".join(f"{name} {verdict}" for name, verdict in cell.verdicts.items() if verdict != PASS) or "all pass"


_COLUMNS = (
    Column("setting", lambda cell: str(cell.label), is_left_aligned=True),
    Column("lossy", lambda cell: f"{cell.lossy_ratio:.3f}"),
    Column("lossless", lambda cell: None if cell.lossless_ratio is None else f"{cell.lossless_ratio:.3f}"),
    Column("decode drop", _format_drop),
    Column("perplexity", lambda cell: f"{cell.perplexity:+.2%}"),
    Column("KL", lambda cell: None if cell.kl is None else f"{cell.kl:.4f}", 2),
    Column("missed", _format_missed, 1, is_left_aligned=True),
)


class Search:
    """A search on one model, in a folder that keeps what is measured.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder.
    directory
        Folder of the results and of finished runs; the same search goes on from there.
    texts
        Texts for the perplexity, and for prompts: ten of ``quality_tokens``, else they are split. None: a built-in one.
    targets
        What must be reached.
    policies, budgets
        Specs of policies, and budgets for them (`kvmnn.evaluation.evaluate`); defaults follow from the lossy target.
        A policy with an option ``recent`` is tried with a quarter and a half of its budget, unless its spec says.
    config
        Settings, and keys of the lossless runtime.
    max_cells
        Settings (a policy in a mode) that are run and timed, at most.
    """

    def __init__(
        self,
        model: str,
        directory: str,
        texts: Sequence[str],
        *,
        targets: SearchTargets,
        policies: Sequence[str] = (),
        budgets: Sequence[int | str] = (),
        config: RunConfig | None = None,
        max_cells: int = DEFAULT_MAX_CELLS,
        tokenizer: str | None = None,
        jobs: int = 0,
        force: bool = False,
    ) -> None:
        if not 1 <= max_cells <= MAX_CELLS:
            raise OptionError(f"max_cells: found {max_cells}, expected 1 to {MAX_CELLS:,}")
        self._model, self._directory, self._targets, self._jobs = model, Path(directory), targets, jobs
        self._config = config or RunConfig(settings=DEFAULT_SETTINGS)
        self._settings, self._max_cells = self._config.settings, max_cells
        if not (self._directory / RESULT_FILE).is_file() and not (self._directory / RUNS_FILE).is_file():
            check_directory(self._directory, force)
        self.configurations = _build_configurations(policies, budgets, targets, self._settings)
        self._texts = PromptTexts(model, self._settings, texts, tokenizer)
        self._choose_texts(texts)
        num_configurations = len(self.configurations)
        self._num_timed = min(max_cells, num_configurations * len(MODES))
        self._num_finalists = -(-self._num_timed // len(MODES))
        # A first stage that removes nothing is left out.
        self._num_screened = num_configurations if self._num_finalists < num_configurations else 0
        self._sha256 = hash_model(model)

    def _choose_texts(self, paths: Sequence[str]) -> None:
        """Choose the texts that are long enough; if they are too few, parts of all."""
        texts, num_tokens = self._texts, self._settings.quality_tokens
        num_read = len(texts.documents)
        texts.documents = [document for document in texts.documents if document.num_scored >= num_tokens]
        if len(texts.documents) < MIN_DOCUMENTS_FOR_INTERVAL:
            texts.split(paths, MIN_DOCUMENTS_FOR_INTERVAL)
        if len(texts.documents) < MIN_DOCUMENTS_FOR_INTERVAL:
            size = max(*self._settings.prompts, num_tokens)
            raise KvmnnError(
                f"{pluralize(num_read, 'text')}, {pluralize(len(texts.documents), 'part')} of {size:,} tokens: "
                f"expected at least {MIN_DOCUMENTS_FOR_INTERVAL} such parts (--text), for an interval of the "
                "perplexity; without --text a built-in text is taken"
            )

    def describe_plan(self) -> str:
        """Describe what will be run, in one line."""
        settings, num_texts = self._settings, len(self._select_documents())
        configurations = pluralize(len(self.configurations), "configuration")
        texts = f"texts of {settings.quality_tokens:,} tokens"
        screening = (
            f"perplexity of {configurations} on {_SCREENING_TEXTS} {texts}, of {self._num_finalists} on {num_texts}"
            if self._num_screened
            else f"perplexity of {configurations} on {num_texts} {texts}"
        )
        return (
            f"{screening}; then at most {pluralize(self._num_timed, 'setting')} (--max-cells), each "
            f"{pluralize(settings.repeats, 'pair')} of runs with prompts of {', '.join(map(str, settings.prompts))} "
            f"tokens and {settings.generate} more"
        )

    def run(self, progress: SuiteProgress) -> SearchResult:
        """Measure quality of all settings, then run and time the most promising ones.

        `progress` counts decode steps; tokens of prompts count as the steps that take the same time.
        """
        with wrap_os_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        settings, documents = self._settings, self._select_documents()
        screening_steps = self._count_quality_steps(self._num_screened, _SCREENING_TEXTS)
        num_other_texts = len(documents) - (_SCREENING_TEXTS if self._num_screened else 0)
        final_steps = self._count_quality_steps(self._num_finalists, num_other_texts)
        run_steps = sum(settings.generate + tokens // _PROMPT_TOKENS_PER_STEP for tokens in settings.prompts)
        progress.start(
            2 + self._num_timed, screening_steps + final_steps + 2 * settings.repeats * self._num_timed * run_steps
        )
        untimed: list[SearchCell] = []
        finalists = self.configurations
        if self._num_screened:
            screened = self._measure_quality(documents[:_SCREENING_TEXTS], finalists, screening_steps, progress)
            ranked = self._rank(screened.cells)
            labels = list(dict.fromkeys(cell.configuration.label for cell in ranked))[: self._num_finalists]
            finalists = [entry for entry in finalists if entry.label in labels]
            untimed = [cell for cell in ranked if cell.configuration.label not in labels]
        progress.end_run()
        quality = self._measure_quality(documents, finalists, final_steps, progress)
        progress.end_run()
        ranked = self._rank(quality.cells)
        promising = [cell for cell in ranked if self._judge(cell).verdicts["perplexity"] != FAIL] or ranked
        chosen = promising[: self._max_cells]
        untimed = [cell for cell in ranked if cell not in chosen] + untimed
        store = RunStore(self._directory / RUNS_FILE)
        try:
            timed = list(self._time_cells(chosen, store, progress))
        finally:
            store.close()
        result = SearchResult(
            kvmnn=get_version(),
            model=os.fspath(self._model),
            targets=self._targets,
            cells=(*timed, *(self._judge(cell) for cell in untimed)),
            notes=(*quality.notes, *self._describe(len(timed))),
        )
        with FileOutput(self._directory / RESULT_FILE, force=True) as output:
            output.file.write((json.dumps(result.to_dict(), indent=1) + "\n").encode())
            output.commit()
        return result

    def _select_documents(self) -> list[Any]:
        settings = self._settings
        documents = self._texts.documents[: settings.quality_texts]
        return [truncate_document(document, settings.quality_tokens) for document in documents]

    def _count_quality_steps(self, num_configurations: int, num_texts: int) -> int:
        """Count the steps of texts under configurations and the full cache, prompts included; 0 for none."""
        settings = self._settings
        steps = settings.quality_tokens - settings.quality_prompt + settings.quality_prompt // _PROMPT_TOKENS_PER_STEP
        return (num_configurations + 1) * num_texts * steps // max(1, self._jobs) if num_configurations else 0

    def _measure_quality(
        self, documents: Sequence[Any], configurations: Sequence[Configuration], steps: int, progress: SuiteProgress
    ) -> _Quality:
        settings = self._settings
        progress.begin_run(f"perplexity of {len(configurations)} policies and budgets, {len(documents)} texts")
        quality_progress = PerplexityProgress(steps, progress.advance)
        with ignore_refusals():
            result = evaluate(
                self._model,
                documents,
                configurations,
                settings=EvaluationSettings(
                    tokens=settings.quality_tokens,
                    prompt=settings.quality_prompt,
                    threads=settings.threads,
                    seed=settings.seed,
                ),
                jobs=self._jobs,
                store=self._directory / CELLS_JOURNAL,
                progress=quality_progress,
            )
        progress.advance(quality_progress.remaining_units)
        configuration_by_label = {entry.label: entry for entry in configurations}
        has_interval = len(documents) >= min(MIN_DOCUMENTS_FOR_INTERVAL, settings.quality_texts)
        cells = [
            _build_cell(row, configuration_by_label[row.label], mode, len(documents), has_interval=has_interval)
            for row in result.rows[1:]
            for mode in MODES
            if row.label in configuration_by_label
        ]
        notes = [f"{refusal.label} was not tried: {refusal.reason}" for refusal in result.refused]
        idle = [row.label for row in result.rows[1:] if not row.evicted]
        if idle:
            notes.append(f"In the texts nothing was evicted by {', '.join(idle[:4])}: their perplexity says nothing.")
        return _Quality(cells, notes)

    def _rank(self, cells: Sequence[SearchCell]) -> list[SearchCell]:
        """Order cells: those that miss no target first, then the best of each policy, its second, and so on.

        What a policy costs in speed is not known yet, so the best of all would often be those of one slow policy.
        """
        best_first = sorted(cells, key=lambda cell: (self._count_missed(cell), cell.perplexity))
        seen: Counter[tuple[str, str]] = Counter()
        places: dict[str, int] = {}
        for cell in best_first:
            places[cell.label] = seen[cell.configuration.policy, cell.mode]
            seen[cell.configuration.policy, cell.mode] += 1
        return sorted(best_first, key=lambda cell: (self._count_missed(cell), places[cell.label]))

    def _count_missed(self, cell: SearchCell) -> int:
        """Return 1 if the ratio in a run or the perplexity misses its target, else 0."""
        settings, budget = self._settings, cell.configuration.options.get("budget")
        num_tokens = min(settings.prompts) + settings.generate - 1
        ratio = cell.lossy_ratio
        if isinstance(budget, int) and budget > 0:  # texts and runs have different lengths, so it is another ratio
            is_prompt_only = cell.configuration.create_policy().is_prompt_only
            ratio = num_tokens / (budget + (settings.generate - 1 if is_prompt_only else 0))
        return int(ratio < self._targets.lossy or cell.perplexity > self._targets.max_perplexity)

    def _time_cells(
        self, cells: Sequence[SearchCell], store: RunStore, progress: SuiteProgress
    ) -> Iterator[SearchCell]:
        sessions = ModelSessions(self._model, self._settings.threads)
        baseline_case = build_cases("runtime", RunConfig(settings=self._settings))[0]
        workloads, _ = self._texts.build_workloads(baseline_case, sessions.interface)
        for cell in cells:
            progress.begin_run(f"{cell.label}, run")
            pairs = [pair for work in workloads for pair in self._run_pairs(cell, work, sessions, store, progress)]
            progress.end_run()
            yield self._judge(_add_runs(cell, pairs))

    def _run_pairs(
        self, cell: SearchCell, work: Workload, sessions: ModelSessions, store: RunStore, progress: SuiteProgress
    ) -> Iterator[tuple[RunRecord, RunRecord]]:
        """Run both sides of a workload in turns; which is first alternates."""
        engine = self._build_engine(cell.mode, sessions.interface.layers)
        policy = cell.configuration.create_policy((self._settings.seed,))
        prompt_steps = len(work.turns[0]) // _PROMPT_TOKENS_PER_STEP
        for repeat in range(self._settings.repeats):
            records: dict[bool, RunRecord] = {}
            for is_candidate in (False, True) if repeat % 2 == 0 else (True, False):
                key = compute_key(
                    model=self._sha256,
                    kvmnn=get_version(),
                    search=1,
                    work=work.digest,
                    repeat=repeat,
                    threads=self._settings.threads,
                    cell=cell.configuration.identity,
                    engine=RuntimeConfig.identify(engine),
                    candidate=is_candidate,
                )
                stored = store.get(key)
                if stored is not None:
                    records[is_candidate] = RunRecord.from_dict(stored, RUNS_FILE)
                    progress.advance(work.num_steps + prompt_steps)
                    continue
                session = sessions.get(attentions=is_candidate and policy.requires_attention)
                records[is_candidate] = measure_run(
                    session,
                    policy if is_candidate else FullCache(),
                    RuntimeConfig.from_engine(engine) if is_candidate else None,
                    work,
                    progress.advance,
                )
                progress.advance(prompt_steps)
                store.put(key, records[is_candidate].to_dict())
            yield records[False], records[True]

    def _build_engine(self, mode: str, layers: int) -> dict[str, Any]:
        store_case = build_cases("runtime", RunConfig(settings=self._settings))[-1]
        lossless = {key: value for key, value in store_case.engine.items() if key.startswith("kv_lossless_")}
        own = {key: value for key, value in self._config.engine.items() if key.startswith("kv_lossless_")}
        return {
            **lossless,
            **_LOSSLESS_OPTIONS,
            "kv_lossless_front_n": layers,
            **own,
            "kv_lossless_runtime_mode": mode,
        }

    def _judge(self, cell: SearchCell) -> SearchCell:
        targets = self._targets
        slowdown_verdict: Verdict = NOT_MEASURED
        if cell.drop_low is not None and cell.drop_high is not None:
            is_unclear = cell.drop_low <= targets.max_drop < cell.drop_high
            slowdown_verdict = UNCLEAR if is_unclear else verdict_from(cell.drop_high <= targets.max_drop)
        verdicts: dict[str, Verdict] = {
            "lossy": verdict_from(cell.lossy_ratio >= targets.lossy) if cell.is_timed else NOT_MEASURED,
            "lossless": NOT_MEASURED
            if cell.lossless_ratio is None
            else verdict_from(cell.lossless_ratio >= targets.lossless),
            "decode drop": slowdown_verdict,
            "perplexity": _judge_perplexity(cell, targets.max_perplexity),
        }
        return replace(cell, verdicts=verdicts)

    def _describe(self, num_timed: int) -> Iterator[str]:
        settings, num_texts = self._settings, len(self._select_documents())
        num_configurations = len(self.configurations)
        screening = (
            f"perplexity of all of them over {_SCREENING_TEXTS} texts of {settings.quality_tokens:,} tokens, of "
            f"{self._num_finalists}, first the best of each policy, over {num_texts} texts"
            if self._num_screened
            else f"perplexity of all of them over {num_texts} texts of {settings.quality_tokens:,} tokens"
        )
        yield (
            f"Tried: policies with budgets, {num_configurations} in all, in modes {' and '.join(MODES)}; {screening}, "
            f"{settings.quality_prompt:,} tokens of each the prompt. {num_timed} of {num_configurations * len(MODES)} "
            f"settings were run on prompts of {', '.join(map(str, settings.prompts))} tokens and "
            f"{settings.generate} more, {settings.repeats} pairs each (--max-cells), none whose perplexity fails if "
            "another does not. Others may pass that were not tried."
        )


@dataclass(frozen=True)
class _Quality:
    """Cells with what was measured on texts, and notes on them."""

    cells: list[SearchCell]
    notes: list[str]


def _judge_perplexity(cell: SearchCell, limit: float) -> Verdict:
    low, high = cell.perplexity_low, cell.perplexity_high
    if low is None or high is None:
        return NOT_MEASURED
    return PASS if high <= limit else FAIL if low > limit else UNCLEAR


def _build_configurations(
    policies: Sequence[str], budgets: Sequence[int | str], targets: SearchTargets, settings: RunSettings
) -> list[Configuration]:
    num_tokens = min(settings.prompts) + settings.generate - 1
    sizes: Sequence[int | str] = budgets or list(
        dict.fromkeys(max(1, int(num_tokens / (targets.lossy * margin))) for margin in _BUDGET_MARGINS)
    )
    specs: list[str] = []
    for spec in policies or DEFAULT_POLICIES:
        if accepts_option(spec, "recent") and "recent=" not in spec:
            specs += [f"{spec}{',' if ':' in spec else ':'}recent={share}" for share in _RECENT_SHARES]
        else:
            specs.append(spec)
    configurations = resolve_configurations(specs, sizes, num_tokens)
    return list({entry.label: entry for entry in configurations}.values())


def _build_cell(
    row: ResultRow, configuration: Configuration, mode: str, num_texts: int, *, has_interval: bool
) -> SearchCell:
    difference: Any = row.versus_full
    has_interval = has_interval and bool(row.evicted) and difference.low is not None
    return SearchCell(
        label=f"{row.label}, {mode}",
        configuration=configuration,
        mode=mode,
        lossy_ratio=row.lossy_ratio or 1.0,
        perplexity=expm1(difference.nll),
        perplexity_low=expm1(difference.low) if has_interval else None,
        perplexity_high=expm1(difference.high) if has_interval else None,
        kl=None if row.divergence is None else row.divergence.kl,
        texts=num_texts,
    )


def _add_runs(cell: SearchCell, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> SearchCell:
    candidates = [candidate for _, candidate in pairs]
    raw_bytes, compressed_bytes = (
        sum(record.get_counter(f"{kind}_bytes") for record in candidates) for kind in ("raw", "compressed")
    )
    slowdown = DecodeSlowdown.from_pairs([(without.decode_speed, own.decode_speed) for without, own in pairs])
    return replace(
        cell,
        is_timed=True,
        lossy_ratio=min(record.lossy_ratio for record in candidates),
        lossless_ratio=raw_bytes / compressed_bytes if compressed_bytes else None,
        drop=None if slowdown is None else slowdown.drop_ratio,
        drop_low=None if slowdown is None else slowdown.interval_low,
        drop_high=None if slowdown is None else slowdown.interval_high,
    )
