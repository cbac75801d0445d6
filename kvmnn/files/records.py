"""Dataclasses that are written as JSON objects and read back, checked field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, Self, cast, get_args, get_origin, get_type_hints

from ..errors import SourceError

_TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class Record:
    """Base of dataclasses that have a form in JSON: an object with a key for each field, in their order.

    A field's metadata may have ``key``, where its key is not its name, and ``omit``, where None leaves the key out.
    Types that fields may have: bool, int, float, str, Literal, records, tuples and string mappings of these, object
    (any JSON value), and each of them or None. A tuple is a list in JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` is the way back."""
        document, record_type = {}, cast("Any", type(self))
        for field_info in _get_fields(record_type):
            value = getattr(self, field_info.name)
            if not (field_info.omit_none and value is None):
                document[field_info.key] = _to_json_value(value)
        return document

    @classmethod
    def from_dict(cls, document: object, label: str = "document") -> Self:
        """A record from `to_dict`. Keys that it does not know are ignored.

        Parameters
        ----------
        label
            What messages call the object.

        Raises
        ------
        SourceError
            For a key that is missing and has no default, and for a value of another type.
        """
        if not isinstance(document, Mapping):
            raise _make_error(label, document, "an object")
        values, record_type = {}, cast("Any", cls)
        for field_info in _get_fields(record_type):
            if field_info.key in document:
                values[field_info.name] = _parse_value(
                    field_info.annotation, document[field_info.key], f"{label}.{field_info.key}"
                )
            elif field_info.is_required:
                raise SourceError(f"{label}.{field_info.key}: is missing")
        constructor: Callable[..., Self] = cls
        return constructor(**values)


class _FieldInfo(NamedTuple):
    name: str
    key: str
    annotation: Any
    omit_none: bool
    is_required: bool


@cache
def _get_fields(record_type: Any) -> tuple[_FieldInfo, ...]:
    hints = get_type_hints(record_type)
    return tuple(
        _FieldInfo(
            field.name,
            field.metadata.get("key", field.name),
            hints[field.name],
            field.metadata.get("omit", False),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(record_type)
    )


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_to_json_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _to_json_value(entry) for key, entry in value.items()}
    return value


def _parse_value(annotation: Any, value: Any, label: str) -> Any:
    arguments, origin = get_args(annotation), get_origin(annotation)
    if NoneType in arguments:
        return None if value is None else _parse_value(next(a for a in arguments if a is not NoneType), value, label)
    if annotation is object or annotation is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise _make_error(label, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _make_error(label, value, "a list")
        if arguments[0] is int and all(type(entry) is int for entry in value):  # long ones are
            return tuple(value)
        return tuple([_parse_value(arguments[0], entry, f"{label}[{index}]") for index, entry in enumerate(value)])
    if origin is not None:
        if not isinstance(value, Mapping):
            raise _make_error(label, value, "an object")
        return {str(key): _parse_value(arguments[1], entry, f"{label}.{key}") for key, entry in value.items()}
    if issubclass(annotation, Record):
        return annotation.from_dict(value, label)
    if type(value) is not annotation and not (annotation is float and type(value) is int):
        raise _make_error(label, value, _TYPE_DESCRIPTIONS[annotation])
    return value


def _make_error(label: str, value: object, expectation: str) -> SourceError:
    value_text = repr(value)
    return SourceError(
        f"{label}: found {value_text if len(value_text) <= 80 else value_text[:77] + '...'}, expected {expectation}"
    )
