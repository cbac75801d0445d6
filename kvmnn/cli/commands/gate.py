"""``kvmnn gate``: check logs against limits, or run the six cases on a model."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from ..._util.text import suggest
from ...gates.limits import GateLimits
from .. import console, shared_options, streams
from ..command_parser import ActionHelp
from ..console import UsageError
from ..options import (
    SpecField,
    add_dataclass_options,
    add_spec_option,
    collect_values,
    list_option_fields,
    make_spec_fields,
)

if TYPE_CHECKING:
    from ...gates.case_inputs import MetricRows
    from ...gates.checker import CaseResult
    from ...gates.demo import DemoResult
    from ...gates.suite.search import Search
    from ...gates.suite.settings import RunConfig, RunSettings, SuiteName
    from ...gates.suite.suite import Suite
    from ...gates.summary import RoundSummary

AGGREGATIONS = ("avg", "median", "p90", "best")
RUNTIME_MODES = ("probe", "full", "store")
BASELINE_CHOICES = ("fixed", "rolling", "same_batch")

LIMIT_OPTION_NAMES = tuple(field.name for field in list_option_fields(GateLimits))


_RUN_LIMIT_NAMES = tuple(
    name for name in LIMIT_OPTION_NAMES if not name.startswith("decode_baseline") and name != "runtime_mode"
)
"""Limits that ``gate run`` takes: it measures the speed without compression itself, and a case has its mode."""


def add_limit_options(parser: Any) -> None:
    """Declare ``--limit`` with the fields of `GateLimits`."""
    group = parser.add_argument_group("limits", "They override those of --case and --gates.")
    title = "limits, repeatable"
    add_spec_option(group, "--limit", title, make_spec_fields(GateLimits), metavar="NAME=VALUE[,...]")
    group.add_argument("--decode-baseline-source", metavar="TEXT", help="what the report calls the baseline")


def add_document_options(parser: Any) -> None:
    """Declare the options for files next to the rows."""
    parser.add_argument(
        "--offline-lossless-online-json", metavar="FILE", help="check: an offline evaluation, chunked as online"
    )
    parser.add_argument("--offline-lossless-json", metavar="FILE", help="check: an offline evaluation, upper bound")
    parser.add_argument("--bench-stdout-log", metavar="FILE", help="check: what the bench printed")
    parser.add_argument("--logs-dir", metavar="DIR", help="check: a folder of its logs")


def override_limits(arguments: argparse.Namespace, base: GateLimits) -> GateLimits:
    """Return `base` with the limits that were specified; raise `UsageError` for one that makes no sense."""
    from ...errors import OptionError

    try:
        return base.with_values(collect_values(type(base), arguments), "limits")
    except OptionError as error:
        raise UsageError(str(error)) from None


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse limits and documents from command-line words, as the analyser of the MNN fork does."""
    return _make_words_parser().parse_args(list(words))


@cache
def _make_words_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gate", exit_on_error=False, allow_abbrev=False)
    add_dataclass_options(parser, GateLimits)
    add_document_options(parser)
    return parser


RUN_OPTION_NAMES = ("suite", "suite_config", "prompts", "also", "sweep", "rounds", "again", "jobs", "tokenizer")
_EXTRA_CASES = ("multi_turn", "retrieval")
_FIRST_LINE_SECONDS = 2
"""Until the first line of progress."""

_LINE_INTERVAL_BOUNDS_SECONDS = 10, 60
"""Between two lines of progress: a tenth of the time so far, within these bounds."""


def add_run_options(parser: Any) -> None:
    """Declare the options of run."""
    group = parser.add_argument_group("run", "The cases on a model; runs that -o DIR holds already are not run again.")
    group.add_argument(
        "--suite",
        choices=("all", "runtime", "llm_demo", "own"),
        help="which cases (default: own ones, if any, else all)",
    )
    group.add_argument(
        "--suite-config",
        metavar="FILE",
        help="settings, limits, cases (JSON); handbook-v5; smollm2-transform",
    )
    group.add_argument(
        "--text",
        dest="prompts",
        nargs="+",
        metavar="TEXT",
        help="texts: prompts of all cases, and their perplexity (default: built-in; run: of runtime cases)",
    )
    group.add_argument(
        "--extra-case",
        dest="also",
        nargs="+",
        choices=_EXTRA_CASES,
        metavar="CASE",
        help=f"further cases: {', '.join(_EXTRA_CASES)}",
    )
    group.add_argument(
        "--sweep", nargs="+", metavar="NAME=V,V", help="run at each point of a product, such as block=32,64"
    )
    group.add_argument(
        "--repeats",
        dest="rounds",
        type=shared_options.parse_positive,
        metavar="N",
        help="run each case N times; all must pass (default: 1)",
    )
    group.add_argument(
        "--rerun", dest="again", action="store_true", help="measure again what -o DIR holds, as a further round"
    )
    group.add_argument(
        "--jobs", type=shared_options.parse_positive, metavar="N", help="processes for what is not timed (default: 1)"
    )
    group.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one alongside the model)")


