"""Inspect packed files, even if properties that they do not record are unknown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...arrays.completeness import Completeness, format_missing
from ...arrays.source import list_losses
from ...errors import MissingOptionError, SourceError
from ...files.schema import Record, json_key
from ...packed.cache_info import (
    CacheInfo,
    build_cache_document,
    describe_evicted_layers,
    format_cache_summary,
    format_utilisation,
)
from ...packed.inference import LayoutMatch, PackedGeometry, describe_layout, find_matches
from ..options import PackedOptions
from .layer_kinds import separate_state_layers
from .layout_inference import RotatedCodesError
from .packed_files import DamagedFilesError, PackedFiles, PackedLayer, list_prefix_names
from .packed_reader import PackedCacheReader, find_packed, open_packed_files, resolve_geometry

_STATE_DESCRIPTIONS = {
    "linear": "state of linear attention",
    "recurrent": "recurrent state",
    "unknown": "state of an unknown kind",
}
_KIND_DESCRIPTIONS = {"prefix": "MNN prefix cache", "live": "live files of an MNN cache"}
"""Descriptions of the kinds of packed files."""


@dataclass(frozen=True)
class ResolvedCacheInfo(Record):
    """Packed files with a known layout."""

    json_keys = "**_files_document notes=reader.notes cache padded_bytes completeness layers states"

    #: Reader of the files with their layout and inferred properties.
    reader: PackedCacheReader
    #: Sentence about a part of the files that was not written; empty for none.
    damage: str = ""

    @property
    def files(self) -> PackedFiles:
        """Return the files."""
        return self.reader.files

    @property
    def problems(self) -> list[str]:
        """Return sentences about damage, and about why the engine would not load the files."""
        return _list_problems(self.files, self.damage)

    @property
    def _files_document(self) -> dict[str, Any]:
        return _build_document(self.files, self.problems)

    @property
    @json_key(convert=build_cache_document)
    def cache(self) -> CacheInfo:
        """Return the layout and the layers of the cache."""
        return self.reader.info

    @property
    def padded_bytes(self) -> int:
        """Return the number of bytes in all files that belong to no token."""
        info = self.reader.info
        return info.file_bytes - info.state_bytes - info.live_bytes

    @property
    @json_key(omit=True)
    def completeness(self) -> Completeness | None:
        """Return which part of the model's state the files contain; None if unknown."""
        return self.reader.completeness

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Return each layer's files as JSON values."""
        info, layers = self.reader.info, []
        for file_pair, layer in zip(self.files.layers, info.layers, strict=True):
            live_bytes, total_bytes = sum(info.count_live_bytes(layer)), sum(file_pair.sizes)
            layers.append(
                {
                    "layer": layer.layer,
                    "key_file": file_pair.key,
                    "value_file": file_pair.value,
                    "key_bytes": file_pair.key_bytes,
                    "value_bytes": file_pair.value_bytes,
                    "live_bytes": live_bytes,
                    "padded_bytes": total_bytes - live_bytes,
                }
            )
        return layers

    @property
    @json_key(omit=True)
    def states(self) -> list[dict[str, Any]] | None:
        """Return the files of layers without K and V as JSON values; None if there are none."""
        return [vars(state) for state in self.files.states] or None

    def __str__(self) -> str:
        files, info = self.reader.files, self.reader.info
        lines = [*_format_heading(files, self.damage), f"  {format_cache_summary(info)}"]
        lines += [f"  note: {note}" for note in (*self.reader.notes, *info.layout.unrecoverable_parts)]
        lines.append(f"  {format_utilisation(info)}")
        lines += _list_origin_lines(info)
        for file_pair, layer in zip(files.layers, info.layers, strict=True):
            live_bytes = info.count_live_bytes(layer)
            lines.append(
                f"  layer {layer.layer}: {layer.tokens:,} of {layer.capacity:,} tokens, "
                f"{_format_file(file_pair.key, file_pair.key_bytes, live_bytes[0])}, "
                f"{_format_file(file_pair.value, file_pair.value_bytes, live_bytes[1])}"
            )
        lines += [
            f"  layer {state.layer}: {_STATE_DESCRIPTIONS[state.kind]}, {_format_file_pair(state)}"
            for state in files.states
        ]
        lines += [f"  {line}" for line in format_missing(self.reader.completeness)]
        return "\n".join(lines)


@dataclass(frozen=True)
class UnresolvedCacheInfo(Record):
    """Packed files that lack a property needed to read them."""

    json_keys = "**_files_document cache not_known=reason possible=_match_documents choices layers=_file_documents"

    #: The files.
    files: PackedFiles
    #: The unknown properties.
    reason: str
    #: Layouts that match the file sizes, if the heads are known.
    possible_matches: Sequence[LayoutMatch]
    #: Options that would specify the unknown properties, the likeliest first.
    choices: Sequence[str] = ()
    #: Sentence about a part of the files that was not written; empty for none.
    damage: str = ""
    cache: ClassVar = None

    @property
    def problems(self) -> list[str]:
        """Return sentences about damage, and about why the engine would not load the files."""
        return _list_problems(self.files, self.damage)

    @property
    def _files_document(self) -> dict[str, Any]:
        return _build_document(self.files, self.problems)

    @property
    def _match_documents(self) -> list[dict[str, Any]]:
        return [
            {
                "backends": match.backends.split("/"),
                "layout": describe_layout(match.layout),
                "capacities": list(match.capacities),
            }
            for match in self.possible_matches
        ]

    @property
    def _file_documents(self) -> list[dict[str, Any]]:
        return [vars(file_pair) for file_pair in self.files.layers]

    def __str__(self) -> str:
        lines = [*_format_heading(self.files, self.damage), f"  not known: {self.reason}"]
        lines += [] if self.damage else ["  not checked: whether all rows were written, as no layout is certain"]
        lines += [
            f"  may be: {match.backends}: {describe_layout(match.layout)}, capacity {max(match.capacities):,}"
            for match in self.possible_matches
        ]
        lines += [f"  as likely as any: {choice}" for choice in self.choices]
        lines += [f"  layer {file_pair.layer}: {_format_file_pair(file_pair)}" for file_pair in self.files.layers]
        return "\n".join(lines)


