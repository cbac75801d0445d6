"""Parse a llama.cpp state file to its last byte, without reading K and V.

A file records neither its number of caches nor the llama.cpp build that wrote it. `parse_structure` tries the known
structures and returns the one that ends with the file. K and V have element types of ggml: a block contains
`values_per_block` numbers in `nbytes` bytes, consecutive fields, the first of them fp16 scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ..._util.text import pluralize
from ...dtypes import PARTS, Bytes, Floats, Indices, Part, Positions
from ...errors import SourceError
from ..base import FileBytes
from . import _blocks

BLOCK_VALUES = 32
_KERNEL_NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
"""Types in the order of the compiled kernels."""


@dataclass(frozen=True)
class GgmlType:
    """An element type of ggml."""

    #: Number and name in ggml.
    number: int
    name: str
    #: Dtype of the words; for blocks ``"fp32"``, that of the dequantised values.
    dtype: str
    #: Values and bytes of a block; 1 and the word size for types without blocks.
    values_per_block: int
    nbytes: int
    #: Names and bytes of the fields of a block, in order; empty for types without blocks.
    fields: tuple[tuple[str, int], ...] = ()

    @property
    def is_block_quantized(self) -> bool:
        """Return whether values are stored in blocks."""
        return bool(self.fields)


def dequantize(ggml_type: GgmlType, blocks: Bytes, out: Floats) -> None:
    """Dequantise blocks as ggml does in float32.

    Parameters
    ----------
    blocks
        ``[row, block, byte]``; the bytes of a row are contiguous.
    out
        ``[row, value]``, contiguous.
    """
    _blocks.dequantize(_KERNEL_NAMES.index(ggml_type.name), blocks, out)


def _make_block_type(number: int, name: str, *fields: tuple[str, int]) -> GgmlType:
    return GgmlType(number, name, "fp32", BLOCK_VALUES, sum(size for _, size in fields), fields)


_SCALE_FIELD, _SCALE_AND_MIN_FIELD = ("scales", 2), ("scales", 4)
_NIBBLES_FIELD, _FIFTH_BITS_FIELD = ("codes", 16), ("bits", 4)

GGML_TYPES = {
    block_type.number: block_type
    for block_type in (
        GgmlType(0, "f32", "fp32", 1, 4),
        GgmlType(1, "f16", "fp16", 1, 2),
        GgmlType(30, "bf16", "bf16", 1, 2),
        _make_block_type(2, "q4_0", _SCALE_FIELD, _NIBBLES_FIELD),
        _make_block_type(3, "q4_1", _SCALE_AND_MIN_FIELD, _NIBBLES_FIELD),
        _make_block_type(6, "q5_0", _SCALE_FIELD, _FIFTH_BITS_FIELD, _NIBBLES_FIELD),
        _make_block_type(7, "q5_1", _SCALE_AND_MIN_FIELD, _FIFTH_BITS_FIELD, _NIBBLES_FIELD),
        _make_block_type(8, "q8_0", _SCALE_FIELD, ("codes", 32)),
        _make_block_type(20, "iq4_nl", _SCALE_FIELD, _NIBBLES_FIELD),
    )
}
"""Element types by ggml's number."""

UNSUPPORTED_TYPES = {
    9: "q8_1",
    10: "q2_K",
    11: "q3_K",
    12: "q4_K",
    13: "q5_K",
    14: "q6_K",
    15: "q8_K",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
}
"""Names of types that llama.cpp offers for no KV cache, by ggml's number."""


_MIN_RUN_CELLS = 64
"""Minimum number of equal cells that are parsed together."""
_SCAN_BYTES = 1 << 20
"""Maximum bytes of cells that are parsed together."""


class ParseError(Exception):
    """The file does not have the structure that was tried."""


class BinaryReader:
    """Sequential reader of binary numbers in a file."""

    def __init__(self, file: FileBytes, position: int = 0) -> None:
        self.file, self.position = file, position

    @property
    def remaining_bytes(self) -> int:
        return self.file.size - self.position

    def read(self, nbytes: int, field_name: str) -> Bytes:
        return self.file.view(self.skip(nbytes, field_name), nbytes)

    def skip(self, nbytes: int, field_name: str) -> int:
        """Skip `nbytes` bytes; return the offset at which they begin."""
        if nbytes > self.remaining_bytes:
            raise ParseError(
                f"{field_name}: {nbytes:,} bytes are needed at offset {self.position:,}, {self.remaining_bytes:,} are "
                f"left"
            )
        self.position += nbytes
        return self.position - nbytes

    def read_ints(self, count: int, field_name: str, dtype: str = "<i4") -> Indices:
        itemsize = np.dtype(dtype).itemsize
        return np.frombuffer(self.read(count * itemsize, field_name), dtype).astype(np.int64)

    def read_u32(self, field_name: str) -> int:
        return int(self.read_ints(1, field_name, "<u4")[0])

    def read_u64(self, field_name: str) -> int:
        return int.from_bytes(self.read(8, field_name).tobytes(), "little")


