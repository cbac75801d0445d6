"""True positions that lie beside a directory of plain arrays, or in frames of one: ``positions.json`` of `dump-kv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays.held_tokens import Held, held_tokens
from ..arrays.layers import sorted_layers
from ..arrays.source import Source
from ..bundle.beside import POSITIONS
from ..dtypes import Positions
from ..errors import SourceError
from ..files.json_document import Node, parse
from .beside import text_beside

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Noted:
    """What the document says.

    Attributes
    ----------
    positions
        Of each layer, ascending: int64 ``[token]``, or ``[kv_head, token]`` where heads hold different tokens.
    tokens_seen
        Tokens of the text; None where it does not say them.
    text_positions
        Of each layer whose K was rotated to `positions` since: true positions of its tokens in the text, of the same
        shape; None where they are `positions`.
    """

    positions: tuple[Positions, ...]
    tokens_seen: int | None
    text_positions: tuple[Positions | None, ...] = ()

    @property
    def is_rerotated(self) -> bool:
        """Whether K of any layer was rotated to other positions than those in the text."""
        return any(places is not None for places in self.text_positions)

    @property
    def in_text(self) -> tuple[Positions, ...]:
        """True positions in the text of every layer's tokens."""
        others = self.text_positions or (None,) * len(self.positions)
        return tuple(rotated if true is None else true for rotated, true in zip(self.positions, others, strict=True))


def noted_positions(source: Source, tokens: Sequence[int], numbers: Sequence[int] | None = None) -> Noted | None:
    """The true positions of every layer's tokens, where the input is a directory that says them or was made of one.

    Parameters
    ----------
    tokens
        Of each layer.
    numbers
        Of the layers, where they may be some of more; None for all that there are.

    Returns
    -------
    None where nothing is said.

    Raises
    ------
    ManifestError, SourceError
        For a document that is none, or is not of these layers.
    """
    found = text_beside(source, POSITIONS)
    if found is None:
        return None
    text, path = found
    document = parse(text, path)
    layers = document.at("layers").items()
    if numbers is not None and len(layers) > len(tokens):
        said = {_number(entry, place): entry for place, entry in enumerate(layers)}
        layers = [said[number] for number in numbers if number in said]
    if len(layers) != len(tokens):
        raise SourceError(f"{path}: has positions of {len(layers)} layers: the arrays are of {len(tokens)}")
    positions = tuple(_places(layer.at("positions"), count) for layer, count in zip(layers, tokens, strict=True))
    seen = document.at("tokens_seen").integer(1) if "tokens_seen" in document.value else None
    in_text = tuple(
        _places(layer.at("text_positions"), count) if "text_positions" in layer.value else None
        for layer, count in zip(layers, tokens, strict=True)
    )
    return Noted(positions, seen, in_text)


def is_of_dump_kv(source: Source) -> bool:
    """Return whether the arrays are those of a folder of ``.npy`` files that `dump-kv` wrote: [kv_head, token, dim].

    Raises
    ------
    ManifestError
        For a document that is none.
    """
    found = text_beside(source, POSITIONS)
    if found is None or any(len(array.shape) != 3 for array in source.arrays):
        return False
    document = parse(*found)
    layers = document.at("layers").items() if isinstance(document.value, dict) and "kvmnn" in document.value else []
    if not layers or document.value.get("format") != "npy":
        return False
    tokens = {layer.value.get("tokens") for layer in layers if isinstance(layer.value, dict)}
    return {array.shape[1] for array in source.arrays} <= tokens


def held_by(source: Source) -> Held:
    """Which tokens of the text each layer holds, wherever the source says it; raises as `noted_positions`."""
    try:
        keys = {entry.layer: entry for entry in sorted_layers(source, keys_alone=True)}
    except SourceError:
        return held_tokens(source)
    noted = noted_positions(source, [entry.geometry[1] for entry in keys.values()], list(keys))
    return held_tokens(source) if noted is None else dict(zip(keys, noted.in_text, strict=True))


def _number(layer: Node, place: int) -> int:
    """Which layer it is of: its place among them, where it does not say."""
    return layer.at("layer").integer(0) if isinstance(layer.value, dict) and "layer" in layer.value else place


def _places(said: Node, tokens: int) -> Positions:
    values = said.value
    by_head = isinstance(values, list) and values and all(isinstance(value, list) for value in values)
    for row in values if by_head else [values]:
        if not isinstance(row, list) or not all(type(value) is int and 0 <= value <= _MAX_TOKENS for value in row):
            raise said.wrong("a list of positions")
        if len(row) != tokens or (np.diff(row) <= 0).any():
            raise said.wrong(f"{tokens} ascending positions, one for each token of the arrays")
    return np.array(values, np.int64)
