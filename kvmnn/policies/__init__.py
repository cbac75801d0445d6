"""Which tokens of a cache stay: one file for each policy, one registry. LOSSY, all of them.

>>> from kvmnn.policies import LayerView, create
>>> create("streaming", sink=2, budget=5).keep(LayerView(tokens=8)).tolist()
[0, 1, 5, 6, 7]
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import KvmnnError
from .base import Budgeted, LayerView, Moment, Policy
from .evicting_cache import EvictingCache
from .h2o_blocks import H2OBlocks
from .h2o_decayed import H2ODecayed, H2ODecayedHeads
from .h2o_heads import H2OHeads
from .h2o_tokens import H2OTokens
from .knorm import KNorm
from .l2_fixed import L2Fixed
from .l2_ratio import L2Ratio
from .observed_attention import ObservedAttention
from .ranking import key_norms
from .recent_only import RecentOnly
from .state import CacheState
from .streaming import Streaming, StreamingPress

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        L2Ratio,
        L2Fixed,
        RecentOnly,
        Streaming,
        StreamingPress,
        H2OTokens,
        H2OBlocks,
        H2OHeads,
        H2ODecayed,
        H2ODecayedHeads,
        KNorm,
        ObservedAttention,
    )
}
"""Every policy by its name."""


def create(name: str, **options: Any) -> Policy:
    """The policy called `name` with its options; ``create(p.name, **p.options()) == p``.

    Raises
    ------
    KvmnnError
        For names and options that do not exist, and for values that the policy refuses.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise KvmnnError(f"unknown policy {name!r}: expected one of {', '.join(POLICIES)}")
    known = sorted(field.name for field in fields(policy))
    for option in options:
        if option not in known:
            raise KvmnnError(f"{name} has no option {option!r}: expected {', '.join(known)}")
    return policy(**options)


__all__ = [
    "POLICIES",
    "Budgeted",
    "CacheState",
    "EvictingCache",
    "H2OBlocks",
    "H2ODecayed",
    "H2ODecayedHeads",
    "H2OHeads",
    "H2OTokens",
    "KNorm",
    "L2Fixed",
    "L2Ratio",
    "LayerView",
    "Moment",
    "ObservedAttention",
    "Policy",
    "RecentOnly",
    "Streaming",
    "StreamingPress",
    "create",
    "key_norms",
]
