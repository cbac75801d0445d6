"""`kvmnn.lm.evaluate`: what the command does, from Python."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from repository import FIXTURES

import kvmnn.lm
from kvmnn.errors import KvmnnError, OptionError
from kvmnn.evaluation import EvaluationResult, EvaluationSettings, evaluate, expand_preset
from kvmnn.evaluation.settings import resolve_configurations
from kvmnn.policies import create_policy

MODEL = FIXTURES / "lm"
TEXTS = [MODEL / "texts" / name for name in ("calendar.py.txt", "asyncio__tasks.py.txt")]
SETTINGS = EvaluationSettings(tokens=40, chunk=8, timing=False, project_definitions=False)


@pytest.fixture(scope="module")
def result() -> EvaluationResult:
    policies = ["recent_only", "streaming:sink=2", create_policy("recent_only", budget=12)]
    return kvmnn.lm.evaluate(MODEL, TEXTS, policies, [16, "50%"], settings=SETTINGS, jobs=0)


@pytest.mark.slow
def test_lm_evaluate_accepts_policies_and_budgets(result: EvaluationResult) -> None:
    assert kvmnn.lm.evaluate is evaluate and "evaluate" in kvmnn.lm.__all__
    assert [(row.label, row.tokens_kept) for row in result.rows] == [
        ("full", (40,) * 6),
        ("recent_only 16", (16,) * 6),
        ("recent_only 20", (20,) * 6),
        ("streaming 16 sink=2", (16,) * 6),
        ("streaming 20 sink=2", (20,) * 6),
        ("recent_only 12 skip_layers=0+1", (40, 40, 12, 12, 12, 12)),  # a policy is taken as it is
    ]


@pytest.mark.slow
def test_lm_evaluate_result_formats_agree(result: EvaluationResult, tmp_path: Path) -> None:
    assert result.format_table().startswith("| policy |") and "| streaming 16 sink=2 |" in result.format_table()
    assert max(map(len, result.format_table(80).splitlines())) <= 80
    lines = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert [float(line["nll"]) for line in lines if not line["document"]] == [row.nll for row in result.rows]
    assert any(path.name == "perplexity_over_budget.png" for path in result.plot(tmp_path / "plots"))


def test_lm_evaluate_without_policy_is_the_baseline() -> None:
    (row,) = evaluate(MODEL, TEXTS[0], settings=SETTINGS, jobs=0).rows
    assert (row.label, row.kind) == ("full", "LOSSLESS")


def test_resolve_configurations_accepted_forms() -> None:
    assert [entry.label for entry in resolve_configurations("streaming", "25%", 400)] == ["streaming 100"]
    assert resolve_configurations(expand_preset("knorm-ratio"), (), 100) == expand_preset("knorm-ratio")
    with pytest.raises(OptionError, match="budgets are for policies by their specs"):
        resolve_configurations(create_policy("streaming", budget=9), [64], 100)
    for policies, budgets, message in (("none", 4, "unknown policy 'none'"), ("streaming", "much", "'much' is not")):
        with pytest.raises(KvmnnError, match=message):
            resolve_configurations(policies, budgets, 100)
