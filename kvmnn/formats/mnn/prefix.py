"""MNN prefix caches: ``<name>_<layer>.k`` and ``.v``, and the empty markers ``<name>_<layer>_sync.k`` and ``.v``.

A data file holds the packed buffer of all heads and nothing else; the engine loads a prefix only if every marker is
there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...dtypes import PART_LETTERS, PARTS
from ...errors import MissingOptionError, OutputError, SourceError
from ...files.json_document import read_bounded
from ...packed import cache_info
from ...packed.cache_info import MAX_BYTES, SIDE_SUFFIX, CacheInfo
from .packed_files import PackedFiles, PackedLayer, size_of

_DATA = re.compile(r"(?P<name>.+)_(?P<layer>0|[1-9]\d{0,5})\.(?P<part>[kv])", re.DOTALL)

_MARKER = re.compile(r"(?P<name>.+)_(?P<layer>0|[1-9]\d{0,5})_sync\.[kv]", re.DOTALL)


def data_name(name: str, layer: int, part: str) -> str:
    """Name of a data file; `part` is ``k`` or ``v``."""
    return f"{name}_{layer}.{part}"


def marker_name(name: str, layer: int, part: str) -> str:
    """Name of the marker of a data file."""
    return f"{name}_{layer}_sync.{part}"


def names_in(listing: Iterable[str]) -> list[str]:
    """The prefixes that a directory listing has files of."""
    return sorted({found["name"] for found in map(_DATA.fullmatch, listing) if found})


def find(path: str, name: str | None = None) -> PackedFiles:
    """The prefix cache in a directory, or the one layer whose ``.k`` or ``.v`` file `path` is.

    Parameters
    ----------
    name
        Of the prefix; needed where the directory holds several.

    Raises
    ------
    SourceError
        When there is none, or a layer or file of it is missing.
    MissingOptionError
        When there are several to choose from.
    """
    if os.path.isdir(path):
        folder, layers = Path(path), None
    else:
        folder = Path(path).parent
        found = _DATA.fullmatch(Path(path).name)
        if not found:
            raise SourceError(f"{path}: is not named as prefix-cache files are, <name>_<layer>.k or .v")
        name, layers = found["name"], [int(found["layer"])]
    listing = _listing(folder)
    name = _the_name(path, names_in(listing), name)
    numbers = layers or _layers(path, name, listing)
    return PackedFiles(
        kind="prefix",
        name=name,
        path=path,
        layers=tuple(_layer(folder, name, number) for number in numbers),
        document=_document(folder / (name + SIDE_SUFFIX)),
        problems=tuple(_problems(folder, name, numbers, listing)),
    )


def _listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError as exc:
        raise SourceError(f"{folder}: cannot be read: {exc.strerror or exc}") from exc


def _the_name(path: str, names: list[str], wanted: str | None) -> str:
    if not names:
        raise SourceError(f"{path}: has no file named as prefix-cache files are, <name>_<layer>.k or .v")
    if wanted is None and len(names) == 1:
        return names[0]
    some = ", ".join(repr(name) for name in names[:8])
    if wanted is None:
        raise MissingOptionError(f"{path}: has {len(names)} prefixes, say which with --name: {some}")
    if wanted not in names:
        raise SourceError(f"{path}: has no prefix {wanted!r}; it has {some}")
    return wanted


def _layers(path: str, name: str, listing: set[str]) -> list[int]:
    found = {int(m["layer"]) for m in map(_DATA.fullmatch, listing) if m and m["name"] == name}
    marked = {int(m["layer"]) for m in map(_MARKER.fullmatch, listing) if m and m["name"] == name}
    last = max(found | marked)
    missing = sorted(set(range(last + 1)) - found)
    if missing:
        what = "" if last in found else "a marker "
        raise SourceError(f"{path}: prefix {name!r} has no files of layer {missing[0]}, but {what}of layer {last}")
    return sorted(found)


def _layer(folder: Path, name: str, layer: int) -> PackedLayer:
    key, value = (str(folder / data_name(name, layer, part)) for part in PART_LETTERS.values())
    sizes = [size_of(path) if os.path.lexists(path) else 0 for path in (key, value)]
    return PackedLayer(layer=layer, key=key, value=value, key_bytes=sizes[0], value_bytes=sizes[1])


def _problems(folder: Path, name: str, layers: list[int], listing: set[str]) -> Iterable[str]:
    markers = [marker_name(name, layer, part) for layer in layers for part in PART_LETTERS.values()]
    missing = [marker for marker in markers if marker not in listing]
    if missing:
        yield (
            f"{len(missing)} of {len(markers)} markers are missing, {missing[0]} first, so the engine takes the prefix "
            "for unfinished"
        )


def _document(path: Path) -> tuple[bytes, str] | None:
    if not path.exists():
        return None
    size_of(str(path))  # a regular file: opening a pipe would wait
    return read_bounded(path, MAX_BYTES), str(path)


def check_name(name: str) -> str:
    """A name that prefix files may have: one plain part of a path; `OutputError` for others."""
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name) or len(name.encode()) > 200:
        raise OutputError(f"{name!r:.220}: is not a name for a prefix: expected a plain file name")
    return name


def file_names(info: CacheInfo) -> list[str]:
    """Every file of a prefix cache, in the order in which they are written: the engine's markers after the data."""
    pairs = [(number, PART_LETTERS[part]) for number in info.numbers for part in PARTS]
    data = [data_name(info.name, *pair) for pair in pairs]
    markers = [marker_name(info.name, *pair) for pair in pairs]
    return [*data, *markers, info.name + cache_info.SIDE_SUFFIX]


def check_leftovers(target: Path, info: CacheInfo, names: Sequence[str]) -> None:
    """Refuse a directory in which files of more layers of the same name would stay beside the new ones."""
    if not target.is_dir():
        return
    for path in sorted(target.iterdir()):
        if names_in([path.name]) == [info.name] and path.name not in names:
            raise OutputError(f"{path}: belongs to a prefix of the same name with more layers; remove that one first")
