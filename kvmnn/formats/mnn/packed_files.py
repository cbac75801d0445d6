"""The files of a packed cache, layer by layer, and the file names of a prefix cache.

MNN prefix caches have ``<name>_<layer>.k`` and ``.v``, and the empty markers ``<name>_<layer>_sync.k`` and ``.v``. A
data file contains only the packed buffer of all heads; the engine loads a prefix only if all markers are present. It
counts positions from 0 by the number of ids, and reads no positions from any file.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ..._util.dataclass import dataclass
from ..._util.patterns import declare_pattern
from ..._util.text import format_range
from ...arrays.completeness import LayerStateInfo, StateKind
from ...dtypes import PART_LETTERS, PARTS, Part
from ...errors import MissingOptionError, OptionError, OutputError, SourceError, UnsuitableOptionError, build_read_error
from ...files.schema import read_bounded
from ...packed import cache_info
from ...packed.cache_info import CACHE_SIDECAR_SUFFIX, MAX_CACHE_INFO_BYTES, CacheInfo

_STATE_KINDS: Final[tuple[StateKind, ...]] = ("linear", "recurrent", "unknown")


class DamagedFilesError(SourceError):
    """Packed files that were written in part or lack layers; `problem` describes it without path and remedy."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


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
        """Return the path of the file of K or of V."""
        return self.key if part == "key" else self.value

    def get_size(self, part: Part) -> int:
        """Return the size of the file of K or of V in bytes; 0 for a missing one."""
        return self.key_bytes if part == "key" else self.value_bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the files of K and of V in bytes."""
        return self.key_bytes, self.value_bytes

    @classmethod
    def from_folder(cls, folder: Path, layer: int, stem: str, *, may_lack: bool = False) -> PackedLayer:
        """Look at the files ``<stem>.k`` and ``.v`` of a layer; `may_lack` makes a missing one an empty one."""
        key, value = (f"{folder / stem}.{letter}" for letter in PART_LETTERS.values())
        sizes = [0 if may_lack and not os.path.lexists(path) else get_file_size(path) for path in (key, value)]
        return cls(layer=layer, key=key, value=value, key_bytes=sizes[0], value_bytes=sizes[1])


@dataclass(frozen=True, kw_only=True)
class PackedFiles:
    """The files of a packed cache, before their layout is known."""

    #: Kind and name of the cache, as in `CacheInfo`.
    kind: str
    name: str
    #: The path as specified.
    path: str
    #: Layers in order, numbered from 0 unless the path is a file of one layer.
    layers: tuple[PackedLayer, ...]
    #: The contents of the JSON file that kvmnn left next to them, and its path.
    sidecar_document: tuple[bytes, str] | None = None
    #: Name of a document next to files without one, for a prefix that has no files there: they may have been renamed.
    stray_document: str = ""
    #: Missing markers, without which the engine considers a prefix unfinished.
    problems: tuple[str, ...] = ()
    #: Notes about how the files were inferred.
    notes: tuple[str, ...] = ()
    #: Layers of a prefix whose files contain state of another kind instead of K and V; `layers` has the others.
    states: tuple[PackedLayer, ...] = ()
    #: The state that the model stores for each of its layers, if known.
    model_states: tuple[LayerStateInfo, ...] = ()
    #: Whether the model declares that its layers differ (``attention_type``); None if unknown.
    is_mixed: bool | None = None

    @property
    def all_layers(self) -> tuple[PackedLayer, ...]:
        """Return layers with K and V and those with other state, in order."""
        return tuple(sorted((*self.layers, *self.states), key=lambda layer: layer.layer))

    @property
    def is_whole_prefix(self) -> bool:
        """Return whether the files are all layers of a prefix."""
        return self.kind == "prefix" and self.all_layers[0].layer == 0

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return the sizes in bytes of the K and V file of every layer with K and V."""
        return [layer.sizes for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(sum(layer.sizes) for layer in self.all_layers)

    @property
    def missing_files(self) -> list[str]:
        """Return sentences about missing or empty files."""
        paths = [layer.get_path(part) for layer in self.all_layers for part in PARTS if not layer.get_size(part)]
        return [f"{os.path.basename(path)} is {'empty' if os.path.exists(path) else 'missing'}" for path in paths]

    @property
    def size_mismatch(self) -> str:
        """Return a sentence about the full-attention layer whose file sizes differ from most; empty for none.

        All files of a prefix have equal sizes, so one of another size was truncated.
        """
        groups = [*self.groups, *([state for state in self.states if state.kind == kind] for kind in _STATE_KINDS)]
        return next(filter(None, (self._find_size_mismatch(group) for group in groups)), "")

    @property
    def groups(self) -> list[tuple[PackedLayer, ...]]:
        """Return layers with K and V, grouped by kv heads and head_dim."""
        group_numbers = dict.fromkeys(layer.group for layer in self.layers)
        return [tuple(layer for layer in self.layers if layer.group == group_number) for group_number in group_numbers]

    def _find_size_mismatch(self, group: Sequence[PackedLayer]) -> str:
        layers = [layer for layer in group if all(layer.sizes)]
        sizes = Counter(layer.sizes for layer in layers)
        if self.kind != "prefix" or len(sizes) < 2:
            return ""
        usual_sizes = max(sizes, key=lambda size_pair: (sizes[size_pair], size_pair))
        unusual_layer = next(layer for layer in layers if layer.sizes != usual_sizes)
        part: Part = "key" if unusual_layer.key_bytes != usual_sizes[0] else "value"
        return (
            f"its layers differ in size: {os.path.basename(unusual_layer.get_path(part))} has "
            f"{unusual_layer.get_size(part)} bytes, that of "
            f"{'the other layer' if len(layers) == 2 else 'most layers'} {usual_sizes[part == 'value']}"
        )

    @property
    def load_problems(self) -> list[str]:
        """Return sentences about why the engine would not load the files; empty if it would."""
        return [*self.missing_files, *filter(None, [self.size_mismatch or self._mixed_layers_problem]), *self.problems]

    @property
    def _mixed_layers_problem(self) -> str:
        """Return a sentence about why the engine would not load these kinds of layers; empty if it would."""
        if self.is_mixed is not False or len({layer.sizes for layer in self.all_layers}) < 2:
            return ""
        return (
            "its layers differ in size, which MNN takes for damage unless the model's llm_config.json has "
            '"attention_type": "mix"'
        )

    @property
    def paths(self) -> list[str]:
        """Return the path of every data file."""
        return [layer.get_path(part) for layer in self.all_layers for part in PARTS]

    @property
    def opened_files(self) -> tuple[str, ...]:
        """Return every file that is read: the data, and the description next to it."""
        return (*self.paths, *([self.sidecar_document[1]] if self.sidecar_document else []))


def get_file_size(path: str) -> int:
    """Return the size of a regular file in bytes; raise `SourceError` for anything else."""
    try:
        status = os.stat(path)
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path}: is not a regular file")
    return status.st_size


