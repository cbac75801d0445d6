"""Run a compressor on a cache: groups of tokens become one token each. LOSSY.

Everything is checked before anything is computed, and everything is computed before anything is returned: a caller has
either the whole compressed cache or an error, and its own arrays are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cache import LayerCache, Positions, Words, check_pair
from ..errors import KvmnnError
from .engines import open_engine
from .format import WeightFile
from .grouping import apply
from .plan import ForwardOptions, Plan, make_plan

Progress = Callable[[int], object] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressedKV:
    """A compressed cache.

    Parameters
    ----------
    keys, values
        ``[layers, batch, kv_heads, new_len, head_dim]``, of the type that went in; float16 with ``precision="fp16"``.
    positions, ends
        ``[new_len]``: the true positions that a token stands for begin at `positions` and end before `ends`.
    plan
        What was done, or why nothing was.
    """

    keys: Words
    values: Words
    positions: Positions
    ends: Positions
    plan: Plan

    @property
    def new_len(self) -> int:
        """Tokens in the cache: the place of the next one."""
        return self.plan.new_len

    @property
    def next_position(self) -> int:
        """True position of the next token, with which its key has to be rotated."""
        return self.plan.seq_len


def compress(
    weights: WeightFile,
    keys: Words,
    values: Words,
    options: ForwardOptions | None = None,
    *,
    progress: Progress = None,
) -> CompressedKV:
    """Compress the K and V of all layers.

    Parameters
    ----------
    weights
        From `kvmnn.compressor.format.read`. Layer i of the cache is compressed by layer i of the weights.
    keys, values
        ``[layers, batch, kv_heads, tokens, head_dim]``: float32, float16, or uint16 for bf16; keys as they are stored,
        that is, rotated already. Not written to.
    options
        Segments, factor, precision, engine.
    progress
        Called with the number of bytes of K and V worked through.

    Returns
    -------
    CompressedKV
        In arrays of its own, also where nothing was to be compressed (`Plan.reason` then says why).

    Raises
    ------
    KvmnnError
        For shapes that do not agree with each other or with the weights, fewer layers in the weights than in the
        cache, values that are not finite, and results beyond the type of the cache.
    MissingDependencyError
        For the onnx engine without onnx and onnxruntime.
    TypeError
        For arrays that are not float16, float32 or uint16.
    """
    options = options or ForwardOptions()
    check_pair("cache", keys, values, axes=5)
    layers, batch, _, tokens, head_dim = keys.shape
    if layers == 0:
        raise KvmnnError(f"cache: shape {list(keys.shape)} has no layers")
    numbers = list(range(layers))
    plan = make_plan(weights, numbers, batch, tokens, head_dim, options)
    new_keys, new_values = _empty(keys, plan, options), _empty(values, plan, options)
    _fill(weights, plan, options, numbers, zip(keys, values, new_keys, new_values, strict=True), progress)
    live = np.arange(plan.seq_len, dtype=np.int64)
    positions, ends = merge_spans(plan, live, live + 1)
    return CompressedKV(keys=new_keys, values=new_values, positions=positions, ends=ends, plan=plan)


def compress_layers(
    weights: WeightFile,
    layers: Sequence[LayerCache],
    options: ForwardOptions | None = None,
    *,
    progress: Progress = None,
) -> tuple[list[LayerCache], Plan]:
    """The same for a cache in `LayerCache` form: each layer is compressed by the weights of its own number.

    Returns
    -------
    layers, plan
        The new layers keep their numbers and `tokens_seen`; each token has the true positions that it stands for.

    Raises
    ------
    KvmnnError
        As for `compress`; also for layers that differ in shape or type or appear twice, and for a `seq_len`, since all
        that a `LayerCache` stores is live.
    """
    options = options or ForwardOptions()
    if not layers:
        raise KvmnnError("cache: has no layers")
    if options.seq_len is not None:
        raise KvmnnError(
            "seq_len is for arrays that are longer than their content; all tokens of a LayerCache are live"
        )
    _check_alike(layers)
    numbers = [layer.layer for layer in layers]
    plan = make_plan(weights, numbers, 1, layers[0].tokens, layers[0].head_dim, options)
    work = [
        (keys, values, _empty(keys, plan, options), _empty(values, plan, options))
        for keys, values in ((layer.keys[None], layer.values[None]) for layer in layers)
    ]
    _fill(weights, plan, options, numbers, iter(work), progress)
    made = []
    for layer, (_, _, keys, values) in zip(layers, work, strict=True):
        positions, ends = merge_spans(plan, layer.positions, layer.ends)
        made.append(
            LayerCache(
                layer=layer.layer,
                keys=keys[0],
                values=values[0],
                positions=positions,
                ends=ends,
                tokens_seen=layer.tokens_seen,
            )
        )
    return made, plan


def merge_spans(plan: Plan, positions: Positions, ends: Positions) -> tuple[Positions, Positions]:
    """The true positions of the new tokens: those of a group reach from its lowest to its highest.

    Parameters
    ----------
    positions, ends
        ``[..., seq_len]``, of the tokens before.

    Returns
    -------
    ``[..., new_len]`` of both.
    """
    first, last = [positions[..., :0]], [ends[..., :0]]
    for segment in plan.segments:
        middle, end = segment.begin + segment.grouped, segment.begin + segment.tokens
        if segment.groups:
            shape = (*positions.shape[:-1], segment.groups, segment.factor)
            first.append(positions[..., segment.begin : middle].reshape(shape).min(axis=-1))
            last.append(ends[..., segment.begin : middle].reshape(shape).max(axis=-1))
        first.append(positions[..., middle:end])
        last.append(ends[..., middle:end])
    return np.concatenate(first, axis=-1), np.concatenate(last, axis=-1)


def _check_alike(layers: Sequence[LayerCache]) -> None:
    first = layers[0]
    seen: set[int] = set()
    for layer in layers:
        if layer.layer in seen:
            raise KvmnnError(f"cache: layer {layer.layer} appears twice")
        seen.add(layer.layer)
        if (layer.keys.shape, layer.keys.dtype) != (first.keys.shape, first.keys.dtype):
            raise KvmnnError(
                f"cache: layer {layer.layer} is {layer.dtype} {list(layer.keys.shape)}, layer {first.layer} "
                f"{first.dtype} {list(first.keys.shape)}: expected the same for all"
            )


def _empty(array: Words, plan: Plan, options: ForwardOptions) -> Words:
    """Where the result for `array` goes."""
    if options.precision == "fp16" and array.dtype.kind != "f":
        raise KvmnnError("precision fp16 is for fp16 and fp32 caches; a bf16 cache would lose its range")
    dtype = np.dtype(np.float16) if options.precision == "fp16" else array.dtype.newbyteorder("=")
    return np.empty((*array.shape[:-2], plan.new_len, array.shape[-1]), dtype)


def _fill(
    weights: WeightFile,
    plan: Plan,
    options: ForwardOptions,
    numbers: Sequence[int],
    work: Iterator[tuple[Words, Words, Words, Words]],
    progress: Progress,
) -> None:
    """Carry out a plan; `work` is K, V and where the new K and V go, ``[batch, kv_heads, tokens, head_dim]`` each."""
    engine = None if plan.reason else open_engine(options.engine, weights, options.precision)
    for number, (keys, values, new_keys, new_values) in zip(numbers, work, strict=True):
        for side, (array, result) in enumerate(((keys, new_keys), (values, new_values))):
            apply(engine, plan, number, side, array, result)
            if progress:
                progress(array.nbytes)
