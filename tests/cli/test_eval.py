"""``kvmnn eval``: its output and files, and one line for every error."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from in_process import measure_in_process
from repository import FIXTURES

from kvmnn.cli.entry_point import main

FIXTURE = FIXTURES / "lm"
TEXTS = [str(FIXTURE / "texts" / name) for name in ("calendar.py.txt", "asyncio__tasks.py.txt")]
BASE = ["eval", str(FIXTURE), "--text", *TEXTS, "--max-tokens", "48", "--threads", "1"]
QUICK = [*BASE, "--policy", "streaming", "--budget", "16", "--no-timing"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys, *arguments):
    code, out, err = run(capsys, *arguments)
    assert out == ""
    assert err.startswith("kvmnn: error: ")
    assert err.count("\n") == 1
    return code, err


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Finished cells of `QUICK`, so that most tests need not measure again."""
    path = tmp_path_factory.mktemp("eval") / "cells.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        measure_in_process(patch)
        assert main([*QUICK, "--resume", str(path), "-q"]) == 0
    return path


@pytest.mark.slow
def test_eval_prints_markdown_table(capsys, cells, tmp_path):
    code, out, err = run(capsys, *QUICK, "--resume", cells, "-o", tmp_path / "table.md")
    assert (code, err) == (0, f"kvmnn: note: 4 cells reused from {cells}\n")
    lines = out.splitlines()
    assert lines[0].startswith("| policy | kind |")
    assert lines[2].startswith("| full | LOSSLESS |")
    assert lines[3].startswith("| streaming 16 | LOSSY | 16 |")
    assert (tmp_path / "table.md").read_text() == out


def test_eval_json_and_csv_have_equal_numbers(capsys, cells, tmp_path):
    code, out, err = run(capsys, *QUICK, "--resume", cells, "--json", "-o", tmp_path / "r.csv")
    reused, few, added = err.splitlines()
    assert (code, reused) == (0, f"kvmnn: note: 4 cells reused from {cells}")
    assert few.startswith("kvmnn: note: The intervals are over 2 documents") and "which was added (" in added
    document = json.loads(out)
    assert document["verb"] == "eval"
    assert [row["label"] for row in document["rows"]] == ["full", "streaming 16"]
    assert document["settings"]["tokens"] == 48
    lines = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert len(lines) == 2 * (1 + 2)
    whole = [line for line in lines if not line["document"]]
    assert [float(line["nll"]) for line in whole] == [row["nll"] for row in document["rows"]]
    code, out, _ = run(capsys, *QUICK, "--resume", cells, "--csv", "-o", tmp_path / "r.json")
    assert code == 0
    assert out == (tmp_path / "r.csv").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == document["rows"]


@pytest.mark.slow
def test_eval_terminal_shows_progress_and_table(tmp_path):
    command = [sys.executable, "-m", "kvmnn", *QUICK, "--resume", str(tmp_path / "cells")]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                some = os.read(ours, 1 << 16)
            except OSError:  # Linux: the other end is closed
                break
            if not some:
                break
            shown += some
    os.close(ours)
    assert process.returncode == 0
    text = shown.decode()
    assert "evaluating" in text
    assert "0/4 cells" in text
    assert "streaming 16" in text


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_plot_writes_files(capsys, cells, tmp_path):
    plots = tmp_path / "plots"
    code, _, err = run(capsys, *QUICK, "--plot", plots)
    assert code == 0
    assert f"plot files in {plots}" in err
    names = {path.name for path in plots.iterdir()}
    assert {"keep_map.png", "keep_map.svg", "memory_over_time.png", "perplexity_over_budget.svg"} <= names
    code, err = fails(capsys, *QUICK, "--resume", cells, "--plot", plots)
    assert code == 1
    assert "exists already" in err


