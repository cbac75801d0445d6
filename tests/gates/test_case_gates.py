"""Gates over runs of a model: each has a run that fails it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvmnn.evaluation.task_items import TaskItem
from kvmnn.evaluation.task_result import TaskScore
from kvmnn.gates.analysis import DecodeStats
from kvmnn.gates.limits import RUNTIME_CASES
from kvmnn.gates.suite.history import build_history_entry
from kvmnn.gates.suite.measurement import ContentComparison, PerplexityChange, RunRecord, explain_no_eviction
from kvmnn.gates.suite.settings import DEFAULT_ENGINE_OPTIONS, RunSettings
from kvmnn.gates.suite.verdict import (
    CaseFigures,
    PairedRuns,
    build_answer_gate,
    build_bench_rows,
    build_case_gates,
    build_demo_runs,
    build_gate_section,
    build_lossless_gate,
)
from kvmnn.gates.suite.workloads import Workload
from kvmnn.gates.summary import RoundSummary, build_runtime_row
from kvmnn.gates.verdict import GateResult
from kvmnn.policies.h2o_blocks import H2OEngine

COUNTERS = {
    "h2o_lossless_raw_bytes": 4000.0,
    "h2o_lossless_compressed_bytes": 3000.0,
    "h2o_lossless_decompress_us": 500.0,
    "h2o_lossless_decode_cache_hit": 3.0,
}
WORK = Workload(name="w", bucket="8", turns=((1, 2),), new_tokens=11, answer=(7, 8))
PLAIN = RunRecord(
    prompt_tokens=2, decode_tokens=10, prefill_seconds=1, decode_seconds=1, lossy_ratio=1, held_ratio=1,
    encoded_ratio=None, total_ratio=1, new_ids=(7, 8, 9),
)  # fmt: skip
GOOD = replace(PLAIN, lossy_ratio=3.1, encoded_ratio=1.33, counters=COUNTERS)
EQUAL = ContentComparison(
    steps=10, compared_steps=2, compared_bytes=100, different_bytes=0, different_steps=0, encoded_bytes=50
)
QUALITY = PerplexityChange(mean=0.01, low=0.0, high=0.03, texts=10, tokens=1000, lossy_ratio=1.5)


def judge(
    record: RunRecord = GOOD, comparison: Any = EQUAL, quality: Any = QUALITY, **limits: Any
) -> dict[str, GateResult]:
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=record)] * 2
    store = RUNTIME_CASES["runtime_store"].with_values(limits, "test")
    compared = [] if comparison is None else [comparison]
    return {gate.name: gate for gate in build_case_gates(pairs, compared, quality, store, "store", RunSettings())}


def verdicts(*arguments: Any, **options: Any) -> dict[str, str]:
    return {name: gate.verdict for name, gate in judge(*arguments, **options).items()}


def counters(**changed: float) -> RunRecord:
    return replace(GOOD, counters=COUNTERS | {f"h2o_lossless_{name}": value for name, value in changed.items()})


def test_case_gates_good_run_passes() -> None:
    assert set(verdicts().values()) == {"pass", "off"}


def test_case_gates_idle_runtime_is_not_measured() -> None:
    """Its waits, queues and fallbacks are 0, and two plain caches are equal: none of it was measured."""
    idle = replace(GOOD, encoded_ratio=None, counters=dict.fromkeys(COUNTERS, 0.0))
    found = verdicts(idle, replace(EQUAL, encoded_bytes=0), require_decode_cache_hit=True)
    names = ("lossless ratio", "decompression", "async wait", "queue peak", "fallbacks", "cache hits", "consistency")
    assert {name: found[name] for name in names} == dict.fromkeys(names, "not measured")
    assert verdicts(idle, replace(EQUAL, encoded_bytes=0, different_bytes=1))["consistency"] == "fail"


def test_perplexity_gate_without_planner_is_off() -> None:
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=GOOD)] * 2
    store = RUNTIME_CASES["runtime_store"]
    found = {
        gate.name: gate for gate in build_case_gates(pairs, [EQUAL], None, store, "store", RunSettings(), evicts=False)
    }
    assert (found["perplexity"].verdict, found["perplexity"].why) == ("off", "nothing is evicted")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lossy ratio", {"record": replace(GOOD, lossy_ratio=2.9)}),
        ("lossless ratio", {"record": counters(compressed_bytes=3200)}),
        ("decode drop", {"record": replace(GOOD, decode_seconds=1.1)}),
        ("decompression", {"record": counters(decompress_us=0)}),
        ("decompression", {"record": counters(decompress_us=70001)}),
        ("async wait", {"record": counters(async_wait_us=40001)}),
        ("queue peak", {"record": counters(queue_depth_peak=9)}),
        ("fallbacks", {"record": counters(fallback_count=1)}),
        ("skips", {"record": counters(backpressure_skip_count=1), "max_lossless_backpressure_skip": 0}),
        ("cache hits", {"record": counters(decode_cache_hit=0), "require_decode_cache_hit": True}),
        ("consistency", {"comparison": replace(EQUAL, different_bytes=1)}),
        ("consistency", {"comparison": replace(EQUAL, different_steps=1)}),
        ("perplexity", {"quality": replace(QUALITY, high=0.051)}),
    ],
)
def test_case_gates_each_gate_can_fail(name: str, change: dict[str, Any]) -> None:
    found = verdicts(**change)
    assert [gate for gate, verdict in found.items() if verdict not in ("pass", "off")] == [name]
    assert found[name] == "fail"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lossless ratio", {"record": counters(raw_bytes=0, compressed_bytes=0)}),
        ("consistency", {"comparison": None}),
        ("consistency", {"comparison": replace(EQUAL, encoded_bytes=0)}),
        ("perplexity", {"quality": None}),
        ("perplexity", {"quality": replace(QUALITY, lossy_ratio=1.0)}),
        ("perplexity", {"quality": replace(QUALITY, low=None, high=None, texts=1)}),
        ("perplexity", {"quality": replace(QUALITY, texts=9)}),
    ],
)
def test_case_gates_missing_measurement_is_not_measured(name: str, change: dict[str, Any]) -> None:
    gate = judge(**change)[name]
    assert (gate.verdict, gate.value) == ("not measured", "")
    assert gate.why


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [((7, 8), (7, 8, 1), "pass"), ((7, 8), (7, 9), "fail"), ((1, 8), (7, 8), "not measured")],
)
def test_answer_gate_compares_exact_answers(before: tuple[int, ...], after: tuple[int, ...], verdict: str) -> None:
    pair = PairedRuns(workload=WORK, without=replace(PLAIN, new_ids=before), candidate=replace(GOOD, new_ids=after))
    gate = build_answer_gate([pair])
    assert gate is not None
    assert (gate.verdict, bool(gate.value)) == (verdict, verdict != "not measured")
    assert build_answer_gate([replace(pair, workload=replace(WORK, answer=()))]) is None


def test_case_gates_report_workloads_without_encoding() -> None:
    idle = PairedRuns(workload=replace(WORK, name="short"), without=PLAIN, candidate=replace(GOOD, counters={}))
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=GOOD), idle]
    comparisons = [EQUAL, replace(EQUAL, encoded_bytes=0)]
    found = {
        gate.name: gate
        for gate in build_case_gates(
            pairs, comparisons, QUALITY, RUNTIME_CASES["runtime_store"], "store", RunSettings(perplexity_target=1)
        )
    }
    for name in ("lossless ratio", "consistency"):
        assert found[name].verdict == "pass"
        assert found[name].why.endswith("nothing was encoded in 1 of 2 prompts")


def test_case_summary_has_the_figures_of_the_gates() -> None:
    """The fork's section has the figures of the gates, and no line for figures that were not measured."""
    slow = replace(GOOD, decode_seconds=2, counters=COUNTERS | {"h2o_lossless_queue_depth_peak": 9.0})
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=record) for record in (GOOD, slow)]
    limits = RUNTIME_CASES["runtime_store"]
    gates = build_case_gates(pairs, [EQUAL], QUALITY, limits, "store", RunSettings())
    rows = build_bench_rows(SimpleNamespace(name="c", settings=SimpleNamespace(threads=1)), pairs, "m")  # type: ignore[arg-type]
    lines = build_gate_section(
        CaseFigures.from_pairs(pairs), DecodeStats.from_rows(rows.rows, "avg"), gates, limits, "store"
    )
    assert (lines["runtime_queue_peak_best"], lines["runtime_queue_peak_pass"]) == ("9.0000", "false")  # not their mean
    assert (lines["lossy_best"], lines["kv_content_consistency_pass"]) == ("3.1000", "true")
    assert (lines["decode_gate_tps"], lines["decode_baseline"], lines["decode_drop_ratio"]) == (
        "7.5000",
        "10.0000",
        "0.250000",
    )
    assert (lines["decode_pass"], lines["overall_pass"], lines["quality_status"]) == ("false", "false", "FAIL")
    assert not [name for name in lines if name.startswith(("kv_invalid", "kv_restore", "runtime_metric"))]
    row = build_runtime_row("c", "store", lines, passed=False, failure="x")
    assert (row["decode_drop_ratio"], row["kv_invalid_log_count"]) == (0.25, None)
    assert (
        build_runtime_row("c", "store", {"overall_pass": "false"}, passed=False, failure="")["kv_invalid_log_count"]
        == 0
    )


