"""The command line: ``entry_point.py`` runs it, ``command_parser.py`` has the verbs, ``commands/`` a file for each."""

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

    from .batch_work import CommandWork

__all__ = ["CommandWork", "build_parser", "main"]


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the command; an interrupt before `entry_point` is imported ends the process at once if `argv` is None."""
    is_early = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_early:
        signal.signal(signal.SIGINT, _exit_interrupted)
    if argv is None:
        # Read when numpy is loaded. Its products here are small, and kvmnn has threads of its own: those of numpy wait
        # for each other on busy processors (on two, blocks of a layer were encoded 5 to 12 times slower).
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from . import entry_point

    if is_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return entry_point.main(argv)


def _exit_interrupted(signal_number: int, frame: object) -> None:
    """End the process at once, because there is no output to remove yet."""
    try:
        os.write(2, b"kvmnn: error: interrupted\n")
    finally:
        os._exit(130)


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
