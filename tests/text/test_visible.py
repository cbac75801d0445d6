"""What reaches a terminal of texts that others made."""

from __future__ import annotations

import time

import pytest

from kvmnn.text import did_you_mean, one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("k: fp16 [2, 3], 日本 é\u00a0\u3000", "k: fp16 [2, 3], 日本 é\u00a0\u3000"),
        ("\x1b[31m\x00\x07\x7f", "\\x1b[31m\\x00\\x07\\x7f"),
        ("\x9b2J\x85", "\\x9b2J\\x85"),
        ("\u202e\u2066\u200b\ufeff\u2028", "\\u202e\\u2066\\u200b\\ufeff\\u2028"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800\udcff", "\\ud800\\xff"),
        ("a\tb\rc", "a\\tb\\rc"),
        ("a\nb", "a\nb"),
    ],
)
def test_escapes(text, shown) -> None:
    assert visible(text) == shown
    assert visible(text, lines=False) == shown.replace("\n", "\\n")
    assert visible(visible(text)) == visible(text)


def test_messages_are_one_line() -> None:
    assert one_line("\na\n\n  b \r\nc  d\n") == "a b c  d"
    assert one_line("") == ""


def test_long_texts_take_no_time() -> None:
    start = time.monotonic()
    one_line(" " * 1_000_000 + "x")
    visible("x" * 79 + "\n" + "{}: 1.0,\n" * 1_000_000)
    assert time.monotonic() - start < 5


def test_suggestions() -> None:
    known = ("streaming", "h2o_blocks", "l2_fixed")
    assert did_you_mean("Streamin", known) == " (did you mean 'streaming'?)"
    assert did_you_mean("l2-fixed", known) == " (did you mean 'l2_fixed'?)"
    assert did_you_mean("zebra", known) == ""
    assert did_you_mean("x", ()) == ""
