"""What a runtime stores as frames leaves the process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@cache
def measured(mode: str, threads: int) -> dict[str, float]:
    script = ROOT / "tests" / "support" / "runtime_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), mode, str(threads)], check=True, capture_output=True, text=True, timeout=300
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2])
def test_runtime_stored_rows_release_their_memory(threads: int) -> None:
    off, store = measured("off", 0), measured("store", threads)
    layer = off["raw"] / 8
    assert off["after"] > off["raw"] * 0.95
    assert store["raw"] == off["raw"] and store["ratio"] > 3
    # the frames, one array in which a layer is assembled, and with threads the next layer's rows and what each works in
    assert store["after"] < store["held"] + (1.5 if threads == 0 else 4.5) * layer
    assert store["after"] < off["after"] * 0.75
