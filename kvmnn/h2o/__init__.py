"""H2O as the MNN fork does it: keep the blocks of a cache that got the most attention (docs/h2o.md).

Attention rows become block sums (`block_sums`), these a running mean (`updated`), and that a plan (`plan`) whose pairs
go to `PackedCache.realloc`. `Planner` does it for all layers, call by call.
"""

from .clocks import CADENCES, LayerCallClock, TokenClock
from .config import H2OConfig
from .layer_plans import LayerPlan, LayerPlans, LayerScores, plan_layers
from .layer_state import Compaction, LayerCall, LayerState, Metrics, PendingPlan
from .plan import Plan, plan
from .planner import Planner
from .scores import block_sums, updated

__all__ = [
    "CADENCES",
    "Compaction",
    "H2OConfig",
    "LayerCall",
    "LayerCallClock",
    "LayerPlan",
    "LayerPlans",
    "LayerScores",
    "LayerState",
    "Metrics",
    "PendingPlan",
    "Plan",
    "Planner",
    "TokenClock",
    "block_sums",
    "plan",
    "plan_layers",
    "updated",
]
