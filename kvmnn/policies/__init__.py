"""Eviction policies, which select the tokens of a cache that stay. All are LOSSY except `FullCache`.

>>> from kvmnn.policies import LayerState, create_policy
>>> create_policy("streaming", sink=2, budget=5).select_or_all(LayerState(tokens=8)).tolist()
[0, 1, 5, 6, 7]
"""

from __future__ import annotations

from .cache import CacheState, EvictingCache
from .composed import Composed, ThinK
from .h2o_blocks import H2OBlocks, H2OEngine
from .heavy_hitter import H2ODecayed, H2ODecayedHeads, H2OHeads, H2OTokens, ObservedAttention
from .key_norm import KNorm, L2Fixed, L2Ratio, fix_size_l2_compress, l2_compress
from .key_value_scores import CUR, KeyDiff, LagKV, Leverage, RandomTokens
from .policy import BudgetedPolicy, FullCache, LayerState, Policy, PolicyInput, Trigger
from .profiled import DuoAttention, ExpectedAttentionStats, ProfiledPolicy, QFilter
from .prompt_scores import CapKV, Compactor, ExpectedAttention, NonCausal
from .query_scores import TOVA, Finch, PyramidKV, SimLayerKV, SnapKV
from .registry import POLICIES, LabelledPolicy, create_policy, register_policy
from .scored import ScoredPolicy
from .scores import EmaScores, MeanScores, ScoreAccumulator, SumScores
from .streaming import RecentOnly, Streaming, StreamingPress
from .topk import compute_key_norms

__all__ = [
    "CUR",
    "POLICIES",
    "TOVA",
    "BudgetedPolicy",
    "CacheState",
    "CapKV",
    "Compactor",
    "Composed",
    "DuoAttention",
    "EmaScores",
    "EvictingCache",
    "ExpectedAttention",
    "ExpectedAttentionStats",
    "Finch",
    "FullCache",
    "H2OBlocks",
    "H2ODecayed",
    "H2ODecayedHeads",
    "H2OEngine",
    "H2OHeads",
    "H2OTokens",
    "KNorm",
    "KeyDiff",
    "L2Fixed",
    "L2Ratio",
    "LabelledPolicy",
    "LagKV",
    "LayerState",
    "Leverage",
    "MeanScores",
    "NonCausal",
    "ObservedAttention",
    "Policy",
    "PolicyInput",
    "ProfiledPolicy",
    "PyramidKV",
    "QFilter",
    "RandomTokens",
    "RecentOnly",
    "ScoreAccumulator",
    "ScoredPolicy",
    "SimLayerKV",
    "SnapKV",
    "Streaming",
    "StreamingPress",
    "SumScores",
    "ThinK",
    "Trigger",
    "compute_key_norms",
    "create_policy",
    "fix_size_l2_compress",
    "l2_compress",
    "register_policy",
]
