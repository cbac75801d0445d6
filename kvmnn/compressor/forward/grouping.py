"""Tokens to rows and back: carries a plan out on K or V of one layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...dtypes import BF16, Floats, Part, Words
from ...errors import KvmnnError
from ..kvcm.header import PREFIXES
from ..kvcm.words import float32_of, rounded
from .compression_plan import CompressionPlan, Segment
from .engine import Engine, to_half

_CHUNK_BYTES = 8 << 20
"""Bytes of float32 rows that are multiplied at once, at most."""


def apply(engine: Engine | None, plan: CompressionPlan, layer: int, part: Part, array: Words, result: Words) -> None:
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
        middle, end = segment.begin + segment.grouped, segment.begin + segment.tokens
        if engine is not None and segment.groups:
            engine.use(layer, segment.prefix(part))
            made = f"layer {layer}, {PREFIXES[segment.prefix(part)]}"
            _groups(engine, segment, name, made, array, result[:, :, position : position + segment.groups])
            position += segment.groups
        kept = array[:, :, middle:end]
        _store(f"kept {name}", kept, result[:, :, position : position + kept.shape[2]])
        position += kept.shape[2]


def _groups(engine: Engine, segment: Segment, name: str, made: str, array: Words, result: Words) -> None:
    """`factor` consecutive tokens of one head are one row; rows go through the engine chunk after chunk."""
    head_dim = array.shape[-1]
    width = segment.factor * head_dim
    half = result.dtype == np.float16 and array.dtype != np.float16
    for batch, heads, begin, count in _chunks(array.shape, segment.groups, max(_CHUNK_BYTES // (4 * width), 1)):
        first = segment.begin + begin * segment.factor
        tokens = array[batch, heads, first : first + count * segment.factor]
        rows = to_half(float32_of(tokens)) if half else float32_of(tokens)
        _check_finite(name, tokens, rows, batch, heads.start, first)
        rows = np.ascontiguousarray(rows).reshape(-1, width)
        new = engine.run(rows).reshape(tokens.shape[0], count, head_dim)
        if not np.isfinite(new).all():
            raise KvmnnError(f"{made}: {int((~np.isfinite(new)).sum())} results are not finite")
        _store(made, new, result[batch, heads, begin : begin + count])


def _chunks(shape: tuple[int, ...], groups: int, max_rows: int) -> Iterator[tuple[int, slice, int, int]]:
    """``(batch, heads, first group, groups)`` of at most `max_rows` rows: as many heads as fit, or parts of one."""
    step = max(max_rows // groups, 1)
    for batch in range(shape[0]):
        for head in range(0, shape[1], step):
            for begin in range(0, groups, max_rows):
                yield batch, slice(head, min(head + step, shape[1])), begin, min(max_rows, groups - begin)


def _check_finite(name: str, tokens: Words, rounded: Floats, batch: int, head: int, first: int) -> None:
    finite = np.isfinite(rounded)
    if finite.all():
        return
    at = np.unravel_index(int(np.argmin(finite)), finite.shape)
    value = float(float32_of(tokens[at[:2]])[at[2]])
    what = "is beyond fp16" if np.isfinite(value) else "a group needs finite numbers"
    raise KvmnnError(
        f"{name}: batch {batch}, kv_head {head + int(at[0])}, token {first + int(at[1])}, dimension {int(at[2])} "
        f"is {value:g}: {what}"
    )


def _store(what: str, values: Words, target: Words) -> None:
    """Put `values` into `target`, bit for bit or rounded once to its type, to the nearest with ties to even."""
    if values.dtype == target.dtype:
        target[...] = values
        return
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        target[...] = rounded(values, BF16) if target.dtype.kind == "u" else values
    lost = np.isfinite(values) & ~np.isfinite(float32_of(target))
    if lost.any():
        kind = "bf16" if target.dtype.kind == "u" else "fp16"
        raise KvmnnError(f"{what}: {int(lost.sum())} numbers are beyond {kind}")
