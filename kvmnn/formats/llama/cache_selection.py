"""Select from a llama.cpp state file: streams, cells, layers of the model and kv heads of each row; read these rows.

A file counts layers within each of its caches. Models with sliding windows have two: K and V of layers with full
attention, then those of layers with a window. A row is the values of one cell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ... import dtypes
from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...arrays.array import Chunk, rechunk
from ...arrays.completeness import Completeness, LayerStateInfo
from ...dtypes import Bytes, Positions
from ...errors import MissingOptionError, OptionError, SourceError
from ...packed.layout import HeadRowAccessor, PackLayout
from ..base import FileBytes
from ..options import EngineOptions, PackedOptions, ReadOptions
from . import gguf
from .gguf import WINDOW_RULES, ModelLayer, find_windows, list_unshared_layers, read_model_layers
from .state import CacheStream, CacheTensor, LlamaState, dequantize

_VALUES_PER_BATCH = 1 << 16
"""Values dequantised at a time from blocks that span heads: they fit a processor cache."""

_FillFunction = Callable[[int, int, Bytes], None]
"""``fill(head, first cell, out)``: rows of consecutive cells of one head."""


class CellSelection:
    """Cells of a stream: those in ranges ``(begin, end)``, or all."""

    def __init__(self, num_stream_cells: int, spans: Sequence[tuple[int, int]] | None = None) -> None:
        self.num_stream_cells = num_stream_cells
        self.spans = ((0, num_stream_cells),) if spans is None else tuple(spans)
        self._begins = [0, *accumulate(end - begin for begin, end in self.spans)]
        self.num_cells = self._begins.pop()

    def locate(self, index: int) -> tuple[int, int]:
        """Return the cell of the stream for an index in the selection, and the cells from it to the end of its span."""
        span = bisect_right(self._begins, index) - 1
        begin, end = self.spans[span]
        cell = begin + index - self._begins[span]
        return cell, end - cell


def iter_head_chunks(
    file: FileBytes, tensor: CacheTensor, heads: int, selection: CellSelection, chunk_bytes: int
) -> Iterator[Chunk]:
    """Yield ``[kv_head, cell, head_dim]`` words, float32 for blocks, in chunks of `chunk_bytes` bytes."""
    num_cells = selection.num_cells
    row_bytes = tensor.row_values // heads * dtypes.parse_dtype(tensor.type.dtype).itemsize
    if chunk_bytes % row_bytes:
        aligned_bytes = max(chunk_bytes // row_bytes, 1) * row_bytes
        yield from rechunk(
            iter_head_chunks(file, tensor, heads, selection, aligned_bytes), chunk_bytes, heads * num_cells * row_bytes
        )
        return
    fill = _make_filler(file, tensor, heads, selection.num_stream_cells)
    total_rows, max_rows = heads * num_cells, chunk_bytes // row_bytes
    for start in range(0, total_rows, max_rows):
        chunk = np.empty(min(max_rows, total_rows - start) * row_bytes, np.uint8)
        num_filled = 0
        while num_filled < chunk.size:
            head, cell_index = divmod(start + num_filled // row_bytes, num_cells)
            cell, num_contiguous = selection.locate(cell_index)
            nbytes = min(num_contiguous * row_bytes, chunk.size - num_filled)
            fill(head, cell, chunk[num_filled : num_filled + nbytes])
            num_filled += nbytes
        yield chunk
        del chunk
    file.release_pages(tensor.offset, tensor.nbytes)


def _make_filler(file: FileBytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    data = file.view(tensor.offset, tensor.nbytes)
    if tensor.type.is_block_quantized:
        return _make_block_filler(data, tensor, heads, num_cells)
    if tensor.is_transposed:
        return _make_channel_filler(data, tensor, heads, num_cells)
    rows = data.reshape(num_cells, heads, -1)
    row_elements = rows.view(f"V{rows.shape[2]}")[:, :, 0]  # a row as one element: copied as such

    def fill(head: int, cell: int, out: Bytes) -> None:
        rows_view = out.view(row_elements.dtype)
        rows_view[:] = row_elements[cell : cell + rows_view.size, head]

    return fill


def _make_channel_filler(data: Bytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    """Return a function that reads rows from ``[channel, cell]``, the order of V in backends without tiles."""
    layout = PackLayout(heads, tensor.row_values // heads, tensor.type.dtype, 1, 1, None)
    rows, by_head = HeadRowAccessor(layout, "value", num_cells), data.reshape(heads, -1)

    def fill(head: int, cell: int, out: Bytes) -> None:
        rows.read_rows(by_head[head], cell, out)

    return fill


def _make_block_filler(data: Bytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    """Return a function that dequantises rows from blocks, which may span heads."""
    ggml_type, head_dim, block_values = tensor.type, tensor.row_values // heads, tensor.type.values_per_block
    blocks = data.reshape(num_cells, -1, ggml_type.nbytes)

    def fill(head: int, cell: int, out: Bytes) -> None:
        values = out.view("=f4").reshape(-1, head_dim)
        first_block, block_end = head * head_dim // block_values, -(-(head + 1) * head_dim // block_values)
        selected_blocks = blocks[cell : cell + len(values), first_block:block_end]
        if head_dim % block_values == 0:
            dequantize(ggml_type, selected_blocks, values)
            return
        begin, row_values = head * head_dim - first_block * block_values, (block_end - first_block) * block_values
        rows_per_batch = max(1, _VALUES_PER_BATCH // row_values)
        for start in range(0, len(values), rows_per_batch):
            rows = values[start : start + rows_per_batch]
            decoded_rows = np.empty((len(rows), row_values), np.float32)
            dequantize(ggml_type, selected_blocks[start : start + rows_per_batch], decoded_rows)
            rows[:] = decoded_rows[:, begin : begin + head_dim]

    return fill


def iter_cell_chunks(
    file: FileBytes, tensor: CacheTensor, selection: CellSelection, chunk_bytes: int
) -> Iterator[Chunk]:
    """Yield the stored bytes of cells, one cell after the other; not for transposed tensors."""
    if selection.spans == ((0, selection.num_stream_cells),):
        yield from file.iter_chunks(tensor.offset, tensor.nbytes, chunk_bytes)
        return
    cell_bytes = tensor.nbytes // selection.num_stream_cells
    parts = (
        file.view(tensor.offset + begin * cell_bytes, (end - begin) * cell_bytes) for begin, end in selection.spans
    )
    yield from rechunk(parts, chunk_bytes, selection.num_cells * cell_bytes)


@dataclass(frozen=True)
class LayerHeads:
    """Kv heads of each layer, and whether they are known; unknown ones that are not required count as 1."""

    by_layer: tuple[int, ...]
    is_known: bool = True


def find_heads(
    label: str,
    stream: CacheStream,
    options: ReadOptions,
    *,
    is_required: bool,
    model_layers: Sequence[ModelLayer] | None = None,
    recorded_heads: Sequence[int] | None = None,
) -> LayerHeads:
    """Return the number of kv heads in the rows of each layer."""
    key_tensors = stream.keys
    packed_options = options.packed or PackedOptions()
    geometry, model = packed_options.geometry, packed_options.model
    kv_heads: tuple[int, ...] | None = None
    if geometry.kv_heads:
        kv_heads = (geometry.kv_heads,) * len(key_tensors)
    elif geometry.head_dim:
        kv_heads = tuple(tensor.row_values // geometry.head_dim for tensor in key_tensors)
    if model is not None:
        model_heads, head_dims = _read_model_heads(model, len(key_tensors), model_layers)
        if kv_heads is not None and kv_heads != model_heads:
            raise OptionError(f"kv heads: {kv_heads[0]} for the cache, but the model in {model} has {model_heads[0]}")
        kv_heads = model_heads
        _check_model_rows(label, model, key_tensors, model_heads, head_dims)
    if kv_heads is None and len(recorded_heads or ()) == len(key_tensors):
        kv_heads = tuple(recorded_heads or ())
    if kv_heads is None:
        if not is_required:
            return LayerHeads((1,) * len(key_tensors), is_known=False)
        raise MissingOptionError(
            f"{label}: a row of K has {key_tensors[0].row_values:,} values, and nothing in the file says of how many "
            "kv heads: say --kv-heads N, or --model FILE.gguf (in Python kv_heads=N, or model=)"
        )
    for tensor in stream.tensors:
        num_heads = kv_heads[tensor.layer]
        expected_values = num_heads * geometry.head_dim if geometry.head_dim and tensor.part == "key" else None
        if not num_heads or tensor.row_values % num_heads or expected_values not in (None, tensor.row_values):
            dims_text = f" of {geometry.head_dim}" if geometry.head_dim else ""
            raise OptionError(
                f"{label}: {tensor.part[0].upper()} of layer {tensor.layer} has {tensor.row_values:,} values a cell, "
                f"which are not {pluralize(num_heads, 'kv head')}{dims_text}"
            )
    return LayerHeads(kv_heads)


def _read_model_heads(
    model: str, num_layers: int, model_layers: Sequence[ModelLayer] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return kv heads and head_dim of each layer."""
    if model_layers is not None:
        return tuple(layer.kv_heads for layer in model_layers), tuple(layer.head_dim for layer in model_layers)
    geometry = gguf.read_gguf_geometry(model, num_layers)
    return geometry.kv_heads, (geometry.head_dim,) * num_layers


