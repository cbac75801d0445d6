"""Options of one argument group in one word: ``--part batch=0,stream=1``, each key sets a name of the namespace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._util.text import suggest


@dataclass(frozen=True)
class SpecField:
    """A key of a spec option, and where its value goes.

    Parameters
    ----------
    key
        What is typed: ``batch`` of ``batch=0``; the whole item of a field that takes no value.
    dest
        The name in the namespace.
    parse
        Makes the value of the text after ``=``. None: the item is the key alone, and the value is `constant`.
    metavar
        What the help calls the value.
    default
        Where the option or the key is missing.
    """

    key: str
    dest: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str = "N"
    constant: Any = True
    default: Any = None

    def format_label(self) -> str:
        """The item as the help shows it."""
        return self.key if self.parse is None else f"{self.key}={self.metavar}"


class SpecAction(argparse.Action):
    """``KEY=VALUE,...``: each key sets a name of its own; one of `words` is the value of `dest` itself."""

    def __init__(self, *, title: str, words: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._title, self._words = title, tuple(words)
        self._fields: dict[str, SpecField] = {}
        self.help = title

    @property
    def dests(self) -> tuple[str, ...]:
        """The names in the namespace that the option sets."""
        return (*([self.dest] if self._words else []), *(field.dest for field in self._fields.values()))

    @property
    def value_prefixes(self) -> tuple[str, ...]:
        """What an item can begin with, for completions."""
        keys = (key if field.parse is None else f"{key}=" for key, field in self._fields.items())
        return (*self._words, *keys)

    def get_key(self, dest: str) -> str:
        """The key that sets a name."""
        return next((f" {field.key}" for field in self._fields.values() if field.dest == dest), "")

    def add_fields(self, fields: Iterable[SpecField]) -> None:
        """Take further keys."""
        self._fields |= {field.key: field for field in fields}
        labels = (f"{field.format_label()}: {field.help}" for field in self._fields.values())
        self.help = f"{self._title}: {'; '.join(labels)}"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        for item in str(values).split(","):
            key, separator, text = item.partition("=")
            field = self._fields.get(key)
            if field is None or (field.parse is None) == bool(separator):
                self._set_word(namespace, item)
            elif field.parse is None:
                setattr(namespace, field.dest, field.constant)
            else:
                try:
                    setattr(namespace, field.dest, field.parse(text))
                except argparse.ArgumentTypeError as error:
                    raise argparse.ArgumentError(self, f"{key}: {error}") from None

    def _set_word(self, namespace: argparse.Namespace, item: str) -> None:
        if item in self._words:
            setattr(namespace, self.dest, item)
            return
        expected = [*self._words, *(field.format_label() for field in self._fields.values())]
        hint = suggest(item.partition("=")[0], [*self._words, *self._fields]) or f" (choose from {', '.join(expected)})"
        raise argparse.ArgumentError(self, f"invalid choice: {item!r}{hint}")


def add_spec_option(
    parser: Any, flag: str, title: str, fields: Sequence[SpecField], *, metavar: str, **options: Any
) -> None:
    """Declare a spec option, or further keys of one that the parser has."""
    action = parser._option_string_actions.get(flag)
    if action is None:
        options = {"default": argparse.SUPPRESS} | options
        action = parser.add_argument(flag, action=SpecAction, title=title, metavar=metavar, **options)
    action.add_fields(fields)
    parser.set_defaults(**{field.dest: field.default for field in fields})
