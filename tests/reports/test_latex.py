"""Tables in LaTeX, and the format that a suffix selects."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import lm_results
import pytest
from lm_results import results, row
from slow_cases import mark_most_slow

from kvmnn.cli.entry_point import main
from kvmnn.errors import OptionError
from kvmnn.evaluation.result import infer_format
from kvmnn.reports.table import escape_latex
from kvmnn.reports.tables import build_table

SAMPLE = lm_results.document()
KNOWN = {"begin", "end", "hline", "par", "char"}
KNOWN |= {f"text{name}" for name in ("backslash", "asciitilde", "asciicircum", "less", "greater", "bar")}


def tables_of(text: str) -> list[tuple[str, list[list[str]]]]:
    """Column letters and rows of each table, read by a parser of its own."""
    found = []
    for shape, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\n\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.split("\n") if line != "\\hline"]
        assert all(line.startswith("{}") and line.endswith(" \\\\") for line in lines)
        found.append((shape, [re.split(r"(?<!\\) & ", line[2:-3]) for line in lines]))
    return found


def test_latex_tables_have_every_column_and_fit_a_page() -> None:
    text = SAMPLE.to_text("latex")
    _, columns, lines = build_table(SAMPLE)
    main_tables = tables_of(text)[: -(-(len(columns) - 1) // 9)]
    headings = [heading for _, rows in main_tables for heading in rows[0][1:]]
    assert sorted(headings) == sorted(escape_latex(column.heading) for column in columns[1:])
    for shape, rows in main_tables:
        assert len(shape) <= 10 and {len(line) for line in rows} == {len(shape)}
        assert [line[0] for line in rows[1:]] == [escape_latex(line[0]) for line in lines]
        for place, heading in enumerate(rows[0]):
            at = [escape_latex(column.heading) for column in columns].index(heading)
            assert [line[place] for line in rows[1:]] == [escape_latex(line[at]) for line in lines]
    assert text.endswith("\\par\n") and "By the definitions of" in text


def test_latex_first_table_has_sizes() -> None:
    sample = replace(SAMPLE, rows=tuple(replace(entry, bytes_per_token=1.0) for entry in SAMPLE.rows))
    (_, lines), *_ = tables_of(sample.to_text("latex"))
    assert {"PPL", "bytes/token", "LOSSY ratio"} <= set(lines[0])


def test_latex_escapes_foreign_text() -> None:
    evil = r"\input{/etc/passwd} a_b & 50% $x$ #1 ~ ^ {x} <b> | ` ' \\ [3] * é"
    rows = [row(label, "streaming", perplexity=9.5, budget=3) for label in (evil, "[2] x")]
    found = results(rows, notes=(evil, "two\nlines\x1b[31m"))
    text = found.to_text("latex")
    assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= KNOWN
    depth = 0
    for sign in re.findall(r"\\.|[{}]", text.replace("\n", " ")):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0 and "\x1b" not in text
    ((_, lines), *_) = tables_of(text)
    assert len(lines) == 3 and lines[2][0] == "[2] x"
    for line in text.splitlines():
        if not line.startswith(("\\", "{}")):
            assert not re.search(r"(?<!\\)[&%$#_^~]", line), line


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.tex", "latex"), ("A.TEX", "latex"), ("a.md", "markdown"), ("a.markdown", "markdown"), ("a.txt", "markdown"),
     ("a", "markdown"), ("d.x/a", "markdown"), ("a.json", "json"), ("a.csv", "csv"), ("-", "markdown")],
)  # fmt: skip
def test_infer_format_by_suffix(name: str, form: str) -> None:
    assert infer_format(name) == form


@pytest.mark.parametrize("name", ["a.html", "a.xlsx", "a.tex.bak", "a.pdf", "a.jsonl", "a.tsv"])
def test_eval_unknown_suffix_is_refused_before_measuring(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = Path(name).suffix
    with pytest.raises(OptionError, match=rf"results are not written as \{suffix}: expected a name that ends"):
        infer_format(name)
    assert main(["eval", "missing", "--text", "missing", "-o", str(tmp_path / name)]) == 2
    assert f"results are not written as {suffix}" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"),
    mark_most_slow([(["x.tex"], 2), (["x.pdf"], 2), (["x.txt"], 2), (["x.html"], 0), (["x.json"], 2), (["x.md"], 0),
     (["x"], 0), (["x.txt", "--markdown"], 0), (["x.pdf", "--markdown"], 2), (["x", "--markdown"], 0)], 3),
)  # fmt: skip
def test_report_format_follows_its_name(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.json").write_text(SAMPLE.to_text("json"))
    assert main(["report", "e.json", "-q", "-o", *arguments]) == code
    found = tmp_path / arguments[0]
    assert found.exists() == (code == 0)
    if code == 0:
        is_html = found.read_text().startswith("<!DOCTYPE html>")
        assert is_html == (arguments in (["x.html"], ["x"]))
