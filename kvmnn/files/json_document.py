"""JSON documents, read with a bound on their size; values that know their path, so that errors can name it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import ManifestError, SourceError

MAX_BYTES = 16 << 20
"""Of a document, unless its reader says otherwise."""

_MAX_INTEGER = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


def loads(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`json.loads` without Python's NaN, Infinity and -Infinity, which RFC 8259 forbids: `ValueError`."""
    return json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `loads`: an object, refused if it has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


class Node:
    """A value and where it is: `where` names the document, `path` the place in it.

    Every method raises `ManifestError` for a value that is not what the method says.
    """

    def __init__(self, value: Any, where: str, path: str) -> None:
        self.value = value
        self.where = where
        self.path = path

    def wrong(self, expected: str) -> ManifestError:
        """The error that says what was found here and what was expected."""
        found = json.dumps(self.value)
        found = found if len(found) <= 80 else found[:77] + "..."
        return ManifestError(f"{self.where}: {self.path or 'document'}: found {found}, expected {expected}")

    def at(self, key: str) -> Node:
        """The value under `key` of an object."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        path = f"{self.path}.{key}" if self.path else key
        if key not in self.value:
            raise ManifestError(f"{self.where}: {path}: is missing")
        return Node(self.value[key], self.where, path)

    def items(self, least: int = 0, most: int | None = None) -> list[Node]:
        """The entries of a list of at least `least` and at most `most`."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if len(self.value) < least or (most is not None and len(self.value) > most):
            raise ManifestError(f"{self.where}: {self.path}: has {len(self.value)} entries")
        return [Node(value, self.where, f"{self.path}[{i}]") for i, value in enumerate(self.value)]

    def integer(self, least: int) -> int:
        """An integer of at least `least` that fits 64 bits."""
        if type(self.value) is not int or not least <= self.value <= _MAX_INTEGER:
            raise self.wrong(f"an integer of at least {least}")
        return self.value

    def check_version(self, latest: int) -> None:
        """Check that it is a version that this kvmnn knows: from 1 to `latest`."""
        if self.integer(1) > latest:
            raise self.wrong(f"at most {latest}: a later kvmnn wrote this")

    def check_schema(self, schema: str, version: int) -> None:
        """Check that an object says of itself that it is `schema` in `version`."""
        if self.at("schema").text() != schema:
            raise self.at("schema").wrong(repr(schema))
        if self.at("schema_version").integer(1) != version:
            raise self.at("schema_version").wrong(f"{version}, the version this kvmnn reads")

    def whole(self) -> int:
        """Any integer."""
        if type(self.value) is not int:
            raise self.wrong("an integer")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def texts(self) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(item.text() for item in self.items())

    def text_map(self) -> dict[str, str]:
        """An object whose values are strings."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object of strings")
        return {key: self.at(key).text() for key in self.value}

    def sha256(self) -> str:
        """A SHA-256 in lower-case hexadecimal digits."""
        if not isinstance(self.value, str) or not _SHA256.fullmatch(self.value):
            raise self.wrong("64 hexadecimal digits")
        return self.value

    def file_name(self) -> str:
        """A plain relative name that cannot lead out of the manifest's directory by itself, in its one spelling."""
        name = self.text()
        windows = PureWindowsPath(name)
        path = PurePosixPath(name)
        if not path.parts or windows.anchor or path.parts[0] == "/" or ".." in windows.parts or "\0" in name:
            raise self.wrong("a relative file name without '..'")
        if path.as_posix() != name:
            raise self.wrong(f"the name of a file, {path.as_posix()!r}")
        return name


def parse(text: str | bytes, where: str, max_bytes: int | None = None) -> Node:
    """The document in `text`, in which no object has a key twice; `where` begins the messages of errors.

    Raises
    ------
    ManifestError
        When it is larger than `max_bytes` (default `MAX_BYTES`) or is not valid JSON.
    """
    limit = MAX_BYTES if max_bytes is None else max_bytes
    if len(text) > limit:
        raise ManifestError(f"{where}: is larger than {limit} bytes")
    try:
        return Node(loads(text, object_pairs_hook=unique_keys), where, "")
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: is not valid JSON: {str(error)[:200]}") from None


def read_bounded(path: Path, max_bytes: int | None = None) -> bytes:
    """The bytes of a file.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        Where there is no such file.
    SourceError
        Where it cannot be read or holds more than `max_bytes` (default `MAX_BYTES`).
    """
    limit = MAX_BYTES if max_bytes is None else max_bytes
    try:
        with open(path, "rb", opener=_open_without_waiting) as stream:
            text = stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) > limit:
        raise SourceError(f"{path}: holds more than {limit:,} bytes")
    return text


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe that nobody writes to is empty; opened as usual it would be waited for without end."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "set_blocking"):
        os.set_blocking(handle, True)
    return handle


def read_object(path: Path, max_bytes: int | None = None, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes` (default `MAX_BYTES`); `constants` as in `as_object`.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        Where there is no such file.
    SourceError
        Where it cannot be read, is larger, or is no JSON object.
    """
    return as_object(read_bounded(path, max_bytes), str(path), constants=constants)


def as_object(text: bytes, where: str, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object that `text` is; `SourceError`, which begins with `where`, if it is none.

    With `constants` it may hold NaN and Infinity: Python libraries write them into settings of models.
    """
    try:
        value = json.loads(text) if constants else loads(text)
    except UnicodeDecodeError:
        raise SourceError(f"{where}: is not JSON: it is not even text") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: holds no JSON object: a {type(value).__name__} is not a JSON object")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """`read_object` of settings of a model or tokenizer, `constants` allowed; empty where there is no such file."""
    try:
        return read_object(path, constants=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def values_in(document: object) -> Iterator[object]:
    """Every key, text, number and constant in a document, however deep."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        else:
            yield value