@pytest.mark.parametrize(
    ("prompt", "tokens", "said"),
    [
        (440, 480, "159 of 479 tokens where 137 are to stay: lower block_tokens (32), or quality_tokens above 480"),
        (200, 300, "it plans from trigger_min_tokens 384 on, there are 299: lower it, or quality_tokens above 480"),
        (608, 609, "too few steps for a plan: 1 token after the prompt"),
    ],
)
def test_explain_no_eviction_names_option_to_change(prompt: int, tokens: int, said: str) -> None:
    settings = RunSettings(quality_prompt=prompt, quality_tokens=tokens)
    reason = explain_no_eviction(H2OEngine.from_engine(DEFAULT_ENGINE_OPTIONS), settings)
    assert said in reason
    gate = {
        gate.name: gate
        for gate in build_case_gates(
            [PairedRuns(workload=WORK, without=PLAIN, candidate=GOOD)] * 2,
            [EQUAL],
            replace(QUALITY, lossy_ratio=1.0, why_all_stay=reason),
            RUNTIME_CASES["runtime_store"],
            "store",
            RunSettings(),
        )
    }["perplexity"]
    assert gate.why == f"nothing was evicted in the texts: {reason}"


def test_case_summary_omits_unmeasured_figures() -> None:
    """Not in the section, not in the row of the round, not in its line: 0 would be a figure."""
    idle = replace(GOOD, encoded_ratio=None, counters=dict.fromkeys(COUNTERS, 0.0))
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=idle)] * 2
    limits = RUNTIME_CASES["runtime_store"]
    case = SimpleNamespace(name="c", kind="runtime", mode="store", settings=RunSettings())
    gates = build_case_gates(pairs, [replace(EQUAL, encoded_bytes=0)], None, limits, "store", RunSettings())
    decode = DecodeStats.from_rows(build_bench_rows(case, pairs, "m").rows, "avg")  # type: ignore[arg-type]
    row = build_runtime_row(
        "c",
        "store",
        build_gate_section(CaseFigures.from_pairs(pairs), decode, gates, limits, "store"),
        passed=False,
        failure="x",
    )
    names = ["lossless_selected_value", "kv_content_consistency_pass", "runtime_async_wait_headroom_warn"]
    names += [name for name in row if name.startswith("runtime_")]
    assert {name: row[name] for name in names} == dict.fromkeys(names)
    made = RoundSummary.from_rows("d", [row])
    line = next(line for line in made.to_markdown().splitlines() if line.startswith("1. case=c"))
    for name in (
        "lossless",
        "decomp_us",
        "async_wait_us",
        "async_wait_headroom",
        "queue",
        "fallback",
        "kv_consistency",
    ):
        assert f" {name}=-," in line, name
    (past,) = build_history_entry(made, 1, {}, {})["cases"]
    assert (past["lossless"], past["lossy"]) == (None, 3.1)


