"""K and V of a start in files, one for each array, in the dtype of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays.casting import Cast, sum_of
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray
from ..arrays.undoing import UNDOABLE, Undo, undone
from ..dtypes import Part, Words
from ..errors import SourceError
from ..files.output import failures
from .graph.interface import DecoderInterface
from .start_positions import Held

REVERSED = "k-order-reversed"
"""Of a model whose graph turns neighbours together, as one that is made of a GGUF file may: K of other engines is put
into that order, the inverse of ``"k-order"``."""

_ABOUT = "start.json"
_PARTS = (*dtypes.PARTS, "positions")


def layers_in(directory: Path) -> list[LayerCache]:
    """K and V of every layer, mapped, from the files of `write`."""
    about = json.loads((directory / _ABOUT).read_text())
    found = []
    for layer in range(about["layers"]):
        keys, values, positions = (np.load(directory / f"{layer}.{part}.npy", mmap_mode="r") for part in _PARTS)
        found.append(
            LayerCache(layer=layer, keys=keys, values=values, positions=positions, tokens_seen=about["tokens_seen"])
        )
    return found


def write(
    where: str,
    directory: Path,
    arrays: Sequence[LayerArray],
    held: Held,
    seen: int,
    model: DecoderInterface,
    undo: Sequence[Undo],
) -> tuple[list[Cast], Any]:
    """One array after the other, in the model's dtype and ascending positions; what the casts changed, and a hash."""
    target = dtypes.of_array(np.empty(0, model.dtype)).name
    casts, digest = [], sha256()
    with failures(directory):
        for entry in arrays:
            places = held.positions[entry.layer]
            order = np.argsort(places, axis=-1, kind="stable")
            cast = Cast(entry.array.dtype, target)
            words = undone(_cast(where, entry, cast), entry.part, undo)
            if not (np.diff(order) == 1).all():
                words = np.ascontiguousarray(
                    np.take_along_axis(words, order[:, :, None], axis=1) if order.ndim == 2 else words[:, order]
                )
            np.save(directory / f"{entry.layer}.{entry.part}.npy", words)
            digest.update(words.data.cast("B"))
            casts.append(cast)
            if entry.part == "key":
                ascending = np.take_along_axis(places, order, axis=-1)
                np.save(directory / f"{entry.layer}.positions.npy", ascending)
                digest.update(np.ascontiguousarray(ascending).data.cast("B"))
        (directory / _ABOUT).write_text(json.dumps({"layers": model.layers, "tokens_seen": seen}))
    return casts, digest


def turned(words: Words, part: Part, names: Sequence[str]) -> Words:
    """Return K or V ``[..., head_dim]`` after these were undone: names of `UNDOABLE`, or `REVERSED`."""
    words = undone(words, part, [name for name in UNDOABLE if name in names])
    if REVERSED in names and part == "key":
        halves = words.reshape(*words.shape[:-1], 2, words.shape[-1] // 2)
        words = np.ascontiguousarray(halves.swapaxes(-1, -2)).reshape(words.shape)
    return words


def rewrite(source: Path, target: Path, names: Sequence[str]) -> Any:
    """Write the files of one directory into another with K and V turned; return a hash as `write` does."""
    digest = sha256()
    with failures(target):
        for cache in layers_in(source):
            for part, words in (("key", cache.keys), ("value", cache.values)):
                words = np.ascontiguousarray(turned(words, "key" if part == "key" else "value", names))
                np.save(target / f"{cache.layer}.{part}.npy", words)
                digest.update(words.data.cast("B"))
                if part == "key":
                    np.save(target / f"{cache.layer}.positions.npy", cache.positions)
                    digest.update(np.ascontiguousarray(cache.positions).data.cast("B"))
        (target / _ABOUT).write_text((source / _ABOUT).read_text())
    return digest


def _cast(where: str, entry: LayerArray, cast: Cast) -> Words:
    """One array as ``[kv_head, token, head_dim]`` in the model's dtype, every number finite."""
    found = entry.array.to_numpy().view(dtypes.by_name(entry.array.dtype).numpy)
    found = np.ascontiguousarray(found.transpose(1, 0, 2) if entry.token_major else found)
    words = cast.run(found.view(np.uint8).reshape(-1)).view(dtypes.by_name(cast.target).numpy).reshape(found.shape)
    wrong = words.size - int(np.count_nonzero(np.isfinite(words)))
    if wrong:
        beyond = ""
        if cast.target == "fp16" and cast.source != "fp16":
            beyond = f" as {cast.target} (the model's)"
        raise SourceError(
            f"{where}: layer {entry.layer}: {wrong:,} of the {words.size:,} numbers of its {entry.part}s are not "
            f"finite{beyond}"
        )
    return words


def by_source(casts: Sequence[Cast]) -> list[Cast]:
    """One for each dtype that was found: K and V may have different ones."""
    return [sum_of([cast for cast in casts if cast.source == name]) for name in sorted({cast.source for cast in casts})]
