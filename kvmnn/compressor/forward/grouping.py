"""Tokens to rows and back: carries a plan out on K or V of one layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...dtypes import BF16, Elements, Floats, Part
from ...errors import KvmnnError
from ..kvcm.header import DEFAULT_PREFIXES
from ..kvcm.words import round_float32, to_float32
from .compression_plan import CompressionPlan, CompressionSegment
from .engine import ForwardEngine, round_to_fp16

_MAX_CHUNK_BYTES = 8 << 20
"""Bytes of float32 rows that are multiplied at once, at most."""


def compress_part(
    engine: ForwardEngine | None, plan: CompressionPlan, layer: int, part: Part, array: Elements, result: Elements
) -> None:
    """Compress K or V of one layer.

    Parameters
    ----------
    engine
        None where the plan has no groups.
    array, result
        ``[batch, kv_heads, tokens, head_dim]`` before and ``[..., new_len, head_dim]`` after; `result` is filled.

    Raises
    ------
    KvmnnError
        For tokens in groups that are not finite, and for results that the type of `result` cannot hold.
    """
    name = f"{part}s of layer {layer}"
    position = 0
    for segment in plan.segments:
        group_end, end = segment.begin + segment.grouped_tokens, segment.begin + segment.tokens
        if engine is not None and segment.groups:
            engine.load_compressor(layer, segment.prefix_index(part))
            compressor_name = f"layer {layer}, {DEFAULT_PREFIXES[segment.prefix_index(part)]}"
            _compress_groups(
                engine, segment, name, compressor_name, array, result[:, :, position : position + segment.groups]
            )
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
    """`factor` consecutive tokens of one head are one row; rows go through the engine chunk after chunk."""
    head_dim = array.shape[-1]
    width = segment.factor * head_dim
    rounds_to_fp16 = result.dtype == np.float16 and array.dtype != np.float16
    for batch, heads, begin, count in _iter_chunks(
        array.shape, segment.groups, max(_MAX_CHUNK_BYTES // (4 * width), 1)
    ):
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
    """``(batch, heads, first group, groups)`` of at most `max_rows` rows: as many heads as fit, or parts of one."""
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
        f"{int(index[2])} "
        f"is {value:g}: {problem}"
    )


def _store_rounded(label: str, values: Elements, target: Elements) -> None:
    """Put `values` into `target`, bit for bit or rounded once to its type, to the nearest with ties to even."""
    if values.dtype == target.dtype:
        target[...] = values
        return
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        target[...] = round_float32(values, BF16) if target.dtype.kind == "u" else values
    is_overflowed = np.isfinite(values) & ~np.isfinite(to_float32(target))
    if is_overflowed.any():
        kind = "bf16" if target.dtype.kind == "u" else "fp16"
        raise KvmnnError(f"{label}: {int(is_overflowed.sum())} numbers are beyond {kind}")
