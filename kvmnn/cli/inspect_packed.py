"""What ``kvmnn inspect`` says of packed files, whether or not everything is known that they do not say themselves."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..formats.mnn import prefix
from ..text import count
from . import packed_options, printing

if TYPE_CHECKING:
    from ..formats.mnn.describing import Described
    from ..formats.mnn.packed_files import PackedFiles
    from ..formats.options import PackedOptions
    from ..packed.cache_info import CacheInfo

_WHAT = {"prefix": "MNN prefix cache", "live": "live files of an MNN cache"}


def account(path: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], str] | None:
    """The files as a JSON document and as text, every prefix of them; None if there are no packed files at `path`."""
    from ..formats.options import PackedOptions

    options = packed_options.options(arguments) or PackedOptions()
    names = prefix.names_in(os.listdir(path)) if os.path.isdir(path) and options.name is None else []
    if len(names) < 2:
        return _account(path, options)
    found = [_account(path, replace(options, name=name)) for name in names]
    documents, texts = zip(*(each for each in found if each), strict=True)
    return {"input": path, "kind": "prefix caches", "prefixes": list(documents)}, "\n".join(texts)


def _account(path: str, options: PackedOptions) -> tuple[dict[str, Any], str] | None:
    from ..errors import SourceError
    from ..formats.mnn.describing import describe_files
    from ..formats.opening import find_packed

    files = find_packed(path, options)
    if files is None:
        return None
    try:
        described = describe_files(files, replace(options, ignore_markers=True))
    except SourceError as exc:
        return _undescribed(files, options, exc)
    return _described(described)


def _described(described: Described) -> tuple[dict[str, Any], str]:
    files, info = described.files, described.info
    lines = [*_heading(files), f"  {printing.summary(info)}"]
    lines += [f"  note: {note}" for note in (*described.notes, *info.layout.unrecoverable)]
    lines.append(f"  {printing.share(info.live_bytes, info.file_bytes)}")
    lines += _about(info)
    layers = []
    for found, layer in zip(files.layers, info.layers, strict=True):
        parts = list(
            zip((found.key, found.value), (found.key_bytes, found.value_bytes), info.live_bytes_of(layer), strict=True)
        )
        lines.append(
            f"  layer {layer.layer}: {layer.tokens:,} of {layer.capacity:,} tokens, "
            + ", ".join(
                f"{os.path.basename(file)} {size:,} bytes ({live:,} live, {size - live:,} not)"
                for file, size, live in parts
            )
        )
        layers.append(
            {
                "layer": layer.layer,
                "key_file": found.key,
                "value_file": found.value,
                "key_bytes": found.key_bytes,
                "value_bytes": found.value_bytes,
                "live_bytes": sum(live for _, _, live in parts),
                "padded_bytes": sum(size - live for _, size, live in parts),
            }
        )
    document = {**_document(files), "notes": list(described.notes), "cache": printing.cache_document(info)}
    return {**document, "padded_bytes": info.file_bytes - info.live_bytes, "layers": layers}, "\n".join(lines)


def _undescribed(files: PackedFiles, options: PackedOptions, why: Exception) -> tuple[dict[str, Any], str]:
    """Sizes, why no more can be said, and which layouts the sizes leave where the heads are known."""
    from ..errors import SourceError
    from ..formats.mnn.describing import model_geometry
    from ..packed.fitting import describe, fits

    reason = str(why).removeprefix(f"{files.path}: ")
    try:
        possible = fits(model_geometry(options, None, files.path), files.sizes)
    except SourceError:
        possible = []
    lines = [*_heading(files), f"  not known: {reason}"]
    lines += [f"  may be: {fit.backends}: {describe(fit.layout)}, capacity {max(fit.capacities):,}" for fit in possible]
    lines += [
        f"  layer {found.layer}: {os.path.basename(found.key)} {found.key_bytes:,} bytes, "
        f"{os.path.basename(found.value)} {found.value_bytes:,} bytes"
        for found in files.layers
    ]
    document = {
        **_document(files),
        "cache": None,
        "not_known": reason,
        "possible": [
            {"backends": fit.backends.split("/"), "layout": describe(fit.layout), "capacities": list(fit.capacities)}
            for fit in possible
        ],
        "layers": [vars(found) for found in files.layers],
    }
    return document, "\n".join(lines)


def _heading(files: PackedFiles) -> list[str]:
    name = f" {files.name!r}" if files.name else ""
    whole = sum(key + value for key, value in files.sizes)
    heading = f"{files.path}: {_WHAT[files.kind]}{name}, {count(len(files.layers), 'layer')}, {whole:,} bytes" + (
        ", all markers there" if files.kind == "prefix" and not files.problems else ""
    )
    return [heading, *(f"  would not load: {problem}" for problem in files.problems)]


def _document(files: PackedFiles) -> dict[str, Any]:
    return {
        "input": files.path,
        "kind": f"{files.kind} cache",
        "name": files.name,
        "file_bytes": sum(key + value for key, value in files.sizes),
        "problems": list(files.problems),
    }


def _about(info: CacheInfo) -> list[str]:
    """Where the tokens come from, as far as that was noted down."""
    lines = []
    if info.token_ids:
        lines.append(f"  made from {info.token_ids.count:,} token ids, sha256 {info.token_ids.sha256}")
    if info.model:
        lines.append(f"  computed by the model with the fingerprint {info.model}")
    for layer in info.layers:
        if layer.positions != ((0, layer.tokens),):
            kept = ", ".join(f"{begin}:{size}" for begin, size in layer.positions[:12])
            lines.append(f"  layer {layer.layer} holds the tokens {kept}{' ...' if len(layer.positions) > 12 else ''}")
    return lines
