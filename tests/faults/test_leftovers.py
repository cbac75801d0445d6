"""What a killed process leaves is removed by the next that writes there; what a living one writes is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmnn.files.atomic import DirectoryOutput, FileOutput

WRITER = """
import sys, time
from kvmnn.files.atomic import DirectoryOutput, FileOutput
with FileOutput(sys.argv[1]) as file, DirectoryOutput(sys.argv[2]) as folder:
    file.file.write(b"half")
    file.file.flush()
    folder.open_file("a").write(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.frame"), str(tmp_path / "b")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def temporaries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(".tmp"))


def write(folder: Path) -> None:
    with FileOutput(folder / "other") as output:
        output.file.write(b"x")
        output.commit()
    with DirectoryOutput(folder / "others") as directory:
        directory.open_file("x").write(b"x")
        directory.commit()


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    assert [f"kvmnn-{writer.pid}-" in path.name for path in temporaries(tmp_path)] == [True, True]
    write(tmp_path)
    assert len(temporaries(tmp_path)) == 2, "those of a living process stay"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(temporaries(tmp_path)) == 2
    (tmp_path / "other").unlink()
    with FileOutput(tmp_path / "other") as output:
        output.commit()
    assert temporaries(tmp_path) == []


def test_temporary_files_lock_decides_not_pid(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    """A name may carry the pid of another namespace, where nobody has it; or one that somebody else has by now."""
    (path, folder) = sorted(temporaries(tmp_path), key=os.path.isdir)
    path.rename(tmp_path / ".a.kvmnn-999999999-00000000.tmp")
    folder.rename(tmp_path / ".b.kvmnn-999999998-00000000.tmp")
    (tmp_path / f".c.kvmnn-{os.getpid()}-00000000.tmp").write_bytes(b"left")
    write(tmp_path)
    assert [path.name[:3] for path in temporaries(tmp_path)] == [".a.", ".b."]


def test_temporary_files_sweep_removes_nothing_else(tmp_path: Path) -> None:
    names = (".a.123.tmp", "a.kvmnn-1-00000000.tmp", ".a.kvmnn-1-0000.tmp", ".a.kvmnn-1-00000000.tmp~")
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / ".l.kvmnn-1-00000000.tmp").symlink_to("target")
    os.mkfifo(tmp_path / ".p.kvmnn-1-00000000.tmp")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {*names, "target"}
    assert (tmp_path / ".l.kvmnn-1-00000000.tmp").is_symlink()


def test_directory_output_swept_before_open_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may find it between its making and its lock."""
    real, swept = os.open, []

    def late(path, flags, *more):
        if str(path).endswith(".tmp") and not swept:
            os.rmdir(path)
            swept.append(path)
        return real(path, flags, *more)

    monkeypatch.setattr("kvmnn.files.temporary.os.open", late)
    with DirectoryOutput(tmp_path / "a") as folder:
        folder.open_file("x").write(b"x")
        folder.commit()
    assert len(swept) == 1
    assert (tmp_path / "a" / "x").read_bytes() == b"x"