@pytest.mark.slow
def test_eval_store_changes_no_number(capsys, tmp_path):
    """A fresh process for each configuration that fills the store; an invalid one is refused before measuring."""
    asked = [*QUICK, "--prefill-tokens", "40", "--json"]
    stored = ["--store", tmp_path / "s"]
    results = [json.loads(run(capsys, *asked, *stored)[1])]
    with pytest.MonkeyPatch.context() as patch:
        measure_in_process(patch)
        results = [json.loads(run(capsys, *asked)[1]), *results, json.loads(run(capsys, *asked, *stored)[1])]
    assert len({json.dumps([(row["nll"], row["accuracy"]) for row in each["rows"]]) for each in results}) == 1
    assert results[1]["rows"][1]["process_peak_bytes"] > 0
    last = [[text.get("stored_tokens") for text in row["documents"]] for row in results[-1]["rows"]]
    assert last == [[47, 47], [40, 40]]
    assert results[-1]["settings"]["prefix_store"] == str(tmp_path / "s")
    assert "prefix_store" not in results[0]["settings"]
    (tmp_path / "file").write_text("x")
    code, err = fails(capsys, *asked, "--store", tmp_path / "file")
    assert code == 1 and "file: is not a prefix store, but a file" in err


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_preset_runs_its_configurations(capsys):
    code, out, err = run(
        capsys,
        *BASE,
        "--preset",
        "knorm-ratio:keep_ratios=0.5,prune_after=20",
        "--timing",
        "--repeats",
        "1",
        "--json",
        "--chunk",
        "8",
    )
    assert code == 0
    said = [line.removeprefix("kvmnn: note: ").split(",")[0].split(" (")[0].split(":")[0] for line in err.splitlines()]
    assert said == [
        "Preset knorm-ratio",
        "Layers hold unequal numbers of tokens",
        "Some layers are never cut",
        "The intervals are over 2 documents",
        "Each text begins with token 0",
    ]
    full, baseline, half = json.loads(out)["rows"]
    assert (full["preset"], baseline["preset"], half["preset"]) == (None, "knorm-ratio", "knorm-ratio")
    assert half["as_seed"]["evaluation"] == "E1"
    assert half["ttft_seconds"] > 0
    assert half["tokens_kept"][:2] == [48, 48]
    assert max(half["tokens_kept"][2:]) <= 28


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_budget_as_percentage_of_tokens(capsys):
    code, out, _ = run(capsys, *QUICK, "--chunk", "24", "--budget", "25%", "62.5%", "--json")
    assert code == 0
    assert [row["budget"] for row in json.loads(out)["rows"]] == [None, 16, 12, 30]


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_json_contains_the_notes(capsys, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("import os\n")
    code, out, err = run(
        capsys, "eval", FIXTURE, "--text", text, "--policy", "streaming", "--budget", 64, "--no-timing", "--json"
    )
    assert code == 0
    notes = json.loads(out)["notes"]
    assert err == "".join(f"kvmnn: note: {note}\n" for note in notes)
    assert [note.split(":")[0] for note in notes] == [
        notes[0].split(":")[0],
        "Rows marked * evicted nothing before the last token was scored",
        "streaming 64",
        "One document",
        notes[-1].split(":")[0],
    ]
    assert "which was added (bos_token of tokenizer_config.json" in notes[-1]
    assert "short.txt has only" in notes[0]


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_refused_configuration_keeps_other_rows(capsys):
    code, out, err = run(
        capsys, *QUICK, "--policy", "h2o_tokens:recent=4,buffer=0", "--chunk", "24", "--max-masked", "0", "--json"
    )
    assert code == 1
    document = json.loads(out)
    assert [row["label"] for row in document["rows"]] == ["full", "streaming 16"]
    assert "kvmnn: refused: h2o_tokens 16" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "64"], "--budget needs a --policy"),
        (["--policy", "full", "--plot-format", "png,gif"], "'gif' is no kind of plot: expected some of png, svg, pdf"),
        (
            ["--policy", "h2o_engine", "--budget", "64"],
            "a budget of 64 tokens has no effect here; h2o_engine: it has none",
        ),
        (["--no-titles"], "--no-titles has no effect here: expected --plot DIR with it"),
        (["--plot-format", "pdf"], "--plot-format has no effect here: expected --plot DIR with it"),
        (["--repeats", "2"], "--repeats has no effect here: expected --timing with it"),
        (["--no-project-definitions"], "--no-project-definitions has no effect here"),
        (["--policy", "full", "--skip-layers", "0"], "--skip-layers has no effect here"),
        (
            ["--policy", "streaming", "--skip-layers", "9"],
            "skip_layers names layer 9, the model has 6 layers: expected 0 to",
        ),
        (["--preset", "streaming-h2o", "--skip-layers", "0"], "--skip-layers has no effect here"),
        (["--policy", "nothing"], "unknown policy 'nothing'"),
        (["--policy", "streaming,knorm:budget=9"], "expected one policy: repeat --policy for each"),
        (["--policy", "streaming:sink"], "is not option=value"),
        (["--policy", "streaming", "--budget", "4"], "leaves no window after 4 sinks"),
        (["--policy", "knorm"], "expected a budget (tokens) or a keep_ratio"),
        (["--policy", "h2o_heads", "--budget", "64"], "less than the 512 recent ones"),
        (["--preset", "nothing"], "unknown preset 'nothing'"),
        (["--policy", "full", "--skip-layers", "x"], "expected whole numbers"),
        (["--policy", "full", "--json", "--csv"], "both want standard output"),
        (["--policy", "full", "-o", "-"], "printed on standard output anyhow"),
        (["--policy", "streaming", "--budget", "100%"], "is not a whole number"),
        (["--policy", "full", "-o", "a.md", "-o", "b.json", "-o", "./a.md"], "a.md is named by two outputs"),
        (["--policy", "full", "-o", "a.csv", "--table", "a.csv"], "a.csv is named by two outputs"),
        (["--policy", "keydiff:by_layer=1+2", "--budget", "9"], "by_layer has relative budgets of 2 layers"),
        (["--policy", "full", "--max-tokens", "0"], "not a whole number above zero"),
        (["--policy", "full", "--frame-dtype", "fp8"], "invalid choice"),
    ],
)
def test_eval_usage_errors(capsys, arguments, message):
    code, err = fails(capsys, "eval", FIXTURE, "--text", TEXTS[0], *arguments)
    assert code == 2
    assert message in err


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_unusable_text_is_one_line_error(capsys, tmp_path):
    policy = ["--policy", "recent_only", "--budget", "8", "--no-timing"]
    for name, data in {"empty": b"", "latin": "é".encode("latin-1")}.items():
        (tmp_path / name).write_bytes(data)
    empty, latin = tmp_path / "empty", tmp_path / "latin"
    cases = {
        f"{empty}: is empty": [FIXTURE, "--text", empty],
        f"{latin}: is not UTF-8: byte 0 is 0xe9": [FIXTURE, "--text", latin],
        f"{tmp_path / 'no'}: cannot be read": [FIXTURE, "--text", tmp_path / "no"],
        "does not exist": [tmp_path / "model", "--text", TEXTS[0]],
        "has no *.txt, *.jsonl or *.parquet files": [FIXTURE, "--text", tmp_path],
        "is not a cell of an evaluation": [FIXTURE, "--text", TEXTS[0], "--resume", latin],
        "onnxruntime has no provider Nothing": [
            FIXTURE,
            "--text",
            TEXTS[0],
            "--provider",
            "Nothing",
            "--max-tokens",
            "9",
        ],
        "backend": [FIXTURE, "--text", TEXTS[0], "--layout", "z80", "--max-tokens", "9"],
    }
    for message, arguments in cases.items():
        code, err = fails(capsys, "eval", *arguments, *policy)
        assert code == 1, err
        assert message in err


