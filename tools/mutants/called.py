"""A plugin of pytest: which functions of kvmnn each test calls. `python -m pytest -p called`, with CALLED=file.json.

Calls in other processes are not seen, nor what a test takes from a fixture that an earlier one has made.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

HERE = os.getcwd()
OURS = os.path.join(HERE, "kvmnn") + os.sep

seconds: dict[str, float] = {}
called: dict[str, dict[CodeType, None]] = {}
failed: dict[str, None] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    codes = called.setdefault(item.nodeid, {})

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(OURS):
            codes[frame.f_code] = None

    start = time.monotonic()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        seconds[item.nodeid] = round(time.monotonic() - start, 3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed[report.nodeid] = None


def pytest_sessionfinish() -> None:
    found = {
        test: [[os.path.relpath(code.co_filename, HERE), code.co_firstlineno, code.co_qualname] for code in codes]
        for test, codes in called.items()
    }
    document = {"seconds": seconds, "called": found, "failed": list(failed)}
    Path(os.environ["CALLED"]).write_text(json.dumps(document))
