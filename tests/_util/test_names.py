"""Names with hashes in them are short, and never alike."""

from __future__ import annotations

from kvmnn._util.text import shorten_names


def test_shorten_names_keeps_names_distinct() -> None:
    one, other, third = "ab" * 32, "ab" * 8 + "cd" * 24, "ab" * 31 + "cd"
    assert shorten_names([one]) == {one: "ab" * 8}
    assert shorten_names([one, one, "a model of mine"]) == {one: "ab" * 8, "a model of mine": "a model of mine"}
    assert shorten_names([one, f"{one} memory=low"])[f"{one} memory=low"] == "ab" * 8 + " memory=low"
    assert shorten_names([one, other]) == {one: one[:32], other: other[:32]}
    assert shorten_names([one, third]) == {one: one, third: third}
    assert shorten_names(["a\x1bb"])["a\x1bb"].isprintable()
