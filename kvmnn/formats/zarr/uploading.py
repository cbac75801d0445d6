"""A Zarr store written to a URL: its group's document comes last, so there is no store until all of it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from ...errors import KvmnnError, OutputError
from ...files.urls import GONE, file_system, first_line, without_secret
from .places import DOCUMENT, RemotePlace

_AT_ONCE = 8
"""Files on their way, each in memory until it is there."""


class Upload:
    """The files of a store on their way to a URL; what was written is removed again where something fails.

    Parameters
    ----------
    url
        Where the store is to be.
    force
        Replace a store that is there, as a whole; it is removed before the first file is written.
    protect
        Inputs, which are never replaced.

    Raises
    ------
    OutputError
        Where a store is there and `force` is not said, or files of something else, and for what cannot be written.
    """

    def __init__(self, url: str, *, force: bool, protect: Iterable[str]) -> None:
        self.target = without_secret(url)
        self._url = url
        self._fs, self._root = file_system(url)
        self._fs.invalidate_cache()
        self._replaces = False
        self._documents: dict[str, bytes] = {}
        self._begun: list[str] = []
        self._waiting: deque[Future[None]] = deque()
        self._check(force, protect)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "kvmnn-upload")

    def _check(self, force: bool, protect: Iterable[str]) -> None:
        with self._failures():
            try:
                held = [str(path) for path in self._fs.find(self._root)]
            except GONE:
                held = []
        if not held:
            return
        if f"{self._root}/{DOCUMENT}" not in held:
            raise OutputError(f"{self.target}: holds {len(held):,} files, and is no Zarr store that could be replaced")
        if any(f"{path.rstrip('/')}/".startswith(f"{self.target}/") for path in protect):
            raise OutputError(f"{self.target}: is the input itself, or holds it; choose another output")
        if not force:
            raise OutputError(f"{self.target}: exists already (-f or --force replaces it)")
        self._replaces = True

    @property
    def place(self) -> RemotePlace:
        """What was written, as a store."""
        return RemotePlace(self._url, self._documents)

    def file(self, name: str) -> _File:
        """Begin a file."""
        return _File(self, name)

    def put(self, name: str, data: bytes) -> None:
        """Send a file off; waits for earlier ones where many are on their way. The group's document is kept back."""
        if name == DOCUMENT:
            self._documents[name] = data
            return
        if self._replaces:
            with self._failures():
                self._fs.rm(self._root, recursive=True)
            self._replaces = False
        while len(self._waiting) >= _AT_ONCE:
            self._one()
        path = f"{self._root}/{name}"
        self._begun.append(path)
        self._waiting.append(self._threads.submit(self._fs.pipe_file, path, data))

    def flush(self) -> None:
        """Wait until all is there."""
        while self._waiting:
            self._one()

    def commit(self) -> None:
        """Write the group's document."""
        self.flush()
        path = f"{self._root}/{DOCUMENT}"
        self._begun.append(path)
        with self._failures():
            self._fs.pipe_file(path, self._documents[DOCUMENT])
        self._begun.clear()

    def _one(self) -> None:
        with self._failures():
            self._waiting.popleft().result()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except KvmnnError:
            raise
        except Exception as error:  # each file system has its own
            raise OutputError(f"{self.target}: cannot be written: {first_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for path in self._begun:
            with suppress(Exception):
                self._fs.rm_file(path)


class _File:
    """A file of a store, which is written at once."""

    def __init__(self, upload: Upload, name: str) -> None:
        self._upload, self._name = upload, name

    def write(self, data: Any) -> None:
        self._upload.put(self._name, bytes(data))
