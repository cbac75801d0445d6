"""Output of commands: results, data on standard output, progress."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import OptionError
from ..files import change_detection
from ..files.file_names import is_directory_output as is_directory_output
from ..files.urls import is_url
from . import streams
from .streams import Stdout as Stdout

if TYPE_CHECKING:
    from ..arrays.array import ArrayInfo

STDIO = "-"
_RAW_FILE_SUFFIXES = ("", ".bin", ".raw")


class UsageError(OptionError):
    """The command line is contradictory or incomplete; exit code 2."""


COMMANDS_WITH_COMMAND_LINE = ("bench", "eval", "gate run", "measure", "replay")
"""Verbs whose documents say by which command they were made, for ``kvmnn report``."""


def format_command_line(arguments: argparse.Namespace) -> str:
    """Format the command line for a shell; empty if there is none."""
    typed_words = getattr(arguments, "typed", None)
    return shlex.join(["kvmnn", *typed_words["words"]]) if typed_words else ""


class CommandResult(Protocol):
    """Result of a command's library function, the same for the shell and a notebook."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document for ``--json``."""

    def __str__(self) -> str: ...


def show_result(
    arguments: argparse.Namespace,
    command_name: str,
    result: CommandResult,
    *,
    text: str | None = None,
    data_on_stdout: bool = False,
) -> None:
    """Print a result: as JSON for ``--json``, else as `text` (default: ``str(result)``)."""
    change_detection.verify_inputs()
    write_table(arguments, result)
    if arguments.json:
        command_entry = (
            {"command": format_command_line(arguments)} if command_name in COMMANDS_WITH_COMMAND_LINE else {}
        )
        print_json({"verb": command_name, **command_entry, **result.to_dict()})
        return
    if command_name != "generate":  # whose result has texts with lines of their own
        register_document_names(result.to_dict())
    if line := str(result) if text is None else text:
        print_line(arguments, line, data_on_stdout=data_on_stdout)


def check_table_output(arguments: argparse.Namespace) -> None:
    """Check before the work starts that ``--table`` names a file that can be written."""
    if getattr(arguments, "table", None) is not None:
        from ..files.atomic import FileOutput

        with FileOutput(arguments.table, force=arguments.force):
            pass  # removed again, as nothing is committed


def write_table(arguments: argparse.Namespace, result: CommandResult) -> None:
    """Write the table of a result to the file of ``--table``, if there is one."""
    if getattr(arguments, "table", None) is None:
        return
    from ..files.atomic import FileOutput
    from ..reports.result_tables import format_result, infer_table_format

    with FileOutput(arguments.table, force=arguments.force) as output:
        output.file.write(format_result(result, infer_table_format(arguments.table)).encode())
        output.commit()


def register_document_names(document: Any) -> None:
    """Register the texts of a document as names, which are printed without line breaks."""
    if isinstance(document, str):
        streams.register_names([document])
    elif isinstance(document, dict):
        for key, value in document.items():
            register_document_names(key)
            register_document_names(value)
    elif isinstance(document, list | tuple):
        for value in document:
            register_document_names(value)


def show_failed_result(arguments: argparse.Namespace, command_name: str, result: CommandResult) -> int:
    """Print the result of a check that failed: as JSON for ``--json``, and as an error; returns the exit code."""
    change_detection.verify_inputs()
    write_table(arguments, result)
    if arguments.json:
        print_json({"verb": command_name, **result.to_dict()})
    register_document_names(result.to_dict())
    streams.write_error_line("error", streams.format_message_line(result))
    return 1


def print_line(arguments: argparse.Namespace, line: str, *, data_on_stdout: bool = False) -> None:
    """Print a line of a human-readable result; nothing with ``--json``.

    With the data itself on standard output the line goes to standard error, where ``-q`` hides it as it hides notes.
    """
    if arguments.json:
        return
    if not data_on_stdout:
        streams.write_out(line, fold=True)
    elif not arguments.quiet:
        streams.write_error_lines(line)


def print_note(arguments: argparse.Namespace, line: object, kind: str = "note") -> None:
    """Print a line on standard error about something inferred, left out or worth a warning; nothing with ``-q``.

    Verbs whose documents have all notes collect them in the namespace's `noted`.
    """
    if hasattr(arguments, "noted"):
        arguments.noted.append(str(line))
    if not arguments.quiet:
        streams.write_error_line(kind, line)


def note_output_folder(arguments: argparse.Namespace, output: str, num_arrays: int) -> None:
    """Print a note if several arrays become a folder under a name with a file suffix."""
    if num_arrays > 1 and PurePath(output).suffix and not (is_directory_output(output) or os.path.exists(output)):
        print_note(
            arguments, f"{output} becomes a folder, as {num_arrays} arrays are not one file (-o {output}/ says so)"
        )


