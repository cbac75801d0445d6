"""The command line: ``command.py`` is the way in, ``parser.py`` knows the verbs, ``verbs/`` has a file for each."""

from typing import TYPE_CHECKING, Any

from .command import main

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from .many_work import VerbWork

__all__ = ["VerbWork", "build_parser", "main"]


def __getattr__(name: str) -> Any:
    """`VerbWork` when it is asked for, so that the command starts at once."""
    if name == "VerbWork":
        from .many_work import VerbWork

        return VerbWork
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_parser() -> "ArgumentParser":
    """The command's parser with all verbs, for completions, manuals, and programs that put their own around it."""
    from .parser import build_parser

    return build_parser()
