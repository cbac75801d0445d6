"""An option of the command line, declared on its dataclass field; ``cli/options.py`` binds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPTION_KEY = "option"
"""The key of a field's metadata."""


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """An option as it is declared on its field; name, type and default are the field's own."""

    help: str
    #: What the help calls the value; None: by the type, ``N`` or ``X``.
    metavar: str | None = None
    #: Makes the value of its text; None: by the type.
    parse: Callable[[str], Any] | None = None


def option(text: str, **settings: Any) -> Mapping[str, OptionInfo]:
    """Metadata of a field that is an option: ``field(default=64, metadata=option("tokens of a block"))``."""
    return {OPTION_KEY: OptionInfo(help=text, **settings)}
