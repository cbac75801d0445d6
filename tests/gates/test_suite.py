"""The suite's cases on a tiny decoder, and the files that they write."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
import gate_models

from kvmnn.cli import main
from kvmnn.gates.suite.cases import build_cases
from kvmnn.gates.suite.measurement import compare_contents, measure_run
from kvmnn.gates.suite.settings import RunConfig, read_run_config
from kvmnn.gates.suite.suite import Suite
from kvmnn.gates.suite.workloads import build_synthetic_workloads
from kvmnn.lm import DecoderSession, Runner
from kvmnn.lm.kv_store import LosslessStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder with a model, and a suite of all cases that ran on it."""
    folder = gate_models.write_model(tmp_path_factory.mktemp("suite"))
    words = (
        f"gate run {folder}/model --extra-case multi_turn retrieval --suite-config {folder}/run.json "
        f"--text {folder}/texts"
    )
    code = main([*words.split(), "-o", f"{folder}/out", "-q"])
    return SimpleNamespace(folder=folder, out=folder / "out", words=words.split(), code=code)


def gates(made: SimpleNamespace, case: str) -> dict[str, Any]:
    name = "llm_demo_report.json" if (made.out / case / "llm_demo_report.json").is_file() else "gate.json"
    document = json.loads((made.out / case / name).read_text())
    return {gate["name"]: gate for gate in document["gates"]}


@pytest.mark.slow
def test_suite_writes_a_round(made: SimpleNamespace) -> None:
    assert made.code == 1  # a random decoder cannot be compressed
    summary = json.loads((made.out / "summary.json").read_text())
    assert [row["case"] for row in summary["rows"]] == [
        *("runtime_baseline", "runtime_probe", "runtime_full", "runtime_store"),
        *("llm_demo_full", "llm_demo_store", "multi_turn", "retrieval"),
    ]
    assert summary["rows"][0]["overall_pass"]
    about = json.loads((made.out / "run.json").read_text())
    assert about["cases"]["runtime_store"]["engine"]["kv_lossless_runtime_mode"] == "store"


@pytest.mark.slow
def test_suite_figures_equal_the_measured_runs(made: SimpleNamespace) -> None:
    with (made.out / "runtime_store" / "candidate.csv").open(newline="", encoding="utf-8") as stream:
        (row,) = csv.DictReader(stream)
    shown = gates(made, "runtime_store")
    assert float(row["h2o_lossy"].split()[0]) == float(shown["lossy ratio"]["value"]) > 1
    for case in ("runtime_probe", "runtime_full", "runtime_store"):
        document = json.loads((made.out / case / "gate.json").read_text())
        lines = document["gate"]
        assert {lines["overall_pass"], lines["kv_content_consistency_pass"]} == {"false", "true"}
        assert (lines["decode_pass"] == "true") == (gates(made, case)["decode drop"]["verdict"] == "pass")
        assert f"{float(lines['runtime_decomp_best_us']):,.0f} us" == gates(made, case)["decompression"]["value"]
        assert 1 - float(lines["decode_drop_ratio"]) == pytest.approx(
            float(lines["decode_gate_tps"]) / float(lines["decode_baseline"]), abs=1e-4
        )
    assert row["llm_demo"] == "prompt=40<br>decode=12"
    runs = [json.loads(line)["record"]["value"] for line in (made.out / "runs.jsonl").read_text().splitlines()]
    raw = [run["counters"]["h2o_lossless_raw_bytes"] for run in runs if run.get("counters")]
    assert max(raw) > 0
    (gate,) = {gate["limit"] for gate in gates(made, "runtime_full").values() if gate["name"] == "decode drop"}
    assert gate == "<= 5.00%"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["runtime_probe", "runtime_store", "llm_demo_full", "multi_turn", "retrieval"])
def test_suite_consistency_compares_every_byte(made: SimpleNamespace, case: str) -> None:
    gate = gates(made, case)["consistency"]
    assert (gate["verdict"], gate["value"]) == ("pass", "0 bytes differ")


@pytest.mark.slow
def test_suite_perplexity_gate_has_an_interval(made: SimpleNamespace) -> None:
    gate = gates(made, "runtime_full")["perplexity"]
    assert gate["verdict"] == "pass"
    assert "over 10 texts" in gate["why"]
    assert gates(made, "runtime_baseline")["perplexity"]["verdict"] == "off"


@pytest.mark.slow
def test_suite_unmeasurable_answers_are_not_measured(made: SimpleNamespace) -> None:
    """A random decoder finds no needle, with or without its cache cut."""
    shown = gates(made, "retrieval")
    assert shown["exact answers"]["verdict"] == "not measured"
    assert float(shown["lossy ratio"]["value"]) > 1  # evicted before it was asked


