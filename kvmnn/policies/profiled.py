"""Scored policies that know a model beforehand: by the queries that `kvmnn profile make` measured on texts."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_count
from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from ..profiles import Profile
from .policy import LayerState, PolicyInput
from .prompt_scores import ExpectedAttention
from .scored import ScoredPolicy, TensorName
from .tensors import widen

TableName = Literal["mean", "covariance", "filter", "score"]


@dataclass(frozen=True, kw_only=True)
class ProfiledPolicy(ScoredPolicy):
    """A policy that reads tables of a profile.

    Parameters
    ----------
    profile
        The file (`kvmnn profile make MODEL --text TEXTS -o FILE.kvmp`).
    """

    #: The tables that `read_table` is asked for.
    table_names: ClassVar[tuple[TableName, ...]] = ()

    profile: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.profile:
            raise KvmnnError(f"{self.name}: expected profile=FILE, which kvmnn profile make writes")

    def check_layers(self, num_layers: int) -> None:
        super().check_layers(num_layers)
        profile = _read_profile(self.profile, _get_version(self.profile))
        if len(profile.layers) != num_layers:
            raise KvmnnError(
                f"{self.profile}: is the profile of another model, of {pluralize(len(profile.layers), 'layer')}: "
                f"expected {num_layers}"
            )
        for name in self.table_names:
            if any(f"queries/{layer}/key/{name}" not in profile.arrays for layer in range(num_layers)):
                raise KvmnnError(
                    f"{self.profile}: has no {name} of queries, which {self.name} reads (profiles of a model that "
                    "returns queries have it)"
                )

    def read_table(self, state: PolicyInput, name: TableName, shape: tuple[int, ...]) -> Floats:
        """Return a table of the layer, float32; `KvmnnError` where it is missing or of another model."""
        profile = _read_profile(self.profile, _get_version(self.profile))
        try:
            return profile.get_array(f"queries/{state.layer}/key/{name}", "float32", shape)
        except KvmnnError as error:
            raise KvmnnError(f"{self.profile}: {error} (profiles of a model that returns queries have it)") from None


def _get_version(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0  # `Profile.read` says what is wrong
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _read_profile(path: str, version: tuple[int, int]) -> Profile:
    return Profile.read(path)


@dataclass(frozen=True, kw_only=True)
class QFilter(ProfiledPolicy):
    """Keep the tokens whose keys point most to where the queries of a model point.

    Paper: Godey et al., "Q-Filters", arXiv 2503.02812. Original: kvpress, `QFilterPress`.

    Parameters
    ----------
    profile
        As of `ProfiledPolicy`.

    Notes
    -----
    A filter is the first right singular vector of a head's rotated queries, turned so that their mean product with it
    is positive, averaged over the query heads of a group. A score is the product of key and filter.

    Where it differs from kvpress: filters come from a profile instead of a download, with the opposite sign; with the
    same filters it keeps the same tokens. Of equal scores the older token stays.
    """

    name = "qfilter"
    table_names = ("filter",)

    def compute_scores(self, layer: LayerState) -> Floats:
        keys = widen(layer.keys)
        filters = self.read_table(layer, "filter", (len(keys), keys.shape[2]))
        scores: Floats = (filters[:, np.newaxis] * keys).sum(axis=-1)
        return scores


@dataclass(frozen=True, kw_only=True)
class ExpectedAttentionStats(ExpectedAttention, ProfiledPolicy):
    """`ExpectedAttention` by the queries of a profile instead of those of the prompt.

    Paper: Devoto et al., "Expected Attention", arXiv 2510.00636. Original: kvpress, `ExpectedAttentionStatsPress`.

    Parameters
    ----------
    profile
        As of `ProfiledPolicy`.
    future, sink, covariance, value_norm, epsilon
        As of `ExpectedAttention`.

    Notes
    -----
    Where it differs from kvpress: mean and covariance come from a profile instead of a download; with the same numbers
    it keeps the same tokens. Otherwise as `ExpectedAttention`.
    """

    name = "expected_attention_stats"
    table_names = ("mean", "covariance")
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values", "rotation"})

    def describe_queries(self, layer: LayerState) -> tuple[Floats, Floats]:
        head_dim, heads = widen(layer.keys).shape[2], self._count_query_heads(layer)
        mean = self.read_table(layer, "mean", (heads, head_dim))
        return mean[:, np.newaxis], self.read_table(layer, "covariance", (heads, head_dim, head_dim))

    def _count_query_heads(self, layer: LayerState) -> int:
        profile = _read_profile(self.profile, _get_version(self.profile))
        table = profile.arrays.get(f"queries/{layer.layer}/key/mean")
        return layer.num_key_rows if table is None else len(table)


@dataclass(frozen=True, kw_only=True)
class DuoAttention(ScoredPolicy):
    """Keep all tokens in some heads of the model, and the first and the latest ones in the others.

    Paper: Xiao et al., "DuoAttention", arXiv 2410.10819. Original: kvpress, `DuoAttentionPress`.

    Parameters
    ----------
    budget, keep_ratio
        Share of the model's KV heads that keep all tokens: those of the highest scores.
    pattern
        Scores of the heads: ``full_attention_heads.tsv`` of the paper's project, a row for each layer; or a profile.
    sink, recent
        First and latest tokens that stay in the other heads.

    Notes
    -----
    Scores in a profile are kvpress' estimate: how evenly a query that is a head's mean attends to 500 keys that are the
    mean of its keys, at their positions.

    Where it differs from kvpress: patterns are files, not downloads; in decoding heads are cut as well. Of equal scores
    those of the first heads count as lower. With the same scores it keeps the same tokens.
    """

    name = "duo_attention"
    has_independent_layers = True
    budget_help = "the share of the model's KV heads that keep all tokens"

    pattern: str = ""
    sink: int = 128
    recent: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise KvmnnError(f"{self.name}: expected pattern=FILE, a profile or a .tsv of scores of heads")
        if self.wrapper != "none":
            raise KvmnnError(f"{self.name}: wrapper is {self.wrapper!r}: expected none, as it does not rank tokens")
        for name in ("sink", "recent"):
            validate_count(f"{self.name}: {name}", getattr(self, name))

    def check_layers(self, num_layers: int) -> None:
        super().check_layers(num_layers)
        scores = _read_pattern(self.pattern, _get_version(self.pattern))
        if len(scores) != num_layers:
            raise KvmnnError(
                f"{self.pattern}: has scores of the heads of {pluralize(len(scores), 'layer')}: expected {num_layers}"
            )

    def compute_scores(self, layer: LayerState) -> Floats:
        positions = np.broadcast_to(
            np.arange(layer.tokens) if layer.positions is None else layer.positions, (layer.num_key_rows, layer.tokens)
        )
        num_seen = layer.tokens if layer.num_seen is None else layer.num_seen
        is_kept = (positions < self.sink) | (positions >= num_seen - self.recent)
        is_kept |= ~self._find_streaming_heads(layer)[:, np.newaxis]
        return (is_kept if layer.is_dead is None else is_kept & ~layer.is_dead).astype(np.float32)

    def select_tokens(self, state: PolicyInput) -> list[Indices]:
        return [np.flatnonzero(row) for row in self.compute_scores(self._check_tensors(state))]

    def _find_streaming_heads(self, layer: LayerState) -> npt.NDArray[np.bool_]:
        """Return which heads of the layer keep the first and the latest tokens only, ``[kv_head]``."""
        scores = _read_pattern(self.pattern, _get_version(self.pattern))
        if layer.layer >= len(scores) or scores.shape[1] != layer.num_key_rows:
            raise KvmnnError(
                f"{self.pattern}: has scores of {list(scores.shape)} layers and heads: expected layer {layer.layer} of "
                f"{layer.num_key_rows} heads"
            )
        count = round(scores.size * (1 - self.resolve_share(layer.tokens)))
        is_streaming = np.zeros(scores.size, np.bool_)
        is_streaming[np.argsort(scores, axis=None, kind="stable")[:count]] = True
        layer_heads: npt.NDArray[np.bool_] = is_streaming.reshape(scores.shape)[layer.layer]
        return layer_heads


_MAX_PATTERN_BYTES = 1 << 20


@functools.lru_cache(maxsize=2)
def _read_pattern(path: str, version: tuple[int, int]) -> npt.NDArray[Any]:
    """Return scores of heads, ``[layer, kv_head]``."""
    if not path.endswith(".tsv"):
        profile = _read_profile(path, version)
        names = [f"queries/{layer}/key/score" for layer in range(len(profile.layers))]
        shapes = {profile.arrays[name].shape if name in profile.arrays else None for name in names}
        if len(shapes) > 1 or None in shapes:
            raise KvmnnError(f"{path}: has no scores of heads (profiles of a model that returns queries have them)")
        return np.stack([profile.arrays[name] for name in names])
    if version[0] > _MAX_PATTERN_BYTES:
        raise KvmnnError(f"{path}: has {version[0]:,} bytes: expected at most {_MAX_PATTERN_BYTES:,}")
    try:
        text = Path(path).read_text(encoding="utf-8")
        rows = [[float(value) for value in line.split("\t")] for line in text.splitlines() if line]
        scores = np.array(rows, np.float64)
    except (OSError, ValueError) as error:
        raise KvmnnError(f"{path}: expected rows of numbers between tabs: {error}") from None
    if scores.ndim != 2 or not np.isfinite(scores).all():
        raise KvmnnError(f"{path}: expected a row of as many finite numbers for each layer")
    return np.clip(scores, 0, 1)  # as the project does
