"""Options from dataclass fields, and options of several keys: ``--limit KEY=VALUE,...``.

A field with `kvmnn._util.option_fields.option` as its metadata is an option: name, type, help and reference come from
there. Only dataclasses of modules that do not import numpy declare options so, because help and errors must be fast.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .._util.dataclass import dataclass
from .._util.option_fields import OPTION_KEY
from .._util.text import suggest
from .command_parser import parse_positive, parse_whole


@dataclass(frozen=True)
class SpecField:
    """A key of a spec option, and the destination of its value.

    Parameters
    ----------
    key
        The key as typed: ``batch`` of ``batch=0``; the whole item of a field that takes no value.
    dest
        The name in the namespace.
    parse
        Makes the value of the text after ``=``. None: nothing follows the key.
    metavar
        Name of the value in the help.
    constant
        The value of the key alone; None: a value must follow.
    default
        The value if the option or the key is missing.
    """

    key: str
    dest: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str = "N"
    constant: Any = None
    default: Any = None

    def format_label(self) -> str:
        """Format the item for the help."""
        return self.key if self.parse is None else f"{self.key}={self.metavar}"


_MAX_KEYS_IN_SHORT_HELP = 8


class SpecAction(argparse.Action):
    """Option ``KEY=VALUE,...``: each key sets a name in the namespace; one of `words` is the value of `dest` itself."""

    def __init__(self, *, title: str, words: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._title, self._words = title, tuple(words)
        self._fields: dict[str, SpecField] = {}
        self.help = title

    @property
    def dests(self) -> tuple[str, ...]:
        """Names in the namespace that the option sets."""
        return (*([self.dest] if self._words else []), *(field.dest for field in self._fields.values()))

    @property
    def value_prefixes(self) -> tuple[str, ...]:
        """The possible beginnings of an item, for completions."""
        keys = (key if field.parse is None else f"{key}=" for key, field in self._fields.items())
        return (*self._words, *keys)

    @property
    def short_help(self) -> str | None:
        """The help text for ``--help`` when there are many keys."""
        if len(self._fields) <= _MAX_KEYS_IN_SHORT_HELP:
            return None
        return f"{self._title}: {', '.join(list(self._fields)[:_MAX_KEYS_IN_SHORT_HELP])} ... (--help-all lists them)"

    def get_key(self, dest: str) -> str:
        """Return the key that sets a name in the namespace, after a space; empty for none."""
        return next((f" {field.key}" for field in self._fields.values() if field.dest == dest), "")

    def add_fields(self, fields: Iterable[SpecField]) -> None:
        """Add further keys."""
        self._fields |= {field.key: field for field in fields}
        labels = (f"{field.format_label()}: {field.help}" for field in self._fields.values())
        self.help = f"{self._title}: {'; '.join(labels)}"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        for item in str(values).split(","):
            key, separator, text = item.partition("=")
            field = self._fields.get(key)
            if field is None or (field.parse if separator else field.constant) is None:
                self._set_word(namespace, item)
            elif not separator:
                setattr(namespace, field.dest, field.constant)
            elif field.parse is not None:
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
    """Declare a spec option, or add keys to one that the parser already has."""
    action = parser._option_string_actions.get(flag)
    if action is None:
        options = {"default": argparse.SUPPRESS} | options
        action = parser.add_argument(flag, action=SpecAction, title=title, metavar=metavar, **options)
    action.add_fields(fields)
    parser.set_defaults(**{field.dest: field.default for field in fields})


def list_option_fields(cls: type[Any]) -> list[Field[Any]]:
    """List the fields of a dataclass that are options."""
    return [field for field in fields(cls) if OPTION_KEY in field.metadata]


def make_spec_fields(cls: type[Any]) -> list[SpecField]:
    """Turn the options of a dataclass into keys of one spec option.

    A missing key gives None; texts may contain commas.
    """
    hints = get_type_hints(cls)
    return [
        SpecField(
            field.name,
            field.name,
            field.metadata[OPTION_KEY].help,
            parse=_get_parser(field, hints[field.name]),
            metavar=_get_metavar(field, hints[field.name]),
            constant=True if hints[field.name] is bool else None,
        )
        for field in list_option_fields(cls)
        if hints[field.name] is not str
    ]


def add_dataclass_options(parser: Any, cls: type[Any]) -> None:
    """Declare an option for each field of a dataclass that has option metadata.

    Its flag is the one that the metadata declare, else ``--name-of-the-field``; ``--no-name-of-the-field`` for a switch
    that is on by default. An option that is not given is None.
    """
    hints = get_type_hints(cls)
    for field in list_option_fields(cls):
        info, hint = field.metadata[OPTION_KEY], _strip_none(hints[field.name])
        settings: dict[str, Any] = {"help": info.help}
        if info.is_negatable:
            settings |= {"action": argparse.BooleanOptionalAction, "default": field.default}
        elif hint is bool:
            settings |= {"action": "store_const", "const": field.default is not True}
        else:
            settings |= {"type": _get_parser(field, hint), "metavar": _get_metavar(field, hint)}
            settings |= {"choices": _get_choices(field, hint) or None}  # for completions; `type` refuses others
        flag = info.flag or f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"
        parser.add_argument(flag, dest=_get_dest(field), **settings)


def collect_values(cls: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a dataclass that were specified, by field name."""
    values = {field.name: getattr(arguments, _get_dest(field), None) for field in list_option_fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def _get_dest(field: Field[Any]) -> str:
    dest: str | None = field.metadata[OPTION_KEY].dest
    return dest or field.name


def _strip_none(hint: Any) -> Any:
    """Return the type of a field that may also be None."""
    types = [kind for kind in get_args(hint) if kind is not NoneType] if isinstance(hint, UnionType) else [hint]
    return types[0] if len(types) == 1 else hint


def _get_metavar(field: Field[Any], hint: Any) -> str:
    choices = _get_choices(field, hint)
    metavar: str | None = field.metadata[OPTION_KEY].metavar
    return metavar or ("|".join(filter(None, choices)) if choices else _METAVARS.get(hint, "TEXT"))


def _get_parser(field: Field[Any], hint: Any) -> Callable[[str], Any]:
    """Return the function that parses the text of a field's value."""
    parse: Callable[[str], Any] | None = field.metadata[OPTION_KEY].parse
    if parse is not None:
        return parse
    if field.metadata[OPTION_KEY].min_value is not None:
        return parse_positive if field.metadata[OPTION_KEY].min_value else parse_whole
    choices = _get_choices(field, hint)
    return (lambda text: _parse_choice(text, choices)) if choices else _PARSERS.get(hint, str)


def _get_choices(field: Field[Any], hint: Any) -> tuple[str, ...]:
    choices: tuple[str, ...] = field.metadata[OPTION_KEY].choices
    return choices or (get_args(hint) if get_origin(hint) is Literal else ())


def _parse_choice(text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        hint = suggest(text, choices) or f" (choose from {', '.join(choices)})"
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}{hint}")
    return text


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected true or false")
    return text == "true"


def parse_number(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def parse_integer(text: str) -> int:
    """Parse an integer, which may be negative."""
    try:
        value = int(text)
    except ValueError:
        value = 10**18
    if abs(value) > 10**15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    return value


_PARSERS: dict[Any, Callable[[str], Any]] = {bool: _parse_bool, int: parse_integer, float: parse_number}
_METAVARS: dict[Any, str] = {bool: "true|false", int: "N", float: "X"}
