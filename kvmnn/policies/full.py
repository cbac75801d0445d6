"""Keep every token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import Policy
from .view import Moment, View


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """The full cache, which eviction is compared with. LOSSLESS: it never acts, so no layer needs to be skipped."""

    name: ClassVar[str] = "full"
    budget_means = "it has none: all tokens stay"
    moments: ClassVar[frozenset[Moment]] = frozenset()

    skip_layers: tuple[int, ...] = field(default=(), init=False, repr=False)

    def rule(self, view: View) -> None:
        return None
