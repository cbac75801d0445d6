"""The standard streams, which may be closed, full, abandoned by the reader, or unable to encode some characters.

All output of the command goes through this module, so that no text of a file reaches a terminal as a control sequence.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import field
from typing import Any, TextIO

from .._util.dataclass import dataclass
from .._util.text import escape_control, join_lines

# All output goes through this module: names and texts are escaped, lines folded, closed and full streams handled, once.
# `tests/cli/test_terminal_escapes.py` reads the syntax of every module for prints that bypass it. `main` in
# entry_point.py is the one outermost handler, and `import kvmnn` loads nothing, so that an interrupt in the first
# tenths of a second finds it (docs/command.md).

_MAX_LINE_LETTERS = 1000  # letters of an error or note: what foreign files put into it must not fill the terminal
_SHORTENED_BEGIN_LETTERS, _SHORTENED_END_LETTERS = 700, 200


class OutputClosedError(BaseException):
    """The reader of standard output is gone; not an error, so no error handler catches it."""


def claim_standard_descriptors() -> None:
    """Open closed descriptors 0, 1 and 2 on the null device, so that no other file gets one of these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


_escaped_name_parts: dict[str, str] = {}
"""Parts of names that have line ends, and how they are shown."""


def reset_names() -> None:
    """Forget the names that `register_names` registered, and register that of the working directory."""
    _escaped_name_parts.clear()
    with suppress(OSError):
        register_names([os.getcwd()])


def register_names(words: Iterable[str]) -> None:
    """Register names, of files or of their contents, that a result will repeat.

    A result is lines, so that `write_out` cannot tell the end of one from a line end in a name. It can where it knows
    the name.
    """
    for word in words:
        for name_part in re.finditer(r"[^\n/]{0,8}\n+[^\n/.]{0,8}", word):
            if name_part[0].strip("\n"):
                _escaped_name_parts[name_part[0]] = escape_control(name_part[0], keep_line_ends=False)


def write_out(text: str, end: str = "\n", *, fold: bool = False) -> None:
    """Write text to standard output; with `fold`, wrap its lines between words to the width of a terminal.

    Raises
    ------
    OSError
        If it cannot be written, or standard output is closed.
    """
    stream = _get_stdout()
    with _translate_write_errors():
        stream.write(_make_printable(text, stream, fold) + end)


def flush_out() -> None:
    """Flush the output of `write_out`; raise its errors."""
    with _translate_write_errors():
        if sys.stdout is not None:
            sys.stdout.flush()


@dataclass
class CapturedOutput:
    """Output of a command on one of many files: its document, its errors, and all other lines."""

    document: Any = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_captured_output: ContextVar[CapturedOutput | None] = ContextVar("kvmnn_said", default=None)
"""In the context, because workers of a cluster have threads."""


@contextmanager
def capture_output() -> Iterator[CapturedOutput]:
    """Capture the output of the ``with`` block instead of writing it."""
    captured = CapturedOutput()
    token = _captured_output.set(captured)
    try:
        yield captured
    finally:
        _captured_output.reset(token)


def is_captured() -> bool:
    """Return whether output is captured, as for one of many files: nothing of it goes to the terminal."""
    return _captured_output.get() is not None


def write_document(value: Any) -> None:
    """Write a verb's result as a JSON document to standard output."""
    captured = _captured_output.get()
    if captured is not None:
        captured.document = value
    else:
        write_out(json.dumps(value, indent=2))


def write_error_line(kind: str, message: object) -> None:
    """Write ``kvmnn: kind: message`` as one line on standard error, control characters escaped."""
    line = shorten_line(escape_control(str(message).strip(), keep_line_ends=False))
    captured = _captured_output.get()
    if captured is not None:
        (captured.errors if kind == "error" else captured.notes).append(line)
        return
    write_error_lines(f"kvmnn: {kind}: {line}", colour=_COLOURS.get(kind, _NOTE_COLOUR))


def shorten_line(line: str) -> str:
    """Shorten a line to `_MAX_LINE_LETTERS` letters: its beginning and end, and the number of omitted letters."""
    if len(line) <= _MAX_LINE_LETTERS:
        return line
    beginning, ending = line[:_SHORTENED_BEGIN_LETTERS], line[-_SHORTENED_END_LETTERS:]
    return (
        f"{beginning} ... ({len(line) - _SHORTENED_BEGIN_LETTERS - _SHORTENED_END_LETTERS:,} letters more) ... {ending}"
    )


def format_message_line(lines: object) -> str:
    """Join the lines of a result, or of another program's message, to one for `write_error_line`.

    Line ends in registered names are not changed.
    """
    return join_lines(_escape_names(str(lines)))


_COLOURS = {"error": "1;31", "refused": "1;31", "warning": "33"}
_NOTE_COLOUR = "36"
"""Of what kind a line is, in codes of terminals: bold red, yellow, and cyan for anything else."""


def write_error_lines(text: str, *, colour: str = "") -> None:
    """Write lines to standard error; do nothing when it is closed. On a terminal the first two words have a colour."""
    stream = sys.stderr
    if stream is not None:
        with suppress(OSError, ValueError):
            printable = _make_printable(text, stream, with_fold=True)
            if colour and _has_colours(stream):
                prefix, separator, tail = printable.partition(": ")
                kind, kind_separator, message = tail.partition(": ")
                printable = f"\x1b[{colour}m{prefix}{separator}{kind}{kind_separator.rstrip()}\x1b[0m {message}"
            stream.write(printable + "\n")
            stream.flush()


def _has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours, and nobody asked for none (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


class Stdout:
    """Standard output as a stream of bytes: writes all of them, even when PYTHONUNBUFFERED makes writes partial."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        remaining = memoryview(data).cast("B")
        stream = _get_stdout().buffer
        with _translate_write_errors():
            while remaining:
                remaining = remaining[stream.write(remaining) or 0 :]
        return len(data)

    def flush(self) -> None:
        """Pass buffered bytes to the system."""
        stream = _get_stdout().buffer
        with _translate_write_errors():
            stream.flush()


def drop_buffered(stream: TextIO | None) -> None:
    """Discard what a stream still buffers; otherwise the interpreter would report an error on exit."""
    if stream is not None:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
            return
        with suppress(OSError, ValueError, AttributeError):
            null_descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_descriptor, stream.fileno())
            os.close(null_descriptor)


@contextmanager
def _translate_write_errors() -> Iterator[None]:
    """Add the name of standard output to write errors; raise `OutputClosedError` if its reader is gone."""
    try:
        yield
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as exc:
        if exc.filename is None:
            exc.filename = "standard output"
        raise


def _get_stdout() -> TextIO:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    return sys.stdout


def _escape_names(text: str) -> str:
    """Escape line ends in registered names."""
    for part, escaped_part in _escaped_name_parts.items():
        text = text.replace(part, escaped_part)
    return text


def _make_printable(text: str, stream: TextIO, with_fold: bool) -> str:
    """Escape control sequences that a terminal would execute, and characters that the stream's encoding lacks."""
    text = escape_control(_escape_names(text))
    if with_fold and stream.isatty():
        import shutil  # which imports compression libraries: a start that is interrupted should not wait for them

        from .._util.text import wrap_text

        text = wrap_text(text, shutil.get_terminal_size().columns)
    encoding = stream.encoding or "utf-8"  # that of an io.StringIO is None
    return text.encode(encoding, "backslashreplace").decode(encoding)