SEARCH_OPTION_NAMES = ("lossy", "lossless", "max_drop", "max_cells", "policy", "budget")


def add_search_options(parser: Any) -> None:
    """Declare the options of search."""
    group = parser.add_argument_group("search", "Settings that reach all targets together.")
    group.add_argument("--lossy", type=float, metavar="R", help="least lossy ratio (default: 3.0)")
    group.add_argument("--lossless", type=float, metavar="R", help="least lossless ratio (default: 1.3)")
    group.add_argument(
        "--max-drop",
        type=parse_share,
        metavar="SHARE",
        help="largest loss of decode speed, as 5%% or 0.05 (default: 5%%)",
    )
    group.add_argument(
        "--max-cells",
        type=shared_options.parse_positive,
        metavar="N",
        help="settings that are run and timed, at most (default: 8)",
    )
    group.add_argument("--policy", action="append", metavar="SPEC", help="a policy to try (repeatable)")
    group.add_argument("--budget", nargs="+", metavar="N", help="budgets to try: tokens, or shares of a run's")


def parse_share(text: str) -> float:
    """Parse ``5%`` or ``0.05``."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no share: expected one such as 5% or 0.05") from None


def _run_search(arguments: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    if len(arguments.inputs) != 1:
        raise UsageError("gate search takes one model")
    with ExitStack() as stack:
        directory = arguments.output or stack.enter_context(TemporaryDirectory(prefix="kvmnn-search-"))
        search = _open_search(arguments, directory)
        survival = (
            f"finished runs stay in {directory}"
            if arguments.output
            else "without -o DIR nothing of it survives an interruption"
        )
        console.print_note(arguments, f"{search.describe_plan()}; {survival}")
        with SuiteProgressDisplay(arguments, shows_time_left=True) as progress:
            result = search.run(progress)
    console.show_result(arguments, "gate search", result)
    return 0 if result.has_passed else 1


def _open_search(arguments: argparse.Namespace, directory: str) -> Search:
    from dataclasses import replace

    from ...errors import OptionError
    from ...gates.suite.cases import CASE_NAMES
    from ...gates.suite.search import DEFAULT_MAX_CELLS, DEFAULT_SETTINGS, Search, SearchTargets
    from ...gates.suite.settings import RunConfig, read_run_config

    config = RunConfig(settings=DEFAULT_SETTINGS)
    try:
        if arguments.suite_config is not None:
            config = read_run_config(arguments.suite_config, CASE_NAMES, DEFAULT_SETTINGS)
        targets = SearchTargets(max_perplexity=config.settings.perplexity_target)
        names = ("lossy", "lossless", "max_drop")
        values = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
        return Search(
            arguments.inputs[0],
            directory.rstrip("/") or "/",
            arguments.prompts or (),
            targets=replace(targets, **values),
            policies=arguments.policy or (),
            budgets=arguments.budget or (),
            config=config,
            max_cells=arguments.max_cells or DEFAULT_MAX_CELLS,
            tokenizer=arguments.tokenizer,
            jobs=arguments.jobs or 0,
            force=arguments.force,
        )
    except OptionError as error:
        raise UsageError(str(error)) from None


def run_suite(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ...errors import OptionError
    from ...gates.suite.cases import build_cases
    from ...gates.suite.results import finish_suite

    if len(arguments.inputs) != 1:
        raise UsageError("gate run takes one model")
    if arguments.output is None:
        raise UsageError("gate run needs -o DIR")
    try:
        config = _read_run_config(arguments)
        suite_name: SuiteName = arguments.suite or ("own" if config.own_cases else "all")
        cases = build_cases(suite_name, config, arguments.also or (), arguments.sweep or ())
    except OptionError as error:
        raise UsageError(str(error)) from None
    manifest_kinds = ("llm_demo",) if config.settings.prompt_manifest else ()
    names_without_texts = [case.name for case in cases if case.needs_texts and case.kind not in manifest_kinds]
    if names_without_texts and not arguments.prompts:
        raise UsageError(
            f"{names_without_texts[0]} needs texts: expected --text DIR or FILE (--suite runtime needs none)"
        )
    directory = arguments.output.rstrip("/") or "/"
    with ExitStack() as stack:
        with SuiteProgressDisplay(arguments) as progress:
            suite = stack.enter_context(_open_suite(arguments, config.settings, directory))
            round_summary, case_results, notes = _run_cases(arguments, suite, cases, directory, progress)
        if suite.store.num_reused:
            console.print_note(arguments, f"{suite.store.num_reused:,} runs reused from {directory}")
        result = finish_suite(directory, round_summary, case_results, notes, suite)
    console.show_result(arguments, "gate run", result)
    return 0 if result.has_passed else 1


def _read_run_config(arguments: argparse.Namespace) -> RunConfig:
    """Read the configuration of a run; ``--limit`` and ``--repeats`` override it in all cases."""
    from dataclasses import replace

    from ...gates.suite.cases import CASE_NAMES
    from ...gates.suite.settings import RunConfig, read_run_config

    config = RunConfig() if arguments.suite_config is None else read_run_config(arguments.suite_config, CASE_NAMES)
    limits = collect_values(GateLimits, arguments)
    override_limits(arguments, GateLimits())
    settings = config.settings
    dropped = {*limits}
    if arguments.rounds is not None:
        settings = replace(settings, rounds=arguments.rounds, pass_runs=min(settings.pass_runs, arguments.rounds))
        dropped |= {"rounds", "pass_runs"}
    cases = {
        name: {key: value for key, value in entry.items() if key not in dropped} for name, entry in config.cases.items()
    }
    return replace(config, settings=settings, limits={**config.limits, **limits}, cases=cases)


def _open_suite(arguments: argparse.Namespace, settings: RunSettings, directory: str) -> Suite:
    from ...gates.suite.suite import Suite

    return Suite(
        arguments.inputs[0],
        directory,
        settings=settings,
        texts=arguments.prompts or (),
        tokenizer=arguments.tokenizer,
        jobs=arguments.jobs or 1,
        force=arguments.force,
        rerun=arguments.again,
        command=console.format_command_line(arguments),
    )


def _run_cases(
    arguments: argparse.Namespace, suite: Suite, cases: list[Any], directory: str, progress: SuiteProgressDisplay
) -> tuple[RoundSummary, list[CaseResult | DemoResult], list[str]]:
    """Measure, judge and save case by case."""
    from ...gates.suite.results import judge_case, save_case

    case_results: list[CaseResult | DemoResult] = []
    notes: dict[str, None] = {}
    for measurement in suite.measure_cases(cases, progress):
        case_results.append(judge_case(measurement, arguments.inputs[0]))
        round_summary = save_case(directory, measurement, case_results[-1])
        notes |= dict.fromkeys(measurement.notes)
    return round_summary, case_results, list(notes)


class SuiteProgressDisplay:
    """Progress of a suite: the common progress bar on a terminal, else lines on standard error.

    A thread writes the lines, so that they also appear while a large model is opened. With `shows_time_left`, for steps
    that take about the same time, lines estimate the rest.
    """

    def __init__(self, arguments: argparse.Namespace, *, shows_time_left: bool = False) -> None:
        self._arguments, self._shows_time_left = arguments, shows_time_left
        self._stack = ExitStack()
        self._bar: console.AdvanceProgress | None = None
        self._start_time = time.monotonic()
        self._runs = self._total_runs = self._steps = self._total_steps = 0
        self._first_step_time: float | None = None
        self._current_work = "opening the model and reading the texts"
        self._stop_event = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, daemon=True)

    def start(self, runs: int, steps: int) -> None:
        """Start with the number of runs, and of the decode steps that are not saved yet."""
        self._total_runs, self._total_steps = runs, steps
        self._bar = self._stack.enter_context(
            console.progress_bar(self._arguments, steps, "gates", unit="step", delay=0)
        )

    def begin_run(self, run_description: str) -> None:
        """Set the name of the current run."""
        self._current_work = run_description
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Count finished decode steps."""
        if self._first_step_time is None:
            self._first_step_time = time.monotonic()
        self._steps += steps
        if self._bar is not None:
            self._bar(steps, f"{self._runs} of {self._total_runs} runs: {self._current_work}")

    def end_run(self) -> None:
        """Count a run as finished, and show it."""
        self._runs += 1
        self.advance(0)

    def _write_lines(self) -> None:
        from ...lm.tokenizer import STDERR_LOCK

        pause: float = _FIRST_LINE_SECONDS
        while not self._stop_event.wait(pause) and self._bar is None:
            with STDERR_LOCK:
                streams.write_error_line("progress", self._format_line())
            min_seconds, max_seconds = _LINE_INTERVAL_BOUNDS_SECONDS
            pause = min(max_seconds, max(min_seconds, (time.monotonic() - self._start_time) / 10))

    def _format_line(self) -> str:
        seconds = int(time.monotonic() - self._start_time)
        elapsed = f"{seconds // 60}:{seconds % 60:02}"
        if not self._total_runs:
            return f"{elapsed}; {self._current_work}"
        done_text = (
            f"{self._runs:,} of {self._total_runs:,} runs, {self._steps:,} of {self._total_steps:,} decode steps"
        )
        return f"{done_text}, {elapsed}{self._format_time_left()}; now {self._current_work}"

    def _format_time_left(self) -> str:
        if not self._shows_time_left or self._first_step_time is None or self._steps < self._total_steps / 100:
            return ""
        seconds = (time.monotonic() - self._first_step_time) / self._steps * (self._total_steps - self._steps)
        return f", about {seconds / 60:.0f} min left"

    def __enter__(self) -> SuiteProgressDisplay:
        if not (self._arguments.quiet or streams.is_captured()):
            self._writer.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._stop_event.set()
        if self._writer.ident is not None:
            self._writer.join()
        self._stack.close()
        is_interrupted = error_type is not None and not issubclass(error_type, Exception)
        if is_interrupted and self._total_runs and self._arguments.output:
            progress_text = f"{self._runs} of {self._total_runs} runs kept in {self._arguments.output}"
            console.print_note(self._arguments, f"{progress_text}: the same command goes on from there")


