"""Fixtures: new stores in directories, in Redis, and over fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis_server import Server, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


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
