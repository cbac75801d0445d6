"""Keep every token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import Policy
from .view import PolicyInput, Trigger


@dataclass(frozen=True, kw_only=True)
class FullCache(Policy):
    """The full cache, which eviction is compared with. LOSSLESS: it never acts, so no layer needs to be skipped."""

    name: ClassVar[str] = "full"
    budget_help = "it has none: all tokens stay"
    triggers: ClassVar[frozenset[Trigger]] = frozenset()

    skip_layers: tuple[int, ...] = field(default=(), init=False, repr=False)

    def select_tokens(self, state: PolicyInput) -> None:
        return None
