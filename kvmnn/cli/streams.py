"""The standard streams, which may be closed, full, left by their reader, or of an encoding that lacks letters.

Whatever the command says goes through here, so that no name and no text of a file reaches a terminal as a command.
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
from dataclasses import dataclass, field
from typing import Any, TextIO

from .._util.text import escape_control, join_lines

# All output goes through this module: names and texts are escaped, lines folded, closed and full streams handled, once.
# `tests/cli/test_terminal.py` reads the syntax of every module for prints that bypass it. `main` in entry_point.py is
# the one outermost handler, and `import kvmnn` loads nothing, so that an interrupt in the first tenths of a second
# finds it (docs/command.md).

_MAX_LINE_LETTERS = 1000  # letters of an error or note: what foreign files put into it must not fill the terminal
_SHORTENED_BEGIN_LETTERS, _SHORTENED_END_LETTERS = 700, 200


class OutputClosedError(BaseException):
    """Nobody reads standard output any more. No mistake of anybody, so no handler of errors sees it."""


def claim_standard_descriptors() -> None:
    """Open what was handed over closed of 0, 1 and 2 on nothing, so that no file gets the number of a stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


_escaped_name_parts: dict[str, str] = {}
"""Parts of names that have line ends, and how they are shown."""


def reset_names() -> None:
    """Start again, with the names of the working directory."""
    _escaped_name_parts.clear()
    with suppress(OSError):
        register_names([os.getcwd()])


def register_names(words: Iterable[str]) -> None:
    """Names, of files or of what is in them, that a result will repeat.

    A result is lines, so that `write_out` cannot tell the end of one from a line end in a name. It can where it knows
    the name.
    """
    for word in words:
        for name_part in re.finditer(r"[^\n/]{0,8}\n+[^\n/.]{0,8}", word):
            if name_part[0].strip("\n"):
                _escaped_name_parts[name_part[0]] = escape_control(name_part[0], keep_line_ends=False)


def write_out(text: str, end: str = "\n", *, fold: bool = False) -> None:
    """Text on standard output; with `fold` its lines are broken between words where a terminal is narrower.

    Raises
    ------
    OSError
        Where it cannot be written, or standard output is closed.
    """
    stream = _get_stdout()
    with _translate_write_errors():
        stream.write(_make_printable(text, stream, fold) + end)


def flush_out() -> None:
    """Hand to the system what `write_out` still holds; errors as there."""
    with _translate_write_errors():
        if sys.stdout is not None:
            sys.stdout.flush()


@dataclass
class CapturedOutput:
    """What a verb says that runs for one of many files: its document, its errors, and everything else in lines."""

    document: Any = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_captured_output: ContextVar[CapturedOutput | None] = ContextVar("kvmnn_said", default=None)
"""In the context, because workers of a cluster have threads."""


@contextmanager
def capture_output() -> Iterator[CapturedOutput]:
    """What is said meanwhile is kept instead of written."""
    captured = CapturedOutput()
    token = _captured_output.set(captured)
    try:
        yield captured
    finally:
        _captured_output.reset(token)


def is_captured() -> bool:
    """Whether what is said is kept, as for one of many files: nothing of it is for the terminal."""
    return _captured_output.get() is not None


def write_document(value: Any) -> None:
    """A verb's result as a JSON document on standard output."""
    captured = _captured_output.get()
    if captured is not None:
        captured.document = value
    else:
        write_out(json.dumps(value, indent=2))


def write_error_line(kind: str, message: object) -> None:
    """``kvmnn: kind: message`` as one line on standard error, line ends escaped; nothing where nobody can read it."""
    line = shorten_line(escape_control(str(message).strip(), keep_line_ends=False))
    captured = _captured_output.get()
    if captured is not None:
        (captured.errors if kind == "error" else captured.notes).append(line)
        return
    write_error_lines(f"kvmnn: {kind}: {line}")


def shorten_line(line: str) -> str:
    """Return a line of at most `_MAX_LINE_LETTERS` letters: of a longer one its beginning and end, and how much is
    left out.
    """
    if len(line) <= _MAX_LINE_LETTERS:
        return line
    beginning, ending = line[:_SHORTENED_BEGIN_LETTERS], line[-_SHORTENED_END_LETTERS:]
    return (
        f"{beginning} ... ({len(line) - _SHORTENED_BEGIN_LETTERS - _SHORTENED_END_LETTERS:,} letters more) ... {ending}"
    )


def format_message_line(lines: object) -> str:
    """Lines of a result, or of another program's message, as one for `write_error_line`; line ends in names that are
    known stay.
    """
    return join_lines(_escape_names(str(lines)))


def write_error_lines(text: str) -> None:
    """Lines on standard error; nothing where nobody can read them."""
    stream = sys.stderr
    if stream is not None:
        with suppress(OSError, ValueError):
            stream.write(_make_printable(text, stream, with_fold=True) + "\n")
            stream.flush()


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


class Stdout:
    """Standard output as a stream of bytes: writes all of them, even where PYTHONUNBUFFERED makes writes partial."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        remaining = memoryview(data).cast("B")
        stream = _get_stdout().buffer
        with _translate_write_errors():
            while remaining:
                remaining = remaining[stream.write(remaining) or 0 :]
        return len(data)

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        stream = _get_stdout().buffer
        with _translate_write_errors():
            stream.flush()


def drop_buffered(stream: TextIO | None) -> None:
    """Give up what a stream still holds; without this the interpreter would complain about it on exit."""
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
    """Name standard output in errors of writing to it; `OutputClosedError` where nobody reads it."""
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
    """With line ends escaped in the names that are known."""
    for part, escaped_part in _escaped_name_parts.items():
        text = text.replace(part, escaped_part)
    return text


def _make_printable(text: str, stream: TextIO, with_fold: bool) -> str:
    """With escapes for what a terminal would act on, and for letters that the stream's encoding lacks."""
    text = escape_control(_escape_names(text))
    if with_fold and stream.isatty():
        import shutil  # which imports compression libraries: a start that is interrupted should not wait for them

        from .._util.text import wrap_text

        text = wrap_text(text, shutil.get_terminal_size().columns)
    encoding = stream.encoding or "utf-8"  # that of an io.StringIO is None
    return text.encode(encoding, "backslashreplace").decode(encoding)
