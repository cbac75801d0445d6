"""Options that were given and would do nothing are refused: what was meant by them would not have happened."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .printing import UsageError


def was_given(arguments: argparse.Namespace, name: str) -> bool:
    """Whether an option has another value than without it."""
    return bool(hasattr(arguments, name) and getattr(arguments, name) != arguments.parser.get_default(name))


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """`UsageError` for the first of the options that was given; `names` are those of the namespace."""
    for name in names:
        if was_given(arguments, name):
            raise UsageError(f"{get_option_name(arguments, name)} {reason}")


def get_option_name(arguments: argparse.Namespace, name: str) -> str:
    """What the verb calls an option."""
    actions: list[argparse.Action] = arguments.parser._actions
    return next(action.option_strings[-1] for action in actions if action.dest == name)