@dataclass(frozen=True)
class PackedInspectionReport(Record):
    """The packed files at a path: one cache, or the prefix caches of a directory."""

    json_keys = "input=path kind prefixes=caches"

    #: The inspected path.
    path: str
    #: In the order of their names.
    caches: tuple[ResolvedCacheInfo | UnresolvedCacheInfo, ...]
    kind: ClassVar = "prefix caches"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values: of the only cache, or of all prefixes."""
        return self.caches[0].to_dict() if len(self.caches) == 1 else super().to_dict()

    @property
    def is_loadable(self) -> bool:
        """Return whether the engine would load all of them and finds every row; live files are not loaded."""
        return not any(cache.problems for cache in self.caches)

    def __str__(self) -> str:
        return "\n".join(map(str, self.caches))


def inspect_packed(path: str, options: PackedOptions | None = None) -> PackedInspectionReport | None:
    """Inspect the packed files at `path`, every prefix of them; return None if there are none.

    Parameters
    ----------
    options
        Known properties of the files; a name selects that prefix alone.

    Raises
    ------
    SourceError
        When files of a cache are missing, and for options that sizes or words of the files contradict.
    """
    options = options or PackedOptions()
    names = list_prefix_names(os.listdir(path)) if os.path.isdir(path) and options.prefix_name is None else []
    options_by_prefix = [replace(options, prefix_name=name) for name in names] if len(names) > 1 else [options]
    caches = tuple(
        cache for cache in (_inspect_cache(path, prefix_options) for prefix_options in options_by_prefix) if cache
    )
    return PackedInspectionReport(path, caches) if caches else None


def _inspect_cache(path: str, options: PackedOptions) -> ResolvedCacheInfo | UnresolvedCacheInfo | None:
    files = find_packed(path, options)
    if files is None:
        return None
    options, damage = replace(options, ignore_markers=True), ""
    try:
        return ResolvedCacheInfo(open_packed_files(files, options))
    except DamagedFilesError as exc:
        reason, choices, damage = str(exc), (), exc.problem
        with suppress(SourceError):
            return ResolvedCacheInfo(open_packed_files(files, replace(options, ignore_contradictions=True)), damage)
    except SourceError as exc:
        if not isinstance(exc, MissingOptionError | RotatedCodesError) and _are_options_wrong(files, options):
            raise
        reason, choices = str(exc), getattr(exc, "choices", ())
    reason = reason.removeprefix(f"{files.path}: ")
    with suppress(SourceError):
        files = separate_state_layers(files, options, None)
    try:
        possible_matches = find_matches(resolve_geometry(options), files.sizes)
    except SourceError:
        possible_matches = []
    return UnresolvedCacheInfo(files, reason, possible_matches, choices, damage)


def _are_options_wrong(files: PackedFiles, options: PackedOptions) -> bool:
    """Return whether files that cannot be read with the options could be read, or lack only options, without them."""
    bare_options = replace(
        options, geometry=PackedGeometry(), valid_tokens=(), token_ids=None, model=None, ignore_markers=True
    )
    try:
        open_packed_files(files, bare_options)
    except MissingOptionError:
        return True
    except SourceError:
        return False
    return True


def _list_problems(files: PackedFiles, damage: str) -> list[str]:
    return [*files.load_problems, *([damage] if damage else [])]


def _format_heading(files: PackedFiles, damage: str) -> list[str]:
    name = f" {files.name!r}" if files.name else ""
    layers_text = pluralize(len(files.all_layers), "layer")
    if os.path.isfile(files.path):
        layers_text = f"K and V of layer {files.all_layers[0].layer} alone"
    heading = f"{files.path}: {_KIND_DESCRIPTIONS[files.kind]}{name}, {layers_text}, {files.nbytes:,} bytes"
    if files.kind == "prefix" and not files.problems:
        heading += ", all markers there"
    load_lines = [f"  would not load: {problem}" for problem in files.load_problems]
    return [heading, *load_lines, *([f"  damaged: {damage}"] if damage else [])]


def _build_document(files: PackedFiles, problems: Sequence[str]) -> dict[str, Any]:
    return {
        "input": files.path,
        "kind": f"{files.kind} cache",
        "name": files.name,
        "file_bytes": files.nbytes,
        "problems": problems,
    }


def _format_file_pair(layer: PackedLayer) -> str:
    return ", ".join(
        f"{os.path.basename(path)} {f'{size:,} bytes' if size or os.path.exists(path) else 'missing'}"
        for path, size in ((layer.key, layer.key_bytes), (layer.value, layer.value_bytes))
    )


def _format_file(path: str, size: int, live_bytes: int) -> str:
    return f"{os.path.basename(path)} {size:,} bytes ({live_bytes:,} live, {size - live_bytes:,} not)"


def _list_origin_lines(info: CacheInfo) -> list[str]:
    """List the recorded origin of the tokens."""
    lines = []
    if info.token_ids:
        lines.append(f"  made from {info.token_ids.count:,} token ids, sha256 {info.token_ids.sha256}")
    if info.model:
        lines.append(f"  computed by the model with the fingerprint {info.model}")
    lines += [f"  {line}" for line in list_losses(info.loss)]
    return lines + [f"  {line}" for line in describe_evicted_layers(info)]
