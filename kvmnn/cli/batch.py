"""Options and output of a verb that runs for each of many files: ``--jobs``, ``--dask``, ``--resume``, ``--glob``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from .._util.text import SIMULATED, escape_control, pluralize
from ..files.urls import is_url, redact_url
from . import console, shared_options, streams
from .console import STDIO, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..batch import InputPath, ProcessExecutor, Task, TaskJournal, TaskResult
    from .batch_work import CommandWork


def format_task_line(task: Mapping[str, Any]) -> str:
    """Format a line about a file from the object `kvmnn.batch.TaskResult.line`."""
    if not task["ok"]:
        return f"failed  {task['error']}"
    details = ", ".join(filter(None, _list_details(task.get("document") or {})))
    return f"ok      {escape_control(task['path'], keep_line_ends=False)}" + (f": {details}" if details else "")


def _list_details(document: Mapping[str, Any]) -> list[str]:
    """List the details of a document that come first: the label, the cache, the sizes."""
    if document["verb"] == "inspect":
        return _list_inspected_details(document["inputs"][0])
    return [document.get("label", ""), _format_sizes(document)]


def _list_inspected_details(input_document: Mapping[str, Any]) -> list[str]:
    cache = input_document.get("engine_cache")
    if cache is not None:
        tokens, layers = pluralize(cache["tokens"], "token"), pluralize(cache["layers"], "layer")
        types = "/".join(sorted(set(cache["types"])))
        return [f"{cache['engine']} {cache['kind']}", layers, tokens, types]
    arrays = input_document.get("arrays")
    num_arrays = len(arrays) + input_document.get("arrays_left_out", 0) if isinstance(arrays, list) else arrays
    kind = "" if isinstance(arrays, list) else str(input_document.get("kind", ""))
    return [kind, "" if num_arrays is None else pluralize(num_arrays, "array"), _format_sizes(input_document)]


_SIZE_KEYS = (("stored_bytes", ""), ("simulated_bytes", " simulated"), ("dense_bytes", " as dense streams"))


def _format_sizes(document: Mapping[str, Any]) -> str:
    """Format the bytes before and after, their ratio, and the notes that qualify it."""
    sizes = document.get("breakdown", document).get("overall", document)
    for name, suffix in _SIZE_KEYS:
        if name in sizes:
            raw_bytes, stored_bytes = sizes["raw_bytes"], sizes[name]
            valid_bytes = sizes.get("valid_bytes", raw_bytes)
            ratio_text = (
                f", ratio {valid_bytes / stored_bytes:.4f}" if stored_bytes and sizes.get("ratio", True) else ""
            )
            suffix_text = "" if document.get("label") == SIMULATED else suffix
            return "; ".join(
                [f"{raw_bytes:,} -> {stored_bytes:,} bytes{suffix_text}{ratio_text}", *document.get("notes", ())]
            )
    return ""


_BATCH_DESCRIPTION = """\
Process each file below the inputs by itself, in processes of one thread each. Standard output gets one JSON object a
line, in the order of names: {"path", "ok", "seconds"}, and "document" (what --json prints of this file alone), "error",
"notes". A terminal gets a line of text for each, unless --json is given. If a file fails, the others continue, and the
exit code is 1. Folders are searched for files of arrays and caches, by verify for frames, by measure and inspect for
both; hidden files and links to folders are skipped (docs/many.md)."""

BATCH_OPTION_NAMES = ("jobs", "dask", "resume", "match")


def add_batch_options(parser: Any) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("many files", _BATCH_DESCRIPTION)
    mode_group = group.add_mutually_exclusive_group()
    mode_group.add_argument(
        "--jobs", type=shared_options.parse_positive, metavar="N", help="process each file by itself, in N processes"
    )
    mode_group.add_argument(
        "--dask", metavar="ADDRESS", help="process each file by itself, on the Dask cluster with this scheduler"
    )
    group.add_argument(
        "--resume", metavar="FILE", help="record finished files in FILE; skip those that it has, if they are unchanged"
    )
    group.add_argument("--glob", dest="match", metavar="PATTERN", help="take only files with such names, e.g. '*.bin'")


def is_batch(arguments: argparse.Namespace) -> bool:
    """Return whether each file is a task of its own; raise `UsageError` for options that require this."""
    if arguments.jobs is not None or arguments.dask is not None:
        return True
    shared_options.refuse_given(arguments, ("resume", "match"), "needs --jobs N or --dask ADDRESS")
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
    """Run a command for each file below `paths`, and return the exit code.

    `accepted_kinds` are the `InputKinds` to include. Options in `not_for_many` are refused with the reason that it maps
    them to. `output` returns the function that makes the task of a file.
    """
    from ..batch import InputKinds, Task, find_inputs
    from .batch_work import CommandWork

    reasons = {**(not_for_many or {}), "threads": "each file has one thread"}
    if "table" in arguments:
        reasons["table"] = "a table is of one input"
    for name, reason in reasons.items():
        shared_options.refuse_given(arguments, [name], f"is not for --jobs and --dask: {reason}")
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
            console.print_note(arguments, line)
        for line in _warn_merged_folders(arguments, paths, discovery.inputs):
            console.print_note(arguments, line)
        if not discovery.inputs:
            console.print_finding(f"{' '.join(paths)}: nothing there that kvmnn {command_name} reads")
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
    """Return a warning if files of several folders go to one, where names no longer show their origin."""
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
    """Make the paths of inputs and options absolute: workers of a cluster have another working directory."""
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
    from .._util.text import pluralize
    from ..batch import run_tasks

    num_failed, first_error = 0, ""
    with (
        closing(run_tasks(tasks, work, executor, max_running=num_ahead, journal=finished)) as results,
        console.progress_bar(
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
        console.print_note(arguments, f"{files} in {finished.path}, changed since then or without output, done again")
    if num_failed:
        console.print_finding(f"{num_failed:,} of {pluralize(len(tasks), 'file')} failed, the first: {first_error}")
    return 1 if num_failed else 0


def _print_task(arguments: argparse.Namespace, task_result: TaskResult) -> None:
    """Print the line of a file: JSON for programs, text for a terminal."""
    # MOVED

    if arguments.json or not streams.is_terminal():
        streams.write_out(task_result.line)
    else:
        streams.write_out(format_task_line(task_result.to_dict()), fold=True)
    streams.flush_out()


@contextmanager
def _open_journal(arguments: argparse.Namespace, work: CommandWork) -> Iterator[tuple[CommandWork, TaskJournal | None]]:
    from ..batch import TaskJournal

    if arguments.resume is None:
        yield work, None
        return
    with TaskJournal(arguments.resume, work.compute_identity()) as journal:
        if journal.has_torn_line:
            console.print_note(arguments, f"{journal.path}: the last line was torn, and is done again")
        yield work, journal


@contextmanager
def _open_executor(
    arguments: argparse.Namespace, command_name: str
) -> Iterator[tuple[Any, Callable[[], int] | None, Any]]:
    """Return the executor for `kvmnn.batch.run_tasks`, its number of tasks ahead, and how to call a function there."""
    from .. import batch

    if arguments.dask is None:
        with _open_processes(arguments.jobs, command_name) as (make_processes, call_in_worker):
            yield make_processes, None, call_in_worker
        return
    with batch.connect_dask(arguments.dask) as (executor, num_ahead):
        dask_executor: Executor = executor
        yield dask_executor, num_ahead, lambda function, *call_arguments: function(*call_arguments)


@contextmanager
def _open_processes(jobs: int, command_name: str) -> Iterator[tuple[Callable[[], ProcessExecutor], Callable[..., Any]]]:
    """Return a function that makes the processes, and one that calls a function in a process.

    The first processes start at once: they import all formats, which this process never does as that takes long.
    """
    from concurrent.futures import BrokenExecutor, wait

    from .. import batch
    from ..batch.runner import STALL_CHECK_SECONDS
    from .batch_work import import_command

    def call_in_worker(function: Callable[..., Any], *call_arguments: Any) -> Any:
        try:
            future = first_processes.submit(function, *call_arguments)
            while not wait([future], STALL_CHECK_SECONDS).done:
                first_processes.break_if_stuck()
            return future.result()
        except BrokenExecutor:  # somebody killed one; there will be others
            return function(*call_arguments)

    first_processes = batch.ProcessExecutor(jobs)
    executors = chain([first_processes], map(batch.ProcessExecutor, repeat(jobs)))
    try:
        for _ in range(min(jobs, os.cpu_count() or 1)):
            first_processes.submit(import_command, command_name)
        yield lambda: next(executors), call_in_worker
    finally:
        first_processes.shutdown(cancel_futures=True)  # it has been shut down already, unless nobody took it


@contextmanager
def _clean_output_folders(tasks: Sequence[Task]) -> Iterator[None]:
    """Remove temporary files of ended processes from the output folders on exit, and new folders that stayed empty."""
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
