"""Key-value stores below a remote store: Redis or Valkey, and object stores or any file system that fsspec opens.

Values have names ``folder/name``. An object store has a file for each. In Redis, units are strings, every other folder
is a hash, and the names in the folders of unit records are sorted sets as well.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

from ..._util.packages import import_optional
from ..._util.patterns import declare_pattern
from ...errors import KvmnnError, OptionError
from ..backend import BackendUnavailableError
from ..encryption import StoreCipher, UnsealError
from .records import RECORDS_FOLDER_PREFIX

T = TypeVar("T")

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
RETRY_PAUSES_SECONDS = (0.05, 0.2)
"""Pause before each retry."""
MIN_REST_SECONDS, MAX_REST_SECONDS = 1.0, 60.0
"""Time in which calls fail immediately after an outage, so that callers do not wait for every time-out; consecutive
time-outs double it up to the maximum."""


class KeyValueStore(Protocol):
    """Values by names ``folder/name``; each call is one round trip, or as few as the engine allows.

    Calls raise whatever the client of the engine raises; `CircuitBreaker` turns it into `BackendUnavailableError`.
    """

    has_cheap_touch: bool
    """Whether writing a small value for each last use is cheap."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Exceptions of the client for a request that the engine has refused: a retry would change nothing."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values; None for missing ones."""

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return whether values exist, without reading them; True if that is not known in one round trip."""

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """Write values, each atomically."""

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """Write `dependencies`, then those of `new_items` whose names are free; return the names that were taken.

        Of two concurrent calls with the same name, only one succeeds.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete values; missing ones are ignored."""

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """Delete values if a folder has exactly the `expected_names`; return whether it does."""

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, without the folder."""

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """Return, sorted, the names in a folder that are next to this one: at most `max_per_side` on each side."""

    def list_tree(self, prefix: str) -> list[str]:
        """Return the names of all values in folders that start with a prefix."""

    def select_collectable(self, names: Sequence[str]) -> list[str]:
        """Return those names whose values no put in progress can still refer to."""

    def remove_stale(self) -> int:
        """Delete temporary values of processes that have ended; return how many."""

    def list_foreign(self) -> list[str]:
        """Return the names of values that no store has written, as far as their types show it."""

    def close(self) -> None:
        """Close all connections."""


class CircuitBreaker:
    """Calls of a `KeyValueStore` with retries; after an outage, calls fail immediately for a while.

    A call that fails repeatedly raises `BackendUnavailableError`, with `label`, the name of the store.
    """

    def __init__(self, key_values: KeyValueStore, label: str) -> None:
        self._key_values = key_values
        self._stored_values = key_values.stored_values if isinstance(key_values, SealedValues) else key_values
        self.label = label
        self.has_cheap_touch = key_values.has_cheap_touch
        self._rest_until = 0.0
        self._num_timeouts = 0
        self._is_closed = False
        self._last_problem = ""
        self._lock = threading.Lock()

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        return self._with_retry(lambda: self._key_values.get_many(names)) if names else []

    def get_stored_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values as they are stored: of an encrypted store sealed."""
        return self._with_retry(lambda: self._stored_values.get_many(names)) if names else []

    def put_many(self, items: Mapping[str, bytes]) -> None:
        if items:
            self._with_retry(lambda: self._key_values.put_many(items))

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        return self._with_retry(lambda: self._key_values.contains_many(names)) if names else []

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """Retry as any call: names that a lost answer had written count as taken."""
        return self._with_retry(lambda: self._key_values.put_if_absent(dependencies, new_items))

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self._with_retry(lambda: self._key_values.delete(names))

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        return self._with_retry(lambda: self._key_values.delete_if_unchanged(names, folder, expected_names))

    def list_names(self, folder: str) -> list[str]:
        return self._with_retry(lambda: self._key_values.list_names(folder))

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        return self._with_retry(lambda: self._key_values.list_neighbours(folder, name, max_per_side))

    def list_tree(self, prefix: str) -> list[str]:
        return self._with_retry(lambda: self._key_values.list_tree(prefix))

    def select_collectable(self, names: Sequence[str]) -> list[str]:
        return self._with_retry(lambda: self._key_values.select_collectable(names)) if names else []

    def remove_stale(self) -> int:
        return self._with_retry(self._key_values.remove_stale)

    def list_foreign(self) -> list[str]:
        return self._with_retry(self._key_values.list_foreign)

    def close(self) -> None:
        """Close the engine; errors of one that is gone are ignored."""
        self._is_closed = True
        try:
            self._key_values.close()
        except Exception:
            return

    def check_open(self) -> None:
        """Raise `KvmnnError` if it was closed."""
        if self._is_closed:
            raise KvmnnError(f"{self.label}: the store is closed")

    def _with_retry(self, call: Callable[[], T]) -> T:
        self.check_open()
        with self._lock:
            is_resting, last_problem = time.monotonic() < self._rest_until, self._last_problem
        if is_resting:
            raise BackendUnavailableError(f"{self.label}: {last_problem}")
        timed_out = False
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                result = call()
                self._num_timeouts = 0
                return result
            except KvmnnError:
                raise
            except self._key_values.refusals as error:  # a full server still reads: no outage
                is_full = "maxmemory" in str(error)
                refusal_text = "the server refuses the write" if is_full else "refuses"
                raise BackendUnavailableError(f"{self.label}: {refusal_text}: {_format_error(error)}") from None
            except Exception as error:  # clients have no common base class for the errors of an outage
                if isinstance(error, OSError) and error.errno in _DISK_FULL_CODES:  # reads still work
                    raise BackendUnavailableError(f"{self.label}: cannot be written: {error.strerror}") from None
                failure = "refuses" if isinstance(error, PermissionError | FileNotFoundError) else "does not answer"
                last_problem = f"{failure}: {_format_error(error)}"
                timed_out = "timeout" in type(error).__name__.lower()
                if timed_out:  # a retry would double the wait
                    break
                if pause is not None:
                    time.sleep(pause)
        with self._lock:
            rest_seconds = (
                min(MIN_REST_SECONDS * 2**self._num_timeouts, MAX_REST_SECONDS) if timed_out else MIN_REST_SECONDS
            )
            self._num_timeouts = min(self._num_timeouts + 1, 16) if timed_out else 0
            self._rest_until, self._last_problem = time.monotonic() + rest_seconds, last_problem
        raise BackendUnavailableError(f"{self.label}: {last_problem}")


