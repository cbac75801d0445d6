"""Dataclasses that are written as JSON objects and read back, checked field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, Self, cast, get_args, get_origin, get_type_hints

from ..errors import SourceError

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class Record:
    """Base of dataclasses that have a form in JSON: an object with a key for each field, in their order.

    A field's metadata may have ``key``, where its key is not its name, and ``omit``, where None leaves the key out.
    Types that fields may have: bool, int, float, str, Literal, records, tuples and string mappings of these, object
    (any JSON value), and each of them or None. A tuple is a list in JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` is the way back."""
        found, kind = {}, cast("Any", type(self))
        for entry in _entries(kind):
            value = getattr(self, entry.name)
            if not (entry.omit and value is None):
                found[entry.key] = _plain(value)
        return found

    @classmethod
    def from_dict(cls, document: object, where: str = "document") -> Self:
        """A record from `to_dict`. Keys that it does not know are ignored.

        Parameters
        ----------
        where
            What messages call the object.

        Raises
        ------
        SourceError
            For a key that is missing and has no default, and for a value of another type.
        """
        if not isinstance(document, Mapping):
            raise _wrong(where, document, "an object")
        values, kind = {}, cast("Any", cls)
        for entry in _entries(kind):
            if entry.key in document:
                values[entry.name] = _read(entry.kind, document[entry.key], f"{where}.{entry.key}")
            elif entry.required:
                raise SourceError(f"{where}.{entry.key}: is missing")
        build: Callable[..., Self] = cls
        return build(**values)


class _Entry(NamedTuple):
    name: str
    key: str
    kind: Any
    omit: bool
    required: bool


@cache
def _entries(kind: Any) -> tuple[_Entry, ...]:
    hints = get_type_hints(kind)
    return tuple(
        _Entry(
            entry.name,
            entry.metadata.get("key", entry.name),
            hints[entry.name],
            entry.metadata.get("omit", False),
            entry.default is MISSING and entry.default_factory is MISSING,
        )
        for entry in fields(kind)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    arguments, origin = get_args(kind), get_origin(kind)
    if NoneType in arguments:
        return None if value is None else _read(next(a for a in arguments if a is not NoneType), value, where)
    if kind is object or kind is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(where, value, "a list")
        if arguments[0] is int and all(type(entry) is int for entry in value):  # long ones are
            return tuple(value)
        return tuple([_read(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(value)])
    if origin is not None:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "an object")
        return {str(key): _read(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if issubclass(kind, Record):
        return kind.from_dict(value, where)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise _wrong(where, value, _WORDS[kind])
    return value


def _wrong(where: str, value: object, expected: str) -> SourceError:
    found = repr(value)
    return SourceError(f"{where}: found {found if len(found) <= 80 else found[:77] + '...'}, expected {expected}")
