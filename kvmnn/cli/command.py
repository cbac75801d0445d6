"""The way into the ``kvmnn`` command, and every way out of it: one line and an exit code.

Nothing but what every start needs is imported before `main` guards against interrupts and errors; until then
`kvmnn.cli.main` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ..errors import KvmnnError, MissingDependencyError, OptionError
from . import streams
from .signals import INTERRUPTED, SignalledError, unwinding

if TYPE_CHECKING:
    from argparse import Namespace

OK, DATA, USAGE, MISSING, DEFECT, READER_GONE = 0, 1, 2, 3, 70, 141
"""Exit codes; 141 is 128 and SIGPIPE's number. Those of other signals are in `signals`."""

TRACEBACK = "KVMNN_TRACEBACK"
"""An environment variable: if it is set to anything but 0, errors come with their traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never lets an exception or ``SystemExit`` through.

    With the process's own words (`argv` None) an interrupt ends the process here, where threads are in the midst of
    long calls: the end of Python would wait for them.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    arguments: Namespace | None = None
    try:
        streams.claim_descriptors()
        streams.forget_names()
        with unwinding(last=argv is None), _warnings():
            from ..files.changes import Reading
            from . import parser

            arguments = parser.parse(words)
            streams.expect_names(_words(arguments))
            with Reading():
                code: int = arguments.run(arguments)
                streams.flush()
    except BaseException as exc:
        code = _failed(exc, arguments)
        # after an interrupt in an exec of text, as dataclasses make, CPython ends by SIGINT unless another one follows
        exec("")
    for stream in (sys.stdout, sys.stderr):
        streams.forget(stream)
    if argv is None and _threads_are_left():
        os._exit(code)
    return code


def _threads_are_left() -> bool:
    helpers = sys.modules.get("kvmnn.threads.helpers")
    return helpers is not None and bool(helpers.are_left())


def _failed(exc: BaseException, arguments: Namespace | None) -> int:
    """Say in one line what happened; returns the exit code."""
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else USAGE
    if isinstance(exc, streams.ReaderGoneError):  # as `| head` leaves every other command: silently
        return READER_GONE
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        import traceback

        streams.err_lines("".join(traceback.format_exception(exc)).rstrip("\n"))
    message, code = verdict(exc, arguments)
    streams.err("error", message)
    for line in _possible_commands(exc, arguments):
        streams.err_lines(line)
    return code


def _possible_commands(exc: BaseException, arguments: Namespace | None) -> list[str]:
    """The command lines that an error leaves to choose from, the likeliest first."""
    choices: tuple[str, ...] = getattr(exc, "choices", ())
    if arguments is None or not choices:
        return []
    from . import packed_options, printing

    typed = printing.command(arguments)
    return [f"  {typed} {packed_options.in_the_words_of(arguments, choice)}" for choice in choices] if typed else []


def verdict(exc: BaseException, arguments: Namespace | None) -> tuple[str, int]:
    """What is said of an exception, and the exit code."""
    for cause in _chain(exc):
        if isinstance(cause, SignalledError):
            return cause.said, cause.code
        if isinstance(cause, KeyboardInterrupt):
            return "interrupted", INTERRUPTED
    said = str(exc)
    if isinstance(exc, KvmnnError) and arguments is not None:
        from . import packed_options

        said = packed_options.with_jobs(arguments, packed_options.in_the_words_of(arguments, said))
    if isinstance(exc, OptionError):
        return said, USAGE
    if isinstance(exc, MissingDependencyError):
        return said, MISSING
    if isinstance(exc, KvmnnError):
        return said, DATA
    if isinstance(exc, MemoryError):
        return "out of memory", DATA
    if isinstance(exc, OSError):
        name = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, str | bytes) else ""
        return f"{name}{streams.joined(exc.strerror or exc)}", DATA
    if isinstance(exc, UnicodeEncodeError):  # of a file's name, by the system's encoding
        return f"{exc.object[:200]}: cannot be a name here ({exc.encoding}); PYTHONUTF8=1 may help", DATA
    return _defect(exc, arguments), DEFECT


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it came from: imports turn an interrupt into an error of their own."""
    seen: list[BaseException] = []
    while exc is not None and exc not in seen:
        seen.append(exc)
        yield exc
        exc = exc.__cause__ or exc.__context__


def _defect(exc: BaseException, arguments: Namespace | None) -> str:
    """An error that nobody foresaw: where it was raised, and what was being read."""
    trace, place = exc.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "kvmnn" in file:
            place = f" ({os.path.basename(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    what = f"unexpected {type(exc).__name__}: {streams.joined(str(exc)[:500]) or 'no message'}{place}"
    files = _files(arguments)
    with_it = f", with {files[0]}" if files else ""
    return f"{f'{files[0]}: ' if files else ''}{what}; please report this{with_it} ({TRACEBACK}=1 shows more)"


def _files(arguments: Namespace | None) -> list[str]:
    """The files among the arguments."""
    return [word for word in _words(arguments) if "\0" not in word and os.path.exists(word)]


def _words(arguments: Namespace | None) -> list[str]:
    """The arguments that are words, but for texts."""
    found: list[str] = []
    for name, value in vars(arguments).items() if arguments is not None else ():
        values = value if isinstance(value, list | tuple) else [value]
        found += [word for word in values if isinstance(word, str) and name != "prompt"]
    return found


@contextmanager
def _warnings() -> Iterator[None]:
    """Warnings of libraries are one line each, as everything else that is said."""
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
    streams.err("warning", streams.joined(message))
