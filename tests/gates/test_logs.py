"""Logs to tables: rows, input files, and messages for damaged logs."""

from __future__ import annotations

import json
from pathlib import Path

import gate_logs
import pytest

from kvmnn.errors import SourceError
from kvmnn.gates import parse_logs
from kvmnn.gates.case_inputs import read_csv
from kvmnn.gates.logs import BENCH_COLUMNS, parse_decode_speed, parse_first_number


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("3.114 ± 0.009", 3.114),
        ("1e-05 ± 0", 1.0),
        ("-2.5", -2.5),
        (".5", 0.5),
        ("7.", 7.0),
        ("no number", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("inf", float("inf")),
        (1.25, 1.25),
        ("9" * 400, float("inf")),
    ],
)
def test_parse_first_number_of_cells(cell: object, expected: float) -> None:
    assert parse_first_number(cell) == expected


def test_parse_decode_speed_and_deviation() -> None:
    assert parse_decode_speed("80.10 ± 0.10<br>5.81 ± 0.05") == 5.81
    assert parse_decode_speed("80.10") == 0
    assert parse_decode_speed(None) == 0


def test_parse_logs_columns_have_fork_parser_order(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row() | {"zeta": "1", "alpha": "2"})
    parsed = parse_logs([log.parent])
    assert parsed.kind == "llm_bench"
    assert parsed.columns == (*(name for name in BENCH_COLUMNS if name != "modelSize"), "alpha", "zeta")
    first, second, end = parsed.to_csv().split("\r\n")
    assert first.startswith("model,backend,threads,llm_demo,speed(tok/s),h2o_keep,")
    assert second.startswith("llama2,CPU,4,prompt=512<br>decode=128,80.10 ± 0.10<br>5.90 ± 0.05,0.3211 ± 0.0010,")
    assert end == ""
    assert parsed.notes == (f"{log.parent / 'stdout.log'}: holds no table rows",)


def test_parse_logs_csv_formula_cells_are_quoted_and_read_back(tmp_path: Path) -> None:
    cells = {"zeta": "=HYPERLINK(1)", "=alpha": "-1.5"}
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row() | cells)
    parsed = parse_logs([log.parent])
    header, line, _ = parsed.to_csv().split("\r\n")
    assert ",'=alpha," in header
    assert ",-1.5," in line
    assert ",'=HYPERLINK(1)" in line
    (tmp_path / "m.csv").write_text(parsed.to_csv(), newline="")
    assert dict(read_csv(tmp_path / "m.csv").rows[0].cells) == dict(parsed.rows[0])


@pytest.mark.parametrize("indent", ["    ", "\t", "\N{NO-BREAK SPACE}", "  \t "])
def test_parse_logs_indented_table_equals_fork_parser(tmp_path: Path, indent: str) -> None:
    """That strips each line before it looks for a bar, and a table may begin with an empty cell."""
    table = gate_logs.table(gate_logs.row(), gate_logs.row(4.5))
    (tmp_path / "a.log").write_text(table)
    (tmp_path / "b.log").write_text("\n".join(indent + line + "  " for line in table.splitlines()) + "\r\n")
    plain, indented = (parse_logs([tmp_path / name]) for name in ("a.log", "b.log"))
    assert indented.to_csv().replace("b.log", "a.log") == plain.to_csv()
    assert len(indented.rows) == 2 and indented.rows[0]["speed(tok/s)"] == "80.10 ± 0.10<br>5.90 ± 0.05"


def test_parse_logs_file_named_twice_counts_once(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row())
    assert len(parse_logs([log, tmp_path / "logs", tmp_path / "logs" / ".." / "logs" / log.name]).rows) == 1


DAMAGED = {
    "repeated header": (lambda text: text + text, "its header comes again (1 time)"),
    "other width": (lambda text: text + "| 1 | 2 |\n", "1 line has another number of cells than the header's 24"),
    "cut": (lambda text: text[: text.rindex("|", 0, text.rindex("|"))] + "\n", "No markdown table rows found in logs."),
    "another engine": (
        lambda text: "| model | size | test | t/s |\n|---|---|---|---|\n| llama 7B | 3.8 GiB | tg128 | 9.1 ± 0.1 |\n",
        "a.log: has no column of llm_bench: found model, size, test, t/s, expected speed(tok/s)",
    ),
    "no table": (lambda text: "nothing", "No markdown table rows found in logs."),
    "empty": (lambda text: "", "No markdown table rows found in logs."),
}


@pytest.mark.parametrize("kind", sorted(DAMAGED))
def test_parse_logs_damaged_log_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    damage, said = DAMAGED[kind]
    log = tmp_path / "a.log"
    log.write_text(damage(gate_logs.table(gate_logs.row())))
    try:
        (note,) = parse_logs([log]).notes
        assert said in note
    except SourceError as error:
        assert said in str(error)
    with pytest.raises(SourceError) as refused:
        parse_logs([log], strict=True)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["a.log", "a.jsonl"])
