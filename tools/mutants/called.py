"""A plugin of pytest: which functions of kvmnn each test calls. `python -m pytest -p called`, with CALLED=folder.

For every file of tests a file of JSON is left there, `tests+room+test_name.py.json`. Calls in other processes are not
seen, but noted is which tests start some; nor is seen what a test takes from a fixture that an earlier one has made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

HERE = os.getcwd()
OURS = os.path.join(HERE, "kvmnn") + os.sep
STARTS = {subprocess.Popen.__init__.__code__}
if fork := getattr(os, "fork", None):  # built in: no frame of its own; multiprocessing's forks are seen by their module
    import multiprocessing.process

    STARTS.add(multiprocessing.process.BaseProcess.start.__code__)

MOST = 2
"""Seconds of processors for the tests of a file: those that come later are left to whoever runs the whole file."""

files: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    nothing = {"seconds": {}, "called": {}, "failed": [], "starts": [], "left": 0, "spent": 0.0}
    found = files.setdefault(item.nodeid.split("::")[0], nothing)
    if found["spent"] > MOST:
        item.add_marker(pytest.mark.skip(reason="not looked at"))
        found["left"] += 1
        return (yield)
    codes: dict[CodeType, None] = {}
    spent = sum(os.times()[:4])

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(OURS) or frame.f_code in STARTS:
            codes[frame.f_code] = None

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        found["seconds"][item.nodeid] = round(sum(os.times()[:4]) - spent, 3)
        found["spent"] += found["seconds"][item.nodeid]
        if STARTS & codes.keys():
            found["starts"].append(item.nodeid)
        ours = [code for code in codes if code not in STARTS]
        found["called"][item.nodeid] = [[os.path.relpath(c.co_filename, HERE), c.co_qualname] for c in ours]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        files[report.nodeid.split("::")[0]]["failed"].append(report.nodeid)


def pytest_sessionfinish() -> None:
    for file, found in files.items():
        (Path(os.environ["CALLED"]) / f"{file.replace('/', '+')}.json").write_text(json.dumps(found))
