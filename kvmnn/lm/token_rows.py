"""What is known of the live tokens of a model's layers, kept in rows that are cut together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _eviction
from ..errors import KvmnnError
from ..policies.ranking import Floats, Indices

_ROOM = 256


class TokenRows:
    """Slots, true positions, scores and key norms of live tokens, of layers that hold equally many.

    A row is one set of live tokens: of all the layers together, of one layer, or of one KV head of a layer.

    Parameters
    ----------
    layers
        Whose tokens these are.
    per_layer
        Rows of each layer: 0 for one row that serves all layers, 1, or the number of KV heads.
    scored, normed
        Whether scores and norms are kept.

    Attributes
    ----------
    live : int
        Tokens in each row.
    width : int
        Slots of K and V in use, those of dead tokens included.
    slots, positions : ndarray
        int64 ``[row, room]``, of which the first `live` columns count: where each live token lies in K and V,
        ascending, and its place in the text.
    scores, norms : ndarray or None
        float32, alike.
    steps : int
        As `kvmnn.policies.CacheState.steps`.
    """

    def __init__(self, layers: tuple[int, ...], per_layer: int, *, scored: bool = False, normed: bool = False) -> None:
        self.layers = layers
        self.per_layer = per_layer
        self.live = self.width = self.steps = 0
        rows = max(1, per_layer * len(layers))
        self.slots: Indices = np.empty((rows, _ROOM), np.int64)
        self.positions: Indices = np.empty((rows, _ROOM), np.int64)
        self.scores: Floats | None = np.empty((rows, _ROOM), np.float32) if scored else None
        self.norms: Floats | None = np.empty((rows, _ROOM), np.float32) if normed else None

    @property
    def dead(self) -> int:
        """Slots in use by tokens that are no longer live."""
        return self.width - self.live

    def rows_of(self, layer: int) -> slice:
        """The rows that belong to a layer."""
        if self.per_layer == 0:
            return slice(0, 1)
        first = self.layers.index(layer) * self.per_layer
        return slice(first, first + self.per_layer)

    def append(self, count: int, seen: int) -> None:
        """`count` more tokens, the text's from position `seen` on, in new slots; with scores of 0 and unknown norms."""
        end = self.live + count
        if end > self.slots.shape[1]:
            self._widen(end)
        new = slice(self.live, end)
        self.slots[:, new] = np.arange(self.width, self.width + count)
        self.positions[:, new] = np.arange(seen, seen + count)
        if self.scores is not None:
            self.scores[:, new] = 0
        if self.norms is not None:
            self.norms[:, new] = np.nan
        self.live, self.width = end, self.width + count

    def cut(self, kept: npt.NDArray[np.int64]) -> None:
        """Keep these of the live tokens: ``[kept]``, of every row the same, or ``[row, kept]``; in any order.

        Raises
        ------
        KvmnnError
            For tokens that are not there or named twice, and for another number of rows.
        """
        kept = np.ascontiguousarray(np.atleast_2d(kept), np.int64)
        if kept.shape[0] not in (1, len(self.slots)):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept for {kept.shape[0]} rows: expected {len(self.slots)}"
            )
        tables = [table for table in (self.slots, self.positions, self.scores, self.norms) if table is not None]
        if not _eviction.cut(kept, self.live, tables) and not _eviction.cut(np.sort(kept, axis=1), self.live, tables):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept must be distinct and among the {self.live} that are stored"
            )
        self.live = kept.shape[1]
        self.steps = 0

    def compacted(self) -> None:
        """Dead slots are gone: live tokens lie side by side from slot 0 on."""
        self.slots[:, : self.live] = np.arange(self.live)
        self.width = self.live

    def split(self) -> list[TokenRows]:
        """The rows of each layer by themselves."""
        parts = []
        for layer in self.layers:
            part = TokenRows((layer,), max(1, self.per_layer))
            rows = self.rows_of(layer)
            part.slots, part.positions = self.slots[rows].copy(), self.positions[rows].copy()
            part.scores = None if self.scores is None else self.scores[rows].copy()
            part.norms = None if self.norms is None else self.norms[rows].copy()
            part.live, part.width, part.steps = self.live, self.width, self.steps
            parts.append(part)
        return parts

    def _widen(self, need: int) -> None:
        room = max(need, 2 * self.slots.shape[1])
        self.slots, self.positions = _widened(self.slots, room), _widened(self.positions, room)
        self.scores = None if self.scores is None else _widened(self.scores, room)
        self.norms = None if self.norms is None else _widened(self.norms, room)


def _widened(rows: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    wide = np.empty((rows.shape[0], room), rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide
