"""The engine's statistics of a planner."""

from __future__ import annotations

from dataclasses import asdict

from kvmnn.policies.h2o.planner import PlannerStats


def test_planner_stats_before_first_plan_keep_everything() -> None:
    figures = asdict(PlannerStats())
    ratios = {name for name in figures if not name.endswith(("_tokens", "_us"))}
    assert len(ratios) == 5 and len(figures) == 8
    assert figures == {name: 1.0 if name in ratios else 0 for name in figures}
