"""docs/lm.md: its commands are commands, its tables name what there is, its figures are those of the fixture."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from repository import ROOT

from kvmnn.cli.command_parser import parse_command_line
from kvmnn.errors import KvmnnError
from kvmnn.evaluation import EvaluationSettings, evaluate, presets
from kvmnn.lm import dump_kv
from kvmnn.policies import create_policy
from kvmnn.policies.registry import POLICIES
from kvmnn.policies.specs import build_policy
from kvmnn.reports import plots

PAGE = (ROOT / "docs" / "lm.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (kvmnn .*)$", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_there_are_commands_of_every_verb_that_runs_a_model() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {"eval", "generate", "dump-kv", "encode", "measure"}
    assert any(command.startswith("kvmnn mnn pack ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    assert parse_command_line(shlex.split(command)[1:]) is not None


def test_every_plot_is_described() -> None:
    table = PAGE.split("## Plots")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(plots.DRAW_FUNCTIONS)


def test_every_preset_is_named() -> None:
    assert all(f"`{name}`" in PAGE or f"--preset {name}" in PAGE for name in presets.PRESETS)


def test_policies_without_a_default_budget_are_named() -> None:
    without = []
    for name in POLICIES:
        try:
            build_policy(name, {})
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


def test_benchmark_marks_and_counts_shares_above_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    lm = importlib.import_module("lm")
    rows = json.loads((ROOT / "benchmarks" / "lm.json").read_text(encoding="utf-8"))["policy_times"]
    above = [row for row in rows if row["share"] > 0.10]
    section = lm.policy_section(rows)
    assert section.count("(**above**)") == len(above) and f": {len(above)} of {len(rows)} rows are above" in section
    assert section in (ROOT / "benchmarks" / "lm.md").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.slow
def test_what_caches_are_worth_is_as_measured(tmp_path: Path) -> None:
    """The table of caches that texts go on from, but for its first row, which is the full cache of all others."""
    model, text = ROOT / "fixtures" / "lm", ROOT / "fixtures" / "lm" / "texts" / "calendar.py.txt"
    lines = re.search(r"\| cache of 512 tokens \|.*\n\|[-|]*\n((?:\|.*\n)+)", PAGE)
    assert lines is not None
    full, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[1].splitlines()]
    for number, (what, held, *numbers) in enumerate(rows):
        cut = re.search(r"`(\w+)`", what)
        policy = create_policy(cut[1], budget=128) if cut else None
        dump_kv(model, text, tmp_path / f"{number}", policy, tokens=512, dtype="fp32" if cut else "fp16")
        settings = EvaluationSettings(tokens=1024, chunk=8, timing=False)
        found = evaluate(model, text, settings=settings, jobs=0, initial_source=tmp_path / f"{number}").rows
        assert [f"{found[0].perplexity:.3f}", f"{100 * found[0].accuracy:.1f} %"] == full[2:4]
        more = f"{found[1].versus_full.nll:+.4f}"
        assert [f"{found[1].perplexity:.3f}", f"{100 * found[1].accuracy:.1f} %", more] == numbers
        assert found[1].tokens == 512 and (held == "512") == (cut is None)