_DESCRIPTION = """\
Judge runs of a compressed KV cache by gates: ratios, decode speed, waiting, fallbacks, consistency (docs/gates.md).
Exit code 0 where all pass, 1 where one fails.

  parse LOG...           tables of llm_bench, or records of llm_demo, as CSV
  check CSV...           judge the rows of a case, as the MNN fork does;
                         --strict: only what was measured
  demo WITHOUT WITH      judge runs of llm_demo without and with compression
  summary DIR            the cases in a folder, also one of the fork's scripts
  run MODEL              run the six cases on an ONNX decoder and judge them
  search MODEL           find settings that reach all targets together
  history DIR            the rounds of a folder of run, one after another

Limits come from --case (one of the fork's six); --gates FILE overrides these, and options override both."""

_EXAMPLES = (
    "kvmnn gate parse out/logs -o metrics.csv",
    "kvmnn gate check metrics.csv --case runtime_store --limit decode_baseline=5.01 --logs-dir out/logs -o round/",
    "kvmnn gate run model/ --suite runtime --text texts/ -o round/",
    "kvmnn gate check metrics.csv --gates target_core_gate.json --strict --baseline plain.csv",
    "kvmnn gate demo out/baseline out/candidate --case llm_demo_store -o round/",
    "kvmnn gate summary round/",
    "kvmnn gate search model/ --text book.txt --lossy 3.0 --lossless 1.3 --max-drop 5% -o found/",
    "kvmnn gate history round/",
)

