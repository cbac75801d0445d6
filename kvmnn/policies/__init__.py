"""Which tokens of a cache stay: one file for each policy, one registry. LOSSY, all of them but `FullCache`.

>>> from kvmnn.policies import LayerState, create_policy
>>> create_policy("streaming", sink=2, budget=5).select_or_all(LayerState(tokens=8)).tolist()
[0, 1, 5, 6, 7]
"""

from __future__ import annotations

from .base import BudgetedPolicy, Policy
from .evicting_cache import EvictingCache
from .full import FullCache
from .h2o_blocks import H2OBlocks
from .h2o_decayed import H2ODecayed, H2ODecayedHeads
from .h2o_engine import H2OEngine
from .h2o_heads import H2OHeads
from .h2o_tokens import H2OTokens
from .knorm import KNorm
from .l2_fixed import L2Fixed
from .l2_ratio import L2Ratio
from .labels import LabelledPolicy
from .observed_attention import ObservedAttention
from .past_key_values import fix_size_l2_compress, l2_compress
from .ranking import compute_key_norms
from .recent_only import RecentOnly
from .registry import POLICIES, create_policy
from .scoring import EmaScores, MeanScores, ScoreAccumulator, SumScores
from .state import CacheState
from .streaming import Streaming, StreamingPress
from .view import LayerState, PolicyInput, Trigger

__all__ = [
    "POLICIES",
    "BudgetedPolicy",
    "CacheState",
    "EmaScores",
    "EvictingCache",
    "FullCache",
    "H2OBlocks",
    "H2ODecayed",
    "H2ODecayedHeads",
    "H2OEngine",
    "H2OHeads",
    "H2OTokens",
    "KNorm",
    "L2Fixed",
    "L2Ratio",
    "LabelledPolicy",
    "LayerState",
    "MeanScores",
    "ObservedAttention",
    "Policy",
    "PolicyInput",
    "RecentOnly",
    "ScoreAccumulator",
    "Streaming",
    "StreamingPress",
    "SumScores",
    "Trigger",
    "compute_key_norms",
    "create_policy",
    "fix_size_l2_compress",
    "l2_compress",
]
