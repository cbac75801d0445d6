"""Dense streams beside the other codecs: one for each layer of an array whose axes are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import dense, dtypes
from ..arrays.named_array import Chunk
from ..arrays.source import Source
from ..bundle.dense_groups import split_into_groups
from ..bundle.dense_pieces import DenseOptions, DensePlan, plan_arrays
from ..bundle.rotation_trial import search_rope
from ..dtypes import Elements
from ..errors import OptionError
from ..threads.pool import parallel_map, resolve_threads
from ..version import get_version
from .rivals import BenchCodec

DENSE_CODEC_NAME = "kvmnn dense"


def make_dense_plans(source: Source, *, with_rope_search: bool = True) -> dict[str, DensePlan]:
    """How the arrays of a source become dense streams, by name; K is rotated as a `with_rope_search` finds.

    Empty if none can.
    """
    try:
        return plan_arrays(source, DenseOptions(rotary=search_rope(source) if with_rope_search else None))
    except OptionError:
        return {}


def explain_no_dense(plan: DensePlan | None, sample_bytes: int) -> str:
    """What to say where no dense streams are measured; empty where they are."""
    if plan is None:
        return f"{DENSE_CODEC_NAME}: not measured, these are not K or V of layers, or nobody says how they lie (--axes)"
    if not count_dense_bytes(plan, sample_bytes):
        return f"{DENSE_CODEC_NAME}: not measured, a layer takes {plan.nbytes:,} bytes (--max-bytes)"
    return ""


def count_dense_bytes(plan: DensePlan | None, sample_bytes: int) -> int:
    """How much of a sample dense streams are measured on: whole layers, or whole tokens of the first. 0: nothing."""
    if plan is None:
        return 0
    if sample_bytes >= plan.nbytes or plan.axes == "htd":
        return sample_bytes // plan.nbytes * plan.nbytes
    token_bytes = plan.nbytes // plan.tokens
    return sample_bytes // token_bytes * token_bytes


def make_dense_codec(plan: DensePlan, threads: int | None) -> BenchCodec:
    """Dense streams of the first `count_dense_bytes` of an array; groups of layers share the threads."""
    num_threads = resolve_threads(threads)

    def encode(data: Chunk) -> list[bytes]:
        layers = _split_layers(plan, data)
        remaining_layers = iter(layers)
        groups = [
            [next(remaining_layers) for _ in group] for group in split_into_groups([layer.nbytes for layer in layers])
        ]
        return [
            stream for streams in parallel_map(partial(_encode_layers, plan), groups, num_threads) for stream in streams
        ]

    def decode(streams: Sequence[bytes]) -> Any:
        layers = parallel_map(dense.decode, streams, num_threads)
        return np.concatenate([layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers])

    return BenchCodec(
        DENSE_CODEC_NAME, get_version(), encode, decode, count_bytes=lambda streams: sum(map(len, streams))
    )


def make_plan(keys: Elements, *, dtype: str, part: dtypes.Part) -> DensePlan:
    """Of an array ``[layer, token, kv_head, head_dim]`` in memory, `part` of a model: K is rotated as a trial finds."""
    rotary = dense.search_rope(keys[0].transpose(1, 0, 2), dtype=dtype) if part == "key" else None
    shape = keys.shape[1:]
    return DensePlan(axes="thd", shape=shape, dtype=dtype, part=part, layer=None, rotary=rotary)


def _split_layers(plan: DensePlan, data: Chunk) -> list[Elements]:
    elements = data.view(dtypes.parse_dtype(plan.dtype).numpy_dtype)
    if data.size < plan.nbytes:
        return [elements.reshape(-1, *plan.shape[1:]).transpose(1, 0, 2)]
    layers = elements.reshape(-1, *plan.shape)
    return [layer if plan.axes == "htd" else layer.transpose(1, 0, 2) for layer in layers]


def _encode_layers(plan: DensePlan, layers: Sequence[Elements]) -> list[bytes]:
    tokens = layers[0].shape[1]
    return dense.encode_many(
        layers,
        dtype=plan.dtype,
        rotary=plan.rotary,
        positions=None if plan.positions is None else plan.positions[:tokens],
        token_ids=None if plan.token_ids is None else plan.token_ids[:tokens],
    )
