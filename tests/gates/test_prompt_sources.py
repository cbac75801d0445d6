"""Sources of the prompts of gate run, their labels in results, and refused runs, which leave no files."""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
import gate_models
from tiny_decoders import Tiny

from kvmnn.cli.commands import gate as gate_run
from kvmnn.errors import KvmnnError
from kvmnn.gates.suite.cases import CASE_NAMES, build_cases
from kvmnn.gates.suite.settings import RunConfig, RunSettings, read_run_config
from kvmnn.gates.suite.suite import Suite
from kvmnn.gates.suite.workloads import build_prefix_workloads, read_sample_text
from kvmnn.lm import DecoderSession, tokenizer
from kvmnn.lm.documents import Document

pytestmark = pytest.mark.usefixtures("without_workers")  # test_suite.py has rounds with worker processes


def document(name: str, tokens: int) -> Document:
    ids = np.arange(1, tokens + 1) + 100 * len(name)
    return Document(name=name, ids=np.concatenate([[0], ids]), nbytes=tokens, sha256=name)


def prompts_of(out: Path, case: str) -> tuple[Any, ...]:
    """What the files of a case say of its prompts: verdict, runs, table, round, report of the case."""
    gate = json.loads((out / case / "gate.json").read_text())
    runs = json.loads((out / case / "runs.json").read_text())
    with (out / case / "candidate.csv").open(newline="", encoding="utf-8") as stream:
        works = [row["log_file"] for row in csv.DictReader(stream)]
    (row,) = (row for row in json.loads((out / "summary.json").read_text())["rows"] if row["case"] == case)
    assert f"- prompts: {gate['prompts']}" in (out / case / "summary.md").read_text()
    return gate["prompts"], {pair["prompts"] for pair in runs["pairs"]}, works, row["prompts"], gate, runs["notes"]


def write(folder: Path, **settings: Any) -> list[Any]:
    """A model, and words of a command on it without texts; the runs are short."""
    gate_models.write_model(folder, repeats=1, generate=4, **settings)
    return ["gate", "run", folder / "model", "--suite", "runtime", "--suite-config", folder / "run.json"]


@pytest.mark.slow
def test_gate_run_runtime_cases_use_built_in_text(tmp_path: Path, run: Any) -> None:
    found = run(*write(tmp_path), "-o", tmp_path / "out", code=1)
    prompts, of_runs, works, of_round, _, notes = prompts_of(tmp_path / "out", "runtime_store")
    assert (prompts, of_runs, works, of_round) == ("built-in text", {"built-in text"}, ["built-in text:40"], prompts)
    assert notes == ["The prompts of the runtime cases are beginnings of the built-in text (--text takes others)."]
    assert "prompts: built-in text" in " ".join(found.out.split()) and "synthetic" not in found.out


@pytest.mark.slow
def test_gate_run_synthetic_prompts_are_labelled(tmp_path: Path, run: Any) -> None:
    words = [*write(tmp_path, synthetic=True), "-o", tmp_path / "out"]
    found = run(*words, code=1)
    prompts, of_runs, works, of_round, gate, notes = prompts_of(tmp_path / "out", "runtime_store")
    assert (prompts, of_runs, works, of_round) == ("synthetic", {"synthetic"}, ["synthetic_40"], "synthetic")
    (why,) = (one["why"] for one in gate["gates"] if one["name"] == "lossless ratio")
    assert "prompts are synthetic, K and V of texts compress less" in why
    assert "synthetic, one token repeated" in notes[0] and "prompts: synthetic" in " ".join(found.out.split())
    cases = json.loads(run(*words, "--json", code=1).out)["cases"]
    assert {case["prompts"] for case in cases} == {"synthetic"}
    for name in ("report.md", "report.html"):
        run("report", tmp_path / "out", "-o", tmp_path / name)
        page = (tmp_path / name).read_text()
        assert "synthetic prompts" in page and "Synthetic prompts are one token repeated" in page


