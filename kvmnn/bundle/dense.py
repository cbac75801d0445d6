"""Dense streams in bundles (docs/format-v2.md, docs/manifest.md).

`plan_arrays` decides which arrays of a source are encoded as dense streams, and with which RoPE parameters, positions
and token ids. Pieces of consecutive layers are encoded in groups. Decoding takes the same facts from the manifest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field, replace
from typing import Any, TypeVar

import numpy as np

from .. import dense, dtypes
from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import InterruptibleExecutor, resolve_threads, wait_for_result
from ..arrays.array import Chunk, LazyArray
from ..arrays.layers import MAX_KV_HEADS, locate_array
from ..arrays.positions import read_token_positions
from ..arrays.source import FILE_KEY, Source
from ..dtypes import Elements, Indices, Part, Positions
from ..errors import FrameError, KvmnnError, OptionError, SourceError
from .manifest import ArrayEntry, Axes, FrameEntry
from .passthrough import parse_passthrough

MAX_ROW_ELEMENTS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_STREAM_BYTES = (1 << 32) - 1
"""Maximum size of a dense stream's raw bytes (docs/format-v2.md)."""


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """Options of dense streams."""

    #: RoPE parameters of K; None encodes K like V. Wrong parameters only make streams larger.
    rotary: dense.RopeConfig | None = None
    #: RoPE parameters by layer, if layers differ; `rotary` applies to all other layers.
    layer_rotary: Mapping[int, dense.RopeConfig | None] = field(default_factory=dict)
    #: Token ids of the text from its first token on: rows of repeated tokens are tried as references. None uses the ids
    #: in the cache, if it has any.
    token_ids: Sequence[int] | Indices | None = None

    def get_rotary(self, layer: int | None) -> dense.RopeConfig | None:
        """Return the RoPE parameters of K of a layer; `layer` None is for arrays with an axis of layers."""
        return self.rotary if layer is None else self.layer_rotary.get(layer, self.rotary)


@dataclass(frozen=True, kw_only=True, eq=False)
class DensePlan:
    """How an array is encoded as dense streams: one for each index of the axes before the last three."""

    #: Order of the last three axes, and their sizes.
    axes: Axes
    shape: tuple[int, ...]
    #: Element type.
    dtype: str
    #: Part and layer of the array; `layer` is None for an array with an axis of layers.
    part: Part
    layer: int | None
    #: RoPE parameters of K, and the positions of its tokens in their text; None for consecutive positions.
    rotary: dense.RopeConfig | None = None
    positions: Positions | None = None
    #: Token ids, if known.
    token_ids: Indices | None = None
    #: Whether a batch of texts alternates in the streams.
    is_batch: bool = False

    @property
    def tokens(self) -> int:
        """Return the number of tokens in each stream."""
        return self.shape[self.axes.index("t")]

    @property
    def nbytes(self) -> int:
        """Return the raw bytes of a stream."""
        return math.prod(self.shape) * dtypes.parse_dtype(self.dtype).itemsize


def plan_arrays(source: Source, options: DenseOptions) -> dict[str, DensePlan]:
    """Plan which arrays become dense streams, by name; arrays without a plan stay frames."""
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
    """Plan the dense stream of an array; raise `SourceError` if it is not K or V, or dense cannot encode it."""
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
    """Return the text positions of the tokens of a layer; None if the source does not record them."""
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
    """Inspect a dense stream, and check that it matches the manifest."""
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
    """Decode a dense stream to raw bytes in the array's memory order; also raise the errors of `inspect_stream`."""
    inspect_stream(data, array, entry)
    assert entry.axes is not None
    return decode_elements(data, entry.axes)


def decode_elements(stream: Any, axes: Axes) -> Chunk:
    """Decode a stream to raw bytes in the order of `axes`; errors as `kvmnn.dense.decode`."""
    rows = dense.decode(stream)
    ordered_rows = rows if axes == "htd" else rows.transpose(1, 0, 2)
    return np.ascontiguousarray(ordered_rows).reshape(-1).view(np.uint8)


T = TypeVar("T")
R = TypeVar("R")

