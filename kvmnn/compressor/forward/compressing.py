"""Run a compressor on a cache: groups of tokens become one token each. LOSSY.

Everything is checked before anything is computed, and everything is computed before anything is returned: a caller has
either the complete compressed cache or an error, and its own arrays are never written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.layer_cache import LayerCache, check_pair
from ...dtypes import PARTS, KVPair, Positions, Words
from ...errors import KvmnnError
from ...threads.pipeline import Progress
from ..kvcm.weight_file import WeightFile
from .compression_plan import CompressionPlan, make_plan
from .engines import open_engine
from .grouping import apply
from .options import ForwardOptions


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
    plan: CompressionPlan

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
    progress: Progress | None = None,
) -> CompressedKV:
    """Compress the K and V of all layers.

    Parameters
    ----------
    weights
        From `kvmnn.compressor.read`. Layer i of the cache is compressed by the compressors of layer i.
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
        In arrays of its own, also where nothing was to be compressed (`CompressionPlan.reason` then says why).

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
    if keys.shape[0] == 0:
        raise KvmnnError(f"cache: shape {list(keys.shape)} has no layers")
    pairs = dict(enumerate(zip(keys, values, strict=True)))
    new, plan = compress_arrays(weights, pairs, options, progress=progress)
    live = np.arange(plan.seq_len, dtype=np.int64)
    positions, ends = merge_spans(plan, live, live + 1)
    return CompressedKV(
        keys=np.stack([pair[0] for pair in new.values()]),
        values=np.stack([pair[1] for pair in new.values()]),
        positions=positions,
        ends=ends,
        plan=plan,
    )


def compress_layers(
    weights: WeightFile,
    layers: Sequence[LayerCache],
    options: ForwardOptions | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[list[LayerCache], CompressionPlan]:
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
    numbers = [layer.layer for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise KvmnnError(f"cache: a layer appears twice among {numbers}")
    pairs = {layer.layer: (layer.keys[None], layer.values[None]) for layer in layers}
    new, plan = compress_arrays(weights, pairs, options, progress=progress)
    made = []
    for layer in layers:
        positions, ends = merge_spans(plan, layer.positions, layer.ends)
        made.append(
            LayerCache(
                layer=layer.layer,
                keys=new[layer.layer][0][0],
                values=new[layer.layer][1][0],
                positions=positions,
                ends=ends,
                tokens_seen=layer.tokens_seen,
            )
        )
    return made, plan


def compress_arrays(
    weights: WeightFile,
    layers: dict[int, KVPair],
    options: ForwardOptions,
    *,
    progress: Progress | None = None,
) -> tuple[dict[int, KVPair], CompressionPlan]:
    """The same for K and V by layer number, ``[batch, kv_heads, tokens, head_dim]`` each.

    Raises
    ------
    KvmnnError, MissingDependencyError, TypeError
        As for `compress`; also for no layers, and for layers that differ in shape or type.
    """
    if not layers:
        raise KvmnnError("cache: has no layers")
    first, (keys, _) = next(iter(layers.items()))
    for number, pair in layers.items():
        check_pair(f"cache: layer {number}", *pair, axes=4)
        if (pair[0].shape, pair[0].dtype) != (keys.shape, keys.dtype):
            raise KvmnnError(
                f"cache: layer {number} is {pair[0].dtype} {list(pair[0].shape)}, layer {first} {keys.dtype} "
                f"{list(keys.shape)}: expected the same for all"
            )
    batch, _, tokens, head_dim = keys.shape
    plan = make_plan(weights, list(layers), batch, tokens, head_dim, options)
    dtype = _result_type(keys, options)
    engine = None if plan.reason else open_engine(options.engine, weights, options.precision)
    new: dict[int, KVPair] = {}
    for number, pair in layers.items():
        shape = (*keys.shape[:2], plan.new_len, head_dim)
        new[number] = np.empty(shape, dtype), np.empty(shape, dtype)
        for part, array, result in zip(PARTS, pair, new[number], strict=True):
            apply(engine, plan, number, part, _native(array), result)
            if progress:
                progress(array.nbytes)
    return new, plan


def merge_spans(plan: CompressionPlan, positions: Positions, ends: Positions) -> tuple[Positions, Positions]:
    """The true positions of the new tokens; a group spans from its lowest position to its highest.

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


def _native(array: Words) -> Words:
    """float16, float32 or uint16 in the machine's byte order."""
    words = array.view(np.uint16) if array.dtype.kind == "V" else array
    return words.astype(words.dtype.newbyteorder("="), copy=False)


def _result_type(keys: Words, options: ForwardOptions) -> np.dtype[Any]:
    if options.precision == "fp32":
        return _native(keys[:0]).dtype
    if keys.dtype.kind != "f":
        raise KvmnnError("precision fp16 is for fp16 and fp32 caches; bf16 numbers may be beyond fp16")
    return np.dtype(np.float16)
