"""The rules of the eviction policies in slow, plain Python, one head at a time; and samples to try them on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvmnn.policies import LayerState, Policy, Trigger, create_policy
from kvmnn.policies.layer_parameters import LayerParameters

Array = npt.NDArray[Any]


def norm(row: Sequence[float]) -> float:
    """Sixteen partial sums, folded in half four times, a square root; every operation rounded to float32."""
    sums = [np.float32(0)] * 16
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for j, x in enumerate(row):
            sums[j % 16] = sums[j % 16] + np.float32(x) * np.float32(x)
        for width in (8, 4, 2, 1):
            sums = [sums[k] + sums[k + width] for k in range(width)]
        return float(np.sqrt(sums[0]))


def floats(array: Array) -> Array:
    """fp16, fp32 or bf16 words as float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # of signalling NaNs some processors speak
        return array.astype(np.float32)


def ranked(values: Sequence[float], *, highest: bool = False) -> list[int]:
    """Indices, the lowest (highest) value first, of equal ones the first; NaN last."""
    sign = -1 if highest else 1
    return sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), 0 if math.isnan(values[i]) else sign * values[i], i)
    )


def l2_ratio(norms: Sequence[float], keep: int, prune_after: int, form: str) -> list[int]:
    n = len(norms)
    if form == "original":
        return list(range(n)) if n < prune_after else ranked(norms)[:keep]
    return list(range(n)) if n <= prune_after or keep >= n else sorted(ranked(norms)[:keep])


def l2_fixed(norms: Sequence[float], size: int, recent_ratio: float, *, high: bool) -> list[int]:
    n = len(norms)
    if n <= size:
        return list(range(n))
    protected = min(int(size * recent_ratio), n)
    zone, chosen = n - protected, max(size - protected, 0)
    return sorted(ranked(norms[:zone], highest=high)[:chosen]) + list(range(zone, n))


def streaming(n: int, sink: int, size: int, buffer: int) -> list[int]:
    return [i for i in range(n) if n <= size + buffer or i < sink or i >= n - (size - sink)]


def h2o_tokens(scores: Sequence[float], size: int, sink: int, recent: int, buffer: int) -> list[int]:
    n = len(scores)
    if n <= size + buffer:
        return list(range(n))
    ends = {i for i in range(n) if i < sink or i >= n - recent}
    between = [i for i in range(n) if i not in ends]
    order = ranked([scores[i] for i in between], highest=True)
    return sorted(ends | {between[i] for i in order[: max(0, size - sink - recent)]})


def h2o_heads(scores: Sequence[float], size: int, recent: int) -> list[int]:
    n = len(scores)
    if n <= size:
        return list(range(n))
    zone = n - min(recent, size)
    return sorted(ranked(scores[:zone], highest=True)[: size - min(recent, size)]) + list(range(zone, n))


# -- samples ----------------------------------------------------------------------------------------------------------

AWKWARD = [0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 6e-8, 5.9e-5, 1e-4, 65504.0, 3e38, 1e-45, -7.25]
"""Equal, zero, subnormal, overflowing and infinite values of every type, and NaN."""


def rows(max_tokens: int = 40) -> st.SearchStrategy[Array]:
    """Scores or norms ``[row, token]``, float32, with many ties."""
    values = st.sampled_from(AWKWARD) | st.floats(width=32)
    shape = st.tuples(st.integers(1, 3), st.integers(0, max_tokens))
    return shape.flatmap(
        lambda s: st.lists(values, min_size=s[0] * s[1], max_size=s[0] * s[1]).map(
            lambda v: np.array(v, np.float64).astype(np.float32).reshape(s)
        )
    )


