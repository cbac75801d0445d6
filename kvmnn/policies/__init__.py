"""Eviction policies, which select the tokens of a cache that stay. All are LOSSY except `FullCache`.

>>> from kvmnn.policies import LayerState, create_policy
>>> create_policy("streaming", sink=2, budget=5).select_or_all(LayerState(tokens=8)).tolist()
[0, 1, 5, 6, 7]
"""

from __future__ import annotations

from .cache import CacheState, EvictingCache
from .h2o_blocks import H2OBlocks, H2OEngine
from .heavy_hitter import H2ODecayed, H2ODecayedHeads, H2OHeads, H2OTokens, ObservedAttention
from .key_norm import KNorm, L2Fixed, L2Ratio, fix_size_l2_compress, l2_compress
from .key_value_scores import KeyDiff, RandomTokens
from .policy import BudgetedPolicy, FullCache, LayerState, Policy, PolicyInput, Trigger
from .query_scores import TOVA, ExpectedAttention, SnapKV
from .registry import POLICIES, LabelledPolicy, create_policy, register_policy
from .scored import ScoredPolicy
from .scores import EmaScores, MeanScores, ScoreAccumulator, SumScores
from .streaming import RecentOnly, Streaming, StreamingPress
from .topk import compute_key_norms

__all__ = [
    "POLICIES",
    "TOVA",
    "BudgetedPolicy",
    "CacheState",
    "EmaScores",
    "EvictingCache",
    "ExpectedAttention",
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
    "LayerState",
    "MeanScores",
    "ObservedAttention",
    "Policy",
    "PolicyInput",
    "RandomTokens",
    "RecentOnly",
    "ScoreAccumulator",
    "ScoredPolicy",
    "SnapKV",
    "Streaming",
    "StreamingPress",
    "SumScores",
    "Trigger",
    "compute_key_norms",
    "create_policy",
    "fix_size_l2_compress",
    "l2_compress",
    "register_policy",
]