_PIPELINE_ERROR_REGEX = declare_pattern(
    r"Command # \d+ \((\S+ [\w:./-]*).*\) of pipeline caused error: (.*)", re.DOTALL
)
"""The error of one command among several, in which redis-py shows the value to be written: bytes of K and V."""
_MAX_ERROR_CHARACTERS = 100


def _format_error(error: Exception) -> str:
    """Return the first words of an error, without what is not printable, and without the values of a command."""
    text = str(error)
    if (match := _PIPELINE_ERROR_REGEX.fullmatch(text)) is not None:
        text = match[2] if "maxmemory" in match[2] else f"{match[1]}: {match[2]}"
    words = "".join(character if character.isprintable() else " " for character in text).split()
    return " ".join(words)[:_MAX_ERROR_CHARACTERS] or type(error).__name__


_OPEN_FOLDERS = ("store", "uses")
"""Folders of values that are not sealed: settings, of which a key is checked first, and counters."""


class SealedValues:
    """The values of another store, sealed with a cipher under their names; everything else is as it is there.

    A value that does not decrypt reads as no bytes, as a damaged one.
    """

    def __init__(self, key_values: KeyValueStore, cipher: StoreCipher) -> None:
        self.stored_values = key_values
        self._cipher = cipher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored_values, name)

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._unseal(name, data) for name, data in zip(names, self.stored_values.get_many(names), strict=True)]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        self.stored_values.put_many(self._seal_all(items))

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        return self.stored_values.put_if_absent(self._seal_all(dependencies), self._seal_all(new_items))

    def _seal_all(self, items: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: data if _is_open(name) else self._cipher.seal(data, name) for name, data in items.items()}

    def _unseal(self, name: str, data: bytes | None) -> bytes | None:
        if data is None or _is_open(name):
            return data
        try:
            return self._cipher.unseal(data, name)
        except UnsealError:
            return b""