def test_eval_damaged_model_is_one_line_error(capsys, tmp_path):
    graph = (FIXTURE / "model.onnx").read_bytes()
    rest = ["--text", TEXTS[0], "--policy", "streaming", "--budget", "16", "--max-tokens", "9", "--no-timing"]
    (tmp_path / "model.onnx").write_bytes(graph[: len(graph) // 2])
    code, err = fails(capsys, "eval", tmp_path, *rest)
    assert code == 1
    assert "tokenizer.json" in err
    code, err = fails(capsys, "eval", tmp_path, "--tokenizer", FIXTURE / "tokenizer.json", *rest)
    assert code == 1
    assert str(tmp_path / "model.onnx") in err


def test_eval_refuses_outputs_before_measuring(capsys, tmp_path):
    there = tmp_path / "there.md"
    there.write_text("mine")
    code, err = fails(capsys, *QUICK, "-o", there)
    assert (code, "exists already" in err) == (1, True)
    code, err = fails(capsys, *QUICK, "-f", "-o", TEXTS[0])
    assert code == 1
    code, err = fails(capsys, *QUICK, "-o", tmp_path)
    assert (code, "is a directory" in err) == (2, True)
    assert there.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quant", "q8_0", "--quant", "transform:no.kvmp"], "no.kvmp: does not exist"),
        (["--policy", "qfilter:profile=no.kvmp", "--budget", "9"], "no.kvmp: does not exist"),
        (["--policy", "composed:policies=keydiff+qfilter@profile=no.kvmp", "--budget", "9"], "no.kvmp: does not exist"),
        (["--policy", "duo_attention:pattern=no.tsv", "--budget", "9"], "no.tsv: expected rows of numbers"),
    ],
)
def test_eval_missing_files_are_named_before_measuring(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("kvmnn.evaluation.runner._run_plan", lambda *_: pytest.fail("the model ran"))
    code, err = fails(capsys, *BASE, *arguments)
    assert (code, message in err) == (1, True), err


@pytest.mark.slow
def test_eval_writes_every_output(capsys, cells, tmp_path):
    paths = [tmp_path / f"r{suffix}" for suffix in (".md", ".json", ".csv", ".tex")]
    options = [word for path in paths for word in ("-o", path)]
    code, out, _ = run(capsys, *QUICK, "--resume", cells, *options, "--table", tmp_path / "table.csv")
    assert code == 0 and paths[0].read_text() == out
    written = json.loads(paths[1].read_text())
    assert written["rows"][1]["label"] == "streaming 16"
    assert list(written)[:2] == ["verb", "command"] and written["verb"] == "eval"  # as the schema of --json requires
    assert paths[2].read_text().startswith("label,document,scope,")
    assert r"\begin{tabular}" in paths[3].read_text()
    assert (tmp_path / "table.csv").read_text().startswith("label,policy,")


def test_eval_forced_output_replaces_the_file(capsys, cells, tmp_path):
    there = tmp_path / "there.md"
    there.write_text("mine")
    code, out, err = run(capsys, *QUICK, "--resume", cells, "-f", "-q", "-o", there)
    assert (code, out, err) == (0, there.read_text(), "")
    assert out.startswith("| policy |")


def wait_for_end_of_group(group: int) -> None:
    """Wait until no process of the group is left; fail after 30 seconds.

    Workers that were told to end outlive the command by an instant, longer on a loaded machine.
    """
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail(f"processes of group {group} are left after 30 seconds")


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_eval_interrupted_keeps_cells_and_ends_processes(capsys, tmp_path, number, code):
    path = tmp_path / "cells"
    arguments = [*QUICK, "--max-tokens", "120", "--resume", str(path), "--jobs", "2", "-o", str(tmp_path / "out.md")]
    with subprocess.Popen(
        [sys.executable, "-m", "kvmnn", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    kept = len(path.read_text().splitlines())
    assert err == (
        f"kvmnn: note: {kept} of 4 cells kept in {path}: the same command goes on from there\n"
        f"kvmnn: error: {'interrupted' if code == 130 else 'terminated'}\n"
    )
    wait_for_end_of_group(process.pid)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cells"]
    done = len(path.read_text().splitlines())
    assert 0 < done < 4
    if number == signal.SIGINT:
        code, out, err = run(capsys, *arguments, "-q")
        assert (code, err) == (0, "") and "| policy |" in out
        assert len(path.read_text().splitlines()) == 4


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_killed_and_resumed_equals_uninterrupted_run(capsys, tmp_path):
    arguments = [*QUICK, "--max-tokens", "48", "--policy", "l2_fixed:strategy=random", "--json"]
    path = tmp_path / "cells"
    with subprocess.Popen(
        [sys.executable, "-m", "kvmnn", *arguments, "--resume", str(path)], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.read_bytes().count(b"\n") >= 2:
                break  # killed wherever it is then
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    code, out, err = run(capsys, *arguments, "--resume", path)
    assert code == 0
    assert "cells reused from" in err
    resumed = untimed(json.loads(out))
    code, out, _ = run(capsys, *arguments)
    assert (code, untimed(json.loads(out))) == (0, resumed)


def untimed(value):
    """A document without times, the memory of processes, and the command that made it."""
    if isinstance(value, dict):
        varying = "second|process_.*bytes|^command$"
        return {key: untimed(entry) for key, entry in value.items() if not re.search(varying, key)}
    return [untimed(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_without_policy_is_the_baseline(capsys):
    code, out, err = run(capsys, *BASE, "--no-timing", "--chunk", "16")
    assert (code, err) == (0, "")
    assert out.splitlines()[2].startswith("| full | LOSSLESS |")
    assert not out.splitlines()[3]


@pytest.mark.slow
def test_eval_without_onnxruntime_is_exit_code_3(tmp_path):
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, "-m", "kvmnn", *QUICK]
    found = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=60
    )
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr.startswith("kvmnn: error: ")
    assert "this needs the package onnxruntime: pip install onnxruntime onnx tokenizers" in found.stderr
    assert found.stderr.count("\n") == 1
