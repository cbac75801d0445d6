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
from ...dense import RopeConfig, search_rope
from ...dense.frequencies import RopeFrequencies
from ...dense.trial import is_clearly_better, list_similar_ropes, rate_rotations
from ...dtypes import Elements, Positions
from ...errors import OptionError, SourceError
from ...files.json_document import read_object
from ...text import pluralize
from ..layer_rope import LayerRopes, read_config_layer_ropes
from ..llama.gguf import is_gguf
from ..llama.gguf_rope import read_gguf_layer_ropes
from .graph_rope import read_graph_rope
from .model import SETTINGS_FILES, find_graph

_MAX_CHECKED_LAYERS: Final = 4
"""Layers whose K is compared with what a model has: wrong parameters show in any."""
_OWN_POSITION_MASKS: Final = ("glm", "glm2")
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
        return " and ".join(f"{text} in {pluralize(num_layers, 'layer')}" for text, num_layers in texts.items())


def resolve_rope(
    key_arrays: Sequence[LayerArray],
    positions: Sequence[Positions],
    num_tokens: int,
    rope: RopeConfig | str | None = None,
    model: str | None = None,
    *,
    is_reordered: bool = False,
) -> ModelRope:
    """Determine how K is rotated.

    Parameters
    ----------
    key_arrays
        K of each layer.
    positions
        Those that K of each layer is rotated to, int64 ``[token]``.
    num_tokens
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
    if isinstance(rope, RopeConfig):
        if rope.dims > key_arrays[0].geometry[2]:
            raise OptionError(f"rope has {rope.dims} dims, the cache has heads of {key_arrays[0].geometry[2]}")
        caller_rope = ModelRope((RopeFrequencies.from_config(rope),) * len(key_arrays), "as given")
        return replace(caller_rope, notes=tuple(_list_contradictions(caller_rope, key_arrays, positions)))
    path = rope or model
    if path is not None:
        model_rope = read_model_rope(
            path, len(key_arrays), key_arrays[0].geometry[2], num_tokens, is_reordered=is_reordered
        )
        if model_rope is not None:
            if doubts := _list_contradictions(model_rope, key_arrays, positions):
                raise SourceError(f"{path}: {doubts[0]}: if it is right after all, give the rotation itself")
            return model_rope
        if rope is not None:
            raise SourceError(f"{path}: does not contain how K is rotated")
    return _search_layer_ropes(key_arrays, positions)


def read_model_rope(
    path: str, num_layers: int, head_dim: int, num_tokens: int, *, is_reordered: bool = False
) -> ModelRope | None:
    """Read how a model rotates K; None where it does not contain that. Parameters and errors as `resolve_rope`."""
    if is_gguf(path):
        ropes = read_gguf_layer_ropes(path, num_layers, head_dim, num_tokens)
        if ropes is not None and is_reordered:
            if any(rope is not None and rope.dims != head_dim for rope in ropes):
                raise SourceError(f"{path}: rotates a part of each head, and K was brought into another order whole")
            ropes = tuple(None if rope is None else replace(rope, pairing="half") for rope in ropes)
        return None if ropes is None else ModelRope(ropes, f"as {path} has it")
    if os.path.isdir(path):
        fields: dict[str, object] = {}
        for name in SETTINGS_FILES:
            if Path(path, name).is_file():
                fields = read_object(Path(path, name), allow_nan=True) | fields
        graph = find_graph(path, fields)
        if graph is not None and fields.get("attention_mask") in _OWN_POSITION_MASKS:
            raise SourceError(f"{path}: MNN gives tokens of this kind of model positions of their own")
        ropes = None if graph is None else read_graph_rope(graph)
        if ropes is not None:
            if len(ropes) != num_layers:
                raise SourceError(f"{graph}: has {pluralize(len(ropes), 'layer')}, the cache has {num_layers}")
            if any(rope is not None and rope.dims > head_dim for rope in ropes):
                raise SourceError(f"{graph}: rotates more elements than heads of {head_dim} have")
            notes = [f"{path}: right for tokens of text only (mrope)"] if fields.get("is_mrope") is True else []
            return ModelRope(ropes, f"as {graph} has it", tuple(notes))
        if not fields:
            return None
    ropes, doubts = read_config_layer_ropes(path, num_layers, head_dim, num_tokens)
    return None if ropes is None else ModelRope(ropes, f"as {path} has it", tuple(doubts))


def _list_contradictions(
    model_rope: ModelRope, key_arrays: Sequence[LayerArray], positions: Sequence[Positions]
) -> list[str]:
    """Sentences about layers whose K looks rotated in another way."""
    layer_step = max(1, len(key_arrays) // _MAX_CHECKED_LAYERS)
    sentences = []
    for key, key_positions, rope in list(zip(key_arrays, positions, model_rope.layers, strict=True))[::layer_step]:
        elements = _read_head_major_elements(key)
        alternatives = _list_other_pairings(rope)
        trial_rope = search_rope(elements, key_positions, dtype=key.array.dtype)
        if trial_rope is not None:
            alternatives.append(RopeFrequencies.from_config(trial_rope))
        ratings = rate_rotations(elements, [rope, *alternatives], key_positions, dtype=key.array.dtype)
        for alternative, rating in zip(alternatives, ratings[1:], strict=False):
            if is_clearly_better(rating, ratings[0]) and not (rope is not None and alternative.is_equivalent(rope)):
                rope_text = "no rotation" if rope is None else rope.label
                sentences.append(f"K of layer {key.layer} looks rotated by {alternative.label}, not by {rope_text}")
                break
    return sentences


def _list_other_pairings(rope: RopeFrequencies | None) -> list[RopeFrequencies]:
    """The same frequencies with the other pairs."""
    if rope is None:
        return []
    pairing = "half" if rope.pairing == "interleaved" else "interleaved"
    return [replace(rope, pairing=pairing, label=f"{rope.label} in {pairing} pairs")]


def _search_layer_ropes(key_arrays: Sequence[LayerArray], positions: Sequence[Positions]) -> ModelRope:
    """Find the rotation of each layer; of layers that do not show it clearly that of others which fits them best."""
    found_ropes = [
        search_rope(_read_head_major_elements(key), key_positions, dtype=key.array.dtype)
        for key, key_positions in zip(key_arrays, positions, strict=True)
    ]
    clear_ropes = {str(rotary): rotary for rotary in found_ropes if rotary is not None}
    layer_ropes = []
    for key, key_positions, rotary in zip(key_arrays, positions, found_ropes, strict=True):
        best = rotary or _select_best_rope(key, key_positions, list(clear_ropes.values()))
        if best is None:
            raise SourceError(
                f"nothing tells how K is rotated, and K of layer {key.layer} ({pluralize(key.geometry[1], 'token')}) "
                f"does "
                "not show it: --rope theta=NUMBER,dims=NUMBER gives it, or --model MODEL has it"
            )
        layer_ropes.append(RopeFrequencies.from_config(best))
    num_clear = sum(rotary is not None for rotary in found_ropes)
    return ModelRope(
        tuple(layer_ropes), f"found by trial, clearly in {num_clear} of {pluralize(len(key_arrays), 'layer')}"
    )


def _select_best_rope(key: LayerArray, positions: Positions, clear_ropes: Sequence[RopeConfig]) -> RopeConfig | None:
    """The one of `clear_ropes` that fits a layer best, unless another theta, or no rotation at all, fits it better."""
    if not clear_ropes:
        return None
    similar_ropes = [similar_rope for rotary in clear_ropes for similar_rope in list_similar_ropes(rotary)]
    ropes = [*map(RopeFrequencies.from_config, [*clear_ropes, *similar_ropes]), None]
    ratings = rate_rotations(_read_head_major_elements(key), ropes, positions, dtype=key.array.dtype)
    if not ratings:
        return None
    best_index = int(np.argmax(ratings))
    return clear_ropes[best_index] if best_index < len(clear_ropes) else None


def _read_head_major_elements(key: LayerArray) -> Elements:
    elements = key.array.to_numpy().view(dtypes.parse_dtype(key.array.dtype).numpy_dtype)
    return np.ascontiguousarray(elements.transpose(1, 0, 2)) if key.token_major else elements
