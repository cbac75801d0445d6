"""What a store directory keeps beside its index, so that the index can be made anew: settings, spaces, tables, pinned
texts and texts of sessions, a small file each."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import KvmnnError, OptionError, SourceError
from ..files.json_document import parse, read_bounded
from ..files.output import failures
from ..files.temporary import Temporary, sweep
from ..frames.hashing import checksum
from .space import KEY_BYTES, Space, from_json
from .table_sets import MOST_BYTES, TableSets, object_name
from .token_ids import MAX_ID, MAX_TOKENS, Ids, text_key

FILE_NAME = "store.json"
MAX_BLOCK_TOKENS = 1 << 16
PIN, SESSION = ".pin", ".session"
CODECS = ("dense", "frames")
"""What units are made of; a store that does not say it has frames."""
WORDS = {"dense": "dense streams", "frames": "frames"}

_SCHEMA, _VERSION = "kvmnn-store", 1
_SPACES, _TEXTS, _TABLES = "spaces", "texts", "tables"
_MAX_DOCUMENT = 1 << 20
_MAX_NAME_BYTES = 4096
_MAGIC = b"KVMNNPT1"
_FIELDS = struct.Struct(f"<8sII{KEY_BYTES}s")
_TABLES_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}-[0-9a-f]{{{2 * KEY_BYTES}}}")
_PIN_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(PIN)}")
_CHECKSUM = struct.Struct("<Q")


class Settings(NamedTuple):
    """What a store is made with: tokens of a block, and what its units are made of."""

    block_tokens: int
    codec: str


def settings_document(settings: Settings) -> bytes:
    """The document that says it."""
    document = {"schema": _SCHEMA, "schema_version": _VERSION, **settings._asdict()}
    return json.dumps(document).encode() + b"\n"


def settings_wanted(path: str | Path) -> str:
    """What somebody has to write where a store's settings and its index are gone."""
    wanted = settings_document(Settings(64, "dense")).decode().strip()
    return f"write what the store was made with into {path}, such as {wanted}"


def parse_settings(data: bytes, where: str) -> Settings:
    """What a document says; `KvmnnError` for one that is none of this version."""
    root = parse(data, where, _MAX_DOCUMENT)
    if root.at("schema").text() != _SCHEMA or root.at("schema_version").integer(1) != _VERSION:
        raise SourceError(f"{where}: is of another version: expected {_SCHEMA} {_VERSION}")
    tokens = root.at("block_tokens").integer(1)
    if tokens > MAX_BLOCK_TOKENS:
        raise root.at("block_tokens").wrong(f"at most {MAX_BLOCK_TOKENS}")
    codec = root.at("codec").text() if "codec" in root.value else "frames"
    if codec not in CODECS:  # of a later version
        raise SourceError(str(root.at("codec").wrong(f"one of {', '.join(CODECS)}")))
    return Settings(tokens, codec)


def check_settings(where: str, found: Settings, block_tokens: int | None, codec: str | None) -> None:
    """`OptionError` for a store that is not made as the caller asks; None asks for nothing."""
    if block_tokens not in (None, found.block_tokens):
        raise OptionError(f"{where}: has blocks of {found.block_tokens} tokens, not of {block_tokens}")
    if codec not in (None, found.codec):
        raise OptionError(f"{where}: is a store of {WORDS[found.codec]}, not of {WORDS[str(codec)]}")


class KeptText(NamedTuple):
    """A text that is pinned, or a session's: `name` is the session's, empty for a pin."""

    name: str
    space: bytes
    ids: Ids