def _check_model_rows(
    label: str, model: str, key_tensors: Sequence[CacheTensor], heads: Sequence[int], head_dims: Sequence[int]
) -> None:
    for tensor in key_tensors:
        expected_values = heads[tensor.layer] * head_dims[tensor.layer]
        if tensor.row_values != expected_values:
            raise OptionError(
                f"{label}: K of layer {tensor.layer} has {tensor.row_values:,} values a cell, in {model} it has "
                f"{expected_values:,}: it is of another model"
            )


CACHE_NAMES = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """The layers of a file."""

    #: Model layer number of each layer, by cache.
    by_cache: tuple[tuple[int, ...], ...]
    #: State of each layer of the model.
    states: tuple[LayerStateInfo, ...]
    #: Layers of the model in the options; None without one.
    model: tuple[ModelLayer, ...] | None = None
    #: Reason of the numbering if it follows from the architecture's name alone; else empty.
    rule: str = ""


def count_layers(state: LlamaState) -> tuple[int, ...]:
    """Return how many layers each cache has; 0 for a cache without cells."""
    return tuple(max((len(stream.keys) for stream in streams), default=0) for streams in state.caches)


def number_layers(label: str, state: LlamaState, options: ReadOptions) -> LayerNumbers | None:
    """Return the layer numbers of a file with two caches, or of a known model; None if they are unknown."""
    counts = count_layers(state)
    recorded_layers, completeness = options.engine.recorded_layers, options.engine.recorded_completeness
    if options.model is not None:
        return _number_by_model(label, counts, options.model)
    if recorded_layers is not None and completeness is not None and len(recorded_layers) == sum(counts):
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        by_cache = tuple(tuple(recorded_layers[end - size : end]) for end, size in zip(ends, counts, strict=True))
        if all(number < len(completeness.layers) for number in recorded_layers):
            return LayerNumbers(by_cache=by_cache, states=completeness.layers)
    if len(counts) == 1 or state.architecture is None:
        return None
    return _number_by_architecture(state.architecture, counts)


