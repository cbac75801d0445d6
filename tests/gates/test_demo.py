"""The gate of real prompts: which runs count, every part of the verdict, and files of a round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gate_logs
import pytest

from kvmnn.errors import KvmnnError, SourceError
from kvmnn.gates import DemoLimits, DemoResult, check, check_demo, collect_cases, read_demo_runs, read_metric_rows
from kvmnn.gates.demo import order_buckets, parse_bucket
from kvmnn.gates.limits import RUNTIME_CASES
from kvmnn.gates.summary import find_failure_reason, save_case_result

PRINTED = "prompt tokens num = 128\ndecode tokens num = 512\nprefill time = 2.00 s\ndecode time = 100.00 s\n"
STRICT = DemoLimits(lossy_target=3.0, lossless_target=1.3)


def sides(folder: Path, **candidate: Any) -> tuple[Path, Path]:
    names = ("run_prompt_128_1", "run_prompt_512_1")
    slow = gate_logs.record(decode_us=100_000_000)
    without = gate_logs.write_demo(folder / "without", dict.fromkeys(names, slow))
    return without, gate_logs.write_demo(folder / "with", dict.fromkeys(names, gate_logs.record(**candidate)))


def judged(folder: Path, limits: DemoLimits | None = None, **candidate: Any) -> DemoResult:
    without, compressed = sides(folder, **candidate)
    return check_demo(
        read_demo_runs(without), read_demo_runs(compressed), limits or DemoLimits(), case="llm_demo_store"
    )


def verdicts(made: DemoResult) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in made.gates}


def test_check_demo_sixth_round_passes_without_ratios(tmp_path: Path) -> None:
    made = judged(tmp_path)
    assert made.verdict == "pass"
    assert made.candidate.decode_speed == pytest.approx(512 / 90)
    assert made.drop_ratio == pytest.approx(-1 / 9)
    assert made.candidate.total_ratio == pytest.approx(2.903 * 1.269)
    assert [bucket.name for bucket in made.buckets] == ["128", "512"]


def test_check_demo_strict_requires_ratios(tmp_path: Path) -> None:
    made = judged(tmp_path, STRICT)
    assert verdicts(made)["lossy ratio"] == verdicts(made)["lossless ratio"] == "fail"
    passing = judged(tmp_path / "2", STRICT, h2o_lossy_ratio=3.1, h2o_lossless_ratio=1.4)
    assert passing.verdict == "pass"
    without = judged(tmp_path / "3", STRICT, h2o_lossy_ratio=3.1, h2o_lossless_ratio=0)
    assert without.verdict == "not measured"


@pytest.mark.parametrize(
    ("name", "limits", "candidate"),
    [
        ("decode drop", {}, {"decode_us": 120_000_000}),
        ("buckets", {}, {"decode_us": 120_000_000}),
        ("decompression", {}, {"h2o_lossless_decompress_us": 0}),
        ("cache hits", {"require_decode_cache_hit": True}, {"h2o_lossless_decode_cache_hit": 0}),
        ("candidate runs", {}, {"prefill_us": 0}),
    ],
)
def test_check_demo_each_gate_can_fail(
    tmp_path: Path, name: str, limits: dict[str, bool], candidate: dict[str, Any]
) -> None:
    made = judged(tmp_path, DemoLimits(**limits), **candidate)
    assert verdicts(made)[name] == "fail"
    assert not made.has_passed


def test_check_demo_missing_baseline_fails_unless_relaxed(tmp_path: Path) -> None:
    runs = read_demo_runs(sides(tmp_path)[1])
    silent = read_demo_runs(gate_logs.write_demo(tmp_path / "x", {"prompt_128_1": gate_logs.record(decode_us=0)}))
    assert verdicts(check_demo(silent, runs, DemoLimits()))["decode drop"] == "fail"
    relaxed = DemoLimits(require_decode_baseline=False, require_bucket_decode_pass=False)
    made = check_demo(silent, runs, relaxed)
    assert (made.verdict, made.drop_ratio) == ("pass", 1.0)


def test_check_demo_buckets_need_equal_run_counts(tmp_path: Path) -> None:
    without, compressed = sides(tmp_path)
    fewer = read_demo_runs(compressed)[:1]
    made = check_demo(read_demo_runs(without), fewer, DemoLimits())
    assert [(bucket.name, bucket.has_passed) for bucket in made.buckets] == [("128", True), ("512", False)]
    assert verdicts(made)["buckets"] == "fail"


def test_order_buckets_by_length_from_file_names() -> None:
    assert [parse_bucket(name) for name in ("prompt_128_1", "x_PROMPT_2048_12.txt", "prompt_a_1", "y")] == [
        *("128", "2048", "other", "other"),
    ]
    assert order_buckets(["2048", "other", "128", "512"], ["512", "64"]) == ["512", "128", "2048", "other"]


@pytest.mark.parametrize(
    ("record", "printed", "reason", "speed"),
    [
        (gate_logs.record(), PRINTED, "ok", 512 / 90),
        ({}, PRINTED, "ok", 5.12),
        (gate_logs.record(decode_us=0, decode_tokens=0), PRINTED, "ok", 5.12),
        ({}, "", "missing_summary_metrics", 0),
        (gate_logs.record(), "LLM init error", "llm_init_error", 512 / 90),
        (gate_logs.record(prompt_tokens="x"), "", "missing_summary_metrics", 512 / 90),
    ],
)
def test_read_demo_runs_status_and_speed_of_runs(
    tmp_path: Path, record: dict[str, Any], printed: str, reason: str, speed: float
) -> None:
    folder = gate_logs.write_demo(tmp_path / "runs", {"prompt_128_1": record}, {"prompt_128_1": printed})
    (run,) = read_demo_runs(folder)
    assert (run.reason, run.return_code == 0) == (reason, reason == "ok")
    assert run.decode_speed == pytest.approx(speed)


def test_read_demo_runs_accepts_fork_runner_records(tmp_path: Path) -> None:
    noted = {"prompt_file": "p/prompt_512_2.txt", "prompt_bucket": "512", "effective_returncode": 0}
    noted |= {"status_reason": "ok", "decode_tokens": 512, "decode_s": 90.0, "h2o_metrics": gate_logs.record()}
    failed = noted | {"effective_returncode": -11, "status_reason": "signal_11", "h2o_metrics": None}
    (tmp_path / "candidate_runs.jsonl").write_text(json.dumps(noted) + "\n" + json.dumps(failed) + "\n")
    good, bad = read_demo_runs(tmp_path)
    assert (good.bucket, good.return_code, good.get_metric("h2o_lossy_ratio")) == ("512", 0, 2.903)
    assert (bad.return_code, bad.get_metric("h2o_lossy_ratio")) == (-11, 0)
    made = check_demo([good], [bad], DemoLimits())
    assert made.failures == ("candidate prompt_512_2: signal_11 (-11)",)
    (tmp_path / "candidate_runs.jsonl").write_text(json.dumps(noted))
    assert [run.bucket for run in read_demo_runs(tmp_path)] == ["512"]
    (tmp_path / "baseline_runs.jsonl").write_text("{}")
    with pytest.raises(SourceError, match="expected one of them"):
        read_demo_runs(tmp_path)


def test_read_demo_runs_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no runs of llm_demo"):
        read_demo_runs(tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        read_demo_runs(tmp_path / "x")


# -- rounds -----------------------------------------------------------------------------------------------------------

RUNTIME_KEYS = """
suite case mode return_code summary_exists quality_gate_found failure_reason overall_pass summary
console_log quality_status lossy_best lossless_selected_value decode_aggregation decode_gate_tps decode_best
decode_baseline decode_drop_ratio decode_drop_target runtime_decomp_best_us runtime_async_wait_best_us
runtime_async_wait_headroom_us runtime_async_wait_headroom_ratio runtime_async_wait_headroom_warn
runtime_queue_peak_best runtime_fallback_best runtime_backpressure_skip_best runtime_decode_cache_hit_best
runtime_decode_cache_miss_best kv_content_consistency_pass kv_invalid_log_count
"""
DEMO_KEYS = """
suite case mode return_code failure_reason overall_pass summary report_json console_log
baseline_decode_tps_avg candidate_decode_tps_avg decode_drop_ratio decode_drop_target candidate_lossy_ratio_avg
candidate_lossless_ratio_avg candidate_runtime_total_ratio_avg runtime_decomp_best_us decode_cache_hit_best
decode_pass run_order
"""


def test_save_case_result_round_accumulates_cases(tmp_path: Path) -> None:
    folder = str(tmp_path / "round")
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row())
    limits = RUNTIME_CASES["runtime_store"]
    passing = check(read_metric_rows([log]), limits, case="runtime_store", logs=[tmp_path / "logs"])
    assert save_case_result(folder, passing).has_passed
    made = save_case_result(folder, judged(tmp_path, STRICT))
    document = json.loads((tmp_path / "round" / "summary.json").read_text())
    assert document == made.to_dict()
    assert list(document) == [
        *("generated_at", "overall_pass", "total_cases", "runtime_cases", "llm_demo_cases", "rows"),
    ]
    assert [document[key] for key in list(document)[1:5]] == [False, 2, 1, 1]
    runtime, demo = document["rows"]
    assert list(runtime) == RUNTIME_KEYS.split()
    assert list(demo) == DEMO_KEYS.split()
    assert (runtime["lossy_best"], runtime["decode_gate_tps"], runtime["overall_pass"]) == (3.114, 5.9, True)
    assert (demo["overall_pass"], demo["failure_reason"]) == (False, "lossy ratio fail, lossless ratio fail")
    lines = (tmp_path / "round" / "cases.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == document["rows"]
    summary = (tmp_path / "round" / "summary.md").read_text()
    assert "1. case=runtime_store, mode=store, pass=true, rc=0, decode=5.9000/0.0000(avg)" in summary
    assert "1. case=llm_demo_store, mode=store, pass=false" in summary
    with pytest.raises(KvmnnError, match="exists already"):
        save_case_result(folder, passing)
    save_case_result(folder, passing, force=True)


def test_save_case_result_strict_verdict_fails_the_row(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path / "logs", gate_logs.row())
    made = check(read_metric_rows([log]), RUNTIME_CASES["runtime_store"], case="runtime_store", strict=True)
    (row,) = save_case_result(str(tmp_path / "round"), made).rows
    assert (row["overall_pass"], row["quality_status"]) == (False, "PASS")
    assert row["failure_reason"] == "decode drop not measured, consistency not measured"


def test_collect_cases_reads_fork_folders(tmp_path: Path) -> None:
    for case, text in (
        (
            "runtime_full",
            "## Quality Gate\n\n- quality_status: FAIL\n- lossy_best: 3.1\n- overall_pass: false\n## More\n- a: b\n",
        ),
        ("runtime_probe", "# no section\n"),
        ("runtime_store", "## Quality Gate\n- runtime_mode: store\n- overall_pass: true\n"),
    ):
        (tmp_path / case).mkdir()
        (tmp_path / case / "summary.md").write_text(text)
    (tmp_path / "runtime_baseline.console.log").write_text("start\n  FAIL: LLM_BENCH not executable: x\nbye\n")
    (tmp_path / "llm_demo_full").mkdir()
    (tmp_path / "llm_demo_full" / "llm_demo_report.json").write_text(
        '{"overall_pass": true, "decode_drop_ratio": -0.2}'
    )
    made = collect_cases(str(tmp_path))
    assert [(row["case"], row["overall_pass"], row["failure_reason"]) for row in made.rows] == [
        ("runtime_baseline", False, "FAIL: LLM_BENCH not executable: x"),
        ("runtime_probe", False, "quality gate section missing"),
        ("runtime_full", False, "quality gate failed: status=FAIL"),
        ("runtime_store", True, ""),
        ("llm_demo_full", True, ""),
    ]
    assert made.rows[2]["lossy_best"] == 3.1
    assert made.rows[0]["return_code"] == 1
    assert made.rows[4]["decode_drop_ratio"] == -0.2


def test_find_failure_reason_prefers_error_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    for text, said in (("a\nerror: x\nb\n\n", "error: x"), ("a\n b \n\n", "b"), ("", "unknown failure")):
        log.write_text(text)
        assert find_failure_reason(str(log)) == said
    log.write_text("error: early\n" + "line\n" * 300)
    assert find_failure_reason(str(log)) == "line"


def test_collect_cases_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no case"):
        collect_cases(str(tmp_path))
    with pytest.raises(SourceError, match="does not exist"):
        collect_cases(str(tmp_path / "x"))
