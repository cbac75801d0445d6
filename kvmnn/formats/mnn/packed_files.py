"""The files of a packed cache, layer by layer."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...arrays.completeness import LayerStateInfo, StateKind
from ...dtypes import Part
from ...errors import SourceError

_STATE_KINDS: Final[tuple[StateKind, ...]] = ("linear", "recurrent", "unknown")


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

    def get_path(self, part: Part) -> str:
        """The file of K or of V."""
        return self.key if part == "key" else self.value

    def get_size(self, part: Part) -> int:
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
    sidecar_document
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
    sidecar_document: tuple[bytes, str] | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[PackedLayer, ...] = ()
    model_states: tuple[LayerStateInfo, ...] = ()
    is_mixed: bool | None = None

    @property
    def all_layers(self) -> tuple[PackedLayer, ...]:
        """Layers with K and V and those with other state, in order."""
        return tuple(sorted((*self.layers, *self.states), key=lambda layer: layer.layer))

    @property
    def is_whole_prefix(self) -> bool:
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
    def missing_files(self) -> list[str]:
        """Which files are missing or empty, as sentences."""
        sentences = []
        for layer in self.all_layers:
            for path, size in ((layer.key, layer.key_bytes), (layer.value, layer.value_bytes)):
                if not size:
                    sentences.append(f"{os.path.basename(path)} is {'empty' if os.path.exists(path) else 'missing'}")
        return sentences

    @property
    def size_mismatch(self) -> str:
        """Which layer of full attention has files of another size than most, as a sentence; empty for none.

        The engine makes the files of a prefix all alike, so one of another size was cut.
        """
        groups = [*self.groups, *([state for state in self.states if state.kind == kind] for kind in _STATE_KINDS)]
        return next(filter(None, (self._find_size_mismatch(group) for group in groups)), "")

    @property
    def groups(self) -> list[tuple[PackedLayer, ...]]:
        """Layers with K and V, those of the same kv heads and head_dim together."""
        group_numbers = dict.fromkeys(layer.group for layer in self.layers)
        return [tuple(layer for layer in self.layers if layer.group == group_number) for group_number in group_numbers]

    def _find_size_mismatch(self, group: Sequence[PackedLayer]) -> str:
        layers = [layer for layer in group if layer.key_bytes * layer.value_bytes]
        sizes = Counter((layer.key_bytes, layer.value_bytes) for layer in layers)
        if self.kind != "prefix" or len(sizes) < 2:
            return ""
        usual_sizes = max(sizes, key=lambda size_pair: (sizes[size_pair], size_pair))
        unusual_layer = next(layer for layer in layers if (layer.key_bytes, layer.value_bytes) != usual_sizes)
        part: Part = "key" if unusual_layer.key_bytes != usual_sizes[0] else "value"
        return (
            f"its layers differ in size: {os.path.basename(unusual_layer.get_path(part))} has "
            f"{unusual_layer.get_size(part)} bytes, that of "
            f"{'the other layer' if len(layers) == 2 else 'most layers'} {usual_sizes[part == 'value']}"
        )

    @property
    def refusals(self) -> list[str]:
        """Why the engine would not load them, as sentences; empty if it would."""
        return [*self.missing_files, *filter(None, [self.size_mismatch or self._mixed_layers_refusal]), *self.problems]

    @property
    def _mixed_layers_refusal(self) -> str:
        """Why the engine would not load layers of different kinds, as a sentence; empty where it would."""
        if self.is_mixed is not False or len({(layer.key_bytes, layer.value_bytes) for layer in self.all_layers}) < 2:
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
    def opened_files(self) -> tuple[str, ...]:
        """Every file that is read: data, and the document beside them."""
        return (*self.paths, *([self.sidecar_document[1]] if self.sidecar_document else []))


def get_file_size(path: str) -> int:
    """Bytes of a regular file; `SourceError` for anything else."""
    try:
        status = os.stat(path)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path}: is not a regular file")
    return status.st_size
