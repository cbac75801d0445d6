"""Entry point of the ``kvmnn`` command: a failure becomes one line and an exit code.

Only modules that every start needs are imported before `main` handles interrupts and errors; until then
`kvmnn.cli.main` does.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from ..errors import REPLACE_HINT, KvmnnError, MissingDependencyError, OptionError
from . import streams
from .signals import EXIT_INTERRUPTED, TerminationSignal, unwind_on_signals

if TYPE_CHECKING:
    from argparse import Namespace

EXIT_OK, EXIT_DATA, EXIT_USAGE, EXIT_MISSING_PACKAGE, EXIT_INTERNAL_ERROR, EXIT_READER_GONE = 0, 1, 2, 3, 70, 141
"""Exit codes; 141 is 128 and SIGPIPE's number. Those of other signals are in `signals`."""

TRACEBACK_VARIABLE = "KVMNN_TRACEBACK"
"""An environment variable: unless it is unset or 0, errors are printed with their traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, without raising any exception or ``SystemExit``.

    With the process's own words (`argv` None) the process ends here, unless a profiler or other threads need its end.
    After an interrupt threads are in the midst of long calls, for which the end of Python would wait.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    arguments: Namespace | None = None
    try:
        streams.claim_standard_descriptors()
        streams.reset_names()
        with unwind_on_signals(is_last=argv is None), _show_warnings_as_lines():
            from ..files.change_detection import InputGuard
            from . import command_parser, console, shared_options

            arguments = command_parser.parse_command_line(words)
            streams.register_names(_list_words(arguments))
            with InputGuard():
                console.check_table_output(arguments)
                shared_options.resolve_model_names(arguments)
                code: int = arguments.run(arguments)
                streams.flush_out()
    except BaseException as exc:
        code = _report_failure(exc, arguments)
        # after an interrupt in an exec of text, as dataclasses make, CPython ends by SIGINT unless another one follows
        exec("")
    for stream in (sys.stdout, sys.stderr):
        streams.drop_buffered(stream)
    if argv is None:
        _end_process(code)
    return code


def _end_process(code: int) -> None:
    """End the process without taking its modules apart, a tenth of a short command's time; return where that is needed.

    It is where threads of others are to be waited for, and where a profiler or debugger reports after `main`.
    """
    helpers = sys.modules.get("kvmnn._util.parallel")
    if helpers is None or not helpers.any_alive():
        if helpers is not None:
            with suppress(KeyboardInterrupt):  # nothing is left to end
                helpers.stop_idle_threads()
        if threading.active_count() > 1 or sys.getprofile() or sys.gettrace() or sys.flags.inspect:
            gc.freeze()  # or the end of Python would look for cycles among all modules
            return
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            streams.drop_buffered(stream)
    os._exit(code)


def _report_failure(exc: BaseException, arguments: Namespace | None) -> int:
    """Report an error in one line; return the exit code."""
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else EXIT_USAGE
    if isinstance(exc, streams.OutputClosedError):  # as `| head` leaves every other command: silently
        return EXIT_READER_GONE
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        import traceback

        streams.write_error_lines("".join(traceback.format_exception(exc)).rstrip("\n"))
    message, code = describe_error(exc, arguments)
    streams.write_error_line("error", message)
    for line in _list_possible_commands(exc, arguments):
        streams.write_error_lines(line)
    return code


def _list_possible_commands(exc: BaseException, arguments: Namespace | None) -> list[str]:
    """List command lines that would resolve the error, the most likely one first."""
    choices: tuple[str, ...] = getattr(exc, "choices", ())
    if arguments is None or not choices:
        return []
    from . import console, packed_options

    command_line = console.format_command_line(arguments)
    return (
        [f"  {command_line} {packed_options.add_unpack_hint(arguments, choice)}" for choice in choices]
        if command_line
        else []
    )


def describe_error(exc: BaseException, arguments: Namespace | None) -> tuple[str, int]:
    """Return the message for an exception, and the exit code."""
    for cause in _iter_causes(exc):
        if isinstance(cause, TerminationSignal):
            return cause.message, cause.code
        if isinstance(cause, KeyboardInterrupt):
            return "interrupted", EXIT_INTERRUPTED
    message = str(exc).replace(REPLACE_HINT, "-f or --force")
    if isinstance(exc, KvmnnError) and arguments is not None:
        from . import packed_options

        message = packed_options.add_jobs_hint(arguments, packed_options.add_unpack_hint(arguments, message))
    if isinstance(exc, OptionError):
        return message, EXIT_USAGE
    if isinstance(exc, MissingDependencyError):
        return message, EXIT_MISSING_PACKAGE
    if isinstance(exc, KvmnnError):
        return message, EXIT_DATA
    if isinstance(exc, MemoryError):
        return "out of memory", EXIT_DATA
    if isinstance(exc, OSError):
        name = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, str | bytes) else ""
        return f"{name}{streams.format_message_line(exc.strerror or exc)}", EXIT_DATA
    if isinstance(exc, UnicodeEncodeError):  # of a file's name, by the system's encoding
        return f"{exc.object[:200]}: cannot be a name here ({exc.encoding}); PYTHONUTF8=1 may help", EXIT_DATA
    return _describe_internal_error(exc, arguments), EXIT_INTERNAL_ERROR


def _iter_causes(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes: imports turn an interrupt into an error of their own."""
    visited: list[BaseException] = []
    while exc is not None and exc not in visited:
        visited.append(exc)
        yield exc
        exc = exc.__cause__ or exc.__context__


def _describe_internal_error(exc: BaseException, arguments: Namespace | None) -> str:
    """Describe an unexpected error: where it was raised, and which file was being read."""
    trace, location = exc.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "kvmnn" in file:
            location = f" ({os.path.basename(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    problem = (
        f"unexpected {type(exc).__name__}: {streams.format_message_line(str(exc)[:500]) or 'no message'}{location}"
    )
    files = _list_files(arguments)
    files_text = f", with {files[0]}" if files else ""
    return (
        f"{f'{files[0]}: ' if files else ''}{problem}; please report this{files_text} ({TRACEBACK_VARIABLE}=1 shows "
        f"more)"
    )


def _list_files(arguments: Namespace | None) -> list[str]:
    """List the arguments that are files."""
    return [word for word in _list_words(arguments) if "\0" not in word and os.path.exists(word)]


def _list_words(arguments: Namespace | None) -> list[str]:
    """List the arguments that are strings, without texts."""
    words: list[str] = []
    for name, value in vars(arguments).items() if arguments is not None else ():
        values = value if isinstance(value, list | tuple) else [value]
        words += [word for word in values if isinstance(word, str) and name != "prompt"]
    return words


@contextmanager
def _show_warnings_as_lines() -> Iterator[None]:
    """Print warnings of libraries as one line each, like all other messages."""
    import warnings

    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    streams.write_error_line("warning", streams.format_message_line(message))
