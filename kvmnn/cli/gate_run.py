"""``kvmnn gate run``: the six cases on a model."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from . import printing, shared_options, streams
from .printing import UsageError

if TYPE_CHECKING:
    from ..gates.checking.checking import CaseResult
    from ..gates.demo.judging import DemoResult
    from ..gates.running.settings import RunSettings
    from ..gates.running.suite import Suite
    from ..gates.summary.writing import RoundSummary

RUN_OPTION_NAMES = ("suite", "config", "prompts", "also", "sweep", "rounds", "again", "jobs", "tokenizer")
_EXTRA_CASES = ("multi_turn", "retrieval")
_FIRST_LINE_SECONDS = 2
"""Until the first line of progress."""

_LINE_INTERVAL_BOUNDS_SECONDS = 10, 60
"""Between two lines of progress: a tenth of the time so far, within these bounds."""


def add_run_options(parser: Any) -> None:
    """The options of run."""
    group = parser.add_argument_group("run", "The cases on a model; runs that -o DIR holds already are not run again.")
    group.add_argument("--suite", choices=("all", "runtime", "llm_demo"), help="which cases (default: all)")
    group.add_argument("--config", metavar="FILE", help="settings, kv_ keys of the engine, and limits, as JSON")
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="TEXT",
        help="texts: prompts of all cases, and their perplexity (default: a built-in text, for runtime cases only)",
    )
    group.add_argument(
        "--also", nargs="+", choices=_EXTRA_CASES, metavar="CASE", help=f"further cases: {', '.join(_EXTRA_CASES)}"
    )
    group.add_argument(
        "--sweep", nargs="+", metavar="NAME=V,V", help="run at each point of a product, such as block=32,64"
    )
    group.add_argument(
        "--rounds",
        type=shared_options.parse_positive,
        metavar="N",
        help="run each case N times; all must pass (default: 1)",
    )
    group.add_argument("--again", action="store_true", help="measure anew what -o DIR holds, as a further round")
    group.add_argument(
        "--jobs", type=shared_options.parse_positive, metavar="N", help="processes for what is not timed (default: 1)"
    )
    group.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one beside the model)")


def run_suite(arguments: argparse.Namespace) -> int:
    """Carry the action out."""
    from ..errors import OptionError
    from ..gates.running.rounds import finish_suite
    from ..gates.running.run_cases import CASE_NAMES, build_cases
    from ..gates.running.settings import RunConfig, read_run_config

    if len(arguments.inputs) != 1:
        raise UsageError("gate run takes one model")
    if arguments.output is None:
        raise UsageError("gate run needs -o DIR")
    try:
        config = RunConfig() if arguments.config is None else read_run_config(arguments.config, CASE_NAMES)
        cases = build_cases(arguments.suite or "all", config, arguments.also or (), arguments.sweep or ())
    except OptionError as error:
        raise UsageError(str(error)) from None
    manifest_kinds = ("llm_demo",) if config.settings.prompt_manifest else ()
    names_without_texts = [case.name for case in cases if case.needs_texts and case.kind not in manifest_kinds]
    if names_without_texts and not arguments.prompts:
        raise UsageError(
            f"{names_without_texts[0]} needs texts: expected --prompts DIR or FILE (--suite runtime needs none)"
        )
    directory = arguments.output.rstrip("/") or "/"
    with ExitStack() as stack:
        with SuiteProgressDisplay(arguments) as progress:
            suite = stack.enter_context(_open_suite(arguments, config.settings, directory))
            round_summary, case_results, notes = _run_cases(arguments, suite, cases, directory, progress)
        if suite.store.num_reused:
            printing.print_note(arguments, f"{suite.store.num_reused:,} runs reused from {directory}")
        result = finish_suite(directory, round_summary, case_results, notes, suite)
    printing.show_result(arguments, "gate run", result)
    return 0 if result.has_passed else 1


def _open_suite(arguments: argparse.Namespace, settings: RunSettings, directory: str) -> Suite:
    from ..gates.running.suite import Suite

    return Suite(
        arguments.inputs[0],
        directory,
        settings=settings,
        texts=arguments.prompts or (),
        tokenizer=arguments.tokenizer,
        jobs=arguments.jobs or 1,
        force=arguments.force,
        rerun=arguments.again,
        command=printing.format_command_line(arguments),
    )


def _run_cases(
    arguments: argparse.Namespace, suite: Suite, cases: list[Any], directory: str, progress: SuiteProgressDisplay
) -> tuple[RoundSummary, list[CaseResult | DemoResult], list[str]]:
    """Measure, judge and save case by case."""
    from ..gates.running.rounds import judge_case, save_case

    case_results: list[CaseResult | DemoResult] = []
    notes: dict[str, None] = {}
    for measurement in suite.measure_cases(cases, arguments.rounds or 1, progress):
        case_results.append(judge_case(measurement, arguments.inputs[0]))
        round_summary = save_case(directory, measurement, case_results[-1])
        notes |= dict.fromkeys(measurement.notes)
    return round_summary, case_results, list(notes)


class SuiteProgressDisplay:
    """How far a suite is: the bar of all verbs on a terminal, else lines on standard error.

    The lines are written by a thread, so that they come while a model of gigabytes is opened as well.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self._bar: printing.AdvanceProgress | None = None
        self._start_time = time.monotonic()
        self._runs = self._total_runs = self._steps = self._total_steps = 0
        self._current_work = "opening the model and reading the texts"
        self._stop_event = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, daemon=True)

    def start(self, runs: int, steps: int) -> None:
        """Begin: this many runs, and decode steps of those that are not there already."""
        self._total_runs, self._total_steps = runs, steps
        self._bar = self._stack.enter_context(
            printing.progress_bar(self._arguments, steps, "gates", unit="step", delay=0)
        )

    def begin_run(self, work_text: str) -> None:
        """Name what runs now."""
        self._current_work = work_text
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Count decode steps."""
        self._steps += steps
        if self._bar is not None:
            self._bar(steps, f"{self._runs} of {self._total_runs} runs: {self._current_work}")

    def end_run(self) -> None:
        """Count a run."""
        self._runs += 1
        self.advance(0)

    def _write_lines(self) -> None:
        from ..lm.tokenizer import STDERR_LOCK

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
        return f"{done_text}, {elapsed}; now {self._current_work}"

    def __enter__(self) -> SuiteProgressDisplay:
        if not (self._arguments.quiet or streams.is_captured()):
            self._writer.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._stop_event.set()
        if self._writer.ident is not None:
            self._writer.join()
        self._stack.close()
        if error_type is not None and not issubclass(error_type, Exception) and self._total_runs:
            kept_text = f"{self._runs} of {self._total_runs} runs kept in {self._arguments.output}"
            printing.print_note(self._arguments, f"{kept_text}: the same command goes on from there")
