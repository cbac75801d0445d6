"""H2O as in the MNN fork: keep the blocks of a cache that drew the most attention (docs/h2o.md).

Attention rows become block sums (`sum_by_block`), these a running mean (`update_ema_scores`), and the mean a plan
(`plan_blocks`) whose pairs are arguments of `PackedCache.realloc`. `H2OPlanner` does this for all layers.
"""

from .config import H2OConfig
from .plan import BlockPlan, LayerPlan, LayerPlans, LayerScores, plan_blocks, plan_layers
from .planner import (
    CADENCES,
    CacheEdit,
    H2OPlanner,
    LayerCallCounter,
    LayerCallResult,
    PendingPlan,
    PlannerLayerState,
    PlannerMetrics,
    TokenCounter,
)
from .scores import sum_by_block, update_ema_scores

__all__ = [
    "CADENCES",
    "BlockPlan",
    "CacheEdit",
    "H2OConfig",
    "H2OPlanner",
    "LayerCallCounter",
    "LayerCallResult",
    "LayerPlan",
    "LayerPlans",
    "LayerScores",
    "PendingPlan",
    "PlannerLayerState",
    "PlannerMetrics",
    "TokenCounter",
    "plan_blocks",
    "plan_layers",
    "sum_by_block",
    "update_ema_scores",
]
