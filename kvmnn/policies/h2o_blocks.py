"""Keep blocks of tokens by the attention they drew: the H2O planner of the MNN fork as a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..checks import validate_count, validate_fraction
from ..dtypes import Indices
from ..errors import KvmnnError
from ..h2o import plan_blocks
from ..h2o.config import STATIC, H2OConfig
from ..h2o.plan import explain_no_eviction
from ..h2o.scores import sum_by_block
from .base import BudgetedPolicy
from .scoring import EmaScores
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class H2OBlocks(BudgetedPolicy):
    """Keep blocks of tokens: those of sinks and recent tokens, and those that drew the most attention until the target.

    Paper: arXiv 2306.14048 (H2O). Original: the planner of the MNN fork with H2O. The choice is `kvmnn.h2o.plan`;
    docs/h2o.md.

    Parameters
    ----------
    keep_ratio
        Target before full blocks and protected ones raise it; a third by default, the engine's adaptive target 3.0
        (`from_lossy_ratio`). Cut to 1.
    budget
        Or the target in tokens.
    block_tokens, sink, recent, ema_alpha, update_interval, trigger_min_tokens
        As in `kvmnn.h2o.H2OConfig`.
    skip_layers
        0 and 1 by default, the engine's layer_start of 2.

    Notes
    -----
    Where it differs from the engine, and why:

    * Scores belong to tokens here, as those of the other policies, and are added up to blocks when a plan is made; the
      engine averages block sums. The two agree but for rounding. `kvmnn.h2o.Planner` is the engine bit for bit.
    * `update_interval` counts decode steps of the layer since its last plan, as the fork's settings are described;
      the engine counts calls of all layers together.
    * What a plan drops goes right after the step that made it, not at the start of the next: nothing attends between.
    * Scores are cut when the cache is, never before it.
    """

    name: ClassVar[str] = "h2o_blocks"
    requires = "scores"
    default_keep_ratio = float(H2OConfig().effective_keep_ratio)
    budget_help = "a target that protected tokens and whole blocks raise; more is held between two plans"

    block_tokens: int = 64
    sink: int = 32
    recent: int = 256
    ema_alpha: float = 0.9
    update_interval: int = 16
    trigger_min_tokens: int = 512
    skip_layers: tuple[int, ...] = (0, 1)

    @classmethod
    def from_lossy_ratio(cls, lossy_ratio: float, **options: Any) -> H2OBlocks:
        """The engine's adaptive target: keep one token in `lossy_ratio`, in float32."""
        return cls(keep_ratio=float(H2OConfig(target_lossy_ratio=lossy_ratio).effective_keep_ratio), **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("block_tokens", "sink", "recent", "update_interval", "trigger_min_tokens"):
            validate_count(f"{self.name}: {field}", getattr(self, field))
        validate_fraction(f"{self.name}: ema_alpha", self.ema_alpha)

    @property
    def score_accumulator(self) -> EmaScores:
        return EmaScores(self.ema_alpha)

    def _is_due(self, state: PolicyInput) -> bool:
        has_enough_tokens = state.tokens >= max(1, self.trigger_min_tokens)
        return has_enough_tokens and (state.num_steps is None or state.num_steps >= max(1, self.update_interval))

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        names = {"sink_tokens": "sink", "recent_tokens": "recent"}
        config = replace(self._build_config(tokens), trigger_min_tokens=self.trigger_min_tokens)
        return super().explain_no_eviction(prompt_tokens, tokens) or explain_no_eviction(config, tokens, names)

    def select_tokens(self, state: PolicyInput) -> list[Indices] | None:
        if not self._is_due(state):
            return None
        config = self._build_config(state.tokens)
        plans = [
            plan_blocks(sum_by_block(row[None], config.effective_block_tokens), state.tokens, config)
            for row in state.get_row_scores()
        ]
        return [
            layer_plan.list_kept_tokens().astype(np.int64) for layer_plan in plans
        ]  # all of them where nothing goes: steps count anew

    def _build_config(self, tokens: int) -> H2OConfig:
        ratio = self.keep_ratio
        if self.budget is not None:
            share = np.float32(self.budget / tokens)
            while np.ceil(share * np.float32(tokens)) > self.budget:  # float32 could ask for one token more
                share = np.nextafter(share, np.float32(0))
            ratio = float(share)
        if ratio is None:
            raise KvmnnError(f"{self.name}: expected a budget or a keep_ratio")
        return H2OConfig(
            block_tokens=self.block_tokens,
            sink_tokens=self.sink,
            recent_tokens=self.recent,
            target_mode=STATIC,
            target_keep_ratio=ratio,
        )
