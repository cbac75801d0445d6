"""The commands and examples of docs/gates.md run as shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gate_logs
import pytest
from repository import DOCS, ROOT

from kvmnn.gates import RUNTIME_CASES, GateLimits, read_gate_file
from kvmnn.gates.suite.cases import CASE_NAMES, build_cases
from kvmnn.gates.suite.settings import RunSettings, read_run_config

PAGE = (DOCS / "gates.md").read_text()


def test_commands_and_python_example_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.chdir(tmp_path)
    gate_logs.write_logs(Path("out/logs"), gate_logs.row())
    for side in ("baseline", "candidate"):
        gate_logs.write_demo(Path("out", side), {"prompt_128_1": gate_logs.record()})
    commands = re.findall(r"^    kvmnn (gate (?:parse|check|demo|summary) .*)$", PAGE.partition("Exit codes")[0], re.M)
    assert len(commands) == 4
    for command in commands:
        run(*command.split())
    assert json.loads(Path("round/summary.json").read_text())["total_cases"] == 2
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(code, {})


def test_gate_file_example_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r'^    (\{"lossy_target".*\n.*)$', PAGE, re.M)
    (tmp_path / "g.json").write_text(text)
    limits, notes = read_gate_file(tmp_path / "g.json", "runtime_store", GateLimits())
    assert (limits.max_lossless_decomp_us, notes) == (70000, [])


def test_run_config_example_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r'^    (\{"prompts".*\n.*)$', PAGE, re.M)
    (tmp_path / "run.json").write_text(text)
    config = read_run_config(tmp_path / "run.json", CASE_NAMES)
    store = next(case for case in build_cases("runtime", config) if case.mode == "store")
    assert (store.limits.lossy_target, store.limits.max_lossless_decomp_us, store.settings.generate) == (2, 200000, 64)
    assert store.engine["kv_lossless_block_tokens"] == 64
    settings = re.findall(r"`(\w+)=([^`]+)`", PAGE.partition("is one JSON object: settings (")[2].partition(")")[0])
    assert {name: json.loads(value) for name, value in settings} == json.loads(json.dumps(RunSettings().to_dict()))
    assert len(build_cases("runtime", read_run_config(ROOT / "tools" / "gates.json", CASE_NAMES))) == 4


def test_case_table_equals_runtime_cases() -> None:
    assert re.findall(r"^\| `(runtime_\w+)` \| (\w+)", PAGE, re.M) == [
        (name, limits.runtime_mode) for name, limits in RUNTIME_CASES.items()
    ]
