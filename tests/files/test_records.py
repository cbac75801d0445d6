"""Dataclasses that are written as JSON objects and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from kvmnn.errors import SourceError
from kvmnn.files.schema import Record, finite_or_none, json_key


@dataclass(frozen=True)
class Inner(Record):
    begin: int = field(metadata={"key": "from"})
    note: str | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class Outer(Record):
    name: str
    share: float
    sizes: tuple[int, ...]
    inner: Inner | None
    rest: tuple[Inner, ...] = ()
    kind: Literal["a", "b"] = "a"
    more: Mapping[str, object] = field(default_factory=dict)
    yes: bool | None = None


FULL = Outer(
    name="x", share=0.1 + 0.2, sizes=(1, 2), inner=Inner(3, "n"), rest=(Inner(4),), kind="b", more={"z": [1]}, yes=True
)
PLAIN: dict[str, Any] = {"name": "x", "share": 0.5, "sizes": [], "inner": None}


def test_record_round_trips_through_dict() -> None:
    document = FULL.to_dict()
    assert document == {
        "name": "x",
        "share": 0.1 + 0.2,
        "sizes": [1, 2],
        "inner": {"from": 3, "note": "n"},
        "rest": [{"from": 4}],
        "kind": "b",
        "more": {"z": [1]},
        "yes": True,
    }
    assert list(document) == ["name", "share", "sizes", "inner", "rest", "kind", "more", "yes"]
    assert Outer.from_dict(json.loads(json.dumps(document))) == FULL


def test_record_from_dict_ignores_unknown_keys_and_fills_defaults() -> None:
    assert Outer.from_dict({**PLAIN, "later": 1}) == Outer(name="x", share=0.5, sizes=(), inner=None)


def test_record_from_dict_integer_is_accepted_as_float() -> None:
    assert Outer.from_dict({**PLAIN, "share": 2}).share == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "document: found [], expected an object"),
        ({"name": "x"}, "document.share: is missing"),
        ({**PLAIN, "name": 1}, "document.name: found 1, expected text"),
        ({**PLAIN, "share": "1"}, "document.share: found '1', expected a number"),
        ({**PLAIN, "share": True}, "document.share: found True, expected a number"),
        ({**PLAIN, "share": None}, "document.share: found None, expected a number"),
        ({**PLAIN, "sizes": 1}, "document.sizes: found 1, expected a list"),
        ({**PLAIN, "sizes": [1, 2.5]}, "document.sizes[1]: found 2.5, expected a whole number"),
        ({**PLAIN, "inner": {"from": None}}, "document.inner.from: found None, expected a whole number"),
        ({**PLAIN, "rest": [{"from": 1}, {}]}, "document.rest[1].from: is missing"),
        ({**PLAIN, "rest": [1]}, "document.rest[0]: found 1, expected an object"),
        ({**PLAIN, "kind": "c"}, "document.kind: found 'c', expected 'a' or 'b'"),
        ({**PLAIN, "kind": []}, "document.kind: found [], expected 'a' or 'b'"),
        ({**PLAIN, "more": [1]}, "document.more: found [1], expected an object"),
        ({**PLAIN, "yes": 1}, "document.yes: found 1, expected true or false"),
    ],
)
def test_record_from_dict_error_names_the_place(document: object, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        Outer.from_dict(document)
    assert str(caught.value) == message


@dataclass(frozen=True, kw_only=True)
class Placed(Record):
    """A record whose document has other keys, in another order, than its fields."""

    json_keys = "kind where=inner.begin label **inner ratio missing"

    kind: ClassVar = "placed"

    label: str
    inner: Inner
    missing: int | None = field(default=None, metadata={"omit": True})

    @property
    @json_key(convert=finite_or_none)
    def ratio(self) -> float:
        return math.inf


def test_keys_in_another_order() -> None:
    document = Placed(label="a", inner=Inner(3, "n")).to_dict()
    expected = {"kind": "placed", "where": 3, "label": "a", "from": 3, "note": "n", "ratio": None}
    assert list(document.items()) == list(expected.items())
    assert Placed(label="a", inner=Inner(3), missing=1).to_dict()["missing"] == 1
