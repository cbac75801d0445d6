"""Values in an object store, or any file system that fsspec opens: a file for each."""

from __future__ import annotations

import os
import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import Any, TypeVar

from ...optional import import_optional

T = TypeVar("T")

_LOCAL_PROTOCOLS = {"file", "local"}
_STAGED_REGEX = re.compile(r"\.[0-9a-f]{8}\.tmp$")
_SETTLED_SECONDS = 3600
"""After so long the process that has stored a value is taken to have ended, or to have stored what refers to it."""


class ObjectStoreValues:
    """Values below a folder or bucket.

    Parameters
    ----------
    url
        ``s3://bucket/path``, ``gs://``, ``file:///path``, ``memory://name`` ...
    timeout
        Seconds that one call may take.
    """

    has_cheap_use_counts = False
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, url: str, timeout: float) -> None:
        fsspec = import_optional("fsspec")
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        protocols = self._fs.protocol
        self._is_local = bool(_LOCAL_PROTOCOLS & {protocols, *(protocols if isinstance(protocols, tuple) else ())})
        self._timeout = timeout
        self._pool: tuple[int, ThreadPoolExecutor] = 0, ThreadPoolExecutor()
        """The process that made the threads, and these: a child of it has none of them."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `KeyValueStore`."""
        paths = [self._path(name) for name in names]
        if len(paths) == 1:
            return [self._call_with_timeout(lambda: self._read_one(paths[0]))]
        value_by_path = self._call_with_timeout(lambda: self._fs.cat(paths, on_error="return"))
        return [_check_value(value_by_path.get(path)) for path in paths]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `KeyValueStore`."""
        values = {self._path(name): value for name, value in items.items()}
        self._call_with_timeout(lambda: self._put_local(values) if self._is_local else self._fs.pipe(values))

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """As `KeyValueStore`: to ask would be as many round trips, and these engines keep what they have."""
        return [True] * len(names)

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """As `KeyValueStore`, where the file system can create without replacing; else who stores last is found."""
        if dependencies:
            self.put_many(dependencies)
        return self._call_with_timeout(
            lambda: {name for name, value in new_items.items() if not self._create(self._path(name), value)}
        )

    def delete(self, names: Sequence[str]) -> None:
        """As `KeyValueStore`."""
        self._call_with_timeout(lambda: self._delete_paths([self._path(name) for name in names]))

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """As `KeyValueStore`, but that a name may come between the look and the removal."""
        if set(self.list_names(folder)) != set(expected_names):
            return False
        self.delete(names)
        return True

    def list_names(self, folder: str) -> list[str]:
        """As `KeyValueStore`."""
        return self._call_with_timeout(lambda: self._list_folder(f"{self._root}/{folder}"))

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """As `KeyValueStore`; all names of the folder are listed for it."""
        names = sorted(self.list_names(folder))
        position = bisect_left(names, name)
        return names[max(0, position - max_per_side) : position + max_per_side]

    def list_tree(self, prefix: str) -> list[str]:
        """As `KeyValueStore`."""
        return self._call_with_timeout(lambda: self._list_below(prefix))

    def select_settled(self, names: Sequence[str]) -> list[str]:
        """As `KeyValueStore`: what was stored an hour ago, as the file system says; all, where it does not say."""
        return self._call_with_timeout(lambda: [name for name in names if self._is_settled(self._path(name))])

    def remove_stale(self) -> int:
        """As `KeyValueStore`: only local file systems have them."""
        return self._call_with_timeout(self._remove_stale_files) if self._is_local else 0

    def list_foreign(self) -> list[str]:
        """As `KeyValueStore`: a file may hold anything."""
        return []

    def close(self) -> None:
        """As `KeyValueStore`."""
        self._pool[1].shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call_with_timeout(self, call: Callable[[], T]) -> T:
        """File systems have no common time-out: one that takes too long is left to itself."""
        if self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(4, "kvmnn-object")
        return self._pool[1].submit(call).result(self._timeout)

    def _read_one(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _put_local(self, values: Mapping[str, bytes]) -> None:
        """A file gets its name when it is complete; in object stores all do."""
        for path, value in values.items():
            with self._stage_file(path, value) as staged_path:
                os.replace(staged_path, path)

    @contextmanager
    def _stage_file(self, path: str, value: bytes) -> Iterator[str]:
        """A value in a local file with a name of its own, which is gone afterwards."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        staged_path = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            self._fs.pipe_file(staged_path, value)
            yield staged_path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staged_path)

    def _create(self, path: str, value: bytes) -> bool:
        """Store a value that is not there; whether it was not."""
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

    def _remove_stale_files(self) -> int:
        staged_paths = [str(path) for path in self._fs.find(self._root) if _STAGED_REGEX.search(str(path))]
        stale_paths = [path for path in staged_paths if self._is_settled(path)]
        self._delete_paths(stale_paths)
        return len(stale_paths)

    def _is_settled(self, path: str) -> bool:
        try:
            modified_time = self._fs.modified(path)
        except (FileNotFoundError, NotImplementedError):
            return True
        if modified_time.tzinfo is None:
            modified_time = modified_time.replace(tzinfo=UTC)
        return bool(time.time() - modified_time.timestamp() >= _SETTLED_SECONDS)

    def _list_below(self, prefix: str) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            paths = [str(path) for path in self._fs.find(self._root)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = ["/".join(path.rstrip("/").rsplit("/", 2)[1:]) for path in paths if not path.endswith(".tmp")]
        return [name for name in names if name.startswith(prefix)]

    def _delete_paths(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def _list_folder(self, path: str) -> list[str]:
        self._fs.invalidate_cache(path)
        try:
            entries = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
        return [name for name in names if name and not name.endswith(".tmp")]


def _check_value(result: object) -> bytes | None:
    """A value of a call for many; what failed otherwise than by not being there is raised."""
    if result is None or isinstance(result, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return None
    if isinstance(result, BaseException):
        raise result
    return bytes(result)  # type: ignore[call-overload,no-any-return]
