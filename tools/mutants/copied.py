"""A copy of the tree, in which one file at a time is changed, and what the tests of its room say."""

from __future__ import annotations

import ast
import compileall
import hashlib
import json
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import rooms
from changes import Change

HERE = Path(__file__).parent
PARTS = ("kvmnn", "pyx", "tests", "tools", "fixtures", "docs", "benchmarks", "setup.py", "pyproject.toml", "README.md")
MORE_PARTS = ("MANIFEST.in", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
TEST_SECONDS = 150  # for one test: what takes longer hangs
ROOM_SECONDS = 1200
MEMORY = 12 << 30
FIRST = 40  # tests of a file that call the changed function


class Copy:
    """Files that are changed and put back. Tests that fail without any change are left out, and said."""

    def __init__(self, source: Path, work: Path) -> None:
        self.work, self.root = work, work / "tree"
        (work / "calls").mkdir(parents=True, exist_ok=True)
        if self.root.exists():
            shutil.rmtree(self.root)
        self.root.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        for part in (*PARTS, *MORE_PARTS):
            if (source / part).is_dir():
                shutil.copytree(source / part, self.root / part, ignore=ignored, symlinks=True)
            elif (source / part).exists():
                shutil.copy2(source / part, self.root / part)
        python_path = f"{self.root}{os.pathsep}{HERE}"
        self._environment = {**os.environ, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1"}
        if not list(self.root.glob("kvmnn/**/*.so")):
            self._built(check=True)
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH  # a change can have the same size in the same second
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=hashed)

    def tested(self, change: Change, killers: Counter[str], whole_room: bool) -> dict[str, Any]:
        """What became of a change: killed (by which test), survived, timeout, crash or no build.

        Test files are run one after another until a test fails; of each, all tests with `whole_room` or where it is not
        known which of them call the changed code, else those that call the changed function.
        """
        start = time.monotonic()
        tests = rooms.tests_of(self.root, change.file, killers)
        path = self.root / change.file
        source = path.read_bytes()
        function = None if whole_room else function_of(change, source)
        modules = {module: module.read_bytes() for module in self.root.glob("kvmnn/**/*.so")}
        outcome = {"outcome": "survived"}
        try:
            if not change.file.endswith(".py"):
                for test in tests:
                    self._calls(test)
                path.write_bytes(change.applied(source))
                if not self._built():
                    outcome = {"outcome": "no build"}
            for test in tests:
                if outcome["outcome"] != "survived":
                    break
                path.write_bytes(source)
                calls = self._calls(test)
                path.write_bytes(change.applied(source))
                if words := [test] if function is None else callers(calls, function):
                    outcome = self._run([*words, *(f"--deselect={failed}" for failed in calls["failed"])])
        finally:
            path.write_bytes(source)
            for module, data in modules.items():
                if module.read_bytes() != data:
                    module.write_bytes(data)
        return {**outcome, "seconds": round(time.monotonic() - start, 1)}

    def _calls(self, test: str) -> dict[str, Any]:
        """What the tests of a file call, how long they take, and which fail without any change; found once."""
        name = hashlib.sha256(test.encode() + (self.root / test).read_bytes()).hexdigest()[:24]
        path = self.work / "calls" / f"{name}.json"
        if not path.exists():
            self._run(["-p", "called", test], stop=False, CALLED=str(path))
            found = json.loads(path.read_text())
            if found["failed"]:
                print("mutants: left out, they fail without any change:", *found["failed"], sep="\n  ", flush=True)
        return json.loads(path.read_text())

    def _run(self, words: list[str], stop: bool = True, **environment: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no"]
        command += ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            child = subprocess.Popen(
                [*command, *(["-x"] if stop else []), f"--basetemp={folder}/base", *words],
                cwd=self.root,
                env={**self._environment, "TMPDIR": folder, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            )
            try:
                output, _ = child.communicate(timeout=ROOM_SECONDS)
            except subprocess.TimeoutExpired:
                return {"outcome": "timeout"}
            finally:
                if child.poll() is None or child.returncode < 0:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode == 0:
            return {"outcome": "survived"}
        if "Timeout (" in output or child.returncode < 0:
            return {"outcome": "timeout" if "Timeout (" in output else "crash"}
        named = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return {"outcome": "killed", "by": named[0][:200] if named else output.strip()[-200:]}

    def _built(self, check: bool = False) -> bool:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return not subprocess.run(command, cwd=self.root, capture_output=not check, check=check).returncode


def function_of(change: Change, source: bytes) -> tuple[str, int] | None:
    """File and first line of the function in which the change lies."""
    if not change.file.endswith(".py"):
        return None
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= change.line <= (node.end_lineno or 0)
    ]
    if not functions:
        return None
    inner = max(functions, key=lambda node: node.lineno)
    return change.file, min(node.lineno for node in (inner, *inner.decorator_list))


def callers(calls: dict[str, Any], function: tuple[str, int]) -> list[str]:
    """The quickest tests that call a function."""
    found = [
        test
        for test, codes in calls["called"].items()
        if test not in calls["failed"] and any(tuple(code[:2]) == function for code in codes)
    ]
    return sorted(found, key=lambda test: calls["seconds"][test])[:FIRST]