@pytest.mark.slow
def test_gate_run_user_texts_are_runtime_prompts(tmp_path: Path, run: Any) -> None:
    run(*write(tmp_path), "--text", tmp_path / "texts", "-o", tmp_path / "out", code=1)
    prompts, of_runs, works, of_round, _, notes = prompts_of(tmp_path / "out", "runtime_full")
    assert (prompts, of_runs, works, of_round) == ("text", {"text"}, ["a.txt:40"], "text")
    assert notes == []


@pytest.mark.slow
def test_gate_run_model_without_tokenizer_uses_synthetic_prompts(tmp_path: Path, run: Any) -> None:
    words = write(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    found = run(*words, "-o", tmp_path / "out", code=1)
    prompts, _, _, _, _, notes = prompts_of(tmp_path / "out", "runtime_store")
    assert prompts == "synthetic"
    assert notes[0] == f"{tmp_path}/model has no tokenizer.json (--tokenizer), so no text can be a prompt."
    assert "no tokenizer.json" in " ".join(found.out.split())
    refused = run(*words, "--text", tmp_path / "texts", "-o", tmp_path / "other", code=1)
    assert "no tokenizer.json next to the model" in refused.err and not (tmp_path / "other").exists()


def test_build_prefix_workloads_short_texts_are_joined() -> None:
    documents = [document("a", 20), document("bb", 30)]
    work, long = build_prefix_workloads(documents, RunSettings(prompts=(21, 45)))
    assert (work.name, work.turns[0]) == ("a:21", (0, *range(101, 121)))
    assert (long.name, long.turns[0]) == ("2 texts:45", (0, *range(101, 121), *range(201, 225)))
    with pytest.raises(KvmnnError, match=r"^2 texts: 51 tokens, a prompt has 52: expected longer texts"):
        build_prefix_workloads(documents, RunSettings(prompts=(52,)))


def test_sample_text_is_long_enough_and_rarely_repeats() -> None:
    words = read_sample_text().split()
    assert len(words) > max(RunSettings().prompts) * 1.5
    triples = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
    assert len(set(triples)) > 0.98 * len(triples)


@pytest.mark.parametrize("limit", [8, 3])
def test_build_cases_queue_size_equals_gate_limit(limit: int) -> None:
    limits = {} if limit == 8 else {"max_lossless_queue_peak": limit}
    for case in build_cases("runtime", RunConfig(limits=limits))[1:]:
        assert case.engine["kv_lossless_max_queue"] == limit
    (given,) = build_cases("runtime", RunConfig(engine={"kv_lossless_max_queue": 99}))[1:2]
    assert given.engine["kv_lossless_max_queue"] == 99


def test_gate_run_queue_gate_counts_open_encodings(tmp_path: Path, run: Any) -> None:
    """A prompt has many cold blocks; those that wait for a place are rows as before."""
    run(*write(tmp_path, kv_lossless_max_queue=1, kv_lossless_async_threads=1), "-o", tmp_path / "out", code=1)
    for case in ("runtime_full", "runtime_store"):
        document = json.loads((tmp_path / "out" / case / "gate.json").read_text())
        (gate,) = (one for one in document["gates"] if one["name"] == "queue peak")
        assert (gate["verdict"], gate["value"]) == ("pass", "1")


# -- refused runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ({"prompts": [100000]}, [], "tokens, a prompt has 100,000: expected longer texts"),
        ({"synthetic": True, "token": 10**6}, [], "token 1000000: the vocabulary has"),
        ({"buckets": [5000]}, ["--suite", "llm_demo", "--text", "TEXTS"], "the texts have no prompt of 5000 tokens"),
        ({"buckets": [90]}, ["--extra-case", "multi_turn", "--text", "TEXTS"], "no text has the tokens of three turns"),
        ({"prompt_manifest": "/none"}, ["--text", "TEXTS"], "/none: does not exist"),
    ],
)
def test_gate_run_refused_run_leaves_no_folder(
    tmp_path: Path, run: Any, settings: dict[str, Any], words: list[str], said: str
) -> None:
    command = [*write(tmp_path, **settings), *(str(tmp_path / "texts") if word == "TEXTS" else word for word in words)]
    refused = run(*command, "-o", tmp_path / "out", code=1)
    assert said in refused.err and len(refused.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_gate_run_too_many_positions_are_refused_early(tmp_path: Path, run: Any) -> None:
    words = write(tmp_path)
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 4, "max_position_embeddings": 41}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    refused = run(*words, "-o", tmp_path / "out", code=1)
    assert "more than the 41 positions" in refused.err and not (tmp_path / "out").exists()