_DATA_NAME_REGEX = declare_pattern(r"(?P<name>.+)_(?P<layer>0|[1-9]\d{0,5})\.(?P<part>[kv])", re.DOTALL)

_MARKER_NAME_REGEX = declare_pattern(r"(?P<name>.+)_(?P<layer>0|[1-9]\d{0,5})_sync\.[kv]", re.DOTALL)


def format_data_name(name: str, layer: int, part: str) -> str:
    """Return the name of a data file; `part` is ``k`` or ``v``."""
    return f"{name}_{layer}.{part}"


def format_marker_name(name: str, layer: int, part: str) -> str:
    """Return the name of the sync marker of a data file."""
    return f"{name}_{layer}_sync.{part}"


def describe_marker(path: str) -> str:
    """Return which layer of which prefix an empty file with the name of a marker is about; empty for other files."""
    marker_match = _MARKER_NAME_REGEX.fullmatch(Path(path).name)
    if not marker_match or not os.path.isfile(path) or os.path.getsize(path):
        return ""
    return f"layer {marker_match['layer']} of prefix {marker_match['name']!r}"


def list_prefix_names(listing: Iterable[str]) -> list[str]:
    """List the prefixes whose files are in a directory listing."""
    return sorted({name_match["name"] for name_match in map(_DATA_NAME_REGEX.fullmatch, listing) if name_match})


