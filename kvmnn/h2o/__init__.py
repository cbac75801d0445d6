"""H2O as the MNN fork does it: keep the blocks of a cache that got the most attention (docs/h2o.md).

Attention rows become block sums (`sum_by_block`), these a running mean (`update_ema_scores`), and that a plan
(`plan_blocks`) whose pairs go to `PackedCache.realloc`. `H2OPlanner` does it for all layers, call by call.
"""

from .clocks import CADENCES, LayerCallCounter, TokenCounter
from .config import H2OConfig
from .layer_plans import LayerPlan, LayerPlans, LayerScores, plan_layers
from .layer_state import CacheEdit, LayerCallResult, PendingPlan, PlannerLayerState, PlannerMetrics
from .plan import BlockPlan, plan_blocks
from .planner import H2OPlanner
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
