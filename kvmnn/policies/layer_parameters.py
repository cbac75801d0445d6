"""What policies need of a layer besides its cache: how its keys and queries are rotated, and its output weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Floats, Positions


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary position embedding: dimension ``i`` is rotated with dimension ``i + len(frequencies)``.

    Parameters
    ----------
    frequencies
        Radians for each position, float32 ``[pair]``; dimensions beyond twice as many are not rotated.
    scale
        Factor of the rotated dimensions.
    """

    frequencies: Floats
    scale: float = 1.0

    def undo(self, vectors: Floats, positions: Positions) -> Floats:
        """Return ``[..., token, head_dim]`` vectors as they were before rotation by `positions` ``[..., token]``."""
        angles = positions[..., np.newaxis].astype(np.float32) * self.frequencies
        cosines, sines = np.cos(angles) / np.float32(self.scale), np.sin(angles) / np.float32(self.scale)
        pairs = len(self.frequencies)
        first, second, unrotated = np.split(vectors, [pairs, 2 * pairs], axis=-1)
        return np.concatenate([first * cosines + second * sines, second * cosines - first * sines, unrotated], axis=-1)

    def build_mean_matrix(self, begin: int, count: int, head_dim: int) -> Floats:
        """Return the mean of the rotations by `count` positions from `begin` on, ``[head_dim, head_dim]``."""
        angles = np.arange(begin, begin + count, dtype=np.float32)[:, np.newaxis] * self.frequencies
        cosines, sines = (part.mean(axis=0) * np.float32(self.scale) for part in (np.cos(angles), np.sin(angles)))
        pairs = np.arange(len(self.frequencies))
        matrix: Floats = np.eye(head_dim, dtype=np.float32)
        matrix[pairs, pairs] = matrix[pairs + len(pairs), pairs + len(pairs)] = cosines
        matrix[pairs, pairs + len(pairs)], matrix[pairs + len(pairs), pairs] = -sines, sines
        return matrix


@dataclass(frozen=True, eq=False)
class LayerParameters:
    """A layer of a model, as far as policies need it."""

    #: Layers of the model.
    num_layers: int
    #: None for a model that does not rotate.
    rotation: Rotation | None = None
    #: Returns the weights that multiply the output of each head, float32 ``[query_head, head_dim, hidden]``; None where
    #: the graph does not show them.
    read_output_weights: Callable[[], Floats] | None = None
