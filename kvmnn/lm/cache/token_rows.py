"""What is known of the live tokens of a model's layers, kept in rows that are cut together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Floats, Indices
from ...errors import KvmnnError
from . import _eviction

_INITIAL_SLOTS = 256

MASKED_BIAS = float(np.finfo(np.float32).min)
"""What is added to the attention scores of a dead slot: nothing is left of it after the softmax."""


class TokenGroup:
    """Slots, true positions, scores and key norms of live tokens, of layers that hold equally many.

    A row is one set of live tokens: of all the layers together, of one layer, or of one KV head of a layer.

    Parameters
    ----------
    layers
        Whose tokens these are.
    rows_per_layer
        Rows of each layer: 0 for one row that serves all layers, 1, or the number of KV heads.
    has_scores, has_norms
        Whether scores and norms are kept.

    Attributes
    ----------
    num_live : int
        Tokens in each row.
    num_slots : int
        Slots of K and V in use, those of dead tokens included.
    slots : ndarray
        int64 ``[row, room]``, of which the first `num_live` columns count: where each live token lies in K and V,
        ascending.
    scores, norms : ndarray or None
        float32, alike.
    bias : ndarray
        float32 ``[row, room]``, of which the first `num_slots` columns count: 0 for slots of live tokens, else
        `MASKED_BIAS`.
    num_steps : int
        As `kvmnn.policies.CacheState.num_steps`.
    """

    def __init__(
        self, layers: tuple[int, ...], rows_per_layer: int, *, has_scores: bool = False, has_norms: bool = False
    ) -> None:
        self.layers = layers
        self.rows_per_layer = rows_per_layer
        self.num_live = self.num_slots = self.num_steps = 0
        rows = max(1, rows_per_layer * len(layers))
        self._rows = {
            layer: slice(i * rows_per_layer, i * rows_per_layer + max(1, rows_per_layer))
            for i, layer in enumerate(layers)
        }
        self.slots: Indices = np.empty((rows, _INITIAL_SLOTS), np.int64)
        self._positions: Indices = np.empty(
            (rows, _INITIAL_SLOTS), np.int64
        )  # place in the text of the token in each slot
        self.bias: Floats = np.empty((rows, _INITIAL_SLOTS), np.float32)
        self.scores: Floats | None = np.empty((rows, _INITIAL_SLOTS), np.float32) if has_scores else None
        self.norms: Floats | None = np.empty((rows, _INITIAL_SLOTS), np.float32) if has_norms else None

    @property
    def num_masked(self) -> int:
        """Slots in use by tokens that are no longer live."""
        return self.num_slots - self.num_live

    def get_layer_rows(self, layer: int) -> slice:
        """The rows that belong to a layer."""
        return self._rows[layer]

    def get_layer_positions(self, layer: int) -> Indices:
        """True positions of a layer's live tokens, ``[row, token]``."""
        rows = self.get_layer_rows(layer)
        return np.take_along_axis(self._positions[rows], self.slots[rows, : self.num_live], axis=1)

    def append(self, count: int, num_seen: int) -> None:
        """`count` more tokens, the text's from position `num_seen` on, in new slots; with scores of 0 and unknown
        norms.
        """
        end, num_slots = self.num_live + count, self.num_slots + count
        if num_slots > self.slots.shape[1]:
            self._grow_slots(num_slots)
        live_range, slot_range = slice(self.num_live, end), slice(self.num_slots, num_slots)
        self.slots[:, live_range] = np.arange(self.num_slots, num_slots)
        self._positions[:, slot_range] = np.arange(num_seen, num_seen + count)
        self.bias[:, slot_range] = 0
        if self.scores is not None:
            self.scores[:, live_range] = 0
        if self.norms is not None:
            self.norms[:, live_range] = np.nan
        self.num_live, self.num_slots = end, num_slots

    def set_initial(self, positions: Indices) -> None:
        """The first tokens, from these positions of the text: ``[token]`` for every row, or ``[row, token]``."""
        self.append(positions.shape[-1], 0)
        self._positions[:, : self.num_live] = positions

    def keep(self, indices: npt.NDArray[np.int64]) -> None:
        """Keep these of the live tokens: ``[kept]``, of every row the same, or ``[row, kept]``; in any order.

        Raises
        ------
        KvmnnError
            For tokens that are not there or named twice, and for another number of rows.
        """
        indices = np.ascontiguousarray(np.atleast_2d(indices), np.int64)
        if indices.shape[0] not in (1, len(self.slots)):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept for {indices.shape[0]} rows: expected {len(self.slots)}"
            )
        if not self._try_keep(indices) and not self._try_keep(np.sort(indices, axis=1)):
            raise KvmnnError(
                f"layer {self.layers[0]}: tokens kept must be distinct and among the {self.num_live} that are stored"
            )
        self.num_live = indices.shape[1]
        self.num_steps = 0

    def mark_compacted(self) -> None:
        """Dead slots are gone: live tokens lie side by side from slot 0 on."""
        num_live = self.num_live
        self._positions[:, :num_live] = np.take_along_axis(self._positions, self.slots[:, :num_live], axis=1)
        self.slots[:, :num_live] = np.arange(num_live)
        self.bias[:, :num_live] = 0
        self.num_slots = num_live

    def split_layers(self) -> list[TokenGroup]:
        """The rows of each layer by themselves."""
        groups = []
        for layer in self.layers:
            group = TokenGroup((layer,), max(1, self.rows_per_layer))
            rows = self.get_layer_rows(layer)
            group.slots, group._positions = self.slots[rows].copy(), self._positions[rows].copy()
            group.bias = self.bias[rows].copy()
            group.scores = None if self.scores is None else self.scores[rows].copy()
            group.norms = None if self.norms is None else self.norms[rows].copy()
            group.num_live, group.num_slots, group.num_steps = self.num_live, self.num_slots, self.num_steps
            groups.append(group)
        return groups

    def _try_keep(self, indices: Indices) -> bool:
        tables = [table for table in (self.slots, self.scores, self.norms) if table is not None]
        return _eviction.compact_tables(indices, self.num_live, self.slots, self.bias, MASKED_BIAS, tables)

    def _grow_slots(self, required_slots: int) -> None:
        capacity = max(required_slots, 2 * self.slots.shape[1])
        self.slots, self._positions = _grow_rows(self.slots, capacity), _grow_rows(self._positions, capacity)
        self.bias = _grow_rows(self.bias, capacity)
        self.scores = None if self.scores is None else _grow_rows(self.scores, capacity)
        self.norms = None if self.norms is None else _grow_rows(self.norms, capacity)


def _grow_rows(rows: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    grown_rows = np.empty((rows.shape[0], capacity), rows.dtype)
    grown_rows[:, : rows.shape[1]] = rows
    return grown_rows
