"""Policies that keep tokens by the norm of their keys, as L2Compress and kvpress do.

`L2Ratio` and `L2Fixed` are also available as the two functions of the l2_compress project. Arrays may be numpy's or
tensors of another library, which is not imported: they need ``shape``, indexing by arrays, and conversion to numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_count, validate_fraction
from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from .policy import BudgetedPolicy, Policy, PolicyInput
from .topk import argtopk_lowest, compute_key_norms, select_middle_topk, sort_by_value


@dataclass(frozen=True, kw_only=True)
class KNorm(BudgetedPolicy):
    """Keep the tokens of the prompt with the lowest key norms, lowest first; decoding evicts nothing.

    Paper: arXiv 2406.11430. Original: kvpress, `KnormPress`.

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down in float64.

    Notes
    -----
    Where it differs from kvpress: norms are float32 for every cache and of equal norms the older token comes first, so
    that the result is defined; NaN comes last; at least one token stays; the budget may also be a number of tokens.
    """

    name = "knorm"
    requires = "keys"
    is_rounded_up = False
    prompt_only = True
    budget_help = "the tokens of the prompt that stay; later ones all stay"

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if size >= state.tokens:
            return None
        norms = state.get_key_norms()
        return sort_by_value(norms, argtopk_lowest(norms, size))


SelectionStrategy = Literal["keep_low", "keep_high", "random"]


@dataclass(frozen=True, kw_only=True)
class L2Fixed(BudgetedPolicy):
    """Keep `budget` tokens per KV head, the latest of them protected, the others selected by key norm.

    Paper: arXiv 2406.11430 (Devoto et al., the norm criterion). Original: `fix_size_l2_compress` of the
    l2_compress / KnormPress project, which adds the protected part and the fixed size.

    Parameters
    ----------
    budget
        Tokens that stay, 1024 by default.
    recent_ratio
        Share of the budget that is protected: ``int(budget * recent_ratio)`` latest tokens (truncated in float64, so
        0.29 of 100 is 28). 0 by default: norms alone decide, and the newest token can go at once; the project's own
        runs protect 0.2. 1 keeps the latest tokens only; above 1 more than `budget` stay. The original calls it
        keep_ratio.
    strategy
        Which of the older tokens stay: ``"keep_low"`` or ``"keep_high"`` norms, or ``"random"``: uniformly without
        replacement, drawn again for each head and call.
    generator
        For ``"random"`` only, and required there.

    Notes
    -----
    Where it differs from the original:

    * ``random`` takes a generator instead of the global one, so that a run can be repeated; draws are numpy's, not
      torch's. An unknown strategy is refused when the policy is created.
    * Norms are float32 for every cache, of equal norms the older token stays, and a NaN norm goes first for
      ``keep_high`` too.
    * The budget may be a share of the tokens (`keep_ratio`). A budget of 0 keeps nothing.
    """

    name: ClassVar[str] = "l2_fixed"
    requires = "keys"
    default_budget = 1024
    budget_help = "the tokens that stay, `recent_ratio` of them the latest"

    recent_ratio: float = 0.0
    strategy: SelectionStrategy = "keep_low"
    skip_layers: tuple[int, ...] = (0, 1)
    generator: np.random.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fraction(f"{self.name}: recent_ratio", self.recent_ratio)
        if self.strategy not in get_args(SelectionStrategy):
            raise KvmnnError(
                f"{self.name}: strategy is {self.strategy!r}: expected one of {', '.join(get_args(SelectionStrategy))}"
            )
        if (self.strategy == "random") != isinstance(self.generator, np.random.Generator):
            raise KvmnnError(f"{self.name}: strategy 'random', and no other, needs generator=numpy.random.Generator")

    @property
    def requires_norms(self) -> bool:
        return self.strategy != "random"

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        num_recent = min(int(size * self.recent_ratio), state.tokens)
        num_selected = max(size - num_recent, 0)
        num_candidates = state.tokens - num_recent if num_selected else 0
        if self.generator is not None:
            values: Floats = self.generator.random((state.num_key_rows, num_candidates), np.float32)
        else:
            values = state.get_key_norms(num_candidates)
        highest = self.strategy == "keep_high"
        return select_middle_topk(values, state.tokens, sink=0, count=num_selected, recent=num_recent, highest=highest)


@dataclass(frozen=True, kw_only=True)
class L2Ratio(BudgetedPolicy):
    """Keep, in each KV head, the tokens with the lowest key norms.

    Paper: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.
    Original: the paper's l2compress; `l2_compress` of the l2_compress / KnormPress project.

    Parameters
    ----------
    prune_after
        The form ``"seed"`` cuts above this many tokens, ``"original"`` from this many on.
    form
        ``"seed"``, the project's: what stays is stored in temporal order, and a cache that would lose nothing is left
        alone. ``"original"``, the paper's: it is stored by ascending norm, even where nothing is lost.
    skip_layers
        The project's default is 0 and 1; `from_paper` has none.

    Notes
    -----
    Where it differs from the originals:

    * Norms are float32 for every cache; the originals compute them in the cache's type, where float16 rounds many norms
      to the same value and leaves the choice among them to the sort.
    * Of equal norms the older token stays; the originals promise no order. A NaN norm goes first.
    * As in both originals, the newest token competes like any other: it can go at once.
    * The order of storage changes nothing for keys that already carry their rotary position, only what later rules
      call recent; the gain that the project ascribes to it cannot come from attention.
    """

    name: ClassVar[str] = "l2_ratio"
    requires = "keys"
    budget_help = "the tokens that stay where more than `prune_after` are stored; up to there all stay"

    prune_after: int = 1000
    form: Literal["seed", "original"] = "seed"
    skip_layers: tuple[int, ...] = (0, 1)

    @classmethod
    def from_paper(
        cls, keep_ratio: float = 1.0, *, prune_after: int = 2048, skip_layers: tuple[int, ...] = ()
    ) -> L2Ratio:
        """Create the policy of the paper's own code, with its defaults."""
        return cls(keep_ratio=keep_ratio, prune_after=prune_after, skip_layers=skip_layers, form="original")

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: prune_after", self.prune_after)
        if self.form not in ("seed", "original"):
            raise KvmnnError(f"{self.name}: form is {self.form!r}: expected 'seed' or 'original'")

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        if tokens < self.prune_after or (tokens == self.prune_after and self.form == "seed"):
            return (
                f"it cuts above prune_after {self.prune_after:,}, the text has {pluralize(tokens, 'token')}: lower it"
            )
        return super().explain_no_eviction(prompt_tokens, tokens)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = min(self.resolve_budget(state.tokens), state.tokens)
        if self.form == "original":
            keeps_all = state.tokens < self.prune_after
        else:
            keeps_all = state.tokens <= self.prune_after or size == state.tokens
        if keeps_all:
            return None
        norms = state.get_key_norms()
        indices = argtopk_lowest(norms, size)
        return sort_by_value(norms, indices) if self.form == "original" else indices


