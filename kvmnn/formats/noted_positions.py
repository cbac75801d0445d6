"""True positions that lie beside a directory of plain arrays, or in frames of one: ``positions.json`` of `dump-kv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays.held_tokens import PositionMap, read_token_positions
from ..arrays.layers import collect_layers
from ..arrays.source import Source
from ..bundle.beside import POSITIONS_NAME
from ..dtypes import Positions
from ..errors import SourceError
from ..files.json_document import JsonReader, parse_document
from .beside import read_sidecar

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PositionsSidecar:
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
        return any(positions is not None for positions in self.text_positions)

    @property
    def positions_in_text(self) -> tuple[Positions, ...]:
        """True positions in the text of every layer's tokens."""
        text_positions = self.text_positions or (None,) * len(self.positions)
        return tuple(
            layer_positions if text_layer_positions is None else text_layer_positions
            for layer_positions, text_layer_positions in zip(self.positions, text_positions, strict=True)
        )


def read_positions_sidecar(
    source: Source, tokens: Sequence[int], layer_numbers: Sequence[int] | None = None
) -> PositionsSidecar | None:
    """The true positions of every layer's tokens, where the input is a directory that says them or was made of one.

    Parameters
    ----------
    tokens
        Of each layer.
    layer_numbers
        Of the layers, where they may be some of more; None for all that there are.

    Returns
    -------
    None where nothing is said.

    Raises
    ------
    ManifestError, SourceError
        For a document that is none, or is not of these layers.
    """
    sidecar = read_sidecar(source, POSITIONS_NAME)
    if sidecar is None:
        return None
    text, path = sidecar
    document = parse_document(text, path)
    layers = document.get("layers").read_list()
    if layer_numbers is not None and len(layers) > len(tokens):
        entry_by_layer = {_parse_layer_number(entry, index): entry for index, entry in enumerate(layers)}
        layers = [entry_by_layer[layer_number] for layer_number in layer_numbers if layer_number in entry_by_layer]
    if len(layers) != len(tokens):
        raise SourceError(f"{path}: has positions of {len(layers)} layers: the arrays are of {len(tokens)}")
    positions = tuple(
        _parse_positions(layer.get("positions"), count) for layer, count in zip(layers, tokens, strict=True)
    )
    tokens_seen = document.get("tokens_seen").read_int(1) if "tokens_seen" in document.value else None
    text_positions = tuple(
        _parse_positions(layer.get("text_positions"), count) if "text_positions" in layer.value else None
        for layer, count in zip(layers, tokens, strict=True)
    )
    return PositionsSidecar(positions, tokens_seen, text_positions)


def is_dump_kv_folder(source: Source) -> bool:
    """Return whether the arrays are those of a folder of ``.npy`` files that `dump-kv` wrote: [kv_head, token, dim].

    Raises
    ------
    ManifestError
        For a document that is none.
    """
    sidecar = read_sidecar(source, POSITIONS_NAME)
    if sidecar is None or any(len(array.shape) != 3 for array in source.arrays):
        return False
    document = parse_document(*sidecar)
    layers = (
        document.get("layers").read_list() if isinstance(document.value, dict) and "kvmnn" in document.value else []
    )
    if not layers or document.value.get("format") != "npy":
        return False
    tokens = {layer.value.get("tokens") for layer in layers if isinstance(layer.value, dict)}
    return {array.shape[1] for array in source.arrays} <= tokens


def read_positions_by_layer(source: Source) -> PositionMap:
    """Which tokens of the text each layer holds, wherever the source says it; raises as `read_positions_sidecar`."""
    try:
        key_arrays = {entry.layer: entry for entry in collect_layers(source, allow_keys_only=True)}
    except SourceError:
        return read_token_positions(source)
    sidecar = read_positions_sidecar(source, [entry.geometry[1] for entry in key_arrays.values()], list(key_arrays))
    return (
        read_token_positions(source)
        if sidecar is None
        else dict(zip(key_arrays, sidecar.positions_in_text, strict=True))
    )


def _parse_layer_number(layer: JsonReader, index: int) -> int:
    """Which layer it is of: its place among them, where it does not say."""
    return layer.get("layer").read_int(0) if isinstance(layer.value, dict) and "layer" in layer.value else index


def _parse_positions(node: JsonReader, tokens: int) -> Positions:
    values = node.value
    is_per_head = isinstance(values, list) and values and all(isinstance(value, list) for value in values)
    for row in values if is_per_head else [values]:
        if not isinstance(row, list) or not all(type(value) is int and 0 <= value <= _MAX_TOKENS for value in row):
            raise node.error("a list of positions")
        if len(row) != tokens or (np.diff(row) <= 0).any():
            raise node.error(f"{tokens} ascending positions, one for each token of the arrays")
    return np.array(values, np.int64)
