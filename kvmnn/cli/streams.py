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

from ..text.visible import one_line, visible

_MAX_LINE = 1000  # letters of an error or note: what foreign files put into it must not fill the terminal
_BEGIN, _END = 700, 200


class ReaderGoneError(BaseException):
    """Nobody reads standard output any more. No mistake of anybody, so no handler of errors sees it."""


def claim_descriptors() -> None:
    """Open what was handed over closed of 0, 1 and 2 on nothing, so that no file gets the number of a stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


_broken: dict[str, str] = {}
"""Parts of names that have line ends, and how they are shown."""


def forget_names() -> None:
    """Begin anew, with the names of the working directory."""
    _broken.clear()
    with suppress(OSError):
        expect_names([os.getcwd()])


def expect_names(words: Iterable[str]) -> None:
    """Names, of files or of what is in them, that a result will repeat.

    A result is lines, so that `out` cannot tell the end of one from a line end in a name. It can where it knows the
    name.
    """
    for word in words:
        for found in re.finditer(r"[^\n/]{0,8}\n+[^\n/.]{0,8}", word):
            if found[0].strip("\n"):
                _broken[found[0]] = visible(found[0], lines=False)


def out(text: str, end: str = "\n", *, fold: bool = False) -> None:
    """Text on standard output; with `fold` its lines are broken between words where a terminal is narrower.

    Raises
    ------
    OSError
        Where it cannot be written, or standard output is closed.
    """
    stream = _stdout()
    with _writing():
        stream.write(_shown(text, stream, fold) + end)


def flush() -> None:
    """Hand to the system what `out` still holds; errors as there."""
    with _writing():
        if sys.stdout is not None:
            sys.stdout.flush()


@dataclass
class Said:
    """What a verb says that runs for one of many files: its document, its errors, and everything else in lines."""

    document: Any = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_said: ContextVar[Said | None] = ContextVar("kvmnn_said", default=None)
"""In the context, because workers of a cluster have threads."""


@contextmanager
def keeping() -> Iterator[Said]:
    """What is said meanwhile is kept instead of written."""
    said = Said()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def is_kept() -> bool:
    """Whether what is said is kept, as for one of many files: nothing of it is for the terminal."""
    return _said.get() is not None


def document(found: Any) -> None:
    """A verb's result as a JSON document on standard output."""
    said = _said.get()
    if said is not None:
        said.document = found
    else:
        out(json.dumps(found, indent=2))


def err(kind: str, message: object) -> None:
    """``kvmnn: kind: message`` as one line on standard error, line ends escaped; nothing where nobody can read it."""
    line = shortened(visible(str(message).strip(), lines=False))
    said = _said.get()
    if said is not None:
        (said.errors if kind == "error" else said.notes).append(line)
        return
    err_lines(f"kvmnn: {kind}: {line}")


def shortened(line: str) -> str:
    """Return a line of at most `_MAX_LINE` letters: of a longer one its beginning and end, and how much is left out."""
    if len(line) <= _MAX_LINE:
        return line
    begin, end = line[:_BEGIN], line[-_END:]
    return f"{begin} ... ({len(line) - _BEGIN - _END:,} letters more) ... {end}"


def joined(lines: object) -> str:
    """Lines of a result, or of another program's message, as one for `err`; line ends in names that are known stay."""
    return one_line(_with_names(str(lines)))


def err_lines(text: str) -> None:
    """Lines on standard error; nothing where nobody can read them."""
    stream = sys.stderr
    if stream is not None:
        with suppress(OSError, ValueError):
            stream.write(_shown(text, stream, fold=True) + "\n")
            stream.flush()


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


class Stdout:
    """Standard output as a stream of bytes: writes all of them, even where PYTHONUNBUFFERED makes writes partial."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        rest = memoryview(data).cast("B")
        stream = _stdout().buffer
        with _writing():
            while rest:
                rest = rest[stream.write(rest) or 0 :]
        return len(data)

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        stream = _stdout().buffer
        with _writing():
            stream.flush()


def forget(stream: TextIO | None) -> None:
    """Give up what a stream still holds; without this the interpreter would complain about it on exit."""
    if stream is not None:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
            return
        with suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


@contextmanager
def _writing() -> Iterator[None]:
    """Name standard output in errors of writing to it; `ReaderGoneError` where nobody reads it."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGoneError from None
    except OSError as exc:
        if exc.filename is None:
            exc.filename = "standard output"
        raise


def _stdout() -> TextIO:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    return sys.stdout


def _with_names(text: str) -> str:
    """With line ends escaped in the names that are known."""
    for part, shown in _broken.items():
        text = text.replace(part, shown)
    return text


def _shown(text: str, stream: TextIO, fold: bool) -> str:
    """With escapes for what a terminal would act on, and for letters that the stream's encoding lacks."""
    text = visible(_with_names(text))
    if fold and stream.isatty():
        import shutil  # which imports compression libraries: a start that is interrupted should not wait for them

        from ..text.folding import folded

        text = folded(text, shutil.get_terminal_size().columns)
    encoding = stream.encoding or "utf-8"  # that of an io.StringIO is None
    return text.encode(encoding, "backslashreplace").decode(encoding)
