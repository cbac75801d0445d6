"""The files of a packed cache, layer by layer."""

from __future__ import annotations

import os
import stat
from collections import Counter
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

    def size(self, part: Part) -> int:
        """Bytes of the file of K or of V; 0 for one that is missing."""
        return self.key_bytes if part == "key" else self.value_bytes


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
        Which markers are missing, without which the engine takes a prefix for unfinished.
    exempt
        Layers of a prefix whose files need not have the sizes of the others: those without full attention.
    notes
        What was inferred to find them.
    """

    kind: str
    name: str
    path: str
    layers: tuple[PackedLayer, ...]
    document: tuple[bytes, str] | None = None
    problems: tuple[str, ...] = ()
    exempt: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Bytes of the K and V file of every layer."""
        return [(layer.key_bytes, layer.value_bytes) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(key + value for key, value in self.sizes)

    @property
    def gaps(self) -> list[str]:
        """Which files are missing or empty, as sentences."""
        found = []
        for layer in self.layers:
            for path, size in ((layer.key, layer.key_bytes), (layer.value, layer.value_bytes)):
                if not size:
                    found.append(f"{os.path.basename(path)} is {'empty' if os.path.exists(path) else 'missing'}")
        return found

    @property
    def unlike_sizes(self) -> str:
        """Which layer of full attention has files of another size than most, as a sentence; empty for none.

        The engine makes the files of a prefix all alike, so one of another size was cut.
        """
        layers = [
            layer for layer in self.layers if layer.layer not in self.exempt and layer.key_bytes * layer.value_bytes
        ]
        sizes = Counter((layer.key_bytes, layer.value_bytes) for layer in layers)
        if self.kind != "prefix" or len(sizes) < 2:
            return ""
        usual = max(sizes, key=lambda pair: (sizes[pair], pair))
        other = next(layer for layer in layers if (layer.key_bytes, layer.value_bytes) != usual)
        part: Part = "key" if other.key_bytes != usual[0] else "value"
        return (
            f"its layers differ in size: {os.path.basename(other.path(part))} has {other.size(part)} bytes, that of "
            f"{'the other layer' if len(layers) == 2 else 'most layers'} {usual[part == 'value']}"
        )

    @property
    def refusals(self) -> list[str]:
        """Why the engine would not load them, as sentences; empty if it would."""
        return [*self.gaps, *filter(None, [self.unlike_sizes]), *self.problems]

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
