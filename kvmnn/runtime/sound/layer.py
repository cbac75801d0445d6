"""One layer of a sound runtime: its rows, its counters, its blocks in waiting."""

from __future__ import annotations

from collections import deque

from ...dtypes import DType
from ...packed.reserve import Pair
from ..config import RuntimeConfig
from ..errors import RestoreError
from ..schedule import ColdRange
from .figures import LayerFigures
from .layer_rows import Contents, LayerRows, RowsOf
from .piece import Piece
from .restoring import reason_of


class Layer:
    """Rows of one layer and what is to be encoded of them.

    Attributes
    ----------
    rows
        `LayerRows`.
    figures
        `LayerFigures`.
    waiting
        Pieces that are due and have no place in the queue yet.
    last_step
        Token step at which the layer was last looked at; None before the first time.
    triggered
        Whether the layer has ever had as many tokens as it takes to begin; evictions may bring it below again.
    """

    def __init__(self, config: RuntimeConfig, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self.rows = LayerRows(kv_heads, head_dim, dtype)
        self.figures = LayerFigures()
        self.waiting: deque[Piece] = deque()
        self.last_step: int | None = None
        self.triggered = False
        self._config = config
        self._measured = 0

    def take_due(self, cold: ColdRange) -> None:
        """Put every block that has become cold into `waiting`."""
        if self._config.mode == "store":
            self.waiting += self.rows.carve(cold, self._config.block_tokens)
            return
        block = self._config.block_tokens
        rows = self.rows.tail.rows
        self._measured = max(self._measured, cold.begin)
        while self._measured + block <= cold.end:
            self.waiting.append(Piece(block, rows[:, :, self._measured : self._measured + block], "due"))
            self._measured += block

    def next_due(self) -> Piece | None:
        """The first piece in waiting that still stands for tokens; it stays there."""
        while self.waiting:
            piece = self.waiting[0]
            if piece.alive and piece.state == "due":
                return piece
            self.waiting.popleft()
        return None

    def restore_error(self, number: int, piece: Piece, error: Exception) -> RestoreError:
        """What is raised where a piece of this layer, which is the one of that number, cannot be brought back."""
        return RestoreError(number, self.rows.start_of(piece), piece.count, reason_of(error))

    def kept(self, pairs: list[Pair], rows_of: RowsOf) -> Contents:
        """As `LayerRows.kept`, with the blocks and the hot tokens of the options."""
        return self.rows.kept(pairs, rows_of, block=self._config.block_tokens, hot_sink=self._config.hot_sink_tokens)

    def swap(self, contents: Contents, pairs: list[Pair]) -> None:
        """Take over what `kept` found for `pairs`."""
        self._measured = sum(max(0, min(size, self._measured - begin)) for begin, size in pairs)
        self.rows.swap(contents)

    def clear(self) -> None:
        """Begin anew."""
        self.rows.clear()
        self.figures = LayerFigures()
        self.waiting.clear()
        self.last_step = None
        self.triggered = False
        self._measured = 0