KVPairs = list[tuple[Any, Any]]  # K and V of each layer


def l2_compress(
    past_key_values: Any, keep_ratio: float = 1.0, prune_after: int = 1000, skip_layers: Iterable[int] = (0, 1)
) -> KVPairs:
    """Keep the share `keep_ratio` of the tokens of every layer: those whose keys have the lowest norms.

    Parameters
    ----------
    past_key_values
        A pair of K and V for each layer, ``[batch, kv_head, token, head_dim]``; or a cache of transformers, whose
        layers have `keys` and `values`. It is not changed. numpy arrays are float16, float32, float64 or uint16 (bf16).
    keep_ratio
        1 or more keeps everything. The number of tokens is rounded up.
    prune_after
        Layers with at most this many tokens are left alone.
    skip_layers
        Layers that are left alone.

    Returns
    -------
    list of pairs
        Arrays of the input's kind and type, tokens in temporal order, each head of each sequence with its own. Layers
        that lose nothing are returned as they are. ``DynamicCache(pairs)`` makes a cache of transformers 5 of them.

    Raises
    ------
    KvmnnError
        For other shapes, and for options that the policy refuses.
    TypeError
        For arrays of other types.

    Notes
    -----
    `L2Ratio` lists the differences from the project. True positions must go with the tokens: K carries its rotary
    position, but the position of the next token is its place in the text, not the length of what is stored.
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
    """Keep `fix_kv_size` tokens of every layer: the latest, and of the older ones those that `strategy` selects.

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
        Random generator of ``"random"``; without one every call uses a new, unseeded one.

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
    pairs: KVPairs = []
    for number, layer in enumerate(getattr(past_key_values, "layers", past_key_values)):
        pair = (layer.keys, layer.values) if hasattr(layer, "values") and hasattr(layer, "keys") else layer
        if not isinstance(pair, Sequence) or len(pair) < 2:
            raise KvmnnError(f"layer {number}: found a {type(layer).__name__}, expected a pair of keys and values")
        pairs.append((pair[0], pair[1]))
    return [_compress_layer(policy, number, keys, values) for number, (keys, values) in enumerate(pairs)]


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
    """One sequence of a layer, whose keys are only read if a policy needs them."""

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
    """Convert to numpy; tensors of torch are converted through float32, because numpy has no bfloat16."""
    if not isinstance(array, np.ndarray):
        array = array.detach().float().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)
    converted: npt.NDArray[Any] = array
    return converted.astype(np.float32) if converted.dtype == np.float64 else converted
