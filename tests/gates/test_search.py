"""The search over settings: what it tries, judges, keeps and shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
import gate_models

from kvmnn.evaluation.settings import Configuration
from kvmnn.gates.suite.search import SearchCell, SearchResult, SearchTargets
from kvmnn.gates.suite.workloads import split_document
from kvmnn.lm.documents import Document

LIMITS = {"kv_lossless_block_tokens": 4, "kv_lossless_hot_recent_tokens": 4, "kv_lossless_hot_sink_tokens": 0}


def make_cell(label: str, kept: float, encoded: float, loss: float, change: float, **verdicts: Any) -> SearchCell:
    names = {"lossy": "pass", "lossless": "pass", "decode drop": "pass", "perplexity": "pass"} | {
        name.replace("_", " "): value for name, value in verdicts.items()
    }
    return SearchCell(
        label=label,
        configuration=Configuration(label, "streaming", {"budget": 64}),
        mode="store",
        lossy_ratio=kept,
        perplexity=change,
        perplexity_low=change,
        perplexity_high=change,
        kl=0.1,
        is_timed=True,
        lossless_ratio=encoded,
        drop=loss,
        drop_low=loss,
        drop_high=loss,
        verdicts=names,
    )


def make_result(*cells: SearchCell) -> SearchResult:
    return SearchResult(kvmnn="1", model="m", targets=SearchTargets(), cells=cells)


def test_search_result_shows_front_and_what_is_in_the_way() -> None:
    slow = make_cell("slow", 4.0, 1.4, 0.3, 0.01, decode_drop="fail")
    worse = make_cell("worse", 3.9, 1.4, 0.4, 0.02, decode_drop="fail")
    fast = make_cell("fast", 2.0, 1.2, 0.0, 0.0, lossy="fail", lossless="fail")
    result = make_result(slow, worse, fast)
    assert not result.has_passed
    assert result.front_labels == ["slow", "fast"]
    assert result.blocking == {"lossy": 0, "lossless": 0, "decode drop": 2, "perplexity": 0}
    text = "\n".join(result.format_lines(120))
    assert "In the way is one target alone; without it so many would pass: decode drop (2)." in text
    assert "Pareto front: slow; fast." in text
    assert [line.split("  ")[0] for line in text.rstrip().splitlines()[-3:]] == ["slow", "fast", "worse"]
    text = str(make_result(fast))
    assert "No target alone is in the way" in text
    assert "lossy 1, lossless 1, decode drop 0, perplexity 0" in " ".join(text.split())
    passing = make_result(slow, make_cell("good", 3.1, 1.3, 0.0, 0.0))
    assert passing.has_passed
    lines = [line for line in str(passing).splitlines() if line.startswith(("good", "slow"))]
    assert "all pass" in lines[0] and "decode drop fail" in lines[1]
    assert str(passing).startswith("PASS: lossy >= 3, lossless >= 1.3, decode drop <= 5%, perplexity <= +5%: 1 of 2")


def test_gate_search_invalid_arguments_are_refused(tmp_path: Path, run) -> None:
    text = tmp_path / "t.txt"
    text.write_text("word " * 99)
    words = ["gate", "search", "model", "--text", text, "-o", tmp_path / "o"]
    for more, said in (
        (["--lossy", "0.5"], "lossy: found 0.5, expected a ratio"),
        (["--max-drop", "x"], "'x' is no share"),
        (["--strict"], "--strict says nothing to gate search"),
        (["--max-cells", "5000"], "max_cells: found 5000"),
    ):
        assert said in run(*words, *more, code=2).err
    assert "takes one model" in run("gate", "search", "a", "b", code=2).err


def test_split_document_parts_follow_one_another_and_begin_with_bos() -> None:
    document = Document(name="a", ids=np.arange(30), nbytes=99, sha256="0" * 64)
    parts = split_document(document, 8)
    assert [part.ids.tolist() for part in parts] == [[0, *range(begin, begin + 8)] for begin in (1, 9, 17)]
    assert len({(part.name, part.sha256) for part in parts}) == 3
    plain = split_document(replace(document, begins_with_bos=False), 8)
    assert [part.ids.tolist() for part in plain] == [list(range(begin, begin + 9)) for begin in (0, 9, 18)]


@pytest.mark.slow
def test_gate_search_without_texts_and_folder_takes_built_in_text_and_leaves_nothing(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gate_models.write_model(tmp_path)
    settings = {key: value for key, value in gate_models.SETTINGS.items() if not key.startswith("kv_")}
    (folder / "run.json").write_text(json.dumps({**settings, **LIMITS, "generate": 8}))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    words = ["gate", "search", folder / "model", "--suite-config", folder / "run.json", "--policy", "streaming"]
    found = json.loads(run(*words, "--budget", "12", "--max-cells", "1", "--lossless", "1000", "--json", code=1).out)
    assert [cell["is_timed"] for cell in found["cells"]] == [True, False]
    assert "over 10 texts of 40 tokens" in found["notes"][-1]
    assert not list((tmp_path / "temporary").iterdir())
    one_text = tmp_path / "one.txt"
    one_text.write_text(" ".join(path.read_text() for path in sorted((folder / "texts").iterdir())))
    found = json.loads(run(*words, "--text", one_text, "--budget", "12", "--max-cells", "1", "--json", code=1).out)
    assert "over 10 texts of 40 tokens" in found["notes"][-1]
    one_text.write_text("w1 " * 200)
    refused = run(*words, "--text", one_text, code=1).err
    assert "1 text, 4 parts of 40 tokens: expected at least 10 such parts (--text)" in refused
    assert "progress" not in refused


@pytest.mark.slow
def test_gate_search_resumes_and_counts_what_it_tried(tmp_path: Path, run) -> None:
    folder = gate_models.write_model(tmp_path)
    settings = {key: value for key, value in gate_models.SETTINGS.items() if not key.startswith("kv_")}
    (folder / "run.json").write_text(json.dumps({**settings, **LIMITS, "generate": 8}))
    words = ["gate", "search", folder / "model", "--text", folder / "texts", "--suite-config", folder / "run.json"]
    words += ["--policy", "streaming", "--budget", "12", "16", "--max-cells", "3", "-o", tmp_path / "o", "-q"]
    found = json.loads(run(*words, "--lossy", "2", "--lossless", "1", "--max-drop", "900%", "--json").out)
    assert [cell["is_timed"] for cell in found["cells"]] == [True, True, True, False]
    assert found["cells"][0]["lossy_ratio"] == pytest.approx(47 / 16, abs=1)
    assert [cell["verdicts"]["lossy"] for cell in found["cells"]] == ["pass"] * 3 + ["not measured"]
    assert found["passed"] == any(all(v == "pass" for v in cell["verdicts"].values()) for cell in found["cells"])
    runs = (tmp_path / "o" / "search-runs.jsonl").read_bytes()
    assert all(cell["texts"] == 10 for cell in found["cells"])
    again = json.loads(run(*words, "--lossy", "9", "--json", code=1).out)
    assert (tmp_path / "o" / "search-runs.jsonl").read_bytes() == runs
    assert again["targets"]["lossy"] == 9
    assert "policies with budgets, 2 in all" in again["notes"][-1]


@pytest.mark.slow
def test_gate_search_more_configurations_than_cells_screens_them_and_keeps_one_of_each_policy(
    tmp_path: Path, run
) -> None:
    folder = gate_models.write_model(tmp_path)
    settings = {key: value for key, value in gate_models.SETTINGS.items() if not key.startswith("kv_")}
    (folder / "run.json").write_text(json.dumps({**settings, **LIMITS, "generate": 8, "repeats": 1}))
    (folder / "texts" / "short.txt").write_text("w1 w2")  # too short to measure, so it is left out
    words = ["gate", "search", folder / "model", "--text", folder / "texts", "--suite-config", folder / "run.json"]
    words += ["--policy", "streaming", "--policy", "keydiff", "--budget", "12", "14", "--max-cells", "4"]
    ended = run(*words, "--lossy", "2", "--lossless", "1000", "--json", code=1)
    cells = json.loads(ended.out)["cells"]
    assert [cell["texts"] for cell in cells] == [10] * 4 + [2] * 4
    assert {cell["configuration"]["policy"] for cell in cells[:4]} == {"streaming", "keydiff"}
    assert all(cell["verdicts"]["perplexity"] == "not measured" for cell in cells[4:])
    plan = "perplexity of 4 configurations on 2 texts of 40 tokens, of 2 on 10; then at most 4 settings (--max-cells)"
    assert plan in ended.err
    assert "without -o DIR nothing of it survives an interruption" in ended.err