GROUP_BYTES = 32 << 20
"""Raw bytes of a group of pieces, whose streams are held until it is done; a larger piece is encoded alone."""
_MAX_ACTIVE_BYTES = 256 << 20
"""Raw bytes of all groups in progress, if there are several."""
_MIN_GROUPED_CHUNKS = 4
"""Fewer pieces are encoded one by one, so that two threads are busy."""
_CHUNKS_PER_GROUP, _MAX_PREFERRED_GROUPS = 4, 16
"""Pieces form groups of four, or of more if that gives over 16 groups; an even number of groups, for two threads."""


class LayerGroups(NamedTuple):
    """Groups of pieces that are encoded together as dense streams."""

    #: Number of consecutive pieces in each group.
    sizes: Sequence[int]
    #: Raw bytes of the largest group.
    max_group_bytes: int

    def collect(self, items: Iterable[T], is_dense: Callable[[T], bool]) -> Iterator[list[T]]:
        """Yield the items of pieces in order as lists: one for each group of dense streams, one for each frame."""
        sizes = iter(self.sizes)
        group: list[T] = []
        size = 0
        for item in items:
            size = size or (next(sizes) if is_dense(item) else 1)
            group.append(item)
            del item  # so that it is freed before the next one is read
            if len(group) == size:
                yield group
                group, size = [], 0


def plan_groups(arrays: Iterable[tuple[LazyArray, DensePlan | None]]) -> LayerGroups:
    """Plan groups: four or more consecutive pieces of the same tokens share groups.

    The groups depend only on the arrays, so the bytes of the streams do too.
    """
    sizes: list[int] = []
    pending: list[DensePlan] = []
    largest = 0

    def close_group_run() -> None:
        nonlocal largest
        for group in split_into_groups([pending_plan.nbytes for pending_plan in pending]):
            sizes.append(len(group))
            largest = max(largest, sum(group))
        pending.clear()

    for array, plan in arrays:
        if plan is None:
            close_group_run()
            continue
        for _ in range(array.count_chunks(plan.nbytes)):
            if pending and not _has_same_tokens(pending, plan):
                close_group_run()
            pending.append(plan)
    close_group_run()
    return LayerGroups(sizes, largest)


def _has_same_tokens(pending: Sequence[DensePlan], plan: DensePlan) -> bool:
    """Return whether a piece has the same tokens as the pieces before it; unknown positions and ids count as equal."""
    first_plan, rotary_plan = pending[0], next((pending_plan for pending_plan in pending if pending_plan.rotary), plan)
    return (
        (first_plan.dtype, first_plan.tokens, first_plan.is_batch, plan.is_batch)
        == (plan.dtype, plan.tokens, False, False)
        and all(
            plan.layer is None or (pending_plan.layer, pending_plan.part) != (plan.layer, plan.part)
            for pending_plan in pending
        )
        and (not plan.rotary or _is_equal_or_none(rotary_plan.positions, plan.positions))
        and _is_equal_or_none(first_plan.token_ids, plan.token_ids)
    )