@pytest.mark.parametrize(("compressed", "shown"), [(4000 / 1.29999, "1.29999"), (4000 / 1.3, "1.300"), (3000, "1.333")])
def test_lossless_gate_value_near_limit_has_enough_digits(compressed: float, shown: str) -> None:
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=counters(compressed_bytes=compressed))]
    gate = build_lossless_gate(CaseFigures.from_pairs(pairs), 1.3, "store")
    assert gate.value == shown
    assert (float(gate.value) >= float(gate.limit.split()[1])) is (gate.verdict == "pass")


@pytest.mark.parametrize("wait", [40000.0, 40000.4, 39999.7, 50000.0])
def test_async_wait_gate_value_near_limit_has_enough_digits(wait: float) -> None:
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=counters(async_wait_us=wait))]
    gates = build_case_gates(pairs, [EQUAL], None, RUNTIME_CASES["runtime_store"], "store", RunSettings())
    gate = next(gate for gate in gates if gate.name == "async wait")
    value, limit = (float(text.replace(",", "").split()[place]) for text, place in ((gate.value, 0), (gate.limit, 1)))
    assert (value <= limit) is (gate.verdict == "pass") is (wait <= 40000)


def test_quality_gates_of_kl_and_tasks() -> None:
    """Off by default; a KL divergence beyond its limit fails, and so does a task whose whole interval is beyond."""
    settings = RunSettings(kl_target=0.05, tasks="copy,retrieval,items=40,tokens=256")
    hits = {"copy": [True] * 40, "retrieval": [False] * 30 + [True] * 10}
    items = [TaskItem(context=(1,), query=(2,), answer=(3,))] * 40
    scores = tuple(TaskScore.from_answers(name, items, own, [True] * 40) for name, own in hits.items())
    measured = replace(QUALITY, kl=0.02, kl_p99=0.5, task_scores=scores, stored_share=0.5)

    def judge(quality: PerplexityChange | None) -> list[str]:
        limits = RUNTIME_CASES["runtime_store"]
        pair = PairedRuns(workload=WORK, without=PLAIN, candidate=GOOD)
        gates = build_case_gates([pair], [EQUAL], quality, limits, "store", settings)
        names = ("KL divergence", "task copy", "task retrieval")
        return [gate.verdict for gate in gates if gate.name in names]

    assert judge(measured) == ["pass", "unclear", "fail"]  # 40 of 40 items leave room for a drop of 9 %
    assert judge(replace(measured, kl=0.06)) == ["fail", "unclear", "fail"]
    assert judge(replace(measured, stored_share=1.0))[1:] == ["not measured"] * 2
    assert judge(replace(measured, lossy_ratio=1.0))[:1] == judge(None)[:1] == ["not measured"]
    assert "KL divergence" not in verdicts()


