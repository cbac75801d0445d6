"""How the next token is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..dtypes import Floats
from ..errors import KvmnnError


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen.

    Parameters
    ----------
    temperature
        Logits are divided by it; 0 takes the most probable token (the first of equal ones).
    top_k
        Only this many of the most probable tokens are drawn from; None for all.
    seed
        Of the draws. Each token takes one number from it, so that runs with equal logits draw equal tokens.

    Raises
    ------
    KvmnnError
        For a temperature below 0 or that is no number, and a `top_k` or `seed` out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise KvmnnError(f"temperature is {self.temperature}: expected a finite number, at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise KvmnnError(f"top_k is {self.top_k}: expected at least 1")
        if self.seed < 0:
            raise KvmnnError(f"seed is {self.seed}: expected at least 0")

    def create_selector(self) -> Callable[[Floats], int]:
        """A function from logits ``[vocabulary]`` to a token; it remembers what it has drawn."""
        generator = np.random.default_rng(self.seed)

        def select_token(logits: Floats) -> int:
            if not np.isfinite(logits.max()):  # NaN is the largest
                raise KvmnnError("the model's logits are no numbers (NaN or infinite)")
            if self.temperature == 0:
                return int(logits.argmax())
            order = np.argsort(-logits, kind="stable")[: self.top_k]
            top_logits = logits[order].astype(np.float64)
            with np.errstate(over="ignore"):  # a tiny temperature gives -inf, whose weight is 0
                weights = np.exp((top_logits - top_logits[0]) / self.temperature)
            sums = np.cumsum(weights)
            return int(order[min(np.searchsorted(sums, generator.random() * sums[-1], side="right"), len(order) - 1)])

        return select_token
