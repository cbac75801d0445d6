"""``--jobs``, ``--dask``, ``--resume`` and ``--match``: a verb done for each of many files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from ..files.urls import is_url, redact_url
from . import help, idle_options, printing, shared_options, streams
from .printing import STDIO, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..many import InputPath, ProcessExecutor, Task, TaskJournal, TaskResult
    from .many_work import CommandWork

_BATCH_DESCRIPTION = """\
Each file below the inputs by itself, in processes of one thread each: a JSON object for each on standard
output, a line, in the order of their names, as they come: {"path", "ok", "seconds"}, and "document" (what --json prints
of this file alone), "error", "notes". A terminal gets a line of text for each, unless --json is given. A file that
fails is a line, the others go on, and the exit code is 1. Below a folder count files of arrays and caches, for verify
frames, for measure and inspect both; nothing hidden, and nothing behind links to folders (docs/many.md)."""

BATCH_OPTION_NAMES = ("jobs", "dask", "resume", "match")


def add_batch_options(parser: Any) -> None:
    """Declare them."""
    group = parser.add_argument_group("many files", _BATCH_DESCRIPTION)
    mode_group = group.add_mutually_exclusive_group()
    mode_group.add_argument(
        "--jobs", type=shared_options.parse_positive, metavar="N", help="each file by itself, in N processes"
    )
    mode_group.add_argument(
        "--dask", metavar="ADDRESS", help="each file by itself, on the Dask cluster with this scheduler"
    )
    group.add_argument(
        "--resume", metavar="FILE", help="note in FILE what is done; what is there already, and unchanged, is not done"
    )
    group.add_argument("--match", metavar="PATTERN", help="files of these names count, e.g. '*.bin', and no others")
    help.fold_group(parser, group, "--help-many")


def is_batch(arguments: argparse.Namespace) -> bool:
    """Whether each file is done by itself; `UsageError` for options that need that."""
    if arguments.jobs is not None or arguments.dask is not None:
        return True
    idle_options.refuse_given(arguments, ("resume", "match"), "needs --jobs N or --dask ADDRESS")
    return False


def run_batch(
    arguments: argparse.Namespace,
    command_name: str,
    paths: Sequence[str],
    *,
    accepted_kinds: Sequence[str],
    not_for_many: Mapping[str, str] | None = None,
    output: Callable[[argparse.Namespace], Callable[[InputPath], Task]] | None = None,
) -> int:
    """Do a verb for each file below `paths`; returns the exit code.

    `accepted_kinds` is which of `InputKinds` count. Options in `not_for_many` are refused, with the reason that stands
    there. `output` gives what makes the task of a file.
    """
    from ..many import InputKinds, Task, find_inputs
    from .many_work import CommandWork

    for name, reason in {**(not_for_many or {}), "threads": "each file has one thread"}.items():
        idle_options.refuse_given(arguments, [name], f"is not for --jobs and --dask: {reason}")
    if STDIO in paths:
        raise UsageError("standard input is one input: --jobs and --dask take files and folders")
    for url in filter(is_url, paths):
        raise UsageError(
            f"{redact_url(url)}: --jobs and --dask take files and folders; without them stores at URLs are read"
        )
    if arguments.dask is not None:
        paths = _make_paths_absolute(arguments, paths)
    task = output(arguments) if output is not None else lambda named_input: Task(named_input.path)
    kinds = InputKinds(**dict.fromkeys(accepted_kinds, True), match=arguments.match)
    excluded_paths = [path for path in (arguments.resume, getattr(arguments, "output", None)) if path]
    with _open_executor(arguments, command_name) as (executor, num_ahead, call_in_worker):
        discovery = call_in_worker(find_inputs, paths, kinds, excluded_paths)
        for line in discovery.describe_ignored(f"kvmnn {command_name}"):
            printing.print_note(arguments, line)
        for line in _warn_merged_folders(arguments, paths, discovery.inputs):
            printing.print_note(arguments, line)
        if not discovery.inputs:
            printing.print_finding(f"{' '.join(paths)}: nothing there that kvmnn {command_name} reads")
            return 1
        tasks = list(map(task, discovery.inputs))
        with (
            _open_journal(arguments, CommandWork.from_arguments(command_name, arguments)) as (work, finished),
            _clean_output_folders(tasks),
        ):
            return _run_tasks(arguments, command_name, tasks, work, finished, executor, num_ahead)


def _warn_merged_folders(
    arguments: argparse.Namespace, roots: Sequence[str], named_inputs: Sequence[InputPath]
) -> list[str]:
    """Return a line where files of several folders are written into one, whose names say no more whence they came."""
    output = getattr(arguments, "output", None)
    folders = [
        root
        for root in roots
        if any(named_input.path.startswith(os.path.join(root, "")) for named_input in named_inputs)
    ]
    if output is None or len(folders) < 2:
        return []
    names = ", ".join(folders[:3]) + (", ..." if len(folders) > 3 else "")
    return [
        f"files of {len(folders)} folders ({names}) are written into {output} without the names of these: name the "
        "folder around them, or encode each with an -o of its own, to keep them apart"
    ]


def _make_paths_absolute(arguments: argparse.Namespace, paths: Sequence[str]) -> list[str]:
    """Workers of a cluster have another working folder: names that say where something is, from the root on."""
    for name in ("output", "model", "token_ids"):
        value = getattr(arguments, name, None)
        if value is not None and (name == "output" or os.path.exists(value)):
            setattr(arguments, name, os.path.abspath(value))
    return [os.path.abspath(path) for path in paths]


def _run_tasks(
    arguments: argparse.Namespace,
    command_name: str,
    tasks: Sequence[Task],
    work: CommandWork,
    finished: TaskJournal | None,
    executor: Any,
    num_ahead: Callable[[], int] | None,
) -> int:
    from ..many import run_tasks
    from ..text import pluralize

    num_failed, first_error = 0, ""
    with (
        closing(run_tasks(tasks, work, executor, max_running=num_ahead, journal=finished)) as results,
        printing.progress_bar(
            arguments, len(tasks), command_name, unit="file", is_replaced=streams.is_terminal()
        ) as advance,
    ):
        for task_result in results:
            _print_task(arguments, task_result)
            num_failed += not task_result.ok
            if task_result.error is not None and not first_error:
                first_error = task_result.error
            if advance is not None:
                advance(1)
    if finished is not None and finished.num_changed:
        files = pluralize(finished.num_changed, "file")
        printing.print_note(arguments, f"{files} in {finished.path}, changed since then or without output, done again")
    if num_failed:
        printing.print_finding(f"{num_failed:,} of {pluralize(len(tasks), 'file')} failed, the first: {first_error}")
    return 1 if num_failed else 0


def _print_task(arguments: argparse.Namespace, task_result: TaskResult) -> None:
    """A file's line: for programs JSON, for people who watch a terminal a text."""
    from .many_lines import format_task_line

    if arguments.json or not streams.is_terminal():
        streams.write_out(task_result.line)
    else:
        streams.write_out(format_task_line(task_result.to_dict()), fold=True)
    streams.flush_out()


