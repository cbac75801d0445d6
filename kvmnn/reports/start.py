"""What an evaluation began with, where it went on from K and V that were computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from ..dtypes import Part
from ..files.records import Record

MIN_NON_ROUNDING_DISTANCE = 0.5
"""From this `compute_relative_distance` distance on K or V are not roundings of the model's own.

Of 4-bit blocks it is about 0.1.
"""


@dataclass(frozen=True, kw_only=True)
class LayerDistanceStats(Record):
    """How far K or V of a layer are from those that the model computes of the same tokens.

    Attributes
    ----------
    layer, part
        Which.
    words, equal : int
        Numbers compared, in the model's dtype, and how many have the same bits.
    squares, own_squares : float
        Sums of the squared differences, and of the squares of the model's own.
    undo : tuple of str or None
        Of numbers that are far from the model's own (`MIN_NON_ROUNDING_DISTANCE`): what undone makes them roundings of
        those.
    """

    layer: int
    part: Part
    words: int
    equal: int
    squares: float
    own_squares: float
    undo: tuple[str, ...] | None = field(default=None, metadata={"omit": True})

    @property
    def relative_distance(self) -> float:
        """Root of the mean squared difference over that of the model's own numbers; 1.4 for numbers that have nothing
        to do with each other."""
        return compute_relative_distance([self])


@dataclass(frozen=True, kw_only=True)
class InitialCacheInfo(Record):
    """The start.

    Attributes
    ----------
    name, about : str
        The file's name, and what it holds.
    dtype : str
        Of the words as they were found.
    tokens : tuple of int
        Stored in each layer.
    tokens_seen : int
        Tokens of the text that it stands for.
    sha256 : str
        Of words in the model's dtype, positions and token ids.
    distances : tuple of LayerDistance
        To K and V that the model computed.
    """

    name: str
    about: str
    dtype: str
    tokens: tuple[int, ...]
    tokens_seen: int
    sha256: str
    distances: tuple[LayerDistanceStats, ...] = field(default=())


def compute_relative_distance(distances: Sequence[LayerDistanceStats]) -> float:
    """`LayerDistanceStats.relative_distance` of several together."""
    squares, own_squares = (
        sum(distance.squares for distance in distances),
        sum(distance.own_squares for distance in distances),
    )
    return sqrt(squares / own_squares) if own_squares > 0 else float(squares > 0)
