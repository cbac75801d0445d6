"""What packed files are and hold, whether or not everything is known that they do not say themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.completeness import completeness_document, report_missing
from ...errors import SourceError
from ...packed.cache_info import CacheInfo
from ...packed.fitting import Fit, describe, fits
from ...packed.summary import cache_document, cache_summary, kept_tokens, live_share
from ...text import count
from ..options import PackedOptions
from . import prefix
from .describing import Described, describe_files, model_geometry
from .finding import find_packed
from .layer_kinds import sort_layers
from .packed_files import PackedFiles, PackedLayer

_STATES = {"linear": "state of linear attention", "recurrent": "recurrent state", "unknown": "state of an unknown kind"}
_KINDS = {"prefix": "MNN prefix cache", "live": "live files of an MNN cache"}
"""Runs of positions of a layer that are shown."""


@dataclass(frozen=True)
class DescribedCache:
    """Packed files of which everything is known.

    Parameters
    ----------
    described
        The files, what they hold, and what of that was inferred.
    """

    described: Described

    @property
    def files(self) -> PackedFiles:
        """What was found."""
        return self.described.files

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        files, info = self.described.files, self.described.info
        layers = []
        for found, layer in zip(files.layers, info.layers, strict=True):
            live, total = sum(info.live_bytes_of(layer)), found.key_bytes + found.value_bytes
            layers.append(
                {
                    "layer": layer.layer,
                    "key_file": found.key,
                    "value_file": found.value,
                    "key_bytes": found.key_bytes,
                    "value_bytes": found.value_bytes,
                    "live_bytes": live,
                    "padded_bytes": total - live,
                }
            )
        return {
            **_document(files),
            "notes": list(self.described.notes),
            "cache": cache_document(info),
            "padded_bytes": info.file_bytes - info.state_bytes - info.live_bytes,
            **completeness_document(self.described.completeness),
            "layers": layers,
            **({"states": [vars(state) for state in files.states]} if files.states else {}),
        }

    def __str__(self) -> str:
        files, info = self.described.files, self.described.info
        lines = [*_heading(files), f"  {cache_summary(info)}"]
        lines += [f"  note: {note}" for note in (*self.described.notes, *info.layout.unrecoverable)]
        lines.append(f"  {live_share(info)}")
        lines += _origin(info)
        for found, layer in zip(files.layers, info.layers, strict=True):
            live = info.live_bytes_of(layer)
            lines.append(
                f"  layer {layer.layer}: {layer.tokens:,} of {layer.capacity:,} tokens, "
                f"{_file(found.key, found.key_bytes, live[0])}, {_file(found.value, found.value_bytes, live[1])}"
            )
        lines += [f"  layer {state.layer}: {_STATES[state.kind]}, {_both(state)}" for state in files.states]
        lines += [f"  {line}" for line in report_missing(self.described.completeness)]
        return "\n".join(lines)


@dataclass(frozen=True)
class UndescribedCache:
    """Packed files of which something is not known that they do not say themselves.

    Parameters
    ----------
    files
        What was found.
    reason
        What is not known.
    possible
        The layouts that the sizes of the files leave, where the heads are known.
    choices
        Options that would say what is not known, the likeliest first.
    """

    files: PackedFiles
    reason: str
    possible: Sequence[Fit]
    choices: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            **_document(self.files),
            "cache": None,
            "not_known": self.reason,
            "possible": [
                {
                    "backends": fit.backends.split("/"),
                    "layout": describe(fit.layout),
                    "capacities": list(fit.capacities),
                }
                for fit in self.possible
            ],
            "choices": list(self.choices),
            "layers": [vars(found) for found in self.files.layers],
        }

    def __str__(self) -> str:
        lines = [*_heading(self.files), f"  not known: {self.reason}"]
        lines += [
            f"  may be: {fit.backends}: {describe(fit.layout)}, capacity {max(fit.capacities):,}"
            for fit in self.possible
        ]
        lines += [f"  as likely as any: {choice}" for choice in self.choices]
        lines += [f"  layer {found.layer}: {_both(found)}" for found in self.files.layers]
        return "\n".join(lines)


@dataclass(frozen=True)
class PackedInspection:
    """What the packed files at a path are: one cache, or the prefix caches of a directory.

    Parameters
    ----------
    path
        What was inspected.
    caches
        In the order of their names.
    """

    path: str
    caches: tuple[DescribedCache | UndescribedCache, ...]

    @property
    def is_loadable(self) -> bool:
        """Whether the engine would load all of them; live files are not loaded."""
        return not any(cache.files.refusals for cache in self.caches)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values: of the one cache, or of all prefixes."""
        if len(self.caches) == 1:
            return self.caches[0].to_dict()
        return {"input": self.path, "kind": "prefix caches", "prefixes": [each.to_dict() for each in self.caches]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.caches))


def inspect_packed(path: str, options: PackedOptions | None = None) -> PackedInspection | None:
    """Account for the packed files at `path`, every prefix of them; None if there are none.

    Parameters
    ----------
    options
        What is known of the files; with a name, that prefix alone.

    Raises
    ------
    SourceError
        When files of a cache are missing.
    """
    options = options or PackedOptions()
    names = prefix.names_in(os.listdir(path)) if os.path.isdir(path) and options.name is None else []
    each = [replace(options, name=name) for name in names] if len(names) > 1 else [options]
    caches = tuple(found for found in (_inspected(path, one) for one in each) if found)
    return PackedInspection(path, caches) if caches else None


def _inspected(path: str, options: PackedOptions) -> DescribedCache | UndescribedCache | None:
    files = find_packed(path, options)
    if files is None:
        return None
    try:
        return DescribedCache(describe_files(files, replace(options, ignore_markers=True)))
    except SourceError as exc:
        reason = str(exc).removeprefix(f"{files.path}: ")
        choices = getattr(exc, "choices", ())
    with suppress(SourceError):
        files = sort_layers(files, options, None)
    try:
        possible = fits(model_geometry(options), files.sizes)
    except SourceError:
        possible = []
    return UndescribedCache(files, reason, possible, choices)


def _heading(files: PackedFiles) -> list[str]:
    name = f" {files.name!r}" if files.name else ""
    heading = (
        f"{files.path}: {_KINDS[files.kind]}{name}, {count(len(files.all_layers), 'layer')}, {files.nbytes:,} bytes"
    )
    if files.kind == "prefix" and not files.problems:
        heading += ", all markers there"
    return [heading, *(f"  would not load: {problem}" for problem in files.refusals)]


def _document(files: PackedFiles) -> dict[str, Any]:
    return {
        "input": files.path,
        "kind": f"{files.kind} cache",
        "name": files.name,
        "file_bytes": files.nbytes,
        "problems": files.refusals,
    }


def _both(layer: PackedLayer) -> str:
    return (
        f"{os.path.basename(layer.key)} {layer.key_bytes:,} bytes, "
        f"{os.path.basename(layer.value)} {layer.value_bytes:,} bytes"
    )


def _file(path: str, size: int, live: int) -> str:
    return f"{os.path.basename(path)} {size:,} bytes ({live:,} live, {size - live:,} not)"


def _origin(info: CacheInfo) -> list[str]:
    """Where the tokens come from, as far as that was noted down."""
    lines = []
    if info.token_ids:
        lines.append(f"  made from {info.token_ids.count:,} token ids, sha256 {info.token_ids.sha256}")
    if info.model:
        lines.append(f"  computed by the model with the fingerprint {info.model}")
    return lines + [f"  {line}" for line in kept_tokens(info)]
