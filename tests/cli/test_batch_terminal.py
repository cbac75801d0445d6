"""`--jobs` in a terminal ends silently; a script that starts processes when it is imported gets one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pty = pytest.importorskip("pty")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are large enough for a bar of progress in each process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rng = np.random.default_rng(1)
    (tmp_path / "in").mkdir()
    for number in range(6):
        arrays = {f"layer_0.{part}": rng.normal(size=(2, 4096, 64)).astype(np.float16) for part in ("key", "value")}
        np.savez(f"in/{number}.npz", **arrays)


def in_terminal(*argv: str) -> list[str]:
    """What a terminal shows of a process and of all that it leaves running."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, *argv])
    shown = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    return shown.decode().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["encode", "measure", "inspect"])
def test_jobs_terminal_ends_without_warning(verb: str) -> None:
    output = ["-o", "out/"] if verb == "encode" else []
    shown = in_terminal("-m", "kvmnn", verb, "--jobs", "2", "in", *output)
    assert [line[:16] for line in shown] == [f"ok      in/{number}.npz"[:16] for number in range(6)]


UNGUARDED = """
from os.path import getsize
from kvmnn.batch import run_tasks

def size(task):
    return {"bytes": getsize(task.path)}

for done in run_tasks(["in/0.npz", "in/1.npz"], size):
    print(done.ok)
"""


@pytest.mark.slow
def test_script_without_main_guard_is_one_line_error(tmp_path: Path) -> None:
    Path("script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"kvmnn.errors.KvmnnError: {tmp_path / 'script.py'}: starts processes whenever it is imported, and new "
        'processes import it: put what it does under if __name__ == "__main__":'
    )
    assert done.stderr.count("Traceback") == 1, "that of the script itself; its processes print nothing"
    guarded = UNGUARDED.replace("for done", 'if __name__ == "__main__":\n  for done').replace(
        "    print", "      print"
    )
    Path("script.py").write_text(guarded)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")
