"""The files of a packed cache, layer by layer."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...arrays.completeness import LayerState, StateKind
from ...dtypes import Part
from ...errors import SourceError

_STATES: Final[tuple[StateKind, ...]] = ("linear", "recurrent", "unknown")


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """The two files of one layer."""

    layer: int
    key: str
    value: str
    key_bytes: int
    value_bytes: int
    kind: StateKind = "full"
    group: int = 0  # of the layers that have the same kv heads and head_dim

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
    notes
        What was inferred to find them.
    states
        Layers of a prefix whose files hold no K and V, but state of another kind; `layers` has the others.
    model_states
        What the model keeps for each of its layers, where that is known.
    is_mixed
        Whether the model says that its layers differ (``attention_type``); None where that is not known.
    """

    kind: str
    name: str
    path: str
    layers: tuple[PackedLayer, ...]
    document: tuple[bytes, str] | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[PackedLayer, ...] = ()
    model_states: tuple[LayerState, ...] = ()
    is_mixed: bool | None = None

    @property
    def all_layers(self) -> tuple[PackedLayer, ...]:
        """Layers with K and V and those with other state, in order."""
        return tuple(sorted((*self.layers, *self.states), key=lambda layer: layer.layer))

    @property
    def is_whole(self) -> bool:
        """Whether they are all layers of a prefix."""
        return self.kind == "prefix" and self.all_layers[0].layer == 0

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Bytes of the K and V file of every layer with K and V."""
        return [(layer.key_bytes, layer.value_bytes) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(layer.key_bytes + layer.value_bytes for layer in self.all_layers)

    @property
    def gaps(self) -> list[str]:
        """Which files are missing or empty, as sentences."""
        found = []
        for layer in self.all_layers:
            for path, size in ((layer.key, layer.key_bytes), (layer.value, layer.value_bytes)):
                if not size:
                    found.append(f"{os.path.basename(path)} is {'empty' if os.path.exists(path) else 'missing'}")
        return found

    @property
    def unlike_sizes(self) -> str:
        """Which layer of full attention has files of another size than most, as a sentence; empty for none.

        The engine makes the files of a prefix all alike, so one of another size was cut.
        """
        groups = [*self.groups, *([each for each in self.states if each.kind == kind] for kind in _STATES)]
        return next(filter(None, (self._find_unlike(group) for group in groups)), "")

    @property
    def groups(self) -> list[tuple[PackedLayer, ...]]:
        """Layers with K and V, those of the same kv heads and head_dim together."""
        numbers = dict.fromkeys(layer.group for layer in self.layers)
        return [tuple(layer for layer in self.layers if layer.group == number) for number in numbers]

    def _find_unlike(self, group: Sequence[PackedLayer]) -> str:
        layers = [layer for layer in group if layer.key_bytes * layer.value_bytes]
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
        return [*self.gaps, *filter(None, [self.unlike_sizes or self._unmixed]), *self.problems]

    @property
    def _unmixed(self) -> str:
        """Why the engine would not load layers of different kinds, as a sentence; empty where it would."""
        if self.is_mixed is not False or len({(each.key_bytes, each.value_bytes) for each in self.all_layers}) < 2:
            return ""
        return (
            "its layers differ in size, which MNN takes for damage unless the model's llm_config.json has "
            '"attention_type": "mix"'
        )

    @property
    def paths(self) -> list[str]:
        """Every data file."""
        return [path for layer in self.all_layers for path in (layer.key, layer.value)]

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
