"""The command line: ``command.py`` is the way in, ``parser.py`` knows the verbs, ``verbs/`` has a file for each."""

from typing import TYPE_CHECKING

from .command import main

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ["build_parser", "main"]


def build_parser() -> "ArgumentParser":
    """The command's parser with all verbs, for completions, manuals, and programs that put their own around it."""
    from .parser import build_parser

    return build_parser()
