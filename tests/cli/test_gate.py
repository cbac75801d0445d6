"""``kvmnn gate`` on logs: verdicts, exit codes, files, and options without effect."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gate_logs
import pytest

CHECK = "gate check m.csv --case runtime_store --logs-dir logs"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Logs of a run that passes, their table, and a table of the same work without compression."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    gate_logs.write_logs(Path("logs"), gate_logs.row(5.81), gate_logs.row(6.0, prompt=1024))
    gate_logs.write_logs(Path("plain"), gate_logs.row(5.9), gate_logs.row(6.1, prompt=1024))
    gate_logs.write_demo(Path("without"), {"prompt_128_1": gate_logs.record()})
    gate_logs.write_demo(Path("with"), {"prompt_128_1": gate_logs.record(decode_us=80_000_000)})
    return tmp_path


@pytest.fixture
def table(here, run):
    run("gate", "parse", "logs/run_0001.log", "-o", "m.csv")
    return Path("m.csv")


def test_gate_parse_writes_rows(here, run) -> None:
    assert run("gate", "parse", "logs", "-o", "m.json").out == "2 rows of llm_bench from 2 logs, in m.json\n"
    document = json.loads(Path("m.json").read_text())
    assert (document["kind"], len(document["rows"])) == ("llm_bench", 2)
    found = run("gate", "parse", "logs", "--json")
    assert json.loads(found.out) == {"verb": "gate parse", **document}
    assert found.err == "kvmnn: note: logs/stdout.log: holds no table rows\n"
    assert "expected a .csv" in run("gate", "parse", "logs", "-o", "logs", code=2).err
    assert "exists already" in run("gate", "parse", "logs", "-o", "m.json", code=1).err
    assert "holds no table rows" in run("gate", "parse", "logs", "--strict", code=1).err


def test_gate_check_verdict_fits_a_terminal(table, run, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True, raising=False)
    for words in ("", " --strict --baseline plain/run_0001.log", " --limit decode_baseline=9"):
        shown = run(*(CHECK + words).split(), code=1 if words else 0).out.splitlines()
        assert not [line for line in shown if len(line) > 80]
    assert shown[0] == "FAIL: runtime_store, 13 pass, 1 fail; 2 rows"
    assert any(line.startswith("FAIL  decode drop") for line in shown)


def test_gate_check_json_and_exit_codes(table, run) -> None:
    found = json.loads(run(*CHECK.split(), "--json").out)
    assert (found["verb"], found["verdict"], found["gate"]["lossy_best"]) == ("gate check", "pass", "3.1140")
    assert run(*CHECK.split(), "-q").out == run(*CHECK.split()).out
    failing = run(*CHECK.split(), "--limit", "lossy_target=3.2", "--json", code=1)
    assert json.loads(failing.out)["failure"] == "lossy ratio fail"


def test_gate_check_unknown_case_is_noted(table, run) -> None:
    words = CHECK.replace("runtime_store", "runtime_stor").split()
    said = " ".join(run(*words).err.split())
    assert "runtime_stor is none of the fork's cases (did you mean 'runtime_store'?): only the common limits" in said
    assert "none of" not in run(*CHECK.split()).err


def test_gate_check_limits_of_case_file_and_options_merge(table, run) -> None:
    Path("g.json").write_text('{"max_lossless_queue_peak": 1, "lossy_target": 1}')
    limits = json.loads(run(*CHECK.split(), "--gates", "g.json", "--limit", "lossy_target=2", "--json", code=1).out)[
        "limits"
    ]
    assert [limits[name] for name in ("max_lossless_queue_peak", "lossy_target")] == [1, 2]
    assert limits["max_lossless_decomp_us"] == 70000


def test_gate_check_baseline_modes(table, run) -> None:
    def gate(*words: str, code: int = 0) -> dict[str, str]:
        return json.loads(run(*CHECK.split(), "--json", *words, code=code).out)["gate"]

    assert gate("--decode-baseline-mode", "fixed", code=1)["decode_baseline"] == "6.6000"
    same = gate("--decode-baseline-mode", "same_batch", "--baseline", "plain/run_0001.log")
    assert (same["decode_baseline"], same["decode_baseline_source"]) == ("6.1000", "same_batch")
    rolling = ["--decode-baseline-mode", "rolling", "--baseline-history", "h.jsonl"]
    for _ in range(3):
        assert gate(*rolling, "--limit", "decode_baseline=5")["decode_baseline_source"] == "fixed_fallback"
    found = gate(*rolling, "--no-history")
    assert (found["decode_baseline"], found["decode_baseline_samples"]) == ("6.0000", "3")
    assert len(Path("h.jsonl").read_text().splitlines()) == 3


def test_gate_summary_of_a_round(table, run) -> None:
    run(*CHECK.split(), "-o", "round")
    assert "exists already" in run(*CHECK.split(), "-o", "round", code=1).err
    run("gate", "demo", "without", "with", "--case", "llm_demo_store", "-o", "round", "--run-order", "baseline_first")
    assert json.loads(Path("round/summary.json").read_text())["overall_pass"]
    Path("round/summary.json").unlink()
    assert run("gate", "summary", "round", "-f").out.splitlines()[0] == "PASS: 2 of 2 cases passed"
    strict = run("gate", "demo", "without", "with", "--strict", code=1)
    assert strict.out.startswith("FAIL: llm_demo, 3 pass, 2 fail, 2 unclear; 1 run without, 1 with compression\n")


def test_gate_summary_fits_a_terminal(table, run) -> None:
    """Reasons are long if many gates fail."""
    limits = "lossy_target=9,lossless_target=9,max_lossless_queue_peak=0"
    words = f"--strict --limit {limits} --limit max_lossless_decomp_us=1"
    run(*CHECK.split(), *words.split(), "-o", "round", code=1)
    run("gate", "demo", "without", "with", "--strict", "--case", "llm_demo_store", "-o", "round", code=1)
    shown = run("gate", "summary", "round", code=1).out.splitlines()
    assert max(map(len, shown)) <= 80
    assert " ".join(" ".join(shown).split()).count("queue peak fail") == 1


def test_gate_output_keeps_foreign_files(table, run) -> None:
    Path("mine").mkdir()
    Path("mine/summary.md").write_text("mine")
    assert "is not of a round" in run(*CHECK.split(), "-o", "mine", code=1).err
    assert sorted(path.name for path in Path("mine").iterdir()) == ["summary.md"]
    assert "not a directory" in run(*CHECK.split(), "-o", "m.csv", code=1).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check m.csv --baseline m.csv", "--baseline says nothing without"),
        ("check m.csv --decode-baseline-mode same_batch", "needs --baseline CSV"),
        ("check m.csv --decode-baseline-mode rolling", "needs --baseline-history FILE"),
        ("check m.csv --baseline-key k", "--baseline-key says nothing without --baseline-history"),
        (
            "check m.csv --decode-baseline-mode fixed --limit decode_baseline_samples=3",
            "is what --decode-baseline-mode fixed",
        ),
        ("check m.csv --limit lossy_target=many", "'many' is not a number"),
        ("check m.csv --case a/b -o x", "'a/b' is no name of a case"),
        ("check m.csv -o -", "printed on standard output anyhow"),
        ("parse logs --limit lossy_target=3", "--limit lossy_target says nothing to gate parse"),
        ("parse logs --case x", "--case says nothing to gate parse"),
        ("demo with", "takes two inputs"),
        ("demo with with --limit max_lossless_fallback=3", "--limit max_lossless_fallback says nothing to gate demo"),
        ("summary a b", "takes one folder"),
        ("chek m.csv", "did you mean 'check'"),
    ],
)
def test_gate_usage_errors(here, run, words: str, said: str) -> None:
    assert said in run("gate", *words.split(), code=2).err


def test_gate_bad_data_is_one_line_error(here, run) -> None:
    Path("b.csv").write_text("model,test\nx,1\n")
    Path("bin.csv").write_bytes(bytes(range(256)) * 20)
    for words in (
        "check b.csv",
        "check bin.csv",
        "check none.csv",
        "check .",
        "demo . .",
        "summary .",
        "parse .",
        "check with",
    ):
        found = run("gate", *words.split(), code=1)
        assert found.out == ""
        assert len(found.err.splitlines()) == 1, words
