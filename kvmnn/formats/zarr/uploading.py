"""A Zarr store written to a URL: its group's document comes last, so there is no store until all of it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from ...errors import KvmnnError, OutputError
from ...files.urls import NOT_FOUND_ERRORS, first_error_line, open_file_system, redact_url
from .places import DOCUMENT_NAME, RemoteZarrStore

_MAX_PARALLEL_UPLOADS = 8
"""Files on their way, each in memory until it is there."""


class Upload:
    """The files of a store on their way to a URL; what was written is removed again where something fails.

    Parameters
    ----------
    url
        Where the store is to be.
    force
        Replace a store that is there, as a whole; it is removed before the first file is written.
    exclude
        Inputs, which are never replaced.

    Raises
    ------
    OutputError
        Where a store is there and `force` is not said, or files of something else, and for what cannot be written.
    """

    def __init__(self, url: str, *, force: bool, exclude: Iterable[str]) -> None:
        self.target = redact_url(url)
        self._url = url
        self._filesystem, self._root = open_file_system(url)
        self._filesystem.invalidate_cache()
        self._is_replacing = False
        self._documents: dict[str, bytes] = {}
        self._started_paths: list[str] = []
        self._pending: deque[Future[None]] = deque()
        self._check_target(force, exclude)
        self._executor = ThreadPoolExecutor(_MAX_PARALLEL_UPLOADS, "kvmnn-upload")

    def _check_target(self, force: bool, exclude: Iterable[str]) -> None:
        with self._wrap_errors():
            try:
                existing_paths = [str(path) for path in self._filesystem.find(self._root)]
            except NOT_FOUND_ERRORS:
                existing_paths = []
        if not existing_paths:
            return
        if f"{self._root}/{DOCUMENT_NAME}" not in existing_paths:
            raise OutputError(
                f"{self.target}: holds {len(existing_paths):,} files, and is no Zarr store that could be replaced"
            )
        if any(f"{path.rstrip('/')}/".startswith(f"{self.target}/") for path in exclude):
            raise OutputError(f"{self.target}: is the input itself, or holds it; choose another output")
        if not force:
            raise OutputError(f"{self.target}: exists already (-f or --force replaces it)")
        self._is_replacing = True

    @property
    def store(self) -> RemoteZarrStore:
        """What was written, as a store."""
        return RemoteZarrStore(self._url, self._documents)

    def open_file(self, name: str) -> _UploadFile:
        """Begin a file."""
        return _UploadFile(self, name)

    def put_file(self, name: str, data: bytes) -> None:
        """Send a file off; waits for earlier ones where many are on their way. The group's document is kept back."""
        if name == DOCUMENT_NAME:
            self._documents[name] = data
            return
        if self._is_replacing:
            with self._wrap_errors():
                self._filesystem.rm(self._root, recursive=True)
            self._is_replacing = False
        while len(self._pending) >= _MAX_PARALLEL_UPLOADS:
            self._wait_for_oldest()
        path = f"{self._root}/{name}"
        self._started_paths.append(path)
        self._pending.append(self._executor.submit(self._filesystem.pipe_file, path, data))

    def finish_files(self) -> None:
        """Wait until all is there."""
        while self._pending:
            self._wait_for_oldest()

    def commit(self) -> None:
        """Write the group's document."""
        self.finish_files()
        path = f"{self._root}/{DOCUMENT_NAME}"
        self._started_paths.append(path)
        with self._wrap_errors():
            self._filesystem.pipe_file(path, self._documents[DOCUMENT_NAME])
        self._started_paths.clear()

    def _wait_for_oldest(self) -> None:
        with self._wrap_errors():
            self._pending.popleft().result()

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except KvmnnError:
            raise
        except Exception as error:  # each file system has its own
            raise OutputError(f"{self.target}: cannot be written: {first_error_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        for path in self._started_paths:
            with suppress(Exception):
                self._filesystem.rm_file(path)


class _UploadFile:
    """A file of a store, which is written at once."""

    def __init__(self, upload: Upload, name: str) -> None:
        self._upload, self._name = upload, name

    def write(self, data: Any) -> None:
        self._upload.put_file(self._name, bytes(data))
