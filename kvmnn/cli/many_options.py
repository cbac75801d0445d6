"""``--jobs``, ``--dask``, ``--resume`` and ``--match``: a verb done for each of many files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from ..files.urls import is_url, without_secret
from . import help, idle_options, printing, shared_options, streams
from .printing import STDIO, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..many import Done, FinishedFile, Named, Processes, Task
    from .many_work import VerbWork

_TEXT = """Each file below the inputs by itself, in processes of one thread each: a JSON object for each on standard
output, a line, in the order of their names, as they come: {"path", "ok", "seconds"}, and "document" (what --json prints
of this file alone), "error", "notes". A terminal gets a line of text for each, unless --json is given. A file that
fails is a line, the others go on, and the exit code is 1. Below a folder count files of arrays and caches, for verify
frames, for measure and inspect both; nothing hidden, and nothing behind links to folders (docs/many.md)."""

NAMES = ("jobs", "dask", "resume", "match")


def add_many(parser: Any) -> None:
    """Declare them."""
    group = parser.add_argument_group("many files", _TEXT)
    how = group.add_mutually_exclusive_group()
    how.add_argument("--jobs", type=shared_options.positive, metavar="N", help="each file by itself, in N processes")
    how.add_argument("--dask", metavar="ADDRESS", help="each file by itself, on the Dask cluster with this scheduler")
    group.add_argument(
        "--resume", metavar="FILE", help="note in FILE what is done; what is there already, and unchanged, is not done"
    )
    group.add_argument("--match", metavar="PATTERN", help="files of these names count, e.g. '*.bin', and no others")
    help.fold(parser, group, "--help-many")


def asked(arguments: argparse.Namespace) -> bool:
    """Whether each file is done by itself; `UsageError` for options that need that."""
    if arguments.jobs is not None or arguments.dask is not None:
        return True
    idle_options.refuse(arguments, ("resume", "match"), "needs --jobs N or --dask ADDRESS")
    return False


def run(
    arguments: argparse.Namespace,
    verb: str,
    paths: Sequence[str],
    *,
    takes: Sequence[str],
    not_for_many: Mapping[str, str] | None = None,
    output: Callable[[argparse.Namespace], Callable[[Named], Task]] | None = None,
) -> int:
    """Do a verb for each file below `paths`; returns the exit code.

    `takes` is which of `Kinds` count. Options in `not_for_many` are refused, with the reason that stands there.
    `output` gives what makes the task of a file.
    """
    from ..many import Kinds, Task, find
    from .many_work import VerbWork

    for name, why in {**(not_for_many or {}), "threads": "each file has one thread"}.items():
        idle_options.refuse(arguments, [name], f"is not for --jobs and --dask: {why}")
    if STDIO in paths:
        raise UsageError("standard input is one input: --jobs and --dask take files and folders")
    for url in filter(is_url, paths):
        raise UsageError(
            f"{without_secret(url)}: --jobs and --dask take files and folders; without them stores at URLs are read"
        )
    if arguments.dask is not None:
        paths = _make_absolute(arguments, paths)
    task = output(arguments) if output is not None else lambda named: Task(named.path)
    kinds = Kinds(**dict.fromkeys(takes, True), match=arguments.match)
    leave_out = [path for path in (arguments.resume, getattr(arguments, "output", None)) if path]
    with _executor(arguments, verb) as (executor, ahead, elsewhere):
        found = elsewhere(find, paths, kinds, leave_out)
        for line in found.notes(f"kvmnn {verb}"):
            printing.note(arguments, line)
        for line in _note_merged(arguments, paths, found.taken):
            printing.note(arguments, line)
        if not found.taken:
            printing.complain(f"{' '.join(paths)}: nothing there that kvmnn {verb} reads")
            return 1
        tasks = list(map(task, found.taken))
        with _finished(arguments, VerbWork.taken_from(verb, arguments)) as (work, finished), _output_folders(tasks):
            return _run(arguments, verb, tasks, work, finished, executor, ahead)


def _note_merged(arguments: argparse.Namespace, roots: Sequence[str], taken: Sequence[Named]) -> list[str]:
    """Return a line where files of several folders are written into one, whose names say no more whence they came."""
    output = getattr(arguments, "output", None)
    folders = [root for root in roots if any(each.path.startswith(os.path.join(root, "")) for each in taken)]
    if output is None or len(folders) < 2:
        return []
    names = ", ".join(folders[:3]) + (", ..." if len(folders) > 3 else "")
    return [
        f"files of {len(folders)} folders ({names}) are written into {output} without the names of these: name the "
        "folder around them, or encode each with an -o of its own, to keep them apart"
    ]


def _make_absolute(arguments: argparse.Namespace, paths: Sequence[str]) -> list[str]:
    """Workers of a cluster have another working folder: names that say where something is, from the root on."""
    for name in ("output", "model", "token_ids"):
        value = getattr(arguments, name, None)
        if value is not None and (name == "output" or os.path.exists(value)):
            setattr(arguments, name, os.path.abspath(value))
    return [os.path.abspath(path) for path in paths]


def _run(
    arguments: argparse.Namespace,
    verb: str,
    tasks: Sequence[Task],
    work: VerbWork,
    finished: FinishedFile | None,
    executor: Any,
    ahead: Callable[[], int] | None,
) -> int:
    from ..many import run
    from ..text import count

    number, first = 0, ""
    with (
        closing(run(tasks, work, executor, ahead=ahead, finished=finished)) as results,
        printing.progress(arguments, len(tasks), verb, unit="file", beside=streams.on_terminal()) as advance,
    ):
        for done in results:
            _print(arguments, done)
            number += not done.ok
            if done.error is not None and not first:
                first = done.error
            if advance is not None:
                advance(1)
    if finished is not None and finished.changed:
        files = count(finished.changed, "file")
        printing.note(arguments, f"{files} in {finished.path}, changed since then or without output, done again")
    if number:
        printing.complain(f"{number:,} of {count(len(tasks), 'file')} failed, the first: {first}")
    return 1 if number else 0


def _print(arguments: argparse.Namespace, done: Done) -> None:
    """A file's line: for programs JSON, for people who watch a terminal a text."""
    from .many_lines import line_of

    if arguments.json or not streams.on_terminal():
        streams.out(done.line)
    else:
        streams.out(line_of(done.to_dict()), fold=True)
    streams.flush()