def check_output_suffix(arguments: argparse.Namespace, output: str, arrays: Sequence[ArrayInfo] | None = None) -> None:
    """Raise `UsageError` for a file with an unknown suffix, which would contain raw elements, without ``--raw``."""
    from .._util.text import suggest
    from ..formats import ARRAY_FORMATS
    from ..profiles.search import SUFFIX

    suffix = PurePath(output).suffix.lower()
    is_file = not is_directory_output(output) and (arrays is None or len(arrays) == 1)
    if arguments.raw:
        if suffix in ARRAY_FORMATS or not is_file:
            raise UsageError(
                f"--raw: {output} gets arrays with their shapes: expected one array and a name such as X.bin"
            )
        return
    if suffix in (*_RAW_FILE_SUFFIXES, *ARRAY_FORMATS) or not is_file:
        return
    formats = ", ".join(ARRAY_FORMATS)
    if suffix == SUFFIX:
        raise UsageError(f"{output}: arrays are written, not a profile: expected one of {formats}, or a folder DIR/")
    suggestion = suggest(suffix, ARRAY_FORMATS)
    raise UsageError(
        f"{output}: {suffix!r} is none of {formats}{suggestion}; --raw writes the raw words of one array, "
        f"{output}/ is a folder"
    )


def print_finding(line: object) -> None:
    """Print a finding of a check as one error line."""
    streams.write_error_line("error", line)


def write_text(text: str) -> None:
    """Write text unchanged to standard output."""
    streams.write_out(text, end="")


def print_json(document: Any) -> None:
    """Print the result of a command as JSON."""
    streams.write_document(document)


def is_data_to_stdout(arguments: argparse.Namespace, source: str) -> bool:
    """Return whether data goes to standard output: for ``-o -``, or for piped input without -o and terminal."""
    if arguments.output == STDIO:
        return True
    return arguments.output is None and source == STDIO and not arguments.json and not streams.is_terminal()


def choose_output(arguments: argparse.Namespace, source: str, suffix: str) -> str:
    """Return the output path: as given, or the input's with another suffix; a trailing slash means a directory.

    `UsageError` is raised for standard output, and if the input has no name.
    """
    specified: str | None = arguments.output
    if specified is not None and specified != STDIO:
        return specified
    path = PurePath(source)
    if specified == STDIO:
        output_text = "a directory of files" if suffix.endswith("/") else f"a {PurePath(f'x{suffix}').suffix} file"
        raise UsageError(f"-o -: {output_text} is not written to standard output: use -o {_format_example(suffix)}")
    if source == STDIO or not path.name.strip(".") or is_url(source):
        raise UsageError(f"no output given: use -o {_format_example(suffix)}")
    return str(path if os.path.isdir(source) else path.with_suffix("")) + suffix


def _format_example(suffix: str) -> str:
    return "DIR/" if suffix.endswith("/") else f"OUT{PurePath(f'x{suffix}').suffix}"


def open_data_stdout(arguments: argparse.Namespace, data_name: str) -> Stdout:
    """Open standard output for data, which messages call `data_name`; raise `UsageError` with ``--json``."""
    if arguments.json:
        raise UsageError(
            f"--json and the {data_name} both want standard output: write the {data_name} to a file (-o FILE)"
        )
    return Stdout()


class AdvanceProgress(Protocol):
    """Function that advances a progress bar: units done since the last call, and a word about the work."""

    def __call__(self, done: int, note: str = "", /) -> object: ...


@contextmanager
def progress_bar(
    arguments: argparse.Namespace,
    total: int,
    label: str,
    *,
    unit: str = "B",
    delay: float = 1,
    is_replaced: bool = False,
) -> Iterator[AdvanceProgress | None]:
    """Show a progress bar on the terminal when the work takes longer than `delay` seconds.

    Parameters
    ----------
    total
        Units of all the work.
    label
        Short description of the work.
    unit
        Unit of the work: bytes (``"B"``) by default, or e.g. ``"token"``.
    is_replaced
        Whether results are printed to the same terminal, so that no bar is needed.

    Yields
    ------
    A function that takes the number of units done since the last call, or None where no bar is wanted: no terminal,
    ``-q``, or no tqdm.
    """
    is_quiet = arguments.quiet or is_replaced or streams.is_captured()
    if is_quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    tqdm.set_lock(threading.RLock())  # its own is for several processes: a semaphore that Python says is leaked
    with tqdm(
        total=total, desc=label, unit=unit, unit_scale=unit not in ("file", "step", "turn"), delay=delay, leave=False,
        file=sys.stderr, dynamic_ncols=True,
    ) as bar:  # fmt: skip

        def advance_bar(num_done: int, note: str = "", /) -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(num_done)

        yield advance_bar