_CHECK_OPTIONS = (
    *LIMIT_OPTION_NAMES,
    *("offline_lossless_online_json", "offline_lossless_json", "bench_stdout_log", "logs_dir", "gates"),
    *("baseline", "decode_baseline_mode", "baseline_history", "baseline_key", "baseline_repeats", "no_history"),
)
_OPTIONS_BY_ACTION = {
    "parse": ("strict", "output", "force"),
    "check": (*_CHECK_OPTIONS, "case", "strict", "output", "force", "table"),
    "demo": (
        *(
            "case",
            "strict",
            "output",
            "force",
            "table",
            "decode_drop_target",
            "lossy_target",
            "lossless_target",
            "run_order",
        ),
        *("require_decode_cache_hit", "no_runtime_decomp", "no_decode_baseline", "no_bucket_pass", "runtime_mode"),
    ),
    "summary": ("force", "table"),
    "run": (*RUN_OPTION_NAMES, *_RUN_LIMIT_NAMES, "output", "force", "table"),
    "history": ("force", "table"),
    "search": (*SEARCH_OPTION_NAMES, "suite_config", "prompts", "tokenizer", "jobs", "output", "force", "table"),
}
_ALL_OPTIONS = tuple(dict.fromkeys(name for names in _OPTIONS_BY_ACTION.values() for name in names))


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "gate",
        run,
        "whether runs reach their limits",
        _DESCRIPTION,
        examples=_EXAMPLES,
        shown="--output --case --gates --strict --baseline --limit --logs-dir --suite "
        "--suite-config --text --repeats --rerun",
        action_help=ActionHelp("action", _OPTIONS_BY_ACTION, _describe_action),
    )
    parser.add_argument(
        "action", choices=tuple(_OPTIONS_BY_ACTION), metavar="ACTION", help=", ".join(_OPTIONS_BY_ACTION)
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="logs, CSV files, folders, or a model; see above")
    parser.add_argument("--case", metavar="NAME", help="check, demo: one of the six cases, or a name of your own")
    parser.add_argument("--gates", metavar="FILE", help="check: limits frozen in a JSON file")
    parser.add_argument("--strict", action="store_true", help="judge what was measured only; parse: no damage")
    add_document_options(parser)
    _add_baseline_options(parser)
    _add_demo_options(parser)
    add_run_options(parser)
    add_search_options(parser)
    shared_options.accept_table(parser)
    shared_options.add_output_option(
        parser, "parse: a .csv or .json file; check, demo, run, search: the folder of a round"
    )
    add_limit_options(parser)


