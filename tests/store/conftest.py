"""Fixtures: new stores in directories, in Redis, and over fsspec; plain and encrypted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from encrypted_stores import encrypt_all
from redis_server import Server, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(params=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice, the second time with all stores encrypted, those of commands and other processes too."""
    if request.param == "encrypted":
        pytest.importorskip("cryptography")
        encrypt_all(monkeypatch)
    return str(request.param)


@pytest.fixture
def new_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The place of one over an engine: "directory", "redis", "file" or "memory"."""

    def made(engine: str) -> str:
        if engine == "redis":
            import redis

            found = request.getfixturevalue("server").url
            with redis.Redis.from_url(found) as client:
                client.flushall()
            return str(found)
        folder = tmp_path_factory.mktemp("store")
        places = {"directory": f"{folder}/store", "file": f"file://{folder}/store"}
        return places.get(engine, f"memory://{folder.parent.name}/{folder.name}")

    return made
