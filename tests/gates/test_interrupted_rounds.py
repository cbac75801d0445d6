"""Interrupted rounds over an earlier one: the earlier verdicts never count for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
import gate_models
from hostile_files import quietly
from in_process import measure_in_process

from kvmnn.gates.suite import suite
from kvmnn.gates.summary import collect_cases

pytestmark = pytest.mark.usefixtures("without_workers")  # test_suite.py has rounds with worker processes

PASSING = {"lossy_target": 0.0, "lossless_target": 0.0, "decode_drop_target": 1.0, "max_lossless_queue_peak": -1,
           "require_runtime_decomp": False, "max_lossless_decomp_us": -1, "max_lossless_async_wait_us": -1}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a round of it, with settings A, which passes but for its perplexity; and a copy of both."""
    folder = gate_models.write_model(tmp_path_factory.mktemp("round"), quality_texts=10, limits=PASSING)
    with pytest.MonkeyPatch.context() as patch:
        measure_in_process(patch)
        assert quietly([str(word) for word in command(folder)])[0] == 0
    assert collect_cases(str(folder / "out")).has_passed
    shutil.copytree(folder, folder.with_name("first"))
    return folder


def command(folder: Path) -> list[Any]:
    words = ["gate", "run", folder / "model", "--suite-config", folder / "run.json", "--suite", "runtime"]
    return [*words, "--text", folder / "texts", "-o", folder / "out", "-q"]


@pytest.fixture
def folder(place: Path) -> Path:
    """The model and its round, as they were first, where they were first."""
    shutil.rmtree(place)
    return Path(shutil.copytree(place.with_name("first"), place))


@pytest.fixture
def words(folder: Path) -> list[Any]:
    return command(folder)


def begin_another(folder: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch, run, measured: int) -> None:
    """Settings B, interrupted after `measured` cases."""
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "prompts": [44]}))
    whole = suite.Suite._measure_case

    def interrupted(self: suite.Suite, case: Any, *more: Any) -> Any:
        if len(done) == measured:
            raise KeyboardInterrupt
        done.append(case.name)
        return whole(self, case, *more)

    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(suite.Suite, "_measure_case", interrupted)
        run(*words, code=130)


@pytest.mark.slow
@pytest.mark.parametrize("measured", [0, 3])
def test_interrupted_round_does_not_pass(
    folder: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch, run, measured: int
) -> None:
    begin_another(folder, words, monkeypatch, run, measured)
    out = folder / "out"
    assert json.loads((out / "summary.json").read_text())["overall_pass"] is False
    said = f"NOT FINISHED: {measured} of 4 cases measured, {measured} passed"
    shown = run("gate", "summary", out, code=1).out.splitlines()
    assert shown[0] == said
    assert sum("the round was not finished" in line for line in shown) == 4 - measured
    page = run("report", out, "--markdown").out
    assert f"Round not finished: {measured} of 4 cases measured." in page
    assert page.count("of another round than run.json") == 2 * (4 - measured)
    run(*words)
    assert run("gate", "summary", out).out.startswith("PASS: 4 of 4 cases passed\n")
    assert "Round not finished" not in run("report", out, "--markdown").out


@pytest.mark.slow
def test_interrupted_round_between_any_two_files_does_not_pass(
    folder: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch, run
) -> None:
    """A case whose folder has been begun, and of which only some files are new."""
    begin_another(folder, words, monkeypatch, run, 1)
    old = folder / "out" / "runtime_probe" / "runs.json"
    new = folder / "out" / "runtime_baseline" / "runs.json"
    new.write_text(old.read_text().replace("runtime_probe", "runtime_baseline"))
    page = run("report", folder / "out", "--markdown").out
    assert page.count("of another round than run.json") == 2 * 3 + 1
    (folder / "out" / "runtime_baseline" / "gate.json").unlink()
    assert run("gate", "summary", folder / "out", code=1).out.startswith("NOT FINISHED: 0 of 4")


@pytest.mark.slow
def test_interrupted_round_other_cases_remain(folder: Path, words: list[Any], run) -> None:
    other = [word if word != "runtime" else "llm_demo" for word in words]
    run(*other)
    assert len(collect_cases(str(folder / "out")).rows) == 6
    assert collect_cases(str(folder / "out")).num_unfinished == 0