def test_parse_logs_of_other_engine_are_refused(tmp_path: Path, name: str) -> None:
    log = tmp_path / name
    log.write_text(
        '{"build_commit": "1", "n_gen": 128, "avg_ts": 9.1}\n'
        if name == "a.jsonl"
        else DAMAGED["another engine"][0]("")
    )
    with pytest.raises(
        SourceError, match=r"has no (key of llm_demo: found build_commit|column of llm_bench: found mod)"
    ):
        parse_logs([log])


def test_parse_logs_different_versions_are_noted(tmp_path: Path) -> None:
    new, old = gate_logs.row(), gate_logs.row(h2o_lossless_decode_cache_hit=None)  # type: ignore[arg-type]
    for name, cells in (("a.log", new), ("b.log", new), ("c.log", old)):
        (tmp_path / name).write_text(gate_logs.table(cells))
    parsed = parse_logs([tmp_path])
    (note,) = parsed.notes
    assert note.startswith(f"{tmp_path / 'c.log'}: lacks h2o_lossless_decode_cache_hit of the other logs")
    assert [row.get("h2o_lossless_decode_cache_hit", "") for row in parsed.rows][2] == ""
    with pytest.raises(SourceError, match=r"c\.log: lacks"):
        parse_logs([tmp_path], strict=True)


def test_parse_logs_records_of_llm_demo(tmp_path: Path) -> None:
    lines = [gate_logs.record(), gate_logs.record(decode_us=1), gate_logs.record(prompt_index=1, more=[1])]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parsed = parse_logs([tmp_path])
    assert parsed.kind == "llm_demo"
    assert [row["decode_us"] for row in parsed.rows] == ["1", "90000000"]
    assert parsed.columns[:3] == ("prompt_index", "prompt_tokens", "decode_tokens")
    assert parsed.columns[-2:] == ("log_file", "more")


def test_parse_logs_printed_sums_of_llm_demo(tmp_path: Path) -> None:
    text = "prompt tokens num = 128\ndecode tokens num = 512\nprefill time = 2.00 s\n decode time = 90.25 s\n"
    (tmp_path / "a.log").write_text(text)
    (row,) = parse_logs([tmp_path]).rows
    assert row["prompt_tokens"], row["decode_us"] == ("128", "90250000")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt_tokens": 1}\n{"prompt', "m.jsonl: line 2: is not JSON"),
        ("[1]\n", "m.jsonl: line 1: found a list, expected a JSON object"),
        ('{"prefill_us": 1e999}', "m.jsonl: line 1: prefill_us: found inf"),
        ('{"prefill_us": NaN}', "NaN is no number of JSON"),
        ("\n", "holds no records of llm_demo"),
    ],
)
def test_parse_logs_damaged_records_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(SourceError) as error:
        parse_logs([tmp_path / "m.jsonl"])
    assert said in str(error.value)


def test_parse_logs_of_both_programs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps(gate_logs.record()))
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row())
    with pytest.raises(SourceError, match="expected logs of one program"):
        parse_logs([log, tmp_path / "m.jsonl"])


def test_parse_logs_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^No log files found\.$"):
        parse_logs([tmp_path])
    with pytest.raises(SourceError, match="does not exist"):
        parse_logs([tmp_path / "x.log"])


@pytest.mark.parametrize("cell", ["nan \N{PLUS-MINUS SIGN} 0.1", "inf", "-inf", "-5.00 \N{PLUS-MINUS SIGN} 0.10"])
def test_parse_logs_impossible_figures_are_noted(tmp_path: Path, cell: str) -> None:
    log = gate_logs.write_logs(tmp_path, gate_logs.row(), gate_logs.row() | {"h2o_lossless_async_wait_us": cell})
    (note,) = parse_logs([log]).notes
    assert note == f"{log}: row 2: h2o_lossless_async_wait_us: found {cell}, expected a number of at least 0"
    with pytest.raises(SourceError, match="expected a number of at least 0"):
        parse_logs([log], strict=True)


def test_parse_logs_negative_speeds_and_times_are_noted(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path, gate_logs.row() | {"speed(tok/s)": "80.1<br>-3.0"})
    assert "speed(tok/s): found 80.1<br>-3.0" in parse_logs([log]).notes[0]
    (tmp_path / "a.jsonl").write_text('{"prompt_tokens": 5, "prefill_us": -3, "decode_us": -4}\n')
    (note,) = parse_logs([tmp_path / "a.jsonl"]).notes
    assert note.endswith("row 1: prefill_us: found -3, expected a number of at least 0 (and 1 more)")


def test_parse_logs_error_names_log_and_line(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(SourceError, match=r"a\.log \(and 1 other log\): No markdown table rows found in logs\."):
        parse_logs([tmp_path / "a.log", tmp_path / "b.log"])
    (tmp_path / "c.jsonl").write_text('{"prompt_tokens": 5}\n{"prompt\n')
    with pytest.raises(SourceError) as error:
        parse_logs([tmp_path / "c.jsonl"])
    assert str(error.value).count("line") == 1 and "line 2: is not JSON: " in str(error.value)
