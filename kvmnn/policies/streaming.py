"""Policies that keep recent tokens: a window, or attention sinks and a window (StreamingLLM)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_count
from ..dtypes import Indices
from ..errors import KvmnnError, OptionError
from .policy import DEFAULT_BUFFER_TOKENS, BudgetedPolicy, PolicyInput, Trigger


@dataclass(frozen=True, kw_only=True)
class RecentOnly(BudgetedPolicy):
    """Keep the `budget` latest tokens: a sliding window, the baseline of the others.

    Paper: the window attention that StreamingLLM (arXiv 2309.17453) compares itself with. Original:
    `fix_size_l2_compress` of the l2_compress / KnormPress project, with everything protected.

    Parameters
    ----------
    budget
        Tokens that stay, 1024 by default.

    Notes
    -----
    Where it differs from the original: keys are not used, heads keep the same tokens; a budget of 0 keeps nothing.
    """

    name = "recent_only"
    requires = "lengths"
    default_budget = 1024
    skip_layers: tuple[int, ...] = (0, 1)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        return np.arange(state.tokens - size, state.tokens, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Streaming(BudgetedPolicy):
    """Keep the first `sink` tokens and the latest ones, `budget` in total.

    Paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
    Original: `StreamingDynamicCache` of the StreamingLLM + H2O project (the lazy cache form).

    Parameters
    ----------
    budget
        Tokens that stay, sinks and window: 512 by default. More than `sink`.
    keep_ratio
        Budget as a share of the stored tokens, rounded up; more than `sink` tokens.
    sink
        First tokens that always stay.
    buffer
        0 is the function form: cut as soon as there are more than `budget`. Otherwise the lazy cache form: after a step
        was attended in full, cut to `budget` where more than ``budget + buffer`` are stored, and at the end of a chunk
        where more than `budget` are.

    Notes
    -----
    Where it differs from the originals:

    * A window of 0 tokens is refused: the originals slice from -0 and keep everything.
    * The lazy cache calls the window alone its size, so its `streaming_8_256` stores 264 tokens; here `budget` counts
      everything, which compares fairly with the other policies. `from_window` takes the original's numbers.
    * True positions stay with the tokens (`CacheState`); the project's first runs derived rotary positions from the
      stored length.
    """

    name: ClassVar[str] = "streaming"
    requires = "lengths"
    triggers = frozenset({Trigger.AFTER_ATTENTION, Trigger.CHUNK_END})
    default_budget = 512
    budget_help = "sinks and window together; up to `buffer` more are held until it cuts"

    sink: int = 4
    buffer: int = 0

    @classmethod
    def from_window(
        cls, sink: int, window: int, buffer: int = DEFAULT_BUFFER_TOKENS, *, skip_layers: tuple[int, ...] = ()
    ) -> Streaming:
        """Create the original's cache: `sink` and `window` tokens, cut whenever `buffer` more have been added."""
        validate_count("window", window)
        return cls(sink=sink, budget=sink + window, buffer=buffer, skip_layers=skip_layers)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)
        validate_count(f"{self.name}: buffer", self.buffer)
        if self.budget is not None and self.budget <= self.sink:
            raise KvmnnError(f"{self.name}: a budget of {self.budget} tokens leaves no window after {self.sink} sinks")
        if self.keep_ratio == 0:
            raise KvmnnError(f"{self.name}: a keep_ratio of 0 leaves no window after {pluralize(self.sink, 'sink')}")

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size + (self.buffer if state.trigger is Trigger.AFTER_ATTENTION else 0):
            return None
        if size <= self.sink:
            raise OptionError(
                f"{self.name}: a keep_ratio of {self.keep_ratio:g} is {size} of {pluralize(state.tokens, 'token')} and "
                f"leaves no window after {pluralize(self.sink, 'sink')}: expected a larger share, a budget, or fewer "
                f"sinks"
            )
        return concat_sink_recent(state.tokens, self.sink, size - self.sink)


@dataclass(frozen=True, kw_only=True)
class StreamingPress(BudgetedPolicy):
    """`Streaming` as in kvpress: a share of the prompt, cut once.

    Paper: arXiv 2309.17453. Original: kvpress, `StreamingLLMPress`.

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down, at least one token.
    sink
        First tokens that precede the pruned ones.

    Notes
    -----
    Where it differs from kvpress, which scores the tokens to prune 0 and all others 1 and takes the best; where fewer
    than the pruned number score 0, it does not define which of the others go. Here the oldest stay, so the sinks win.
    What stays is in temporal order.
    """

    name: ClassVar[str] = "streaming_press"
    requires = "lengths"
    is_rounded_up = False
    prompt_only = True
    budget_help = "the tokens of the prompt that stay; later ones all stay"

    sink: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if size >= state.tokens:
            return None
        if state.tokens <= self.sink:
            raise KvmnnError(
                f"layer {state.layer}: {state.tokens} tokens: {self.name} needs more than its {self.sink} sinks"
            )
        num_sinks = min(self.sink, size)
        return concat_sink_recent(state.tokens, num_sinks, size - num_sinks)


def concat_sink_recent(tokens: int, sink: int, recent: int) -> Indices:
    """Return the first `sink` and the last `recent` of `tokens` indices, without repetition."""
    return np.concatenate([np.arange(sink, dtype=np.int64), np.arange(tokens - recent, tokens, dtype=np.int64)])
