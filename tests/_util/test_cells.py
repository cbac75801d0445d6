"""Cells that no spreadsheet computes, and Markdown in which foreign text is text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmnn._util.text import escape_csv, escape_markdown, escape_markdown_cell, unescape_csv


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "+", "--", "-x", "=", "-1.5.2", "+-1"],
)
def test_escape_csv_formula_gets_an_apostrophe(text: str) -> None:
    assert escape_csv(text) == (f"'{text}" if len(text) > 1 else text)


@pytest.mark.parametrize(
    "text", ["-1", "+0.25", "-.5", "-1e-07", "-1,234", "-inf", "nan", "-5%", "", "0", "a-b", "x=1", "-"]
)
def test_escape_csv_number_is_unchanged(text: str) -> None:
    assert escape_csv(text) == text


@given(st.text(alphabet="=+-@'\t\r1.eé|<", max_size=8))
def test_unescape_csv_inverts_escape_csv(text: str) -> None:
    assert unescape_csv(escape_csv(text)) == text
    assert re.match(r"[=@\t\r]", escape_csv(text)) is None or len(text) == 1


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<img src=x onerror=alert(1)>", r"\<img src=x onerror=alert(1)>"),
        ("</td><script>", r"\</td>\<script>"),
        ("<!-- a", r"\<!-- a"),
        (r"\<b>", r"\<b>"),
        (r"\\<b>", r"\\\<b>"),
        ("[x](http://e.vil) ![y](z)", r"\[x](http://e.vil) !\[y](z)"),
        ("@team see a@b.c", "@&#8203;team see a@b.c"),
        ("(@team)", "(@&#8203;team)"),
        ("dNLL < 0.5, [0.1, 0.2]", "dNLL < 0.5, [0.1, 0.2]"),
        ("model@world@0@abc", "model@world@0@abc"),
    ],
)
def test_escape_markdown_escapes_markup_once(text: str, escaped: str) -> None:
    assert escape_markdown(text) == escaped
    assert escape_markdown(escaped) == escaped, "once is enough"


@pytest.mark.parametrize(
    ("text", "escaped"), [("a|b", r"a\|b"), (r"a\|b", r"a\|b"), (r"a\\|b", r"a\\\|b"), ("<b>|", r"\<b>\|")]
)
def test_escape_markdown_cell_escapes_pipes(text: str, escaped: str) -> None:
    assert escape_markdown_cell(text) == escaped


@given(st.text(alphabet="\\<a|@[]( )", max_size=12))
def test_escape_markdown_cell_any_text_leaves_no_tag_pipe_or_mention(text: str) -> None:
    escaped = escape_markdown_cell(text)
    for found in re.finditer(r"(\\*)(?:<a|\|)", escaped):
        assert len(found[1]) % 2 == 1
    assert re.search(r"(?<![\w`])@a", escaped) is None
