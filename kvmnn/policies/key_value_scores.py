"""Scored policies that look at keys and values: random, KeyDiff, LagKV, CUR, leverage scores and Q-Filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._util.validation import validate_count
from ..dtypes import Floats
from .policy import LayerState
from .scored import ScoredPolicy
from .tensors import widen


@dataclass(frozen=True, kw_only=True)
class RandomTokens(ScoredPolicy):
    """Keep random tokens of each KV head: the floor that every other policy has to exceed.

    Paper: a baseline of many, arXiv 2306.14048 (H2O) among them. Original: kvpress, `RandomPress`.

    Parameters
    ----------
    seed
        Seed of MT19937.

    Notes
    -----
    Scores are the float32 numbers that torch draws on a CPU from a generator of this seed: the low 24 bits of each
    word. As in kvpress with a seed, every layer and every cut draws the same numbers, so layers keep the same tokens.

    Where it differs from kvpress: there is always a seed, and numbers are float32 for every cache.
    """

    name = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: seed", self.seed)

    def compute_scores(self, layer: LayerState) -> Floats:
        assert layer.keys is not None
        words = np.random.RandomState(self.seed % 2**32).randint(0, 2**32, layer.keys.shape[:2], np.uint32)
        return (words & np.uint32(0xFFFFFF)).astype(np.float32) / np.float32(1 << 24)


@dataclass(frozen=True, kw_only=True)
class KeyDiff(ScoredPolicy):
    """Keep the tokens whose keys resemble the mean key of their head least.

    Paper: Park et al., "KeyDiff", arXiv 2504.15364. Original: kvpress, `KeyDiffPress`.

    Parameters
    ----------
    budget, keep_ratio, phase, interval, wrapper
        As of `ScoredPolicy`; the paper cuts block by block (``wrapper="block"``).

    Notes
    -----
    A score is the negative cosine between a key and the mean of the head's keys of length 1.

    Where it differs from kvpress: float32 for every cache; of equal scores the older token stays. No token is
    protected, sinks included, as there.
    """

    name = "keydiff"

    def compute_scores(self, layer: LayerState) -> Floats:
        keys = widen(layer.keys)
        lengths = np.linalg.norm(keys, axis=-1, keepdims=True)
        anchor = (keys / np.maximum(lengths, 1e-12)).mean(axis=1, keepdims=True)
        anchor_length = np.maximum(np.linalg.norm(anchor, axis=-1), 1e-8)
        cosines: Floats = (keys * anchor).sum(axis=-1) / (np.maximum(lengths[..., 0], 1e-8) * anchor_length)
        return -cosines