def _is_equal_or_none(left: Indices | None, right: Indices | None) -> bool:
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def split_into_groups(nbytes: Sequence[int]) -> list[list[int]]:
    """Split the sizes of consecutive pieces into groups of nearly equal total bytes."""
    total, num_chunks = sum(nbytes), len(nbytes)
    if num_chunks < _MIN_GROUPED_CHUNKS:
        return [[num_bytes] for num_bytes in nbytes]
    num_groups = max(2, min(_MAX_PREFERRED_GROUPS, num_chunks // _CHUNKS_PER_GROUP))
    num_groups = max(num_groups + num_groups % 2, -(-total // GROUP_BYTES))
    sizes_by_group: dict[int, list[int]] = {}
    offset = 0
    for num_bytes in nbytes:
        sizes_by_group.setdefault((offset + num_bytes // 2) * num_groups // total, []).append(num_bytes)
        offset += num_bytes
    return list(sizes_by_group.values())


def encode_group(chunks: Sequence[tuple[DensePlan, Chunk]], *, verify: bool) -> list[bytes]:
    """Encode the pieces of a group to streams, each of which decodes alone."""
    first_plan = chunks[0][0]
    streams = dense.encode_many(
        [_to_head_major(plan, chunk) for plan, chunk in chunks],
        dtype=first_plan.dtype,
        rotary=[plan.rotary for plan, _ in chunks],
        positions=next((plan.positions for plan, _ in chunks if plan.rotary), None),
        token_ids=first_plan.token_ids,
        choose_rotation=True,
    )
    for (plan, chunk), stream in zip(chunks, streams, strict=True) if verify else ():
        if not np.array_equal(decode_elements(stream, plan.axes), chunk):
            raise KvmnnError("a dense stream did not decode to its own input; nothing was written (please report this)")
    return streams


def _to_head_major(plan: DensePlan, chunk: Chunk) -> Elements:
    elements = chunk.view(dtypes.parse_dtype(plan.dtype).numpy_dtype).reshape(plan.shape)
    return elements if plan.axes == "htd" else elements.transpose(1, 0, 2)


def compute_num_workers(max_group_bytes: int, threads: int | None) -> int:
    """Compute how many groups of at most `max_group_bytes` raw bytes are encoded at a time, with one thread each."""
    return max(1, min(resolve_threads(threads), _MAX_ACTIVE_BYTES // max(1, max_group_bytes)))


def map_in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """Yield ``(item, work(item))`` in the order of `items`; at most `workers` + 1 items are in memory.

    No item is processed on the caller's thread, so that an interrupt ends the iteration at once.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    max_pending = workers if workers > 1 else 0
    with InterruptibleExecutor(workers, "kvmnn-group") as helpers:
        for item in items:
            pending.append((item, helpers.submit(work, item)))
            del item  # so that it is freed before the next one is read
            while len(pending) > max_pending:
                yield _pop_oldest_result(pending)
        while pending:
            yield _pop_oldest_result(pending)


def _pop_oldest_result(pending: deque[tuple[T, Future[R]]]) -> tuple[T, R]:
    item, future = pending.popleft()
    return item, wait_for_result(future)


_NUM_TRIAL_LAYERS = 2
"""Layers that are searched: a model rotates all layers alike, and the first ones show it best."""

_PLACEHOLDER_ROTARY = dense.RopeConfig(dims=2)


def search_layer_rope(source: Source, options: DenseOptions | None = None) -> dict[int, dense.RopeConfig | None]:
    """Search the RoPE parameters of K of each layer, separately for layers with a sliding window and for the others.

    Models with sliding windows rotate K of the two kinds by different frequencies. Empty if all layers are of one kind;
    use `search_rope` then.

    Raises
    ------
    OptionError, KvmnnError
        As `search_rope`.
    """
    states = source.completeness.layers if source.completeness is not None else ()
    layers_by_kind: dict[bool, list[int]] = {}
    for state in states:
        if state.included and state.kind in ("full", "window"):
            layers_by_kind.setdefault(state.kind == "window", []).append(state.layer)
    if len(layers_by_kind) < 2:
        return {}
    rotary_by_layer: dict[int, dense.RopeConfig | None] = {}
    for layers in layers_by_kind.values():
        names = [name for name in source if _locate_layer(source, name) in layers]
        rotary = search_rope(replace(source, arrays=[source[name] for name in names]), options) if names else None
        rotary_by_layer.update(dict.fromkeys(layers, rotary))
    return rotary_by_layer


def _locate_layer(source: Source, name: str) -> int | None:
    try:
        return locate_array(source[name], source.token_major)[1]
    except SourceError:
        return None


def search_rope(source: Source, options: DenseOptions | None = None) -> dense.RopeConfig | None:
    """Run `kvmnn.dense.search_rope` on K of the first layers, at the positions that the source records.

    Raises
    ------
    OptionError
        As `encode`: when no array is K or V whose axes are known; when `options` are not for these arrays.
    KvmnnError
        When an input is damaged.
    """
    options = options or DenseOptions()
    plans = plan_arrays(source, options)
    if any(plan.part == "key" and plan.shape[-1] < _PLACEHOLDER_ROTARY.dims for plan in plans.values()):
        return None
    plans = plan_arrays(source, replace(options, rotary=_PLACEHOLDER_ROTARY))  # K has positions then
    keys = sorted((plan.layer or 0, name) for name, plan in plans.items() if plan.part == "key")
    for _, name in keys[:_NUM_TRIAL_LAYERS]:
        plan = plans[name]
        for chunk in source[name].iter_chunks(plan.nbytes):
            elements = chunk.view(dtypes.parse_dtype(plan.dtype).numpy_dtype).reshape(plan.shape)
            rotary = dense.search_rope(
                elements if plan.axes == "htd" else elements.transpose(1, 0, 2), plan.positions, dtype=plan.dtype
            )
            if rotary is not None:
                return rotary
            break
    return None
