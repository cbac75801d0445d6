"""docs/lm.md: its commands parse, its tables are complete, its figures equal those of the fixture."""

from __future__ import annotations

import importlib
import json
import re
import shlex

import pytest
from repository import ROOT

from kvmnn.cli.command_parser import parse_command_line
from kvmnn.errors import KvmnnError
from kvmnn.evaluation import presets
from kvmnn.policies import ScoredPolicy
from kvmnn.policies.registry import POLICIES
from kvmnn.policies.specs import build_policy
from kvmnn.reports import plots

PAGE = (ROOT / "docs" / "lm.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (kvmnn .*)$", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_commands_cover_every_model_verb() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {"eval", "generate", "dump-kv", "encode", "measure"}
    assert any(command.startswith("kvmnn mnn pack ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    assert parse_command_line(shlex.split(command)[1:]) is not None


def test_plot_table_names_every_plot() -> None:
    table = PAGE.split("## Plots")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(plots.DRAW_FUNCTIONS)


def test_presets_are_all_named() -> None:
    assert all(f"`{name}`" in PAGE or f"--preset {name}" in PAGE for name in presets.PRESETS)


def test_policies_without_default_budget_are_named() -> None:
    without = []
    for name in POLICIES:
        try:
            build_policy(name, {})
        except KvmnnError as exc:
            assert "expected a budget (tokens) or a keep_ratio" in str(exc)
            without.append(name)
    (said,) = re.findall(r"There is no default for ([^:]+):", PAGE)
    assert "and [scored\npolicies]" in said
    assert re.findall(r"`(\w+)`", said) == [name for name in without if not issubclass(POLICIES[name], ScoredPolicy)]


def test_stored_position_perplexities_equal_measurement() -> None:
    rows = json.loads((ROOT / "fixtures" / "lm" / "expected.json").read_text(encoding="utf-8"))["chunks_of_4"]["rows"]
    found = {row["name"]: row["ppl"] for row in rows}
    right, wrong = found["streaming 4+252"], found["streaming 4+252 WRONG positions"]
    assert f"tokens is {right:.1f} with true positions and {wrong:.0f} with stored ones" in PAGE


def test_benchmark_marks_and_counts_shares_above_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    lm = importlib.import_module("lm")
    rows = json.loads((ROOT / "benchmarks" / "lm.json").read_text(encoding="utf-8"))["policy_times"]
    above = [row for row in rows if row["share"] > 0.10]
    section = lm.policy_section(rows)
    assert section.count("(**above**)") == len(above) and f": {len(above)} of {len(rows)} rows are above" in section
    assert section in (ROOT / "benchmarks" / "lm.md").read_text(encoding="utf-8")


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_real_model_table_equals_benchmark() -> None:
    """Rows of the table are those of benchmarks/real.md, by the numbers that both show."""
    benchmark = (ROOT / "benchmarks" / "real.md").read_text(encoding="utf-8")
    measured = {tuple(cell.strip() for cell in line.split("|")[3:-1]) for line in benchmark.splitlines() if "|" in line}
    numbers = {(cells[0], cells[1], cells[3], cells[4]) for cells in measured if len(cells) == 5}
    section = PAGE.split("## On a real model")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .* \| ([-+.\d]+) \| ([.\d]+) \| ([.\d]+) % \| ([.\d]+) \|$", section, re.MULTILINE)
    assert len(rows) == 7 and set(rows) <= numbers
