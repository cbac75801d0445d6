"""The Python example of docs/many.md runs as a program and reports a file that fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import DOCS


@pytest.mark.slow
def test_python_example_reports_failed_file(tmp_path: Path) -> None:
    text = (DOCS / "many.md").read_text(encoding="utf-8").split("## From Python")[1]
    (program,) = re.findall(r"```python\n(import kvmnn.batch.*?)```", text, re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    np.savez(tmp_path / "a.npz", **{"layer_0.key": np.zeros((2, 64, 64), np.float16)})
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    good, bad = done.stdout.splitlines()
    assert good.startswith("a.npz ") and float(good.split()[1]) > 10
    assert bad == "b.npz b.npz: cannot be read: No such file or directory"
