"""Memory of closed sessions is freed before the next case opens its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
from tiny_decoders import Tiny

_CODE = """
import sys
import numpy as np
from kvmnn.gates.suite.measurement import ModelSessions

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

ModelSessions(sys.argv[1], 1).release()
before = resident()
sessions = ModelSessions(sys.argv[2], 1)
for attentions in (False, True):
    session = sessions.get(attentions=attentions)
    session.run_step(np.arange(40), np.arange(40), session.create_empty_past())
    del session
opened = resident()
sessions.release(kept_kind=True)
one = resident()
sessions.release()
print(opened - before, one - before, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads the memory of a process from /proc")
def test_release_frees_memory_of_closed_sessions(tmp_path: Path) -> None:
    (tmp_path / "small.onnx").write_bytes(Tiny().model().SerializeToString())
    big = Tiny(layers=24, kv_heads=4, groups=4, head_dim=32).model().SerializeToString()
    (tmp_path / "big.onnx").write_bytes(big)
    words = [sys.executable, "-c", _CODE, str(tmp_path / "small.onnx"), str(tmp_path / "big.onnx")]
    both, one, none = map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert both > 1.5 * len(big)
    assert one < 0.75 * both
    assert none < 0.25 * len(big)
