"""How K of a cache is rotated, as it has to be known to rotate it further: from the caller, the model, or by trial."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ... import dtypes
from ...arrays.layers import LayerArray
from ...dense import Rotary, find_rotary
from ...dense.frequencies import RopeFrequencies
from ...dense.trial import is_clearly_better, rate_rotations, similar_rotaries
from ...dtypes import Positions, Words
from ...errors import OptionError, SourceError
from ...files.json_document import read_object
from ...text import count
from ..layer_rope import LayerRopes, read_config_rope
from ..llama.gguf import is_gguf
from ..llama.gguf_rope import read_gguf_rope
from .graph_rope import read_graph_rope
from .model import SETTINGS, graph_of

_CHECKED_LAYERS: Final = 4
"""Layers whose K is compared with what a model has: wrong parameters show in any."""
_OWN_POSITIONS: Final = ("glm", "glm2")
"""Values of `attention_mask` for which MNN gives tokens other positions than their number in the text."""


@dataclass(frozen=True)
class ModelRope:
    """How K of each layer is rotated.

    Attributes
    ----------
    layers
        None for a layer that is not rotated.
    origin
        Where this comes from, as the end of a sentence.
    notes
        A line for each doubt.
    """

    layers: LayerRopes
    origin: str
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Each different rotation; with several, also the number of layers that have it."""
        texts = Counter("no rotation" if rope is None else rope.label for rope in self.layers)
        if len(texts) == 1:
            return next(iter(texts))
        return " and ".join(f"{text} in {count(number, 'layer')}" for text, number in texts.items())


def resolve_rope(
    keys: Sequence[LayerArray],
    positions: Sequence[Positions],
    length: int,
    rope: Rotary | str | None = None,
    model: str | None = None,
    *,
    is_reordered: bool = False,
) -> ModelRope:
    """Determine how K is rotated.

    Parameters
    ----------
    keys
        K of each layer.
    positions
        Those that K of each layer is rotated to, int64 ``[token]``.
    length
        Tokens of the text.
    rope
        The rotation of all layers, or a model that has it: a folder, its config.json, or a ``.gguf`` file.
    model
        A model that may have it, where `rope` is None.
    is_reordered
        Whether K of llama.cpp was brought into the order of other engines.

    Raises
    ------
    OptionError
        For more rotated elements than heads have.
    SourceError
        When nothing tells how K is rotated; when a model has it in a way that is not understood, or that K contradicts.
    """
    if isinstance(rope, Rotary):
        if rope.dims > keys[0].geometry[2]:
            raise OptionError(f"rope has {rope.dims} dims, the cache has heads of {keys[0].geometry[2]}")
        given = ModelRope((RopeFrequencies.from_rotary(rope),) * len(keys), "as given")
        return replace(given, notes=tuple(_contradictions(given, keys, positions)))
    path = rope or model
    if path is not None:
        found = read_model_rope(path, len(keys), keys[0].geometry[2], length, is_reordered=is_reordered)
        if found is not None:
            if doubts := _contradictions(found, keys, positions):
                raise SourceError(f"{path}: {doubts[0]}: if it is right after all, give the rotation itself")
            return found
        if rope is not None:
            raise SourceError(f"{path}: does not contain how K is rotated")
    return _find_by_trial(keys, positions)


