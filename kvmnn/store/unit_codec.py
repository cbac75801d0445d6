"""Encoding and decoding of units of frames, decoding of dense units, and state units.

A unit is valid for each prefix of its sequence. A state unit contains what a model keeps besides full attention: rows
of sliding windows and opaque state. It is valid for a prefix of exactly one length.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import (
    InterruptibleExecutor,
    is_cancelled,
    parallel_map,
    parallel_run,
    resolve_threads,
    wait_for_result,
)
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME_CHARS, OpaqueState, make_state
from ..dense import SharedTables
from ..dense.decoder import RowDecoder, decode_into
from ..dense.header import read_header
from ..dtypes import Bytes, Elements
from ..errors import KvmnnError, SourceError
from ..files.schema import JsonReader, parse_document
from ..frames import CodecOptions
from ..frames.buffers import as_elements, checksum_rows, copy_with_checksum, integrity_checksum
from ..frames.decoder import FrameDecoder
from ..frames.options import LaneOptions
from .namespace import KEY_BYTES, MAX_TOKENS, Ids, Namespace, compute_state_key, list_parts
from .unit import DamagedUnitError, TableSetCache, TableSets, TokenSpan, Unit, UnitFrame, check_header_size

if TYPE_CHECKING:
    from ..profiles.profile import Profile
    from ..profiles.search import ProfileFinder

MAX_UNIT_TOKENS = 512
"""Blocks of one put form a unit of up to this many tokens: frames of 64 tokens each would be 5 % larger."""
MAX_UNIT_RAW_BYTES = 64 << 20
"""Limit on the raw bytes of a unit with more than one block."""


def count_blocks_per_unit(namespace: Namespace, block_tokens: int) -> int:
    """Return the maximum number of whole blocks in a unit; a partial block may follow them."""
    max_blocks_by_bytes = MAX_UNIT_RAW_BYTES // (block_tokens * namespace.token_bytes)
    return max(1, min(MAX_UNIT_TOKENS // block_tokens, max_blocks_by_bytes))


def plan_unit_spans(start: int, tokens: int, block_tokens: int, unit_blocks: int) -> list[TokenSpan]:
    """Split the tokens from `start`, whole blocks, to `tokens` into units; a partial block joins the last one."""
    step = unit_blocks * block_tokens
    whole_tokens = max((tokens - start) // block_tokens * block_tokens, 1)  # a partial block alone is a unit
    end_tokens = [
        min(begin_token + step, start + whole_tokens) for begin_token in range(start, start + whole_tokens, step)
    ]
    end_tokens[-1] = tokens
    return list(zip([start, *end_tokens[:-1]], end_tokens, strict=True))


def encode_frame_units(
    layers: Sequence[LayerCache],
    spans: Sequence[TokenSpan],
    options: CodecOptions,
    on_unit: Callable[[int, tuple[UnitFrame, ...]], object],
    threads: int | None = None,
) -> None:
    """Encode K and V of all layers as frames, unit by unit; predictors are sampled from the unit in the middle."""
    from ..frames.encoder import encode_elements, with_selected_predictors

    lanes = options.to_lane_options(as_elements(layers[0].keys[:, :0], None)[0])
    parts = list_parts(layers)
    open_units: dict[int, list[UnitFrame | None]] = {}
    lock = threading.Lock()
    scratch, cores = ThreadScratch(), resolve_threads(threads)

    def select_lanes(elements: Elements) -> LaneOptions:
        begin_token, end_token = spans[len(spans) // 2]
        rows, _ = _to_head_rows(elements[:, begin_token:end_token], scratch)
        return with_selected_predictors(rows.reshape(-1), lanes)

    lanes_of_parts = parallel_map(select_lanes, parts, cores) if options.effort == "balanced" else [lanes] * len(parts)

    def encode_part(job: tuple[int, int]) -> None:
        unit_index, part = job
        begin_token, end_token = spans[unit_index]
        rows, rows_sum = _to_head_rows(parts[part][:, begin_token:end_token], scratch)
        data = encode_elements(rows.reshape(-1), lanes_of_parts[part], 1)
        frame = UnitFrame(data, integrity_checksum(data), rows_sum)
        with lock:
            frames = open_units.setdefault(unit_index, [None] * len(parts))
            frames[part] = frame
            complete_frames = [frame_or_none for frame_or_none in frames if frame_or_none is not None]
            if len(complete_frames) < len(parts):
                return
            del open_units[unit_index]
        on_unit(unit_index, tuple(complete_frames))

    parallel_map(encode_part, _plan_frame_jobs(len(spans), len(parts), cores), cores)


def _plan_frame_jobs(units: int, parts: int, cores: int) -> list[tuple[int, int]]:
    """Return unit and part of each job; the last units are interleaved: each thread has one to write at the end."""
    first_interleaved = max(units - cores, 0)
    jobs = [(unit_index, part) for unit_index in range(first_interleaved) for part in range(parts)]
    return jobs + [(unit_index, part) for part in range(parts) for unit_index in range(first_interleaved, units)]


class ThreadScratch(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    def get_buffer(self, nbytes: int) -> Bytes:
        """Return a buffer of `nbytes` bytes, valid until the next call on this thread."""
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


def _to_head_rows(elements: Elements, scratch: ThreadScratch) -> tuple[Bytes, int]:
    """Return contiguous little-endian ``[kv_head, byte]``, valid until `scratch` is used again, and the checksum."""
    token_rows = view_token_bytes(elements)
    if token_rows.flags.c_contiguous:
        rows = token_rows.reshape(len(token_rows), -1)
        return rows, checksum_rows(rows)
    buffer_rows = scratch.get_buffer(elements.nbytes).reshape(len(elements), -1)
    return buffer_rows, copy_with_checksum(token_rows, buffer_rows)


def view_token_bytes(elements: Elements) -> Bytes:
    """Return ``[kv_head, token, element]`` as little-endian bytes, a view where possible."""
    little_endian = elements if elements.dtype.isnative else elements.astype(elements.dtype.newbyteorder("<"))
    return (
        little_endian if little_endian.strides[2] == little_endian.itemsize else np.ascontiguousarray(little_endian)
    ).view(np.uint8)


class LoadedSlice(NamedTuple):
    """`take` tokens of a unit after its first `skip` tokens."""

    unit: Unit
    skip: int
    take: int


class DamagedSliceError(DamagedUnitError):
    """The slice with this `slice_index` is damaged."""

    def __init__(self, message: str, slice_index: int) -> None:
        super().__init__(message)
        self.slice_index = slice_index


def check_unit_matches(unit: Unit, namespace: Namespace, ids: Ids, skip: int, max_tokens: int) -> None:
    """Check that a unit contains `ids` after its first `skip` tokens, in `namespace`, and at most `max_tokens`."""
    num_streams = len(namespace.parts if unit.layer_info is None else namespace.layers)
    if unit.namespace_key != namespace.key or len(unit.frames) != num_streams:
        raise DamagedUnitError("holds layers of another model")
    if unit.ids.size > max_tokens:
        raise DamagedUnitError(f"holds {unit.ids.size:,} tokens: expected at most {max_tokens:,}")
    if not np.array_equal(unit.ids[skip : skip + ids.size], ids):
        raise DamagedUnitError("holds other tokens than the index says")


def decode_slices(
    namespace: Namespace,
    slices: Sequence[LoadedSlice],
    threads: int | None = None,
    *,
    tables: TableSetCache | None = None,
    profiles: ProfileFinder | None = None,
    preceding_rows: Sequence[LayerCache] | None = None,
) -> list[LayerCache]:
    """Decode K and V of all layers for consecutive slices, and compare them with their checksums.

    If no unit has frames alone, a result has all heads of a token together in memory, as streams have them; else all
    tokens of a head.
    """
    decoder = _SliceDecoder(namespace, slices, tables, profiles, preceding_rows)
    jobs: list[Callable[[], object]] = [partial(deque, layers, 0) for layers in decoder.iter_by_unit()]
    jobs += [
        partial(decoder.decode_part, (run, part_index))
        for run in decoder.runs
        for part_index in range(len(namespace.parts))
    ]
    parallel_run(jobs, resolve_threads(threads))
    return list(map(decoder.get_layer, range(len(namespace.layers))))


def iter_decoded_layers(
    namespace: Namespace,
    slices: Sequence[LoadedSlice],
    threads: int | None = None,
    *,
    tables: TableSetCache | None = None,
    profiles: ProfileFinder | None = None,
) -> Iterator[LayerCache]:
    """Yield what `decode_slices` returns, each layer when it is decoded; threads decode the next ones meanwhile."""
    decoder = _SliceDecoder(namespace, slices, tables, profiles)
    with InterruptibleExecutor(resolve_threads(threads), "kvmnn-layers") as executor:
        if not decoder.runs:
            yield from _iter_layers_of_chains(decoder, len(namespace.layers), executor)
            return
        for layers in decoder.iter_by_unit():  # next to units of another codec: all at once
            deque(layers, 0)
        futures = [
            (layer_index, executor.submit(decoder.decode_part, (run, part_index)))
            for part_index, (layer_index, _) in enumerate(namespace.parts)
            for run in decoder.runs
        ]
        for layer_index, layer_futures in groupby(futures, key=lambda indexed_future: indexed_future[0]):
            for _, future in layer_futures:
                wait_for_result(future)
            yield decoder.get_layer(layer_index)


def _iter_layers_of_chains(
    decoder: _SliceDecoder, num_layers: int, executor: InterruptibleExecutor
) -> Iterator[LayerCache]:
    """Yield each layer once all units have it: threads decode the units, each from its first layer on."""
    chains = [UnitChain(num_layers, layers) for layers in decoder.iter_by_unit()]
    for chain in chains:
        executor.submit(chain.run)
    for layer_index in range(num_layers):
        for chain in chains:
            wait_for_result(chain.layer_futures[layer_index])
        yield decoder.get_layer(layer_index)


class UnitChain:
    """Decodes the layers of a unit in order, for those who wait for each of them."""

    def __init__(self, num_layers: int, layers: Iterator[None]) -> None:
        self.layer_futures: list[Future[None]] = [Future() for _ in range(num_layers)]
        self._layers = layers

    def run(self) -> None:
        """Decode all layers; an error is that of each layer that is left."""
        pending = deque(self.layer_futures)
        try:
            for _ in self._layers:
                pending.popleft().set_result(None)
                if is_cancelled():
                    raise KvmnnError("nobody waits for this any more")
        except BaseException as error:
            for future in pending:
                future.set_exception(error)


class _SliceDecoder:
    """Decodes K or V of one layer in consecutive slices, into arrays of all of them."""

    def __init__(
        self,
        namespace: Namespace,
        slices: Sequence[LoadedSlice],
        tables: TableSetCache | None,
        profiles: ProfileFinder | None = None,
        preceding_rows: Sequence[LayerCache] | None = None,
    ) -> None:
        self._namespace, self._slices = namespace, slices
        self._profiles = [_load_profile(loaded_slice.unit, profiles) for loaded_slice in slices]
        self._num_preceding = preceding_rows[0].tokens if preceding_rows else 0
        takes = (loaded_slice.take for loaded_slice in slices)
        self._begin_tokens = list(accumulate(takes, initial=self._num_preceding))
        self._table_sets = [
            _load_tables(namespace, loaded_slice.unit, tables, number) for number, loaded_slice in enumerate(slices)
        ]
        self._frame_decoder = FrameDecoder(namespace.dtype)
        self._by_token = any(loaded_slice.unit.dense or loaded_slice.unit.layer_info for loaded_slice in slices)
        self._pairs = _allocate_arrays(namespace, self._begin_tokens[-1], by_token=self._by_token)
        for (keys, values), cache in zip(self._pairs, preceding_rows or (), strict=False):
            keys[:, : self._num_preceding], values[:, : self._num_preceding] = cache.keys, cache.values
        self.runs = [
            run
            for run in _group_dependent_slices(slices, self._begin_tokens)
            if slices[run.start].unit.layer_info is None
        ]
        """Slices with a frame or stream for each part; those with one for each layer are not among them."""

    def get_layer(self, layer_index: int) -> LayerCache:
        """Return the rows of a layer, without those before the slices."""
        keys, values = self._pairs[layer_index]
        return LayerCache(
            layer=self._namespace.layers[layer_index].layer,
            keys=keys[:, self._num_preceding :],
            values=values[:, self._num_preceding :],
        )

    def iter_by_unit(self) -> Iterator[Iterator[None]]:
        """Yield, for each slice of streams of whole layers, what decodes a layer with each step."""
        for slice_index, loaded_slice in enumerate(self._slices):
            if loaded_slice.unit.layer_info is not None:
                yield self._decode_layers(slice_index)

    def _decode_layers(self, slice_index: int) -> Iterator[None]:
        loaded_slice, profile = self._slices[slice_index], self._profiles[slice_index]
        begin_token, end_token = self._begin_tokens[slice_index : slice_index + 2]
        selection = slice(loaded_slice.skip, loaded_slice.skip + loaded_slice.take)
        assert profile is not None
        from .layer_units import iter_unit_layers  # which imports both codecs

        try:
            for (keys, values), cache in zip(
                self._pairs, iter_unit_layers(loaded_slice.unit, self._namespace, profile), strict=True
            ):
                keys[:, begin_token:end_token] = cache.keys[:, selection]
                values[:, begin_token:end_token] = cache.values[:, selection]
                yield
        except DamagedUnitError as error:
            raise DamagedSliceError(str(error), slice_index) from None

    def decode_part(self, job: tuple[range, int]) -> None:
        """Decode the slices of a run, in order, for one part of `Namespace.parts`."""
        slice_indices, part_index = job
        layer, part = self._namespace.parts[part_index]
        rows, shape = self._pairs[layer][part], self._namespace.layers[layer]
        row_decoder = RowDecoder(rows, self._namespace.dtype) if self._by_token else None
        for slice_index in slice_indices:
            loaded_slice, begin_token = self._slices[slice_index], self._begin_tokens[slice_index]
            out = rows[:, begin_token : self._begin_tokens[slice_index + 1]]
            try:
                if loaded_slice.unit.dense is None:
                    _decode_frame(self._frame_decoder, loaded_slice.unit.frames[part_index], loaded_slice, out)
                    continue
                unit, frame = loaded_slice.unit, loaded_slice.unit.frames[part_index]
                shared_sets, history = self._table_sets[slice_index], loaded_slice.unit.dense.history_rows
                part_tables = shared_sets.sets[part_index] if shared_sets is not None else None
                if (
                    row_decoder is None
                    or loaded_slice.take != unit.ids.size
                    or begin_token < history
                    or not row_decoder.decode(
                        frame.data, frame.checksum, begin_token, unit.ids.size, history=history, tables=part_tables
                    )
                ):  # part of a unit, or a damaged one, for which this reports why
                    preceding = rows[:, : max(begin_token - loaded_slice.skip, 0)]
                    _decode_dense_slice(loaded_slice, frame, history, preceding, part_tables, out)
            except KvmnnError as error:
                raise DamagedSliceError(f"{'KV'[part]} of layer {shape.layer}: {error}", slice_index) from None


def _group_dependent_slices(slices: Sequence[LoadedSlice], begin_tokens: Sequence[int]) -> list[range]:
    """Group slices that need rows of those before them: one thread decodes a group in order."""
    groups: list[range] = []
    end_index, first_needed = len(slices), begin_tokens[-1]
    for slice_index in reversed(range(len(slices))):
        unit, begin_token = slices[slice_index].unit, begin_tokens[slice_index]
        history = unit.dense.history_rows if unit.dense else 0
        first_needed = min(first_needed, begin_token - slices[slice_index].skip - history if history else begin_token)
        if first_needed == begin_token or not slice_index:
            groups.append(range(slice_index, end_index))
            end_index = slice_index
    return groups[::-1]


def _load_profile(unit: Unit, profiles: ProfileFinder | None) -> Profile | None:
    """Return the profile that a unit needs; `SourceError` where it is not there, which is no damage."""
    if unit.layer_info is None:
        return None
    if profiles is None:
        raise SourceError(f"needs the profile {unit.layer_info.profile_key.hex()[:16]}, and none is given")
    return profiles.get(unit.layer_info.profile_key)


def _load_tables(namespace: Namespace, unit: Unit, tables: TableSetCache | None, slice_index: int) -> TableSets | None:
    if unit.dense is None or not unit.dense.tables_key:
        return None
    try:
        if tables is None:
            raise DamagedUnitError("its tables are gone")
        table_sets = tables.get(namespace.key, unit.dense.tables_key)
        if len(table_sets.sets) != len(unit.frames):
            raise DamagedUnitError("its tables are for other layers")
    except DamagedUnitError as error:
        raise DamagedSliceError(str(error), slice_index) from None
    return table_sets


def _allocate_arrays(namespace: Namespace, tokens: int, *, by_token: bool) -> list[tuple[Elements, Elements]]:
    """Allocate K and V of every layer as parts of one array: many smaller ones would take as long as decoding."""
    elements = np.empty(
        tokens * namespace.token_bytes // namespace.element_dtype.itemsize, namespace.element_dtype.numpy_dtype
    )
    pairs = []
    begin_element = 0
    for shape in namespace.layers:
        pair = []
        for dims in shape.dims:
            part = elements[begin_element : begin_element + shape.kv_heads * tokens * dims]
            begin_element += part.size
            if by_token:
                pair.append(part.reshape(tokens, shape.kv_heads, dims).transpose(1, 0, 2))
            else:
                pair.append(part.reshape(shape.kv_heads, tokens, dims))
        pairs.append((pair[0], pair[1]))
    return pairs


def _decode_frame(decoder: FrameDecoder, frame: UnitFrame, loaded_slice: LoadedSlice, out: Elements) -> None:
    tokens = loaded_slice.unit.ids.size
    in_place = loaded_slice.take == tokens and out[0].flags.c_contiguous
    elements = out if in_place else np.empty((out.shape[0], tokens, out.shape[2]), out.dtype)
    decoder.decode_verified(frame.data, frame.checksum, frame.raw_checksum, elements)
    if not in_place:
        out[:] = elements[:, loaded_slice.skip : loaded_slice.skip + loaded_slice.take]


def _decode_dense_slice(
    loaded_slice: LoadedSlice,
    frame: UnitFrame,
    history: int,
    preceding_rows: Elements,
    tables: SharedTables | None,
    out: Elements,
) -> None:
    tokens = loaded_slice.unit.ids.size
    if preceding_rows.shape[1] < history:
        raise DamagedUnitError(f"refers to {history} rows before it: {preceding_rows.shape[1]} are there")
    header = read_header(frame.data)
    if header.checksum != frame.checksum:
        raise DamagedUnitError("is another stream than was put")
    is_entire = loaded_slice.take == tokens
    elements = out if is_entire else np.empty((out.shape[0], tokens, out.shape[2]), out.dtype)
    history_rows = preceding_rows[:, preceding_rows.shape[1] - history :] if history else None
    decode_into(header, elements, history=history_rows, tables=tables)
    if not is_entire:
        out[:] = elements[:, loaded_slice.skip : loaded_slice.skip + loaded_slice.take]


STATE_MAGIC = b"KVMNNPS1"

_STATE_STRUCT = struct.Struct(f"<8sIIII{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_PIECE_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_MAX_DOCUMENT_BYTES = 16 << 20
_MAX_STATE_BYTES = 1 << 30
_ZSTD_LEVEL = 3
_RAW_BYTES_KEY, _ROUNDED_KEY = "raw_bytes", "rounded"


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixState:
    """Encoded windows and opaque state of a prefix."""

    #: Key of the namespace.
    namespace_key: bytes
    #: Key of the block before `ids`; of the namespace, at the beginning of a sequence.
    parent: bytes
    #: Length of the prefix: the only one at which this is valid.
    tokens: int
    #: The last ids of the prefix, those after the block `parent`; at least one.
    ids: Ids
    #: Rows of each window, the last of the sequence, in the order of `Namespace.windows`.
    window_rows: tuple[int, ...]
    #: Dtype, shape and bytes of each state, in the order of `Namespace.states`.
    state_specs: tuple[tuple[str, tuple[int, ...], int], ...]
    #: Frames of K and V of each window, then the compressed states.
    pieces: tuple[Bytes | bytes, ...]
    #: Checksums of each piece, and of its decoded contents.
    piece_sums: tuple[tuple[int, int], ...]
    #: Bytes of all decoded contents.
    raw_bytes: int
    #: As in `Unit`.
    is_rounded: bool = False

    def compute_key(self, secret: bytes) -> bytes:
        """Return the key of the state in a store with this secret."""
        return compute_state_key(self.parent, self.ids, secret)

    def to_pieces(self) -> list[Bytes | bytes]:
        """Return the bytes of the file, in pieces."""
        states = [{"dtype": dtype, "shape": list(shape), "bytes": size} for dtype, shape, size in self.state_specs]
        header = {"windows": list(self.window_rows), "states": states, _RAW_BYTES_KEY: self.raw_bytes}
        header |= {_ROUNDED_KEY: True} if self.is_rounded else {}
        document = json.dumps(header, separators=(",", ":")).encode()
        sizes = (self.tokens, self.ids.size, len(document), len(self.pieces))
        piece_rows = [(len(piece), *sums) for piece, sums in zip(self.pieces, self.piece_sums, strict=True)]
        head = (
            _STATE_STRUCT.pack(STATE_MAGIC, *sizes, self.namespace_key, self.parent) + self.ids.astype("<u4").tobytes()
        )
        head += document + np.array(piece_rows, _PIECE_DTYPE).tobytes()
        return [head + _CHECKSUM_STRUCT.pack(integrity_checksum(head)), *self.pieces]


def encode_state(
    namespace: Namespace,
    parent: bytes,
    ids: Ids,
    tokens: int,
    windows: Sequence[LayerCache],
    states: Sequence[OpaqueState],
    options: CodecOptions,
    *,
    is_rounded: bool = False,
) -> PrefixState:
    """Encode rows of windows as frames, and opaque state with zstandard; parameters as those of `PrefixState`."""
    import zstandard

    from ..frames.encoder import encode_elements, with_selected_predictors

    pieces: list[bytes] = []
    sums: list[tuple[int, int]] = []
    raw_bytes = 0
    for cache in windows:
        if max(cache.keys.nbytes, cache.values.nbytes) > _MAX_STATE_BYTES:
            raise SourceError(
                f"layer {cache.layer}: K of a window has {cache.keys.nbytes:,} bytes: at most {_MAX_STATE_BYTES:,}"
            )
        for elements in (cache.keys, cache.values):
            if not elements.shape[2]:
                continue
            rows = np.ascontiguousarray(view_token_bytes(elements)).reshape(len(elements), -1)
            lanes = with_selected_predictors(
                rows.reshape(-1), options.to_lane_options(as_elements(elements[:, :0], None)[0])
            )
            pieces.append(encode_elements(rows.reshape(-1), lanes, 1))
            sums.append((integrity_checksum(pieces[-1]), checksum_rows(rows)))
            raw_bytes += rows.nbytes
    state_specs = []
    for state in states:
        if state.nbytes > _MAX_STATE_BYTES:
            raise SourceError(
                f"layer {state.layer}: state {state.name!r} has {state.nbytes:,} bytes: at most {_MAX_STATE_BYTES:,}"
            )
        data = state.read()
        pieces.append(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data))
        sums.append((integrity_checksum(pieces[-1]), integrity_checksum(data)))
        state_specs.append((state.dtype, state.shape, state.nbytes))
        raw_bytes += len(data)
    return PrefixState(
        namespace_key=namespace.key,
        parent=parent,
        tokens=tokens,
        ids=ids,
        window_rows=tuple(cache.tokens for cache in windows),
        state_specs=tuple(state_specs),
        pieces=tuple(pieces),
        piece_sums=tuple(sums),
        raw_bytes=raw_bytes,
        is_rounded=is_rounded,
    )


def is_prefix_state(data: Bytes) -> bool:
    """Return whether the bytes of a file start like those of a state unit."""
    return data[: len(STATE_MAGIC)].tobytes() == STATE_MAGIC


def parse_state(data: Bytes) -> PrefixState:
    """Parse the bytes of a state unit; pieces are views of `data`, whose checksums are not compared yet."""
    check_header_size(data, _STATE_STRUCT.size)
    magic, tokens, num_ids, document_bytes, num_pieces, namespace, parent = _STATE_STRUCT.unpack_from(data.data)
    if magic != STATE_MAGIC:
        raise DamagedUnitError("does not begin as state does")
    document_begin = _STATE_STRUCT.size + 4 * num_ids
    document_end = document_begin + document_bytes
    size = document_end + _PIECE_DTYPE.itemsize * num_pieces + _CHECKSUM_STRUCT.size
    if not 1 <= num_ids <= tokens <= MAX_TOKENS or document_bytes > _MAX_DOCUMENT_BYTES or size > data.size:
        raise DamagedUnitError("has impossible sizes in its header")
    checksum_begin = size - _CHECKSUM_STRUCT.size
    if _CHECKSUM_STRUCT.unpack_from(data.data, checksum_begin) != (integrity_checksum(data[:checksum_begin]),):
        raise DamagedUnitError("its header does not match its checksum")
    piece_rows = np.frombuffer(data, _PIECE_DTYPE, num_pieces, document_end).tolist()
    ends = list(accumulate((nbytes for nbytes, _, _ in piece_rows), initial=size))
    if ends[-1] != data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    try:
        root = parse_document(data[document_begin:document_end].tobytes(), "its document", _MAX_DOCUMENT_BYTES)
        windows = tuple(node.read_int(1) for node in root.get("windows").read_list())
        states = tuple(map(_parse_state_spec, root.get("states").read_list()))
        raw_bytes = root.get(_RAW_BYTES_KEY).read_int(0)
        is_rounded = _ROUNDED_KEY in root.value
    except KvmnnError as error:  # forged, with a matching checksum
        raise DamagedUnitError(str(error)) from None
    return PrefixState(
        namespace_key=namespace,
        parent=parent,
        tokens=tokens,
        ids=np.frombuffer(data, "<u4", num_ids, _STATE_STRUCT.size),
        window_rows=windows,
        state_specs=states,
        pieces=tuple(data[begin_byte:end_byte] for begin_byte, end_byte in pairwise(ends)),
        piece_sums=tuple((piece_row[1], piece_row[2]) for piece_row in piece_rows),
        raw_bytes=raw_bytes,
        is_rounded=is_rounded,
    )


def _parse_state_spec(node: JsonReader) -> tuple[str, tuple[int, ...], int]:
    dtype, nbytes = node.get("dtype"), node.get("bytes")
    if len(dtype.read_str()) > MAX_STATE_NAME_CHARS:
        raise dtype.error(f"at most {MAX_STATE_NAME_CHARS} characters")
    if nbytes.read_int(0) > _MAX_STATE_BYTES:
        raise nbytes.error(f"at most {_MAX_STATE_BYTES}")
    shape = tuple(axis.read_int(0) for axis in node.get("shape").read_list(max_len=MAX_STATE_AXES))
    return dtype.read_str(), shape, nbytes.read_int(0)


def decode_state(prefix_state: PrefixState, namespace: Namespace) -> tuple[list[LayerCache], list[OpaqueState]]:
    """Decode rows of windows, with their positions, and opaque state; all bytes are compared with their checksums."""
    parts = [(shape, part) for shape in namespace.windows for part in range(2) if shape.dims[part]]
    if (
        prefix_state.namespace_key != namespace.key
        or len(prefix_state.window_rows) != len(namespace.windows)
        or len(prefix_state.state_specs) != len(namespace.states)
        or len(prefix_state.pieces) != len(parts) + len(namespace.states)
        or max(prefix_state.window_rows, default=0) > prefix_state.tokens
    ):
        raise DamagedUnitError("holds layers of another model")
    decoder = FrameDecoder(namespace.dtype)
    pieces = zip(prefix_state.pieces, prefix_state.piece_sums, strict=True)
    windows = []
    for shape, rows in zip(namespace.windows, prefix_state.window_rows, strict=True):
        pair = []
        for dims, name in zip(shape.dims, "KV", strict=True):
            where = f"{name} of layer {shape.layer}"
            size = shape.kv_heads * rows * dims * namespace.element_dtype.itemsize
            if size > _MAX_STATE_BYTES:
                raise DamagedUnitError(f"{where} would have {size:,} bytes: at most {_MAX_STATE_BYTES:,}")
            elements = np.empty((shape.kv_heads, rows, dims), namespace.element_dtype.numpy_dtype)
            if dims:
                data, (data_sum, raw_sum) = next(pieces)
                try:
                    decoder.decode_verified(data, data_sum, raw_sum, elements)
                except KvmnnError as error:
                    raise DamagedUnitError(f"{where}: {error}") from None
            pair.append(elements)
        positions = np.arange(prefix_state.tokens - rows, prefix_state.tokens)
        keys, values = pair
        windows.append(
            LayerCache(
                layer=shape.layer, keys=keys, values=values, positions=positions, tokens_seen=prefix_state.tokens
            )
        )
    states = []
    specs = zip(namespace.states, prefix_state.state_specs, pieces, strict=True)
    for (layer, state_name), (dtype, axes, nbytes), (data, sums) in specs:
        state_bytes = _decompress_state(data, sums, nbytes, f"state {state_name!r} of layer {layer}")
        states.append(make_state(layer, state_name, state_bytes, dtype=dtype, shape=axes))
    return windows, states


def _decompress_state(data: Bytes | bytes, sums: tuple[int, int], nbytes: int, label: str) -> bytes:
    import zstandard

    if integrity_checksum(data) != sums[0]:
        raise DamagedUnitError(f"{label} does not match its checksum")
    try:
        if zstandard.frame_content_size(bytes(data)) != nbytes:
            raise DamagedUnitError(f"{label} has another number of bytes than its header says")
        state_bytes = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=nbytes) if nbytes else b""
    except zstandard.ZstdError as error:
        raise DamagedUnitError(f"{label} does not decode: {error}") from None
    if len(state_bytes) != nbytes or integrity_checksum(state_bytes) != sums[1]:
        raise DamagedUnitError(f"{label} is not what was put")
    return state_bytes
