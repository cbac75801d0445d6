"""Dense streams in bundles: which arrays become such, how their words lie, how they are taken apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import dense, dtypes
from ..arrays.held_tokens import read_token_positions
from ..arrays.layers import MAX_KV_HEADS, locate_array
from ..arrays.named_array import Chunk, LazyArray
from ..arrays.source import FILE_KEY, Source
from ..dtypes import Indices, Part, Positions
from ..errors import FrameError, OptionError, SourceError
from .kept_file import parse_passthrough
from .manifest import ArrayEntry, Axes, FrameEntry

MAX_ROW_ELEMENTS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_STREAM_BYTES = (1 << 32) - 1
"""What a dense stream can hold (docs/format-v2.md)."""


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """What dense streams are made with.

    Parameters
    ----------
    rotary
        How K was rotated; None encodes K as V is. Wrong parameters cost size only.
    layer_rotary
        The same by layer, where layers differ; `rotary` holds for layers that it does not have.
    token_ids
        Of the text, from its first token on: where equal tokens come again, equal rows are looked for. None takes those
        that the cache itself holds, if it does.
    """

    rotary: dense.RopeConfig | None = None
    layer_rotary: Mapping[int, dense.RopeConfig | None] = field(default_factory=dict)
    token_ids: Sequence[int] | Indices | None = None

    def get_rotary(self, layer: int | None) -> dense.RopeConfig | None:
        """Return how K of a layer was rotated; None asks for arrays with an axis of layers."""
        return self.rotary if layer is None else self.layer_rotary.get(layer, self.rotary)


@dataclass(frozen=True, kw_only=True, eq=False)
class DensePlan:
    """How an array becomes dense streams: one for every three last axes.

    Parameters
    ----------
    axes, shape
        Which these are, and how long.
    dtype
        Of the words.
    part, layer
        What they are K or V of; None for an array with an axis of layers.
    rotary, positions
        Of K: how it was rotated, and where its tokens stand in their text; None for tokens that follow each other.
    token_ids
        Of the tokens, where they are known.
    is_batch
        Whether the streams are of several texts by turns.
    """

    axes: Axes
    shape: tuple[int, ...]
    dtype: str
    part: Part
    layer: int | None
    rotary: dense.RopeConfig | None = None
    positions: Positions | None = None
    token_ids: Indices | None = None
    is_batch: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a stream."""
        return self.shape[self.axes.index("t")]

    @property
    def nbytes(self) -> int:
        """Raw bytes of a stream."""
        return math.prod(self.shape) * dtypes.parse_dtype(self.dtype).itemsize


def plan_arrays(source: Source, options: DenseOptions) -> dict[str, DensePlan]:
    """How arrays become dense streams, by name; those that are missing stay frames.

    Raises
    ------
    OptionError
        When no array is K or V whose axes are known; when `options` are not for these arrays.
    """
    plans: dict[str, DensePlan] = {}
    reason = ""
    for array in source.arrays:
        try:
            plans[array.name] = _plan_array(source, array, options)
        except SourceError as error:
            reason = reason or str(error)
    if (
        not plans
        and (passthrough := parse_passthrough(source.metadata, "frames"))
        and passthrough.format.startswith("llama")
    ):
        raise OptionError(
            "no array can be a dense stream: K and V of llama.cpp are where they are not quantised, in one stream, and "
            "--kv-heads or --model FILE.gguf says their heads"
        )
    if not plans:
        raise OptionError(f"no array can be a dense stream: {reason}")
    if options.token_ids is not None and all(plan.token_ids is None for plan in plans.values()):
        raise OptionError(f"{len(options.token_ids)} token ids are fewer than the tokens of every layer")
    return plans


