"""The files of a packed cache, layer by layer."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ...dtypes import Part
from ...errors import SourceError


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """The two files of one layer."""

    layer: int
    key: str
    value: str
    key_bytes: int
    value_bytes: int

    def path(self, part: Part) -> str:
        """The file of K or of V."""
        return self.key if part == "key" else self.value


@dataclass(frozen=True, kw_only=True)
class PackedFiles:
    """Packed files that were found, before anything is known of what they hold.

    Parameters
    ----------
    kind, name
        As `CacheInfo` has them.
    path
        What the user named.
    layers
        In order, numbered from 0 unless the user named the files of one.
    document
        The contents of the JSON file that kvmnn left beside them, and its path.
    problems
        Why the engine would not load them; empty if it would.
    """

    kind: str
    name: str
    path: str
    layers: tuple[PackedLayer, ...]
    document: tuple[bytes, str] | None = None
    problems: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Bytes of the K and V file of every layer."""
        return [(layer.key_bytes, layer.value_bytes) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(key + value for key, value in self.sizes)

    @property
    def paths(self) -> list[str]:
        """Every data file."""
        return [path for layer in self.layers for path in (layer.key, layer.value)]

    @property
    def opened(self) -> tuple[str, ...]:
        """Every file that is read: data, and the document beside them."""
        return (*self.paths, *([self.document[1]] if self.document else []))


def size_of(path: str) -> int:
    """Bytes of a regular file; `SourceError` for anything else."""
    try:
        status = os.stat(path)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path}: is not a regular file")
    return status.st_size
