"""The planner's vectors and the live eviction, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import run_index, run_tree


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("h2o")


@pytest.fixture(scope="module")
def live(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("real_kv") / "mnn_h2o_live"


def test_h2o_every_vector_passes(vectors: Path) -> None:
    results = list(run_tree(vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 94


def changed(vectors: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> list[str]:
    index = json.loads((vectors / "cases.json").read_text())
    (case,) = (case for case in index["cases"] if case["name"] == name)
    index["cases"] = [case]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(index))
    assert [result.problems for result in run_index(path, tmp_path)] == [[]]
    change(case)
    path.write_text(json.dumps(index))
    ((_, problems),) = [(result.name, result.problems) for result in run_index(path, tmp_path)]
    return problems


def test_h2o_every_field_of_a_call_is_compared(vectors: Path, tmp_path: Path) -> None:
    index = json.loads((vectors / "cases.json").read_text())
    case = next(case for case in index["cases"] if case["name"] == "lossy_meta_bytes")
    (event,) = case["expected"]
    places = [(event, name) for name in event]
    places += [(event[part], name) for part in ("plan", "pending", "metrics") for name in event[part]]
    path = tmp_path / "cases.json"
    assert len(places) > 40
    for place, name in places:
        before = place[name]
        place[name] = [*before, 1] if isinstance(before, list) else 3 if isinstance(before, int | float) else 0
        path.write_text(json.dumps({"format": index["format"], "cases": [case]}))
        (result,) = run_index(path, tmp_path)
        assert len(result.problems) == 1, name
        place[name] = before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seq_cadence_layers", lambda case: case.update(expected_previous=97)),
        ("seq_cadence_layers", lambda case: case["expected"].pop()),
        ("seq_cadence_layers", lambda case: case["expected"][40].update(final_keep_tokens_for_layer=3)),
        ("ties_all_equal_gt16", lambda case: case.update(tie_sensitive=False)),
        ("ties_all_equal_gt16", lambda case: case["reference_std_sort"][0]["plan"]["keep"].reverse()),
        ("ties_all_equal_gt16", lambda case: case.pop("reference_std_sort")),
        ("kv_at_trigger", lambda case: case.update(tie_sensitive=True, reference_std_sort=case["expected"])),
        ("kv_at_trigger", lambda case: case["config"].update(heads=3)),
        ("kv_at_trigger", lambda case: case["forwards"][0].update(surprise=3)),
        ("kv_at_trigger", lambda case: case.update(kind="other")),
        ("kv_at_trigger", lambda case: case.update(surprise=1)),
        ("acc_h4_t1", lambda case: case["expected_block_acc"].__setitem__(0, 0.85091275)),
        ("acc_h5_t2", lambda case: case["params"].update(threads=1)),
        ("acc_seq3_packed_bug", lambda case: case["params"].update(packed_layout_bug=0)),
        ("acc_h4_t1", lambda case: case["params"].update(surprise=0)),
    ],
)
def test_h2o_changed_expectation_fails(vectors: Path, tmp_path: Path, name: str, change: Any) -> None:
    assert changed(vectors, tmp_path, name, change)


def test_h2o_live_eviction_is_reproduced(live: Path) -> None:
    results = list(run_tree(live))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_tokens", 16),
        ("sink_tokens", 9),
        ("recent_tokens", 30),
        ("target_lossy_ratio", 2.5),
        ("trigger_min_tokens", 122),
        ("update_interval", 2),
        ("layer_start", 1),
    ],
)
def test_h2o_live_eviction_with_other_configuration_fails(live: Path, tmp_path: Path, key: str, value: float) -> None:
    index_path = live / "index.json"
    for entry in index_path.parent.iterdir():
        if entry != index_path:
            (tmp_path / entry.name).symlink_to(entry)
    index = json.loads(index_path.read_text())
    index["config"][key] = value
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert any(result.problems for result in run_tree(tmp_path))
