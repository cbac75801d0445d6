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

from ...optional import package

T = TypeVar("T")

_LOCAL = {"file", "local"}
_STAGED = re.compile(r"\.[0-9a-f]{8}\.tmp$")
_SETTLED_SECONDS = 3600
"""After so long the process that has stored a value is taken to have ended, or to have stored what refers to it."""


class ObjectValues:
    """Values below a folder or bucket.

    Parameters
    ----------
    url
        ``s3://bucket/path``, ``gs://``, ``file:///path``, ``memory://name`` ...
    timeout
        Seconds that one call may take.
    """

    counts_uses = False
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, url: str, timeout: float) -> None:
        fsspec = package("fsspec")
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        protocols = self._fs.protocol
        self._is_local = bool(_LOCAL & {protocols, *(protocols if isinstance(protocols, tuple) else ())})
        self._timeout = timeout
        self._pool: tuple[int, ThreadPoolExecutor] = 0, ThreadPoolExecutor()
        """The process that made the threads, and these: a child of it has none of them."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `Values`."""
        paths = [self._path(name) for name in names]
        if len(paths) == 1:
            return [self._timed(lambda: self._one(paths[0]))]
        found = self._timed(lambda: self._fs.cat(paths, on_error="return"))
        return [_value(found.get(path)) for path in paths]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `Values`."""
        values = {self._path(name): value for name, value in items.items()}
        self._timed(lambda: self._put_local(values) if self._is_local else self._fs.pipe(values))

    def there(self, names: Sequence[str]) -> list[bool]:
        """As `Values`: to ask would be as many round trips, and these engines keep what they have."""
        return [True] * len(names)

    def put_new(self, first: Mapping[str, bytes], then: Mapping[str, bytes]) -> set[str]:
        """As `Values`, where the file system can create without replacing; else who stores last is found."""
        if first:
            self.put_many(first)
        return self._timed(lambda: {name for name, value in then.items() if not self._create(self._path(name), value)})

    def delete(self, names: Sequence[str]) -> None:
        """As `Values`."""
        self._timed(lambda: self._remove([self._path(name) for name in names]))

    def delete_if(self, names: Sequence[str], folder: str, known: Collection[str]) -> bool:
        """As `Values`, but that a name may come between the look and the removal."""
        if set(self.names_in(folder)) != set(known):
            return False
        self.delete(names)
        return True

    def names_in(self, folder: str) -> list[str]:
        """As `Values`."""
        return self._timed(lambda: self._names(f"{self._root}/{folder}"))

    def near(self, folder: str, name: str, most: int) -> list[str]:
        """As `Values`; all names of the folder are listed for it."""
        names = sorted(self.names_in(folder))
        at = bisect_left(names, name)
        return names[max(0, at - most) : at + most]

    def tree(self, begin: str) -> list[str]:
        """As `Values`."""
        return self._timed(lambda: self._below(begin))

    def settled(self, names: Sequence[str]) -> list[str]:
        """As `Values`: what was stored an hour ago, as the file system says; all, where it does not say."""
        return self._timed(lambda: [name for name in names if self._is_settled(self._path(name))])

    def sweep(self) -> int:
        """As `Values`: only local file systems have them."""
        return self._timed(self._sweep) if self._is_local else 0

    def foreign(self) -> list[str]:
        """As `Values`: a file may hold anything."""
        return []

    def close(self) -> None:
        """As `Values`."""
        self._pool[1].shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _timed(self, call: Callable[[], T]) -> T:
        """File systems have no common time-out: one that takes too long is left to itself."""
        if self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(4, "kvmnn-object")
        return self._pool[1].submit(call).result(self._timeout)

    def _one(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _put_local(self, values: Mapping[str, bytes]) -> None:
        """A file gets its name when it is complete; in object stores all do."""
        for path, value in values.items():
            with self._staged(path, value) as staged:
                os.replace(staged, path)

    @contextmanager
    def _staged(self, path: str, value: bytes) -> Iterator[str]:
        """A value in a local file with a name of its own, which is gone afterwards."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        staged = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            self._fs.pipe_file(staged, value)
            yield staged
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staged)

    def _create(self, path: str, value: bytes) -> bool:
        """Store a value that is not there; whether it was not."""
        if self._is_local:
            with self._staged(path, value) as staged:
                try:
                    os.link(staged, path)
                except FileExistsError:
                    return False
            return True
        try:
            self._fs.pipe_file(path, value, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):  # a file system that only replaces
            if self._one(path) is not None:
                return False
            self._fs.pipe_file(path, value)
        return True

    def _sweep(self) -> int:
        left = [str(path) for path in self._fs.find(self._root) if _STAGED.search(str(path))]
        old = [path for path in left if self._is_settled(path)]
        self._remove(old)
        return len(old)

    def _is_settled(self, path: str) -> bool:
        try:
            stored = self._fs.modified(path)
        except (FileNotFoundError, NotImplementedError):
            return True
        if stored.tzinfo is None:
            stored = stored.replace(tzinfo=UTC)
        return bool(time.time() - stored.timestamp() >= _SETTLED_SECONDS)

    def _below(self, begin: str) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            paths = [str(path) for path in self._fs.find(self._root)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = ["/".join(path.rstrip("/").rsplit("/", 2)[1:]) for path in paths if not path.endswith(".tmp")]
        return [name for name in names if name.startswith(begin)]

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache(path)
        try:
            entries = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
        return [name for name in names if name and not name.endswith(".tmp")]


def _value(found: object) -> bytes | None:
    """A value of a call for many; what failed otherwise than by not being there is raised."""
    if found is None or isinstance(found, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return None
    if isinstance(found, BaseException):
        raise found
    return bytes(found)  # type: ignore[call-overload,no-any-return]
