"""Run a compressor on a cache: groups of tokens become one token each. LOSSY.

Everything is checked before anything is computed, and computed before anything is returned: a caller gets the complete
compressed cache or an error, and its own arrays are never modified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress
from ...arrays.layer_cache import LayerCache, check_kv_pair
from ...dtypes import BF16, PARTS, Elements, Floats, KVPair, Part, Positions
from ...errors import KvmnnError
from ..kvcm import DEFAULT_PREFIXES, WeightFile, round_float32, to_float32
from .engines import ForwardEngine, open_engine, round_to_fp16
from .plan import CompressionPlan, CompressionSegment, ForwardOptions, plan_compression

_MAX_CHUNK_BYTES = 8 << 20  # of float32 rows that are multiplied at once


def compress_part(
    engine: ForwardEngine | None, plan: CompressionPlan, layer: int, part: Part, array: Elements, result: Elements
) -> None:
    """Compress K or V of one layer, ``[batch, kv_heads, tokens, head_dim]``, into `result`, ``[..., new_len,
    head_dim]``.
    """
    name = f"{part}s of layer {layer}"
    position = 0
    for segment in plan.segments:
        group_end, end = segment.begin + segment.grouped_tokens, segment.begin + segment.tokens
        if engine is not None and segment.groups:
            engine.load_compressor(layer, segment.prefix_index(part))
            compressor_name = f"layer {layer}, {DEFAULT_PREFIXES[segment.prefix_index(part)]}"
            target = result[:, :, position : position + segment.groups]
            _compress_groups(engine, segment, name, compressor_name, array, target)
            position += segment.groups
        copied_tokens = array[:, :, group_end:end]
        _store_rounded(f"kept {name}", copied_tokens, result[:, :, position : position + copied_tokens.shape[2]])
        position += copied_tokens.shape[2]


def _compress_groups(
    engine: ForwardEngine,
    segment: CompressionSegment,
    name: str,
    compressor_name: str,
    array: Elements,
    result: Elements,
) -> None:
    """Compress groups: `factor` consecutive tokens of one head are one row; the engine gets rows in chunks."""
    head_dim = array.shape[-1]
    width = segment.factor * head_dim
    rounds_to_fp16 = result.dtype == np.float16 and array.dtype != np.float16
    max_rows = max(_MAX_CHUNK_BYTES // (4 * width), 1)
    for batch, heads, begin, count in _iter_chunks(array.shape, segment.groups, max_rows):
        first_token = segment.begin + begin * segment.factor
        tokens = array[batch, heads, first_token : first_token + count * segment.factor]
        rows = round_to_fp16(to_float32(tokens)) if rounds_to_fp16 else to_float32(tokens)
        _check_finite(name, tokens, rows, batch, heads.start, first_token)
        rows = np.ascontiguousarray(rows).reshape(-1, width)
        new_tokens = engine.apply_compressor(rows).reshape(tokens.shape[0], count, head_dim)
        if not np.isfinite(new_tokens).all():
            raise KvmnnError(f"{compressor_name}: {int((~np.isfinite(new_tokens)).sum())} results are not finite")
        _store_rounded(compressor_name, new_tokens, result[batch, heads, begin : begin + count])


def _iter_chunks(shape: tuple[int, ...], groups: int, max_rows: int) -> Iterator[tuple[int, slice, int, int]]:
    """Iterate over ``(batch, heads, first group, groups)`` of at most `max_rows` rows: several heads or part of one."""
    step = max(max_rows // groups, 1)
    for batch in range(shape[0]):
        for head in range(0, shape[1], step):
            for begin in range(0, groups, max_rows):
                yield batch, slice(head, min(head + step, shape[1])), begin, min(max_rows, groups - begin)


def _check_finite(name: str, tokens: Elements, rows: Floats, batch: int, head: int, first_token: int) -> None:
    finite = np.isfinite(rows)
    if finite.all():
        return
    index = np.unravel_index(int(np.argmin(finite)), finite.shape)
    value = float(to_float32(tokens[index[:2]])[index[2]])
    problem = "is beyond fp16" if np.isfinite(value) else "a group needs finite numbers"
    raise KvmnnError(
        f"{name}: batch {batch}, kv_head {head + int(index[0])}, token {first_token + int(index[1])}, dimension "
        f"{int(index[2])} is {value:g}: {problem}"
    )


def _store_rounded(label: str, values: Elements, target: Elements) -> None:
    """Store `values` in `target`, unchanged or rounded once to its type, to nearest with ties to even."""
    if values.dtype == target.dtype:
        target[...] = values
        return
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        target[...] = round_float32(values, BF16) if target.dtype.kind == "u" else values
    is_overflowed = np.isfinite(values) & ~np.isfinite(to_float32(target))
    if is_overflowed.any():
        kind = "bf16" if target.dtype.kind == "u" else "fp16"
        raise KvmnnError(f"{label}: {int(is_overflowed.sum())} numbers are beyond {kind}")


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressResult:
    """A compressed cache."""

    #: ``[layers, batch, kv_heads, new_len, head_dim]``, of the input's type; float16 with ``precision="fp16"``.
    keys: Elements
    values: Elements
    #: ``[new_len]``: each token represents the text positions from `positions` up to but excluding `ends`.
    positions: Positions
    ends: Positions
    #: The applied plan, or the reason why nothing was compressed.
    plan: CompressionPlan

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the cache, which is the slot of the next one."""
        return self.plan.new_len

    @property
    def next_position(self) -> int:
        """Return the text position of the next token, by which its key must be rotated."""
        return self.plan.seq_len


