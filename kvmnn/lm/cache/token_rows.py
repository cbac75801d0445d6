"""What is known of the live tokens of a model's layers, kept in rows that are cut together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Floats, Indices
from ...errors import KvmnnError
from . import _eviction

_ROOM = 256

DEAD = float(np.finfo(np.float32).min)
"""What is added to the attention scores of a dead slot: nothing is left of it after the softmax."""


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
    slots : ndarray
        int64 ``[row, room]``, of which the first `live` columns count: where each live token lies in K and V,
        ascending.
    scores, norms : ndarray or None
        float32, alike.
    bias : ndarray
        float32 ``[row, room]``, of which the first `width` columns count: 0 for slots of live tokens, else `DEAD`.
    steps : int
        As `kvmnn.policies.CacheState.steps`.
    """

    def __init__(self, layers: tuple[int, ...], per_layer: int, *, scored: bool = False, normed: bool = False) -> None:
        self.layers = layers
        self.per_layer = per_layer
        self.live = self.width = self.steps = 0
        rows = max(1, per_layer * len(layers))
        self._rows = {layer: slice(i * per_layer, i * per_layer + max(1, per_layer)) for i, layer in enumerate(layers)}
        self.slots: Indices = np.empty((rows, _ROOM), np.int64)
        self._places: Indices = np.empty((rows, _ROOM), np.int64)  # place in the text of the token in each slot
        self.bias: Floats = np.empty((rows, _ROOM), np.float32)
        self.scores: Floats | None = np.empty((rows, _ROOM), np.float32) if scored else None
        self.norms: Floats | None = np.empty((rows, _ROOM), np.float32) if normed else None

    @property
    def dead(self) -> int:
        """Slots in use by tokens that are no longer live."""
        return self.width - self.live

    def rows_of(self, layer: int) -> slice:
        """The rows that belong to a layer."""
        return self._rows[layer]

    def positions_of(self, layer: int) -> Indices:
        """True positions of a layer's live tokens, ``[row, token]``."""
        rows = self.rows_of(layer)
        return np.take_along_axis(self._places[rows], self.slots[rows, : self.live], axis=1)

    def append(self, count: int, seen: int) -> None:
        """`count` more tokens, the text's from position `seen` on, in new slots; with scores of 0 and unknown norms."""
        end, width = self.live + count, self.width + count
        if width > self.slots.shape[1]:
            self._widen(width)
        new, behind = slice(self.live, end), slice(self.width, width)
        self.slots[:, new] = np.arange(self.width, width)
        self._places[:, behind] = np.arange(seen, seen + count)
        self.bias[:, behind] = 0
        if self.scores is not None:
            self.scores[:, new] = 0
        if self.norms is not None:
            self.norms[:, new] = np.nan
        self.live, self.width = end, width

    def begin(self, places: Indices) -> None:
        """The first tokens, from these positions of the text: ``[token]`` for every row, or ``[row, token]``."""
        self.append(places.shape[-1], 0)
        self._places[:, : self.live] = places

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
        if not self._cut(kept) and not self._cut(np.sort(kept, axis=1)):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept must be distinct and among the {self.live} that are stored"
            )
        self.live = kept.shape[1]
        self.steps = 0

    def compacted(self) -> None:
        """Dead slots are gone: live tokens lie side by side from slot 0 on."""
        live = self.live
        self._places[:, :live] = np.take_along_axis(self._places, self.slots[:, :live], axis=1)
        self.slots[:, :live] = np.arange(live)
        self.bias[:, :live] = 0
        self.width = live

    def split(self) -> list[TokenRows]:
        """The rows of each layer by themselves."""
        found = []
        for layer in self.layers:
            alone = TokenRows((layer,), max(1, self.per_layer))
            rows = self.rows_of(layer)
            alone.slots, alone._places = self.slots[rows].copy(), self._places[rows].copy()
            alone.bias = self.bias[rows].copy()
            alone.scores = None if self.scores is None else self.scores[rows].copy()
            alone.norms = None if self.norms is None else self.norms[rows].copy()
            alone.live, alone.width, alone.steps = self.live, self.width, self.steps
            found.append(alone)
        return found

    def _cut(self, kept: Indices) -> bool:
        tables = [table for table in (self.slots, self.scores, self.norms) if table is not None]
        return _eviction.cut(kept, self.live, self.slots, self.bias, DEAD, tables)

    def _widen(self, need: int) -> None:
        room = max(need, 2 * self.slots.shape[1])
        self.slots, self._places = _widened(self.slots, room), _widened(self._places, room)
        self.bias = _widened(self.bias, room)
        self.scores = None if self.scores is None else _widened(self.scores, room)
        self.norms = None if self.norms is None else _widened(self.norms, room)


def _widened(rows: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    wide = np.empty((rows.shape[0], room), rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide
