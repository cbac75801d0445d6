"""True positions that lie beside a directory of plain arrays: the ``positions.json`` of ``kvmnn dump-kv``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...arrays.source import Source
from ...errors import SourceError
from ...files.json_document import Node, parse, read_bounded
from ...packed.cache_info import Ranges
from ..npy_folder import POSITIONS

_MAX_TOKENS = 2**31 - 1


def noted_positions(source: Source, tokens: Sequence[int]) -> tuple[Ranges, ...] | None:
    """The true positions of every layer's tokens, where the only input is a directory that says them.

    Parameters
    ----------
    tokens
        Of each layer.

    Returns
    -------
    Runs for each layer; None where nothing is said, or heads hold different tokens, which runs for a layer cannot say.

    Raises
    ------
    ManifestError, SourceError
        For a document that is none, or is not of these layers.
    """
    if len(source.inputs) != 1:
        return None
    path = Path(source.inputs[0], POSITIONS)
    try:
        text = read_bounded(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    layers = parse(text, str(path)).at("layers").items()
    if len(layers) != len(tokens):
        raise SourceError(f"{path}: has positions of {len(layers)} layers: the arrays are of {len(tokens)}")
    found = [_runs(layer.at("positions"), count) for layer, count in zip(layers, tokens, strict=True)]
    return None if None in found else tuple(runs for runs in found if runs is not None)


def _runs(said: Node, tokens: int) -> Ranges | None:
    values = said.value
    if isinstance(values, list) and values and all(isinstance(value, list) for value in values):
        return None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MAX_TOKENS for value in values):
        raise said.wrong("a list of positions")
    places = np.array(values, np.int64)
    if len(places) != tokens or (np.diff(places) <= 0).any():
        raise said.wrong(f"{tokens} ascending positions, one for each token of the arrays")
    begins = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    sizes = np.diff(begins, append=len(places))
    return tuple((int(places[begin]), int(size)) for begin, size in zip(begins, sizes, strict=True))
