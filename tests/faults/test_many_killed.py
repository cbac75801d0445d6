"""A run over many files, interrupted, terminated or killed, and its processes killed: nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmnn.cli import main

pytestmark = pytest.mark.slow  # starts and kills processes

FILES = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = np.random.default_rng(1).normal(size=(8, 64, 64)).astype(np.float16)
    for number in range(FILES):
        path = tmp_path / "in" / str(number % 3) / f"{number:02}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, words + np.float16(number))
    return tmp_path


def command(*more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvmnn", "encode", "in", "-o", "out", "--jobs", "2", "--resume", "kept", *more]


def started(folder: Path, *more: str, **options: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command(*more), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options,
    )  # fmt: skip


def processes(group: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes that encode, not multiprocessing's own."""
    found = []
    for pid in processes(process.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in line:
            found.append(pid)
    return found


def gone(group: int) -> bool:
    """Whether all processes of a session end within a few seconds."""
    until = time.monotonic() + 15
    while processes(group):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def read(process: subprocess.Popen[str], number: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(number)]


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What is still said, to the end; not by `communicate`, which knows nothing of what `read` has buffered."""
    assert process.stdout is not None and process.stderr is not None
    out, errors = process.stdout.read(), process.stderr.read()
    process.wait(timeout=30)
    return out, errors


def check_whole(folder: Path, lines: list[str]) -> None:
    """Every file once, in order, each restored by decode; nothing else was written."""
    found = [json.loads(line) for line in lines]
    assert [line["path"] for line in found] == sorted(f"in/{n % 3}/{n:02}.npy" for n in range(FILES))
    assert all(line["ok"] for line in found), [line for line in found if not line["ok"]][:1]
    assert leftovers(folder) == []
    made = sorted(str(path.relative_to(folder)) for path in (folder / "out").rglob("*") if path.is_file())
    frames = [f"out/{line['path'][3:]}.frame" for line in found]
    assert made == sorted([*frames, *(f"{name}.json" for name in frames)])
    for line in found:
        frame, original = f"{folder}/out/{line['path'][3:]}.frame", f"{folder}/{line['path']}"
        assert main(["verify", "-q", frame, "--against", original]) == 0


def end_group(process: subprocess.Popen[str], number: int) -> None:
    """As a terminal does: to all processes."""
    os.killpg(process.pid, number)


def end_one(process: subprocess.Popen[str], number: int) -> None:
    os.kill(process.pid, number)


@pytest.fixture
def running(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start(*more: str, **options: int) -> subprocess.Popen[str]:
        made.append(started(folder, *more, **options))
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("number", "to", "code", "said"),
    [
        (signal.SIGINT, end_group, 130, "interrupted"),
        (signal.SIGINT, end_one, 130, "interrupted"),
        (signal.SIGTERM, end_one, 143, "terminated"),
        (signal.SIGHUP, end_group, 129, "the terminal was closed"),
        (signal.SIGKILL, end_one, -9, None),
    ],
    ids=["ctrl-c", "sigint", "sigterm", "hang-up", "sigkill"],
)
def test_many_files_interrupted_run_can_be_resumed(
    running: Any, folder: Path, number: int, to: Any, code: int, said: str | None
) -> None:
    process = running(pipesize=4096)  # a few lines: it waits for its reader, and is interrupted
    first = read(process, 4)
    to(process, number)
    rest, errors = rest_of(process)
    assert process.returncode == code
    if said:
        assert errors == f"kvmnn: error: {said}\n"
    assert gone(process.pid), "its processes end with it"
    assert number == signal.SIGKILL or leftovers(folder) == []  # what is killed may leave what the next run removes
    before = [*first, *rest.splitlines(keepends=True)]
    assert len(before) < FILES
    times = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.frame")}
    again = running()
    lines, errors = again.communicate(timeout=60)
    assert (again.returncode, errors) == (0, "")
    check_whole(folder, lines.splitlines())
    assert lines.startswith("".join(line for line in before if line.endswith("\n"))), "as they were"
    kept = sum(path.stat().st_mtime_ns == then for path, then in times.items())
    assert kept >= len(first), "what was finished was not done again"


def test_many_files_interrupted_at_start_gives_one_line(running: Any, folder: Path) -> None:
    """Ctrl-C at any moment of the start is one line, of processes that are just starting as well."""
    for delay in (0.0, 0.2):
        process = running()
        while not workers(process) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(delay)
        end_group(process, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) in ((130, "kvmnn: error: interrupted\n"), (0, ""))
        assert gone(process.pid)
        assert leftovers(folder) == []


def test_many_files_killed_worker_changes_no_result(running: Any, folder: Path) -> None:
    process = running()
    while not any(folder.glob("out/*/*")) and process.poll() is None:  # the lines come when most files are done
        time.sleep(0.001)
    os.kill(workers(process)[0], signal.SIGKILL)
    rest, errors = rest_of(process)
    assert (process.returncode, errors) == (0, "")
    check_whole(folder, rest.splitlines())


def test_many_files_closed_pipe_ends_the_run(running: Any, folder: Path) -> None:
    process = running(pipesize=4096)  # a few lines: it cannot end before the pipe is closed
    read(process, 2)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == ""
    assert gone(process.pid)
    assert leftovers(folder) == []
    again = running()
    lines, _ = again.communicate(timeout=60)
    check_whole(folder, lines.splitlines())
