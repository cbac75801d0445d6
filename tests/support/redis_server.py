"""A real redis-server on a free port of this machine, for as long as a test needs it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class Server:
    """A server that can be stopped and started again, without what it held."""

    def __init__(self, folder: Path) -> None:
        if PROGRAM is None:
            pytest.skip("there is no redis-server (Debian: apt-get install redis-server)")
        pytest.importorskip("redis")
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        import redis

        argv = [str(PROGRAM), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*argv, *options], cwd=self._folder, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        with redis.Redis.from_url(self.url) as client:
            while True:
                with suppress(redis.ConnectionError):
                    client.ping()
                    return
                assert time.monotonic() < end and self._process.poll() is None, "redis-server does not start"
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """A server that runs."""
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
