"""Declare an option of the command line on its dataclass field; ``cli/options.py`` adds it to a parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .dataclass import dataclass

OPTION_KEY = "option"
"""The key of a field's metadata."""


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """Declaration of an option on a dataclass field; the field supplies name, type and default."""

    help: str
    #: Placeholder of the value in the help; None: ``N`` or ``X``, by the type.
    metavar: str | None = None
    #: Parses the value; None: by the type.
    parse: Callable[[str], Any] | None = None
    #: The values of a text; none: those of a ``Literal``, or any.
    choices: tuple[str, ...] = ()
    #: The option, where its name is not that of the field.
    flag: str | None = None
    #: The name among the parsed arguments, where that of the field is another option's in other verbs.
    dest: str | None = None
    #: The least value of a whole number, 0 or 1; None: it may be negative.
    min_value: int | None = None
    #: Whether ``--no-FLAG`` exists as well.
    is_negatable: bool = False


def option(text: str, **settings: Any) -> Mapping[str, OptionInfo]:
    """Return metadata that makes a field an option: ``field(default=64, metadata=option("tokens of a block"))``."""
    return {OPTION_KEY: OptionInfo(help=text, **settings)}
