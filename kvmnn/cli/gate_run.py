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
    from ..gates.checking.checking import Checked
    from ..gates.demo.judging import DemoChecked
    from ..gates.running.settings import RunSettings
    from ..gates.running.suite import Suite
    from ..gates.summary.writing import Round

OPTIONS = ("suite", "config", "prompts", "also", "sweep", "rounds", "again", "jobs", "tokenizer")
_FURTHER = ("multi_turn", "retrieval")
_FIRST_SECONDS = 2
"""Until the first line of progress."""

_LINE_SECONDS = 10, 60
"""Between two lines of progress: a tenth of the time so far, within these bounds."""


def add_options(parser: Any) -> None:
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
        "--also", nargs="+", choices=_FURTHER, metavar="CASE", help=f"further cases: {', '.join(_FURTHER)}"
    )
    group.add_argument(
        "--sweep", nargs="+", metavar="NAME=V,V", help="run at each point of a product, such as block=32,64"
    )
    group.add_argument(
        "--rounds", type=shared_options.positive, metavar="N", help="run each case N times; all must pass (default: 1)"
    )
    group.add_argument("--again", action="store_true", help="measure anew what -o DIR holds, as a further round")
    group.add_argument(
        "--jobs", type=shared_options.positive, metavar="N", help="processes for what is not timed (default: 1)"
    )
    group.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json (default: the one beside the model)")


def run(arguments: argparse.Namespace) -> int:
    """Carry the action out."""
    from ..errors import OptionError
    from ..gates.running.rounds import finish
    from ..gates.running.run_cases import KNOWN, cases_of
    from ..gates.running.settings import RunConfig, read_run_config

    if len(arguments.inputs) != 1:
        raise UsageError("gate run takes one model")
    if arguments.output is None:
        raise UsageError("gate run needs -o DIR")
    try:
        config = RunConfig() if arguments.config is None else read_run_config(arguments.config, KNOWN)
        cases = cases_of(arguments.suite or "all", config, arguments.also or (), arguments.sweep or ())
    except OptionError as error:
        raise UsageError(str(error)) from None
    listed = ("llm_demo",) if config.settings.prompt_manifest else ()
    without = [case.name for case in cases if case.needs_texts and case.kind not in listed]
    if without and not arguments.prompts:
        raise UsageError(f"{without[0]} needs texts: expected --prompts DIR or FILE (--suite runtime needs none)")
    directory = arguments.output.rstrip("/") or "/"
    with ExitStack() as stack:
        with _Progress(arguments) as progress:
            suite = stack.enter_context(_open_suite(arguments, config.settings, directory))
            made, judged, notes = _all(arguments, suite, cases, directory, progress)
        if suite.store.reused:
            printing.note(arguments, f"{suite.store.reused:,} runs reused from {directory}")
        result = finish(directory, made, judged, notes, suite)
    printing.show(arguments, "gate run", result)
    return 0 if result.passed else 1


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
        again=arguments.again,
        command=printing.command(arguments),
    )


def _all(
    arguments: argparse.Namespace, suite: Suite, cases: list[Any], directory: str, progress: _Progress
) -> tuple[Round, list[Checked | DemoChecked], list[str]]:
    """Measure, judge and save case by case."""
    from ..gates.running.rounds import judge, save

    judged: list[Checked | DemoChecked] = []
    notes: dict[str, None] = {}
    for measured in suite.measure(cases, arguments.rounds or 1, progress):
        judged.append(judge(measured, arguments.inputs[0]))
        made = save(directory, measured, judged[-1])
        notes |= dict.fromkeys(measured.notes)
    return made, judged, list(notes)


class _Progress:
    """How far a suite is: the bar of all verbs on a terminal, else lines on standard error.

    The lines are written by a thread, so that they come while a model of gigabytes is opened as well.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self._bar: printing.Advance | None = None
        self._begun = time.monotonic()
        self._runs = self._all_runs = self._steps = self._all_steps = 0
        self._what = "opening the model and reading the texts"
        self._end = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, daemon=True)

    def start(self, runs: int, steps: int) -> None:
        """Begin: this many runs, and decode steps of those that are not there already."""
        self._all_runs, self._all_steps = runs, steps
        self._bar = self._stack.enter_context(printing.progress(self._arguments, steps, "gates", unit="step", delay=0))

    def begin_run(self, what: str) -> None:
        """Name what runs now."""
        self._what = what
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Count decode steps."""
        self._steps += steps
        if self._bar is not None:
            self._bar(steps, f"{self._runs} of {self._all_runs} runs: {self._what}")

    def end_run(self) -> None:
        """Count a run."""
        self._runs += 1
        self.advance(0)

    def _write_lines(self) -> None:
        from ..lm.tokenizer import STDERR_LOCK

        pause: float = _FIRST_SECONDS
        while not self._end.wait(pause) and self._bar is None:
            with STDERR_LOCK:
                streams.err("progress", self._line())
            least, most = _LINE_SECONDS
            pause = min(most, max(least, (time.monotonic() - self._begun) / 10))

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._begun)
        elapsed = f"{seconds // 60}:{seconds % 60:02}"
        if not self._all_runs:
            return f"{elapsed}; {self._what}"
        done = f"{self._runs:,} of {self._all_runs:,} runs, {self._steps:,} of {self._all_steps:,} decode steps"
        return f"{done}, {elapsed}; now {self._what}"

    def __enter__(self) -> _Progress:
        if not (self._arguments.quiet or streams.is_kept()):
            self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end.set()
        if self._writer.ident is not None:
            self._writer.join()
        self._stack.close()
        if kind is not None and not issubclass(kind, Exception) and self._all_runs:
            kept = f"{self._runs} of {self._all_runs} runs kept in {self._arguments.output}"
            printing.note(self._arguments, f"{kept}: the same command goes on from there")