def _number_by_model(label: str, counts: Sequence[int], model_path: str) -> LayerNumbers | None:
    layers = read_model_layers(model_path)
    if layers is None:
        return None
    states = tuple(layer.state for layer in layers)
    if len(counts) == 1:
        layer_numbers = tuple(layer.state.layer for layer in layers if layer.state.kind != "shared")
        has_all = len(layer_numbers) == counts[0]
        return LayerNumbers(by_cache=(layer_numbers,), states=states, model=layers) if has_all else None
    numbers = [
        [model_layer.state.layer for model_layer in list_unshared_layers(layers, is_window=is_window)]
        for is_window in (False, True)
    ]
    for name, expected_layers, num_found in zip(CACHE_NAMES, numbers, counts, strict=True):
        if num_found not in (0, len(expected_layers)):
            raise OptionError(
                f"{label}: the {name} cache has {pluralize(num_found, 'layer')}; the model in {model_path} has "
                f"{len(numbers[0])} with full attention and {len(numbers[1])} with a window: it is another model"
            )
    return LayerNumbers(by_cache=tuple(map(tuple, numbers)), states=states, model=layers)


def _number_by_architecture(architecture: str, counts: Sequence[int]) -> LayerNumbers | None:
    """Number layers as llama.cpp does for a model whose header has no pattern; None if the counts do not match."""
    windows = find_windows(architecture, sum(counts), None)
    if windows is None or [windows.count(False), windows.count(True)] != list(counts):
        return None
    numbers = [
        tuple(layer for layer, has_window in enumerate(windows) if has_window is is_window)
        for is_window in (False, True)
    ]
    states = tuple(
        LayerStateInfo(layer=layer, kind="window" if has_window else "full") for layer, has_window in enumerate(windows)
    )
    period = WINDOW_RULES[architecture].period
    rule = f"layers are numbered as in {architecture} models: one of {period} has full attention, the others a window"
    return LayerNumbers(by_cache=tuple(numbers), states=states, rule=rule)


