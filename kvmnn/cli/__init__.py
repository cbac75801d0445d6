"""The command line: ``entry_point.py`` runs it, ``command_parser.py`` has the verbs, ``commands/`` a file for each."""

import gc
import os
from typing import TYPE_CHECKING, Any

from .._interrupt import exit_on_interrupt, raise_on_interrupt

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

    from .batch_work import CommandWork

__all__ = ["CommandWork", "build_parser", "main"]

_COLLECTION_THRESHOLD = 100_000
"""New containers before cycles are looked for: more than a short command makes, mostly by its imports."""


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the command; an interrupt before `entry_point` is imported ends the process at once if `argv` is None."""
    if argv is None:
        exit_on_interrupt()
        gc.set_threshold(_COLLECTION_THRESHOLD)
        # Read when numpy is loaded. Its products here are small, and kvmnn has threads of its own: those of numpy wait
        # for each other on busy processors (on two, blocks of a layer were encoded 5 to 12 times slower).
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from . import entry_point

    raise_on_interrupt()
    return entry_point.main(argv)


def __getattr__(name: str) -> Any:
    """Import `CommandWork` on first use, so that the command starts fast."""
    if name == "CommandWork":
        from .batch_work import CommandWork

        return CommandWork
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_parser() -> "ArgumentParser":
    """Build the parser with all commands, for completions, manuals, and programs that embed it."""
    from .command_parser import build_parser

    return build_parser()
