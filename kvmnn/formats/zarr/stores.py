"""The files of a Zarr store, in a directory or at a URL (fsspec); an upload writes the group's document last."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ...dtypes import Bytes
from ...errors import REPLACE_HINT, KvmnnError, LimitError, OutputError, SourceError, build_read_error
from ...files.mapped_file import MappedFile
from ...files.schema import JsonReader, parse_document, read_bounded
from ...files.urls import NOT_FOUND_ERRORS, first_error_line, is_url, open_file_system, redact_url

DOCUMENT_NAME = "zarr.json"
MAX_DOCUMENT_BYTES = 64 << 20
MAX_ENTRIES = 1 << 16
_MAX_FRAME_OVERHEAD_BYTES = 4096
_MAX_NAME_PARTS = 16

T = TypeVar("T")


class ZarrStore:
    """A store in a directory. Names are relative to it, with slashes; the empty name is the directory itself."""

    def __init__(self, path: str) -> None:
        self.label = path

    def get_path(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self.label, name)

    def read_document(self, name: str) -> JsonReader | None:
        """Return a JSON document; None if there is none."""
        return read_document_at(Path(self.get_path(name)))

    def read_own_document(self, name: str) -> JsonReader | None:
        """Return the document in its own file, ignoring the group's consolidated metadata."""
        return self.read_document(name)

    def list_folders(self, name: str) -> list[str]:
        """Return the names of the folders directly in a folder, sorted."""
        folder = Path(self.get_path(name))
        try:
            with os.scandir(folder) as entries:
                folder_names = sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            raise build_read_error(folder, error) from error
        return _check_entry_count(folder_names, str(folder))

    def read_chunk(self, name: str, max_bytes: int) -> Bytes | None:
        """Return the bytes of a chunk; None if there is none.

        A chunk of more than `max_bytes` bytes is returned truncated, but longer than that.
        """
        path = self.get_path(name)
        if not os.path.lexists(path):
            return None
        file = MappedFile(path)
        return file.view(0, file.size) if file.size else np.empty(0, np.uint8)

    def iter_sizes(self, name: str, depth: int) -> Iterator[tuple[str, int]]:
        """Yield names and sizes of the files in a folder and its folders down to `depth`."""
        folder = self.get_path(name)
        for path in _iter_files_below(folder, depth):
            yield os.path.relpath(path, folder).replace(os.sep, "/"), os.path.getsize(path)


