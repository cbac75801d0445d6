"""A long run with threads, evictions and erasures (tests/support/runtime_soak.py takes any number of steps)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_flat_and_no_block_is_lost() -> None:
    script = ROOT / "tests" / "support" / "runtime_soak.py"
    done = subprocess.run([sys.executable, str(script), "1000"], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert (found["different"], found["not_stored"], found["fallbacks"]) == (0, 0, 0)
    assert found["updates"] > 100 and found["evicted"] > 1000
    assert found["memory_end"] < found["memory_early"] + (8 << 20)