def _is_open(name: str) -> bool:
    return name.partition("/")[0] in _OPEN_FOLDERS


_LOCAL_PROTOCOLS = {"file", "local"}
_STAGED_REGEX = declare_pattern(r"\.[0-9a-f]{8}\.tmp$")
_MIN_COLLECTABLE_AGE_SECONDS = 3600
"""Age at which the writer of a value has ended, or has written what refers to it."""


P = ParamSpec("P")


def _with_timeout(
    method: Callable[Concatenate[ObjectStoreValues, P], T],
) -> Callable[Concatenate[ObjectStoreValues, P], T]:
    """Run a method on a thread: file systems have no common time-out. A call that takes too long is abandoned."""

    @wraps(method)
    def call_method(self: ObjectStoreValues, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(4, "kvmnn-object")
        return self._pool[1].submit(method, self, *args, **kwargs).result(self._timeout)

    return call_method


class ObjectStoreValues:
    """Values as files below a folder or bucket: ``s3://bucket/path``, ``gs://``, ``file:///path``, ``memory://name``.

    `timeout` is the number of seconds that one call may take.
    """

    has_cheap_touch = False
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, url: str, timeout: float) -> None:
        fsspec = import_optional("fsspec")
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        protocols = self._fs.protocol
        self._is_local = bool(_LOCAL_PROTOCOLS & {protocols, *(protocols if isinstance(protocols, tuple) else ())})
        folder = Path(self._root)
        if self._is_local and ((folder / "store.json").exists() or any(folder.glob("index*.sqlite"))):
            raise OptionError(
                f"{url}: is the directory of a store: expected its path without file://, which is another kind"
            )
        self._timeout = timeout
        self._pool: tuple[int, ThreadPoolExecutor] = 0, ThreadPoolExecutor()
        """Process id and threads: a forked child has none of them."""

    @_with_timeout
    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        paths = [self._path(name) for name in names]
        if len(paths) == 1:
            return [self._read_one(paths[0])]
        value_by_path = self._fs.cat(paths, on_error="return")
        return [_check_value(value_by_path.get(path)) for path in paths]

    @_with_timeout
    def put_many(self, items: Mapping[str, bytes]) -> None:
        values = {self._path(name): value for name, value in items.items()}
        if not self._is_local:
            self._fs.pipe(values)
            return
        for path, value in values.items():  # atomically, as object stores do themselves
            with self._stage_file(path, value) as staged_path:
                os.replace(staged_path, path)

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return True for all: the check would take a round trip each, and these engines do not evict."""
        return [True] * len(names)

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """Write values; if the file system cannot create without replacing, the last writer wins."""
        if dependencies:
            self.put_many(dependencies)
        return self._create_many(new_items)

    @_with_timeout
    def _create_many(self, items: Mapping[str, bytes]) -> set[str]:
        return {name for name, value in items.items() if not self._create(self._path(name), value)}

    @_with_timeout
    def delete(self, names: Sequence[str]) -> None:
        self._delete_paths([self._path(name) for name in names])

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """Delete values; a name may appear between the check and the deletion."""
        if set(self.list_names(folder)) != set(expected_names):
            return False
        self.delete(names)
        return True

    @_with_timeout
    def list_names(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._fs.invalidate_cache(path)
        try:
            entries = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
        return [name for name in names if name and not name.endswith(".tmp")]

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """Return the neighbours of a name; all names in the folder are listed for it."""
        names = sorted(self.list_names(folder))
        position = bisect_left(names, name)
        return names[max(0, position - max_per_side) : position + max_per_side]

    @_with_timeout
    def list_tree(self, prefix: str) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            paths = [str(path) for path in self._fs.find(self._root)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = ["/".join(path.rstrip("/").rsplit("/", 2)[1:]) for path in paths if not path.endswith(".tmp")]
        return [name for name in names if name.startswith(prefix)]

    @_with_timeout
    def select_collectable(self, names: Sequence[str]) -> list[str]:
        """Return the names of values that are at least an hour old, or of unknown age."""
        return [name for name in names if self._is_old_enough(self._path(name))]

    @_with_timeout
    def remove_stale(self) -> int:
        """Delete temporary files, which only local file systems have."""
        if not self._is_local:
            return 0
        staged_paths = [str(path) for path in self._fs.find(self._root) if _STAGED_REGEX.search(str(path))]
        stale_paths = [path for path in staged_paths if self._is_old_enough(path)]
        self._delete_paths(stale_paths)
        return len(stale_paths)

    def list_foreign(self) -> list[str]:
        """Return nothing: a file has no type."""
        return []

    def close(self) -> None:
        self._pool[1].shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read_one(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    @contextmanager
    def _stage_file(self, path: str, value: bytes) -> Iterator[str]:
        """Write a value to a temporary file next to `path`, which is removed at the end."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        staged_path = f"{path}.{os.urandom(4).hex()}.tmp"
        try:
            self._fs.pipe_file(staged_path, value)
            yield staged_path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staged_path)

    def _create(self, path: str, value: bytes) -> bool:
        """Write a value if its name is free; return whether it was."""
        if self._is_local:
            with self._stage_file(path, value) as staged_path:
                try:
                    os.link(staged_path, path)
                except FileExistsError:
                    return False
            return True
        try:
            self._fs.pipe_file(path, value, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):  # a file system that only replaces
            if self._read_one(path) is not None:
                return False
            self._fs.pipe_file(path, value)
        return True

    def _is_old_enough(self, path: str) -> bool:
        try:
            modified_time = self._fs.modified(path)
        except (FileNotFoundError, NotImplementedError):
            return True
        if modified_time.tzinfo is None:
            modified_time = modified_time.replace(tzinfo=UTC)
        return bool(time.time() - modified_time.timestamp() >= _MIN_COLLECTABLE_AGE_SECONDS)

    def _delete_paths(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)