def find_prefix(path: str, name: str | None = None) -> PackedFiles:
    """Find the prefix cache in a directory, or the one layer whose ``.k`` or ``.v`` file `path` is."""
    if os.path.isdir(path):
        folder, layer_numbers = Path(path), None
    else:
        folder = Path(path).parent
        name_match = _DATA_NAME_REGEX.fullmatch(Path(path).name)
        if not name_match:
            raise SourceError(f"{path}: is not named as prefix-cache files are, <name>_<layer>.k or .v")
        name, layer_numbers = name_match["name"], [int(name_match["layer"])]
    listing = list_folder(folder)
    names = list_prefix_names(listing)
    name = _resolve_name(path, names, name)
    selected_layers = layer_numbers or _list_layer_numbers(path, name, listing)
    sidecar_document = _read_sidecar_document(folder / (name + CACHE_SIDECAR_SUFFIX))
    return PackedFiles(
        kind="prefix",
        name=name,
        path=path,
        layers=tuple(
            PackedLayer.from_folder(folder, layer_number, f"{name}_{layer_number}", may_lack=True)
            for layer_number in selected_layers
        ),
        sidecar_document=sidecar_document,
        stray_document="" if sidecar_document else _find_stray_document(names, listing),
        problems=tuple(_iter_problems(name, selected_layers, listing)),
    )


def list_folder(folder: Path) -> set[str]:
    """Return the names in a directory; `SourceError` where it cannot be read."""
    try:
        return set(os.listdir(folder))
    except OSError as exc:
        raise build_read_error(folder, exc) from exc


def _resolve_name(path: str, names: list[str], requested_name: str | None) -> str:
    if not names:
        raise SourceError(f"{path}: has no file named as prefix-cache files are, <name>_<layer>.k or .v")
    if requested_name is None and len(names) == 1:
        return names[0]
    names_text = ", ".join(repr(name) for name in names[:8])
    if requested_name is None:
        raise MissingOptionError(f"{path}: has {len(names)} prefixes, say which with --name: {names_text}")
    if requested_name not in names:
        raise UnsuitableOptionError(f"{path}: has no prefix {requested_name!r}; it has {names_text}")
    return requested_name


def _list_layer_numbers(path: str, name: str, listing: set[str]) -> list[int]:
    data_layers, marker_layers = (
        {int(match["layer"]) for match in map(regex.fullmatch, listing) if match and match["name"] == name}
        for regex in (_DATA_NAME_REGEX, _MARKER_NAME_REGEX)
    )
    last_layer = max(data_layers | marker_layers)
    missing_layers = sorted(set(range(last_layer + 1)) - data_layers)
    if missing_layers:
        marker_text = "" if last_layer in data_layers else "a marker "
        raise SourceError(
            f"{path}: prefix {name!r} has no files of layer {missing_layers[0]}, but {marker_text}of layer {last_layer}"
        )
    return sorted(data_layers)


def _iter_problems(name: str, layers: list[int], listing: set[str]) -> Iterable[str]:
    markers = [format_marker_name(name, layer, part) for layer in layers for part in PART_LETTERS.values()]
    missing_markers = [marker for marker in markers if marker not in listing]
    if missing_markers:
        yield (
            f"{len(missing_markers)} of {len(markers)} markers are missing, {missing_markers[0]} first, so the engine "
            "takes the prefix for unfinished"
        )


def _find_stray_document(names: Sequence[str], listing: Iterable[str]) -> str:
    """Return the first document in a listing that is of none of the prefixes; empty for none."""
    documents = {file_name for file_name in listing if file_name.endswith(CACHE_SIDECAR_SUFFIX)}
    return min(documents - {name + CACHE_SIDECAR_SUFFIX for name in names}, default="")


def _read_sidecar_document(path: Path) -> tuple[bytes, str] | None:
    if not path.exists():
        return None
    get_file_size(str(path))  # a regular file: opening a pipe would wait
    return read_bounded(path, MAX_CACHE_INFO_BYTES), str(path)


