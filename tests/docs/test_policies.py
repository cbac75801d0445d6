"""docs/policies.md: its example runs, its tables name every policy, its figures are those of the benchmark."""

from __future__ import annotations

import doctest
import json
import re

from repository import ROOT

from kvmnn import policies
from kvmnn.policies import POLICIES

PAGE = ROOT / "docs" / "policies.md"


def tables() -> list[list[list[str]]]:
    """The tables of the page, as cells, without their headers."""
    found = re.findall(r"\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE.read_text(encoding="utf-8"))
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def test_examples() -> None:
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0
    assert doctest.testmod(policies).failed == 0


def test_a_policy_is_short() -> None:
    """Its examples run above; each is a complete policy of fewer than 40 lines with one method."""
    section = PAGE.read_text(encoding="utf-8").partition("## How to write a policy")[2].partition("\n## ")[0]
    examples = re.findall(r">>> @dataclass.*?\n(?:\.\.\. ?.*\n)+", section)
    assert len(examples) == 2
    for example in examples:
        assert example.count("\n") < 40 and example.count("def ") == example.count("def rule(") == 1


def test_tables_name_every_policy() -> None:
    keeps, sources = tables()[:2]
    for table in (keeps, sources):
        assert [row[0].strip("`") for row in table] == list(POLICIES)
    for row in keeps:
        policy = POLICIES[row[0].strip("`")]
        looks = {"lengths": "lengths", "keys": "keys", "scores": "scores", "head scores": "scores by head"}
        assert row[3] == looks[policy.needs]


def test_figures_are_the_benchmarks() -> None:
    path = ROOT / "benchmarks" / "policies.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    costs = {
        row["policy"]: (f"{row['long_us'] / 1e3:.3g} ms", f"{row['step_us']:.3g} us") for row in measured["decisions"]
    }
    for row in tables()[0]:
        assert (row[5], row[6]) == costs.get(row[0].strip("`"), ("-", "-")), "a policy not measured yet has dashes"
    speeds = {r["level"]: r for r in measured["norms_and_choice"] if r["limit"] is not None}
    for level, *cells in tables()[-1]:
        entry = speeds[level.strip("`")]
        assert cells == [f"{entry['ms']:.1f} ms", f"{entry['numpy_ms']:.0f} ms", f"{entry['speedup']:.1f} x"]
