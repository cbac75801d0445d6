"""tools/mutants: which changes are made, where, and that the list of survivors is current."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT / "tools" / "mutants"))

import batches
import rooms
from batches import batches_of, function_of
from changes import Change, changes_of


def found(tmp_path: Path, name: str, source: str) -> list[Change]:
    (tmp_path / name).write_text(source)
    return changes_of(tmp_path, name)


def changed(tmp_path: Path, name: str, source: str) -> list[str]:
    """The source with each change made, in order."""
    return [change.applied(source.encode()).decode() for change in found(tmp_path, name, source)]


@pytest.mark.parametrize(
    ("source", "results"),
    [
        ("a < b\n", ["a <= b\n"]),
        ("(a) is  not (b)\n", ["(a) is (b)\n"]),
        ("a not in b\n", ["a in b\n"]),
        ("a == b != c\n", ["a != b != c\n", "a == b == c\n"]),
        ("a and b and c\n", ["a or b and c\n", "a and b or c\n"]),
        ("é = (a  # a and b\n + b)\n", ["é = (a  # a and b\n - b)\n"]),
        ("a -= -1\n", ["a += -1\n", "a -= +1\n", "a -= -2\n"]),
        ("def f(a: Literal[1] = 2) -> 'a < 3': ...\n", ["def f(a: Literal[1] = 3) -> 'a < 3': ...\n"]),
        ("a = f'{b + 1}', True, 1.5, '1 + 1'\n", []),
    ],
)
def test_changes_of_python_source(tmp_path: Path, source: str, results: list[str]) -> None:
    assert changed(tmp_path, "a.py", source) == results


@pytest.mark.parametrize(
    ("name", "source", "results"),
    [
        ("a.pyx", "if a < <size_t>b and c[::1] >> d: # 1 < 2\n", ["<=", "or"]),
        ("a.pyx", 'cdef int f(uint8_t *a) except -1:\n    """1 < 2"""\n    return a + 1\n', ["-", "2"]),
        (
            "a.c",
            "#define A 1\n/* 2 */ if (a->b <= 7 && c++ < -1) d += 3; // 4\n",
            ["<", "8", "||", "<=", "2", "-=", "4"],
        ),
    ],
)
def test_changes_of_cython_and_c_source(tmp_path: Path, name: str, source: str, results: list[str]) -> None:
    assert [change.new for change in found(tmp_path, name, source)] == results


def test_changes_of_equal_lines_have_distinct_keys(tmp_path: Path) -> None:
    """Changes within one line and changes of equal lines have different keys."""
    keys = [change.key for change in found(tmp_path, "a.py", "x = 1\na = 1 + 1\nif x:\n    a = 1 + 1\n")]
    assert keys[0] == "a.py: x = 1: '1' -> '2'"
    assert len(set(keys)) == len(keys) == 7
    assert keys[-1].endswith("'1' -> '2' (3)")


def test_tests_of_module_begin_with_its_own() -> None:
    tests = rooms.tests_of(ROOT, "kvmnn/compressor/verify.py", Counter())
    assert tests[0] == "tests/compressor/test_verify.py" and len(tests) > 5
    assert (
        rooms.tests_of(ROOT, "pyx/kvmnn/policies/h2o/_scores.pyx", Counter())[0] == "tests/policies/h2o/test_scores.py"
    )
    killer = "tests/compressor/test_element_types.py"
    assert rooms.tests_of(ROOT, "kvmnn/compressor/verify.py", Counter([killer]))[0] == killer


@pytest.mark.slow
@pytest.mark.usefixtures("without_collector")
def test_mutants_have_tests_and_current_explanations() -> None:
    every = [
        c
        for pattern in rooms.SOURCES
        for path in ROOT.glob(pattern)
        for c in changes_of(ROOT, str(path.relative_to(ROOT)))
    ]
    assert len(every) > 10_000
    assert not [file for file in {change.file for change in every} if not rooms.tests_of(ROOT, file, Counter())]
    entries = rooms.written()
    assert not rooms.stale([*entries["tunables"], *entries["survivors"]], every)
    assert all(len(entry["why"]) > 20 for kind in entries.values() for entry in kind)
    assert all({"line", "change"} <= entry.keys() for entry in entries["survivors"])


def test_sources_cover_all_code() -> None:
    """A new package or a new kind of file is included."""
    found = {path for pattern in rooms.SOURCES for path in ROOT.glob(pattern)}
    code = {path for top in ("kvmnn", "pyx/kvmnn") for path in (ROOT / top).rglob("*.*")}
    assert found == {path for path in code if path.suffix in (".py", ".pyx", ".pxd", ".c", ".h")}
    for file in (
        "kvmnn/store/directory/index.py",
        "pyx/kvmnn/frames/_stream_header.pxd",
        "pyx/kvmnn/packed/transpose.h",
    ):
        assert ROOT / file in found
    assert "tests/cli/test_store.py" in rooms.tests_of(ROOT, "kvmnn/store/directory/index.py", Counter())


NESTED = """
LIMIT = 1

