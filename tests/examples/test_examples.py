"""The scripts of examples/ run on what ships with kvmnn, in a process of their own, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from repository import FIXTURES, ROOT

EXAMPLES = ROOT / "examples"
TEXT = str(FIXTURES / "lm" / "texts" / "trace.py.txt")
PROMISES = {
    "compress_cache": ([], ("exact (MNN's own bytes)", "dense (for kvmnn alone)", "LOSSLESS (every byte compared")),
    "evaluate_policies": ([str(FIXTURES / "lm"), TEXT, "plots"], ("streaming", "h2o_decayed_heads", ".svg")),
    "own_policy": ([], ("low_norms 128", "streaming 128")),
    "ship_prefix": ([], ("system_prompt_0.k", "read back: 12 arrays, 1,572,864 bytes")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
def test_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    arguments, promises = PROMISES[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for promise in promises:
        assert promise in done.stdout


def test_examples_are_the_tested_ones() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} >= set(PROMISES)