def judge_lossy_codec(target: float = 4.36, quality: PerplexityChange | None = QUALITY, kl: float = 0.05) -> Any:
    """Judge a run whose codec rounds, by gates and report lines."""
    record = replace(GOOD, total_ratio=5.0)
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=record)] * 2
    limits = RUNTIME_CASES["runtime_store"].with_values({"total_target": target}, "test")
    gates = build_case_gates(
        pairs, [], quality, limits, "store", RunSettings(kl_target=kl), evicts=True, is_lossy_codec=True
    )
    rows = build_bench_rows(SimpleNamespace(name="c", settings=SimpleNamespace(threads=1)), pairs, "m")  # type: ignore[arg-type]
    lines = build_gate_section(
        CaseFigures.from_pairs(pairs), DecodeStats.from_rows(rows.rows, "avg"), gates, limits, "store"
    )
    return {gate.name: gate for gate in gates}, lines


def test_case_gates_lossy_codec_claims_neither_consistency_nor_a_lossless_ratio() -> None:
    gates, lines = judge_lossy_codec(quality=replace(QUALITY, kl=0.01, coded_ratio=16.0))
    for name in ("consistency", "lossless ratio"):
        assert gates[name].verdict == "off" and "LOSSY" in gates[name].why
    assert "kv_content_consistency_pass" not in lines and "lossless_selected_pass" not in lines
    assert gates["KL divergence"].verdict == "pass" and "LOSSY" in gates["KL divergence"].why
    row = build_runtime_row("c", "store", lines, passed=True, failure="")
    assert (row["kv_content_consistency_pass"], row["total_best"]) == (None, 5.0)


def test_run_record_of_a_lossy_codec_has_no_lossless_ratio() -> None:
    record = replace(GOOD, lossy_ratio=5.0, held_ratio=2.0, total_ratio=5.0, encoded_ratio=16.0, is_rounded=True)
    assert (record.eviction_ratio, record.lossless_ratio) == (2.5, 1.0)
    pairs = [PairedRuns(workload=WORK, without=PLAIN, candidate=record)]
    rows = build_bench_rows(SimpleNamespace(name="c", settings=SimpleNamespace(threads=1)), pairs, "m")  # type: ignore[arg-type]
    numbers = rows.rows[0].numbers
    assert [numbers[f"h2o_{name}"] for name in ("keep", "lossy", "lossless")] == [0.4, 5.0, 1.0]
    [run] = build_demo_runs(pairs, "candidate")
    assert run.get_metric("h2o_lossy_ratio") * run.get_metric("h2o_lossless_ratio") == record.total_ratio
    assert (rows.rows[0].cells["h2o_lossless"], rows.format_mean_ratio()) == ("-", "-")
    assert "LOSSY codec" in judge_lossy_codec()[0]["lossy ratio"].why


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"quality": replace(QUALITY, kl=0.06, coded_ratio=16.0)}, "fail"),
        ({"quality": replace(QUALITY, kl=0.01)}, "not measured"),
        ({"quality": None}, "not measured"),
        ({"quality": replace(QUALITY, kl=0.01, coded_ratio=16.0), "kl": -1.0}, "not measured"),
    ],
)
def test_kl_gate_lossy_codec_without_a_limit_or_rounding_is_no_pass(change: dict[str, Any], verdict: str) -> None:
    assert judge_lossy_codec(**change)[0]["KL divergence"].verdict == verdict


@pytest.mark.parametrize(("target", "verdict"), [(4.36, "pass"), (5.0, "pass"), (5.01, "fail")])
def test_total_gate_judges_the_least_run(target: float, verdict: str) -> None:
    assert judge_lossy_codec(target)[0]["total ratio"].verdict == verdict


def test_total_gate_negative_limit_has_none() -> None:
    assert "total ratio" not in verdicts()