@pytest.mark.slow
def test_suite_same_command_resumes_the_round(made: SimpleNamespace, run) -> None:
    before, past = ((made.out / name).read_bytes() for name in ("runs.jsonl", "history.jsonl"))
    again = run(*made.words, "-o", made.out, "--json", code=1)
    assert (made.out / "runs.jsonl").read_bytes() == before
    assert "runs reused from" in again.err
    entry, old = (json.loads(text) for text in ((made.out / "history.jsonl").read_bytes(), past))
    assert {**entry, "generated_at": ""} == {**old, "generated_at": ""}
    history = run("gate", "history", made.out)
    assert history.out.startswith(f"{made.out}: 1 round\n")
    assert "runtime_store: 0 of 1 passed" in history.out
    document = json.loads(run("gate", "history", made.out, "--json").out)
    assert document["cases"]["runtime_baseline"] == {"rounds": 1, "passed": 1, "reasons": {}}


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_suite_rerun_or_other_settings_are_another_round(made: SimpleNamespace, tmp_path: Path, run) -> None:
    folder = gate_models.write_model(tmp_path)
    words = ["gate", "run", folder / "model", "--suite-config", folder / "run.json", "-o", tmp_path / "out", "-q"]
    for suite in ("runtime", "runtime"):
        run(*words, "--suite", suite, code=1)
    runs = len((tmp_path / "out" / "runs.jsonl").read_text().splitlines())
    run(*words, "--suite", "runtime", "--rerun", code=1)
    timed = runs - 3  # comparisons of contents are not measured again
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == runs + timed
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "kv_h2o_block_tokens": 8, "limits": {"lossy_target": 1}}))
    run(*words, "--suite", "runtime", code=1)
    first, second, third = (json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines())
    assert (first["changed"], second["changed"]) == ([], [])
    assert [entry["take"] for entry in (first, second, third)] == [1, 2, 2]
    assert third["changed"] == [
        "kv_h2o_block_tokens 4 -> 8 (runtime_probe, runtime_full, runtime_store)",
        "lossy_target default -> 1.0 (runtime_probe, runtime_full, runtime_store)",
    ]
    shown = run("gate", "history", tmp_path / "out").out
    assert "       changed: kv_h2o_block_tokens 4 -> 8 (runtime_probe" in shown
    assert " | " in shown and max(map(len, shown.splitlines())) <= 80
    assert shown.count("to the mean before") == 3  # of the baseline; others have no round before under these settings


@pytest.mark.slow
def test_suite_progress_counts_remaining_steps(made: SimpleNamespace, tmp_path: Path) -> None:
    """So that the time left is that of what has yet to run; runs that are there take none."""
    config = read_run_config(made.folder / "run.json", ())
    cases = build_cases("runtime", config)
    told: list[tuple[int, ...]] = []
    ended: list[str] = []
    bar = SimpleNamespace(
        start=lambda runs, steps: told.append((runs, steps)),
        begin_run=lambda what: None,
        advance=lambda steps: told.append((steps,)),
        end_run=lambda: ended.append(""),
    )
    for expected in (12 * (4 * 4 + 3 * 2) + 3 * 200, 3 * 200):  # runs, comparisons, perplexity
        told.clear()
        ended.clear()
        with Suite(
            str(made.folder / "model"),
            str(tmp_path),
            settings=config.settings,
            texts=[str(made.folder / "texts")],
            jobs=0,
        ) as suite:
            list(suite.measure_cases(cases, bar))
        assert told[0] == (4 * 4 + 3 + 3, expected)
        assert (len(ended), sum(steps for (steps,) in told[1:])) == told[0]


def test_run_store_damaged_line_is_run_again(made: SimpleNamespace, tmp_path: Path) -> None:
    from kvmnn.gates.suite.suite import RunStore

    lines = (made.out / "runs.jsonl").read_text().splitlines()
    damaged = [lines[0][:-9], lines[1].replace("0", "1", 1), "[]", *lines[2:]]
    (tmp_path / "runs.jsonl").write_text("\n".join(damaged) + "\n")
    with RunStore(tmp_path / "runs.jsonl") as store:
        kept = [store.get(json.loads(line)["record"]["key"]) is not None for line in lines]
    assert kept[:2] == [False, False]
    assert all(kept[2:])
    assert store.num_reused == len(lines) - 2


