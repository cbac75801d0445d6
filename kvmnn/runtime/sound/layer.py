"""One layer of a sound runtime: its rows, its counters, its blocks in waiting."""

from __future__ import annotations

from collections import deque

from ...dtypes import DType
from ...packed.reserve import Pair
from ..config import RuntimeConfig
from ..errors import RestoreError
from ..metrics import Timings
from ..schedule import Scope, cold_range
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
    plans
        Whether the eviction planner is asked at its calls.
    """

    def __init__(
        self, number: int, config: RuntimeConfig, shape: tuple[int, int], dtype: DType, *, plans: bool, total: Timings
    ) -> None:
        self.plans = plans
        self.rows = LayerRows(*shape, dtype)
        self._total = total
        self.figures = LayerFigures(timings=Timings(total))
        self.waiting: deque[Piece] = deque()
        self.last_step: int | None = None
        self.triggered = False
        self._config = config
        self._number, self._scope = number, Scope(config)
        self._always = self._scope.at_every_step(number)
        self._measured = 0
        self._due_from = 0

    def applies(self, step: int) -> bool:
        """Whether the layer is compressed at this decode step."""
        if self._always is not None:
            return self._always
        tokens = self.rows.tokens
        return self._scope.budget(self._number, step, tokens, tokens) is not None

    def take_due(self) -> None:
        """Put every block that has become cold into `waiting`."""
        tokens = self.rows.tokens
        if tokens < self._due_from:
            return
        config = self._config
        cold, block, hot_sink = cold_range(config, tokens), config.block_tokens, config.hot_sink_tokens
        if config.mode == "store":
            self.waiting += self.rows.carve(cold, block)
            self._due_from = self.rows.due_from(hot_sink, block) + config.hot_recent_tokens
            return
        rows = self.rows.tail.rows
        self._measured = max(self._measured, cold.begin)
        while self._measured + block <= cold.end:
            self.waiting.append(Piece(block, rows[:, :, self._measured : self._measured + block], "due"))
            self._measured += block
        self._due_from = max(self._measured, hot_sink) + block + config.hot_recent_tokens

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
        self._due_from = 0
        self.rows.swap(contents)

    def clear(self) -> None:
        """Begin anew."""
        self.rows.clear()
        self.figures = LayerFigures(timings=Timings(self._total))
        self.waiting.clear()
        self.last_step = None
        self.triggered = False
        self._measured = self._due_from = 0
