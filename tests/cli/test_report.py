"""``kvmnn report`` on documents of the other verbs, its inputs and outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import report_files as files

from kvmnn.cli import main

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def round_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return files.write_round(tmp_path / "round")


def test_report_reads_the_documents_of_all_verbs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verb writes its document here, so a renamed field is noticed."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    for layer in range(2):
        for part in ("key", "value"):
            words = rng.normal(size=(2, 96, 16)).astype(np.float16)
            np.save(f"layer_{layer}.{part}.npy", words)
    inputs = sorted(Path().glob("*.npy"))
    settings = {
        "kv_lossless_enable": True, "kv_lossless_runtime_enable": True, "kv_lossless_runtime_mode": "store",
        "kv_lossless_codec": "gear_delta", "kv_lossless_scope": "front_n", "kv_lossless_front_n": 2,
        "kv_lossless_block_tokens": 16, "kv_lossless_hot_recent_tokens": 16, "kv_lossless_hot_sink_tokens": 0,
        "kv_lossless_async_threads": 0, "kv_h2o_trigger_min_tokens": 32, "kv_h2o_update_interval": 1,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(settings))
    Path("all").mkdir()
    for name, words in (
        ("measure", ["measure", "--encode", *inputs]),
        (
            "replay",
            ["mnn", "replay", "--engine-config", "config.json", "--prefill-tokens", 64, "--compare", "all", *inputs],
        ),
        ("bench", ["bench", "--repeats", 1, *inputs]),
    ):
        Path("all", f"{name}.json").write_text(run(*words, "--json").out)
    run("measure", *inputs, "--out-json", "all/upper.json", "-q")
    said = run("report", "all", "-o", "r.html")
    assert said.out == "r.html: No gates: No gates were judged: what is below was measured, not judged. (4 files)\n"
    page = Path("r.html").read_text()
    measured = json.loads(Path("all/measure.json").read_text())["breakdown"]["overall"]
    replayed = json.loads(Path("all/replay.json").read_text())
    assert f"{measured['stored_ratio']:,.4f}" in page and f"{measured['limit_ratio']:,.4f}" in page
    assert f"{replayed['metrics']['h2o_lossless_ratio']:.3f}" in page and "LOSSLESS: 66 calls compared" in page
    assert "kvmnn mnn replay --engine-config config.json --prefill-tokens 64 --compare all" in page
    Path("config.json").write_text(json.dumps(settings | {"kv_lossless_enable": False}))
    idle = run("mnn", "replay", "--engine-config", "config.json", "--compare", "all", *inputs, "--json", code=1).out
    Path("idle.json").write_text(idle)
    run("report", "idle.json", "-o", "idle.md")
    shown = Path("idle.md").read_text()
    assert "not measured: nothing was compressed, so equal bytes show nothing" in shown and "LOSSLESS" not in shown
    assert "kvmnn bench --repeats 1" in page and "Command not recorded in: upper.json." in page


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_report_of_a_suite_on_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnxruntime", "tokenizers", "matplotlib"):
        pytest.importorskip(package)
    import gate_models

    monkeypatch.chdir(tmp_path)
    gate_models.write_model(tmp_path)
    settings = json.loads(Path("run.json").read_text()) | {"repeats": 1, "quality_texts": 2}
    files.write_json(Path("run.json"), settings)
    words = "gate run model --suite runtime --suite-config run.json --text texts -q -o out"
    run(*words.split(), code=1)
    texts = ["--text", "texts", "--max-tokens", "24", "--policy", "streaming", "--budget", "8", "--no-timing"]
    run("eval", "model", *texts, "-o", "out/eval.json", "-q")
    run("report", "out", "-o", "r.html")
    page, summary = Path("r.html").read_text(), json.loads(Path("out/summary.json").read_text())
    passed = sum(row["overall_pass"] for row in summary["rows"])
    assert f"{passed} of 4 cases" in page and "not run, so not measured: llm_demo_full, llm_demo_store" in page
    gates = json.loads(Path("out/runtime_store/gate.json").read_text())["gates"]
    assert all(gate["name"] in page for gate in gates if gate["verdict"] != "off")
    assert "kvmnn gate run model --suite runtime" in page and "kvmnn eval model --text texts" in page
    assert "eval.json: memory over time: not measured" in page and "Decode speed of every run" in page
    result = json.loads(Path("out/eval.json").read_text())
    assert f"full cache {result['rows'][0]['perplexity']:.2f}" in page
    run("gate", "history", "out", "--json")
    files.write_json(Path("one.json"), json.loads(run("gate", "history", "out", "--json").out))
    assert "Trend over rounds" in run("report", "one.json", "--markdown").out


def test_report_markdown_to_standard_output_or_file(run: Run, round_: Path) -> None:
    text = run("report", round_, "--markdown").out
    assert text.startswith("# kvmnn report: round\n\n**FAIL**: 1 of 6 cases passes; 5 fail.\n")
    run("report", round_, "-o", "r.md", "-q")
    assert Path("r.md").read_text() == text == run("report", round_, "--markdown", "-o", "-").out


@pytest.mark.slow
def test_report_page_to_standard_output(round_: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [sys.executable, "-m", "kvmnn", "report", str(round_), "-o", "-"]
    found = subprocess.run(words, capture_output=True, check=True)
    assert found.stdout.startswith(b"<!DOCTYPE html>") and found.stderr == b""


def test_report_json_has_verdicts_and_misses(run: Run, round_: Path) -> None:
    found = json.loads(run("report", round_, "--json").out)
    assert found["verdict"] == "FAIL" and found["cases"]["runtime_full"]["verdict"] == "fail"
    assert "lossless ratio: 1.170, limit >= 1.300 (0.130 below)" in found["cases"]["runtime_full"]["misses"]
    assert "history.jsonl" in found["files"]


def test_report_notes_ignored_files(run: Run, round_: Path) -> None:
    files.write_json(round_ / "mine.json", {"a": 1})
    streams = run("report", round_, "--markdown")
    assert streams.err == "kvmnn: note: mine.json: left out: not a result that a report knows\n"


def test_report_existing_output_needs_force(run: Run, round_: Path) -> None:
    pytest.importorskip("matplotlib")
    Path("r.html").write_text("mine")
    assert "exists already" in run("report", round_, "-o", "r.html", code=1).err
    assert Path("r.html").read_text() == "mine"
    run("report", round_, "-o", "r.html", "-f")
    assert (
        "is the input itself" in run("report", round_ / "summary.json", "-o", round_ / "summary.json", "-f", code=1).err
    )


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["round"], "no output given: use -o report.html, or --markdown", 2),
        (["round", "-o", "round"], "is a directory, expected a file such as report.html", 2),
        (["round", "--markdown", "--json"], "both want standard output", 2),
        (["round", "-o", "-", "--json"], "both want standard output", 2),
        (["round", "--markdown", "-o", "r.html"], "--markdown writes no HTML", 2),
        (["nothing", "-o", "r.html"], "nothing: does not exist", 1),
        (["round/history.jsonl", "round/none", "-o", "r.html"], "none: does not exist", 1),
        (["round/run.json/x", "-o", "r.html"], "does not exist", 1),
    ],
)
def test_report_error_is_one_line(run: Run, round_: Path, words: list[str], said: str, code: int) -> None:
    streams = run("report", *words, code=code)
    assert said in streams.err and streams.err.count("\n") == 1 and streams.out == ""
    assert not Path("r.html").exists()


def test_report_damaged_file_leaves_no_output(run: Run, round_: Path) -> None:
    (round_ / "eval.json").write_text('{"rows": [')
    assert "eval.json: is not JSON" in run("report", round_, "-o", "r.html", code=1).err
    assert sorted(path.name for path in Path().iterdir()) == ["round"]


def test_report_without_matplotlib_is_exit_code_3(
    round_: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(round_), "-o", "r.html"]) == 3
    assert "this needs the package matplotlib: pip install matplotlib" in capsys.readouterr().err
    assert main(["report", str(round_), "--markdown"]) == 0
