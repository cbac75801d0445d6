"""docs/lm.md: its commands are commands, its tables name what there is, its figures are those of the fixture."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from repository import ROOT

from kvmnn.cli.parser import parse
from kvmnn.errors import KvmnnError
from kvmnn.evaluation.setup import presets
from kvmnn.policies.registry import POLICIES
from kvmnn.policies.specs import make
from kvmnn.reports import plots

PAGE = (ROOT / "docs" / "lm.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (kvmnn .*)$", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_there_are_commands_of_every_verb_that_runs_a_model() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {"eval", "generate", "dump-kv", "encode", "measure", "pack"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    assert parse(shlex.split(command)[1:]) is not None


def test_every_plot_is_described() -> None:
    table = PAGE.split("## Plots")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(plots.PLOTS)


def test_every_preset_is_named() -> None:
    assert all(f"`{name}`" in PAGE or f"--preset {name}" in PAGE for name in presets.PRESETS)


def test_policies_without_a_default_budget_are_named() -> None:
    without = []
    for name in POLICIES:
        try:
            make(name, {})
        except KvmnnError as exc:
            assert "expected a budget (tokens) or a keep_ratio" in str(exc)
            without.append(name)
    (said,) = re.findall(r"There is no default for ([^:]+):", PAGE)
    assert re.findall(r"`(\w+)`", said) == without


def test_the_price_of_stored_positions_is_the_one_measured() -> None:
    rows = json.loads((ROOT / "fixtures" / "lm" / "expected.json").read_text(encoding="utf-8"))["chunks_of_4"]["rows"]
    found = {row["name"]: row["ppl"] for row in rows}
    right, wrong = found["streaming 4+252"], found["streaming 4+252 WRONG positions"]
    assert f"tokens is {right:.1f} with true positions and {wrong:.0f} with stored ones" in PAGE


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
