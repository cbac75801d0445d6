"""Verbs in children of a process that has imported everything: killed at a chosen moment, or short of disk space.

A script: a request a line on standard input, an answer a line on standard output, both JSON. `Server` starts it.

Moments are the operations by which files come into being and get their names (Python's audit events): a child that is
to die at moment n kills itself before the n-th. `bytes` is the size beyond which no file can grow; SIGXFSZ is ignored,
so that writes fail as they do on a full disk.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOMENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}

IMPORTED = (
    "csv",
    "email.parser",
    "importlib.metadata",
    "sqlite3",
    "kvmnn.analysis.measurement",
    "kvmnn.cli.batch",
    "kvmnn.cli.entry_point",
    *(f"kvmnn.cli.commands.{name}" for name in ("compressor", "decode", "encode", "measure", "mnn", "plan", "store")),
    "kvmnn.compressor.forward",
    "kvmnn.formats",
    "kvmnn.packed",
    "kvmnn.policies.h2o",
    "kvmnn.store.directory.backend",
)
"""What verbs import: in each of hundreds of children it would take most of their time."""


class Server:
    """The parent of the children, for the tests."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, command: str, **request: Any) -> dict[str, Any]:
        """`code` (negative: the signal), `errors` and the number of `moments`; a request has die_at, after or bytes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"argv": command.split(), **request}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def child(request: dict[str, Any], counted: mmap.mmap) -> int:
    """What is run after the fork."""
    from kvmnn.cli import main

    moments = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal moments
        if event in MOMENTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE):
            moments += 1
            if moments == request.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            counted[:] = moments.to_bytes(4, "little")

    sys.addaudithook(audit)
    if "bytes" in request:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["bytes"],) * 2)
    return main(request["argv"])


def serve() -> None:
    sys.dont_write_bytecode = True  # the first child of a fresh checkout had more moments than the next
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        with mmap.mmap(-1, 4) as counted:
            pid = os.fork()
            if pid == 0:
                os.dup2(writing, 2)
                code = 70
                try:
                    code = child(request, counted)
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(writing)
            if "after" in request:
                time.sleep(request["after"])
                os.kill(pid, signal.SIGKILL)
            with open(reading) as errors:
                text = errors.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            moments = int.from_bytes(counted[:], "little")
        answers.write(json.dumps({"code": code, "errors": text, "moments": moments}) + "\n")
        answers.flush()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    serve()
