"""Rounds in the history and stored runs: which runs are one round, what changed, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmnn.errors import OutputError
from kvmnn.gates.suite.history import HISTORY_FILE, append_round, describe_changes, has_finished_rerun, read_history
from kvmnn.gates.suite.suite import RunStore


def entry(*cases: str, take: int = 1, model: str = "a", **settings: Any) -> dict[str, Any]:
    return {
        "generated_at": "2026-11-22T10:00:00",
        "overall_pass": True,
        "take": take,
        "about": {"model_sha256": model * 64},
        "settings": {"prompts": [512]},
        "cases": [
            {"case": name, "pass": True, "reason": "", "lossy": 3.0, "lossless": 1.3, "decode_tps": 9.0, "drop": 0.0,
             "settings": settings}
            for name in cases
        ],
    }  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def test_append_round_resumed_round_keeps_line_and_cases(tmp_path: Path) -> None:
    for cases in (("full",), ("store",), ("store",)):
        append_round(tmp_path, entry(*cases))
    (line,) = lines(tmp_path)
    assert [case["case"] for case in line["cases"]] == ["full", "store"]
    assert (line["overall_pass"], line["changed"]) == (True, [])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (entry("full", take=2), []),
        (entry("full", model="b"), ["model_sha256 aaaaaaaaaaaa -> bbbbbbbbbbbb"]),
        (entry("full", lossy_target=2.0), ["lossy_target default -> 2.0"]),
    ],
)
def test_append_round_changed_settings_start_a_new_round(
    tmp_path: Path, other: dict[str, Any], said: list[str]
) -> None:
    append_round(tmp_path, entry("full"))
    append_round(tmp_path, other)
    assert [line["changed"] for line in lines(tmp_path)] == [[], said]
    assert has_finished_rerun(tmp_path, other["take"])
    assert not has_finished_rerun(tmp_path, 3)


def test_describe_changes_names_affected_cases() -> None:
    before, after = entry("full", "store"), entry("full", "store")
    after["cases"][1]["settings"] = {"kv_h2o_block_tokens": 16}
    assert describe_changes(before, after) == ["kv_h2o_block_tokens default -> 16 (store)"]
    after["settings"] = {f"s{i}": i for i in range(20)}
    assert describe_changes(before, after)[-1] == "and 10 more"
    assert describe_changes({"cases": []}, after) == []  # a line of before settings were noted down


def test_append_round_damaged_or_older_lines_are_unchanged(tmp_path: Path) -> None:
    older = json.dumps({"generated_at": "2026-11-01T10:00:00", "overall_pass": True, "cases": []})
    (tmp_path / HISTORY_FILE).write_text(f'{older}\n{{"torn\n')
    append_round(tmp_path, entry("full"))
    kept = (tmp_path / HISTORY_FILE).read_text().splitlines()
    assert kept[:2] == [older, '{"torn']
    assert json.loads(kept[2])["changed"] == []


def test_read_history_trend_compares_equal_settings(tmp_path: Path) -> None:
    for place, settings in enumerate(({}, {"lossy_target": 2.0}, {"lossy_target": 2.0}), start=1):
        append_round(tmp_path, entry("full", take=place, **settings))
    shown = str(read_history(str(tmp_path)))
    assert "  lossy        3.000 | 3.000 3.000  (+0.0% to the mean before)" in shown


def test_run_store_reads_runs_after_a_torn_line(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs.jsonl")
    store.put("a", {"x": 1})
    store.close()
    with (tmp_path / "runs.jsonl").open("a") as stream:
        stream.write('{"kvmnn_run": 1, "sha256": "b')
    store = RunStore(tmp_path / "runs.jsonl")
    store.put("c", {"x": 2})
    with pytest.raises(OutputError, match="another gate run is writing it"):
        RunStore(tmp_path / "runs.jsonl").put("d", {})
    store.close()
    with RunStore(tmp_path / "runs.jsonl") as found:
        assert ["a" in found, "b" in found, "c" in found] == [True, False, True]


def test_read_history_missing_measurement_is_a_dash(tmp_path: Path) -> None:
    for take, lossless in enumerate((1.3, None, 0.0, None), start=1):
        made = entry("full", take=take, lossy_target=float(take))
        made["cases"][0]["lossless"] = lossless
        append_round(tmp_path, made)
    shown = str(read_history(str(tmp_path)))
    assert "  lossless     1.300 | - | - | -\n" in shown
    assert shown.endswith("|: under other settings from here on.")