@st.composite
def keys(draw: st.DrawFn, max_tokens: int = 24) -> Array:
    """Keys ``[kv_head, token, head_dim]`` of any type and any bits, some of them awkward, in any strides."""
    heads, tokens, dims = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, max_tokens)),
        draw(st.sampled_from([1, 3, 16, 20, 33])),
    )
    dtype = draw(st.sampled_from(["f2", "f4", "u2"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = rng.standard_normal((heads, tokens, dims)).astype(np.float32)
    if draw(st.booleans()):  # few values, so that norms tie
        whole = np.round(whole)
    with np.errstate(over="ignore"):
        for value in draw(st.lists(st.sampled_from(AWKWARD), max_size=4)):
            if whole.size:
                whole.reshape(-1)[rng.integers(whole.size)] = value
        array = (whole.view(np.uint32) >> 16).astype(np.uint16) if dtype == "u2" else whole.astype(dtype)
    layout = draw(st.sampled_from(["plain", "token first", "backwards", "every other"]))
    if layout == "token first":
        return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == "backwards":
        return np.ascontiguousarray(array[:, ::-1])[:, ::-1]
    if layout == "every other":
        return np.repeat(array, 2, axis=2)[:, :, ::2]
    return array


# -- every policy ------------------------------------------------------------------------------------------------------

HEADS, DIMS = 3, 8

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "l2_ratio": [{"prune_after": 4}, {"prune_after": 4, "form": "original"}],
    "l2_fixed": [
        {},
        {"recent_ratio": 0.5},
        {"strategy": "keep_high", "recent_ratio": 0.3},
        {"strategy": "random", "generator": 1},
    ],
    "recent_only": [{}],
    "streaming": [{"sink": 2}],
    "streaming_press": [{"sink": 2}],
    "h2o_tokens": [{"sink": 2, "recent": 4, "buffer": 0}],
    "h2o_blocks": [{"sink": 2, "recent": 4, "block_tokens": 4, "update_interval": 1, "trigger_min_tokens": 4}],
    "h2o_heads": [{"recent": 4}],
    "h2o_decayed": [{"sink": 2, "recent": 4}, {"decay": 1}],
    "h2o_decayed_heads": [{"sink": 2, "recent": 4, "decay": 0.5}],
    "knorm": [{}],
    "observed_attention": [{}],
    "random": [{"seed": 3}],
    "keydiff": [{}, {"phase": "both", "interval": 7}],
    "lagkv": [{"sink": 1, "lag": 3}, {"sink": 1, "lag": 3, "cross": True}],
    "cur": [{"sink": 2}, {"sink": 0, "neighbourhood": 0, "leverage": "mean"}],
    "leverage": [{"sketch": 4}],
    "snapkv": [{"window": 5, "kernel": 1}, {"window": 5, "kernel": 1, "phase": "both", "interval": 1}],
    "pyramidkv": [{"window": 30, "kernel": 1}],
    "finch": [{"window": 5, "normalize": False}],
    "tova": [{}, {"phase": "both", "interval": 1}],
    "simlayerkv": [{"threshold": 0, "sink": 2}],
    "expected_attention": [{"sink": 2}, {"value_norm": False, "covariance": False}],
    "capkv": [{"sink": 2}],
    "non_causal": [{"part": 16}],
    "compactor": [{"sink": 2, "recent": 2, "sketch": 4}],
}
BUDGETS: list[dict[str, Any]] = [{"budget": 12}, {"keep_ratio": 0.4}]


def make(name: str, options: dict[str, Any], **more: Any) -> Policy:
    """The policy of these options; a number is the seed of its generator."""
    drawn = {"generator": np.random.default_rng(options["generator"])} if "generator" in options else {}
    return create_policy(name, **{"skip_layers": (), **options, **drawn, **more})


def acting(policy: Policy) -> Trigger:
    return Trigger.AFTER_ATTENTION if Trigger.AFTER_ATTENTION in policy.triggers else Trigger.AFTER_APPEND


def view(tokens: int, seed: int = 0, *, tied: bool = False, dtype: Any = np.float16, **more: Any) -> Any:
    """A layer with all that any policy may need; for the form of scores see `fit`."""
    rng = np.random.default_rng(seed)
    keys = np.ones((HEADS, tokens, DIMS)) if tied else rng.standard_normal((HEADS, tokens, DIMS))
    scores = np.ones((HEADS, tokens)) if tied else rng.random((HEADS, tokens))
    return {"tokens": tokens, "keys": keys.astype(dtype), "scores": scores.astype(np.float32), **more}


def fit(policy: Policy, fields: dict[str, Any]) -> LayerState:
    scores = fields["scores"]
    if policy.requires == "tensors":
        queries = np.random.default_rng(9).standard_normal((2 * HEADS, fields["tokens"], DIMS)).astype(np.float32)
        more = {"scores": None, "values": fields["keys"], "queries": queries, "parameters": LayerParameters(7)}
        return LayerState(**{**fields, **more})
    return LayerState(**{**fields, "scores": scores[0] if policy.requires == "scores" else scores})
