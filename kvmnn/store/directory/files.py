"""Files of a store directory: units, and the small recovery files from which a lost index can be rebuilt.

A unit is written into a staging folder, renamed into its place, and read through a memory map. The recovery files
contain settings, namespaces, shared tables, pinned sequences and sessions.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..._util.named_tuple import NamedTuple
from ..._util.patterns import declare_pattern
from ...dtypes import Bytes
from ...errors import KvmnnError, ManifestError, OptionError, SourceError
from ...files.atomic import wrap_os_errors
from ...files.mapped_file import MappedFile
from ...files.schema import read_bounded
from ...files.temporary import TEMPORARY_NAME_PATTERN, TemporaryPath, remove_stale
from ...frames.buffers import integrity_checksum
from ..backend import UNREADABLE_LOSS, CodecProfile, StoreSettings, encode_settings, explain_settings, parse_settings
from ..encryption import NO_CIPHER, StoreCipher, UnsealError, infer_key_check
from ..namespace import KEY_BYTES, MAX_ID, MAX_TOKENS, Ids, Namespace, compute_sequence_key, hash_key, parse_namespace
from ..unit import (
    MAX_TABLE_SETS_BYTES,
    UNSEALED_NOTHING,
    DamagedUnitError,
    TableSets,
    UnitHeader,
    has_attention_steps,
    make_object_name,
    parse_header,
)
from ..unit_codec import is_prefix_state

UNIT_SUFFIX = ".unit"
UNIT_NAME = "units"
"""The name that units are sealed under: their numbers are not known yet. Each has its ids and keys in it."""
_STAGING_FOLDER = "staging"
_UNITS_FOLDER = "units"
_FOLDER_BITS = 12
_MAX_UNIT_NUMBER = 1 << 62
_MAX_SAMPLED_FILES = 64
"""Files from which it is inferred whether a store is encrypted."""
_MAX_SAMPLED_UNITS = 4
"""Units among them where namespaces are there: these say the same, and each opening reads them."""
_MAX_PIECES_PER_WRITE = 1024
"""POSIX systems accept 1,024 pieces in one call."""


class UnitFiles:
    """Files of the units of a store in `folder`."""

    def __init__(self, folder: Path, cipher: StoreCipher = NO_CIPHER) -> None:
        self._folder = folder
        self._cipher = cipher
        self._staging_folder = _StagingFolder(folder / _STAGING_FOLDER)

    def make_path(self, unit: int) -> Path:
        """Return the path of a unit."""
        return Path(self._folder, _UNITS_FOLDER, *_make_unit_names(unit))

    def read_unit(self, unit: int) -> Bytes | None:
        """Return the bytes of a unit, a memory map unless they were sealed; None if there is no file."""
        data = self._map_file(unit)
        try:
            return data if data is None or not data.size else self._cipher.unseal_array(data, UNIT_NAME)
        except UnsealError:
            return UNSEALED_NOTHING

    def read_head(self, unit: int) -> Bytes | None:
        """Return at least the header of a unit, which takes less time than `read_unit` if the unit is sealed."""
        data = self._map_file(unit)
        try:
            return data if data is None or not data.size else self._cipher.unseal_head(data, UNIT_NAME)
        except UnsealError:
            return UNSEALED_NOTHING

    def count_unit_bytes(self, unit: int) -> int:
        """Return the size of a unit before it was sealed; negative if there is no file."""
        try:
            return self.make_path(unit).stat().st_size - self._cipher.unit_overhead_bytes
        except OSError:
            return -1

    def _map_file(self, unit: int) -> Bytes | None:
        if not 0 < unit < _MAX_UNIT_NUMBER:
            return None
        path = os.path.join(self._folder, _UNITS_FOLDER, *_make_unit_names(unit))
        try:
            if not os.path.isfile(path):
                return None
            file = MappedFile(path)
            return file.view(0, file.size) if file.size else np.empty(0, np.uint8)
        except (SourceError, OSError):
            return None

    def read_header(self, unit: int) -> UnitHeader | None:
        """Return the header of a unit; None if its file is missing or damaged."""
        data = self.read_head(unit)
        try:
            return None if data is None else parse_header(data)
        except DamagedUnitError:
            return None

    def has_attention_steps(self, unit: int) -> bool:
        """Return whether the lossy streams of a unit have steps by attention."""
        data = self.read_unit(unit)
        try:
            return data is not None and has_attention_steps(parse_header(data), data)
        except DamagedUnitError:
            return False

    def has_readable_unit(self, units: Iterable[int]) -> bool:
        """Return whether any of these units can be read as one of this store; state units count."""
        for unit in units:
            data = self.read_head(unit)
            if data is not None and (is_prefix_state(data) or self.read_header(unit) is not None):
                return True
        return False

    def stage(self) -> StagedFiles:
        """Open temporary storage for new units."""
        return StagedFiles(self._staging_folder, self._cipher)

    def move_into_place(self, staged_path: Path, unit: int) -> None:
        """Rename a staged file to the path of its unit."""
        path = self.make_path(unit)
        with wrap_os_errors(path):
            try:
                os.replace(staged_path, path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged_path, path)

    def delete_units(self, units: Iterable[int]) -> int:
        """Delete the files of units; return their bytes. `iter_unknown_files` finds what cannot be deleted now."""
        nbytes = 0
        for unit in units:
            with suppress(OSError):
                path = self.make_path(unit)
                file_bytes = path.stat().st_size
                path.unlink()
                nbytes += file_bytes
        return nbytes

    def list_stored_units(self) -> set[int]:
        """Return the numbers of the units that have a file, by the names in their folders."""
        units: set[int] = set()
        for path in (self._folder / _UNITS_FOLDER).glob(f"*/*{UNIT_SUFFIX}"):
            with suppress(ValueError):
                units.add(int(path.stem, 16))
        return units

    def iter_unknown_files(self, known_units: set[int]) -> Iterator[Path]:
        """Yield the unit files whose numbers are not in `known_units`."""
        for path in sorted((self._folder / _UNITS_FOLDER).glob(f"*/*{UNIT_SUFFIX}")):
            try:
                number = int(path.stem, 16)
            except ValueError:
                continue
            if number not in known_units and path == self.make_path(number) and path.is_file():
                yield path

    def remove_stale(self) -> None:
        """Remove staged files of processes that have ended."""
        remove_stale(self._folder / _STAGING_FOLDER)

    def close(self) -> None:
        """Remove the staging folder of this process."""
        self._staging_folder.close()


def _write_pieces(handle: int, pieces: Sequence[Bytes | bytes]) -> None:
    """Write all pieces in as few calls as possible: the system then allocates larger pages for the file."""
    remaining = [memoryview(piece) if isinstance(piece, bytes) else piece.data for piece in pieces]
    while remaining:
        num_written = (
            os.writev(handle, remaining[:_MAX_PIECES_PER_WRITE])
            if hasattr(os, "writev")
            else os.write(handle, remaining[0])
        )
        while remaining and num_written >= len(remaining[0]):
            num_written -= len(remaining.pop(0))
        if num_written:
            remaining[0] = remaining[0][num_written:]


def _make_unit_names(unit: int) -> tuple[str, str]:
    """Return the name of the folder of a unit, and that of its file."""
    return f"{unit >> _FOLDER_BITS:03x}", f"{unit:08x}{UNIT_SUFFIX}"


class _StagingFolder:
    """Folder of this process for staged files, created on first use.

    It is locked while the process uses it: other processes may remove unlocked ones.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._file_numbers = itertools.count()
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[[TemporaryPath, int], _StagingFolder] | None = None
        self._folder: Path | None = None
        self._process = os.getpid()

    def new_file(self) -> Path:
        """Return an unused file name in the folder, which is created if needed."""
        if self._process != os.getpid():  # forked: folder and lock belong to the parent
            self._lock, self._folder, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._folder is None or not self._folder.is_dir():
                self.close()
                with wrap_os_errors(self._parent):
                    self._parent.mkdir(exist_ok=True)
                    staged_folder = TemporaryPath(self._parent / "put", parent=self._parent, is_folder=True)
                self._folder = staged_folder.path
                self._finalizer = weakref.finalize(self, _remove_folder, staged_folder, self._process)
            return self._folder / str(next(self._file_numbers))

    def close(self) -> None:
        """Remove the folder."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = self._folder = None


def _remove_folder(folder: TemporaryPath, process: int) -> None:
    """Remove a folder, unless this is a fork of the process that created it."""
    if process == os.getpid():
        with suppress(OSError):
            folder.path.rmdir()
        folder.release()


class StagedFiles:
    """Files that are not in their places yet; those that were not moved are deleted at the end of the ``with`` block.

    They are not synchronised to the disk: what a power failure leaves of them fails its checksum.
    """

    def __init__(self, staging_folder: _StagingFolder, cipher: StoreCipher = NO_CIPHER) -> None:
        self._staging_folder = staging_folder
        self._cipher = cipher
        self._staged_paths: list[Path] = []

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path:
        """Write a file; return its path."""
        sealed_pieces = self._cipher.seal_pieces(pieces, UNIT_NAME)
        path = self._staging_folder.new_file()
        self._staged_paths.append(path)
        with wrap_os_errors(path.parent), open(path, "xb", buffering=0) as file:
            _write_pieces(file.fileno(), sealed_pieces)
        return path

    def __enter__(self) -> StagedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._staged_paths:
            with suppress(OSError):
                os.unlink(path)


SETTINGS_FILE = "store.json"
PIN_SUFFIX, SESSION_SUFFIX, LABEL_SUFFIX = ".pin", ".session", ".label"
_LOSS_SUFFIX = ".loss"
"""Of what K and V of a namespace had lost before they were put."""

_NAMESPACES_FOLDER, _SEQUENCES_FOLDER, TABLES_FOLDER = "spaces", "texts", "tables"
_MAX_DOCUMENT_BYTES = 1 << 20
_MAX_NAME_BYTES = 4096
_SEQUENCE_MAGIC = b"KVMNNPT1"
_SEQUENCE_STRUCT = struct.Struct(f"<8sII{KEY_BYTES}s")
_KEY_PATTERN = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_TABLES_NAME_REGEX = declare_pattern(f"{_KEY_PATTERN}-{_KEY_PATTERN}")
_PIN_NAME_REGEX = declare_pattern(_KEY_PATTERN + re.escape(PIN_SUFFIX))
_LABEL_NAME_REGEX = declare_pattern(_KEY_PATTERN + re.escape(LABEL_SUFFIX))
_OWN_FOLDER_REGEX = declare_pattern("spaces|texts|tables|models|staging|units(/[0-9a-f]{3,})?")
_OWN_NAME_PATTERNS = {
    "": r"store\.json|rebuild\.lock|counters\.sqlite(-journal)?"
    r"|index(-\d{1,9})?\.sqlite(-wal|-shm|-journal|\.new(-journal)?)?",
    "spaces": rf"{_KEY_PATTERN}\.(json|loss)",
    "texts": rf"{_KEY_PATTERN}\.(pin|session|label)",
    "tables": f"{_KEY_PATTERN}-{_KEY_PATTERN}",
    "models": rf"{_KEY_PATTERN}\.json",
    "staging": "(?!)",
}
"""Patterns of the names that kvmnn writes into each folder of a store."""
_CHECKSUM_STRUCT = struct.Struct("<Q")
_MAX_SEQUENCE_BYTES = _SEQUENCE_STRUCT.size + _MAX_NAME_BYTES + 4 * MAX_TOKENS + _CHECKSUM_STRUCT.size


class SavedSequence(NamedTuple):
    """Token ids of a pinned sequence or of a session; `name` is empty for a pin."""

    name: str
    namespace_key: bytes
    ids: Ids


class RecoveryFiles:
    """Recovery files of a store in `folder`; all but the settings are sealed."""

    def __init__(self, folder: Path, cipher: StoreCipher = NO_CIPHER) -> None:
        self._folder = folder
        self._cipher = cipher

    @property
    def settings_path(self) -> Path:
        """Path of the settings."""
        return self._folder / SETTINGS_FILE

    @property
    def exists(self) -> bool:
        """Return whether the folder contains store settings, which make it a store."""
        return (self._folder / SETTINGS_FILE).is_file()

    @property
    def has_only_units(self) -> bool:
        """Return whether the folder contains units but no settings: a store that has lost them."""
        return not self.exists and any((self._folder / "units").glob("*/*.unit"))

    def explain_lost_settings(self) -> str:
        """Return the advice for a store whose settings, too, are lost or damaged; empty if they can be read."""
        try:
            self.read_settings()
        except (KvmnnError, OSError):
            path = self._folder / SETTINGS_FILE
            return f"{SETTINGS_FILE} is lost or damaged as well: {self.explain_settings(path)}"
        return ""

    def explain_settings(self, path: str | Path) -> str:
        """Return the advice to write settings into `path`, with what the first units say of them."""
        files = UnitFiles(self._folder, self._cipher)
        numbers = (int(unit_path.stem, 16) for unit_path in files.iter_unknown_files(set()))
        headers = map(files.read_header, itertools.islice(numbers, _MAX_SAMPLED_FILES))
        return explain_settings(path, self._cipher, [header for header in headers if header is not None])

    def save_settings(self, settings: StoreSettings, *, overwrite: bool = False) -> None:
        """Write the settings if there are none; with `overwrite`, always."""
        if overwrite or not self.exists:
            self._write_bytes(Path(SETTINGS_FILE), encode_settings(settings), overwrite=overwrite)

    def read_settings(self) -> StoreSettings:
        """Read the settings."""
        path = self._folder / SETTINGS_FILE
        return parse_settings(read_bounded(path, _MAX_DOCUMENT_BYTES), str(path))

    def read_settings_profile(self, codec: str) -> CodecProfile | None:
        """Return the profile that settings of another codec name; None if they name none, or cannot be read."""
        with suppress(KvmnnError, OSError):
            data = read_bounded(self.settings_path, _MAX_DOCUMENT_BYTES)
            return parse_settings(data, str(self.settings_path), codec).profile
        return None

    def read_key_check(self) -> str | None:
        """Return the `key_check` of the store; None if nothing is stored that it can be inferred from.

        What is stored decides, not the settings, which may be those of another store.

        Raises
        ------
        OptionError
            If the settings are those of an encrypted store, and what is stored is not encrypted.
        """
        settings_check = None
        if self.exists:
            with suppress(ManifestError):
                settings_check = self.read_settings().key_check
        stored_check = infer_key_check(self._iter_samples(), self._cipher)
        if stored_check == "" and settings_check:
            raise OptionError(
                f"{self.settings_path}: says that the store is encrypted, and its units are not: put its own "
                f"{SETTINGS_FILE} in the place of this one, or remove it, and it is made again"
            )
        return settings_check if stored_check is None else stored_check

    def _iter_samples(self) -> Iterator[tuple[str, Bytes]]:
        """Yield namespaces and units, each with the name that it is sealed under, few enough for each opening."""
        namespaces = sorted((self._folder / _NAMESPACES_FOLDER).glob("*.json"))
        units = (self._folder / _UNITS_FOLDER).glob(f"*/*{UNIT_SUFFIX}")
        max_units = _MAX_SAMPLED_UNITS if namespaces else _MAX_SAMPLED_FILES
        for path in (*namespaces[:_MAX_SAMPLED_FILES], *itertools.islice(units, max_units)):
            name = UNIT_NAME if path.suffix == UNIT_SUFFIX else path.relative_to(self._folder).as_posix()
            with suppress(SourceError, OSError):
                if path.is_file():
                    file = MappedFile(path)
                    yield name, file.view(0, file.size)

    def save_namespace(self, namespace: Namespace) -> None:
        """Write a namespace, unless it is written already."""
        path, data = _encode_recovery_file(namespace, self._cipher.secret)
        try:
            is_saved = (self._folder / path).stat().st_size == len(data) + self._cipher.value_overhead_bytes
        except OSError:  # missing, or not a file: `_write` reports that
            is_saved = False
        if not is_saved:
            self._write(path, data)

    def iter_namespaces(self) -> Iterator[Namespace]:
        """Yield the namespaces; damaged files are skipped."""
        for path in sorted((self._folder / _NAMESPACES_FOLDER).glob("*.json")):
            with suppress(KvmnnError, OSError, UnicodeDecodeError):
                data = self._read(path.relative_to(self._folder), _MAX_DOCUMENT_BYTES)
                namespace = parse_namespace(data.decode(), str(path), self._cipher.secret)
                if namespace.key.hex() == path.stem:
                    yield namespace

    def save_loss(self, namespace: Namespace, loss: str) -> None:
        """Write what K and V of a namespace had lost."""
        self._write(_make_loss_path(namespace.key.hex()), loss.encode())

    def read_loss(self, namespace: Namespace) -> str:
        """Read what K and V of a namespace had lost; empty for nothing."""
        try:
            loss = self._read(_make_loss_path(namespace.key.hex()), _MAX_NAME_BYTES).decode("utf-8", "replace")
            return loss if loss.isprintable() and loss else UNREADABLE_LOSS
        except FileNotFoundError:
            return ""
        except (KvmnnError, OSError):  # something was lost: which it was is damaged
            return UNREADABLE_LOSS

    def delete_other_losses(self, namespace_keys: Collection[str]) -> None:
        """Delete the losses of all namespaces whose keys, in hexadecimal digits, are not in `namespace_keys`."""
        for path in (self._folder / _NAMESPACES_FOLDER).glob(f"*{_LOSS_SUFFIX}"):
            if path.stem not in namespace_keys:
                self._delete(_make_loss_path(path.stem))

    def save_tables(self, namespace: Namespace, tables: TableSets) -> None:
        """Write shared tables, unless they are written already."""
        name = make_object_name(namespace.key, tables.key)
        if self.read_tables(name) != tables.data:
            self._write(Path(TABLES_FOLDER, name), tables.data)

    def list_table_names(self) -> list[str]:
        """Return the names of all table sets."""
        return self._list_names(TABLES_FOLDER, _TABLES_NAME_REGEX)

    def read_tables(self, name: str) -> bytes | None:
        """Return the bytes of table sets; None if they are unreadable."""
        try:
            return self._read(Path(TABLES_FOLDER, name), MAX_TABLE_SETS_BYTES)
        except UnsealError:
            return b""
        except (KvmnnError, OSError):
            return None

    def has_tables(self, name: str) -> bool:
        """Return whether shared tables are there."""
        return Path(self._folder, TABLES_FOLDER, name).is_file()

    def delete_tables(self, names: Iterable[str]) -> int:
        """Delete table sets; return the bytes of their files."""
        nbytes = 0
        for name in names:
            with suppress(OSError):
                nbytes += (self._folder / TABLES_FOLDER / name).stat().st_size
                self._delete(Path(TABLES_FOLDER, name))
        return nbytes

    def save_sequence(self, sequence: SavedSequence) -> None:
        """Write a pinned sequence, or that of a session."""
        self._write(*_encode_recovery_file(sequence, self._cipher.secret))

    def delete_pin(self, key: bytes) -> None:
        """Delete the file of a pin; `key` is its `compute_sequence_key`."""
        self._delete(make_pin_path(key))

    def delete_other_pins(self, pin_keys: Collection[bytes]) -> None:
        """Delete the files of all pins whose keys are not in `pin_keys`."""
        pin_names = {key.hex() + PIN_SUFFIX for key in pin_keys}
        for name in self._list_names(_SEQUENCES_FOLDER, _PIN_NAME_REGEX):
            if name not in pin_names:
                self._delete(Path(_SEQUENCES_FOLDER, name))

    def delete_session(self, name: str) -> None:
        """Delete the file of a session."""
        self._delete(make_session_path(name, self._cipher.secret))

    def save_label(self, sequence: SavedSequence) -> None:
        """Write the label of a sequence, which is its `name`."""
        key = compute_sequence_key(sequence.namespace_key, sequence.ids, self._cipher.secret)
        self._write(_make_label_path(key), _encode_text(sequence))

    def read_label(self, key: bytes) -> str | None:
        """Read the label of the sequence with this `compute_sequence_key`; None if it has none, or a damaged one."""
        with suppress(KvmnnError, OSError):
            sequence = _decode_sequence(self._read(_make_label_path(key), _MAX_SEQUENCE_BYTES))
            return None if sequence is None else sequence.name
        return None

    def list_damaged_labels(self) -> list[bytes]:
        """Return the keys of the sequences whose labels are damaged."""
        damaged_keys = []
        for key in self.list_label_keys():
            with suppress(OSError):  # it may be readable later
                try:
                    is_intact = _decode_sequence(self._read(_make_label_path(key), _MAX_SEQUENCE_BYTES)) is not None
                except (SourceError, UnsealError):
                    is_intact = False
                if not is_intact:
                    damaged_keys.append(key)
        return damaged_keys

    def delete_label(self, key: bytes) -> None:
        """Delete the label of the sequence with this `compute_sequence_key`."""
        self._delete(_make_label_path(key))

    def list_label_keys(self) -> list[bytes]:
        """Return the keys of the sequences that have labels."""
        names = self._list_names(_SEQUENCES_FOLDER, _LABEL_NAME_REGEX)
        return [bytes.fromhex(name.removesuffix(LABEL_SUFFIX)) for name in names]

    def iter_sequences(self, suffix: str) -> Iterator[SavedSequence]:
        """Yield the pinned sequences (`PIN_SUFFIX`), or those of sessions and labels; skip damaged files."""
        paths = sorted((self._folder / _SEQUENCES_FOLDER).glob(f"*{suffix}"))
        yield from self._iter_saved(path.relative_to(self._folder) for path in paths)

    def iter_labelled(self, keys: Sequence[bytes]) -> Iterator[SavedSequence]:
        """Yield the sequences with these keys that have labels."""
        return self._iter_saved(map(_make_label_path, keys))

    def _iter_saved(self, paths: Iterable[Path]) -> Iterator[SavedSequence]:
        for path in paths:
            with suppress(KvmnnError, OSError):
                saved_sequence = _decode_sequence(self._read(path, _MAX_SEQUENCE_BYTES))
                if saved_sequence is not None:
                    yield saved_sequence

    def repair(self, expected: Iterable[Namespace | SavedSequence], *, write: bool) -> list[Path]:
        """Return the files that are missing or differ from `expected`; rewrite them if `write` is set."""
        damaged_paths = []
        for path, data in (_encode_recovery_file(value, self._cipher.secret) for value in expected):
            try:
                is_intact = self._read(path, len(data)) == data
            except (KvmnnError, OSError):
                is_intact = False
            if not is_intact:
                damaged_paths.append(self._folder / path)
                if write:
                    self._write(path, data)
        return damaged_paths

    def remove_stale(self) -> None:
        """Remove temporary files of processes that have ended."""
        for name in _OWN_NAME_PATTERNS:
            remove_stale(self._folder / name)

    def _list_names(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        """Return the names of regular files that match; others in the folder are ignored."""
        try:
            with os.scandir(self._folder / folder) as entries:
                return [entry.name for entry in entries if pattern.fullmatch(entry.name) and entry.is_file()]
        except OSError:
            return []

    def _read(self, path: Path, max_bytes: int) -> bytes:
        """Return what was written to a file; raise `UnsealError` if it does not decrypt."""
        data = read_bounded(self._folder / path, max_bytes + self._cipher.value_overhead_bytes)
        return self._cipher.unseal(data, path.as_posix())

    def _write(self, path: Path, data: bytes) -> None:
        self._write_bytes(path, self._cipher.seal(data, path.as_posix()))

    def _write_bytes(self, path: Path, data: bytes, *, overwrite: bool = True) -> None:
        """Write a file atomically; like units it is not synchronised to the disk."""
        target = self._folder / path
        with wrap_os_errors(target):
            target.parent.mkdir(exist_ok=True)
            staged = TemporaryPath(target)
            try:
                staged.path.write_bytes(data)
                if overwrite or not _link_if_absent(staged.path, target):
                    os.replace(staged.path, target)
            finally:
                staged.path.unlink(missing_ok=True)
                staged.release()

    def _delete(self, path: Path) -> None:
        with wrap_os_errors(self._folder / path):
            (self._folder / path).unlink(missing_ok=True)


def _link_if_absent(staged_path: Path, target: Path) -> bool:
    """Give a file a second name unless that is taken; return False if the file system has no second names."""
    try:
        os.link(staged_path, target)
    except FileExistsError:  # of two processes that create a store, the first chooses its settings
        pass
    except OSError:
        return False
    return True


def make_pin_path(key: bytes) -> Path:
    return Path(_SEQUENCES_FOLDER, key.hex() + PIN_SUFFIX)


def make_session_path(name: str, secret: bytes = b"") -> Path:
    return Path(_SEQUENCES_FOLDER, hash_key(name.encode(), secret).hex() + SESSION_SUFFIX)


def _encode_recovery_file(value: Namespace | SavedSequence, secret: bytes) -> tuple[Path, bytes]:
    """Return relative path and bytes of the file for a namespace, a pin or a session."""
    if isinstance(value, Namespace):
        return Path(_NAMESPACES_FOLDER, f"{value.key.hex()}.json"), value.to_json().encode()
    path = make_pin_path(compute_sequence_key(value.namespace_key, value.ids, secret))
    if value.name:
        path = make_session_path(value.name, secret)
    return path, _encode_text(value)


def _make_loss_path(namespace_key: str) -> Path:
    return Path(_NAMESPACES_FOLDER, namespace_key + _LOSS_SUFFIX)


def _make_label_path(key: bytes) -> Path:
    return Path(_SEQUENCES_FOLDER, key.hex() + LABEL_SUFFIX)


def _encode_text(value: SavedSequence) -> bytes:
    name = value.name.encode()
    head = _SEQUENCE_STRUCT.pack(_SEQUENCE_MAGIC, len(name), value.ids.size, value.namespace_key)
    data = head + name + value.ids.astype("<u4").tobytes()
    return data + _CHECKSUM_STRUCT.pack(integrity_checksum(data))


def _decode_sequence(data: bytes) -> SavedSequence | None:
    """Decode a saved sequence; None if it is damaged."""
    if len(data) < _SEQUENCE_STRUCT.size + _CHECKSUM_STRUCT.size:
        return None
    magic, name_bytes, tokens, namespace = _SEQUENCE_STRUCT.unpack_from(data)
    end = _SEQUENCE_STRUCT.size + name_bytes + 4 * tokens
    if magic != _SEQUENCE_MAGIC or not 1 <= tokens <= MAX_TOKENS or len(data) != end + _CHECKSUM_STRUCT.size:
        return None
    if integrity_checksum(data[:end]) != _CHECKSUM_STRUCT.unpack_from(data, end)[0]:
        return None
    ids_begin = _SEQUENCE_STRUCT.size + name_bytes
    ids = np.frombuffer(data, "<u4", tokens, ids_begin)
    name = data[_SEQUENCE_STRUCT.size : ids_begin].decode("utf-8", "replace")
    return SavedSequence(name, namespace, ids) if int(ids.max()) <= MAX_ID else None


def remove_unused_store(folder: str | os.PathLike[str]) -> None:
    """Remove the directory of a store, unless it contains units, staged ones of a running put, or foreign files."""
    path = Path(folder)
    is_used = any(path.glob(f"{_UNITS_FOLDER}/*/*")) or any(path.glob(f"{_STAGING_FOLDER}/*"))
    if not is_used and next(iter_foreign_files(path), None) is None:
        shutil.rmtree(path, ignore_errors=True)


def iter_foreign_files(folder: Path) -> Iterator[str]:
    """Yield the names of files and folders in a store that kvmnn did not write; they are reported and never removed."""
    for walked_folder, folders, files in os.walk(folder):
        relative_folder = Path(walked_folder).relative_to(folder)
        folders[:] = [name for name in folders if not TEMPORARY_NAME_PATTERN.fullmatch(name)]
        for name in [name for name in folders if not _OWN_FOLDER_REGEX.fullmatch((relative_folder / name).as_posix())]:
            folders.remove(name)
            yield f"{relative_folder / name}/"
        for name in files:
            path = relative_folder / name
            pattern = _OWN_NAME_PATTERNS.get("" if path.parent == Path() else str(path.parent))
            if pattern:
                is_own = re.fullmatch(pattern, name) is not None
            else:
                is_own = _is_unit_path(path)
            if not is_own and not TEMPORARY_NAME_PATTERN.fullmatch(name):
                yield str(path)


def _is_unit_path(path: Path) -> bool:
    try:
        return path == Path(_UNITS_FOLDER, *_make_unit_names(int(path.stem, 16)))
    except ValueError:
        return False
