"""Which streams and cells of a state file are read, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...dtypes import Positions
from ...errors import MissingOptionError, OptionError, SourceError
from ..options import EngineOptions, ReadOptions
from .heads import LayerHeads
from .layer_numbers import LayerNumbers
from .rows import CellSelection
from .state import CacheStream, CacheTensor, LlamaState


@dataclass(frozen=True, kw_only=True, eq=False)
class CachePart:
    """What is read of one cache of a file.

    Parameters
    ----------
    cache
        Which cache of the file: 1 for that of layers with a sliding window.
    stream
        The stream of it.
    cells
        Its cells that are read.
    layer_numbers
        Of each of its layers, the layer of the model; or its place where nothing tells.
    heads
        Kv heads of each of its layers.
    """

    cache: int
    stream: CacheStream
    cells: CellSelection
    layer_numbers: tuple[int, ...]
    heads: LayerHeads

    @property
    def positions(self) -> Positions:
        """Positions of the cells, in the order in which they are read."""
        return np.concatenate([self.stream.positions[begin:end] for begin, end in self.cells.spans])

    @property
    def keys(self) -> list[CacheTensor]:
        """K of each layer."""
        return [tensor for tensor in self.stream.tensors if tensor.part == "key"]


def choose_caches(
    state: LlamaState, layer_numbers: LayerNumbers | None, options: EngineOptions, label: str
) -> tuple[int, ...]:
    """Return which caches of a file are read: all whose layers can be numbered, or the one that the options name.

    Raises
    ------
    OptionError
        For ``--window`` where there is one cache.
    """
    if options.window_cache:
        if len(state.caches) == 1:
            raise OptionError(
                f"{label}: holds one cache: --window is about files with a second one, of a sliding window"
            )
        return (1,)
    return (0,) if len(state.caches) == 1 or layer_numbers is None else (0, 1)


def choose_stream(label: str, state: LlamaState, caches: Sequence[int], options: EngineOptions) -> int:
    """Return the number of the stream that is meant.

    Raises
    ------
    SourceError
        Where no stream has cells.
    MissingOptionError
        Where several have.
    OptionError
        Where the one that the options name has none.
    """
    nonempty_streams = list_nonempty_streams(state, caches[0])
    if not nonempty_streams:
        raise SourceError(f"{label}: no cell is used, there is nothing to read")
    if options.stream is None:
        if len(nonempty_streams) > 1 and not options.default_to_first_stream:
            raise MissingOptionError(
                f"{label}: {len(nonempty_streams)} streams hold cells: --stream says which "
                f"({format_numbers(nonempty_streams)}), in Python "
                "stream="
            )
        return nonempty_streams[0]
    if options.stream not in nonempty_streams:
        raise OptionError(
            f"{label}: stream {options.stream} holds no cells; --stream may be {format_numbers(nonempty_streams)}"
        )
    return options.stream


def list_nonempty_streams(state: LlamaState, cache: int) -> list[int]:
    """Return the streams of a cache that have cells."""
    return [stream_index for stream_index, stream in enumerate(state.caches[cache]) if stream.num_cells]


def choose_cells(label: str, stream: CacheStream, sequence: int | None, *, is_window: bool) -> CellSelection:
    """Return the cells of a sequence, or all; those of a window by their positions.

    llama.cpp uses the cells of layers with a window again and again, so that their order says nothing.

    Raises
    ------
    OptionError
        Where no cell is of the sequence.
    """
    cells = np.arange(stream.num_cells)
    if sequence is not None:
        owner_cells = np.repeat(cells, stream.seq_counts)[stream.seq_ids == sequence]
        if not owner_cells.size:
            sequences_text = format_numbers(sorted(set(stream.seq_ids.tolist())))
            raise OptionError(f"{label}: no cell is of sequence {sequence}; --sequence may be {sequences_text}")
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
    """Return whether the file has one text, so that its only list of token ids is of that."""
    return len(list_nonempty_streams(state, part.cache)) == 1 and len(set(part.stream.seq_ids.tolist())) <= 1


def format_numbers(numbers: Sequence[int]) -> str:
    """Return the first numbers of a list for a message."""
    numbers_text = ", ".join(map(str, numbers[:8]))
    return numbers_text if len(numbers) <= 8 else f"{numbers_text} ... {numbers[-1]}"


def check_row_widths(label: str, row_widths: Sequence[int], options: ReadOptions) -> None:
    """Raise `OptionError` where one number of kv heads is given for caches whose rows of K differ in width."""
    packed_options = options.packed
    if (
        packed_options is not None
        and packed_options.model is None
        and packed_options.geometry.kv_heads
        and len(set(row_widths)) > 1
    ):
        raise OptionError(
            f"{label}: a row of K has {row_widths[0]:,} values in the first cache and {row_widths[1]:,} in the second: "
            f"--kv-heads "
            "is one number for both, --model FILE.gguf has the kv heads of each layer"
        )
