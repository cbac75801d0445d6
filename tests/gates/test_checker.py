"""Gates of a case over logs: each has a run that fails it; strict ones report what was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gate_logs
import pytest

from kvmnn.errors import OptionError, SourceError
from kvmnn.gates import RUNTIME_CASES, CaseResult, GateLimits, MetricRows, check, parse_logs, read_metric_rows

STORE = RUNTIME_CASES["runtime_store"].with_values({"decode_baseline": 5.01}, "test")


def rows(folder: Path, *cells: dict[str, str]) -> MetricRows:
    return read_metric_rows([gate_logs.write_logs(folder / "logs", *(cells or (gate_logs.row(),)))])


def checked(folder: Path, *cells: dict[str, str], limits: GateLimits = STORE, **options: Any) -> CaseResult:
    return check(rows(folder, *cells), limits, logs=[folder / "logs"], **options)


def verdicts(made: CaseResult) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in (*made.gates, *made.checks)}


def test_check_good_run_passes(tmp_path: Path) -> None:
    made = checked(tmp_path)
    assert made.verdict == "pass", made.failure_text
    assert set(verdicts(made).values()) == {"pass", "off"}


FAILURES = [
    ("lossy ratio", {"h2o_lossy": 2.999}, {}),
    ("lossless ratio", {"h2o_lossless": 1.29}, {}),
    ("decode drop", {"decode": 4.7}, {}),
    ("columns", {"h2o_lossless_async_wait_us": None}, {}),
    ("decompression", {"h2o_lossless_decomp_us": 70001}, {}),
    ("decompression", {"h2o_lossless_decomp_us": 0}, {}),
    ("async wait", {"h2o_lossless_async_wait_us": 40001}, {}),
    ("async queue", {"h2o_lossless_async_queue_peak": 0}, {"require_async_queue_activity": True}),
    ("cache hits", {"h2o_lossless_decode_cache_hit": 0}, {"require_decode_cache_hit": True}),
    ("cache lookups", {"h2o_lossless_decode_cache_hit": 0}, {"require_decode_cache_activity": True}),
    ("queue peak", {"h2o_lossless_queue_peak": 8.5}, {}),
    ("fallbacks", {"h2o_lossless_fallback": 1}, {}),
    ("skips", {"h2o_lossless_backpressure_skip": 3}, {"max_lossless_backpressure_skip": 2}),
    ("consistency", {"h2o_lossless_decomp_us": 0}, {}),
    ("lossless figures", {"h2o_lossless_raw_mb": 0}, {}),
    ("real decompression", {"h2o_lossless_comp_us": 0}, {}),
]


@pytest.mark.parametrize(("name", "cells", "limits"), FAILURES)
def test_check_each_gate_can_fail(tmp_path: Path, name: str, cells: dict[str, Any], limits: dict[str, Any]) -> None:
    made = checked(tmp_path, gate_logs.row(**cells), limits=STORE.with_values(limits, "test"))
    assert verdicts(made)[name] == "fail"
    assert made.verdict == "fail"
    assert f"{name} fail" in made.failure_text


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("consistency", gate_logs.ENCODED + "warning: DOUBLE free or corruption\n"),
        ("encodings in logs", "nothing\n"),
        ("no fixed groups", gate_logs.ENCODED + "[H2O-LOSSLESS] tokens=192 updates=1\n"),
        ("step of encodings", "[H2O-LOSSLESS] tokens=256 updates=2\n"),
    ],
)
def test_check_each_log_gate_can_fail(tmp_path: Path, name: str, printed: str) -> None:
    gate_logs.write_logs(tmp_path / "logs", gate_logs.row(), printed=printed)
    made = check(read_metric_rows([tmp_path / "logs" / "run_0001.log"]), STORE, logs=[tmp_path / "logs"])
    assert [gate for gate, verdict in verdicts(made).items() if verdict == "fail"] == [name]


@pytest.mark.parametrize(("raw", "verdict"), [(1300, "pass"), (1320, "fail"), (0, "fail")])
def test_check_offline_ratio_must_match_its_bytes(tmp_path: Path, raw: int, verdict: str) -> None:
    path = tmp_path / "online.json"
    path.write_text(json.dumps({"lossless_ratio": 1.3, "raw_bytes": raw, "compressed_bytes": 1000}))
    assert verdicts(checked(tmp_path, online_json=path))["offline bytes"] == verdict


@pytest.mark.parametrize(("raw", "compressed"), [(0, 1000), (1300, 0)])
def test_check_offline_ratio_without_bytes_fails(tmp_path: Path, raw: int, compressed: int) -> None:
    path = tmp_path / "online.json"
    path.write_text(json.dumps({"lossless_ratio": 1.3, "raw_bytes": raw, "compressed_bytes": compressed}))
    (found,) = [gate for gate in checked(tmp_path, online_json=path).checks if gate.name == "offline bytes"]
    assert (found.verdict, found.value) == ("fail", "no bytes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "invalid lossless ratio"),
        ('{"weighted_lossless_ratio": 0, "lossless_ratio": 1.3}', "invalid lossless ratio"),
        ('{"lossless_ratio": 1e999}', "invalid lossless ratio"),
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_check_damaged_offline_document_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "online.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=said):
        checked(tmp_path, online_json=path)
    with pytest.raises(SourceError, match="offline lossless json not found"):
        checked(tmp_path, online_json=tmp_path / "none.json")


def test_read_metric_rows_of_other_engine_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("model,test,t/s\nllama,tg128,9.1\n")
    with pytest.raises(SourceError, match=r"a\.csv: has no column of llm_bench: found model, test, t/s"):
        read_metric_rows([tmp_path / "a.csv"])
    (tmp_path / "b.csv").write_text("h2o_lossy,speed(tok/s)\n")
    with pytest.raises(SourceError, match=r"b\.csv: No rows found in CSV\."):
        read_metric_rows([tmp_path / "b.csv"])


# -- strict -----------------------------------------------------------------------------------------------------------


def strict(folder: Path, *cells: dict[str, str], baseline: list[dict[str, str]] | None = None) -> CaseResult:
    without = [gate_logs.row(5.95)] * max(1, len(cells)) if baseline is None else baseline
    plain = read_metric_rows([gate_logs.write_logs(folder / "plain", *without)]) if without else None
    limits = STORE.with_values({"require_kv_content_consistency": False}, "test")
    return checked(folder, *cells, limits=limits, strict=True, baseline=plain)


def test_check_strict_passes_measured_gates(tmp_path: Path) -> None:
    made = strict(tmp_path, gate_logs.row(), gate_logs.row(5.91))
    assert made.verdict == "pass", made.failure_text
    gates = {gate.name: gate for gate in made.gates}
    assert (gates["lossless ratio"].value, gates["decode drop"].value) == ("1.333", "+0.76%")
    assert made.warnings == ()  # the fork's warning, that the ratio is the run's own, is what strict asks for
    assert checked(tmp_path, gate_logs.row()).warnings


def test_check_strict_one_pair_is_unclear(tmp_path: Path) -> None:
    made = strict(tmp_path)
    assert (made.verdict, verdicts(made)["decode drop"]) == ("unclear", "unclear")
    assert not made.has_passed
    assert made.failure_text == "decode drop unclear"


def test_check_strict_uses_every_row_and_its_bytes(tmp_path: Path) -> None:
    good, bad = gate_logs.row(), gate_logs.row(prompt=1024, h2o_lossy=2.5, h2o_lossless_comp_mb=7.9)
    fork = checked(tmp_path, good, bad)
    sound = strict(tmp_path, good, bad, baseline=[gate_logs.row(6.0), gate_logs.row(6.0, prompt=1024)])
    assert verdicts(fork)["lossy ratio"] == verdicts(fork)["lossless ratio"] == "pass"
    assert verdicts(sound)["lossy ratio"] == verdicts(sound)["lossless ratio"] == "fail"


def test_check_strict_compares_means_of_equal_work(tmp_path: Path) -> None:
    """The fork takes the fastest baseline row, and rows of other work besides."""
    candidate = [gate_logs.row(6.0), gate_logs.row(4.0, prompt=1024)]
    before = [gate_logs.row(6.1), gate_logs.row(4.05, prompt=1024), gate_logs.row(9.0, prompt=64)]
    gates = {gate.name: gate for gate in strict(tmp_path, *candidate, baseline=before).gates}
    assert (gates["decode drop"].verdict, gates["decode drop"].value) == ("pass", "+1.48%")  # 1 - 10 / 10.15
    assert "5.00 of 5.07 tok/s, 2 pairs of rows of the same work; 95 % -" in gates["decode drop"].why


NOTHING = {"h2o_lossless_raw_mb": 0, "h2o_lossless_comp_mb": 0, "h2o_lossless_decomp_us": 0}


def test_check_strict_idle_runtime_is_not_measured(tmp_path: Path) -> None:
    """Waits, queues and fallbacks are within their limits when nothing was encoded; the fork passes them."""
    idle = gate_logs.row(**NOTHING, h2o_lossless_async_wait_us=0, h2o_lossless_queue_peak=0)
    found = verdicts(strict(tmp_path, idle))
    names = ("lossless ratio", "decompression", "async wait", "queue peak", "fallbacks")
    assert {found[name] for name in names} == {"not measured"}
    assert {verdicts(checked(tmp_path, idle))[name] for name in names[2:]} == {"pass"}
    assert verdicts(checked(tmp_path, idle))["decompression"] == "fail"  # as the fork has it
    limits = STORE.with_values({"require_decode_cache_hit": True, "require_async_queue_activity": True}, "test")
    still = gate_logs.row(**NOTHING, h2o_lossless_async_queue_peak=0, h2o_lossless_decode_cache_hit=0)
    sound = verdicts(checked(tmp_path, still, limits=limits, strict=True))
    assert {sound[name] for name in ("consistency", "cache hits", "async queue")} == {"not measured"}
    late = verdicts(strict(tmp_path, gate_logs.row(**NOTHING | {"h2o_lossless_decomp_us": 70001})))
    assert late["decompression"] == "fail"
    busy = verdicts(strict(tmp_path, gate_logs.row(**NOTHING, h2o_lossless_fallback=1)))
    assert busy["fallbacks"] == "fail"
    baseline = check(
        read_metric_rows([gate_logs.write_logs(tmp_path / "b", idle, idle)]),
        RUNTIME_CASES["runtime_baseline"],
        strict=True,
        baseline=read_metric_rows([gate_logs.write_logs(tmp_path / "b2", idle, gate_logs.row(6.0, **NOTHING))]),
    )
    assert baseline.verdict == "pass", baseline.failure_text


@pytest.mark.parametrize(
    ("name", "cells", "baseline"),
    [
        ("lossy ratio", {"h2o_lossy": None}, None),
        ("lossless ratio", {"h2o_lossless_raw_mb": 0}, None),
        ("async wait", {"h2o_lossless_async_wait_us": None}, None),
        ("fallbacks", {"h2o_lossless_fallback": float("nan")}, None),
        ("fallbacks", {"h2o_lossless_fallback": -1}, None),
        ("async wait", {"h2o_lossless_async_wait_us": -5}, None),
        ("lossless ratio", {"h2o_lossless_comp_mb": -1}, None),
        ("decompression", {"h2o_lossless_decomp_us": -1}, None),
        ("decode drop", {}, []),
        ("decode drop", {"prompt": 77}, None),
    ],
)
def test_check_strict_missing_measurement_is_not_measured(
    tmp_path: Path, name: str, cells: dict[str, Any], baseline: list[dict[str, str]] | None
) -> None:
    made = strict(tmp_path, gate_logs.row(**cells), baseline=baseline)
    assert verdicts(made)[name] == "not measured"
    assert not made.has_passed


def test_check_strict_activity_is_not_consistency(tmp_path: Path) -> None:
    made = checked(tmp_path, strict=True, baseline=rows(tmp_path / "plain", gate_logs.row(6.0)))
    assert verdicts(made)["consistency"] == "not measured"
    assert made.verdict == "not measured"
    broken = gate_logs.row(h2o_lossless_fallback=1)
    assert verdicts(checked(tmp_path, broken, strict=True))["consistency"] == "fail"


def test_check_strict_table_as_own_baseline_is_refused(tmp_path: Path) -> None:
    mine = rows(tmp_path, gate_logs.row(), gate_logs.row(5.9))
    (tmp_path / "copy.csv").write_text(parse_logs([tmp_path / "logs"]).to_csv(), newline="")
    for other in (mine, read_metric_rows([tmp_path / "copy.csv"])):
        with pytest.raises(OptionError, match="holds the rows that are judged and is their baseline as well"):
            check(mine, STORE, strict=True, baseline=other)
        check(mine, STORE, baseline=other)  # as the fork does


def test_check_value_near_limit_has_enough_digits(tmp_path: Path) -> None:
    gate = next(
        gate
        for gate in checked(tmp_path, gate_logs.row() | {"h2o_lossless": "1.29999"}).gates
        if gate.name == "lossless ratio"
    )
    assert (gate.verdict, gate.value, gate.limit) == ("fail", "1.29999", ">= 1.30000")
    near = gate_logs.row() | {"h2o_lossless_raw_mb": "1.29999", "h2o_lossless_comp_mb": "1.00"}
    gate = next(gate for gate in strict(tmp_path, near).gates if gate.name == "lossless ratio")
    assert (gate.verdict, gate.value, gate.limit) == ("fail", "1.29999", ">= 1.30000")


def test_check_slow_store_diagnosis_needs_a_judged_drop(tmp_path: Path) -> None:
    """Without a baseline of the same work, strict has no drop to judge."""
    slow = gate_logs.row(4.0)
    assert any("Mode store is slow (decode drop)" in line for line in checked(tmp_path, slow).diagnoses)
    assert not any("Mode store is slow" in line for line in checked(tmp_path, slow, strict=True).diagnoses)


def test_check_strict_drop_limit_of_one_needs_no_baseline(tmp_path: Path) -> None:
    made = checked(tmp_path, limits=STORE.with_values({"decode_drop_target": 1.0}, "test"), strict=True)
    assert verdicts(made)["decode drop"] == "pass"


def test_check_strict_repeated_header_is_refused(tmp_path: Path) -> None:
    text = gate_logs.table(gate_logs.row())
    (tmp_path / "a.log").write_text(text + text)
    found = read_metric_rows([tmp_path / "a.log"])
    with pytest.raises(SourceError, match="row 2 is the header of a second table"):
        check(found, STORE, strict=True)
    assert any("1 of 3 rows" in line for line in check(found, STORE).diagnoses)


# -- diagnoses --------------------------------------------------------------------------------------------------------

DIAGNOSES = [
    ("the figures were lost on their way", {"h2o_lossless_raw_mb": 0, "h2o_lossless_comp_mb": 0}, "store"),
    ("sinks and recent tokens alone keep 40.0%", {"h2o_lossy": 2.5, "h2o_floor_keep": 0.4}, "store"),
    ("alone keep 62.0%, so at most 1.613", {"h2o_floor_keep": 0.62, "h2o_quantized_keep": 0.64}, "store"),
    ("whole blocks keeps 36.0%", {"h2o_lossy": 2.7, "h2o_quantized_keep": 0.36}, "store"),
    ("mode probe measures one layer", {"h2o_lossless_decomp_us": 0}, "probe"),
    ("nothing was restored", {"h2o_lossless_decomp_us": 0}, "full"),
    ("Try store_disable_front first", {"decode": 4.0}, "store"),
    ("Try store_disable_front first", {"h2o_lossless_decomp_us": 90000}, "store"),
]


@pytest.mark.parametrize(("said", "cells", "mode"), DIAGNOSES)
def test_check_diagnoses_name_their_cause(tmp_path: Path, said: str, cells: dict[str, Any], mode: str) -> None:
    limits = STORE.with_values({"runtime_mode": mode}, "test")
    assert not [line for line in checked(tmp_path, limits=limits).diagnoses if said in line]
    assert [line for line in checked(tmp_path, gate_logs.row(**cells), limits=limits).diagnoses if said in line]


def test_check_diagnoses_floor_above_target_names_remedy(tmp_path: Path) -> None:
    """Smaller blocks or another target do not lower the floor; each kind of row gets its own sentence."""
    wide = gate_logs.row(h2o_floor_keep=0.62, h2o_quantized_keep=0.64)
    (line,) = (line for line in checked(tmp_path, wide).diagnoses if "cannot reach" in line)
    assert "Take longer prompts, or lower h2o_recent_tokens" in line and "raise h2o_target" not in line
    blocks = gate_logs.row(h2o_floor_keep=0.2, h2o_quantized_keep=0.5)
    both = [line for line in checked(tmp_path, wide, blocks, gate_logs.row()).diagnoses if "cannot reach" in line]
    assert ["1 of 3 rows: " in line for line in both] == [True, True]
    assert "keep 62.0%" in both[0] and "keeps 50.0% (blocks of sinks and recent tokens 20.0%)" in both[1]


def test_check_diagnoses_lost_and_idle_logs_differ(tmp_path: Path) -> None:
    """A log with encodings lost its figures; one without had nothing to encode."""
    said = {}
    for name, printed in (("lost", gate_logs.ENCODED), ("idle", "nothing")):
        log = gate_logs.write_logs(tmp_path / name, gate_logs.row(**NOTHING), printed=printed)
        said[name] = " ".join(check(read_metric_rows([log]), STORE, logs=[tmp_path / name]).diagnoses)
    assert "lost on their way" in said["lost"] and "nothing was encoded" not in said["lost"]
    assert "because nothing was encoded" in said["idle"] and "lost on" not in said["idle"]


def test_check_diagnoses_offline_online_difference(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    path.write_text('{"lossless_ratio": 1.401, "selected_layers": [0, 1]}')
    (line,) = checked(tmp_path, online_json=path).diagnoses
    assert line.startswith("Offline and online are apart: 1.401 of a dump (offline_online_sim, layers [0, 1]), 1.333")
    path.write_text('{"lossless_ratio": 1.33}')
    assert checked(tmp_path, online_json=path).diagnoses == ()
