"""Which tests are run for a change, in which order, from what called.py has found of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from changes import Change

QUICK = 5  # seconds of tests that are run first
MOST = 20  # seconds of tests, and
FIRST = 40  # tests of a file, that are run of those that call the changed function

Calls = dict[str, dict[str, Any]]
"""What called.py leaves, of each file of tests."""


def batches_of(calls: Calls, change: Change, source: bytes, thorough: bool) -> list[list[str]]:
    """Batches of tests, one process each.

    Of Python: tests that call the changed function. Of Cython and C, whose calls are not seen: all. `thorough` goes on
    to all tests of the files that have some of them, and to those that start processes.
    """
    if change.file.endswith(".py"):
        function = function_of(change, source)
        chosen = {file: callers(found, change.file, function) for file, found in calls.items()}
        few, most = [test for tests in chosen.values() for test in tests[:FIRST]], MOST
    else:
        chosen = {file: quickest(found, found["seconds"]) for file, found in calls.items()}
        few, most = [test for tests in chosen.values() for test in tests], 4 * MOST
    batches: list[list[str]] = [[], []]
    total = 0.0
    for test in few:
        after = total + seconds_of(calls, test)
        if after <= most or not batches[0]:
            batches[after > QUICK and bool(batches[0])].append(test)
            total = after
    if thorough:
        whole = [file for file, found in calls.items() if chosen[file] or found["left"]]
        starts = [t for file, found in calls.items() if file not in whole for t in quickest(found, found["starts"])]
        batches.append([*whole, *starts, *(f"--deselect={t}" for file in whole for t in calls[file]["failed"])])
    return [batch for batch in batches if batch]


def callers(found: dict[str, Any], file: str, function: str | None) -> list[str]:
    """Tests that call a function, or anything of the file where a change lies in none."""
    called = found["called"].items()
    return quickest(
        found, [test for test, codes in called if any(c[0] == file and function in (c[1], None) for c in codes)]
    )


def quickest(found: dict[str, Any], tests: Iterable[str]) -> list[str]:
    """Those that pass without any change, the quick ones first."""
    return sorted((test for test in tests if test not in found["failed"]), key=lambda test: found["seconds"][test])


def seconds_of(calls: Calls, test: str) -> float:
    return calls.get(file_of(test), {"seconds": {}})["seconds"].get(test, 0.0)


def file_of(test: str) -> str:
    return test.split("::")[0]


def function_of(change: Change, source: bytes) -> str | None:
    """The qualified name of the function in which a change of Python lies."""

    def inside(node: ast.AST, prefix: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            if (
                not getattr(child, "lineno", change.line)
                <= change.line
                <= (getattr(child, "end_lineno", None) or change.line)
            ):
                continue
            if isinstance(child, ast.FunctionDef):
                return inside(child, f"{prefix}{child.name}.<locals>.") or prefix + child.name
            found = inside(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
            if found:
                return found
        return None

    return inside(ast.parse(source), "")
