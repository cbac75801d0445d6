"""Where the files of a Zarr store lie: in a directory, or at a URL that fsspec opens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...dtypes import Bytes
from ...errors import KvmnnError, LimitError, SourceError
from ...files.json_document import JsonReader, parse_document, read_bounded
from ...files.mapped import MappedFile
from ...files.urls import NOT_FOUND_ERRORS, first_error_line, is_url, open_file_system, redact_url

DOCUMENT_NAME = "zarr.json"
MAX_DOCUMENT_BYTES = 64 << 20
MAX_ENTRIES = 1 << 16
_MAX_FRAME_OVERHEAD_BYTES = 4096
_MAX_NAME_PARTS = 16

T = TypeVar("T")


class ZarrStore:
    """A directory. Names are relative to it, with slashes; the empty one is the directory itself."""

    def __init__(self, path: str) -> None:
        self.label = path

    def get_path(self, name: str) -> str:
        """The path of a file, for messages."""
        return os.path.join(self.label, name)

    def read_document(self, name: str) -> JsonReader | None:
        """A document; None where there is none."""
        return read_document_at(Path(self.get_path(name)))

    def read_own_document(self, name: str) -> JsonReader | None:
        """A document as it lies at its place, whatever the group's says of it."""
        return self.read_document(name)

    def list_folders(self, name: str) -> list[str]:
        """The names of folders right in one, sorted."""
        folder = Path(self.get_path(name))
        try:
            with os.scandir(folder) as entries:
                folder_names = sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            raise SourceError(f"{folder}: cannot be read: {error.strerror or error}") from error
        return _check_entry_count(folder_names, str(folder))

    def read_chunk(self, name: str, max_bytes: int) -> Bytes | None:
        """The bytes of a chunk; None where there is none.

        Of one of more than `max_bytes` bytes some more than these.
        """
        path = self.get_path(name)
        if not os.path.lexists(path):
            return None
        file = MappedFile(path)
        return file.view(0, file.size) if file.size else np.empty(0, np.uint8)

    def iter_sizes(self, name: str, depth: int) -> Iterator[tuple[str, int]]:
        """Files of a folder and of folders in it, so many deep: names below the folder, and their bytes."""
        folder = self.get_path(name)
        for path in _iter_files_below(folder, depth):
            yield os.path.relpath(path, folder).replace(os.sep, "/"), os.path.getsize(path)


class RemoteZarrStore(ZarrStore):
    """A URL. Documents are those that the group's has of all arrays, where it has (`consolidated_metadata`).

    Parameters
    ----------
    url
        ``s3://bucket/x.zarr``, ``gs://``, ``memory://`` ...
    documents
        What is not there yet, by name; nothing is then taken from the group's document.
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
        """One request for all documents; they are bounded and checked as those that lie by themselves."""
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
        """At most one byte more than `max_bytes`."""
        return self._request(
            name, lambda: bytes(self._filesystem.cat_file(self._get_remote_path(name), start=0, end=max_bytes + 1))
        )

    def _request(self, name: str, send: Callable[[], T]) -> T | None:
        """What a call gives; None where there is no such file."""
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
    """Of a store: a directory, or a URL."""
    return RemoteZarrStore(path) if is_url(path) else ZarrStore(path)


def read_document_at(path: Path) -> JsonReader | None:
    """A document of a store on disk; None where there is none."""
    try:
        return parse_document(read_bounded(path, MAX_DOCUMENT_BYTES), str(path), MAX_DOCUMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def bound_frame_bytes(nbytes: int) -> int:
    """A little more than a frame of `nbytes` bytes can have."""
    return 2 * nbytes + _MAX_FRAME_OVERHEAD_BYTES


def get_consolidated_metadata(group: JsonReader) -> dict[str, Any] | None:
    """The documents of arrays and groups, by their folders, that a group's document has; None where it has none."""
    metadata = group.value.get("consolidated_metadata") if isinstance(group.value, dict) else None
    entries = metadata.get("metadata") if isinstance(metadata, dict) and metadata.get("kind") == "inline" else None
    if not isinstance(entries, dict) or len(entries) > MAX_ENTRIES or not all(map(_is_plain_name, entries)):
        return None
    return entries


def _is_plain_name(name: str) -> bool:
    """Whether a name is that of a folder in the store."""
    return name.count("/") <= _MAX_NAME_PARTS and not {"", ".", ".."} & set(name.split("/"))


def _check_entry_count(names: list[str], label: str) -> list[str]:
    if len(names) > MAX_ENTRIES:
        raise LimitError(f"{label}: has {len(names):,} entries: expected at most {MAX_ENTRIES:,}")
    return names


def _iter_files_below(folder: str, depth: int) -> Iterator[str]:
    """Files of a folder and of folders in it, so many deep, sorted."""
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