class Beside:
    """The small files of a store.

    Parameters
    ----------
    folder
        Of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_there(self) -> bool:
        """Whether the folder says that it is a store."""
        return (self._folder / FILE_NAME).is_file()

    @property
    def has_units_alone(self) -> bool:
        """Whether the folder is one of a store that has lost its settings, if not what else it is."""
        return not self.is_there and any((self._folder / "units").glob("*/*.unit"))

    def note_settings(self, settings: Settings, *, anew: bool = False) -> None:
        """Note down what a store is made with, where that is not noted yet, or anew."""
        if anew or not self.is_there:
            self._write(Path(FILE_NAME), settings_document(settings))

    def settings(self) -> Settings:
        """What a store is made with.

        Raises
        ------
        ManifestError
            For a document that is damaged.
        SourceError
            For one of another version.
        """
        path = self._folder / FILE_NAME
        return parse_settings(read_bounded(path, _MAX_DOCUMENT), str(path))

    def note_space(self, space: Space) -> None:
        """Note a space down, where it is not noted yet."""
        path, data = _document(space)
        try:
            is_noted = (self._folder / path).stat().st_size == len(data)
        except OSError:  # it is not there, or something else is in the way, which `_write` says
            is_noted = False
        if not is_noted:
            self._write(path, data)

    def spaces(self) -> Iterator[Space]:
        """The spaces; a document that is damaged is passed over."""
        for path in sorted((self._folder / _SPACES).glob("*.json")):
            with suppress(KvmnnError, OSError, UnicodeDecodeError):
                space = from_json(read_bounded(path, _MAX_DOCUMENT).decode(), str(path))
                if space.key.hex() == path.stem:
                    yield space

    def note_tables(self, space: Space, tables: TableSets) -> None:
        """Keep table sets, where they are not kept yet."""
        name = object_name(space.key, tables.key)
        if self.read_tables(name) != tables.data:
            self._write(Path(_TABLES, name), tables.data)

    def table_names(self) -> list[str]:
        """The names of all table sets."""
        return self._names(_TABLES, _TABLES_NAME)

    def read_tables(self, name: str) -> bytes | None:
        """The bytes of table sets; None where they cannot be read."""
        try:
            return read_bounded(self._folder / _TABLES / name, MOST_BYTES)
        except (KvmnnError, OSError):
            return None

    def drop_tables(self, names: Iterable[str]) -> int:
        """Remove table sets; the bytes of their files."""
        nbytes = 0
        for name in names:
            with suppress(OSError):
                nbytes += (self._folder / _TABLES / name).stat().st_size
                self._remove(Path(_TABLES, name))
        return nbytes

    def keep_pin(self, space: Space, ids: Ids) -> None:
        """Keep a text that is pinned."""
        self._write(*_document(KeptText("", space.key, ids)))

    def drop_pin(self, key: bytes) -> None:
        """Keep it no longer; `key` is its `text_key`."""
        self._remove(_pin_path(key))

    def drop_other_pins(self, known: Collection[bytes]) -> None:
        """Remove the files of texts that are not pinned any more."""
        pinned = {key.hex() + PIN for key in known}
        for name in self._names(_TEXTS, _PIN_NAME):
            if name not in pinned:
                self._remove(Path(_TEXTS, name))

    def keep_session(self, name: str, space: Space, ids: Ids) -> None:
        """Keep the text of a session."""
        self._write(*_document(KeptText(name, space.key, ids)))

    def drop_session(self, name: str) -> None:
        """Keep it no longer."""
        self._remove(_session_path(name))

    def pins(self) -> Iterator[KeptText]:
        """The pinned texts; files that are damaged are passed over."""
        return self._texts(PIN)

    def sessions(self) -> Iterator[KeptText]:
        """The texts of sessions; files that are damaged are passed over."""
        return self._texts(SESSION)

    def mend(self, held: Iterable[Space | KeptText], *, write: bool) -> list[Path]:
        """The files of spaces, pins and sessions that are not as they should be; `write` writes them again."""
        wrong = []
        for path, data in map(_document, held):
            try:
                is_good = read_bounded(self._folder / path, len(data)) == data
            except (KvmnnError, OSError):
                is_good = False
            if not is_good:
                wrong.append(self._folder / path)
                if write:
                    self._write(path, data)
        return wrong

    def sweep(self) -> None:
        """Remove what processes that are gone have left on its way in."""
        for name in ("", _SPACES, _TEXTS, _TABLES):
            sweep(self._folder / name)

    def _names(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        """The names of regular files that kvmnn can have written into a folder: all else is left alone."""
        try:
            with os.scandir(self._folder / folder) as entries:
                return [entry.name for entry in entries if pattern.fullmatch(entry.name) and entry.is_file()]
        except OSError:
            return []

    def _texts(self, suffix: str) -> Iterator[KeptText]:
        for path in sorted((self._folder / _TEXTS).glob(f"*{suffix}")):
            with suppress(KvmnnError, OSError):
                text = _from_bytes(read_bounded(path, _FIELDS.size + _MAX_NAME_BYTES + 4 * MAX_TOKENS + 8))
                if text is not None:
                    yield text

    def _write(self, path: Path, data: bytes) -> None:
        """The file appears whole or not at all; as units it is not brought to the disk by force."""
        target = self._folder / path
        with failures(target):
            target.parent.mkdir(exist_ok=True)
            staged = Temporary(target)
            try:
                staged.path.write_bytes(data)
                os.replace(staged.path, target)
            finally:
                staged.path.unlink(missing_ok=True)
                staged.release()

    def _remove(self, path: Path) -> None:
        with failures(self._folder / path):
            (self._folder / path).unlink(missing_ok=True)


def _pin_path(key: bytes) -> Path:
    return Path(_TEXTS, key.hex() + PIN)


def _session_path(name: str) -> Path:
    return Path(_TEXTS, hashlib.blake2b(name.encode(), digest_size=KEY_BYTES).hexdigest() + SESSION)


def _document(held: Space | KeptText) -> tuple[Path, bytes]:
    """The file that says a space, a pin or a session."""
    if isinstance(held, Space):
        return Path(_SPACES, f"{held.key.hex()}.json"), held.to_json().encode()
    path = _session_path(held.name) if held.name else _pin_path(text_key(held.space, held.ids))
    return path, _to_bytes(held)


def _to_bytes(text: KeptText) -> bytes:
    name = text.name.encode()
    data = _FIELDS.pack(_MAGIC, len(name), text.ids.size, text.space) + name + text.ids.astype("<u4").tobytes()
    return data + _CHECKSUM.pack(checksum(data))


def _from_bytes(data: bytes) -> KeptText | None:
    """A text; None for what is none, or is damaged."""
    if len(data) < _FIELDS.size + _CHECKSUM.size:
        return None
    magic, name_bytes, tokens, space = _FIELDS.unpack_from(data)
    end = _FIELDS.size + name_bytes + 4 * tokens
    if magic != _MAGIC or not 1 <= tokens <= MAX_TOKENS or len(data) != end + _CHECKSUM.size:
        return None
    if checksum(data[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        return None
    ids = np.frombuffer(data, "<u4", tokens, _FIELDS.size + name_bytes)
    name = data[_FIELDS.size : _FIELDS.size + name_bytes].decode("utf-8", "replace")
    return KeptText(name, space, ids) if int(ids.max()) <= MAX_ID else None
