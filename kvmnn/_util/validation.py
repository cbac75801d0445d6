"""Validation of numbers that callers pass."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import KvmnnError, OptionError


def validate_int(value: Any, name: str, min_value: int, max_value: int | None = None) -> int:
    """Return `value` as an int; raise `OptionError` unless it lies between `min_value` and `max_value`."""
    number = to_int(value, name)
    if number < min_value:
        raise OptionError(f"{name} is {repr_short(number)}: expected at least {min_value}")
    if max_value is not None and number > max_value:
        raise OptionError(f"{name} is {repr_short(number)}: expected at most {max_value}")
    return number


def repr_short(value: object) -> str:
    """Return the repr of a value for messages, truncated if it is long; ints that Python refuses to print included."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length():,} bits"
    text = str(value) if type(value).__module__ == "numpy" else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_int(value: Any, name: str) -> int:
    """Return `value` as an int; `TypeError` for anything but an integer, booleans included."""
    if type(value) is int:  # before `Integral`, which takes four times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    return int(value)


def validate_count(name: str, number: object) -> None:
    """Raise an error unless `number` is an integer of at least 0."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name} must be an integer, not {type(number).__name__}")
    if number < 0:
        raise KvmnnError(f"{name} is {repr_short(number)}: expected at least 0")


def validate_fraction(name: str, number: Any) -> None:
    """Raise an error unless `number` is finite, at least 0, and can be multiplied with a number of tokens."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number, not {type(number).__name__}")
    if number < 0 or not number <= 1e9:
        raise KvmnnError(f"{name} is {repr_short(number)}: expected a share from 0 on")


_MAX_REPR_CHARACTERS = 240


class _ShortRepr(reprlib.Repr):
    """Shows arrays by type and shape, dataclasses within others by name, and the first entries of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxdict = 2
        self.maxstring = self.maxother = 60

    def repr_instance(self, x: Any, level: int) -> str:
        if type(x).__module__ == "numpy" and hasattr(x, "shape"):
            return f"{x.dtype}{list(x.shape)}"
        if is_dataclass(x) and type(x).__repr__ is format_fields:
            return f"{type(x).__name__}(...)"
        return super().repr_instance(x, level)

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, list | tuple | dict | str | int | float | None):
            return super().repr1(x, level)
        return self.repr_instance(x, level)


_SHORT_REPR = _ShortRepr()


def format_fields(record: Any) -> str:
    """Return the class of a dataclass and its first fields, shortened: fewer than 400 characters. For ``__repr__``."""
    names = [field.name for field in fields(record) if field.repr] if is_dataclass(record) else []
    parts: list[str] = []
    for index, name in enumerate(names):
        parts.append(f"{name}={_SHORT_REPR.repr(getattr(record, name))}")
        if sum(map(len, parts)) > _MAX_REPR_CHARACTERS and index + 1 < len(names):
            parts.append("...")
            break
    return f"{type(record).__name__}({', '.join(parts)})"
