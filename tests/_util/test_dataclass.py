"""`kvmnn._util.dataclass` next to the standard decorator."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar

import pytest

from kvmnn._util import dataclass as module


def _define(decorate: Any, **options: Any) -> Any:
    @decorate(frozen=True, **options)
    class Sample:
        """A class with every kind of field."""

        kind: ClassVar[str] = "sample"
        values: int
        self_name: str = "a"
        items: list[int] = dataclasses.field(default_factory=list, metadata={"key": "numbers"})
        hidden: int = dataclasses.field(default=3, repr=False, compare=False)
        fixed: int = dataclasses.field(default=4, init=False)
        derived: dict[str, int] = dataclasses.field(default_factory=dict, init=False, hash=False)
        last: int = dataclasses.field(default=7, kw_only=True)

        def __post_init__(self) -> None:
            if self.values < 0:
                raise ValueError("values")

    return Sample


@pytest.fixture(params=[{}, {"kw_only": True}, {"eq": False}], ids=["plain", "kw_only", "no_eq"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same class, defined by both decorators."""
    return _define(module.dataclass, **request.param), _define(dataclasses.dataclass, **request.param)


def test_dataclass_of_any_fields_has_signature_and_fields_of_standard(pair: tuple[Any, Any]) -> None:
    own, standard = pair
    assert str(inspect.signature(own)) == str(inspect.signature(standard))
    assert own.__match_args__ == standard.__match_args__
    assert own.__init__.__annotations__ == standard.__init__.__annotations__
    for ours, theirs in zip(dataclasses.fields(own), dataclasses.fields(standard), strict=True):
        assert repr(ours) == repr(theirs)


def test_dataclass_instances_behave_as_standard(pair: tuple[Any, Any]) -> None:
    results = []
    for cls in pair:
        one, other = cls(values=1, last=2), cls(values=1, last=2)
        copy = dataclasses.replace(one, values=5)
        results.append(
            [repr(one).rpartition(".")[2], one == other, one != copy, one == 1, copy.values, dataclasses.asdict(copy)]
        )
        assert one.items is not other.items
        for change in (lambda one=one: setattr(one, "values", 2), lambda one=one: delattr(one, "unknown")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                change()
        with pytest.raises(ValueError, match="values"):
            cls(values=-1)
        with pytest.raises(TypeError, match="missing 1 required"):
            cls(last=2)
    assert results[0] == results[1]


def test_dataclass_hash_equals_standard() -> None:
    hashes = [
        hash(
            dataclasses.make_dataclass(
                "Pair", [("first", int), ("second", str, dataclasses.field(default="b"))], frozen=True
            )(1)
        )
    ]

    @module.dataclass(frozen=True)
    class Pair:
        """Two fields."""

        first: int
        second: str = "b"

    @module.dataclass(frozen=True)
    class Named:
        """A class with a hash of its own."""

        first: int

        def __hash__(self) -> int:
            return 17

        def __repr__(self) -> str:
            return "named"

    assert [hash(Pair(1))] == hashes
    assert (hash(Named(1)), repr(Named(1))) == (17, "named")


def test_dataclass_derived_class_is_standard_and_frozen() -> None:
    base = _define(module.dataclass)

    @module.dataclass(frozen=True)
    class Derived(base):  # type: ignore[misc, valid-type]
        """With one more field."""

        more: int = 0

    assert Derived(1, more=2).more == 2
    assert Derived(1) == Derived(1) != base(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Derived(1).more = 3
    with pytest.raises(TypeError, match="non-frozen"):
        module.dataclass(type("Changing", (base,), {"__annotations__": {"more": "int"}, "more": 0, "__doc__": "x"}))
