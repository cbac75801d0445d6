"""What reaches a terminal of texts that others made."""

from __future__ import annotations

import time

import pytest

from kvmnn._util.text import escape_control, join_lines, suggest


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
def test_escape_control_escapes_control_characters_once(text, shown) -> None:
    assert escape_control(text) == shown
    assert escape_control(text, keep_line_ends=False) == shown.replace("\n", "\\n")
    assert escape_control(escape_control(text)) == escape_control(text)


def test_join_lines_gives_one_line() -> None:
    assert join_lines("\na\n\n  b \r\nc  d\n") == "a b c  d"
    assert join_lines("") == ""


def test_join_lines_long_text_takes_linear_time() -> None:
    start = time.monotonic()
    join_lines(" " * 1_000_000 + "x")
    escape_control("x" * 79 + "\n" + "{}: 1.0,\n" * 1_000_000)
    assert time.monotonic() - start < 5


def test_suggest_names_the_nearest_word() -> None:
    known = ("streaming", "h2o_blocks", "l2_fixed")
    assert suggest("Streamin", known) == " (did you mean 'streaming'?)"
    assert suggest("l2-fixed", known) == " (did you mean 'l2_fixed'?)"
    assert suggest("zebra", known) == ""
    assert suggest("x", ()) == ""
