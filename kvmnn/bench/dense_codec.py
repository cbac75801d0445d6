"""Dense streams beside the other codecs: one for each layer of an array whose axes are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import dense, dtypes
from ..arrays.named_array import Piece
from ..arrays.source import Source
from ..bundle.dense_groups import cut
from ..bundle.dense_pieces import DenseOptions, DensePlan, plan_arrays
from ..bundle.rotation_trial import find_rotary
from ..dtypes import Words
from ..errors import OptionError
from ..threads.pool import map_pulled, resolve_threads
from ..version import version
from .rivals import Codec

NAME = "kvmnn dense"


def dense_plans(source: Source, *, trial: bool = True) -> dict[str, DensePlan]:
    """How the arrays of a source become dense streams, by name; K is rotated as a `trial` finds. Empty if none can."""
    try:
        return plan_arrays(source, DenseOptions(rotary=find_rotary(source) if trial else None))
    except OptionError:
        return {}


def why_not(plan: DensePlan | None, sample_bytes: int) -> str:
    """What to say where no dense streams are measured; empty where they are."""
    if plan is None:
        return f"{NAME}: not measured, these are not K or V of layers, or nobody says how they lie (--axes)"
    if not dense_bytes(plan, sample_bytes):
        return f"{NAME}: not measured, a layer takes {plan.nbytes:,} bytes (--max-bytes)"
    return ""


def dense_bytes(plan: DensePlan | None, sample_bytes: int) -> int:
    """How much of a sample dense streams are measured on: whole layers, or whole tokens of the first. 0: nothing."""
    if plan is None:
        return 0
    if sample_bytes >= plan.nbytes or plan.axes == "htd":
        return sample_bytes // plan.nbytes * plan.nbytes
    token_bytes = plan.nbytes // plan.tokens
    return sample_bytes // token_bytes * token_bytes


def dense_codec(plan: DensePlan, threads: int | None) -> Codec:
    """Dense streams of the first `dense_bytes` of an array; groups of layers share the threads."""
    number = resolve_threads(threads)

    def encode(data: Piece) -> list[bytes]:
        layers = _layers(plan, data)
        left = iter(layers)
        groups = [[next(left) for _ in group] for group in cut([layer.nbytes for layer in layers])]
        return [stream for made in map_pulled(partial(_encoded, plan), groups, number) for stream in made]

    def decode(streams: Sequence[bytes]) -> Any:
        layers = map_pulled(dense.decode, streams, number)
        return np.concatenate([layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers])

    return Codec(NAME, version(), encode, decode, stored=lambda streams: sum(map(len, streams)))


def plan_of(keys: Words, *, dtype: str, part: dtypes.Part) -> DensePlan:
    """Of an array ``[layer, token, kv_head, head_dim]`` in memory, `part` of a model: K is rotated as a trial finds."""
    rotary = dense.find_rotary(keys[0].transpose(1, 0, 2), dtype=dtype) if part == "key" else None
    shape = keys.shape[1:]
    return DensePlan(axes="thd", shape=shape, dtype=dtype, part=part, layer=None, rotary=rotary)


def _layers(plan: DensePlan, data: Piece) -> list[Words]:
    words = data.view(dtypes.by_name(plan.dtype).numpy)
    if data.size < plan.nbytes:
        return [words.reshape(-1, *plan.shape[1:]).transpose(1, 0, 2)]
    layers = words.reshape(-1, *plan.shape)
    return [layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers]


def _encoded(plan: DensePlan, layers: Sequence[Words]) -> list[bytes]:
    tokens = layers[0].shape[1]
    return dense.encode_many(
        layers,
        dtype=plan.dtype,
        rotary=plan.rotary,
        positions=None if plan.positions is None else plan.positions[:tokens],
        token_ids=None if plan.token_ids is None else plan.token_ids[:tokens],
    )