def read_model_rope(
    path: str, layers: int, head_dim: int, length: int, *, is_reordered: bool = False
) -> ModelRope | None:
    """Read how a model rotates K; None where it does not contain that. Parameters and errors as `resolve_rope`."""
    if is_gguf(path):
        ropes = read_gguf_rope(path, layers, head_dim, length)
        if ropes is not None and is_reordered:
            if any(rope is not None and rope.dims != head_dim for rope in ropes):
                raise SourceError(f"{path}: rotates a part of each head, and K was brought into another order whole")
            ropes = tuple(None if rope is None else replace(rope, pairing="half") for rope in ropes)
        return None if ropes is None else ModelRope(ropes, f"as {path} has it")
    if os.path.isdir(path):
        fields: dict[str, object] = {}
        for name in SETTINGS:
            if Path(path, name).is_file():
                fields = read_object(Path(path, name), constants=True) | fields
        graph = graph_of(path, fields)
        if graph is not None and fields.get("attention_mask") in _OWN_POSITIONS:
            raise SourceError(f"{path}: MNN gives tokens of this kind of model positions of their own")
        ropes = None if graph is None else read_graph_rope(graph)
        if ropes is not None:
            if len(ropes) != layers:
                raise SourceError(f"{graph}: has {count(len(ropes), 'layer')}, the cache has {layers}")
            if any(rope is not None and rope.dims > head_dim for rope in ropes):
                raise SourceError(f"{graph}: rotates more elements than heads of {head_dim} have")
            notes = [f"{path}: right for tokens of text only (mrope)"] if fields.get("is_mrope") is True else []
            return ModelRope(ropes, f"as {graph} has it", tuple(notes))
        if not fields:
            return None
    ropes, doubts = read_config_rope(path, layers, head_dim, length)
    return None if ropes is None else ModelRope(ropes, f"as {path} has it", tuple(doubts))


def _contradictions(found: ModelRope, keys: Sequence[LayerArray], positions: Sequence[Positions]) -> list[str]:
    """Sentences about layers whose K looks rotated in another way."""
    step = max(1, len(keys) // _CHECKED_LAYERS)
    sentences = []
    for key, places, rope in list(zip(keys, positions, found.layers, strict=True))[::step]:
        words = _words(key)
        others = _flipped(rope)
        tried = find_rotary(words, places, dtype=key.array.dtype)
        if tried is not None:
            others.append(RopeFrequencies.from_rotary(tried))
        ratings = rate_rotations(words, [rope, *others], places, dtype=key.array.dtype)
        for other, rating in zip(others, ratings[1:], strict=False):
            if is_clearly_better(rating, ratings[0]) and not (rope is not None and other.is_same(rope)):
                said = "no rotation" if rope is None else rope.label
                sentences.append(f"K of layer {key.layer} looks rotated by {other.label}, not by {said}")
                break
    return sentences


def _flipped(rope: RopeFrequencies | None) -> list[RopeFrequencies]:
    """The same frequencies with the other pairs."""
    if rope is None:
        return []
    pairing = "half" if rope.pairing == "interleaved" else "interleaved"
    return [replace(rope, pairing=pairing, label=f"{rope.label} in {pairing} pairs")]


def _find_by_trial(keys: Sequence[LayerArray], positions: Sequence[Positions]) -> ModelRope:
    """Find the rotation of each layer; of layers that do not show it clearly that of others which fits them best."""
    tried = [find_rotary(_words(key), at, dtype=key.array.dtype) for key, at in zip(keys, positions, strict=True)]
    sure = {str(rotary): rotary for rotary in tried if rotary is not None}
    chosen = []
    for key, places, rotary in zip(keys, positions, tried, strict=True):
        best = rotary or _best_fit(key, places, list(sure.values()))
        if best is None:
            raise SourceError(
                f"nothing tells how K is rotated, and K of layer {key.layer} ({count(key.geometry[1], 'token')}) does "
                "not show it: --rope theta=NUMBER,dims=NUMBER gives it, or --model MODEL has it"
            )
        chosen.append(RopeFrequencies.from_rotary(best))
    clear = sum(rotary is not None for rotary in tried)
    return ModelRope(tuple(chosen), f"found by trial, clearly in {clear} of {count(len(keys), 'layer')}")


def _best_fit(key: LayerArray, positions: Positions, sure: Sequence[Rotary]) -> Rotary | None:
    """The one of `sure` that fits a layer best, unless another theta, or no rotation at all, fits it better."""
    if not sure:
        return None
    others = [each for rotary in sure for each in similar_rotaries(rotary)]
    ropes = [*map(RopeFrequencies.from_rotary, [*sure, *others]), None]
    ratings = rate_rotations(_words(key), ropes, positions, dtype=key.array.dtype)
    if not ratings:
        return None
    place = int(np.argmax(ratings))
    return sure[place] if place < len(sure) else None


def _words(key: LayerArray) -> Words:
    words = key.array.to_numpy().view(dtypes.by_name(key.array.dtype).numpy)
    return np.ascontiguousarray(words.transpose(1, 0, 2)) if key.token_major else words