def read_cells(cursor: BinaryReader, num_cells: int, extra_bytes: int) -> tuple[Positions, Indices, Indices]:
    """Read positions, sequence counts and sequence ids of cells; cells of equal counts are parsed together."""
    positions: list[Indices] = []
    counts: list[Indices] = []
    sequence_ids: list[Indices] = []
    num_read = 0
    run_length = _MIN_RUN_CELLS
    while num_read < num_cells:
        if (
            run_length < _MIN_RUN_CELLS
            and (single_cells := _read_cells_singly(cursor, num_cells - num_read, extra_bytes)) is not None
        ):
            cell_arrays = single_cells
        else:
            run = _read_equal_cells(cursor, num_cells - num_read, extra_bytes)
            cell_arrays, run_length = (run[:, 0], run[:, 1], run[:, 2 + extra_bytes // 4 :].reshape(-1)), len(run)
        for array_list, array in zip((positions, counts, sequence_ids), cell_arrays, strict=True):
            array_list.append(array)
        num_read += len(cell_arrays[0])
    all_positions = np.concatenate(positions)
    if (all_positions < 0).any():
        raise ParseError(f"a cell has the position {int(all_positions.min())}")
    return all_positions, np.concatenate(counts), np.concatenate(sequence_ids)


def _read_cells_singly(
    cursor: BinaryReader, max_cells: int, extra_bytes: int
) -> tuple[Positions, Indices, Indices] | None:
    """Read the next cells, of any sequence counts, within a window of the file; None if not even one fits."""
    nbytes = min(_SCAN_BYTES, cursor.remaining_bytes) // 4 * 4
    values = np.frombuffer(cursor.file.view(cursor.position, nbytes), "<u4")
    value_list, head_values = values.tolist(), 2 + extra_bytes // 4
    starts: list[int] = []
    end = 0
    while (
        len(starts) < max_cells
        and end + 1 < len(value_list)
        and end + head_values + value_list[end + 1] <= len(value_list)
    ):
        starts.append(end)
        end += head_values + value_list[end + 1]
    if not starts:
        return None
    cursor.skip(4 * end, "cells")
    signed_values, begins = values[:end].view("<i4").astype(np.int64), np.array(starts)
    is_id = np.ones(end, bool)
    for head_index in range(head_values):
        is_id[begins + head_index] = False
    return signed_values[begins], signed_values[begins + 1], signed_values[is_id]


def _read_equal_cells(cursor: BinaryReader, max_cells: int, extra_bytes: int) -> Indices:
    """Read the next run of cells that have one number of sequences: rows of position, that number, extra words, ids."""
    if cursor.remaining_bytes < 8:
        raise ParseError(f"a cell needs 8 bytes at offset {cursor.position:,}, {cursor.remaining_bytes:,} are left")
    num_sequences = int(np.frombuffer(cursor.file.view(cursor.position, 8), "<u4")[1])
    cell_bytes, lookahead = 8 + extra_bytes + 4 * num_sequences, 16
    while True:  # ever longer looks, so that cells that differ cost no more than they are
        num_viewed = min(max_cells, lookahead, cursor.remaining_bytes // cell_bytes)
        if not num_viewed:
            raise ParseError(f"a cell of {num_sequences:,} sequences at offset {cursor.position:,}")
        cells = np.frombuffer(cursor.file.view(cursor.position, num_viewed * cell_bytes), "<i4").reshape(num_viewed, -1)
        is_equal = cells[:, 1] == cells[0, 1]
        run_length = num_viewed if is_equal.all() else int(np.argmin(is_equal))
        if run_length < num_viewed or num_viewed < lookahead:
            break
        lookahead *= 4
    cursor.skip(run_length * cell_bytes, "cells")
    return cells[:run_length].astype(np.int64)


SESSION_MAGIC, SEQUENCE_MAGIC = 0x6767736E, 0x67677371
KIND_BY_MAGIC = {SESSION_MAGIC: "session", SEQUENCE_MAGIC: "sequence"}
VERSIONS_BY_MAGIC = {SESSION_MAGIC: (9, 10), SEQUENCE_MAGIC: (2, 3)}
MAGIC_BYTES = tuple(magic.to_bytes(4, "little") for magic in KIND_BY_MAGIC)
MAX_CELLS = 1 << 24
"""Maximum number of cells: more than any context has (16 million tokens)."""
_MAX_ARCHITECTURE_BYTES = 256
_MAX_STREAMS, _MAX_LAYERS = 1 << 12, 1 << 12
"""Sixteen and eight times as many as llama.cpp has at most (LLAMA_MAX_SEQ, LLAMA_MAX_LAYERS)."""
MLA_ARCHITECTURES = ("deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "minicpm3", "mistral4", "plm")
"""Architectures with latent attention, which may store no V."""
NO_TOKEN = -1
"""LLAMA_TOKEN_NULL, for images and embeddings."""
_EXTRA_CELL_BYTES = (0, 12, 8)
"""Bytes after the position of a cell: none; x, y and a token (M-RoPE, per-layer embeddings); x and y."""


class CacheTensor(NamedTuple):
    """Location and type of K or V of one layer in the file."""

    #: Part and layer, counted within its cache.
    part: Part
    layer: int
    #: Element type.
    type: GgmlType
    #: Values of a cell: kv_heads x head_dim.
    row_values: int
    #: Whether the order is ``[channel, cell]`` instead of ``[cell, channel]``.
    is_transposed: bool
    #: Offset in the file.
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheStream:
    """The used cells of one stream."""

    #: int64: position of each cell.
    positions: Positions
    #: Number of sequences of each cell, and their ids, cell after cell.
    seq_counts: Indices
    seq_ids: Indices
    #: K of every layer, then V; empty if there are no cells.
    tensors: tuple[CacheTensor, ...] = ()

    @property
    def num_cells(self) -> int:
        """Return the number of cells."""
        return int(self.positions.size)

    @property
    def keys(self) -> list[CacheTensor]:
        """K of each layer."""
        return [tensor for tensor in self.tensors if tensor.part == "key"]

    @property
    def sequences_by_cell(self) -> list[list[int]]:
        """Return the sequence ids of each cell."""
        ends = np.cumsum(self.seq_counts)
        ids = self.seq_ids.tolist()
        return [
            ids[end - num_sequences : end]
            for end, num_sequences in zip(ends.tolist(), self.seq_counts.tolist(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class LlamaState:
    """The parsed structure of a state file."""

    #: ``"session"`` or ``"sequence"``, and the number after its magic.
    kind: str
    version: int
    #: int64: token ids of llama.cpp's caller, from 0 to 2^32 - 2; `NO_TOKEN` for positions without a token.
    token_ids: Indices
    #: Architecture of the model; None in sequence files.
    architecture: str | None
    #: The cache, or two for models with sliding-window layers, which are in the second. Each is a list of streams.
    caches: tuple[tuple[CacheStream, ...], ...]
    #: Bytes of the state of recurrent layers, which hybrid models store after K and V.
    recurrent_bytes: int = 0


class _TrailingBytesError(ParseError):
    """The structure matches except for trailing bytes."""


class _UnsupportedTypeError(ParseError):
    """The structure matches except for an unsupported element type of ggml."""


def parse_structure(file: FileBytes, model_architecture: str | None = None) -> LlamaState:
    """Parse the structure of a state file."""
    reader = BinaryReader(file)
    try:
        magic, version = reader.read_u32("magic"), reader.read_u32("version")
        kind = KIND_BY_MAGIC[magic]
        if version not in VERSIONS_BY_MAGIC[magic]:
            versions_text = " and ".join(map(str, VERSIONS_BY_MAGIC[magic]))
            raise SourceError(f"{file.label}: a llama.cpp {kind} file of version {version}: read are {versions_text}")
        token_ids = reader.read_ints(reader.read_u32("number of tokens"), "tokens")
        token_ids = np.where(
            token_ids < NO_TOKEN, token_ids + (1 << 32), token_ids
        )  # ids of 32 bits; llama.cpp's are signed
        architecture = _read_architecture(reader) if magic == SESSION_MAGIC else None
    except ParseError as error:
        raise SourceError(f"{file.label}: is truncated: {error}") from None
    variants = _iter_variants(
        is_old=version < VERSIONS_BY_MAGIC[magic][1],
        is_session=magic == SESSION_MAGIC,
        may_lack_v=(architecture or model_architecture) in MLA_ARCHITECTURES,
    )
    caches, recurrent_bytes = _parse_caches(file, reader.position, variants)
    return LlamaState(
        kind=kind,
        version=version,
        token_ids=token_ids,
        architecture=architecture,
        caches=caches,
        recurrent_bytes=recurrent_bytes,
    )


def _read_architecture(reader: BinaryReader) -> str:
    num_bytes = reader.read_u32("length of the architecture")
    if num_bytes > _MAX_ARCHITECTURE_BYTES:
        raise ParseError(f"the name of the architecture has {num_bytes:,} bytes")
    return reader.read(num_bytes, "architecture").tobytes().decode("utf-8", "replace")


class _LayoutVariant(NamedTuple):
    """Unrecorded format differences between builds of llama.cpp."""

    extra_bytes: int
    has_v: bool
    has_two_caches: bool
    has_recurrent_state: bool
    has_stream_count: bool
    has_outputs: bool


def _iter_variants(*, is_old: bool, is_session: bool, may_lack_v: bool) -> Iterator[_LayoutVariant]:
    """Yield possible variants, likely ones first; `is_old` files may lack the number of streams or have outputs."""
    stream_count_options = (True, False) if is_old else (True,)
    output_options = (True, False) if is_old and is_session else (False,)
    v_options = (True, False) if may_lack_v else (True,)
    cache_options = (False, True)
    for has_outputs, has_stream_count, has_recurrent_state, has_two_caches, has_v, extra_bytes in product(
        output_options, stream_count_options, cache_options, cache_options, v_options, _EXTRA_CELL_BYTES
    ):
        yield _LayoutVariant(extra_bytes, has_v, has_two_caches, has_recurrent_state, has_stream_count, has_outputs)


def _parse_caches(
    file: FileBytes, offset: int, variants: Iterator[_LayoutVariant]
) -> tuple[tuple[tuple[CacheStream, ...], ...], int]:
    """Return the caches by the first variant that ends with the file, and the bytes of recurrent state.

    If none does, the error is that of the likeliest variant.
    """
    best_error: ParseError | None = None
    cache_parser = _CacheParser()
    for variant in variants:
        reader = BinaryReader(file, offset)
        try:
            if variant.has_outputs:
                _skip_outputs(reader)
            caches = tuple(cache_parser.parse_at(reader, variant) for _ in range(1 + variant.has_two_caches))
            recurrent_bytes = reader.remaining_bytes
            if variant.has_recurrent_state:
                _skip_recurrent(reader)
            if reader.remaining_bytes:
                raise _TrailingBytesError(
                    f"{pluralize(reader.remaining_bytes, 'byte')} are left after K and V at offset "
                    f"{reader.position:,}: another kind of cache, or written by a build of llama.cpp that is not known"
                )
            return caches, recurrent_bytes
        except ParseError as error:
            if best_error is None or (
                isinstance(error, _TrailingBytesError) and not isinstance(best_error, _TrailingBytesError)
            ):
                best_error = error
    if isinstance(best_error, _UnsupportedTypeError):
        raise SourceError(f"{file.label}: {best_error}")
    raise SourceError(f"{file.label}: is truncated or no llama.cpp state file that is known: {best_error}")


class _CacheParser:
    """Caches of parse results by offset and variant: variants that differ only in later parts parse each cache once."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[tuple[CacheStream, ...], int] | ParseError] = {}

    def parse_at(self, reader: BinaryReader, variant: _LayoutVariant) -> tuple[CacheStream, ...]:
        """Return the streams of the cache at the reader's position."""
        key = (reader.position, variant.extra_bytes, variant.has_v, variant.has_stream_count)
        if key not in self._results:
            try:
                streams = tuple(_iter_streams(reader, variant))
                self._results[key] = streams, reader.position
            except ParseError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, ParseError):
            raise result
        streams, reader.position = result
        return streams


def _skip_outputs(reader: BinaryReader) -> None:
    """Skip the output block of older sessions: positions, logits and embeddings."""
    reader.skip(4 * reader.read_u32("number of outputs"), "positions of outputs")
    for field_name in ("logits", "embeddings"):
        reader.skip(4 * reader.read_u64(f"number of {field_name}"), field_name)


def _skip_recurrent(reader: BinaryReader) -> None:
    """Skip the state of recurrent layers: cells, then rows of one kind for each layer, then rows of the other."""
    num_cells = reader.read_u32("number of recurrent cells")
    if not 1 <= num_cells <= MAX_CELLS:
        raise ParseError(f"{num_cells:,} recurrent cells at offset {reader.position - 4:,}")
    read_cells(reader, num_cells, 0)
    order, num_layers = reader.read_u32("order of recurrent state"), reader.read_u32("number of recurrent layers")
    if order:
        raise ParseError(f"the order of recurrent state is {order} at offset {reader.position - 8:,}")
    row_sizes: list[int] = []
    while reader.remaining_bytes and len(row_sizes) < 2 * num_layers:
        type_number = reader.read_u32("type of recurrent state")
        if type_number not in GGML_TYPES:
            raise ParseError(f"recurrent state of ggml type {type_number} at offset {reader.position - 4:,}")
        row_sizes.append(reader.read_u64("bytes of recurrent state"))
        reader.skip(num_cells * row_sizes[-1], "recurrent state")
    half = len(row_sizes) // 2
    kinds = set(row_sizes[:half]), set(row_sizes[half:])
    if len(row_sizes) % 2 or len(kinds[0]) != 1 or len(kinds[1]) != 1 or kinds[0] == kinds[1]:
        raise ParseError(
            f"recurrent state of {pluralize(len(row_sizes), 'tensor')}, which are not two kinds for each layer"
        )


def _iter_streams(reader: BinaryReader, variant: _LayoutVariant) -> Iterator[CacheStream]:
    num_streams = reader.read_u32("number of streams") if variant.has_stream_count else 1
    if not 1 <= num_streams <= min(_MAX_STREAMS, reader.remaining_bytes // 4):
        raise ParseError(f"{num_streams:,} streams at offset {reader.position - 4:,}")
    for _ in range(num_streams):
        yield _parse_stream(reader, variant)


def _parse_stream(reader: BinaryReader, variant: _LayoutVariant) -> CacheStream:
    num_cells = reader.read_u32("number of cells")
    if num_cells > MAX_CELLS:
        raise ParseError(f"{num_cells:,} cells at offset {reader.position - 4:,}, more than {MAX_CELLS:,}")
    if not num_cells:
        return CacheStream(positions=_EMPTY, seq_counts=_EMPTY, seq_ids=_EMPTY)
    positions, counts, sequence_ids = read_cells(reader, num_cells, variant.extra_bytes)
    order, num_layers = reader.read_u32("order of V"), reader.read_u32("number of layers")
    if order > 1:
        raise ParseError(f"the order of V is {order} at offset {reader.position - 8:,}, expected 0 or 1")
    if not 1 <= num_layers <= min(_MAX_LAYERS, reader.remaining_bytes // 12):
        raise ParseError(f"{num_layers:,} layers at offset {reader.position - 4:,}")
    parts = PARTS if variant.has_v else PARTS[:1]
    tensors = [
        _parse_tensor(reader, part, layer, num_cells, is_transposed=part == "value" and order == 1)
        for part in parts
        for layer in range(num_layers)
    ]
    return CacheStream(positions=positions, seq_counts=counts, seq_ids=sequence_ids, tensors=tuple(tensors))


_EMPTY = np.empty(0, np.int64)


def _parse_tensor(reader: BinaryReader, part: Part, layer: int, num_cells: int, *, is_transposed: bool) -> CacheTensor:
    label = f"{part[0].upper()} of layer {layer}"
    type_number = reader.read_u32(f"type of {label}")
    ggml_type = GGML_TYPES.get(type_number)
    if type_number in UNSUPPORTED_TYPES:
        types_text = ", ".join(supported_type.name for supported_type in GGML_TYPES.values())
        raise _UnsupportedTypeError(
            f"{label} is of type {UNSUPPORTED_TYPES[type_number]} (at offset {reader.position - 4:,}): read are "
            f"{types_text}"
        )
    if ggml_type is None:
        raise ParseError(f"{label} at offset {reader.position - 4:,}: ggml type {type_number} is none of a KV cache")
    if is_transposed:
        element_bytes, row_values = reader.read_u32("element size"), reader.read_u32("values of a cell")
        if element_bytes != ggml_type.nbytes or ggml_type.is_block_quantized:
            raise ParseError(f"{label}: elements of {element_bytes} bytes are not {ggml_type.name}")
        row_bytes = element_bytes * row_values
    else:
        row_bytes = reader.read_u64("bytes of a row")
        row_values = row_bytes // ggml_type.nbytes * ggml_type.values_per_block
    if not row_values or row_bytes * ggml_type.values_per_block != row_values * ggml_type.nbytes:
        raise ParseError(f"{label} at offset {reader.position:,}: rows of {row_bytes:,} bytes are not {ggml_type.name}")
    return CacheTensor(
        part,
        layer,
        ggml_type,
        row_values,
        is_transposed,
        reader.skip(num_cells * row_bytes, label),
        num_cells * row_bytes,
    )