def test_gate_run_model_without_positions_is_refused_early(tmp_path: Path, run: Any) -> None:
    words = write(tmp_path)
    (tmp_path / "model" / "model.onnx").write_bytes(Tiny(positions=False).model().SerializeToString())
    refused = run(*words, "-o", tmp_path / "out", code=1)
    assert "position_ids" in refused.err and not (tmp_path / "out").exists()


# -- progress ---------------------------------------------------------------------------------------------------------


_LINES_AT_ONCE = (
    "import sys; from kvmnn.cli import main; from kvmnn.cli.commands import gate as g; "
    "g._FIRST_LINE_SECONDS = 0.01; g._LINE_INTERVAL_BOUNDS_SECONDS = 0.01, 0.01; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.slow
def test_gate_run_progress_is_lines_on_standard_error(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*map(str, write(tmp_path)), "--text", str(tmp_path / "texts"), "-o", str(tmp_path / "out")]
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", _LINES_AT_ONCE, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvmnn: progress: ")]
    assert "progress" not in done.stdout
    assert lines[0] == "kvmnn: progress: 0:00; opening the model and reading the texts"
    assert any(" of 14 runs, " in line and "; now runtime_" in line for line in lines)
    monkeypatch.setattr(gate_run, "_FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(gate_run, "_LINE_INTERVAL_BOUNDS_SECONDS", (0.01, 0.01))
    quiet = run(*words[:-1], tmp_path / "quiet", "-q", code=1)
    assert "progress" not in quiet.out + quiet.err


@pytest.mark.slow
def test_suite_progress_counts_and_names_all_runs(tmp_path: Path) -> None:
    """What the lines and the bar say comes from the suite itself."""
    calls: list[str] = []
    started: list[tuple[int, int]] = []

    class Kept:
        steps = runs = 0

        def start(self, runs: int, steps: int) -> None:
            started.append((runs, steps))

        def begin_run(self, run_description: str) -> None:
            calls.append(run_description)

        def advance(self, steps: int) -> None:
            self.steps += steps

        def end_run(self) -> None:
            self.runs += 1

    write(tmp_path)
    config = read_run_config(tmp_path / "run.json", CASE_NAMES)
    progress = Kept()
    texts = [str(tmp_path / "texts")]
    with Suite(str(tmp_path / "model"), tmp_path / "out", settings=config.settings, texts=texts, jobs=1) as suite:
        list(suite.measure_cases(build_cases("runtime", config), progress))
    assert started == [(progress.runs, progress.steps)] and progress.runs == 14
    assert "runtime_store, a.txt:40, K and V compared" in calls and "runtime_probe, perplexity" in calls


@pytest.mark.slow
def test_suite_case_closes_its_model_sessions(tmp_path: Path) -> None:
    write(tmp_path)
    config = read_run_config(tmp_path / "run.json", CASE_NAMES)
    shared_sessions = {id(entry) for entry in gc.get_objects() if isinstance(entry, DecoderSession)}  # of other tests
    with Suite(str(tmp_path / "model"), tmp_path / "out", settings=config.settings, texts=[], jobs=1) as suite:
        for measured in suite.measure_cases(build_cases("runtime", config)[1:3]):
            sessions = [entry for entry in gc.get_objects() if isinstance(entry, DecoderSession)]
            assert {id(entry) for entry in sessions} <= shared_sessions, f"{measured.case.name}: the next opens its own"


def test_suite_progress_line_waits_while_stderr_is_redirected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tokenizers package prints panics; a line that came while they were hidden was lost."""
    monkeypatch.setattr(gate_run, "_FIRST_LINE_SECONDS", 0.01)
    with gate_run.SuiteProgressDisplay(argparse.Namespace(quiet=False, output="out")):
        with tokenizer._convert_panics():
            time.sleep(0.2)
        time.sleep(0.2)
    assert capfd.readouterr().err == "kvmnn: progress: 0:00; opening the model and reading the texts\n"
