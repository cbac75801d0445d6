"""`kvmnn._util.patterns` and `kvmnn._util.named_tuple` next to the standard library's."""

from __future__ import annotations

import copy
import pickle
import re
import typing
from typing import Any

import pytest

from kvmnn._util.named_tuple import NamedTuple
from kvmnn._util.patterns import declare_pattern


def test_declare_pattern_has_methods_and_attributes_of_the_compiled_one() -> None:
    pattern, compiled = declare_pattern("A(?P<digit>[0-9])", re.IGNORECASE), re.compile("A(?P<digit>[0-9])", re.I)
    for name in ("match", "fullmatch", "search"):
        assert getattr(pattern, name)("a1")["digit"] == getattr(compiled, name)("a1")["digit"] == "1"
    assert pattern.sub("-", "xa2a") == "x-a"
    assert pattern.findall("a1a2") == ["1", "2"]
    assert (pattern.pattern, pattern.flags, pattern.groupindex) == (
        compiled.pattern,
        compiled.flags,
        compiled.groupindex,
    )
    assert declare_pattern(rb"[0-9]+").fullmatch(b"12")


def test_declare_pattern_copies_are_compiled_patterns() -> None:
    for duplicate in (copy.deepcopy, lambda pattern: pickle.loads(pickle.dumps(pattern))):
        assert duplicate(declare_pattern("a", re.DOTALL)) == re.compile("a", re.DOTALL)


def test_declare_pattern_raises_at_the_first_use_of_a_broken_one() -> None:
    pattern = declare_pattern("(")
    with pytest.raises(re.error):
        pattern.match("a")


def _define(base: Any) -> Any:
    class Sample(base):  # type: ignore[misc]
        """Two fields."""

        a: int
        #: With a default.
        b: dict[str, int] | None = None
        limit = 3

        @property
        def total(self) -> int:
            return self.a + 1

        @classmethod
        def from_text(cls, text: str) -> Any:
            return cls(int(text))

    return Sample


def test_named_tuple_classes_are_those_of_typing() -> None:
    ours, standard = _define(NamedTuple), _define(typing.NamedTuple)
    for name in ("_fields", "_field_defaults", "__doc__", "__module__", "__qualname__", "limit"):
        assert getattr(ours, name) == getattr(standard, name), name
    assert list(ours.__annotations__) == list(standard.__annotations__)
    assert issubclass(ours, tuple)
    assert ours.from_text("4") == (4, None)
    assert ours(4).total == 5
    assert repr(ours(1, b={})) == repr(standard(1, b={})) == "Sample(a=1, b={})"
    with pytest.raises(TypeError):
        ours()
    assert pickle.loads(pickle.dumps(_Sample(1))) == (1, 2)


class _Sample(NamedTuple):
    a: int
    b: int = 2
