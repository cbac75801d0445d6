"""The engine's schedule of compression: scope, cold range, first and later blocks, as numbers only."""

from __future__ import annotations

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .config import RuntimeConfig


class ColdRange(NamedTuple):
    """Tokens that may be compressed."""

    begin: int
    end: int


@dataclass(frozen=True)
class BlockRange:
    """A range of tokens to encode, and whether it is the first of its layer."""

    start: int
    count: int
    is_bootstrap: bool

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.start + self.count


@dataclass(frozen=True)
class CompressionScope:
    """The layers to compress; their number is the configuration's (``layer_nums``)."""

    config: RuntimeConfig

    @property
    def h2o_layers(self) -> range:
        """Layers of the H2O range."""
        return self.config.h2o.evicting_layers

    def is_front_layer(self, layer: int) -> bool:
        """Return whether `layer` is one of the first `front_n`."""
        return layer < self.config.front_n

    def covers(self, layer: int) -> bool:
        """Return whether `layer` is in a range that the scope names, so that its figures are reported."""
        front = self.config.scope in ("front_n", "front_n_and_h2o_kept") and self.is_front_layer(layer)
        return front or (self.config.scope in ("h2o_kept", "front_n_and_h2o_kept") and layer in self.h2o_layers)

    def compute_budget(self, layer: int, token_step: int, kv_len: int, keep_tokens: int) -> int | None:
        """Return how many tokens of `layer` count at this step; None if it is not compressed."""
        config = self.config
        if not config.is_active:
            return None
        is_front, is_h2o_layer = self.is_front_layer(layer), layer in self.h2o_layers
        uses_all_tokens = config.scope == "front_n" or (config.scope == "front_n_and_h2o_kept" and is_front)
        if config.mode == "store" and config.store_disable_front and is_front:
            uses_all_tokens = False
            is_covered = is_h2o_layer and config.scope in ("h2o_kept", "front_n_and_h2o_kept")
        else:
            is_covered = self.covers(layer)
        if not is_covered or not self._is_sampled(layer, token_step, is_front, is_h2o_layer):
            return None
        return kv_len if uses_all_tokens else keep_tokens

    def is_always_compressed(self, layer: int) -> bool | None:
        """Return whether `layer` is compressed at all decode steps (True) or at none; None if it depends."""
        if self.compute_budget(layer, 1, 1, 1) is None:
            return False
        sampling = (self.config.front_sample_token_interval, self.config.kept_sample_token_interval)
        return True if max(sampling) <= 1 else None

    def _is_sampled(self, layer: int, token_step: int, is_front: bool, is_h2o_layer: bool) -> bool:
        config = self.config
        step = max(1, token_step) - 1
        if config.mode == "probe":
            first_h2o_layer = self.h2o_layers.start
            probed_layers = {"front_n": (0,), "h2o_kept": (first_h2o_layer,), "none": ()}
            return layer in probed_layers.get(config.scope, (0, first_h2o_layer))
        if is_front and config.front_sample_token_interval > 1 and step % config.front_sample_token_interval:
            return False
        is_h2o_only = config.scope == "h2o_kept" or (config.scope == "front_n_and_h2o_kept" and not is_front)
        if config.mode == "full" and is_h2o_only and is_h2o_layer:
            if config.kept_sample_layers > 0 and not 0 <= layer - self.h2o_layers.start < config.kept_sample_layers:
                return False
            return config.kept_sample_token_interval <= 1 or step % config.kept_sample_token_interval == 0
        return True


def compute_cold_range(config: RuntimeConfig, budget: int) -> ColdRange:
    """Return the tokens between the hot ones at the start and the end of `budget` tokens."""
    begin = min(budget, config.hot_sink_tokens)
    return ColdRange(begin, max(begin, budget - config.hot_recent_tokens))


def compute_due_range(
    config: RuntimeConfig,
    cold_tokens: ColdRange,
    kv_len: int,
    token_step: int,
    *,
    updates: int,
    last_step: int,
    watermark: int,
) -> BlockRange | None:
    """Return the block that the engine encodes now, if any.

    `updates` counts the blocks of the layer so far; the last one was encoded at `last_step`, and ended at `watermark`.
    """
    if kv_len < config.h2o.effective_trigger_tokens or cold_tokens.end <= cold_tokens.begin:
        return None
    is_probe_mode, is_store_mode = config.mode == "probe", config.mode == "store"
    growth = cold_tokens.end - watermark
    if updates <= 0:
        bootstrap = get_bootstrap_tokens(config)
        if growth < bootstrap:
            return None
        count = min(bootstrap, cold_tokens.end - cold_tokens.begin)
        start = cold_tokens.begin if is_probe_mode else max(cold_tokens.begin, cold_tokens.end - bootstrap)
        return BlockRange(start, count, True)
    tokens_per_block = get_grouped_tokens(config)
    overlap = tokens_per_block // 8 if is_store_mode else 0
    if token_step - last_step < config.h2o.effective_interval or growth + overlap < tokens_per_block:
        return None
    start = max(watermark, cold_tokens.begin)
    if is_store_mode:
        start = max(start - overlap, cold_tokens.begin)
    count = min(tokens_per_block, max(0, cold_tokens.end - start))
    return BlockRange(start, count, False) if count else None


def get_bootstrap_tokens(config: RuntimeConfig) -> int:
    """Return the number of tokens in a layer's first block."""
    if config.mode == "probe":
        return min(config.block_tokens, 32)
    if config.mode == "full":
        return config.block_tokens
    return config.store_bootstrap_tokens or max(16, config.block_tokens // 2)


def get_grouped_tokens(config: RuntimeConfig) -> int:
    """Return the number of tokens in every later block."""
    if config.mode == "store":
        return config.store_grouped_step_tokens or 3 * config.block_tokens
    return config.block_tokens