def _describe_action(action: str) -> str:
    """Describe one action for the complete help."""
    title, actions, limits = _DESCRIPTION.split("\n\n")
    line = re.search(rf"^  {action} .*(?:\n {{10,}}.*)*", actions, re.MULTILINE)
    return "\n\n".join([title, line[0] if line else "", *([limits] if action == "check" else [])])


def _add_baseline_options(parser: Any) -> None:
    group = parser.add_argument_group("baseline", "check: decode speed without compression.")
    group.add_argument(
        "--baseline", action="append", default=[], metavar="CSV", help="rows of the same work without it (repeatable)"
    )
    group.add_argument(
        "--decode-baseline-mode",
        choices=BASELINE_CHOICES,
        help="the number of --limit decode_baseline, the median of earlier runs, or the fastest row of --baseline",
    )
    group.add_argument("--baseline-history", metavar="FILE", help="earlier runs, JSON lines; this one is added")
    group.add_argument("--no-history", action="store_true", help="add nothing to it")
    group.add_argument("--baseline-key", metavar="KEY", help="which of them count (default: host, backend, work)")
    group.add_argument(
        "--baseline-repeats",
        type=shared_options.parse_positive,
        default=2,
        metavar="N",
        help="repeats of the bench, part of that key (default: 2)",
    )


_WITHOUT_FIELDS = (
    SpecField("runtime-decomp", "no_runtime_decomp", "that something was decompressed", constant=True, default=False),
    SpecField(
        "decode-baseline",
        "no_decode_baseline",
        "that runs without compression have a speed",
        constant=True,
        default=False,
    ),
    SpecField("bucket-pass", "no_bucket_pass", "that lengths pass each by itself", constant=True, default=False),
)


def _add_demo_options(parser: Any) -> None:
    group = parser.add_argument_group("real prompts", "demo: over what the fork asks for.")
    add_spec_option(group, "--without", "what need not hold", _WITHOUT_FIELDS, metavar="WHAT[,WHAT]")
    group.add_argument("--run-order", metavar="TEXT", help="which side ran first, for the report")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    idle_names = [name for name in _ALL_OPTIONS if name not in _OPTIONS_BY_ACTION[arguments.action]]
    shared_options.refuse_given(arguments, idle_names, f"says nothing to gate {arguments.action}")
    if arguments.output == console.STDIO:
        raise UsageError("-o -: results are printed on standard output anyhow")
    return int(_RUN_BY_ACTION[arguments.action](arguments))