def find_completeness(state: LlamaState, layer_numbers: LayerNumbers | None, caches: Sequence[int]) -> Completeness:
    """Return how much of the model's state the arrays of some of the caches contain."""
    counts = count_layers(state)
    other_state: tuple[str, ...] = ()
    if state.recurrent_bytes:
        size_text = pluralize(state.recurrent_bytes, "byte")
        other_state = (f"recurrent state of {size_text} is in the {state.kind} after K and V",)
    if layer_numbers is not None:
        included_layers = {
            layer_number for cache in caches if counts[cache] for layer_number in layer_numbers.by_cache[cache]
        }
        states = tuple(
            layer_state
            if layer_state.kind == "shared"
            else replace(layer_state, included=True, location="")
            if layer_state.layer in included_layers
            else _mark_left_out(state, layer_state, counts)
            for layer_state in layer_numbers.states
        )
        return Completeness(layers=states, other_missing=other_state)
    order = [*caches, *(cache for cache in range(len(counts)) if cache not in caches)]
    layer_states = []
    for layer_number, cache in enumerate(number for number in order for _ in range(counts[number])):
        layer_state = LayerStateInfo(layer=layer_number, kind="window" if cache else "full")
        layer_states.append(
            layer_state if cache in caches else _mark_left_out(state, layer_state, counts, is_numbered=False)
        )
    return Completeness(layers=tuple(layer_states), other_missing=other_state)


def _mark_left_out(
    state: LlamaState, layer: LayerStateInfo, counts: Sequence[int], *, is_numbered: bool = True
) -> LayerStateInfo:
    cache = int(layer.kind == "window" and len(counts) > 1)
    location = f"in the {CACHE_NAMES[cache]} cache of the {state.kind}"
    if not counts[cache]:
        location += ", which has no cells"
    elif not is_numbered:
        location += " (--model FILE.gguf tells which layers these are)"
    return replace(layer, included=False, location=location)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachePart:
    """The selected part of one cache of a file."""

    #: Index of the cache in the file: 1 for layers with a sliding window.
    cache: int
    #: Its stream.
    stream: CacheStream
    #: Selected cells.
    cells: CellSelection
    #: Model layer number of each of its layers; the index if unknown.
    layer_numbers: tuple[int, ...]
    #: Kv heads of each of its layers.
    heads: LayerHeads

    @property
    def positions(self) -> Positions:
        """Return the positions of the cells, in the order in which they are read."""
        return np.concatenate([self.stream.positions[begin:end] for begin, end in self.cells.spans])


