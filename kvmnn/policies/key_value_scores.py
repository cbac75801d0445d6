"""Scored policies that look at keys and values: random, KeyDiff, LagKV, CUR and leverage scores."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_count, validate_int
from ..dtypes import Floats
from ..errors import KvmnnError
from .policy import LayerState
from .scored import ScoredPolicy, TensorName
from .tensors import compute_unrotated_keys, softmax, standardize, widen


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


@dataclass(frozen=True, kw_only=True)
class LagKV(ScoredPolicy):
    """Keep the first tokens, the latest ones, and those whose K and V stand out from the chunk that follows theirs.

    Paper: Liang et al., "LagKV", arXiv 2504.04704. Original: kvpress, `LagKVPress`.

    Parameters
    ----------
    sink
        First tokens that always stay.
    lag
        Tokens of a chunk. The last whole chunk and what follows it always stay.
    cross
        Whether scores of different chunks are compared; otherwise each chunk keeps its share.

    Notes
    -----
    Each channel is scaled to its range in the following chunk; a score is the softmax, within the chunk, of the
    deviation over the channels, the mean of K's and V's.

    Where it differs from kvpress: where the budget is smaller than what always stays, the older tokens of that stay
    (kvpress leaves it open); in decoding chunks are in temporal order, where kvpress' cache is in that of its scores;
    float32 for every cache.
    """

    name = "lagkv"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values"})

    sink: int = 4
    lag: int = 128
    cross: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)
        validate_int(self.lag, f"{self.name}: lag", 1)

    def compute_scores(self, layer: LayerState) -> Floats:
        keys, values = widen(layer.keys), widen(layer.values)
        heads, tokens, _ = keys.shape
        scores = np.ones((heads, tokens), np.float32)
        num_later = tokens - self.sink
        if num_later < 2 * self.lag:
            scores[:, self.sink :] = np.arange(num_later) / np.float32(max(num_later, 1))
            return scores
        end = self.sink + num_later // self.lag * self.lag
        chunk_scores = np.zeros((heads, num_later // self.lag - 1, self.lag), np.float32)
        for array in (keys, values):
            chunks = array[:, self.sink : end].reshape(heads, -1, self.lag, array.shape[2])
            lows, highs = (bound[:, 1:, np.newaxis] for bound in (chunks.min(axis=2), chunks.max(axis=2)))
            chunk_scores += softmax(((chunks[:, :-1] - lows) / (highs - lows)).std(axis=-1, ddof=1)) / np.float32(2)
        if not self.cross:
            chunk_scores = chunk_scores.argsort(axis=-1).argsort(axis=-1) / np.float32(self.lag)
        scores[:, self.sink : end - self.lag] = chunk_scores.reshape(heads, -1)
        return scores


@dataclass(frozen=True, kw_only=True)
class CUR(ScoredPolicy):
    """Keep the first tokens, and those whose K and V are long for their neighbourhood.

    Paper: Sengupta et al., "CurDKV", arXiv 2509.15038. Original: kvpress, `CURPress`.

    Parameters
    ----------
    sink
        First tokens that always stay.
    leverage
        Which squared lengths count: ``"product"`` of K's and V's, their ``"mean"``, ``"key"`` or ``"value"``.
    neighbourhood
        Tokens of which a length is a share; 0: of the length itself.

    Notes
    -----
    Where it differs from kvpress: no random projection; of equal scores the older token stays; float32 for every cache.
    """

    name = "cur"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values"})

    sink: int = 4
    leverage: Literal["product", "mean", "key", "value"] = "product"
    neighbourhood: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)
        validate_count(f"{self.name}: neighbourhood", self.neighbourhood)
        choices = ("product", "mean", "key", "value")
        if self.leverage not in choices:
            raise KvmnnError(f"{self.name}: leverage is {self.leverage!r}: expected one of {', '.join(choices)}")

    def compute_scores(self, layer: LayerState) -> Floats:
        key_shares, value_shares = (
            self._compare_with_neighbours((widen(array) ** 2).sum(axis=-1)) for array in (layer.keys, layer.values)
        )
        scores: Floats = {
            "product": key_shares * value_shares,
            "mean": (key_shares + value_shares) / 2,
            "key": key_shares,
            "value": value_shares,
        }[self.leverage]
        scores = scores / scores.sum(axis=-1, keepdims=True)
        scores[:, : self.sink] = 1
        return scores

    def _compare_with_neighbours(self, lengths: Floats) -> Floats:
        if not self.neighbourhood:
            return lengths
        heads, tokens = lengths.shape
        parts = np.pad(lengths, [(0, 0), (0, -tokens % self.neighbourhood)]).reshape(heads, -1, self.neighbourhood)
        shares: Floats = (parts / parts.sum(axis=-1, keepdims=True)).reshape(heads, -1)[:, :tokens]
        return shares


@dataclass(frozen=True, kw_only=True)
class Leverage(ScoredPolicy):
    """Keep the tokens whose keys, before their rotation, explain what others do not (statistical leverage).

    Paper: Chari and Van Durme, "Compactor", arXiv 2507.08143. Original: kvpress, `LeverageScorePress`.

    Parameters
    ----------
    sketch
        Dimensions to which keys are projected at random.
    seed
        Seed of the projection, with the layer's number.

    Notes
    -----
    Where it differs from kvpress: the projection is numpy's and repeatable (with the same projection it keeps the same
    tokens); decoding is allowed; of equal scores the older token stays.
    """

    name = "leverage"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "rotation"})

    sketch: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.sketch, f"{self.name}: sketch", 1)
        validate_count(f"{self.name}: seed", self.seed)

    def compute_scores(self, layer: LayerState) -> Floats:
        return compute_leverage(layer, self.sketch, self.seed)


def draw_projection(heads: int, head_dim: int, sketch: int, seed: int, layer: int) -> Floats:
    """Draw normal numbers ``[kv_head, head_dim, sketch]``."""
    return np.random.default_rng([seed, layer]).standard_normal((heads, head_dim, sketch), np.float32)


def compute_leverage(layer: LayerState, sketch: int, seed: int) -> Floats:
    """Return standardized leverage scores of the unrotated keys, projected at random: ``[kv_head, token]``."""
    keys = compute_unrotated_keys(layer)
    heads, _, head_dim = keys.shape
    projection = draw_projection(heads, head_dim, sketch, seed, layer.layer) * np.float32(1 / np.sqrt(sketch))
    rows = (keys - keys.mean(axis=1, keepdims=True)) @ projection
    products = rows.transpose(0, 2, 1) @ rows + np.float32(1e-2) * np.eye(sketch, dtype=np.float32)
    if not np.isfinite(products).all():
        return np.full(keys.shape[:2], np.nan, np.float32)
    solution = np.linalg.solve(products, rows.transpose(0, 2, 1))
    return standardize(np.maximum((rows * solution.transpose(0, 2, 1)).sum(axis=-1), 0))
