"""Scripts in children of a process that has imported what most of them need.

A script itself: a request a line on standard input, an answer a line on standard output, both JSON. `ScriptServer`
starts it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

IMPORTED = ("numpy", "hypothesis", "kvmnn", "kvmnn.bundle", "kvmnn.evaluation", "kvmnn.formats", "kvmnn.policies.h2o")


class ScriptServer:
    """The parent of the children, for the tests."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, script: Path, *arguments: str, folder: Path) -> dict[str, Any]:
        """Run a script in `folder` as whoever types its name does: `code`, `out` and `err`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"script": str(script), "arguments": arguments, "folder": str(folder)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def run(request: dict[str, Any]) -> int:
    """What is run after the fork: the script, with its own folder on the path."""
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path.insert(0, str(Path(request["script"]).parent))
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = 70
                try:
                    code = run(json.loads(line))
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                answer[name] = file.read().decode()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