class RemoteZarrStore(ZarrStore):
    """A store at a URL. Documents come from the group's `consolidated_metadata`, if it has any.

    With `documents`, which are not there yet, nothing is taken from the group's document.
    """

    def __init__(self, url: str, documents: Mapping[str, bytes] | None = None) -> None:
        super().__init__(redact_url(url).rstrip("/"))
        self._filesystem, self._root = open_file_system(url)
        self._filesystem.invalidate_cache()
        self._documents = dict(documents or {})
        self._folders_by_parent: dict[str, list[str]] | None = None
        if documents is None:
            self._load_consolidated()

    def get_path(self, name: str) -> str:
        return f"{self.label}/{name}" if name else self.label

    def read_document(self, name: str) -> JsonReader | None:
        text = self._documents.get(name)
        if text is None and self._folders_by_parent is None:
            return self.read_own_document(name)
        return self._parse(text, name)

    def read_own_document(self, name: str) -> JsonReader | None:
        return self._parse(self._read_bytes(name, MAX_DOCUMENT_BYTES), name)

    def _parse(self, text: bytes | None, name: str) -> JsonReader | None:
        return None if text is None else parse_document(text, self.get_path(name), MAX_DOCUMENT_BYTES)

    def list_folders(self, name: str) -> list[str]:
        if self._folders_by_parent is not None:
            return self._folders_by_parent.get(name, [])
        entries = self._request(name, lambda: self._filesystem.ls(self._get_remote_path(name), detail=True)) or []
        names = [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return _check_entry_count(sorted(set(names)), self.get_path(name))

    def read_chunk(self, name: str, max_bytes: int) -> Bytes | None:
        data = self._read_bytes(name, max_bytes)
        return None if data is None else np.frombuffer(data, np.uint8)

    def iter_sizes(self, name: str, depth: int) -> Iterator[tuple[str, int]]:
        prefix = self._get_remote_path(name) + "/"
        entries = self._request(name, lambda: self._filesystem.find(self._get_remote_path(name), detail=True)) or {}
        for path, entry in entries.items():
            yield str(path).removeprefix(prefix), int(entry["size"] or 0)

    def _load_consolidated(self) -> None:
        """Load all documents by one request; they are limited and checked as separate ones are."""
        text = self._read_bytes(DOCUMENT_NAME, MAX_DOCUMENT_BYTES)
        if text is None:
            return
        self._documents[DOCUMENT_NAME] = text
        entries = get_consolidated_metadata(parse_document(text, self.get_path(DOCUMENT_NAME), MAX_DOCUMENT_BYTES))
        if entries is None:
            return
        folders: dict[str, set[str]] = {}
        for name, entry in entries.items():
            self._documents[f"{name}/{DOCUMENT_NAME}"] = json.dumps(entry).encode()
            parent = ""
            for part in name.split("/"):
                folders.setdefault(parent, set()).add(part)
                parent = f"{parent}/{part}" if parent else part
        self._folders_by_parent = {name: sorted(children) for name, children in folders.items()}

    def _read_bytes(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a file, at most one more than `max_bytes`; None if there is no such file."""
        return self._request(
            name, lambda: bytes(self._filesystem.cat_file(self._get_remote_path(name), start=0, end=max_bytes + 1))
        )

    def _request(self, name: str, send: Callable[[], T]) -> T | None:
        """Return the result of a call; None if there is no such file."""
        try:
            return send()
        except NOT_FOUND_ERRORS:
            return None
        except KvmnnError:
            raise
        except Exception as error:  # each file system has its own
            raise SourceError(f"{self.get_path(name)}: cannot be read: {first_error_line(error)}") from error

    def _get_remote_path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def open_zarr_store(path: str) -> ZarrStore:
    """Open a store in a directory or at a URL."""
    return RemoteZarrStore(path) if is_url(path) else ZarrStore(path)


def read_document_at(path: Path) -> JsonReader | None:
    """Return a JSON document of a store on disk; None if there is none."""
    try:
        return parse_document(read_bounded(path, MAX_DOCUMENT_BYTES), str(path), MAX_DOCUMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def bound_frame_bytes(nbytes: int) -> int:
    """Return a size slightly above the largest frame of `nbytes` bytes."""
    return 2 * nbytes + _MAX_FRAME_OVERHEAD_BYTES


def get_consolidated_metadata(group: JsonReader) -> dict[str, Any] | None:
    """Return the documents of arrays and groups, by folder, in a group's document; None if it has none."""
    metadata = group.value.get("consolidated_metadata") if isinstance(group.value, dict) else None
    entries = metadata.get("metadata") if isinstance(metadata, dict) and metadata.get("kind") == "inline" else None
    if not isinstance(entries, dict) or len(entries) > MAX_ENTRIES or not all(map(_is_plain_name, entries)):
        return None
    return entries


def _is_plain_name(name: str) -> bool:
    """Return whether a name is that of a folder in the store."""
    return name.count("/") <= _MAX_NAME_PARTS and not {"", ".", ".."} & set(name.split("/"))


def _check_entry_count(names: list[str], label: str) -> list[str]:
    if len(names) > MAX_ENTRIES:
        raise LimitError(f"{label}: has {len(names):,} entries: expected at most {MAX_ENTRIES:,}")
    return names


def _iter_files_below(folder: str, depth: int) -> Iterator[str]:
    """Yield the files in a folder and its folders down to `depth`, sorted."""
    try:
        with os.scandir(folder) as entries:
            sorted_entries = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in sorted_entries:
        if entry.is_file():
            yield entry.path
        elif depth > 1 and entry.is_dir():
            yield from _iter_files_below(entry.path, depth - 1)


_MAX_PARALLEL_UPLOADS = 8
"""Maximum number of parallel uploads, each in memory until it is done."""


class Upload:
    """Upload of the files of a store to a URL; files already written are removed if it fails.

    `force` replaces a store that is there, as a whole: it is removed before the first file is written. Inputs
    (`exclude`) are never replaced.
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
            raise OutputError(f"{self.target}: exists already ({REPLACE_HINT} replaces it)")
        self._is_replacing = True

    @property
    def store(self) -> RemoteZarrStore:
        """Return the uploaded files as a store."""
        return RemoteZarrStore(self._url, self._documents)

    def open_file(self, name: str) -> _UploadFile:
        """Open a file for writing."""
        return _UploadFile(self, name)

    def put_file(self, name: str, data: bytes) -> None:
        """Start the upload of a file, after waiting if there are many; `commit` uploads the group's document."""
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
        """Wait until all uploads are done."""
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
    """A file of a store, which is uploaded at once."""

    def __init__(self, upload: Upload, name: str) -> None:
        self._upload, self._name = upload, name

    def write(self, data: Any) -> None:
        self._upload.put_file(self._name, bytes(data))
