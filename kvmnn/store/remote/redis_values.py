"""Values in Redis or Valkey: units are strings, every other folder is a hash, and the names of some are sorted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...optional import package
from .records import AFTER

PREFIX = "kvmnn:"
ORDER = "order:"
"""Of the sorted set that has the names in a folder of records."""
UNITS = "units"
_AT_ONCE = 256


class RedisValues:
    """Values of a server; those with `PREFIX` are the store's.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` or ``unix://``; ``valkey://`` is ``redis://``.
    timeout
        Seconds that connecting, or one answer, may take.
    """

    counts_uses = True

    def __init__(self, url: str, timeout: float) -> None:
        redis = package("redis")
        if url.startswith("valkey"):
            url = "redis" + url[len("valkey") :]
        _check_database(url)
        self._watch_error: type[Exception] = redis.WatchError
        self.refusals: tuple[type[Exception], ...] = (redis.ResponseError,)
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        _check_options(self._client.connection_pool)

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _parts(name)
            if folder == UNITS:
                pipe.get(PREFIX + name)
            else:
                pipe.hget(PREFIX + folder, field)
        return self._read(pipe)

    def there(self, names: Sequence[str]) -> list[bool]:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _parts(name)
            if folder == UNITS:
                pipe.exists(PREFIX + name)
            else:
                pipe.hexists(PREFIX + folder, field)
        return [bool(found) for found in self._read(pipe)]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        for name, value in items.items():
            _put(pipe, name, value)
        pipe.execute()

    def put_new(self, first: Mapping[str, bytes], then: Mapping[str, bytes]) -> set[str]:
        """As `Values`, all in one transaction."""
        pipe = self._client.pipeline(transaction=True)
        for name, value in then.items():
            folder, field = _parts(name)
            pipe.hsetnx(PREFIX + folder, field, value)
        for name, value in first.items():
            _put(pipe, name, value)
        for name in then:
            _put_in_order(pipe, name)
        stored = pipe.execute()[: len(then)]
        return {name for name, is_new in zip(then, stored, strict=True) if not is_new}

    def delete(self, names: Sequence[str]) -> None:
        """As `Values`."""
        pipe = self._client.pipeline(transaction=False)
        _delete(pipe, names)
        self._read(pipe)

    def delete_if(self, names: Sequence[str], folder: str, known: Collection[str]) -> bool:
        """As `Values`; nothing can come between the look and the removal, but on a server that is full."""
        with self._client.pipeline() as pipe:
            try:
                pipe.watch(PREFIX + folder)
                if set(self.names_in(folder)) != set(known):
                    return False
                pipe.multi()
                _delete(pipe, names)
                self._read(pipe)
            except self._watch_error:
                return False
            except self.refusals as error:
                if "maxmemory" not in str(error):
                    raise
                self.delete(names)  # it refuses whatever is in a transaction
        return True

    def names_in(self, folder: str) -> list[str]:
        """As `Values`."""
        if folder == UNITS:
            begin = f"{PREFIX}{UNITS}/"
            return [_text(key)[len(begin) :] for key in self._client.scan_iter(match=begin + "*", count=1000)]
        return [_text(name) for name in self._fields([folder])[0]]

    def near(self, folder: str, name: str, most: int) -> list[str]:
        """As `Values`; an order that the server has evicted is made anew."""
        key = PREFIX + ORDER + folder
        while True:
            pipe = self._client.pipeline(transaction=False)
            pipe.zrevrangebylex(key, f"({name}", "-", 0, most)
            pipe.zrangebylex(key, f"[{name}", "+", 0, most)
            pipe.zcard(key)
            pipe.hlen(PREFIX + folder)
            before, behind, ordered, there = self._read(pipe)
            if (ordered or 0) >= (there or 0):
                return [_text(found) for found in (*(before or ())[::-1], *(behind or ()))]
            if ordered is None:
                self._client.delete(key)  # is no order: only names of records are in it, and these follow
            names = self._fields([folder])[0]
            if not names:
                return []
            self._client.zadd(key, dict.fromkeys(names, 0))

    def tree(self, begin: str) -> list[str]:
        """As `Values`: one round trip for some hundred folders."""
        match = PREFIX + begin + "*"
        folders = [_text(key)[len(PREFIX) :] for key in self._client.scan_iter(match=match, count=1000)]
        names = []
        for at in range(0, len(folders), _AT_ONCE):
            some = folders[at : at + _AT_ONCE]
            for folder, fields in zip(some, self._fields(some), strict=True):
                names += [f"{folder}/{_text(name)}" for name in fields]
        return names

    def foreign(self) -> list[str]:
        """As `Values`: keys below `PREFIX` of other types than a store writes."""
        names = []
        keys = [_text(key) for key in self._client.scan_iter(match=PREFIX + "*", count=1000)]
        for at in range(0, len(keys), _AT_ONCE):
            some = keys[at : at + _AT_ONCE]
            pipe = self._client.pipeline(transaction=False)
            for key in some:
                pipe.type(key)
            for key, kind in zip(some, self._read(pipe), strict=True):
                name = key[len(PREFIX) :]
                wanted = "string" if name.startswith(f"{UNITS}/") else "zset" if name.startswith(ORDER) else "hash"
                if _text(kind) not in (wanted, "none"):
                    names.append(name)
        return names

    def settled(self, names: Sequence[str]) -> list[str]:
        """As `Values`: all of them, as a put is one transaction."""
        return list(names)

    def sweep(self) -> int:
        """As `Values`: there are none."""
        return 0

    def close(self) -> None:
        """As `Values`."""
        self._client.close()

    def _fields(self, folders: Sequence[str]) -> list[list[bytes]]:
        """The names in folders; none in a key of another type."""
        pipe = self._client.pipeline(transaction=False)
        for folder in folders:
            pipe.hkeys(PREFIX + folder)
        return [fields or [] for fields in self._read(pipe)]

    def _read(self, pipe: Any) -> list[Any]:
        """Return the answers to the commands of a pipeline, None for one about a key of another type.

        Another program's key, or a damaged one, is a value that is not there: it must not stop what concerns others.
        """
        answers = []
        for answer in pipe.execute(raise_on_error=False):
            is_wrong_type = isinstance(answer, self.refusals) and "WRONGTYPE" in str(answer)
            if isinstance(answer, Exception) and not is_wrong_type:
                raise answer
            answers.append(None if is_wrong_type else answer)
        return answers


def _check_database(url: str) -> None:
    """The client takes database 0 for a path that is no number: two stores would be one."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError(f"{parts.path[1:]!r} is no number of a database")


def _check_options(pool: Any) -> None:
    """The client looks at options of a URL when it connects, and a name that it does not know is no outage."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        named = re.search(r"keyword argument '([^']*)'", str(error))
        raise ValueError(f"its option {named[1]!r} is unknown" if named else str(error)) from error


def _parts(name: str) -> tuple[str, str]:
    folder, _, field = name.partition("/")
    return folder, field


def _put(pipe: Any, name: str, value: bytes) -> None:
    folder, field = _parts(name)
    if folder == UNITS:
        pipe.set(PREFIX + name, value)
    else:
        pipe.hset(PREFIX + folder, field, value)
        _put_in_order(pipe, name)


def _put_in_order(pipe: Any, name: str) -> None:
    folder, field = _parts(name)
    if folder.startswith(AFTER):
        pipe.zadd(PREFIX + ORDER + folder, {field: 0})


def _delete(pipe: Any, names: Sequence[str]) -> None:
    for name in names:
        folder, field = _parts(name)
        if folder == UNITS:
            pipe.delete(PREFIX + name)
            continue
        pipe.hdel(PREFIX + folder, field)
        if folder.startswith(AFTER):
            pipe.zrem(PREFIX + ORDER + folder, field)


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")
