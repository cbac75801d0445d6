"""Which streams and cells of a state file are read, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...dtypes import Positions
from ...errors import MissingOptionError, OptionError, SourceError
from ..options import EngineOptions, ReadOptions
from .heads import Heads
from .layer_numbers import LayerNumbers
from .rows import Cells
from .state import State, Stream, Tensor


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
    numbers
        Of each of its layers, the layer of the model; or its place where nothing tells.
    heads
        Kv heads of each of its layers.
    """

    cache: int
    stream: Stream
    cells: Cells
    numbers: tuple[int, ...]
    heads: Heads

    @property
    def positions(self) -> Positions:
        """Positions of the cells, in the order in which they are read."""
        return np.concatenate([self.stream.positions[begin:end] for begin, end in self.cells.spans])

    @property
    def keys(self) -> list[Tensor]:
        """K of each layer."""
        return [tensor for tensor in self.stream.tensors if tensor.part == "key"]


def choose_caches(state: State, numbers: LayerNumbers | None, options: EngineOptions, where: str) -> tuple[int, ...]:
    """Return which caches of a file are read: all whose layers can be numbered, or the one that the options name.

    Raises
    ------
    OptionError
        For ``--window`` where there is one cache.
    """
    if options.window:
        if len(state.caches) == 1:
            raise OptionError(
                f"{where}: holds one cache: --window is about files with a second one, of a sliding window"
            )
        return (1,)
    return (0,) if len(state.caches) == 1 or numbers is None else (0, 1)


def choose_stream(where: str, state: State, caches: Sequence[int], options: EngineOptions) -> int:
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
    used = used_streams(state, caches[0])
    if not used:
        raise SourceError(f"{where}: no cell is used, there is nothing to read")
    if options.stream is None:
        if len(used) > 1 and not options.any_stream:
            raise MissingOptionError(
                f"{where}: {len(used)} streams hold cells: --stream says which ({list_numbers(used)}), in Python "
                "stream="
            )
        return used[0]
    if options.stream not in used:
        raise OptionError(f"{where}: stream {options.stream} holds no cells; --stream may be {list_numbers(used)}")
    return options.stream


def used_streams(state: State, cache: int) -> list[int]:
    """Return the streams of a cache that have cells."""
    return [number for number, stream in enumerate(state.caches[cache]) if stream.cells]


def choose_cells(where: str, stream: Stream, sequence: int | None, *, is_window: bool) -> Cells:
    """Return the cells of a sequence, or all; those of a window by their positions.

    llama.cpp uses the cells of layers with a window again and again, so that their order says nothing.

    Raises
    ------
    OptionError
        Where no cell is of the sequence.
    """
    cells = np.arange(stream.cells)
    if sequence is not None:
        owners = np.repeat(cells, stream.seq_counts)[stream.seq_ids == sequence]
        if not owners.size:
            known = list_numbers(sorted(set(stream.seq_ids.tolist())))
            raise OptionError(f"{where}: no cell is of sequence {sequence}; --sequence may be {known}")
        cells = np.unique(owners)
    places = stream.positions[cells]
    if is_window and np.unique(places).size == places.size:
        cells = cells[np.argsort(places)]
    edges = np.flatnonzero(np.diff(cells) != 1) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), cells.size]
    return Cells(stream.cells, [(int(cells[b]), int(cells[e - 1]) + 1) for b, e in zip(begins, ends, strict=True)])


def has_one_text(state: State, part: CachePart) -> bool:
    """Return whether the file has one text, so that its only list of token ids is of that."""
    return len(used_streams(state, part.cache)) == 1 and len(set(part.stream.seq_ids.tolist())) <= 1


def list_numbers(numbers: Sequence[int]) -> str:
    """Return the first numbers of a list for a message."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} ... {numbers[-1]}"


def check_rows(where: str, rows: Sequence[int], options: ReadOptions) -> None:
    """Raise `OptionError` where one number of kv heads is given for caches whose rows of K differ in width."""
    packed = options.packed
    if packed is not None and packed.model is None and packed.geometry.kv_heads and len(set(rows)) > 1:
        raise OptionError(
            f"{where}: a row of K has {rows[0]:,} values in the first cache and {rows[1]:,} in the second: --kv-heads "
            "is one number for both, --model FILE.gguf has the kv heads of each layer"
        )
