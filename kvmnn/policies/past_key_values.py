"""The two functions of the l2_compress / KnormPress project, on caches as its callers hold them.

They are `L2Ratio` and `L2Fixed` under the project's names and with its arguments, for scripts that were written against
it. Arrays may be numpy's or tensors of another library, which is not imported: what is asked of them is ``shape``,
indexing by arrays, and a way to numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Floats
from ..errors import KvmnnError
from .base import Policy
from .l2_fixed import L2Fixed, SelectionStrategy
from .l2_ratio import L2Ratio
from .ranking import compute_key_norms
from .view import PolicyInput

KVPairs = list[tuple[Any, Any]]
"""K and V of each layer."""


def l2_compress(
    past_key_values: Any, keep_ratio: float = 1.0, prune_after: int = 1000, skip_layers: Iterable[int] = (0, 1)
) -> KVPairs:
    """Keep the share `keep_ratio` of the tokens of every layer: those whose keys have the lowest norms.

    Parameters
    ----------
    past_key_values
        A pair of K and V for each layer, ``[batch, kv_head, token, head_dim]``; or a cache of transformers, whose
        layers have `keys` and `values`. Nothing of it is changed. numpy arrays are float16, float32, float64 or
        uint16 (bf16).
    keep_ratio
        1 or more keeps everything. The number of tokens is rounded up.
    prune_after
        Layers with at most this many tokens are left alone.
    skip_layers
        So are these.

    Returns
    -------
    list of pairs
        Arrays of the kind and type that came in, tokens in temporal order, each head of each sequence with its own.
        Layers that lose nothing are handed back as they are. ``DynamicCache(pairs)`` makes a cache of transformers 5
        of them.

    Raises
    ------
    KvmnnError
        For other shapes, and for options that the policy refuses.
    TypeError
        For arrays of other types.

    Notes
    -----
    The policy's page says where it differs from the project (`L2Ratio`): norms are float32, of equal ones the older
    token stays. True positions must go with the tokens: K carries its rotary position, but a model that is asked for
    the next token has to be told its place in the text, not the length of what is stored.
    """
    share = float(min(keep_ratio, 1.0)) if isinstance(keep_ratio, int | float) else keep_ratio
    return _compress_layers(
        past_key_values, L2Ratio(keep_ratio=share, prune_after=prune_after, skip_layers=tuple(skip_layers))
    )


def fix_size_l2_compress(
    past_key_values: Any,
    fix_kv_size: int = 1024,
    keep_ratio: float = 0.0,
    strategy: SelectionStrategy = "keep_low",
    skip_layers: Iterable[int] = (0, 1),
    *,
    generator: np.random.Generator | None = None,
) -> KVPairs:
    """Keep `fix_kv_size` tokens of every layer: the latest, and of the older ones those that `strategy` says.

    Parameters
    ----------
    past_key_values, skip_layers
        As for `l2_compress`.
    fix_kv_size
        Tokens that stay; layers with no more are left alone.
    keep_ratio
        Share of them that is protected because it is the latest, rounded down. (`L2Fixed` calls it recent_ratio.)
    strategy
        ``"keep_low"`` or ``"keep_high"`` norms of the keys, or ``"random"``.
    generator
        What ``"random"`` draws from; without one every call draws anew.

    Returns
    -------
    list of pairs
        As `l2_compress`.

    Raises
    ------
    KvmnnError, TypeError
        As `l2_compress`.
    """
    random_generator = (generator or np.random.default_rng()) if strategy == "random" else None
    policy = L2Fixed(
        budget=fix_kv_size,
        recent_ratio=keep_ratio,
        strategy=strategy,
        skip_layers=tuple(skip_layers),
        generator=random_generator,
    )
    return _compress_layers(past_key_values, policy)


def _compress_layers(past_key_values: Any, policy: Policy) -> KVPairs:
    return [_compress_layer(policy, layer, *pair) for layer, pair in enumerate(_list_kv_pairs(past_key_values))]


def _list_kv_pairs(past_key_values: Any) -> KVPairs:
    layers = getattr(past_key_values, "layers", past_key_values)
    pairs: KVPairs = []
    for number, layer in enumerate(layers):
        pair = (layer.keys, layer.values) if hasattr(layer, "values") and hasattr(layer, "keys") else layer
        if not isinstance(pair, Sequence) or len(pair) < 2:
            raise KvmnnError(f"layer {number}: found a {type(layer).__name__}, expected a pair of keys and values")
        pairs.append((pair[0], pair[1]))
    return pairs


def _compress_layer(policy: Policy, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
    shapes = [tuple(getattr(array, "shape", ())) for array in (keys, values)]
    if len(shapes[0]) != 4 or len(shapes[1]) != 4 or shapes[0][:3] != shapes[1][:3]:
        shape_text = " and ".join(str(list(shape)) for shape in shapes)
        raise KvmnnError(f"layer {layer}: shapes {shape_text}: expected [batch, kv_head, token, head_dim] for both")
    batch, heads, tokens, _ = shapes[0]
    selections = [policy.select(_LazySequence(tokens=tokens, layer=layer, keys=keys[i])) for i in range(batch)]
    rows = [row for row in selections if row is not None]  # of a batch, whose sequences are equally long, all or none
    if not rows:
        return keys, values
    selection_index = np.arange(batch)[:, None, None], np.arange(heads)[None, :, None], np.stack(rows)
    return keys[selection_index], values[selection_index]


@dataclass(frozen=True, eq=False, kw_only=True)
class _LazySequence(PolicyInput):
    """One sequence of a layer, whose keys are looked at only where a policy asks for them."""

    keys: Any

    @property
    def has_norms(self) -> bool:
        return True

    @property
    def num_key_rows(self) -> int:
        return int(self.keys.shape[0])

    def get_key_norms(self, num_tokens: int | None = None) -> Floats:
        return compute_key_norms(_to_numpy(self.keys)[:, :num_tokens])


def _to_numpy(array: Any) -> npt.NDArray[Any]:
    """As numpy's; tensors of torch by way of float32, because numpy has no bfloat16."""
    if not isinstance(array, np.ndarray):
        array = array.detach().float().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)
    converted: npt.NDArray[Any] = array
    return converted.astype(np.float32) if converted.dtype == np.float64 else converted