@contextmanager
def _finished(arguments: argparse.Namespace, work: VerbWork) -> Iterator[tuple[VerbWork, FinishedFile | None]]:
    from ..many import FinishedFile

    if arguments.resume is None:
        yield work, None
        return
    with FinishedFile(arguments.resume, work.identity()) as finished:
        if finished.torn:
            printing.note(arguments, f"{finished.path}: the last line was torn, and is done again")
        yield work, finished


@contextmanager
def _executor(arguments: argparse.Namespace, verb: str) -> Iterator[tuple[Any, Callable[[], int] | None, Any]]:
    """What `kvmnn.many.run` takes for it, how many tasks ahead, and what calls a function where all is imported."""
    from .. import many

    if arguments.dask is None:
        with _processes(arguments.jobs, verb) as (make, elsewhere):
            yield make, None, elsewhere
        return
    with many.dask(arguments.dask) as (executor, ahead):
        found: Executor = executor
        yield found, ahead, lambda function, *given: function(*given)


@contextmanager
def _processes(jobs: int, verb: str) -> Iterator[tuple[Callable[[], Processes], Callable[..., Any]]]:
    """What makes the processes, and calls a function in one. The first of them begin at once: they import all formats,
    and this process, which would take as long, never does.
    """
    from concurrent.futures import BrokenExecutor, wait

    from .. import many
    from ..many.running import SECONDS_OF_PATIENCE
    from .many_work import prepare

    def elsewhere(function: Callable[..., Any], *given: Any) -> Any:
        try:
            future = first.submit(function, *given)
            while not wait([future], SECONDS_OF_PATIENCE).done:
                first.free()
            return future.result()
        except BrokenExecutor:  # somebody killed one; there will be others
            return function(*given)

    first = many.Processes(jobs)
    executors = chain([first], map(many.Processes, repeat(jobs)))
    try:
        for _ in range(min(jobs, os.cpu_count() or 1)):
            first.submit(prepare, verb)
        yield lambda: next(executors), elsewhere
    finally:
        first.shutdown(cancel_futures=True)  # it has been shut down already, unless nobody took it


@contextmanager
def _output_folders(tasks: Sequence[Task]) -> Iterator[None]:
    """Afterwards nothing is left by processes that are gone where outputs go, nor new folders that are empty."""
    from pathlib import Path

    from ..files.temporary import sweep

    needed = {os.path.dirname(os.path.abspath(task.output)) for task in tasks if task.output is not None}
    new = set()
    for folder in needed:
        while not os.path.lexists(folder) and folder not in new:
            new.add(folder)
            folder = os.path.dirname(folder)
    try:
        yield
    finally:
        for folder in needed:
            sweep(Path(folder))
        for folder in sorted(new, key=len, reverse=True):
            with suppress(OSError):
                os.rmdir(folder)
