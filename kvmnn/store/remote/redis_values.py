"""Values in Redis or Valkey: units are strings, every other folder is a hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...optional import package

PREFIX = "kvmnn:"
UNITS = "units"


class RedisValues:
    """Values of a server; those with `PREFIX` are the store's.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` or ``unix://``; ``valkey://`` is ``redis://``.
    timeout
        Seconds that connecting, or one answer, may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        redis = package("redis")
        if url.startswith("valkey"):
            url = "redis" + url[len("valkey") :]
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, _, field = name.partition("/")
            if folder == UNITS:
                pipe.get(PREFIX + name)
            else:
                pipe.hget(PREFIX + folder, field)
        found: list[bytes | None] = pipe.execute()
        return found

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name, value in items.items():
            folder, _, field = name.partition("/")
            if folder == UNITS:
                pipe.set(PREFIX + name, value)
            else:
                pipe.hset(PREFIX + folder, field, value)
        pipe.execute()

    def delete(self, names: Sequence[str]) -> None:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, _, field = name.partition("/")
            if folder == UNITS:
                pipe.delete(PREFIX + name)
            else:
                pipe.hdel(PREFIX + folder, field)
        pipe.execute()

    def names_in(self, folder: str) -> list[str]:
        """As `Values`."""
        if folder == UNITS:
            begin = PREFIX + UNITS + "/"
            return [_text(key)[len(begin) :] for key in self._client.scan_iter(match=begin + "*", count=1000)]
        return [_text(name) for name in self._client.hkeys(PREFIX + folder)]

    def folders(self) -> list[str]:
        """As `Values`."""
        keys = (_text(key)[len(PREFIX) :] for key in self._client.scan_iter(match=PREFIX + "*", count=1000))
        return [key for key in keys if "/" not in key]

    def close(self) -> None:
        """As `Values`."""
        self._client.close()


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")