@pytest.mark.parametrize("bos", [None, 7])
def test_build_synthetic_workloads_have_the_requested_length(made: SimpleNamespace, bos: int | None) -> None:
    settings = read_run_config(made.folder / "run.json", ()).settings
    (work,) = build_synthetic_workloads(settings, 48, bos)
    assert (work.name, work.prompts) == ("synthetic_40", "synthetic")
    (turn,) = work.turns
    assert len(turn) == settings.prompts[0] and work.bucket == str(settings.prompts[0])
    assert (turn[0], set(turn[1:])) == (settings.token if bos is None else bos, {settings.token})


def test_gate_run_invalid_suite_config_is_refused(made: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.json").write_text('{"no_such_setting": 1}')
    words = [*made.words[: made.words.index("--suite-config")], "--suite-config", str(tmp_path / "run.json")]
    assert main([*words, "-o", str(tmp_path / "out")]) == 2
    assert "no_such_setting" in capsys.readouterr().err


def test_compare_contents_detects_changed_byte(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_run_config(made.folder / "run.json", ())
    case = next(case for case in build_cases("runtime", config) if case.mode == "store")
    session = DecoderSession.open(made.folder / "model", attentions=True)
    (work,) = build_synthetic_workloads(case.settings, 48, None)
    assert compare_contents(session, case.policy, case.lossless, work).is_equal
    past = LosslessStore.get_past

    def flipped(self: LosslessStore) -> list[Any]:
        layers = past(self)
        if layers[0][0].size:
            layers[0][0].view(np.uint8).flat[0] ^= 1
        return layers

    monkeypatch.setattr(LosslessStore, "get_past", flipped)
    found = compare_contents(session, case.policy, case.lossless, work)
    assert not found.is_equal
    assert found.different_bytes > 0


def test_measure_run_equals_a_plain_runner(made: SimpleNamespace) -> None:
    case = build_cases("runtime", read_run_config(made.folder / "run.json", ()))[0]
    session = DecoderSession.open(made.folder / "model")
    (work,) = build_synthetic_workloads(case.settings, 48, None)
    record = measure_run(session, case.policy, None, work)
    runner = Runner(session)
    new = [int(runner.step(work.turns[0], end_chunk=True)[-1].argmax())]
    while len(new) < work.new_tokens:
        new.append(int(runner.step(new[-1:])[-1].argmax()))
    assert record.new_ids == tuple(new)
    assert (record.lossy_ratio, record.prompt_tokens, record.decode_tokens) == (1.0, 40, 11)


# -- options ----------------------------------------------------------------------------------------------------------


def test_build_cases_sweeps_are_a_product_in_fork_order(made: SimpleNamespace) -> None:
    config = read_run_config(made.folder / "run.json", ())
    names = [case.name for case in build_cases("runtime", config, (), ["block=4,8", "keep=0.3,0.5"])]  # keep goes first
    assert names[:4] == [
        "runtime_baseline",
        *(f"runtime_{mode}+keep=0.3+block=4" for mode in ("probe", "full", "store")),
    ]
    assert names[4:7] == [f"runtime_{mode}+keep=0.3+block=8" for mode in ("probe", "full", "store")]
    assert len(names) == 13
    (case,) = build_cases("runtime", config, (), ["keep=0.3"])[1:2]
    assert (case.engine["kv_h2o_target_mode"], case.policy.target_keep_ratio) == ("static", 0.3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-o x --sweep block=", "Empty sweep dimension"),
        ("-o x --sweep colour=1", "expected NAME=VALUE,... with NAME one of prompts, gens, keep"),
        ("-o x --sweep block=many", "'many' is no number"),
        ("-o x --sweep block=1 block=2", "is given twice"),
        ("-o x --sweep alpha=nan", "'nan' is no number"),
        ("", "needs -o DIR"),
        ("-o x", "llm_demo_full needs texts: expected --text DIR or FILE (--suite runtime needs none)"),
        ("-o x --sweep block=0", "kv_h2o_block_tokens (block): found 0, for which the engine takes 1"),
        ("-o x --sweep keep=2", "kv_h2o_target_keep_ratio (keep): found 2, for which the engine takes 1"),
        ("-o x --sweep keep=-1", "(keep): found -1, for which the engine takes 0"),
        ("-o x --sweep lossy=0.5", "kv_h2o_target_lossy_ratio (lossy): found 0.5, for which the engine takes 1"),
        ("-o x --sweep recent=-1", "(recent): found -1, for which the engine takes 0"),
        ("-o x --strict", "--strict says nothing to gate run"),
        ("-o x --limit decode_baseline=3", "--limit decode_baseline says nothing to gate run"),
        ("-o x --suite some", "invalid choice"),
    ],
)
def test_gate_run_invalid_arguments_are_refused(made: SimpleNamespace, run, words: str, said: str) -> None:
    assert said in run("gate", "run", made.folder / "model", *words.split(), code=2).err


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"promts": [1]}, "'promts' is no setting (did you mean 'prompts'?)"),
        ({"prompts": []}, "prompts: found ()"),
        ({"prompts": [10**9]}, "expected 1 to 64 numbers"),
        ({"generate": 1}, "expected at least 2"),
        ({"quality_tokens": 160}, "quality_prompt: found 640, expected 0 to less than quality_tokens, 160"),
        ({"token": -1}, "run.json: token: found -1, expected at least 0"),
        ({"seed": -2}, "run.json: seed: found -2, expected at least 0"),
        ({"kv_h2o_block_tokens": 0}, "kv_h2o_block_tokens (block): found 0, for which the engine takes 1"),
        ({"generate": "8"}, "generate: found '8', expected a whole number"),
        ({"cases": {"runtime_stor": {}}}, "'runtime_stor' is no case"),
        ({"cases": {"runtime_store": {"lossy_targt": 1}}}, "'lossy_targt' is no limit"),
        ({"limits": {"lossy_target": "x"}}, "expected a number"),
        ({"kv_h2o_block_token": 8}, "kv_h2o_block_token"),
        ({"kv_lossless_block_tokens": "x"}, "kv_lossless_block_tokens"),
        ({"kv_lossless_runtime_mode": "stoer"}, "runtime_probe: kv_lossless_runtime_mode: found 'stoer', but the case"),
        ({"kv_lossless_runtime_mode": "store"}, "runtime_probe: kv_lossless_runtime_mode: found 'store', but the case"),
        (
            {"cases": {"runtime_store": {"kv_lossless_runtime_mode": "full"}}},
            "runtime_store: kv_lossless_runtime_mode: found 'full', but the case measures 'store'",
        ),
    ],
)
def test_gate_run_damaged_settings_are_refused(
    made: SimpleNamespace, tmp_path: Path, run, document: dict[str, Any], said: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    found = run(
        "gate", "run", made.folder / "model", "--suite-config", tmp_path / "run.json", "-o", tmp_path / "o", code=2
    )
    assert said in found.err
    assert len(found.err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_gate_run_unusable_inputs_are_refused(made: SimpleNamespace, tmp_path: Path, run) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    model = made.folder / "model"
    for words, said in (
        (["run", model, "--suite", "runtime", "-o", tmp_path / "mine"], "holds something else"),
        (["run", tmp_path / "none", "--suite", "runtime", "-o", tmp_path / "o"], "none"),
        (["history", tmp_path], "has no history.jsonl"),
    ):
        found = run("gate", *words, code=1)
        assert said in found.err
        assert len(found.err.splitlines()) == 1


def test_build_cases_common_limits_skip_the_baseline() -> None:
    """Nothing is compressed in it, so a lossy ratio of all cases does not apply to it."""
    config = RunConfig(limits={"lossy_target": 2.0}, cases={"runtime_baseline": {"decode_drop_target": 0.5}})
    targets = {case.name: case.limits.lossy_target for case in build_cases("all", config)}
    assert targets.pop("runtime_baseline") == 1.0
    assert set(targets.values()) == {2.0}
    assert build_cases("runtime", config)[0].limits.decode_drop_target == 0.5


def test_build_cases_of_each_suite() -> None:
    config = RunConfig()
    assert len(build_cases("all", config)) == 6
    store = next(case for case in build_cases("llm_demo", config) if case.name == "llm_demo_store")
    assert (store.engine["kv_lossless_max_queue"], store.limits.decode_drop_target) == (64, 0.08)


@pytest.mark.parametrize(
    ("action", "there", "not_there"),
    [
        (
            "parse",
            ["--strict", "-o, --output"],
            ["--suite", "--baseline", "--run-order", "--limit", "--json FILE"],
        ),
        ("check", ["--baseline CSV", "--case", "decode_baseline=X"], ["--suite", "--run-order", "--sweep"]),
        ("demo", ["--run-order", "--without"], ["--sweep", "--baseline-key"]),
        ("run", ["--suite", "--sweep", "kvmnn gate run model/"], ["--run-order", "--baseline", "kvmnn gate check"]),
        ("history", ["the rounds of a folder"], ["--suite", "--baseline", "--case"]),
    ],
)
def test_gate_help_lists_only_options_of_the_action(run, action: str, there: list[str], not_there: list[str]) -> None:
    shown = run("gate", action, "--help-all").out
    assert [text for text in there if text not in shown] == []
    assert [text for text in not_there if text in shown] == []
    assert shown.startswith(f"usage: kvmnn gate [options] {action} IN")
    assert len(shown) < len(run("gate", "--help-all").out)
