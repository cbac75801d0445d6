"""One layer of the strict runtime: its rows, counters and pending blocks, and plans after an eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...dtypes import DType
from ...errors import KvmnnError, RestoreError
from ...packed.compaction import ReservePair
from ...policies.h2o.planner import PlannerLayerState, are_valid_pairs
from ..config import RuntimeConfig
from ..metrics import OperationLatencies
from ..schedule import CompressionScope, compute_cold_range
from .layer_storage import LayerContents, LayerStorage, ReadRows, TokenSegment
from .restorer import RuntimeLayerCounters, describe_error


def validate_ranges(layer: int, ranges: Sequence[ReservePair], tokens: int) -> list[ReservePair]:
    """`ranges` as a list; refused unless they are ascending ranges of a layer's tokens."""
    if not are_valid_pairs(tuple(ranges), tokens):
        raise KvmnnError(f"layer {layer}: {list(ranges)[:4]} are no ascending ranges of its {tokens} tokens")
    return list(ranges)


def invalidate_plan(state: PlannerLayerState, ranges: Sequence[ReservePair], block_tokens: int) -> None:
    """The planner's view of a layer that lost tokens: no plan in waiting, scores of the blocks that are left."""
    state.pending_plan = None
    kept_blocks = [np.arange(first, first + size) // block_tokens for first, size in ranges]
    blocks = np.unique(np.concatenate(kept_blocks)) if kept_blocks else np.empty(0, np.int64)
    state.scores = state.scores[blocks[blocks < state.scores.size]]


class StrictLayer:
    """Rows of one layer, and what has to be encoded of them; `is_planned` if the eviction planner takes part."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        shape: tuple[int, int],
        dtype: DType,
        *,
        is_planned: bool,
        total_latencies: OperationLatencies,
    ) -> None:
        self.is_planned = is_planned
        self.rows = LayerStorage(*shape, dtype)
        self._total_latencies = total_latencies
        self.counters = RuntimeLayerCounters(timings=OperationLatencies(total_latencies))
        self.waiting_segments: deque[TokenSegment] = deque()
        """Segments that are due and not in the queue yet."""
        self.last_step: int | None = None
        """Token step at which `queue_due` was last called."""
        self.has_triggered = False
        """Whether the layer ever had enough tokens to begin; evictions may leave fewer."""
        self._config = config
        self._number, self._scope = number, CompressionScope(config)
        self._applies_always = self._scope.is_always_compressed(number)
        self._measured_tokens = 0
        self._next_due_tokens = 0

    def is_compressed(self, step: int) -> bool:
        """Whether the layer is compressed at this decode step."""
        if self._applies_always is not None:
            return self._applies_always
        tokens = self.rows.tokens
        return self._scope.compute_budget(self._number, step, tokens, tokens) is not None

    def queue_due(self) -> None:
        """Put every block that has become cold into `waiting_segments`."""
        tokens = self.rows.tokens
        if tokens < self._next_due_tokens:
            return
        config = self._config
        cold_tokens, block_tokens = compute_cold_range(config, tokens), config.block_tokens
        if config.mode == "store":
            self.waiting_segments += self.rows.split_cold(cold_tokens, block_tokens)
            self._next_due_tokens = (
                self.rows.find_next_due_end(config.hot_sink_tokens, block_tokens) + config.hot_recent_tokens
            )
            return
        rows = self.rows.hot_buffer.rows
        self._measured_tokens = max(self._measured_tokens, cold_tokens.begin)
        while self._measured_tokens + block_tokens <= cold_tokens.end:
            end_token = self._measured_tokens + block_tokens
            self.waiting_segments.append(
                TokenSegment(block_tokens, rows[:, :, self._measured_tokens : end_token], "due")
            )
            self._measured_tokens = end_token
        self._next_due_tokens = (
            max(self._measured_tokens, config.hot_sink_tokens) + block_tokens + config.hot_recent_tokens
        )

    def peek_due(self) -> TokenSegment | None:
        """The first piece in waiting that still stands for tokens; it stays there."""
        while self.waiting_segments:
            segment = self.waiting_segments[0]
            if segment.is_alive and segment.state == "due":
                return segment
            self.waiting_segments.popleft()
        return None

    def build_restore_error(self, number: int, segment: TokenSegment, error: Exception) -> RestoreError:
        """What is raised where a piece of this layer, which is the one of that number, cannot be brought back."""
        return RestoreError(number, self.rows.find_start(segment), segment.count, describe_error(error))

    def select(self, ranges: list[ReservePair], read_rows: ReadRows) -> LayerContents:
        """As `LayerStorage.select`, with the blocks and the hot tokens of the options."""
        return self.rows.select(
            ranges, read_rows, block_tokens=self._config.block_tokens, hot_sink=self._config.hot_sink_tokens
        )

    def replace_contents(self, contents: LayerContents, ranges: list[ReservePair]) -> None:
        """Take over what `select` found for `ranges`."""
        self._measured_tokens = sum(max(0, min(size, self._measured_tokens - begin)) for begin, size in ranges)
        self._next_due_tokens = 0
        self.rows.replace_contents(contents)

    def clear(self) -> None:
        """Drop all tokens and counts."""
        self.rows.clear()
        self.counters = RuntimeLayerCounters(timings=OperationLatencies(self._total_latencies))
        self.waiting_segments.clear()
        self.last_step = None
        self.has_triggered = False
        self._measured_tokens = self._next_due_tokens = 0
