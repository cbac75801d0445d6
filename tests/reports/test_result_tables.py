"""Tables of results for papers: LaTeX, CSV and Markdown by suffix, and ``--table`` of the command."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import gate_logs
import numpy as np
import pytest

from kvmnn.errors import OptionError
from kvmnn.reports.result_tables import format_result, infer_table_format


class _Result:
    rows_path = "rows"

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"name": "a_b", "ratio": 1.23456789, "bytes": 12345, "ok": True, "none": None, "tags": ["x", "y"]},
            {"name": "50%", "ratio": None, "bytes": 2, "ok": False, "none": None, "tags": []},
        ]
        return {"title": "t", "rows": rows}


def test_format_result_latex_escapes_and_aligns() -> None:
    text = format_result(_Result(), "latex")
    assert text.startswith("\\begin{tabular}{lrrrr}\n\\hline\n{}name & ratio & bytes & ok & tags \\\\")
    assert "{}a\\_b & 1.23457 & 12,345 & yes & x y \\\\" in text
    assert "{}50\\% & - & 2 & no &  \\\\" in text


def test_format_result_csv_has_numbers_as_they_are() -> None:
    lines = list(csv.reader(io.StringIO(format_result(_Result(), "csv"))))
    assert lines == [
        ["name", "ratio", "bytes", "ok", "none", "tags"],
        ["a_b", "1.23456789", "12345", "true", "", "x y"],
        ["50%", "", "2", "false", "", ""],
    ]


def test_format_result_markdown_is_a_table() -> None:
    assert format_result(_Result(), "markdown").splitlines()[1] == "| --- | ---: | ---: | ---: | ---: |"


class _WideResult:
    def __init__(self, rows: int) -> None:
        self.rows_path, self.rows = "rows", [{f"a_{i}": i + row for i in range(13)} for row in range(rows)]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}


def test_format_result_turns_a_single_row_of_many_fields() -> None:
    lines = format_result(_WideResult(1), "markdown").splitlines()
    assert lines == ["| field | value |", "| --- | ---: |", *(f"| a {i} | {i} |" for i in range(13))]
    assert format_result(_WideResult(2), "markdown").count("\n") == 4


def test_infer_table_format_of_other_suffixes_is_an_error() -> None:
    assert [infer_table_format(f"x{suffix}") for suffix in (".tex", ".csv", ".MD")] == ["latex", "csv", "markdown"]
    with pytest.raises(OptionError, match=r"not written as \.xlsx"):
        infer_table_format("x.xlsx")


def test_table_option_writes_the_table_of_each_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("kv.npz", **{f"layer_0.{part}": np.ones((2, 30, 16), np.float16) for part in ("key", "value")})
    gate_logs.write_logs(Path("logs"), gate_logs.row(5.81), gate_logs.row(6.0, prompt=1024))
    run("bench", "kv.npz", "--repeats", "1", "--table", "b.tex")
    assert Path("b.tex").read_text().count("\\begin{tabular}") == 2
    assert "{}kvmnn exact & " in Path("b.tex").read_text()
    document = json.loads(run("measure", "kv.npz", "--table", "m.md", "--json").out)
    assert f"| total | {document['breakdown']['overall']['raw_bytes']:,} |" in Path("m.md").read_text()
    run("gate", "parse", "logs/run_0001.log", "-o", "t.csv")
    check = ["gate", "check", "t.csv", "--case", "runtime_store", "--table", "g.csv"]
    run(*check)
    assert Path("g.csv").read_text().startswith("name,verdict,value,limit,why\n")
    assert "exists already" in run(*check, code=1).err
    run(*check, "-f")
    np.savez("other.npz", **{f"layer_0.{part}": np.zeros((2, 30, 16), np.float16) for part in ("key", "value")})
    run("encode", "kv.npz", "-o", "f/")
    run("verify", "f/", "--against", "other.npz", "--table", "v.csv", code=1)
    assert Path("v.csv").read_text().splitlines()[0].startswith("input,against,label,proof,difference.array")
    run("inspect", "f/", "--table", "i.tex")
    assert "layer\\_0.key" in Path("i.tex").read_text()
    assert "give one" in run("inspect", "f/", "kv.npz", "--table", "j.md", code=2).err
    assert "a table is of one input" in run("inspect", "f/", "--jobs", 1, "--table", "j.md", code=2).err
    run("diff", "kv.npz", "other.npz", "--table", "d.md", code=1)
    assert "layer_0.key" in Path("d.md").read_text().replace("\\", "")
    run("plan", "kv.npz", "--policy", "streaming:budget=16", "--table", "p.md")
    assert Path("p.md").read_text().count("\n") == 3
    run("store", "put", "S", "kv.npz", "--token-ids", ",".join(map(str, range(30))), "--fingerprint", "m")
    run("store", "stat", "S", "--table", "s.md")
    assert "| policy | lru |" in Path("s.md").read_text()
    run("store", "stat", "S", "--table", "s.md", "-f")
    assert "--force says nothing to store stat" in run("store", "stat", "S", "-f", code=2).err
    for name in ("f", "S"):
        shutil.rmtree(name)
    for name in ("other.npz", "s.md", "v.csv", "i.tex", "d.md", "p.md"):
        Path(name).unlink()
    assert "--table says nothing to gate parse" in run("gate", "parse", "t.csv", "--table", "h.csv", code=2).err
    assert "expected a name that ends in .tex, .csv or .md" in run("bench", "kv.npz", "--table", "x.xls", code=2).err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tex", "g.csv", "kv.npz", "logs", "m.md", "t.csv"]
