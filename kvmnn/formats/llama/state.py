"""The structure of a llama.cpp state file, parsed to its last byte; K and V are not touched.

A file says neither how many caches it holds nor which of its parts a build of llama.cpp wrote, so `parse` tries what is
known and takes what ends with the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ...dtypes import PARTS, Indices, Part, Positions
from ...errors import SourceError
from ...text import count
from ..file_bytes import FileBytes
from .cells import Cursor, NotSoError, read_cells
from .types import OTHERS, TYPES, GgmlType

SESSION, SEQUENCE = 0x6767736E, 0x67677371
KINDS = {SESSION: "session", SEQUENCE: "sequence"}
VERSIONS = {SESSION: (9, 10), SEQUENCE: (2, 3)}
MAGICS = tuple(magic.to_bytes(4, "little") for magic in KINDS)
MOST_CELLS = 1 << 24
"""More cells than any context has: those of one of 16 million tokens."""
_MOST_NAME = 256
_MOST_STREAMS, _MOST_LAYERS = 1 << 12, 1 << 12
"""Sixteen and eight times as many as llama.cpp has at most (LLAMA_MAX_SEQ, LLAMA_MAX_LAYERS)."""
MLA = ("deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "minicpm3", "mistral4", "plm")
"""Architectures whose attention works on latent K alone: they may store no V."""
NO_TOKEN = -1
"""LLAMA_TOKEN_NULL, which stands for pictures and embeddings."""
_EXTRA_BYTES = (0, 12, 8)
"""Behind the position of a cell: nothing; x, y and a token (M-RoPE, embeddings by layer); x and y."""


class Tensor(NamedTuple):
    """K or V of one layer as it lies in the file.

    Parameters
    ----------
    part, layer
        Which; layers are counted within their cache.
    type
        Of its elements.
    row
        Values of a cell: kv_heads x head_dim.
    transposed
        Whether the values of one channel lie together, ``[channel, cell]``; else ``[cell, channel]``.
    offset, nbytes
        Where it lies in the file.
    """

    part: Part
    layer: int
    type: GgmlType
    row: int
    transposed: bool
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The used cells of one stream.

    Parameters
    ----------
    positions
        int64, of each cell.
    seq_counts, seq_ids
        How many sequences each cell is of, and their numbers, cell after cell.
    tensors
        K of every layer, then V; none where there are no cells.
    """

    positions: Positions
    seq_counts: Indices
    seq_ids: Indices
    tensors: tuple[Tensor, ...] = ()

    @property
    def cells(self) -> int:
        """How many."""
        return int(self.positions.size)

    @property
    def seqs(self) -> list[list[int]]:
        """The sequences of each cell."""
        ends = np.cumsum(self.seq_counts)
        ids = self.seq_ids.tolist()
        return [ids[end - n : end] for end, n in zip(ends.tolist(), self.seq_counts.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """A state file.

    Parameters
    ----------
    kind, version
        ``"session"`` or ``"sequence"``, and the number behind its magic.
    tokens
        int64: the ids that the caller of llama.cpp gave, from 0 to 2^32 - 2; `NO_TOKEN` for what has none.
    architecture
        Of the model; None in sequence files.
    caches
        One; two for models with sliding-window layers, whose own is the second. Each is a list of streams.
    recurrent_bytes
        Of the state of recurrent layers, which hybrid models have behind K and V.
    """

    kind: str
    version: int
    tokens: Indices
    architecture: str | None
    caches: tuple[tuple[Stream, ...], ...]
    recurrent_bytes: int = 0


class _LeftError(NotSoError):
    """It is, up to bytes behind all that was tried."""


class _TypeError(NotSoError):
    """It is, up to an element type of ggml that is not read."""


def parse(file: FileBytes, model: str | None = None) -> State:
    """The structure of a state file.

    Parameters
    ----------
    file
        The whole file.
    model
        The architecture of the model, where it is known; sessions say it themselves. Only those in `MLA` store no V: of
        any other such a file is cut behind K.

    Raises
    ------
    SourceError
        When no known structure ends with the file's last byte.
    """
    cursor = Cursor(file)
    try:
        magic, version = cursor.u32("magic"), cursor.u32("version")
        kind = KINDS[magic]
        if version not in VERSIONS[magic]:
            known = " and ".join(map(str, VERSIONS[magic]))
            raise SourceError(f"{file.label}: a llama.cpp {kind} file of version {version}: read are {known}")
        tokens = cursor.numbers(cursor.u32("number of tokens"), "tokens")
        tokens = np.where(tokens < NO_TOKEN, tokens + (1 << 32), tokens)  # ids of 32 bits; llama.cpp's are signed
        architecture = _architecture(cursor) if magic == SESSION else None
    except NotSoError as error:
        raise SourceError(f"{file.label}: is truncated: {error}") from None
    variants = _variants(
        old=version < VERSIONS[magic][1], session=magic == SESSION, only_k=(architecture or model) in MLA
    )
    caches, rest = _caches(file, cursor.position, variants)
    return State(
        kind=kind, version=version, tokens=tokens, architecture=architecture, caches=caches, recurrent_bytes=rest
    )


def _architecture(cursor: Cursor) -> str:
    length = cursor.u32("length of the architecture")
    if length > _MOST_NAME:
        raise NotSoError(f"the name of the architecture has {length:,} bytes")
    return cursor.take(length, "architecture").tobytes().decode("utf-8", "replace")


class _Variant(NamedTuple):
    """What builds of llama.cpp differ in without saying so."""

    extra: int
    has_v: bool
    two: bool
    recurrent: bool
    streams: bool
    outputs: bool


def _variants(*, old: bool, session: bool, only_k: bool) -> Iterator[_Variant]:
    """What may be in a file, the likely first; `old` files may have no number of streams, and an output block."""
    streams = (True, False) if old else (True,)
    before = (True, False) if old and session else (False,)
    with_v = (True, False) if only_k else (True,)
    several = (False, True)
    for output, stream, recurrent, two, has_v, extra in product(
        before, streams, several, several, with_v, _EXTRA_BYTES
    ):
        yield _Variant(extra, has_v, two, recurrent, stream, output)


def _caches(file: FileBytes, start: int, variants: Iterator[_Variant]) -> tuple[tuple[tuple[Stream, ...], ...], int]:
    """The caches as the first of the variants has them that ends with the file, and the bytes of recurrent state.

    Else the error is what is wrong with the likeliest.
    """
    found: NotSoError | None = None
    read = _Caches()
    for variant in variants:
        cursor = Cursor(file, start)
        try:
            if variant.outputs:
                _skip_outputs(cursor)
            caches = tuple(read.at(cursor, variant) for _ in range(1 + variant.two))
            rest = cursor.left
            if variant.recurrent:
                _skip_recurrent(cursor)
            if cursor.left:
                raise _LeftError(
                    f"{count(cursor.left, 'byte')} are left behind K and V at offset {cursor.position:,}: another kind "
                    "of cache, or written by a build of llama.cpp that is not known"
                )
            return caches, rest
        except NotSoError as error:
            if found is None or (isinstance(error, _LeftError) and not isinstance(found, _LeftError)):
                found = error
    if isinstance(found, _TypeError):
        raise SourceError(f"{file.label}: {found}")
    raise SourceError(f"{file.label}: is truncated or no llama.cpp state file that is known: {found}")


class _Caches:
    """Caches by where they begin and how they are read: variants that differ in what comes behind read each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[tuple[Stream, ...], int] | NotSoError] = {}

    def at(self, cursor: Cursor, variant: _Variant) -> tuple[Stream, ...]:
        """The streams of the cache at the cursor."""
        key = (cursor.position, variant.extra, variant.has_v, variant.streams)
        if key not in self._known:
            try:
                streams = tuple(_streams(cursor, variant))
                self._known[key] = streams, cursor.position
            except NotSoError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, NotSoError):
            raise known
        streams, cursor.position = known
        return streams


def _skip_outputs(cursor: Cursor) -> None:
    """The output block of older sessions: positions, logits and embeddings."""
    cursor.skip(4 * cursor.u32("number of outputs"), "positions of outputs")
    for what in ("logits", "embeddings"):
        cursor.skip(4 * cursor.u64(f"number of {what}"), what)


def _skip_recurrent(cursor: Cursor) -> None:
    """State of recurrent layers: cells, then for each layer rows of the one kind, and for each rows of the other."""
    cells = cursor.u32("number of recurrent cells")
    if not 1 <= cells <= MOST_CELLS:
        raise NotSoError(f"{cells:,} recurrent cells at offset {cursor.position - 4:,}")
    read_cells(cursor, cells, 0)
    transposed, layers = cursor.u32("order of recurrent state"), cursor.u32("number of recurrent layers")
    if transposed:
        raise NotSoError(f"the order of recurrent state is {transposed} at offset {cursor.position - 8:,}")
    rows: list[int] = []
    while cursor.left and len(rows) < 2 * layers:
        number = cursor.u32("type of recurrent state")
        if number not in TYPES:
            raise NotSoError(f"recurrent state of ggml type {number} at offset {cursor.position - 4:,}")
        rows.append(cursor.u64("bytes of recurrent state"))
        cursor.skip(cells * rows[-1], "recurrent state")
    half = len(rows) // 2
    kinds = set(rows[:half]), set(rows[half:])
    if len(rows) % 2 or len(kinds[0]) != 1 or len(kinds[1]) != 1 or kinds[0] == kinds[1]:
        raise NotSoError(f"recurrent state of {count(len(rows), 'tensor')}, which are not two kinds for each layer")


def _streams(cursor: Cursor, variant: _Variant) -> Iterator[Stream]:
    streams = cursor.u32("number of streams") if variant.streams else 1
    if not 1 <= streams <= min(_MOST_STREAMS, cursor.left // 4):
        raise NotSoError(f"{streams:,} streams at offset {cursor.position - 4:,}")
    for _ in range(streams):
        yield _stream(cursor, variant)


def _stream(cursor: Cursor, variant: _Variant) -> Stream:
    cells = cursor.u32("number of cells")
    if cells > MOST_CELLS:
        raise NotSoError(f"{cells:,} cells at offset {cursor.position - 4:,}, more than {MOST_CELLS:,}")
    if not cells:
        return Stream(positions=_NONE, seq_counts=_NONE, seq_ids=_NONE)
    positions, counts, ids = read_cells(cursor, cells, variant.extra)
    transposed, layers = cursor.u32("order of V"), cursor.u32("number of layers")
    if transposed > 1:
        raise NotSoError(f"the order of V is {transposed} at offset {cursor.position - 8:,}, expected 0 or 1")
    if not 1 <= layers <= min(_MOST_LAYERS, cursor.left // 12):
        raise NotSoError(f"{layers:,} layers at offset {cursor.position - 4:,}")
    parts = PARTS if variant.has_v else PARTS[:1]
    tensors = [
        _tensor(cursor, part, layer, cells, transposed=part == "value" and transposed == 1)
        for part in parts
        for layer in range(layers)
    ]
    return Stream(positions=positions, seq_counts=counts, seq_ids=ids, tensors=tuple(tensors))


_NONE = np.empty(0, np.int64)


def _tensor(cursor: Cursor, part: Part, layer: int, cells: int, *, transposed: bool) -> Tensor:
    where = f"{part[0].upper()} of layer {layer}"
    number = cursor.u32(f"type of {where}")
    kind = TYPES.get(number)
    if number in OTHERS:
        known = ", ".join(each.name for each in TYPES.values())
        raise _TypeError(f"{where} is of type {OTHERS[number]} (at offset {cursor.position - 4:,}): read are {known}")
    if kind is None:
        raise NotSoError(f"{where} at offset {cursor.position - 4:,}: ggml type {number} is none of a KV cache")
    if transposed:
        size, row = cursor.u32("element size"), cursor.u32("values of a cell")
        if size != kind.nbytes or kind.is_block:
            raise NotSoError(f"{where}: elements of {size} bytes are not {kind.name}")
        nbytes = size * row
    else:
        nbytes = cursor.u64("bytes of a row")
        row = nbytes // kind.nbytes * kind.values
    if not row or nbytes * kind.values != row * kind.nbytes:
        raise NotSoError(f"{where} at offset {cursor.position:,}: rows of {nbytes:,} bytes are not {kind.name}")
    return Tensor(part, layer, kind, row, transposed, cursor.skip(cells * nbytes, where), cells * nbytes)
