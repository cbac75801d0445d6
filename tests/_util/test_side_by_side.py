"""Two texts side by side: where lines break, what is marked, what never reaches the terminal."""

from __future__ import annotations

from kvmnn._util.text import break_lines, count_columns, side_by_side_diff


def test_break_lines_breaks_at_the_column_width() -> None:
    assert break_lines("abcdef\n\ngh", 4) == ["abcd", "ef", "", "gh"]
    assert break_lines("a\tb", 10) == ["a   b"]
    assert break_lines("日本語x", 4) == ["日本", "語x"]
    assert count_columns("日本e\u0301") == 5


def test_break_lines_escapes_control_characters() -> None:
    assert break_lines("a\x1b[2Jb\rc\x07\u202e", 80) == ["a\\x1b[2Jb\\rc\\x07\\u202e"]


def test_side_by_side_diff_marks_differing_lines() -> None:
    shown = side_by_side_diff(("left", "same\none\nx"), ("right", "same\ntwo"), 60).splitlines()
    column = (60 - 3) // 2
    marks = [line.ljust(60)[column + 1] for line in shown]
    assert marks == [" ", " ", " ", "|", "|"]
    assert shown[3].split("|") == ["one".ljust(column + 1), " two"]


def test_side_by_side_diff_narrow_terminal_stacks_columns() -> None:
    shown = side_by_side_diff(("left", "a" * 40), ("right", "b"), 30)
    assert shown == f"-- left --\n{'a' * 30}\n{'a' * 10}\n\n-- right --\nb"
