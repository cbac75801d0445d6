"""All policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import KvmnnError
from ..text import suggest
from .base import Policy
from .full import FullCache
from .h2o_blocks import H2OBlocks
from .h2o_decayed import H2ODecayed, H2ODecayedHeads
from .h2o_engine import H2OEngine
from .h2o_heads import H2OHeads
from .h2o_tokens import H2OTokens
from .knorm import KNorm
from .l2_fixed import L2Fixed
from .l2_ratio import L2Ratio
from .observed_attention import ObservedAttention
from .recent_only import RecentOnly
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
"""Every policy that evicts and can decide for one layer alone, by its name."""

MODEL_POLICIES: dict[str, type[Policy]] = {H2OEngine.name: H2OEngine}
"""Those that decide for all layers of a model together, in `kvmnn.lm`."""


def get_policy_class(name: str) -> type[Policy]:
    """The class of a policy, `FullCache` included.

    Raises
    ------
    KvmnnError
        Where there is none of that name.
    """
    if name == FullCache.name:
        return FullCache
    policies = POLICIES | MODEL_POLICIES
    if name not in policies:
        suggestion = suggest(name, [FullCache.name, *policies])
        raise KvmnnError(
            f"unknown policy {name!r}: expected {FullCache.name} or one of {', '.join(policies)}{suggestion}"
        )
    return policies[name]


def create_policy(name: str, **options: Any) -> Policy:
    """The policy called `name` with its options, or `FullCache`; ``create(p.name, **p.options()) == p``.

    Raises
    ------
    KvmnnError
        For names and options that do not exist, and for values that the policy refuses.
    """
    policy = get_policy_class(name)
    option_names = sorted(field.name for field in fields(policy) if field.init)
    for option in options:
        if option not in option_names:
            suggestion = suggest(option, option_names)
            raise KvmnnError(
                f"{name} has no option {option!r}: expected {', '.join(option_names) or 'none'}{suggestion}"
            )
    return policy(**options)
