"""When the engine compresses which tokens of a layer: scope, cold range, bootstrap and grouped steps. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .config import RuntimeConfig


class ColdRange(NamedTuple):
    """Tokens that may be compressed."""

    begin: int
    end: int


@dataclass(frozen=True)
class BlockRange:
    """Tokens that are due, and whether they are the first of their layer."""

    start: int
    count: int
    bootstrap: bool

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.count


@dataclass(frozen=True)
class Scope:
    """Which layers are compressed; their number is the configuration's (``layer_nums``)."""

    config: RuntimeConfig

    @property
    def kept(self) -> range:
        """Layers of the H2O range."""
        return self.config.h2o.layer_range

    def in_front(self, layer: int) -> bool:
        """Whether `layer` is one of the first `front_n`."""
        return layer < self.config.front_n

    def covers(self, layer: int) -> bool:
        """Whether figures of `layer` are reported: it lies in a range that the scope names."""
        front = self.config.scope in ("front_n", "front_n_and_h2o_kept") and self.in_front(layer)
        return front or (self.config.scope in ("h2o_kept", "front_n_and_h2o_kept") and layer in self.kept)

    def budget(self, layer: int, token_step: int, kv_len: int, keep_tokens: int) -> int | None:
        """Tokens of `layer` that count at this step; None where it is not compressed.

        Parameters
        ----------
        token_step
            Decode steps so far, this one included.
        kv_len
            Tokens of the layer.
        keep_tokens
            Those that the eviction planner means to keep.
        """
        config = self.config
        if not config.active:
            return None
        front, kept = self.in_front(layer), layer in self.kept
        all_tokens = config.scope == "front_n" or (config.scope == "front_n_and_h2o_kept" and front)
        if config.mode == "store" and config.store_disable_front and front:
            all_tokens = False
            applies = kept and config.scope in ("h2o_kept", "front_n_and_h2o_kept")
        else:
            applies = self.covers(layer)
        if not applies or not self._sampled(layer, token_step, front, kept):
            return None
        return kv_len if all_tokens else keep_tokens

    def at_every_step(self, layer: int) -> bool | None:
        """Whether `layer` is compressed at all decode steps (True) or at none (False); None where it depends."""
        if self.budget(layer, 1, 1, 1) is None:
            return False
        sampling = (self.config.front_sample_token_interval, self.config.kept_sample_token_interval)
        return True if max(sampling) <= 1 else None

    def _sampled(self, layer: int, token_step: int, front: bool, kept: bool) -> bool:
        config = self.config
        step = max(1, token_step) - 1
        if config.mode == "probe":
            return layer in self._probed()
        if front and config.front_sample_token_interval > 1 and step % config.front_sample_token_interval:
            return False
        deep = config.scope == "h2o_kept" or (config.scope == "front_n_and_h2o_kept" and not front)
        if config.mode == "full" and deep and kept:
            if config.kept_sample_layers > 0 and not 0 <= layer - self.kept.start < config.kept_sample_layers:
                return False
            return config.kept_sample_token_interval <= 1 or step % config.kept_sample_token_interval == 0
        return True

    def _probed(self) -> tuple[int, ...]:
        return {"front_n": (0,), "h2o_kept": (self.kept.start,), "none": ()}.get(
            self.config.scope, (0, self.kept.start)
        )


def cold_range(config: RuntimeConfig, budget: int) -> ColdRange:
    """The tokens between the hot ones at the start and at the end of `budget` tokens."""
    begin = min(budget, config.hot_sink_tokens)
    return ColdRange(begin, max(begin, budget - config.hot_recent_tokens))


class Progress(NamedTuple):
    """How far a layer has come: updates so far, the token step of the last one, and where it ended."""

    updates: int
    last_step: int
    watermark: int


def due_range(
    config: RuntimeConfig, cold: ColdRange, kv_len: int, token_step: int, progress: Progress
) -> BlockRange | None:
    """The block that the engine encodes now, if any."""
    if kv_len < config.h2o.trigger_tokens or cold.end <= cold.begin:
        return None
    probe, store = config.mode == "probe", config.mode == "store"
    growth = cold.end - progress.watermark
    if progress.updates <= 0:
        bootstrap = bootstrap_tokens(config)
        if growth < bootstrap:
            return None
        count = min(bootstrap, cold.end - cold.begin)
        return BlockRange(cold.begin if probe else max(cold.begin, cold.end - bootstrap), count, True)
    grouped = grouped_tokens(config)
    overlap = grouped // 8 if store else 0
    if token_step - progress.last_step < config.h2o.interval or growth + overlap < grouped:
        return None
    start = max(progress.watermark, cold.begin)
    if store:
        start = max(start - overlap, cold.begin)
    count = min(grouped, max(0, cold.end - start))
    return BlockRange(start, count, False) if count else None


def bootstrap_tokens(config: RuntimeConfig) -> int:
    """Tokens of a layer's first block."""
    if config.mode == "probe":
        return min(config.block_tokens, 32)
    if config.mode == "full":
        return config.block_tokens
    return config.store_bootstrap_tokens or max(16, config.block_tokens // 2)


def grouped_tokens(config: RuntimeConfig) -> int:
    """Tokens of every later block."""
    if config.mode == "store":
        return config.store_grouped_step_tokens or 3 * config.block_tokens
    return config.block_tokens