@contextmanager
def _open_journal(arguments: argparse.Namespace, work: CommandWork) -> Iterator[tuple[CommandWork, TaskJournal | None]]:
    from ..many import TaskJournal

    if arguments.resume is None:
        yield work, None
        return
    with TaskJournal(arguments.resume, work.compute_identity()) as journal:
        if journal.has_torn_line:
            printing.print_note(arguments, f"{journal.path}: the last line was torn, and is done again")
        yield work, journal


@contextmanager
def _open_executor(
    arguments: argparse.Namespace, command_name: str
) -> Iterator[tuple[Any, Callable[[], int] | None, Any]]:
    """What `kvmnn.many.run` takes for it, how many tasks ahead, and what calls a function where all is imported."""
    from .. import many

    if arguments.dask is None:
        with _open_processes(arguments.jobs, command_name) as (make_processes, call_in_worker):
            yield make_processes, None, call_in_worker
        return
    with many.connect_dask(arguments.dask) as (executor, num_ahead):
        dask_executor: Executor = executor
        yield dask_executor, num_ahead, lambda function, *call_arguments: function(*call_arguments)


@contextmanager
def _open_processes(jobs: int, command_name: str) -> Iterator[tuple[Callable[[], ProcessExecutor], Callable[..., Any]]]:
    """What makes the processes, and calls a function in one. The first of them begin at once: they import all formats,
    and this process, which would take as long, never does.
    """
    from concurrent.futures import BrokenExecutor, wait

    from .. import many
    from ..many.running import STALL_CHECK_SECONDS
    from .many_work import import_command

    def call_in_worker(function: Callable[..., Any], *call_arguments: Any) -> Any:
        try:
            future = first_processes.submit(function, *call_arguments)
            while not wait([future], STALL_CHECK_SECONDS).done:
                first_processes.break_if_stuck()
            return future.result()
        except BrokenExecutor:  # somebody killed one; there will be others
            return function(*call_arguments)

    first_processes = many.ProcessExecutor(jobs)
    executors = chain([first_processes], map(many.ProcessExecutor, repeat(jobs)))
    try:
        for _ in range(min(jobs, os.cpu_count() or 1)):
            first_processes.submit(import_command, command_name)
        yield lambda: next(executors), call_in_worker
    finally:
        first_processes.shutdown(cancel_futures=True)  # it has been shut down already, unless nobody took it


@contextmanager
def _clean_output_folders(tasks: Sequence[Task]) -> Iterator[None]:
    """Afterwards nothing is left by processes that are gone where outputs go, nor new folders that are empty."""
    from pathlib import Path

    from ..files.temporary import remove_stale

    output_folders = {os.path.dirname(os.path.abspath(task.output)) for task in tasks if task.output is not None}
    new_folders = set()
    for folder in output_folders:
        while not os.path.lexists(folder) and folder not in new_folders:
            new_folders.add(folder)
            folder = os.path.dirname(folder)
    try:
        yield
    finally:
        for folder in output_folders:
            remove_stale(Path(folder))
        for folder in sorted(new_folders, key=len, reverse=True):
            with suppress(OSError):
                os.rmdir(folder)
