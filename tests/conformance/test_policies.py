"""Recorded decisions of eviction policies, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import main, run_index

Case = dict[str, Any]


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("policies")


@pytest.fixture(scope="module")
def cases(vectors: Path) -> dict[str, Case]:
    return {case["name"]: case for case in json.loads((vectors / "cases.json").read_text())["cases"]}


def test_policies_every_vector_passes(vectors: Path) -> None:
    results = list(run_index(vectors / "cases.json", vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 54


def swap(case: Case) -> None:
    """Two neighbours of the first row that is long enough, wherever it lies."""

    def inside(value: Any) -> bool:
        if isinstance(value, dict):
            return any(inside(part) for part in value.values())
        if isinstance(value, list) and len(value) > 1 and all(isinstance(entry, int) for entry in value):
            value[0], value[1] = value[1], value[0]
            return True
        return isinstance(value, list) and any(inside(part) for part in value)

    assert inside(case["expected"])


def other_token(case: Case) -> None:
    case["expected"][-1][-1] = 10**6 if isinstance(case["expected"][-1][-1], int) else [10**6]


def off_score(case: Case) -> None:
    case["expected"]["final_scores_approx"][3] += 1e-3


CHANGES: list[tuple[str, Callable[[Case], object]]] = [
    ("l2orig_a", swap),
    ("l2orig_ratio1_still_sorts", swap),
    ("l2fork_basic", swap),
    ("l2fork_08", lambda case: case["params"].update(keep_ratio=0.7)),
    ("l2fork_eq_prune_after_keeps", lambda case: case["params"].update(prune_after=7)),
    ("l2orig_eq_prune_after_prunes", lambda case: case["params"].update(prune_after=9)),
    ("fix_low_k02", swap),
    ("fix_low_k02", lambda case: case["params"].update(strategy="keep_high")),
    ("fix_trunc_029", lambda case: case["params"].update(keep_ratio=0.3)),
    ("fix_skip_layers", lambda case: case["params"].update(skip_layers=[0])),
    ("fix_random_seed1234", swap),
    ("fix_random_seed1234", other_token),
    ("fix_decode_loop", swap),
    ("knorm_50", swap),
    ("knorm_50", lambda case: case["params"].update(compression_ratio=0.6)),
    ("streampress_a", other_token),
    ("streampress_sink_big", other_token),
    ("streampress_sink_big", lambda case: case["expected"][0].append(0)),
    ("streaming_fn_a", swap),
    ("observed_mha", swap),
    ("stream_cache_decode", swap),
    ("stream_cache_decode", lambda case: case["expected"][5].update(seen=1)),
    ("stream_cache_chunks_forced", lambda case: case["params"].update(force_evict_after_chunk=False)),
    ("h2o_cache_decode", swap),
    ("h2o_cache_decode", off_score),
    ("h2o_cache_decode", lambda case: case["params"].update(heavy=9)),
    ("h2o_cache_decode", lambda case: case["params"].update(buffer=60)),
    ("h2o_orig_a", swap),
    ("h2o_orig_a", lambda case: case["expected"].pop()),
    ("knorm_50", lambda case: case.update(policy="kvpress_new")),
    ("knorm_50", lambda case: case.update(order="temporal")),
    ("knorm_50", lambda case: case.update(extra=1)),
    ("knorm_50", lambda case: case["params"].update(extra=1)),
    ("knorm_50", lambda case: case["input"].update(extra=1)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_policies_changed_case_fails(
    cases: dict[str, Case],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[Case], object],
) -> None:
    changed = json.loads(json.dumps(cases[name]))
    change(changed)
    document = {"format": "kv-policy-vectors-1", "cases": [changed, cases["streaming_fn_a"]]}
    (tmp_path / "cases.json").write_text(json.dumps(document))
    assert main([str(tmp_path)]) == 1
    assert "1 passed, 1 failed" in capsys.readouterr().out
