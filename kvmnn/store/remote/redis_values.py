"""Values in Redis or Valkey: units are strings, every other folder is a hash, and the names of some are sorted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...optional import import_optional
from .records import RECORDS_FOLDER_PREFIX

REDIS_PREFIX = "kvmnn:"
ORDER_PREFIX = "order:"
"""Of the sorted set that has the names in a folder of records."""
UNITS_FOLDER = "units"
_KEYS_PER_REQUEST = 256


class RedisStoreValues:
    """Values of a server; those with `REDIS_PREFIX` are the store's.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` or ``unix://``; ``valkey://`` is ``redis://``.
    timeout
        Seconds that connecting, or one answer, may take.
    """

    has_cheap_use_counts = True

    def __init__(self, url: str, timeout: float) -> None:
        redis = import_optional("redis")
        if url.startswith("valkey"):
            url = "redis" + url[len("valkey") :]
        _check_database(url)
        self._watch_error: type[Exception] = redis.WatchError
        self.refusals: tuple[type[Exception], ...] = (redis.ResponseError,)
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        _check_options(self._client.connection_pool)

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `KeyValueStore`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _split_name(name)
            if folder == UNITS_FOLDER:
                pipe.get(REDIS_PREFIX + name)
            else:
                pipe.hget(REDIS_PREFIX + folder, field)
        return self._execute(pipe)

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """As `KeyValueStore`."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _split_name(name)
            if folder == UNITS_FOLDER:
                pipe.exists(REDIS_PREFIX + name)
            else:
                pipe.hexists(REDIS_PREFIX + folder, field)
        return [bool(answer) for answer in self._execute(pipe)]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `KeyValueStore`."""
        pipe = self._client.pipeline(transaction=False)
        for name, value in items.items():
            _queue_put(pipe, name, value)
        pipe.execute()

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """As `KeyValueStore`, all in one transaction."""
        pipe = self._client.pipeline(transaction=True)
        for name, value in new_items.items():
            folder, field = _split_name(name)
            pipe.hsetnx(REDIS_PREFIX + folder, field, value)
        for name, value in dependencies.items():
            _queue_put(pipe, name, value)
        for name in new_items:
            _queue_order(pipe, name)
        answers = pipe.execute()[: len(new_items)]
        return {name for name, is_new in zip(new_items, answers, strict=True) if not is_new}

    def delete(self, names: Sequence[str]) -> None:
        """As `KeyValueStore`."""
        pipe = self._client.pipeline(transaction=False)
        _queue_delete(pipe, names)
        self._execute(pipe)

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """As `KeyValueStore`; nothing can come between the look and the removal, but on a server that is full."""
        with self._client.pipeline() as pipe:
            try:
                pipe.watch(REDIS_PREFIX + folder)
                if set(self.list_names(folder)) != set(expected_names):
                    return False
                pipe.multi()
                _queue_delete(pipe, names)
                self._execute(pipe)
            except self._watch_error:
                return False
            except self.refusals as error:
                if "maxmemory" not in str(error):
                    raise
                self.delete(names)  # it refuses whatever is in a transaction
        return True

    def list_names(self, folder: str) -> list[str]:
        """As `KeyValueStore`."""
        if folder == UNITS_FOLDER:
            key_prefix = f"{REDIS_PREFIX}{UNITS_FOLDER}/"
            return [
                _decode_key(key)[len(key_prefix) :]
                for key in self._client.scan_iter(match=key_prefix + "*", count=1000)
            ]
        return [_decode_key(name) for name in self._list_fields([folder])[0]]

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """As `KeyValueStore`; an order that the server has evicted is made anew."""
        key = REDIS_PREFIX + ORDER_PREFIX + folder
        while True:
            pipe = self._client.pipeline(transaction=False)
            pipe.zrevrangebylex(key, f"({name}", "-", 0, max_per_side)
            pipe.zrangebylex(key, f"[{name}", "+", 0, max_per_side)
            pipe.zcard(key)
            pipe.hlen(REDIS_PREFIX + folder)
            lower_names, upper_names, num_ordered, num_stored = self._execute(pipe)
            if (num_ordered or 0) >= (num_stored or 0):
                return [_decode_key(name_bytes) for name_bytes in (*(lower_names or ())[::-1], *(upper_names or ()))]
            if num_ordered is None:
                self._client.delete(key)  # is no order: only names of records are in it, and these follow
            names = self._list_fields([folder])[0]
            if not names:
                return []
            self._client.zadd(key, dict.fromkeys(names, 0))

    def list_tree(self, prefix: str) -> list[str]:
        """As `KeyValueStore`: one round trip for some hundred folders."""
        match = REDIS_PREFIX + prefix + "*"
        folders = [_decode_key(key)[len(REDIS_PREFIX) :] for key in self._client.scan_iter(match=match, count=1000)]
        names = []
        for begin_index in range(0, len(folders), _KEYS_PER_REQUEST):
            batch = folders[begin_index : begin_index + _KEYS_PER_REQUEST]
            for folder, fields in zip(batch, self._list_fields(batch), strict=True):
                names += [f"{folder}/{_decode_key(name)}" for name in fields]
        return names

    def list_foreign(self) -> list[str]:
        """As `KeyValueStore`: keys below `REDIS_PREFIX` of other types than a store writes."""
        names = []
        keys = [_decode_key(key) for key in self._client.scan_iter(match=REDIS_PREFIX + "*", count=1000)]
        for begin_index in range(0, len(keys), _KEYS_PER_REQUEST):
            batch = keys[begin_index : begin_index + _KEYS_PER_REQUEST]
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.type(key)
            for key, value_type in zip(batch, self._execute(pipe), strict=True):
                name = key[len(REDIS_PREFIX) :]
                expected_type = (
                    "string"
                    if name.startswith(f"{UNITS_FOLDER}/")
                    else "zset"
                    if name.startswith(ORDER_PREFIX)
                    else "hash"
                )
                if _decode_key(value_type) not in (expected_type, "none"):
                    names.append(name)
        return names

    def select_settled(self, names: Sequence[str]) -> list[str]:
        """As `KeyValueStore`: all of them, as a put is one transaction."""
        return list(names)

    def remove_stale(self) -> int:
        """As `KeyValueStore`: there are none."""
        return 0

    def close(self) -> None:
        """As `KeyValueStore`."""
        self._client.close()

    def _list_fields(self, folders: Sequence[str]) -> list[list[bytes]]:
        """The names in folders; none in a key of another type."""
        pipe = self._client.pipeline(transaction=False)
        for folder in folders:
            pipe.hkeys(REDIS_PREFIX + folder)
        return [fields or [] for fields in self._execute(pipe)]

    def _execute(self, pipe: Any) -> list[Any]:
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
        option_match = re.search(r"keyword argument '([^']*)'", str(error))
        raise ValueError(f"its option {option_match[1]!r} is unknown" if option_match else str(error)) from error


def _split_name(name: str) -> tuple[str, str]:
    folder, _, field = name.partition("/")
    return folder, field


def _queue_put(pipe: Any, name: str, value: bytes) -> None:
    folder, field = _split_name(name)
    if folder == UNITS_FOLDER:
        pipe.set(REDIS_PREFIX + name, value)
    else:
        pipe.hset(REDIS_PREFIX + folder, field, value)
        _queue_order(pipe, name)


def _queue_order(pipe: Any, name: str) -> None:
    folder, field = _split_name(name)
    if folder.startswith(RECORDS_FOLDER_PREFIX):
        pipe.zadd(REDIS_PREFIX + ORDER_PREFIX + folder, {field: 0})


def _queue_delete(pipe: Any, names: Sequence[str]) -> None:
    for name in names:
        folder, field = _split_name(name)
        if folder == UNITS_FOLDER:
            pipe.delete(REDIS_PREFIX + name)
            continue
        pipe.hdel(REDIS_PREFIX + folder, field)
        if folder.startswith(RECORDS_FOLDER_PREFIX):
            pipe.zrem(REDIS_PREFIX + ORDER_PREFIX + folder, field)


def _decode_key(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")
