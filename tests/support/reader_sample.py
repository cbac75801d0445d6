"""A sample of a reader: valid files and the commands that read them."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from kvmnn.cli import main


def quietly(argv: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a verb in this process."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, err.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def made(argv: list[object]) -> None:
    code, errors = quietly([str(word) for word in argv])
    assert code == 0, errors


@dataclass(frozen=True)
class Sample:
    """Valid files, and the verbs that read them: ``{in}`` is their folder, ``{out}`` a place for output."""

    files: dict[str, bytes]
    commands: tuple[str, ...]
    damaged: tuple[str, ...]
    """The files that the walk damages, one at a time."""
    is_written_to: bool = False
    """Whether the commands may change the files: a store, from which damaged units are removed."""
