"""Inputs that are cut or written to while they are read: one line of error, no signal, nothing left of the output.

Each case runs in a process of its own, which SIGBUS would end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import changing_inputs
import numpy as np
import pytest

from kvmnn.errors import SourceError
from kvmnn.files.change_detection import InputGuard
from kvmnn.files.mapped_file import MappedFile

VERBS = {"encoded": "in.npy", "encoded_dump": "in/k_t0_2048.bin", "measured": "in/v_t0_2048.bin"}
VERBS |= {"decoded": "in.frame", "verified": "in.frame", "compared": "words.npy"}


@pytest.fixture(scope="module")
def outcome() -> Iterator[Callable[[str, Path], str]]:
    server = changing_inputs.Server()

    def call(case: str, folder: Path) -> str:
        code, text = server(case, folder)
        assert code == 0, signal.Signals(-code) if code < 0 else code
        return text

    yield call
    server.close()


@pytest.mark.parametrize("how", sorted(changing_inputs.CHANGES))
@pytest.mark.parametrize("verb", VERBS)
def test_verb_input_changed_while_read_is_refused(
    verb: str, how: str, tmp_path: Path, outcome: Callable[[str, Path], str]
) -> None:
    assert outcome(f"{verb}-{how}", tmp_path) == f"SourceError: {tmp_path / VERBS[verb]}: changed while it was read"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "out"))]


@pytest.mark.parametrize("reader", [reader.__name__ for reader in changing_inputs.READERS])
def test_reader_input_changed_while_read_is_refused(
    reader: str, tmp_path: Path, outcome: Callable[[str, Path], str]
) -> None:
    found = outcome(reader, tmp_path)
    assert found.startswith("SourceError: ") and ": changed while it was read" in found
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "out"))]


def test_input_guard_replaced_or_removed_file_reads_old_bytes(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"a" * 8192)
    other.write_bytes(b"b")
    with InputGuard():
        file = MappedFile(path)
        other.replace(path)
        assert file.view(0, file.size).tobytes() == b"a" * 8192
        path.unlink()
        assert file.view(0, file.size).tobytes() == b"a" * 8192


def test_input_guard_ignores_files_not_read_in_its_block(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros(4096))
    one, other = MappedFile(tmp_path / "a.npy"), MappedFile(tmp_path / "b.npy")
    other.read_head(10)
    with InputGuard():
        one.read_head(10)
        (tmp_path / "b.npy").write_bytes(b"")
    with pytest.raises(SourceError, match=r"b\.npy: changed while it was read"), InputGuard():
        other.view(0, 4096).sum()


@pytest.mark.slow
def test_sigbus_of_other_code_reaches_its_handler() -> None:
    """A SIGBUS that is none of ours still ends the process; one that the process handles still gets there."""
    script = """
import os, signal, sys, tempfile
from kvmnn.files.mapped_file import MappedFile
if len(sys.argv) > 1:
    signal.signal(signal.SIGBUS, lambda *_: (print("handled", flush=True), os._exit(0)))
MappedFile(sys.executable).read_head(1)
os.kill(os.getpid(), signal.SIGBUS)
sys.stdout.flush()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=env, timeout=60).returncode == -signal.SIGBUS
    done = subprocess.run([*command, "handled"], env=env, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n")