def validate_prefix_name(name: str) -> str:
    """Return a valid prefix name, one plain part of a path; raise `OptionError` for others."""
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name) or len(name.encode()) > 200:
        raise OptionError(f"{name!r:.220}: is not a name for a prefix: expected a plain file name")
    return name


def list_prefix_files(info: CacheInfo) -> list[str]:
    """List every file of a prefix cache in write order: data, the description, and the engine's markers last.

    With all markers, which engines and `find_prefix` look for, a prefix has its description, too, if a run is killed:
    losses and evicted tokens stand in it alone.
    """
    pairs = [(layer_number, PART_LETTERS[part]) for layer_number in info.numbers for part in PARTS]
    data_names = [format_data_name(info.name, *pair) for pair in pairs]
    marker_names = [format_marker_name(info.name, *pair) for pair in pairs]
    return [*data_names, info.name + cache_info.CACHE_SIDECAR_SUFFIX, *marker_names]


def list_loading_files(info: CacheInfo) -> list[str]:
    """List the files that are removed before those of an older prefix are replaced: markers, then description."""
    description, *markers = list_prefix_files(info)[2 * len(info.numbers) :]
    return [*markers, description]


def check_leftover_layers(target: Path, info: CacheInfo, names: Sequence[str]) -> None:
    """Raise `OutputError` for a directory with files of the same prefix for layers that the new cache lacks."""
    if not target.is_dir():
        return
    for path in sorted(target.iterdir()):
        if list_prefix_names([path.name]) == [info.name] and path.name not in names:
            raise OutputError(f"{path}: belongs to a prefix of the same name with more layers; remove that one first")


def describe_size_mismatch(info: CacheInfo) -> str:
    """Return `PackedFiles.size_mismatch` of the files that a description is written to."""
    group_by_heads = {heads: group for group, heads in enumerate(dict.fromkeys(layer.heads for layer in info.layers))}
    layers = []
    for layer in info.layers:
        key_bytes, value_bytes = cache_info.compute_file_sizes(info, layer)
        layers.append(
            PackedLayer(
                layer=layer.layer,
                key=format_data_name(info.name, layer.layer, PART_LETTERS["key"]),
                value=format_data_name(info.name, layer.layer, PART_LETTERS["value"]),
                key_bytes=key_bytes,
                value_bytes=value_bytes,
                group=group_by_heads[layer.heads],
            )
        )
    return PackedFiles(kind="prefix", name=info.name, path="", layers=tuple(layers)).size_mismatch


SET_LENGTH_STATEMENT: Final = "const_cast<MNN::Transformer::LlmContext*>(llm->getContext())->all_seq_len = {};"
"""The line of C++ that sets the position of MNN's next token."""


def has_gaps(info: CacheInfo) -> bool:
    """Return whether K of any layer has other positions than the first ones."""
    return any(layer.positions != ((0, layer.tokens),) for layer in info.layers)


def list_position_warnings(info: CacheInfo) -> list[str]:
    """Return warnings about loading such a prefix in MNN: lines of at most 80 characters; empty for none."""
    token_counts = sorted({layer.tokens for layer in info.layers})
    lines = []
    if len(token_counts) > 1:
        lines += [f"layers hold {format_range(token_counts)} tokens, and MNN reads the same number of rows"]
        lines += ["of every layer: what it generates is wrong."]
    elif has_gaps(info):  # of layers that differ in number no position suits all
        last_position = max(sum(run) for layer in info.layers for run in layer.positions) - 1
        lines += [
            f"K has positions up to {last_position}, and after loading MNN continues at {token_counts[-1]}:",
            "what it generates is wrong. Rotate K (--rerotate), or set the position of",
            "the next token in C++ (not with sliding windows), after generate(ids, 0):",
            f"  {SET_LENGTH_STATEMENT.format(info.next_token_position)}",
        ]
    return lines


def format_warning_lines(warnings: Sequence[str]) -> list[str]:
    """Indent the lines, the first one with ``warning:`` in front."""
    return [f"  {'warning: ' if index == 0 else '  '}{line}" for index, line in enumerate(warnings)]


def join_warnings(warnings: Sequence[str]) -> list[str]:
    """Return the lines as JSON has them: one text."""
    return [" ".join(line.strip() for line in warnings)] if warnings else []
