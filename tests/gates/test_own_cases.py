"""Cases of one's own, limits of percentiles, and rounds of which some may fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gate_logs
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
import gate_models

from kvmnn.errors import OptionError
from kvmnn.gates import RUNTIME_CASES, GateLimits, check, read_metric_rows
from kvmnn.gates.suite.cases import CASE_NAMES, build_cases
from kvmnn.gates.suite.measurement import ContentComparison, RunRecord
from kvmnn.gates.suite.results import judge_case
from kvmnn.gates.suite.settings import read_run_config
from kvmnn.gates.suite.suite import CaseMeasurement
from kvmnn.gates.suite.verdict import PairedRuns
from kvmnn.gates.suite.workloads import Workload
from kvmnn.runtime.metrics import LatencySummary


def write_config(folder: Path, document: dict[str, Any]) -> str:
    (folder / "own.json").write_text(json.dumps(document))
    return str(folder / "own.json")


def test_handbook_configuration_ships_with_its_cases() -> None:
    config = read_run_config("handbook-v5", CASE_NAMES)
    cases = {case.name: case for case in build_cases("own", config)}
    assert list(cases) == [
        *("runtime_full_strict", "runtime_store_tuned", "runtime_full_coverage"),
        *("joint_full", "joint_store"),
    ]
    assert {(case.base, case.mode) for case in cases.values()} == {("runtime_full", "full"), ("runtime_store", "store")}
    assert cases["runtime_full_coverage"].engine["kv_lossless_kept_sample_layers"] == 0
    assert (cases["joint_store"].settings.rounds, cases["joint_store"].settings.pass_runs) == (2, 2)
    assert cases["joint_store"].limits == RUNTIME_CASES["runtime_store"]
    assert cases["joint_full"].changed_settings == {"base": "runtime_full", "rounds": 2, "pass_runs": 2}


def test_transform_configuration_ships_with_a_case_of_a_total_ratio() -> None:
    (case,) = build_cases("own", read_run_config("smollm2-transform", CASE_NAMES))
    assert case.is_lossy_codec and case.evicts and case.limits.total_target == 4.36
    assert case.policy_keys["kv_lossless_kl"] == case.engine["kv_lossless_kl"]  # other losses are measured again


def test_case_identity_follows_the_content_of_its_profile_not_the_name(tmp_path: Path) -> None:
    def identify(name: str) -> list[str]:
        (config,) = build_cases("own", read_run_config("smollm2-transform", CASE_NAMES))
        case = replace(config, engine=config.engine | {"kv_lossless_profile": str(tmp_path / name)})
        return [json.dumps(found, sort_keys=True) for found in (case.identity, case.policy_keys)]

    (tmp_path / "a.kvmp").write_bytes(b"first")
    (tmp_path / "b.kvmp").write_bytes(b"first")
    first = identify("a.kvmp")
    assert first == identify("b.kvmp") and not any("a.kvmp" in text for text in first)
    (tmp_path / "a.kvmp").write_bytes(b"second")
    second = identify("a.kvmp")
    assert not set(second) & set(first)
    assert not set(identify("missing.kvmp")) & {*first, *second}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "'mine' is no case; a name of your own needs \"base\", one of runtime_baseline"),
        ({"base": "runtime_ful"}, "'runtime_ful' is no case (did you mean"),
        ({"base": 3}, "3 is no case"),
        ({"base": "runtime_full", "rounds": 2, "pass_runs": 3}, "pass_runs: found 3, expected 0 (all) to rounds, 2"),
        ({"base": "runtime_full", "repeats": "2"}, "repeats"),
    ],
)
def test_read_run_config_damaged_own_cases_are_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        read_run_config(write_config(tmp_path, {"cases": {"mine": entry}}), CASE_NAMES)
    assert said in str(error.value)


def test_read_run_config_own_names_are_folder_names_and_not_the_suites(tmp_path: Path) -> None:
    for name, base, said in (("../x", "runtime_full", "is no name of a case"), ("runtime_store", "runtime_full", "")):
        with pytest.raises(OptionError, match=said or "runtime_store is a case of the suite"):
            read_run_config(write_config(tmp_path, {"cases": {name: {"base": base}}}), CASE_NAMES)


def make_record(p95_us: float, *, speed: float = 10.0) -> RunRecord:
    summary = LatencySummary(count=4, total_us=p95_us, p50_us=p95_us / 2, p95_us=p95_us, p99_us=p95_us, max_us=p95_us)
    names = ("raw_bytes", "compressed_bytes", "decompress_us")
    counters = {f"h2o_lossless_{name}": value for name, value in zip(names, (300.0, 100.0, p95_us), strict=True)}
    return RunRecord(
        prompt_tokens=9,
        decode_tokens=10,
        prefill_seconds=1.0,
        decode_seconds=10 / speed,
        lossy_ratio=4.0,
        held_ratio=1.0,
        encoded_ratio=3.0,
        total_ratio=4.0,
        latencies={"decompress": summary},
        counters=counters,
    )


def make_measurement(tmp_path: Path, latencies: list[list[float]], **entry: Any) -> CaseMeasurement:
    """A case whose only limits are of latencies; `latencies` are p95 of restores, by round."""
    limits = {"max_lossless_decomp_us": -1, "require_runtime_decomp": False, "kv_h2o_enable": False}
    document = {"cases": {"mine": {"base": "runtime_store", **limits, **entry, "rounds": len(latencies)}}}
    (case,) = build_cases("own", read_run_config(write_config(tmp_path, document), CASE_NAMES))
    work = Workload(name="w", bucket="9", turns=((1, 2),), new_tokens=2)
    rounds = tuple(
        tuple(
            PairedRuns(workload=work, without=make_record(1, speed=10 + i / 100), candidate=make_record(value))
            for i, value in enumerate(part)
        )
        for part in latencies
    )
    return CaseMeasurement(case=case, rounds=rounds, comparisons=(), quality=None)


def judge(measured: CaseMeasurement) -> dict[str, Any]:
    judged = judge_case(measured, "model")
    return {gate.name: gate for gate in judged.gates} | {"document": judged.to_dict()}


def test_latency_gates_judge_the_largest_run(tmp_path: Path) -> None:
    measured = make_measurement(
        tmp_path, [[100.0, 900.0]], max_lossless_decomp_p95_us=500, max_lossless_async_wait_p99_us=5
    )
    gates = judge(measured)
    assert (gates["decompression p95"].verdict, gates["decompression p95"].value) == ("fail", "900 us")
    assert gates["async wait p99"].verdict == "pass"  # nothing was waited for
    assert "decompression p50" not in gates
    assert gates["document"]["gate"]["runtime_decomp_p50_us"] == "450.0000"
    idle = replace(make_record(0.0), counters={}, latencies={}, encoded_ratio=None)
    pair = replace(measured.rounds[0][0], candidate=idle)
    assert judge(replace(measured, rounds=((pair, pair),)))["decompression p95"].verdict == "not measured"


@pytest.mark.parametrize(
    ("pass_runs", "verdict", "value"), [(2, "pass", "2 of 3 rounds"), (0, "fail", "2 of 3 rounds")]
)
def test_pass_runs_allow_rounds_to_fail(tmp_path: Path, pass_runs: int, verdict: str, value: str) -> None:
    latencies = [[10.0, 11.0], [10.0, 900.0], [12.0, 11.0]]
    more = {"max_lossless_decomp_p95_us": 500, "pass_runs": pass_runs}
    measured = make_measurement(tmp_path, latencies, **more)
    same = ContentComparison(
        steps=1, compared_steps=1, compared_bytes=9, different_bytes=0, different_steps=0, encoded_bytes=9
    )
    gates = judge(replace(measured, comparisons=(same,)))
    assert (gates["stability"].verdict, gates["stability"].value) == (verdict, value)
    assert gates["decompression p95"].verdict == verdict


def test_check_percentiles_are_not_measured_from_logs(tmp_path: Path) -> None:
    path = tmp_path / "bench.log"
    path.write_text(gate_logs.table(gate_logs.row()))
    for strict in (False, True):
        found = check(read_metric_rows([path]), GateLimits(max_lossless_decomp_p95_us=9), strict=strict)
        (gate,) = [gate for gate in found.gates if gate.name == "decompression p95"]
        assert gate.verdict == "not measured"
        assert found.verdict != "pass"


@pytest.mark.slow
def test_gate_run_own_cases_and_limits(tmp_path: Path, run) -> None:
    folder = gate_models.write_model(tmp_path)
    cases = {"mine": {"base": "runtime_store", "repeats": 1, "prompts": [32]}}
    config = {**gate_models.SETTINGS, "cases": cases}
    path = write_config(tmp_path, config)
    limits = ["--limit", "max_lossless_decomp_p95_us=0.001,max_lossless_async_wait_p99_us=1e9"]
    run("gate", "run", folder / "model", "--suite-config", path, "-o", tmp_path / "o", "-q", *limits, code=1)
    document = json.loads((tmp_path / "o" / "mine" / "gate.json").read_text())
    verdicts = {gate["name"]: gate["verdict"] for gate in document["gates"]}
    assert (verdicts["decompression p95"], verdicts["async wait p99"]) == ("fail", "pass")
    (case,) = json.loads((tmp_path / "o" / "history.jsonl").read_text())["cases"]
    assert case["case"] == "mine"
    assert case["runtime_decomp_p95_us"] > 0.001  # the limit that it missed
    assert case["settings"]["max_lossless_decomp_p95_us"] == 0.001
    assert "restore p95" in run("gate", "history", tmp_path / "o").out
    (row,) = json.loads((tmp_path / "o" / "summary.json").read_text())["rows"]
    assert row["suite"] == "runtime"
    assert row["runtime_decomp_p99_us"] >= row["runtime_decomp_p50_us"] > 0
