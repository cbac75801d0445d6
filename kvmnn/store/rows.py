"""Rows of an index as typed objects: every value is validated once, when its row is fetched.

An index may be damaged, or forged. SQLite stores any type in any column, so that a flipped bit turns a number into a
text. Whatever is fetched comes as a `NamedTuple` of a kind below, and nothing else of a row is used.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, NewType, TypeVar, get_type_hints

from ..checks import repr_short
from ..errors import KvmnnError
from .space import KEY_BYTES, Namespace, parse_namespace

Key = NewType("Key", bytes)
"""A key of a space, a block or a text: 16 bytes."""

_MAX_SQLITE_INTEGER = 2**63 - 1
R = TypeVar("R")


class InvalidRowError(Exception):
    """A row that no kvmnn has written; the transaction makes a `DamagedIndexError` of it."""


class NumberRow(NamedTuple):
    """One number from 0 on: an id, a count, a sum."""

    value: int


class OptionalNumberRow(NamedTuple):
    """One number, or None where there is no row to take it from."""

    value: int | None


class WordRow(NamedTuple):
    """One text: a name or a document."""

    value: str


class KeyRow(NamedTuple):
    """One key."""

    key: Key


class NumberedDocumentRow(NamedTuple):
    """A document with its number."""

    number: int
    document: str


class BlockRow(NamedTuple):
    """A block: the unit that has it, and its number there."""

    key: Key
    unit: int
    number: int


class BranchUnitRow(NamedTuple):
    """What follows a block: a unit, its blocks that another unit has already, and the ids of its first own block."""

    unit: int
    skip: int
    sort_key: bytes


class BranchKeyRow(NamedTuple):
    """The key before a unit, and the ids of its first own block."""

    parent: Key
    sort_key: bytes


class BranchParentRow(NamedTuple):
    """A unit, and the key before it: of state its own key."""

    unit: int
    parent: Key


class UnitBytesRow(NamedTuple):
    """A unit and the bytes of its file."""

    unit: int
    nbytes: int


class UnitSpanRow(NamedTuple):
    """Where the tokens of a unit stand in their text."""

    start: int
    tokens: int


class UnitSizesRow(NamedTuple):
    """Tokens of a unit, and bytes of its file."""

    tokens: int
    nbytes: int


class UnitParentRow(NamedTuple):
    """The unit that another follows, none for the first of a text, and the bytes of its file."""

    parent: int | None
    nbytes: int


class UnitUseRow(NamedTuple):
    """What decides whether a unit may go: its tokens, its pins, and how many units follow it."""

    tokens: int
    pins: int
    followers: int


class StateRow(NamedTuple):
    """State of a prefix: tokens of the prefix, bytes of its file, and bytes of what it holds."""

    tokens: int
    nbytes: int
    raw_bytes: int


class UnitRow(NamedTuple):
    """A unit with the document of its space."""

    unit: int
    skip: int
    start: int
    tokens: int
    document: str


class TailUnitRow(NamedTuple):
    """A unit that may be superfluous: its ids, what holds it, and whether it ends within a block."""

    unit: int
    sort_key: bytes
    children: int
    pins: int
    is_tail: int


class SequenceRow(NamedTuple):
    """A stored text by its last unit; `unused_for` counts uses of the store since."""

    namespace_id: int
    tokens: int
    nbytes: int
    pins: int
    unused_for: int
    unit: int
    is_state: int


class PinRow(NamedTuple):
    """A pinned text: its key, the unit with its end, and its tokens."""

    key: Key
    unit: int
    tokens: int


class SessionNameRow(NamedTuple):
    """A session: its name, the key of its space, and its ids as `zlib` packs them."""

    name: str
    namespace_key: Key
    ids: bytes


class SessionDocumentRow(NamedTuple):
    """The document of a session's space, and its ids as `zlib` packs them."""

    document: str
    ids: bytes


class TotalsRow(NamedTuple):
    """Sums over all units; `states` counts those that are state of a prefix."""

    units: int
    states: int
    tokens: int
    nbytes: int
    texts: int


class ValidatingCursor:
    """A cursor inside a transaction that yields validated rows only.

    Parameters
    ----------
    cursor
        Of the sqlite3 module.
    """

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Run a statement without a result; returns how many rows it changed."""
        return self._cursor.execute(statement, parameters).rowcount

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for each row of parameters."""
        self._cursor.executemany(statement, rows)

    @property
    def last_row_id(self) -> int:
        """The number of the row that was inserted last."""
        number = self._cursor.lastrowid
        assert number
        return number

    def iter_rows(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> Iterator[R]:
        """Yield the rows of a query as a kind; each is validated when it is fetched.

        The cursor runs one query at a time: the rows of one are fetched before the next begins (`fetch_rows`).

        Raises
        ------
        WrongRowError
            For a row whose values are of other types, or whose numbers are below 0.
        """
        field_checks = _get_field_checks(row_type)
        for row in self._cursor.execute(query, parameters):
            for value, (is_valid, expected) in zip(row, field_checks, strict=True):
                if not is_valid(value):
                    value_text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr_short(value)
                    raise InvalidRowError(f"a row has {value_text}, expected {expected}")
            yield row_type(*row)

    def fetch_rows(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> list[R]:
        """As `iter_rows`, all of them."""
        return list(self.iter_rows(row_type, query, parameters))

    def fetch_row(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> R | None:
        """As `iter_rows`, the first; None for no row."""
        return next(self.iter_rows(row_type, query, parameters), None)

    def require_row(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> R:
        """As `fetch_row`; `InvalidRowError` where there is none."""
        row = self.fetch_row(row_type, query, parameters)
        if row is None:
            raise InvalidRowError("a row of it is gone")
        return row

    def has_row(self, query: str, parameters: Sequence[object] = ()) -> bool:
        """Return whether a query has any row; its values are not used."""
        return self._cursor.execute(query, parameters).fetchone() is not None


def parse_space_document(document: str, where: str) -> Namespace:
    """Return the space that a row has as a document; `InvalidRowError` for what is none."""
    try:
        return parse_namespace(document, f"{where}: space")
    except KvmnnError as error:
        raise InvalidRowError(str(error)) from None


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SQLITE_INTEGER


_FieldCheck = tuple[Callable[[Any], bool], str]
_CHECK_BY_TYPE: dict[object, _FieldCheck] = {
    int: (_is_number, "a whole number from 0 on"),
    int | None: (lambda value: value is None or _is_number(value), "a whole number from 0 on, or none"),
    str: (lambda value: type(value) is str, "a text"),
    bytes: (lambda value: type(value) is bytes, "bytes"),
    Key: (lambda value: type(value) is bytes and len(value) == KEY_BYTES, f"a key of {KEY_BYTES} bytes"),
}
"""By the type of a field, the check of its value and what the check expects."""


@cache
def _get_field_checks(row_type: Callable[..., object]) -> tuple[_FieldCheck, ...]:
    """The checks of a kind's fields, in order."""
    return tuple(_CHECK_BY_TYPE[hint] for hint in get_type_hints(row_type).values())