def _run_parse(arguments: argparse.Namespace) -> int:
    import json

    from ...files.atomic import FileOutput
    from ...gates.logs import parse_logs

    parsed = parse_logs(arguments.inputs, strict=arguments.strict)
    for line in parsed.notes:
        console.print_note(arguments, line)
    if arguments.output is not None:
        if console.is_directory_output(arguments.output):
            raise UsageError(f"{arguments.output}: is a directory, expected a .csv or .json file")
        as_json = arguments.output.lower().endswith(".json")
        text = json.dumps(parsed.to_dict(), indent=2) + "\n" if as_json else parsed.to_csv()
        with FileOutput(arguments.output, force=arguments.force, exclude=arguments.inputs) as output:
            output.file.write(text.encode("utf-8", "surrogateescape"))
            output.commit()
        console.show_result(arguments, "gate parse", parsed, text=f"{parsed}, in {arguments.output}")
    elif arguments.json:
        console.show_result(arguments, "gate parse", parsed)
    elif streams.is_terminal():
        console.write_text(parsed.to_csv().replace("\r\n", "\n"))
    else:
        console.Stdout().write(parsed.to_csv().encode("utf-8", "surrogateescape"))
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from ...gates.case_inputs import read_metric_rows
    from ...gates.checker import check
    from ...gates.summary import check_round_directory, save_case_result, validate_case_name

    _check_options(arguments)
    limits = _read_limits(arguments)
    case = arguments.case or (f"runtime_{limits.runtime_mode}" if limits.runtime_mode else "runtime")
    if arguments.output is not None:
        validate_case_name(case)
        check_round_directory(arguments.output, force=arguments.force)
    rows = read_metric_rows(arguments.inputs)
    baseline = read_metric_rows(arguments.baseline) if arguments.baseline else None
    for line in rows.notes:
        console.print_note(arguments, line)
    decode_baseline, key = _choose_baseline(arguments, limits, rows, baseline)
    if decode_baseline is not None:
        for line in decode_baseline.warnings:
            console.print_note(arguments, line)
        limits = replace(
            limits,
            decode_baseline=decode_baseline.speed,
            decode_baseline_source=decode_baseline.source,
            decode_baseline_samples=decode_baseline.num_samples,
        )
    case_result = check(
        rows,
        limits,
        case=case,
        online_json=arguments.offline_lossless_online_json,
        upper_json=arguments.offline_lossless_json,
        logs=[path for path in (arguments.bench_stdout_log, arguments.logs_dir) if path is not None],
        baseline=baseline,
        strict=arguments.strict,
    )
    summary = ""
    if arguments.output is not None:
        save_case_result(arguments.output, case_result, force=arguments.force)
        summary = f"{arguments.output.rstrip('/')}/{case}/summary.md"
    if key is not None and not arguments.no_history:
        from ...gates.slowdown import append_to_history

        append_to_history(
            arguments.baseline_history, key, case_result.analysis.decode.best, case_result.has_passed, summary
        )
    console.show_result(arguments, "gate check", case_result)
    return 0 if case_result.has_passed else 1


def _check_options(arguments: argparse.Namespace) -> None:
    mode = arguments.decode_baseline_mode
    if mode == "same_batch" and not arguments.baseline:
        raise UsageError("--decode-baseline-mode same_batch needs --baseline CSV")
    if mode == "rolling" and arguments.baseline_history is None:
        raise UsageError("--decode-baseline-mode rolling needs --baseline-history FILE")
    if arguments.baseline and mode != "same_batch" and not arguments.strict:
        raise UsageError("--baseline says nothing without --decode-baseline-mode same_batch or --strict")
    if arguments.baseline_history is None:
        history_options = ("baseline_key", "baseline_repeats", "no_history")
        shared_options.refuse_given(arguments, history_options, "says nothing without --baseline-history FILE")
    if mode is not None:
        computed_options = ("decode_baseline_source", "decode_baseline_samples")
        shared_options.refuse_given(arguments, computed_options, f"is what --decode-baseline-mode {mode} finds out")


