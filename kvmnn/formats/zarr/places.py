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
from ...files.json_document import Node, parse, read_bounded
from ...files.mapped import MappedFile
from ...files.urls import GONE, file_system, first_line, is_url, without_secret

DOCUMENT = "zarr.json"
MAX_DOCUMENT = 64 << 20
MOST_ENTRIES = 1 << 16
_SLACK = 4096
_MOST_PARTS = 16

T = TypeVar("T")


class Place:
    """A directory. Names are relative to it, with slashes; the empty one is the directory itself."""

    def __init__(self, path: str) -> None:
        self.label = path

    def of(self, name: str) -> str:
        """The path of a file, for messages."""
        return os.path.join(self.label, name)

    def document(self, name: str) -> Node | None:
        """A document; None where there is none."""
        return document_at(Path(self.of(name)))

    def own_document(self, name: str) -> Node | None:
        """A document as it lies at its place, whatever the group's says of it."""
        return self.document(name)

    def folders(self, name: str) -> list[str]:
        """The names of folders right in one, sorted."""
        where = Path(self.of(name))
        try:
            with os.scandir(where) as entries:
                below = sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            raise SourceError(f"{where}: cannot be read: {error.strerror or error}") from error
        return _bounded(below, str(where))

    def chunk(self, name: str, most: int) -> Bytes | None:
        """The bytes of a chunk; None where there is none. Of one of more than `most` bytes some more than these."""
        path = self.of(name)
        if not os.path.lexists(path):
            return None
        file = MappedFile(path)
        return file.view(0, file.size) if file.size else np.empty(0, np.uint8)

    def sizes(self, name: str, depth: int) -> Iterator[tuple[str, int]]:
        """Files of a folder and of folders in it, so many deep: names below the folder, and their bytes."""
        folder = self.of(name)
        for path in _files_below(folder, depth):
            yield os.path.relpath(path, folder).replace(os.sep, "/"), os.path.getsize(path)


class RemotePlace(Place):
    """A URL. Documents are those that the group's has of all arrays, where it has (`consolidated_metadata`).

    Parameters
    ----------
    url
        ``s3://bucket/x.zarr``, ``gs://``, ``memory://`` ...
    documents
        What is not there yet, by name; nothing is then taken from the group's document.
    """

    def __init__(self, url: str, documents: Mapping[str, bytes] | None = None) -> None:
        super().__init__(without_secret(url).rstrip("/"))
        self._fs, self._root = file_system(url)
        self._fs.invalidate_cache()
        self._documents = dict(documents or {})
        self._folders: dict[str, list[str]] | None = None
        if documents is None:
            self._take_consolidated()

    def of(self, name: str) -> str:
        return f"{self.label}/{name}" if name else self.label

    def document(self, name: str) -> Node | None:
        text = self._documents.get(name)
        if text is None and self._folders is None:
            return self.own_document(name)
        return self._parsed(text, name)

    def own_document(self, name: str) -> Node | None:
        return self._parsed(self._bytes(name, MAX_DOCUMENT), name)

    def _parsed(self, text: bytes | None, name: str) -> Node | None:
        return None if text is None else parse(text, self.of(name), MAX_DOCUMENT)

    def folders(self, name: str) -> list[str]:
        if self._folders is not None:
            return self._folders.get(name, [])
        below = self._asked(name, lambda: self._fs.ls(self._at(name), detail=True)) or []
        names = [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in below if entry["type"] == "directory"]
        return _bounded(sorted(set(names)), self.of(name))

    def chunk(self, name: str, most: int) -> Bytes | None:
        found = self._bytes(name, most)
        return None if found is None else np.frombuffer(found, np.uint8)

    def sizes(self, name: str, depth: int) -> Iterator[tuple[str, int]]:
        begin = self._at(name) + "/"
        found = self._asked(name, lambda: self._fs.find(self._at(name), detail=True)) or {}
        for path, entry in found.items():
            yield str(path).removeprefix(begin), int(entry["size"] or 0)

    def _take_consolidated(self) -> None:
        """One request for all documents; they are bounded and checked as those that lie by themselves."""
        text = self._bytes(DOCUMENT, MAX_DOCUMENT)
        if text is None:
            return
        self._documents[DOCUMENT] = text
        entries = consolidated(parse(text, self.of(DOCUMENT), MAX_DOCUMENT))
        if entries is None:
            return
        folders: dict[str, set[str]] = {}
        for name, entry in entries.items():
            self._documents[f"{name}/{DOCUMENT}"] = json.dumps(entry).encode()
            parent = ""
            for part in name.split("/"):
                folders.setdefault(parent, set()).add(part)
                parent = f"{parent}/{part}" if parent else part
        self._folders = {name: sorted(below) for name, below in folders.items()}

    def _bytes(self, name: str, most: int) -> bytes | None:
        """At most one byte more than `most`."""
        return self._asked(name, lambda: bytes(self._fs.cat_file(self._at(name), start=0, end=most + 1)))

    def _asked(self, name: str, call: Callable[[], T]) -> T | None:
        """What a call gives; None where there is no such file."""
        try:
            return call()
        except GONE:
            return None
        except KvmnnError:
            raise
        except Exception as error:  # each file system has its own
            raise SourceError(f"{self.of(name)}: cannot be read: {first_line(error)}") from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def place_at(path: str) -> Place:
    """Of a store: a directory, or a URL."""
    return RemotePlace(path) if is_url(path) else Place(path)


def document_at(path: Path) -> Node | None:
    """A document of a store on disk; None where there is none."""
    try:
        return parse(read_bounded(path, MAX_DOCUMENT), str(path), MAX_DOCUMENT)
    except (FileNotFoundError, NotADirectoryError):
        return None


def most_bytes(nbytes: int) -> int:
    """A little more than a frame of `nbytes` bytes can have."""
    return 2 * nbytes + _SLACK


def consolidated(group: Node) -> dict[str, Any] | None:
    """The documents of arrays and groups, by their folders, that a group's document has; None where it has none."""
    held = group.value.get("consolidated_metadata") if isinstance(group.value, dict) else None
    entries = held.get("metadata") if isinstance(held, dict) and held.get("kind") == "inline" else None
    if not isinstance(entries, dict) or len(entries) > MOST_ENTRIES or not all(map(_is_plain, entries)):
        return None
    return entries


def _is_plain(name: str) -> bool:
    """Whether a name is that of a folder in the store."""
    return name.count("/") <= _MOST_PARTS and not {"", ".", ".."} & set(name.split("/"))


def _bounded(names: list[str], where: str) -> list[str]:
    if len(names) > MOST_ENTRIES:
        raise LimitError(f"{where}: has {len(names):,} entries: expected at most {MOST_ENTRIES:,}")
    return names


def _files_below(folder: str, depth: int) -> Iterator[str]:
    """Files of a folder and of folders in it, so many deep, sorted."""
    try:
        with os.scandir(folder) as entries:
            below = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in below:
        if entry.is_file():
            yield entry.path
        elif depth > 1 and entry.is_dir():
            yield from _files_below(entry.path, depth - 1)
