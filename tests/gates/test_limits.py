"""Limits from a file, and the baselines of a decode speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gate_logs
import pytest

from kvmnn.errors import KvmnnError, OptionError, OutputError, SourceError
from kvmnn.gates import RUNTIME_CASES, GateLimits, read_gate_file, read_metric_rows, slowdown


def written(folder: Path, document: Any) -> Path:
    path = folder / "gates.json"
    path.write_text(json.dumps(document))
    return path


def test_read_gate_file_case_overrides_file_overrides_base(tmp_path: Path) -> None:
    cases = {"runtime_store": {"max_lossless_decomp_us": 50000}, "other": {"lossy_target": 9}}
    path = written(tmp_path, {"lossy_target": 2, "decode_drop_target": 0.1, "cases": cases})
    limits, notes = read_gate_file(path, "runtime_store", RUNTIME_CASES["runtime_store"])
    assert (limits.lossy_target, limits.decode_drop_target, limits.max_lossless_decomp_us) == (2.0, 0.1, 50000.0)
    assert limits.max_lossless_async_wait_us == 40000.0
    assert notes == []
    assert read_gate_file(path, None, GateLimits())[0].max_lossless_decomp_us == -1
    with pytest.raises(KvmnnError, match="has no case runtime_full"):
        read_gate_file(path, "runtime_full", GateLimits())


def test_read_gate_file_reads_written_limits(tmp_path: Path) -> None:
    for limits in RUNTIME_CASES.values():
        assert read_gate_file(written(tmp_path, limits.to_dict()), None, GateLimits()) == (limits, [])


def test_read_gate_file_accepts_fork_configuration(tmp_path: Path) -> None:
    settings = {"prompts": [512], "repeat": 3, "h2o_keep_ratios": [0.3], "kv_lossless_runtime_mode": "full"}
    path = written(tmp_path, settings | {"kv_lossless_async_threads": 1, "kv_lossless_block_tokens": 128})
    limits, (note,) = read_gate_file(path, None, GateLimits())
    assert (limits.runtime_mode, limits.async_threads, limits.lossless_block_tokens) == ("full", 1, 128)
    assert note == f"{path}: prompts, repeat, h2o_keep_ratios say what ran, and limit nothing"


def test_read_gate_file_ineffective_limits_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path, {"lossless_target": -5, "decode_drop_target": 2})
    assert read_gate_file(path, None, GateLimits())[1] == [
        f"{path}: lossless_target -5 limits nothing: ratios are above 0",
        f"{path}: decode_drop_target 2 limits nothing: no more than 1 can be lost",
    ]


@pytest.mark.parametrize("text", ['{"lossy_target": NaN}', "{", "[]", "\0"])
def test_read_gate_file_malformed_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gates.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="JSON"):
        read_gate_file(path, None, GateLimits())


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"lossy_targt": 3}, "'lossy_targt' is no limit"),
        ({"lossy_target": "3"}, "lossy_target: found '3', expected a number"),
        ({"lossy_target": True}, "expected a number"),
        ({"lossy_target": 10**400}, "expected a number below 1e15"),
        ({"async_threads": 1.5}, "expected a whole number"),
        ({"runtime_mode": "fast"}, "expected one of , probe, full, store"),
        ({"hard_checks": 1}, "expected true or false"),
        ({"cases": []}, "cases: expected an object of objects"),
        ({"cases": {"a": {"x": 1}}}, "cases.a: 'x' is no limit"),
    ],
)
def test_read_gate_file_invalid_values_are_refused(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(KvmnnError) as error:
        read_gate_file(written(tmp_path, document), None, GateLimits())
    assert said in str(error.value)


# -- baselines --------------------------------------------------------------------------------------------------------


def history(folder: Path, speeds: list[float], key: str = "k") -> Path:
    path = folder / "history.jsonl"
    for speed in speeds:
        slowdown.append_to_history(path, key, speed, has_passed=speed > 5, summary="s.md")
    return path


def test_rolling_baseline_is_median_of_newest(tmp_path: Path) -> None:
    path = history(tmp_path, [100, 100, *range(1, 9)])
    found = slowdown.compute_rolling_baseline(path, "k", 6.6)
    assert (found.speed, found.source, found.num_samples) == (4.5, "rolling_median", 8)
    assert slowdown.compute_rolling_baseline(path, "other", 6.6) == slowdown.DecodeBaseline(
        speed=6.6, source="fixed_fallback", num_samples=0
    )
    assert slowdown.compute_rolling_baseline(path, "k", 6.6, window=2).source == "fixed_fallback"
    assert slowdown.compute_rolling_baseline(path, "k", 6.6, window=2, min_samples=2).speed == 7.5
    assert slowdown.compute_rolling_baseline(tmp_path / "none", "k", 6.6).num_samples == 0


def test_rolling_baseline_counts_failed_runs_with_a_speed(tmp_path: Path) -> None:
    path = history(tmp_path, [4, 0, 6])
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["decode_best"], entry["overall_pass"]) for entry in entries] == [(4, False), (6, True)]
    assert list(entries[0]) == ["ts_utc", "key", "decode_best", "overall_pass", "summary"]


def test_rolling_baseline_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = history(tmp_path, [1, 2, 3])
    path.write_text('[1]\n{"key": "k"\n\n' + path.read_text() + '{"key": "k", "decode_best": "x"}\n')
    found = slowdown.compute_rolling_baseline(path, "k", 6.6)
    assert (found.speed, found.num_samples) == (2, 3)
    assert found.warnings == (f"{path}: 2 lines are no JSON objects",)
    with pytest.raises(OutputError, match="cannot be written"):
        slowdown.append_to_history(tmp_path, "k", 1.0, has_passed=True, summary="")


def test_same_batch_baseline_is_fastest_row(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path, gate_logs.row(4.34), gate_logs.row(4.81, prompt=1024))
    assert slowdown.find_same_batch_baseline(read_metric_rows([log]), 6.6).speed == 4.81
    log = gate_logs.write_logs(tmp_path, gate_logs.row() | {"speed(tok/s)": "80.1"})
    found = slowdown.find_same_batch_baseline(read_metric_rows([log]), 6.6)
    assert (found.speed, found.source, found.num_samples) == (6.6, "same_batch_fallback_fixed", 0)
    assert "fallback to fixed 6.6" in found.warnings[0]


def test_build_baseline_key_names_work_and_repeats(tmp_path: Path) -> None:
    log = gate_logs.write_logs(tmp_path, gate_logs.row(), gate_logs.row(prompt=1024))
    assert slowdown.build_baseline_key(read_metric_rows([log]), 2).endswith("_CPU_t4_p512,1024_g128_rep2")
    log = gate_logs.write_logs(tmp_path, {key: text for key, text in gate_logs.row().items() if key != "llm_demo"})
    with pytest.raises(SourceError, match="expected --baseline-key"):
        slowdown.build_baseline_key(read_metric_rows([log]), 2)
