"""A prefix store holds what is in flight, and past this machine `ram_bytes` of what was read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

SLACK = 28 << 20
"""Units in work on two threads, their scratch, and what malloc keeps for later."""
WORKING = 2 * 8 << 20
"""What the codecs keep of that, for each of two threads: one workspace."""
KEPT = 8 << 20
"""What malloc keeps of it in pieces."""


def measured(*argv: str) -> dict[str, int]:
    script = ROOT / "tests" / "support" / "store_memory.py"
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what is freed leaves the process, in glibc
    argv = (sys.executable, str(script), *argv)
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_directory_store_memory_is_bounded_by_data_in_flight(tmp_path: Path) -> None:
    """`put` takes far less than the text, `get` what it returns, and nothing but workspaces stays."""
    found = measured(str(tmp_path / "store"))
    assert 0 < found["put"] < SLACK < found["raw"] // 2
    assert found["raw"] <= found["get"] + (1 << 20) < found["raw"] + SLACK
    assert found["working"] < WORKING
    assert max(found["held"], found["left"]) < KEPT


@pytest.mark.slow
@pytest.mark.parametrize("ram_bytes", [0, 4 << 20])
def test_remote_store_memory_is_bounded_by_ram_bytes(tmp_path: Path, ram_bytes: int) -> None:
    """Of four texts only what `ram_bytes` allow stays in memory; a text on its way is there as it is stored, too."""
    pytest.importorskip("fsspec")
    found = measured(f"file://{tmp_path}/store", str(ram_bytes))
    assert found["stored"] > ram_bytes
    assert found["put"] < found["stored"] + ram_bytes + SLACK
    assert found["get"] < found["raw"] + found["stored"] + ram_bytes + SLACK
    assert max(found["held"], found["left"]) < ram_bytes + KEPT < 4 * found["stored"]
