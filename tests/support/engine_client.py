"""The engine in a process of its own, and what it is known to say about the model in fixtures/mnn_engine."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from conformance import unpack
from repository import FIXTURES

FIXTURES = FIXTURES / "mnn_engine"
DRIVER = Path(__file__).with_name("engine_driver.py")

NAME = "sys"
PREFIX_IDS = np.random.RandomState(77).randint(0, 250, 50).tolist()
QUERY_IDS = np.random.RandomState(78).randint(0, 250, 7).tolist()
CONTINUATION = [76, 25, 135]
GEOMETRY = ("--kv-heads", "2", "--head-dim", "16", "--backend", "x86-avx2")

HAS_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
needs_engine = pytest.mark.skipif(not HAS_WHEEL, reason="MNN's wheel of this version is used on x86-64 Linux only")


def unpack_fixture(name: str, folder: Path) -> Path:
    """The fixture `name`.tar.xz, unpacked into a new folder."""
    return unpack(FIXTURES / f"{name}.tar.xz", folder / name)


class Engine:
    """A child process with the model loaded; use as a context manager."""

    def __init__(self, model: Path, scratch: Path, prefixes: Path | None = None, **settings: Any) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        if prefixes:
            settings["prefix_cache_path"] = str(prefixes)
        self._argv = [sys.executable, str(DRIVER), str(model), str(scratch), json.dumps(settings)]

    def __enter__(self) -> Engine:
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, operation: str, *arguments: Any) -> Any:
        """An operation of `engine_driver.Engine`, and its answer; what else the engine prints is passed over."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
            said.append(line)
        raise AssertionError(f"the engine ended in {operation}: {''.join(said)[-2000:]}")


def continuation(model: Path, prefixes: Path, scratch: Path, name: str = NAME, **settings: Any) -> list[int]:
    """What the engine generates after the query when it takes the prefix from `prefixes`."""
    with Engine(model, scratch, prefixes, **settings) as engine:
        assert engine.call("prefix", name) == 1, "the engine did not find the prefix"
        assert engine.call("generate", PREFIX_IDS, 0) == []
        found: list[int] = engine.call("generate", QUERY_IDS, 3)
    return found
