"""A long run with threads, evictions and erasures (tests/support/runtime_soak.py takes any number of steps)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_runtime_soak_memory_is_flat() -> None:
    support = ROOT / "tests" / "support"
    paths = os.pathsep.join(filter(None, [str(support), os.environ.get("PYTHONPATH")]))  # an empty one is the checkout
    command = [sys.executable, str(support / "runtime_soak.py"), "400"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["different"], found["not_stored"], found["fallbacks"]) == (0, 0, 0)
    assert found["updates"] > 100 and found["evicted"] > 500
    assert len(found["memory"]) == 10 and max(found["memory"]) < found["memory"][0] + (8 << 20)