def _check_value(result: object) -> bytes | None:
    """Return the value of an fsspec result, None if the file is missing; raise any other error."""
    if result is None or isinstance(result, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return None
    if isinstance(result, BaseException):
        raise result
    return bytes(result)  # type: ignore[call-overload,no-any-return]


REDIS_PREFIX = "kvmnn:"
ORDER_PREFIX = "order:"
"""Prefix of the sorted set with the names in a folder of records."""
UNITS_FOLDER = "units"
_KEYS_PER_REQUEST = 256


class RedisStoreValues:
    """Values of a Redis or Valkey server, in keys that start with `REDIS_PREFIX`.

    `timeout` is the number of seconds that connecting, or one answer, may take.
    """

    has_cheap_touch = True

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
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _split_name(name)
            if folder == UNITS_FOLDER:
                pipe.get(REDIS_PREFIX + name)
            else:
                pipe.hget(REDIS_PREFIX + folder, field)
        return self._execute(pipe)

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            folder, field = _split_name(name)
            if folder == UNITS_FOLDER:
                pipe.exists(REDIS_PREFIX + name)
            else:
                pipe.hexists(REDIS_PREFIX + folder, field)
        return [bool(answer) for answer in self._execute(pipe)]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for name, value in items.items():
            _queue_put(pipe, name, value)
        pipe.execute()

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """Write all values in one transaction."""
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
        pipe = self._client.pipeline(transaction=False)
        _queue_delete(pipe, names)
        self._execute(pipe)

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """Delete values in the same transaction as the check, unless the server is full."""
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
                self.delete(names)  # a full server refuses transactions
        return True

    def list_names(self, folder: str) -> list[str]:
        if folder == UNITS_FOLDER:
            key_prefix = f"{REDIS_PREFIX}{UNITS_FOLDER}/"
            return [
                _decode_key(key)[len(key_prefix) :]
                for key in self._client.scan_iter(match=key_prefix + "*", count=1000)
            ]
        return [_decode_key(name) for name in self._list_fields([folder])[0]]

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """Return the neighbours of a name; a sorted set that the server has evicted is written again."""
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
                self._client.delete(key)  # another type: only contains names of records, which are added below
            names = self._list_fields([folder])[0]
            if not names:
                return []
            self._client.zadd(key, dict.fromkeys(names, 0))

    def list_tree(self, prefix: str) -> list[str]:
        """Return the names; one round trip for 256 folders."""
        match = REDIS_PREFIX + prefix + "*"
        folders = [_decode_key(key)[len(REDIS_PREFIX) :] for key in self._client.scan_iter(match=match, count=1000)]
        names = []
        for begin_index in range(0, len(folders), _KEYS_PER_REQUEST):
            batch = folders[begin_index : begin_index + _KEYS_PER_REQUEST]
            for folder, fields in zip(batch, self._list_fields(batch), strict=True):
                names += [f"{folder}/{_decode_key(name)}" for name in fields]
        return names

    def list_foreign(self) -> list[str]:
        """Return the keys with `REDIS_PREFIX` that have other types than a store writes."""
        names = []
        keys = [_decode_key(key) for key in self._client.scan_iter(match=REDIS_PREFIX + "*", count=1000)]
        for begin_index in range(0, len(keys), _KEYS_PER_REQUEST):
            batch = keys[begin_index : begin_index + _KEYS_PER_REQUEST]
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.type(key)
            for key, value_type in zip(batch, self._execute(pipe), strict=True):
                name = key[len(REDIS_PREFIX) :]
                expected_type = "zset" if name.startswith(ORDER_PREFIX) else "hash"
                if name.startswith(f"{UNITS_FOLDER}/"):
                    expected_type = "string"
                if _decode_key(value_type) not in (expected_type, "none"):
                    names.append(name)
        return names

    def select_collectable(self, names: Sequence[str]) -> list[str]:
        """Return all names: a put is one transaction."""
        return list(names)

    def remove_stale(self) -> int:
        """Return 0: there are no temporary values."""
        return 0

    def close(self) -> None:
        self._client.close()

    def _list_fields(self, folders: Sequence[str]) -> list[list[bytes]]:
        """Return the names in folders; none for a key of another type."""
        pipe = self._client.pipeline(transaction=False)
        for folder in folders:
            pipe.hkeys(REDIS_PREFIX + folder)
        return [fields or [] for fields in self._execute(pipe)]

    def _execute(self, pipe: Any) -> list[Any]:
        """Return the answers to the commands of a pipeline, None for a command on a key of another type.

        The key of another program, or a damaged one, is treated as missing: it must not break the other commands.
        """
        answers = []
        for answer in pipe.execute(raise_on_error=False):
            is_wrong_type = isinstance(answer, self.refusals) and "WRONGTYPE" in str(answer)
            if isinstance(answer, Exception) and not is_wrong_type:
                raise answer
            answers.append(None if is_wrong_type else answer)
        return answers


def _check_database(url: str) -> None:
    """Refuse a path that is no number: the client would use database 0, and two stores would be one."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError(f"{parts.path[1:]!r} is no number of a database")


def _check_options(pool: Any) -> None:
    """Refuse unknown options of a URL: the client reports them only when it connects, like an outage."""
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