def _read_limits(arguments: argparse.Namespace) -> GateLimits:
    from ...gates.limits import RUNTIME_CASES, read_gate_file

    limits = RUNTIME_CASES.get(arguments.case, GateLimits())
    if arguments.case is not None and arguments.case not in RUNTIME_CASES and arguments.gates is None:
        suggestion = suggest(arguments.case, RUNTIME_CASES)
        console.print_note(
            arguments, f"{arguments.case} is none of the fork's cases{suggestion}: only the common limits hold"
        )
    if arguments.gates is not None:
        limits, notes = read_gate_file(arguments.gates, arguments.case, limits)
        for line in notes:
            console.print_note(arguments, line)
    return override_limits(arguments, limits)


def _choose_baseline(
    arguments: argparse.Namespace, limits: GateLimits, rows: MetricRows, baseline: MetricRows | None
) -> tuple[Any, str | None]:
    """Choose the decode baseline by its mode, None for a plain limit; return it with the key of the history."""
    from ...gates import slowdown
    from ...gates.limits import FIXED_BASELINE_TOKENS_PER_SECOND

    mode, key = arguments.decode_baseline_mode, None
    if arguments.baseline_history is not None:
        key = arguments.baseline_key or slowdown.build_baseline_key(rows, arguments.baseline_repeats)
    fallback_speed = limits.decode_baseline or FIXED_BASELINE_TOKENS_PER_SECOND
    if mode == "same_batch" and baseline is not None:
        return slowdown.find_same_batch_baseline(baseline, fallback_speed), key
    if mode == "rolling" and key is not None:
        return slowdown.compute_rolling_baseline(arguments.baseline_history, key, fallback_speed), key
    return (slowdown.make_fixed_baseline(fallback_speed) if mode == "fixed" else None), key


def _run_demo(arguments: argparse.Namespace) -> int:
    from ...gates.demo import DemoLimits, check_demo, read_demo_runs
    from ...gates.limits import DEMO_CASES
    from ...gates.summary import check_round_directory, save_case_result, validate_case_name

    if len(arguments.inputs) != 2:
        raise UsageError("gate demo takes two inputs: runs without compression, and runs with it")
    case = arguments.case or "llm_demo"
    validate_case_name(case)
    if arguments.output is not None:
        check_round_directory(arguments.output, force=arguments.force)
    lossy_target, lossless_target = arguments.lossy_target, arguments.lossless_target
    limits = DemoLimits(
        decode_drop_target=0.08 if arguments.decode_drop_target is None else arguments.decode_drop_target,
        require_runtime_decomp=not arguments.no_runtime_decomp,
        require_decode_cache_hit=bool(arguments.require_decode_cache_hit),
        require_decode_baseline=not arguments.no_decode_baseline,
        require_bucket_decode_pass=not arguments.no_bucket_pass,
        lossy_target=3.0 if lossy_target is None and arguments.strict else lossy_target,
        lossless_target=1.3 if lossless_target is None and arguments.strict else lossless_target,
    )
    baseline_runs, candidate_runs = map(read_demo_runs, arguments.inputs)
    demo_result = check_demo(
        baseline_runs,
        candidate_runs,
        limits,
        case=case,
        mode=arguments.runtime_mode or DEMO_CASES.get(case, ""),
        run_order=arguments.run_order or "",
        strict=arguments.strict,
    )
    if arguments.output is not None:
        save_case_result(arguments.output, demo_result, force=arguments.force)
    console.show_result(arguments, "gate demo", demo_result)
    return 0 if demo_result.has_passed else 1


def _run_summary(arguments: argparse.Namespace) -> int:
    from ...gates.summary import check_round_directory, collect_cases, write_round_files

    if len(arguments.inputs) != 1:
        raise UsageError("gate summary takes one folder")
    round_summary = collect_cases(arguments.inputs[0].rstrip("/") or "/")
    check_round_directory(round_summary.directory, force=arguments.force)
    write_round_files(round_summary)
    console.show_result(arguments, "gate summary", round_summary)
    return 0 if round_summary.has_passed else 1


def _run_history(arguments: argparse.Namespace) -> int:
    from ...gates.suite.history import read_history

    if len(arguments.inputs) != 1:
        raise UsageError("gate history takes one folder")
    console.show_result(arguments, "gate history", read_history(arguments.inputs[0].rstrip("/") or "/"))
    return 0


_RUN_BY_ACTION = {
    "parse": _run_parse,
    "check": _run_check,
    "demo": _run_demo,
    "summary": _run_summary,
    "run": run_suite,
    "history": _run_history,
    "search": _run_search,
}
