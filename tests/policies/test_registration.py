"""Policies of users: known by name here and in worker processes, never confused with kvmnn's own or with older code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.errors import KvmnnError
from kvmnn.policies import POLICIES, BudgetedPolicy, LayerState, create_policy, register_policy
from kvmnn.policies import registry as policy_registry


@dataclass(frozen=True, kw_only=True)
class LatestHalf(BudgetedPolicy):
    """Keep the latest tokens."""

    name = "latest_half"

    def select_tokens(self, state):
        size = self.resolve_budget(state.tokens)
        return None if state.tokens <= size else range(state.tokens - size, state.tokens)


@pytest.fixture
def registered():
    register_policy(LatestHalf)
    yield LatestHalf
    POLICIES.pop("latest_half")
    policy_registry._REGISTERED.pop("latest_half")


def test_register_policy_makes_name_known(registered) -> None:
    assert create_policy("latest_half", budget=3) == LatestHalf(budget=3)
    assert policy_registry.list_registered_files() == [__file__]


def test_register_policy_twice_takes_the_last(registered) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(LatestHalf):
        name = "latest_half"

    Other.__qualname__ = "Other"
    register_policy(Other)
    assert type(create_policy("latest_half", budget=3)) is Other


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "streaming"}, "one of kvmnn's own policies"),
        ({"name": "full"}, "one of kvmnn's own policies"),
        ({"name": "two words"}, "expected a word"),
        ({}, "expected a word"),
    ],
)
def test_register_policy_bad_name_is_refused(attributes, message) -> None:
    policy = dataclass(frozen=True, kw_only=True)(type("Bad", (BudgetedPolicy,), attributes))
    with pytest.raises(KvmnnError, match=message):
        register_policy(policy)


def test_register_policy_other_objects_are_refused() -> None:
    for value in (dict, LatestHalf(budget=3), "streaming"):
        with pytest.raises(KvmnnError, match="is no policy"):
            register_policy(value)


def test_register_policy_local_class_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(BudgetedPolicy):
        name = "local"

    with pytest.raises(KvmnnError, match="top level of a file"):
        register_policy(Local)


_POLICY_SOURCE = """
from dataclasses import dataclass
import numpy as np
from kvmnn.evaluation import EvaluationSettings
from kvmnn.lm import evaluate
from kvmnn.policies import BudgetedPolicy

@dataclass(frozen=True, kw_only=True)
class Mine(BudgetedPolicy):
    name = "mine"

    def select_tokens(self, state):
        size = self.resolve_budget(state.tokens)
        return None if state.tokens <= size else np.arange(state.tokens - size, state.tokens)
"""
_CALL_SOURCE = f"""
result = evaluate(
    {str(FIXTURES / "lm")!r},
    {str(FIXTURES / "lm" / "texts" / "trace.py.txt")!r},
    [Mine(budget=48), "recent_only:budget=48"],
    settings=EvaluationSettings(tokens=96, chunk=16, timing=False),
    store="cells.jsonl",
)
_, mine, window = result.rows
print(mine.nll == window.nll, mine.process_peak_bytes is None)
"""


def _run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(source, encoding="utf-8")
    return subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_evaluate_own_policy_of_a_script_is_measured_again_when_its_file_changes(tmp_path: Path) -> None:
    changed = _POLICY_SOURCE.replace("np.arange(state.tokens - size, state.tokens)", "np.arange(size)")
    for source, expected in ((_POLICY_SOURCE, "True True"), (_POLICY_SOURCE, "True True"), (changed, "False True")):
        done = _run_script(tmp_path, source + _CALL_SOURCE)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.slow
def test_evaluate_own_policy_of_a_module_is_measured_in_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_POLICY_SOURCE, encoding="utf-8")
    done = _run_script(tmp_path, "import sys\nsys.path.insert(0, '')\nfrom mine import *" + _CALL_SOURCE)
    assert (done.returncode, done.stdout.strip()) == (0, "True False"), done.stderr


def test_load_registered_files_that_measure_when_imported_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from kvmnn.policies.registry import list_registered_files\nlist_registered_files()\n", "utf-8")
    with pytest.raises(KvmnnError, match=r'mine\.py measures when it is imported: expected if __name__ == "__main__"'):
        policy_registry.load_registered_files([str(path)])
    assert policy_registry.list_registered_files() == []


@pytest.mark.parametrize("selection", [np.array([0.5, 2.0]), [np.array([True, False])]])
def test_policy_selecting_by_no_integers_is_refused(selection) -> None:
    class Fractional(LatestHalf):
        def select_tokens(self, state):
            return selection

    state = LayerState(tokens=4, layer=0)
    with pytest.raises(KvmnnError, match="expected integers"):
        Fractional(budget=2).select(state)


def test_policy_selecting_by_a_list_of_integers_is_refused() -> None:
    class Listed(LatestHalf):
        def select_tokens(self, state):
            return [2, 3]

    with pytest.raises(KvmnnError, match="a list of int: expected an array of indices"):
        Listed(budget=2).select(LayerState(tokens=4, layer=0))
