"""Gates over runs of a model: each has a run that fails it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmnn.gates.checking.cases import RUNTIME_CASES
from kvmnn.gates.running.case_gates import Pair, Quality, answer_gate, case_gates
from kvmnn.gates.running.measuring import Comparison, RunRecord
from kvmnn.gates.running.work import Workload

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
EQUAL = Comparison(steps=10, compared_steps=2, compared_bytes=100, different_bytes=0, different_steps=0)
QUALITY = Quality(mean=0.01, low=0.0, high=0.03, texts=10, tokens=1000, lossy_ratio=1.5)


def verdicts(
    record: RunRecord = GOOD, comparison: Any = EQUAL, quality: Any = QUALITY, **limits: Any
) -> dict[str, str]:
    pairs = [Pair(work=WORK, without=PLAIN, candidate=record)] * 2
    store = RUNTIME_CASES["runtime_store"].changed(limits, "test")
    compared = [] if comparison is None else [comparison]
    return {gate.name: gate.verdict for gate in case_gates(pairs, compared, quality, store, "store", 0.05)}


def counters(**changed: float) -> RunRecord:
    return replace(GOOD, counters=COUNTERS | {f"h2o_lossless_{name}": value for name, value in changed.items()})


def test_a_run_that_passes() -> None:
    assert set(verdicts().values()) == {"pass", "off"}


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
def test_every_gate_can_fail(name: str, change: dict[str, Any]) -> None:
    found = verdicts(**change)
    assert [gate for gate, verdict in found.items() if verdict not in ("pass", "off")] == [name]
    assert found[name] == "fail"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lossless ratio", {"record": counters(raw_bytes=0, compressed_bytes=0)}),
        ("consistency", {"comparison": None}),
        ("perplexity", {"quality": None}),
        ("perplexity", {"quality": replace(QUALITY, lossy_ratio=1.0)}),
        ("perplexity", {"quality": replace(QUALITY, low=None, high=None, texts=1)}),
        ("perplexity", {"quality": replace(QUALITY, texts=9)}),
    ],
)
def test_what_was_not_measured(name: str, change: dict[str, Any]) -> None:
    assert verdicts(**change)[name] == "not measured"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [((7, 8), (7, 8, 1), "pass"), ((7, 8), (7, 9), "fail"), ((1, 8), (7, 8), "not measured")],
)
def test_exact_answers(before: tuple[int, ...], after: tuple[int, ...], verdict: str) -> None:
    pair = Pair(work=WORK, without=replace(PLAIN, new_ids=before), candidate=replace(GOOD, new_ids=after))
    gate = answer_gate([pair])
    assert gate is not None
    assert gate.verdict == verdict
    assert answer_gate([replace(pair, work=replace(WORK, answer=()))]) is None
