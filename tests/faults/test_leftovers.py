"""What a killed process leaves is removed by the next that writes there; what a living one writes is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.source import LOSSY_KEY
from kvmnn.cli.entry_point import main
from kvmnn.dtypes import PARTS
from kvmnn.errors import SourceError
from kvmnn.files.atomic import DirectoryOutput, FileOutput
from kvmnn.formats.mnn import unpack

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


class Killed(BaseException):
    """A run that ends in the midst of its renames."""


def end_after(monkeypatch: pytest.MonkeyPatch, last: int) -> list[str]:
    """End the run after `last` renames and removals of files in place."""
    changes: list[str] = []

    def count(change: Any) -> Any:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            if len(changes) == last:
                raise Killed
            done = change(path, *others, **options)
            changes.append(str(path))
            return done

        return call

    monkeypatch.setattr("os.replace", count(os.replace))
    monkeypatch.setattr("pathlib.Path.unlink", count(Path.unlink))
    return changes


@pytest.mark.parametrize("form", ["arrays", "dump"])
def test_unpack_that_is_killed_while_it_replaces_arrays_shows_the_mixture(tmp_path, monkeypatch, form):
    for name, value in (("old", 1), ("new", 2)):
        arrays = {f"layer_{n}.{part}": np.full((2, 9, 16), value, np.float16) for n in (0, 1) for part in PARTS}
        np.savez(tmp_path / f"{name}.npz", **arrays)
        unpack(kvmnn.open(str(tmp_path / f"{name}.npz")), f"{tmp_path}/{name}/", form=form)
    loss = {"schema": "kvmnn-loss", "schema_version": 1, "loss": "by hand"}
    (tmp_path / "old" / "loss.json").write_text(json.dumps(loss))
    folder, outcomes = tmp_path / "folder", []

    def read() -> tuple[set[float], bool]:
        source = kvmnn.open(str(folder))
        return {float(array.to_numpy().max()) for array in source.arrays}, LOSSY_KEY in source.metadata

    def write() -> None:
        unpack(kvmnn.open(str(tmp_path / "new.npz")), str(folder), form=form, force=True)

    for last in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        with monkeypatch.context() as patch, suppress(Killed):
            changes = end_after(patch, last)
            write()
        try:
            outcomes.append(read())
        except SourceError as error:
            assert "may be a mixture of old and new files" in str(error) and "run that command again" in str(error)
            outcomes.append(None)
            with pytest.raises(Killed), monkeypatch.context() as patch:
                end_after(patch, 0)
                write()
            with pytest.raises(SourceError, match="may be a mixture"):
                read()
            write()
            assert read() == ({2.0}, False)
            assert not [name for name in os.listdir(folder) if name.startswith(".")]
        if len(changes) < last:
            break
    num_files = sum(len(files) for _, _, files in os.walk(tmp_path / "new"))
    assert outcomes == [({1.0}, True), *[None] * num_files, *[({2.0}, False)] * 2]


def test_decode_killed_while_it_replaces_arrays_is_refused_until_it_runs_again(tmp_path):
    np.savez(
        tmp_path / "a.npz", **{f"layer_{n}.{part}": np.ones((2, 9, 16), np.float16) for n in (0, 1) for part in PARTS}
    )
    program = (
        "import os, signal, sys\nfrom kvmnn.cli import main\nreplace, moved = os.replace, []\n"
        "def stop(source, target):\n    moved.append(replace(source, target))\n"
        "    if len(moved) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "assert main(['encode', 'a.npz', '-o', 'b/']) == main(['decode', 'b', '-o', 'c/']) == 0\n"
        "os.replace = stop\nmain(['decode', 'b', '-o', 'c/', '-f'])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=60, cwd=tmp_path, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "c"
    for path in (folder, folder / "layer_1.value.npy"):
        with pytest.raises(SourceError, match=r"\.moving still has 2 files \(layer_1\.key\.npy first\)"):
            kvmnn.open(str(path))
    (leftover,) = folder.glob(".c.kvmnn-*.moving")
    with DirectoryOutput(folder) as output:  # of other files: it sweeps, but makes no mixture whole
        output.open_file("x").write(b"x")
        output.commit()
    assert leftover.exists()
    assert main(["decode", str(tmp_path / "b"), "-o", f"{folder}/", "-f"]) == 0
    assert not leftover.exists() and len(kvmnn.open(str(folder))) == 4


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