class A:
    size = 2

    @property
    def f(self):
        def g():
            return 3
        if self:
            return [4 for _ in g()]
        return 5
"""


def test_function_of_change_is_the_innermost(tmp_path: Path) -> None:
    names = {c.old: function_of(c, NESTED.encode()) for c in found(tmp_path, "a.py", NESTED)}
    assert names == {"1": None, "2": None, "3": "A.f.<locals>.g", "4": "A.f", "5": "A.f"}


def test_batches_choose_tests_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "QUICK", 10)
    monkeypatch.setattr(batches, "MOST", 60)
    first, second, third = found(tmp_path, "a.py", "def f(): return 1\ndef g(): return 2\nX = 3\n")
    source = (tmp_path / "a.py").read_bytes()
    calls = {
        "near.py": {
            "seconds": {"near.py::slow": 9.0, "near.py::quick": 0.1, "near.py::broken": 0.0, "near.py::other": 0.2},
            "called": {
                "near.py::slow": [["a.py", "f"]],
                "near.py::quick": [["b.py", "g"], ["a.py", "f"]],
                "near.py::broken": [["a.py", "f"]],
                "near.py::other": [["b.py", "f"]],
            },
            "failed": ["near.py::broken"],
            "starts": [],
            "left": 0,
        },
        "far.py": {
            "seconds": {"far.py::f": 5.0, "far.py::g": 1.0, "far.py::hour": 3600.0},
            "called": {"far.py::f": [["a.py", "f"]], "far.py::g": [["a.py", "g"]], "far.py::hour": [["a.py", "f"]]},
            "failed": [],
            "starts": [],
            "left": 0,
        },
        "starts.py": {
            "seconds": {"starts.py::s": 1.0},
            "called": {},
            "failed": [],
            "starts": ["starts.py::s"],
            "left": 0,
        },
    }
    assert batches_of(calls, first, source, False) == [["near.py::quick", "near.py::slow"], ["far.py::f"]]
    assert batches_of(calls, second, source, False) == [["far.py::g"]]
    assert batches_of(calls, third, source, False) == [["near.py::quick", "near.py::slow"], ["far.py::g", "far.py::f"]]
    later = ["near.py", "far.py", "starts.py::s", "--deselect=near.py::broken"]
    assert batches_of(calls, first, source, True)[-1] == later
    calls["starts.py"]["left"] = 1
    assert batches_of(calls, second, source, True)[-1][:2] == ["far.py", "starts.py"]
    (tmp_path / "a.c").write_text("int x = 1;\n")
    compiled = changes_of(tmp_path, "a.c")[0]
    assert batches_of(calls, compiled, b"", False) == [
        ["near.py::quick", "near.py::other", "near.py::slow"], ["far.py::g", "far.py::f", "starts.py::s"],
    ]  # fmt: skip


def test_known_changes_are_not_drawn_again_and_names_that_are_gone_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.py is loaded by its path: tools/fuzz has a module of that name, too."""
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tools" / "mutants" / "run.py")
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    first, second, third, fourth = every = found(tmp_path, "a.py", "a = 1\nb = 2\nc = 3\nd = 4\n")
    here, path = "tests/tools/test_mutants.py", tmp_path / "tested.jsonl"
    records = [
        {"key": first.key, "file": "a.py", "line": 9, "outcome": "killed", "by": f"{here}::test_all_gone - Ass..."},
        {"key": second.key, "file": "a.py", "line": 2, "outcome": "killed", "by": "tests/gone.py::test_a"},
        {"key": "a.py: e = 5: '5' -> '6'", "file": "a.py", "line": 5, "outcome": "survived"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(run, "TESTED", path)
    results = run.Results(tmp_path / "results.jsonl")
    arguments = argparse.Namespace(only=["a.py:1", "a.py:2", "a.py:3"], survivors=False, seed=1, compiled=0.1, count=9)
    assert run.chosen(every, results, arguments) == [third]
    results.add(fourth, {"outcome": "survived"})
    results.write_tested(every, path)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["key"], record["line"], record.get("by")) for record in written] == [
        (first.key, 1, here), (second.key, 2, None), (fourth.key, 4, None),
    ]  # fmt: skip
