"""K and V of a start in files, one for each array, in the dtype of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays.casting import CastStats, merge_cast_stats
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray
from ..arrays.undoing import TRANSFORMS, Transform, invert_transforms
from ..dtypes import Elements, Part
from ..errors import SourceError
from ..files.output import wrap_os_errors
from .graph.interface import DecoderInterface
from .start_positions import StoredTokensInfo

REVERSED_K_ORDER = "k-order-reversed"
"""Of a model whose graph turns neighbours together, as one that is made of a GGUF file may: K of other engines is put
into that order, the inverse of ``"k-order"``."""

_ABOUT_FILE = "start.json"
_FILE_PARTS = (*dtypes.PARTS, "positions")


def load_layers(directory: Path) -> list[LayerCache]:
    """K and V of every layer, mapped, from the files of `write_layers`."""
    header = json.loads((directory / _ABOUT_FILE).read_text())
    caches = []
    for layer in range(header["layers"]):
        keys, values, positions = (np.load(directory / f"{layer}.{part}.npy", mmap_mode="r") for part in _FILE_PARTS)
        caches.append(
            LayerCache(layer=layer, keys=keys, values=values, positions=positions, tokens_seen=header["tokens_seen"])
        )
    return caches


def write_layers(
    location: str,
    directory: Path,
    arrays: Sequence[LayerArray],
    stored_tokens: StoredTokensInfo,
    num_seen: int,
    model: DecoderInterface,
    transforms: Sequence[Transform],
) -> tuple[list[CastStats], Any]:
    """One array after the other, in the model's dtype and ascending positions; what the casts changed, and a hash."""
    target = dtypes.infer_dtype(np.empty(0, model.dtype)).name
    casts, digest = [], sha256()
    with wrap_os_errors(directory):
        for entry in arrays:
            positions = stored_tokens.positions[entry.layer]
            order = np.argsort(positions, axis=-1, kind="stable")
            cast = CastStats(entry.array.dtype, target)
            elements = invert_transforms(_cast_array(location, entry, cast), entry.part, transforms)
            if not (np.diff(order) == 1).all():
                elements = np.ascontiguousarray(
                    np.take_along_axis(elements, order[:, :, None], axis=1) if order.ndim == 2 else elements[:, order]
                )
            np.save(directory / f"{entry.layer}.{entry.part}.npy", elements)
            digest.update(elements.data.cast("B"))
            casts.append(cast)
            if entry.part == "key":
                sorted_positions = np.take_along_axis(positions, order, axis=-1)
                np.save(directory / f"{entry.layer}.positions.npy", sorted_positions)
                digest.update(np.ascontiguousarray(sorted_positions).data.cast("B"))
        (directory / _ABOUT_FILE).write_text(json.dumps({"layers": model.layers, "tokens_seen": num_seen}))
    return casts, digest


def invert_named_transforms(elements: Elements, part: Part, names: Sequence[str]) -> Elements:
    """Return K or V ``[..., head_dim]`` after these were undone: names of `TRANSFORMS`, or `REVERSED_K_ORDER`."""
    elements = invert_transforms(elements, part, [name for name in TRANSFORMS if name in names])
    if REVERSED_K_ORDER in names and part == "key":
        halves = elements.reshape(*elements.shape[:-1], 2, elements.shape[-1] // 2)
        elements = np.ascontiguousarray(halves.swapaxes(-1, -2)).reshape(elements.shape)
    return elements


def rewrite_layers(source: Path, target: Path, names: Sequence[str]) -> Any:
    """Write the files of one directory into another with K and V turned; return a hash as `write_layers` does."""
    digest = sha256()
    with wrap_os_errors(target):
        for cache in load_layers(source):
            for part, elements in (("key", cache.keys), ("value", cache.values)):
                elements = np.ascontiguousarray(
                    invert_named_transforms(elements, "key" if part == "key" else "value", names)
                )
                np.save(target / f"{cache.layer}.{part}.npy", elements)
                digest.update(elements.data.cast("B"))
                if part == "key":
                    np.save(target / f"{cache.layer}.positions.npy", cache.positions)
                    digest.update(np.ascontiguousarray(cache.positions).data.cast("B"))
        (target / _ABOUT_FILE).write_text((source / _ABOUT_FILE).read_text())
    return digest


def _cast_array(location: str, entry: LayerArray, cast: CastStats) -> Elements:
    """One array as ``[kv_head, token, head_dim]`` in the model's dtype, every number finite."""
    source_array = entry.array.to_numpy().view(dtypes.parse_dtype(entry.array.dtype).numpy_dtype)
    source_array = np.ascontiguousarray(source_array.transpose(1, 0, 2) if entry.token_major else source_array)
    elements = (
        cast.cast(source_array.view(np.uint8).reshape(-1))
        .view(dtypes.parse_dtype(cast.target).numpy_dtype)
        .reshape(source_array.shape)
    )
    num_nonfinite = elements.size - int(np.count_nonzero(np.isfinite(elements)))
    if num_nonfinite:
        target_note = ""
        if cast.target == "fp16" and cast.source != "fp16":
            target_note = f" as {cast.target} (the model's)"
        raise SourceError(
            f"{location}: layer {entry.layer}: {num_nonfinite:,} of the {elements.size:,} numbers of its {entry.part}s "
            f"are not "
            f"finite{target_note}"
        )
    return elements


def merge_casts_by_source(casts: Sequence[CastStats]) -> list[CastStats]:
    """One for each dtype that was found: K and V may have different ones."""
    return [
        merge_cast_stats([cast for cast in casts if cast.source == name])
        for name in sorted({cast.source for cast in casts})
    ]