def _plan_array(source: Source, array: LazyArray, options: DenseOptions) -> DensePlan:
    """`SourceError` where the array is no K or V of layers, or none that a dense stream can hold."""
    part, layer, start, token_major = locate_array(array, source.token_major)
    if FILE_KEY in source.metadata and array.name.rpartition(".")[2] in ("scales", "bits", "codes"):
        raise SourceError(f"array {array.name!r}: a field of quantised blocks is smaller as a frame")
    if array.element and array.itemsize == 1:
        raise SourceError(f"array {array.name!r}: codes of {array.element} are words of frames alone: leave dense out")
    if array.itemsize != array.coded_itemsize or array.order != "C" or len(array.shape) not in (3, 4, 5):
        raise SourceError(
            f"array {array.name!r} {list(array.shape)}: expected words [kv_head, token, head_dim] in C order, with "
            "layers or a batch in front (--axes says how arrays lie)"
        )
    heads, tokens, dim = array.shape[-3:]
    if token_major:
        heads, tokens = tokens, heads
    if heads > MAX_KV_HEADS >= tokens and not token_major:
        raise SourceError(
            f"array {array.name!r} {list(array.shape)}: read as [kv_head, token, head_dim] it has {heads:,} heads: "
            "where tokens come first, --axes says so"
        )
    axes: Axes = "thd" if token_major else "htd"
    texts = math.prod(array.shape[:-3] if layer is not None else array.shape[1:-3])
    plan = DensePlan(axes=axes, shape=array.shape[-3:], dtype=array.dtype, part=part, layer=layer, is_batch=texts > 1)
    if heads * dim > MAX_ROW_ELEMENTS or tokens > MAX_TOKENS or plan.nbytes > MAX_STREAM_BYTES:
        raise SourceError(
            f"array {array.name!r} {list(array.shape)}: above what a dense stream holds: {MAX_ROW_ELEMENTS:,} words a "
            f"token, {MAX_TOKENS:,} tokens, 4 GiB"
        )
    rotary = options.get_rotary(layer) if part == "key" else None
    if rotary and rotary.dims > dim:
        raise OptionError(f"array {array.name!r} has {dim} words a head: {rotary.dims} of them cannot be rotated")
    known_positions = _find_positions(source, layer, tokens)
    positions = np.arange(start, start + tokens) if known_positions is None else known_positions
    token_ids = _find_token_ids(source, options)
    return replace(
        plan,
        rotary=rotary,
        positions=known_positions if rotary else None,
        token_ids=token_ids[positions] if token_ids is not None and positions.max() < len(token_ids) else None,
    )


def _find_positions(source: Source, layer: int | None, tokens: int) -> Positions | None:
    """Where the tokens of a layer stand in their text, as far as the source says it."""
    for layer_info in source.cache.layers if source.cache else ():
        if layer_info.layer == layer and layer_info.tokens == tokens:
            return np.concatenate([np.arange(begin, begin + size) for begin, size in layer_info.positions])
    positions = read_token_positions(source).get(layer) if layer is not None and source.engine_cache else None
    if positions is None:
        positions = source.engine_cache.positions if source.engine_cache else None
    return (
        positions if positions is not None and positions.shape == (tokens,) and positions.min(initial=0) >= 0 else None
    )


def _find_token_ids(source: Source, options: DenseOptions) -> Indices | None:
    if options.token_ids is not None:
        return np.asarray(options.token_ids, np.int64)
    return source.engine_cache.token_ids if source.engine_cache else None


def inspect_stream(data: Chunk, array: ArrayEntry, entry: FrameEntry) -> dense.DenseInfo:
    """What a dense stream says of itself.

    Raises
    ------
    FrameError
        When it is none, or not what the manifest says: the type and the size of its words, and how they lie.
    """
    info = dense.inspect(data)
    if info.raw_bytes != entry.raw_bytes:
        raise FrameError(f"holds {info.raw_bytes} bytes, the manifest says {entry.raw_bytes}")
    heads, tokens, dim = info.kv_heads, info.tokens, info.head_dim
    stored_shape = (heads, tokens, dim) if entry.axes == "htd" else (tokens, heads, dim)
    if (info.dtype, stored_shape, "C", array.itemsize) != (
        array.dtype,
        array.shape[-3:],
        array.order,
        array.coded_itemsize,
    ):
        raise FrameError(
            f"holds {info.dtype} [kv_head {heads}, token {tokens}, head_dim {dim}], which does not fit the manifest's "
            f"{array.dtype} {list(array.shape)} with axes {entry.axes}"
        )
    if info.history or info.table_set is not None:
        raise FrameError("refers to rows or tables outside of it, which no bundle has")
    return info


def decode_stream(data: Chunk, array: ArrayEntry, entry: FrameEntry) -> Chunk:
    """The raw bytes of a dense stream, in the array's memory order; errors as `inspect_stream`, and of its words."""
    inspect_stream(data, array, entry)
    assert entry.axes is not None
    return decode_elements(data, entry.axes)


def decode_elements(stream: Any, axes: Axes) -> Chunk:
    """The raw bytes of a stream as `axes` lie; errors as `kvmnn.dense.decode`."""
    rows = dense.decode(stream)
    ordered_rows = rows if axes == "htd" else rows.transpose(1, 0, 2)
    return np.ascontiguousarray(ordered_rows).reshape(-1).view(np.uint8)