def compress_cache(
    weights: WeightFile,
    keys: Elements,
    values: Elements,
    options: ForwardOptions | None = None,
    *,
    progress: Progress | None = None,
) -> CompressResult:
    """Compress the K and V of all layers.

    Parameters
    ----------
    weights
        From `kvmnn.compressor.read_weight_file`. Layer i of the cache is compressed by the compressors of layer i.
    keys, values
        ``[layers, batch, kv_heads, tokens, head_dim]``: float32, float16, or uint16 for bf16; keys as stored, that is,
        rotated already. Not written to.
    options
        Segments, factor, precision, engine.
    progress
        Called with the number of bytes of K and V that are done.

    Returns
    -------
    CompressResult
        In arrays of its own, also where nothing was compressed (`CompressionPlan.reason` explains why).

    Raises
    ------
    KvmnnError
        For shapes that do not fit each other or the weights, fewer layers in the weights than in the cache, values that
        are not finite, and results beyond the type of the cache.
    MissingDependencyError
        For the onnx engine without onnx and onnxruntime.
    TypeError
        For arrays that are not float16, float32 or uint16.
    """
    options = options or ForwardOptions()
    check_kv_pair("cache", keys, values, num_axes=5)
    if keys.shape[0] == 0:
        raise KvmnnError(f"cache: shape {list(keys.shape)} has no layers")
    pairs = dict(enumerate(zip(keys, values, strict=True)))
    compressed, plan = compress_arrays(weights, pairs, options, progress=progress)
    positions_before = np.arange(plan.seq_len, dtype=np.int64)
    positions, ends = merge_spans(plan, positions_before, positions_before + 1)
    return CompressResult(
        keys=np.stack([pair[0] for pair in compressed.values()]),
        values=np.stack([pair[1] for pair in compressed.values()]),
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
    """Compress a cache in `LayerCache` form, each layer with the weights of the same number.

    Returns
    -------
    layers, plan
        The new layers keep their numbers and `tokens_seen`; each token has the text positions that it represents.

    Raises
    ------
    KvmnnError
        As for `compress_cache`; also for layers that differ in shape or type or appear twice, and for a `seq_len`,
        since all tokens of a `LayerCache` are live.
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
    compressed, plan = compress_arrays(weights, pairs, options, progress=progress)
    compressed_layers = []
    for layer in layers:
        positions, ends = merge_spans(plan, layer.positions, layer.ends)
        compressed_layers.append(
            LayerCache(
                layer=layer.layer,
                keys=compressed[layer.layer][0][0],
                values=compressed[layer.layer][1][0],
                positions=positions,
                ends=ends,
                tokens_seen=layer.tokens_seen,
            )
        )
    return compressed_layers, plan


def compress_arrays(
    weights: WeightFile,
    layers: dict[int, KVPair],
    options: ForwardOptions,
    *,
    progress: Progress | None = None,
) -> tuple[dict[int, KVPair], CompressionPlan]:
    """Compress K and V by layer number, ``[batch, kv_heads, tokens, head_dim]`` each."""
    if not layers:
        raise KvmnnError("cache: has no layers")
    first_layer, (keys, _) = next(iter(layers.items()))
    for number, pair in layers.items():
        check_kv_pair(f"cache: layer {number}", *pair, num_axes=4)
        if (pair[0].shape, pair[0].dtype) != (keys.shape, keys.dtype):
            raise KvmnnError(
                f"cache: layer {number} is {pair[0].dtype} {list(pair[0].shape)}, layer {first_layer} {keys.dtype} "
                f"{list(keys.shape)}: expected the same for all"
            )
    batch, _, tokens, head_dim = keys.shape
    plan = plan_compression(weights, list(layers), batch, tokens, head_dim, options)
    if options.precision == "fp32":
        dtype: np.dtype[Any] = _to_native(keys[:0]).dtype
    elif keys.dtype.kind == "f":
        dtype = np.dtype(np.float16)
    else:
        raise KvmnnError("precision fp16 is for fp16 and fp32 caches; bf16 numbers may be beyond fp16")
    engine = None if plan.reason else open_engine(options.engine, weights, options.precision)
    compressed: dict[int, KVPair] = {}
    for number, pair in layers.items():
        shape = (*keys.shape[:2], plan.new_len, head_dim)
        compressed[number] = np.empty(shape, dtype), np.empty(shape, dtype)
        for part, array, result in zip(PARTS, pair, compressed[number], strict=True):
            compress_part(engine, plan, number, part, _to_native(array), result)
            if progress:
                progress(array.nbytes)
    return compressed, plan


def merge_spans(plan: CompressionPlan, positions: Positions, ends: Positions) -> tuple[Positions, Positions]:
    """Return the spans of the new tokens; a group spans from its lowest text position to its highest."""
    span_starts, span_ends = [positions[..., :0]], [ends[..., :0]]
    for segment in plan.segments:
        group_end, end = segment.begin + segment.grouped_tokens, segment.begin + segment.tokens
        if segment.groups:
            shape = (*positions.shape[:-1], segment.groups, segment.factor)
            span_starts.append(positions[..., segment.begin : group_end].reshape(shape).min(axis=-1))
            span_ends.append(ends[..., segment.begin : group_end].reshape(shape).max(axis=-1))
        span_starts.append(positions[..., group_end:end])
        span_ends.append(ends[..., group_end:end])
    return np.concatenate(span_starts, axis=-1), np.concatenate(span_ends, axis=-1)


def _to_native(array: Elements) -> Elements:
    """Return float16, float32 or uint16 in the machine's byte order."""
    elements = array.view(np.uint16) if array.dtype.kind == "V" else array
    return elements.astype(elements.dtype.newbyteorder("="), copy=False)
