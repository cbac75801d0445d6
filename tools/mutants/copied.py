"""A copy of the tree, in which one file at a time is changed, and what the tests of its room say."""

from __future__ import annotations

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
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import hypothesis.strategies  # noqa: F401  (what tests import, so that forks have it)
import numpy as np  # noqa: F401
import numpy.testing  # noqa: F401
import pytest
import rooms
import zstandard  # noqa: F401
from batches import Calls, batches_of, file_of, seconds_of
from changes import Change

HERE = Path(__file__).parent
PARTS = ("kvmnn", "pyx", "tests", "tools", "fixtures", "docs", "benchmarks", "setup.py", "pyproject.toml", "README.md")
MORE_PARTS = ("MANIFEST.in", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
MEMORY = 6 << 30
TRACE_SECONDS = 1200
NEAR = 2  # files of tests that are run before those of the whole room are looked at
NO_PYTEST = 70
DOUBTED = 1  # a test that takes longer than this many seconds may also fail because the machine is busy


class Copy:
    """Files that are changed and put back. Tests that fail without any change are left out, and said."""

    def __init__(self, source: Path, work: Path) -> None:
        self.work, self.root = work, work / "tree"
        (work / "calls").mkdir(parents=True, exist_ok=True)
        if self.root.exists():  # with what was built of a change, if that run was ended
            shutil.rmtree(self.root)
        self.root.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        for part in (*PARTS, *MORE_PARTS):
            if (source / part).is_dir():
                shutil.copytree(source / part, self.root / part, ignore=ignored, symlinks=True)
            elif (source / part).exists():
                shutil.copy2(source / part, self.root / part)
        python_path = f"{self.root}{os.pathsep}{HERE}"
        self._environment = {"PYTHONPATH": python_path}
        if not list(self.root.glob("kvmnn/**/*.so")):
            self._built(check=True)
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH  # a change can have the same size in the same second
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=hashed)

    def tested(self, change: Change, killers: Counter[str], reach: str) -> dict[str, Any]:
        """What became of a change: killed (by which test), survived, timeout, crash or no build.

        `reach` says which tests are run: of the first files that `rooms` names ("near", where most are noticed), of the
        whole room ("room"), or all of the room that may see the change ("thorough").
        """
        start = time.monotonic()
        files = rooms.tests_of(self.root, change.file, killers)
        if reach == "near" and change.file.endswith(".py"):
            files = files[:NEAR]
        calls = self._calls(files)
        batches = batches_of(calls, change, (self.root / change.file).read_bytes(), reach == "thorough")
        outcome: dict[str, Any] = {"outcome": "survived"}
        with self._changed(change) as built:
            if not built:
                outcome = {"outcome": "no build"}
            for batch in batches:
                if outcome["outcome"] == "survived":
                    outcome = self._run(batch, limit_of(calls, batch))
        killer = outcome.get("by", "").split(" - ")[0]
        if seconds_of(calls, killer) > DOUBTED and self._run([killer], TRACE_SECONDS)["outcome"] == "killed":
            self._leave_out(killer)
            return self.tested(change, killers, reach)
        return {**outcome, "tests": sum(map(len, batches)), "seconds": round(time.monotonic() - start, 1)}

    @contextmanager
    def _changed(self, change: Change) -> Iterator[bool]:
        """Gives whether it could be built. Whatever it touched is as it was afterwards, its times too."""
        path = self.root / change.file
        touched = [path]
        if not change.file.endswith(".py") and self._current:
            touched += [*self.root.glob("kvmnn/**/*.so"), *self.root.glob("build/pyx/**/*.c")]
        before = {file: (file.read_bytes(), file.stat()) for file in touched}
        try:
            path.write_bytes(change.applied(before[path][0]))
            yield change.file.endswith(".py") or self._built()
        finally:
            for file, (data, stat) in before.items():
                if not file.exists() or file.stat().st_mtime_ns != stat.st_mtime_ns:
                    file.unlink(missing_ok=True)
                    file.write_bytes(data)
                    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    @cached_property
    def _current(self) -> bool:
        """All modules built once, so that a changed file is all that is newer than what is made of it."""
        return self._built(check=True)

    def _calls(self, tests: list[str]) -> Calls:
        """What the tests of files call, how long they take, and which fail without any change; found once."""
        paths = {test: self._noted(test) for test in tests}
        if missing := [test for test, path in paths.items() if not path.exists()]:
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                self._run(missing, TRACE_SECONDS, "-p", "called", CALLED=folder)
                for test in missing:
                    found = Path(folder) / f"{test.replace('/', '+')}.json"
                    nothing = {"seconds": {}, "called": {}, "failed": [], "starts": [], "left": 0}  # not collected
                    paths[test].write_text(found.read_text() if found.exists() else json.dumps(nothing))
            for name in (name for test in missing for name in json.loads(paths[test].read_text())["failed"]):
                print(f"mutants: left out, it fails without any change: {name}", flush=True)
        return {test: json.loads(path.read_text()) for test, path in paths.items()}

    def _noted(self, test: str) -> Path:
        name = hashlib.sha256(test.encode() + (self.root / test).read_bytes()).hexdigest()[:24]
        return self.work / "calls" / f"{name}.json"

    def _leave_out(self, test: str) -> None:
        print(f"mutants: left out, it failed without any change: {test}", flush=True)
        path = self._noted(file_of(test))
        found = json.loads(path.read_text())
        path.write_text(json.dumps({**found, "failed": [*found["failed"], test]}))

    def _run(self, words: list[str], limit: float, *options: str, **environment: str) -> dict[str, Any]:
        """Run pytest in a fork of this process, which has imported all but kvmnn and tests: a second less."""
        command = ["-o", "addopts=", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-rfE", "--tb=no"]
        command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            said = Path(folder) / "said"
            arguments = [*command, *(options or ["-x"]), f"--basetemp={folder}/base", *words]
            child = os.fork()
            if child == 0:
                self._be_pytest(arguments, said, {"TMPDIR": folder, **environment})
            status = _ended(child, limit)
            output = said.read_text(errors="replace") if said.exists() else ""
        if status == NO_PYTEST:
            raise RuntimeError(output)
        if status is None:
            return {"outcome": "timeout"}
        if status == 0:
            return {"outcome": "survived"}
        if status < 0:
            return {"outcome": "crash"}
        named = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return {"outcome": "killed", "by": named[0][:200] if named else output.strip()[-200:]}

    def _be_pytest(self, arguments: list[str], said: Path, environment: dict[str, str]) -> NoReturn:
        status = NO_PYTEST
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            os.environ.update({**self._environment, **environment})
            os.chdir(self.root)
            sys.path[:0] = [str(self.root), str(HERE)]
            handle = os.open(said, os.O_WRONLY | os.O_CREAT)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for copy, original in ((0, nothing), (1, handle), (2, handle)):
                os.dup2(original, copy)
            status = int(pytest.main(arguments))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _built(self, check: bool = False) -> bool:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return not subprocess.run(
            command, cwd=self.root, env={**os.environ, **self._environment}, capture_output=not check, check=check
        ).returncode


def limit_of(calls: Calls, batch: list[str]) -> float:
    """Seconds after which a batch hangs."""
    if any("::" not in test for test in batch):
        return TRACE_SECONDS
    return 60 + 20 * sum(seconds_of(calls, test) for test in batch)


def _ended(child: int, limit: float) -> int | None:
    """The exit code of a process, less than 0 where a signal ended it; None where it was ended as it took too long."""
    end = time.monotonic() + limit
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)
