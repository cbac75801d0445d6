"""From scores to tokens: the units in which a scored policy selects, as kvpress' wrappers do.

``none``: the highest scores of each head. ``ada``: one budget for all heads of a layer. ``critical``: half of the
budget by scores, half by scores times what values weigh in the output; ``critical_ada`` is both. ``chunk``: in each
chunk of the text its share. ``chunkkv``: whole chunks, the same for all heads; ``entropy_chunkkv`` thins chunks out
whose score lies in few tokens. ``block``: block by block, as if the text came that way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, Protocol

import numpy as np

from ..dtypes import Floats, Indices
from .policy import LayerState, Selection
from .tensors import average_groups, widen
from .topk import argtopk_highest

WrapperName = Literal["none", "ada", "critical", "critical_ada", "chunk", "chunkkv", "entropy_chunkkv", "block"]

#: Tokens of a chunk or block, as kvpress has them.
DEFAULT_CHUNKS: Final = {"chunk": 1024, "chunkkv": 20, "entropy_chunkkv": 10, "block": 128}

_EPSILON = np.float32(1e-4)  # of `critical`, added to scores before they are multiplied
_FIRST_STAGE_RATIO = 0.5
_ENTROPY_EPSILON = np.float32(1e-8)
_THINNED_CHUNK = 4  # tokens that stay of a chunk whose score lies in few of them


class Scorer(Protocol):
    """A policy as its wrapper sees it."""

    @property
    def chunk(self) -> int | None: ...

    @property
    def wrapper(self) -> WrapperName: ...

    @property
    def safeguard(self) -> float: ...

    def compute_scores(self, layer: LayerState) -> Floats: ...

    def resolve_share(self, tokens: int) -> float: ...


def _select_tokens(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    return argtopk_highest(_score_tokens(scorer, layer), size)


def _select_across_heads(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    scores = _protect_share(scorer, _score_tokens(scorer, layer), size)
    return _split_by_head(scores, size)


def _select_critical(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    scores = _score_tokens(scorer, layer)
    num_first = min(max(int(size * _FIRST_STAGE_RATIO), 1), size)
    weighted = (scores + _EPSILON) * compute_output_norms(layer)
    np.put_along_axis(weighted, argtopk_highest(scores, num_first), np.inf, axis=1)
    return argtopk_highest(weighted, size)


def _select_critical_across_heads(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    scores = _protect_share(scorer, _score_tokens(scorer, layer), size)
    rows = _split_by_head(scores, size)
    weights, selection = compute_output_norms(layer), []
    for head, row in enumerate(rows):
        first = argtopk_highest(scores[head][None], int(len(row) * _FIRST_STAGE_RATIO))
        head_scores = scores[head].copy()
        head_scores[first[0]] = np.inf
        weighted = (head_scores + _EPSILON) * weights[head]
        selection.append(argtopk_highest(weighted[None], len(row))[0])
    return selection


def _select_in_chunks(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    chunk, share, parts = _resolve_chunk(scorer), scorer.resolve_share(layer.tokens), []
    for begin in range(0, layer.tokens, chunk):
        indices = np.arange(begin, min(begin + chunk, layer.tokens))
        part = take_tokens_of_layer(layer, np.broadcast_to(indices, (_count_heads(layer), len(indices))))
        num_kept = max(1, int(len(indices) * share))
        parts.append(begin + argtopk_highest(_score_tokens(scorer, part), num_kept))
    return np.concatenate(parts, axis=1)


def _select_chunks(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    chunk = _resolve_chunk(scorer)
    if layer.tokens < chunk:
        return _select_tokens(scorer, layer, size)
    scores = _score_tokens(scorer, layer).sum(axis=0)
    bounds = [(begin, min(begin + chunk, layer.tokens)) for begin in range(0, layer.tokens, chunk)]
    means = np.array([scores[begin:end].mean() for begin, end in bounds], np.float32)
    num_kept = max(1, int(len(bounds) * scorer.resolve_share(layer.tokens)))
    chunks = argtopk_highest(means[None], num_kept)[0]
    return _repeat_for_heads(np.concatenate([np.arange(*bounds[index]) for index in chunks]), layer)


def _select_chunks_by_entropy(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    chunk, tokens = _resolve_chunk(scorer), layer.tokens
    scores = _score_tokens(scorer, layer).sum(axis=0)
    budget = max(1, int(tokens * scorer.resolve_share(tokens)))
    bounds = [(begin, min(begin + chunk, tokens)) for begin in range(0, tokens, chunk)]
    means = np.array([scores[begin:end].mean() for begin, end in bounds], np.float32)
    entropies = np.array([_compute_entropy(scores[begin:end]) for begin, end in bounds], np.float32)
    is_thinned = (means >= _find_lower_median(means)) & (entropies < _find_lower_median(entropies))
    is_kept = np.zeros(tokens, np.bool_)
    for index in np.argsort(-means, kind="stable"):
        if budget <= 0:
            break
        begin, end = bounds[index]
        num_kept = min(end - begin, budget, _THINNED_CHUNK if is_thinned[index] else end - begin)
        is_kept[begin + argtopk_highest(scores[None, begin:end], num_kept)[0]] = True
        budget -= num_kept
    left_over = np.flatnonzero(~is_kept)
    is_kept[left_over[argtopk_highest(scores[None, left_over], min(max(budget, 0), len(left_over)))[0]]] = True
    return _repeat_for_heads(np.flatnonzero(is_kept), layer)


def _select_block_by_block(scorer: Scorer, layer: LayerState, size: int) -> Selection:
    block = _resolve_chunk(scorer)
    heads = _count_heads(layer)
    kept_indices = np.broadcast_to(np.arange(size), (heads, size))
    for begin in range(size, layer.tokens, block):
        new = np.arange(begin, min(begin + block, layer.tokens))
        candidates = np.concatenate([kept_indices, np.broadcast_to(new, (heads, len(new)))], axis=1)
        scores = _score_tokens(scorer, take_tokens_of_layer(layer, candidates))
        kept_indices = np.take_along_axis(candidates, argtopk_highest(scores, size), axis=1)
    return kept_indices


Selector = Callable[[Scorer, LayerState, int], Selection]

SELECTORS: Final[dict[WrapperName, Selector]] = {
    "none": _select_tokens,
    "ada": _select_across_heads,
    "critical": _select_critical,
    "critical_ada": _select_critical_across_heads,
    "chunk": _select_in_chunks,
    "chunkkv": _select_chunks,
    "entropy_chunkkv": _select_chunks_by_entropy,
    "block": _select_block_by_block,
}


def _score_tokens(scorer: Scorer, layer: LayerState) -> Floats:
    """Return the scores of the tokens, contiguous; NaN of those that are stored but not attended to."""
    scores = np.ascontiguousarray(scorer.compute_scores(layer), np.float32)
    return scores if layer.is_dead is None else np.where(layer.is_dead, np.float32(np.nan), scores)


def compute_output_norms(layer: LayerState) -> Floats:
    """Return the L1 norm of each token's part in the attention's output, averaged over groups: ``[kv_head, token]``."""
    assert layer.parameters is not None and layer.parameters.read_output_weights is not None
    weights, values = layer.parameters.read_output_weights(), widen(layer.values)
    group = len(weights) // len(values)
    norms = [np.abs(values[head // group] @ matrix).sum(axis=-1) for head, matrix in enumerate(weights)]
    return average_groups(np.stack(norms), len(values))


def take_tokens_of_layer(layer: LayerState, indices: Indices) -> LayerState:
    """Return the layer with these tokens of each head, ``[kv_head, kept]``; queries are taken if tokens are a run."""
    keys, values = (
        None if array is None else np.take_along_axis(array, indices[:, :, None], axis=1)
        for array in (layer.keys, layer.values)
    )
    positions = np.arange(layer.tokens) if layer.positions is None else layer.positions
    positions = np.take_along_axis(np.broadcast_to(positions, (len(indices), layer.tokens)), indices, axis=1)
    queries, num_seen = layer.queries, layer.num_seen
    if queries is not None and queries.shape[1] == layer.tokens:
        queries = queries[:, indices[0]]
        num_seen = int(positions[0, -1]) + 1
    return replace(
        layer,
        tokens=indices.shape[1],
        num_seen=num_seen,
        queries=queries,
        positions=positions,
        norms=None,
        is_dead=None,
        keys=keys,
        values=values,
    )


def take_tokens_of_cut_layer(layer: LayerState, indices: Indices) -> LayerState:
    """Return the layer with these tokens of each head, ``[kv_head, kept]``, and all of its queries."""
    if indices.shape[1] == layer.tokens:
        return layer
    return replace(take_tokens_of_layer(layer, indices), queries=layer.queries, num_seen=layer.num_seen)


def _protect_share(scorer: Scorer, scores: Floats, size: int) -> Floats:
    """Give the highest scores of each head, the share `safeguard` of its budget, the highest of all."""
    num_safe = int(size * scorer.safeguard)
    if scorer.safeguard > 0:
        num_safe = max(1, num_safe) if size else 0
    scores = scores.copy()
    np.put_along_axis(scores, argtopk_highest(scores, num_safe), np.inf, axis=1)
    return scores


def _split_by_head(scores: Floats, size: int) -> list[Indices]:
    """Return, for each head, its tokens among the ``heads * size`` highest of all heads."""
    heads, tokens = scores.shape
    flat = argtopk_highest(scores.reshape(1, -1), heads * size)[0]
    return [flat[flat // tokens == head] - head * tokens for head in range(heads)]


def _compute_entropy(scores: Floats) -> float:
    """Return the entropy of the shares that tokens have in the score of a chunk, 0 to 1."""
    if len(scores) == 1:
        return 0.0
    scores = scores - min(scores.min(), np.float32(0))
    shares = scores / (scores.sum() + _ENTROPY_EPSILON)
    entropy = -(shares * np.log(shares + _ENTROPY_EPSILON)).sum()
    return float(np.clip(entropy / np.float32(math.log(len(scores))), 0, 1))


def _find_lower_median(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _resolve_chunk(scorer: Scorer) -> int:
    return scorer.chunk or DEFAULT_CHUNKS[scorer.wrapper]


def _count_heads(layer: LayerState) -> int:
    return 0 if layer.keys is None else len(layer.keys)


def _repeat_for_heads(indices: Indices, layer: LayerState) -> Indices:
    return np.tile(indices.astype(np.int64), (_count_heads(layer), 1))
