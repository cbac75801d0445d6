"""docs/policies.md: its table names every policy with its options and defaults."""

from __future__ import annotations

import dataclasses
import doctest
import re
from typing import Any, get_args, get_type_hints

import pytest
from repository import ROOT

from kvmnn import policies
from kvmnn.policies import POLICIES
from kvmnn.policies.registry import MODEL_POLICIES

PAGE = ROOT / "docs" / "policies.md"
#: The oracle has a section, the engine's planner a page.
NAMES = [*POLICIES, *(name for name in MODEL_POLICIES if name not in ("oracle", "h2o_engine"))]


def tables() -> list[list[list[str]]]:
    """The tables of the page, as cells, without their headers."""
    found = re.findall(r"\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE.read_text(encoding="utf-8"))
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def test_docstring_examples_run() -> None:
    assert doctest.testmod(policies).failed == 0


def test_example_policies_are_short() -> None:
    """Each example is a complete policy of fewer than 40 lines with one method."""
    section = PAGE.read_text(encoding="utf-8").partition("## How to write a policy")[2].partition("\n## ")[0]
    examples = re.findall(r">>> @dataclass.*?\n(?:\.\.\. ?.*\n)+", section)
    assert len(examples) == 2
    for example in examples:
        assert example.count("\n") < 40 and example.count("def ") == example.count("def select_tokens(") == 1


def test_table_names_every_policy_and_what_it_looks_at() -> None:
    rows = tables()[0]
    assert [row[0].strip("`") for row in rows] == NAMES
    looks = {"lengths": "lengths", "keys": "keys", "scores": "scores", "head scores": "scores by head"}
    for row in rows:
        policy = (POLICIES | MODEL_POLICIES)[row[0].strip("`")]
        if issubclass(policy, policies.ScoredPolicy):
            assert row[2] == ", ".join(name for name in ("keys", "values", "queries") if name in policy.tensors)
        else:
            assert row[2] == looks[policy.requires]


def format_default(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return "+".join(map(str, default))
    return f"{default:.4g}" if isinstance(default, float) else str(default)


def list_own_options(policy: type[policies.Policy]) -> list[str]:
    """Options that scored policies do not share, with defaults, as the table has them."""
    options = []
    for entry in dataclasses.fields(policy):
        if not entry.repr or (issubclass(policy, policies.ScoredPolicy) and entry.name in SHARED):
            continue
        default = entry.default
        if issubclass(policy, policies.BudgetedPolicy):
            default = {"budget": policy.default_budget, "keep_ratio": policy.default_keep_ratio}.get(
                entry.name, default
            )
        if default in (None, "", ()):
            options += [] if entry.name in ("budget", "keep_ratio", "skip_layers") else [f"`{entry.name}`"]
        else:
            options.append(f"`{entry.name}={format_default(default)}`")
    return options


SHARED = {entry.name: entry for entry in dataclasses.fields(policies.ScoredPolicy)}


@pytest.mark.parametrize("name", NAMES)
def test_table_has_every_option_and_default(name: str) -> None:
    (row,) = (row for row in tables()[0] if row[0] == f"`{name}`")
    assert row[3] == ", ".join(list_own_options((POLICIES | MODEL_POLICIES)[name]))


def test_shared_table_has_every_option_and_default() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in tables()[1]}
    assert set(rows) == set(SHARED) - {"budget", "keep_ratio", "skip_layers"}
    for name, default in rows.items():
        assert default == (format_default(SHARED[name].default) if SHARED[name].default not in (None, ()) else "-")
    page = PAGE.read_text(encoding="utf-8")
    for wrapper in get_args(get_type_hints(policies.ScoredPolicy)["wrapper"]):
        assert f"`{wrapper}`" in page