def choose_caches(
    state: LlamaState, layer_numbers: LayerNumbers | None, options: EngineOptions, label: str
) -> tuple[int, ...]:
    """Return the caches of a file to read: all whose layers can be numbered, or the one that the options name."""
    if options.window_cache:
        if len(state.caches) == 1:
            raise OptionError(
                f"{label}: holds one cache: --part sliding-window (window_cache=) is about files with a second one, "
                "of a sliding window"
            )
        return (1,)
    return (0,) if len(state.caches) == 1 or layer_numbers is None else (0, 1)


def choose_stream(label: str, state: LlamaState, caches: Sequence[int], options: EngineOptions) -> int:
    """Return the number of the stream to read; `MissingOptionError` if it is ambiguous."""
    nonempty_streams = list_nonempty_streams(state, caches[0])
    if not nonempty_streams:
        raise SourceError(f"{label}: no cell is used, there is nothing to read")
    if options.stream is None:
        if len(nonempty_streams) > 1 and not options.default_to_first_stream:
            raise MissingOptionError(
                f"{label}: {len(nonempty_streams)} streams hold cells: --part stream=N says which "
                f"({format_numbers(nonempty_streams)}), in Python stream="
            )
        return nonempty_streams[0]
    if options.stream not in nonempty_streams:
        raise OptionError(
            f"{label}: stream {options.stream} holds no cells; --part stream=N (stream=) may be "
            f"{format_numbers(nonempty_streams)}"
        )
    return options.stream


def list_nonempty_streams(state: LlamaState, cache: int) -> list[int]:
    """Return the streams of a cache that have cells."""
    return [stream_index for stream_index, stream in enumerate(state.caches[cache]) if stream.num_cells]


def choose_cells(label: str, stream: CacheStream, sequence: int | None, *, is_window: bool) -> CellSelection:
    """Return the cells of a sequence, or all; those of a window in the order of their positions.

    llama.cpp reuses the cells of layers with a window, so that their order has no meaning.
    """
    cells = np.arange(stream.num_cells)
    if sequence is not None:
        owner_cells = np.repeat(cells, stream.seq_counts)[stream.seq_ids == sequence]
        if not owner_cells.size:
            sequences_text = format_numbers(sorted(set(stream.seq_ids.tolist())))
            raise OptionError(
                f"{label}: no cell is of sequence {sequence}; --part sequence=N (sequence=) may be {sequences_text}"
            )
        cells = np.unique(owner_cells)
    positions = stream.positions[cells]
    if is_window and np.unique(positions).size == positions.size:
        cells = cells[np.argsort(positions)]
    edges = np.flatnonzero(np.diff(cells) != 1) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), cells.size]
    return CellSelection(
        stream.num_cells, [(int(cells[b]), int(cells[e - 1]) + 1) for b, e in zip(begins, ends, strict=True)]
    )


def has_single_text(state: LlamaState, part: CachePart) -> bool:
    """Return whether the file has one text, to which its only list of token ids then belongs."""
    return len(list_nonempty_streams(state, part.cache)) == 1 and len(set(part.stream.seq_ids.tolist())) <= 1


def format_numbers(numbers: Sequence[int]) -> str:
    """Return the first numbers of a list for a message."""
    numbers_text = ", ".join(map(str, numbers[:8]))
    return numbers_text if len(numbers) <= 8 else f"{numbers_text} ... {numbers[-1]}"


def check_row_widths(label: str, row_widths: Sequence[int], options: ReadOptions) -> None:
    """Raise `OptionError` if one number of kv heads is specified for caches whose rows of K differ in width."""
    has_kv_heads = options.packed is not None and options.packed.geometry.kv_heads is not None
    if options.model is None and has_kv_heads and len(set(row_widths)) > 1:
        raise OptionError(
            f"{label}: a row of K has {row_widths[0]:,} values in the first cache and {row_widths[1]:,} in the second: "
            "--kv-heads is one number for both, --model FILE.gguf has the kv heads of each layer"
        )
