"""A sample of a reader: valid files and the commands that read them."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from kvmnn.cli import command_parser, main

_build_parser = cache(command_parser.build_parser)


def _reuse_parser(commands: Sequence[str] = command_parser.COMMANDS) -> argparse.ArgumentParser:
    return _build_parser(tuple(commands))


def call_main(argv: list[str]) -> int:
    """Exit code of a verb in this process, whose parser is built once: thousands of calls have the same verbs."""
    with mock.patch.object(command_parser, "build_parser", _reuse_parser):
        code = main(argv)
    if code == 2 or {*argv} & {*command_parser.HELP_OPTIONS}:
        _build_parser.cache_clear()  # errors of usage and help narrow a parser to an action of its verb
    return code


def quietly(argv: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a verb in this process."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = call_main(argv)
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
