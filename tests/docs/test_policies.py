"""docs/policies.md: its examples run, its tables name every policy, its figures equal the benchmark."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
from typing import get_args, get_type_hints

import pytest
from repository import ROOT

from kvmnn import KvmnnError, policies
from kvmnn.policies import POLICIES

PAGE = ROOT / "docs" / "policies.md"


def tables() -> list[list[list[str]]]:
    """The tables of the page, as cells, without their headers."""
    found = re.findall(r"\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE.read_text(encoding="utf-8"))
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def test_examples_run() -> None:
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0
    assert doctest.testmod(policies).failed == 0


def test_example_policies_are_short() -> None:
    """Each example is a complete policy of fewer than 40 lines with one method."""
    section = PAGE.read_text(encoding="utf-8").partition("## How to write a policy")[2].partition("\n## ")[0]
    examples = re.findall(r">>> @dataclass.*?\n(?:\.\.\. ?.*\n)+", section)
    assert len(examples) == 2
    for example in examples:
        assert example.count("\n") < 40 and example.count("def ") == example.count("def select_tokens(") == 1


def test_tables_name_every_policy() -> None:
    keeps, sources = tables()[:2]
    for table in (keeps, sources):
        assert [row[0].strip("`") for row in table] == list(POLICIES)
    for row in keeps:
        policy = POLICIES[row[0].strip("`")]
        looks = {"lengths": "lengths", "keys": "keys", "scores": "scores", "head scores": "scores by head"}
        if issubclass(policy, policies.ScoredPolicy):
            assert row[3] == ", ".join(name for name in ("keys", "values", "queries") if name in policy.tensors)
        else:
            assert row[3] == looks[policy.requires]


def test_figures_equal_benchmark() -> None:
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


def options_table() -> dict[str, list[list[str]]]:
    """Rows of the table of options, by policy."""
    section = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    found: dict[str, list[list[str]]] = {}
    name = ""
    for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
        policy, *cells = [cell.strip() for cell in line.split(" | ")]
        name = policy.strip("`") or name
        found.setdefault(name, []).append(cells)
    return found


SHARED = "all scored policies"


def own_options(policy: type[policies.Policy]) -> set[str]:
    """The options of a policy that scored policies do not share."""
    names = {entry.name for entry in dataclasses.fields(policy) if entry.repr}
    if issubclass(policy, policies.ScoredPolicy):
        names -= {entry.name for entry in dataclasses.fields(policies.ScoredPolicy)}
    return names


EVERY = {**POLICIES, "h2o_engine": policies.H2OEngine}


def test_option_table_has_every_option_and_default() -> None:
    table = options_table()
    shared = table.pop(SHARED)
    unchanged = {name for name, policy in EVERY.items() if not own_options(policy)}
    assert list(table) == [name for name in EVERY if name not in unchanged]
    for name, policy in EVERY.items():
        options = {entry.name: entry.default for entry in dataclasses.fields(policy) if entry.repr}
        cells_of_policy = [*table.get(name, []), *(shared if issubclass(policy, policies.ScoredPolicy) else [])]
        rows = {cells[0].strip("`"): cells[1:] for cells in cells_of_policy}
        if issubclass(policy, policies.BudgetedPolicy):
            options |= {"budget": policy.default_budget, "keep_ratio": policy.default_keep_ratio}
            assert rows["budget"][2] == policy.budget_help
        else:
            assert rows.pop("no `budget") == ["-", "-", policy.budget_help]
        assert set(rows) == set(options), name
        for option, default in options.items():
            said = rows[option][0].strip("`")
            if isinstance(default, tuple):
                assert said == ("+".join(map(str, default)) or "none")
            elif isinstance(default, bool):
                assert said == ("yes" if default else "no")
            elif isinstance(default, float):
                assert said == f"{default:.4g}"
            else:
                assert said == ("-" if default is None else str(default)), (name, option)


@pytest.mark.parametrize("table_name", [SHARED, *(name for name, policy in EVERY.items() if own_options(policy))])
def test_option_table_values_are_accepted_by_policy(table_name: str) -> None:
    name = "keydiff" if table_name == SHARED else table_name
    unsized = issubclass(EVERY[name], policies.BudgetedPolicy) and not (
        EVERY[name].default_budget or EVERY[name].default_keep_ratio
    )
    sized = {"budget": 600} if unsized else {}
    declared = get_type_hints(EVERY[name])
    for option, _, values, _ in options_table()[table_name]:
        option = option.strip("`")
        base = {} if option in ("budget", "keep_ratio") else sized | ({"wrapper": "block"} if option == "chunk" else {})
        least = re.match(r"at least (\d+)", values)
        if least:
            policies.create_policy(name, **base, **{option: int(least[1])})
            with pytest.raises(KvmnnError):
                policies.create_policy(name, **base, **{option: int(least[1]) - 1})
        elif values == "above 0":
            policies.create_policy(name, **base, **{option: 1e-9})
            with pytest.raises(KvmnnError):
                policies.create_policy(name, **base, **{option: 0})
        elif values == "odd":
            policies.create_policy(name, **base, **{option: 3})
            with pytest.raises(KvmnnError):
                policies.create_policy(name, **base, **{option: 4})
        elif values == "0 to 1":
            for wrong, right in ((-0.01, 0.0), (1.01, 1.0)):
                policies.create_policy(name, **base, **{option: right})
                with pytest.raises(KvmnnError):
                    policies.create_policy(name, **base, **{option: wrong})
        elif values.startswith("any"):
            for value in (-1, 0, 7):
                policies.create_policy(name, **base, **{option: value})
        elif values.startswith("`"):
            assert [word.strip("`") for word in values.split(", ")] == list(get_args(declared[option]))
        else:
            assert values in ("-", "layers of the model", "yes, no")
