"""Scored policies that look at the latest queries: SnapKV, PyramidKV, Finch, TOVA and SimLayerKV."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_count, validate_int
from ..dtypes import Floats
from ..errors import KvmnnError
from .policy import LayerState
from .scored import ScoredPolicy, validate_share
from .tensors import (
    average_groups,
    average_neighbours,
    compute_window_attention,
    protect,
    widen,
)


@dataclass(frozen=True, kw_only=True)
class SnapKV(ScoredPolicy):
    """Keep the latest `window` tokens, and those before them that their queries attend to most.

    Paper: Li et al., "SnapKV", arXiv 2404.14469. Original: kvpress, `SnapKVPress`.

    Parameters
    ----------
    window
        The latest tokens, whose queries are observed.
    kernel
        Scores are the mean of so many neighbours, an odd number.

    Notes
    -----
    A score is the attention of the window's queries, averaged over them, over neighbours (0 beyond both ends) and over
    the query heads of the group. Attention is computed from queries and keys and scaled by ``1 / sqrt(head_dim)``.

    Where it differs from kvpress: a text shorter than the window has a smaller one instead of an error; in decoding the
    queries are those of the true positions, where kvpress rotates all by the current one; float32 for every cache; of
    equal scores, as of window tokens where the budget is smaller than the window, the older token stays.
    """

    name: ClassVar[str] = "snapkv"
    tensors = frozenset({"keys", "queries"})

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.window, f"{self.name}: window", 1)
        validate_int(self.kernel, f"{self.name}: kernel", 1)
        if self.kernel % 2 == 0:
            raise KvmnnError(f"{self.name}: kernel is {self.kernel}: expected an odd number")

    @property
    def query_window(self) -> int | None:
        return None if self.wrapper == "chunk" else self.window

    def compute_scores(self, layer: LayerState) -> Floats:
        attention = compute_window_attention(layer, self.window)
        window = attention.shape[1]
        scores = attention[..., : layer.tokens - window].mean(axis=1)
        return protect(average_groups(average_neighbours(scores, self.kernel), len(widen(layer.keys))), recent=window)


@dataclass(frozen=True, kw_only=True)
class TOVA(ScoredPolicy):
    """Keep the latest token and those that its query attends to most, the same in all heads.

    Paper: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104. Original: kvpress, `TOVAPress`.

    Parameters
    ----------
    budget, keep_ratio, phase, interval, wrapper
        As of `ScoredPolicy`; the paper cuts at every token (``phase="both", interval=1``).

    Notes
    -----
    Where it differs from kvpress: of equal scores the older token stays; float32 for every cache. As there, the latest
    token always stays, which the paper does not say.
    """

    name = "tova"
    tensors = frozenset({"keys", "queries"})

    @property
    def query_window(self) -> int | None:
        return None if self.wrapper == "chunk" else 1

    def compute_scores(self, layer: LayerState) -> Floats:
        attention = compute_window_attention(layer, 1)
        means = attention[..., : layer.tokens - attention.shape[1]].mean(axis=0)
        return protect(np.repeat(means, len(widen(layer.keys)), axis=0), recent=1)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """`SnapKV` with more tokens in the first layers than in the last.

    Paper: Cai et al., "PyramidKV", arXiv 2406.02069. Original: kvpress, `PyramidKVPress`.

    Parameters
    ----------
    budget, keep_ratio
        The mean of all layers.
    beta
        The last layer has about the budget over `beta`, at least 1.

    Notes
    -----
    Budgets fall linearly with the layer. Where the last layer's were smaller than the window, or the first one's larger
    than the text, all layers have the same.

    Where it differs from kvpress: as `SnapKV`; the budget may also be a number of tokens.
    """

    name = "pyramidkv"
    has_independent_layers = True

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.beta, f"{self.name}: beta", 1)

    def resolve_layer_budget(self, state: LayerState) -> int:
        tokens, uniform = state.tokens, self.resolve_budget(state.tokens)
        if state.parameters is None:
            raise KvmnnError(f"layer {state.layer}: {self.name} needs the number of layers, which only a model has")
        if uniform >= tokens or not uniform:
            return uniform
        mean = tokens * self.resolve_share(tokens)
        smallest = mean / self.beta
        largest = 2 * mean - smallest
        if largest >= tokens - self.window:
            largest = tokens - self.window
            smallest = 2 * mean - largest
        if not tokens >= largest >= smallest >= self.window:
            return max(1, round(mean))
        return round(largest - state.layer * (largest - smallest) / max(state.parameters.num_layers - 1, 1))


@dataclass(frozen=True, kw_only=True)
class Finch(ScoredPolicy):
    """Keep the latest `window` tokens, such as a question, and those before them that their queries attend to most.

    Paper: Corallo and Papotti, "FINCH", arXiv 2408.00167. Original: kvpress, `FinchPress`.

    Parameters
    ----------
    window
        The latest tokens, whose queries are observed.
    normalize
        Whether a query's attention is multiplied by the number of tokens that it could attend to.

    Notes
    -----
    Where it differs from kvpress: the window is a number, where kvpress takes what follows a delimiter; keys keep their
    positions; otherwise as `SnapKV`, without neighbours.
    """

    name = "finch"
    tensors = frozenset({"keys", "queries"})

    window: int = 64
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.window, f"{self.name}: window", 1)

    @property
    def query_window(self) -> int | None:
        return None if self.wrapper == "chunk" else self.window

    def compute_scores(self, layer: LayerState) -> Floats:
        attention = compute_window_attention(layer, self.window)
        window = attention.shape[1]
        attention = attention[..., : layer.tokens - window]
        if self.normalize:
            attention = attention * np.arange(layer.tokens - window, layer.tokens, dtype=np.float32)[:, np.newaxis]
        return protect(average_groups(attention.mean(axis=1), len(widen(layer.keys))), recent=window)


@dataclass(frozen=True, kw_only=True)
class SimLayerKV(ScoredPolicy):
    """Cut layers whose latest query attends mostly to the first and the latest tokens down to these; others keep all.

    Paper: Zhang et al., "SimLayerKV", arXiv 2410.13846. Original: kvpress, `SimLayerKVPress`.

    Parameters
    ----------
    budget, keep_ratio
        Tokens that stay in a layer that is cut.
    sink
        First tokens of the budget.
    threshold
        Attention to those tokens, 0 to 1, above which a layer is cut.

    Notes
    -----
    Where it differs from kvpress: `budget` is what stays, ``n_initial + n_recent - 1`` there; the threshold is 0.9
    instead of 1, which cuts nothing.
    """

    name = "simlayerkv"
    tensors = frozenset({"keys", "queries"})
    has_independent_layers = True

    sink: int = 4
    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)
        validate_share(f"{self.name}: threshold", self.threshold)
        if self.wrapper != "none":
            raise KvmnnError(f"{self.name}: wrapper is {self.wrapper!r}: expected none, as it does not rank tokens")

    @property
    def query_window(self) -> int | None:
        return 1

    def resolve_layer_budget(self, state: LayerState) -> int:
        size, tokens = self.resolve_budget(state.tokens), state.tokens
        if tokens <= size + 2 or not size:
            return tokens if size else 0
        attention = compute_window_attention(state, 1)[:, 0, : tokens - 1].mean(axis=0)
        num_recent = size - min(self.sink, size) + 1
        is_lazy = attention[: self.sink].sum() + attention[-num_recent:].sum() > self.threshold
        return size if is_lazy else tokens

    def compute_scores(self, layer: LayerState) -> Floats:
        scores = np.arange(layer.tokens, dtype=np.float32)
        scores[: self.sink] = layer.tokens
        return np.tile(scores, (layer.num_key_rows, 1))
