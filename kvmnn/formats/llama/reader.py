"""Read K and V of a llama.cpp state file, as ``[kv_head, cell, head_dim]`` or, for frames, as stored.

llama.cpp's transforms of K and V are described as far as the architecture and the cache types determine them.
`llama_model_rope_type` has an entry for every architecture: two neighbours of a head are rotated together (NORM), or
two dimensions half a head apart (NEOX). For `_PERMUTED_ARCHITECTURES` other engines certainly use halves: llama.cpp's
converter (`conversion/*.py`) permutes their query and key weights in every layer. Of other architectures with
neighbours some were trained so, others are permuted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from ... import dtypes
from ..._util.named_tuple import NamedTuple
from ..._util.text import pluralize
from ...arrays.array import LazyArray, UnsupportedArrayError
from ...arrays.engine_cache import EngineCacheInfo
from ...arrays.layers import format_array_name
from ...arrays.llama_transforms import Transform, list_possible_transforms
from ...arrays.source import Source
from ...dtypes import Positions
from ...errors import MissingOptionError, OptionError, SourceError
from ...files.mapped_file import MappedFile
from .. import passthrough
from ..base import FileBytes, FileFormat
from ..options import EngineOptions, ReadOptions
from ..passthrough import Region, is_smaller_by_fields, make_byte_array, make_field_array
from ..tensor_selection import format_dequantized_note
from . import gguf
from .cache_selection import (
    CACHE_NAMES,
    CachePart,
    CellSelection,
    LayerHeads,
    LayerNumbers,
    check_row_widths,
    choose_caches,
    choose_cells,
    choose_stream,
    count_layers,
    find_completeness,
    find_heads,
    format_numbers,
    has_single_text,
    iter_cell_chunks,
    iter_head_chunks,
    list_nonempty_streams,
    number_layers,
)
from .state import MAGIC_BYTES, CacheStream, CacheTensor, LlamaState, parse_structure

_PERMUTED_ARCHITECTURES: Final = frozenset(
    ("arcee", "granite", "granitemoe", "internlm2", "llama", "minicpm", "mistral3", "olmo", "smollm3")
)
_HALF_PAIRED_ARCHITECTURES: Final = frozenset(
    (
        *("afmoe", "apertus", "bailingmoe2", "bert", "bitnet", "codeshell", "cogvlm", "dbrx", "dots1"),
        *("dream", "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma"),
        *("gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4moe", "gpt-oss", "gptneox"),
        *("grok", "grovemoe", "hunyuan-dense", "hunyuan-moe", "jina-bert-v3", "laguna", "lfm2", "lfm2moe"),
        *("llada-moe", "maple", "mellum", "mimo2", "minicpm3", "minimax-01", "minimax-m2", "nemotron"),
        *("nomic-bert", "nomic-bert-moe", "olmo2", "olmoe", "openelm", "orion", "paddleocr"),
        *("pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "qwen", "qwen2"),
        *("qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl"),
        *("qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "spark2_5", "stablelm", "starcoder2", "step35"),
    )
)
"""Architectures of rope type NEOX or M-RoPE, which share the pairing."""
_UNROTATED_ARCHITECTURES: Final = frozenset(
    ("bloom", "gpt2", "jais", "jamba", "jina-bert-v2", "mamba", "mamba2", "mpt", "nemotron_h", "refact", "t5")
)


def is_key_order_permuted(architecture: str | None, head_dim: int, rotary_dim: int | None) -> bool | None:
    """Return whether llama.cpp stores K in another element order than other engines; None if unknown."""
    if head_dim % 2 or architecture in _HALF_PAIRED_ARCHITECTURES or architecture in _UNROTATED_ARCHITECTURES:
        return False
    return True if architecture in _PERMUTED_ARCHITECTURES and rotary_dim in (None, head_dim) else None


def list_possible_rotations(tensors: Sequence[CacheTensor], heads: Sequence[int]) -> tuple[Transform, ...]:
    """List the rotations of newer builds: of quantised K or V, in heads of a multiple of 64 dimensions."""
    transforms = {
        transform
        for tensor in tensors
        if tensor.type.is_block_quantized
        for transform in list_possible_transforms(tensor.part, tensor.row_values // heads[tensor.layer])
        if transform != "k-order"
    }
    return tuple(sorted(transforms))


ENGINE = "llama.cpp"


class _PartLayer(NamedTuple):
    """A layer of the model, and the part of the file that contains it."""

    layer_number: int
    part: CachePart
    layer_index: int

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of K and V."""
        return self.part.heads.by_layer[self.layer_index]

    @property
    def tensors(self) -> list[CacheTensor]:
        """Return K, and V if the layer has any."""
        return [tensor for tensor in self.part.stream.tensors if tensor.layer == self.layer_index]


def _list_layers(parts: Sequence[CachePart]) -> list[_PartLayer]:
    layers = [
        _PartLayer(layer_number, part, layer_index)
        for part in parts
        for layer_index, layer_number in enumerate(part.layer_numbers)
    ]
    return sorted(layers, key=lambda layer: layer.layer_number)


def describe_state(state: LlamaState, parts: Sequence[CachePart], options: ReadOptions) -> EngineCacheInfo:
    """Return the description of the used cells in a file."""
    layers, are_heads_known = _list_layers(parts), all(part.heads.is_known for part in parts)
    heads = tuple(layer.kv_heads for layer in layers)
    head_dims = tuple(layer.tensors[0].row_values // layer.kv_heads for layer in layers)
    architecture = state.architecture or read_model_architecture(options)
    altered, perhaps_altered = _find_transforms(layers, architecture, options, are_heads_known=are_heads_known)
    positions, layer_positions = _collect_positions(layers)
    type_names = [
        tensor.type.name
        for tensor_index in (0, 1)
        for layer in layers
        for tensor in layer.tensors[tensor_index : tensor_index + 1]
    ]
    return EngineCacheInfo(
        engine=ENGINE,
        kind=state.kind,
        layers=len(layers),
        kv_heads=heads[0] if are_heads_known and len({*heads}) == 1 else None,
        layer_kv_heads=heads if are_heads_known and len({*heads}) > 1 else (),
        head_dim=head_dims[0] if are_heads_known and len({*head_dims}) == 1 else None,
        layer_head_dims=head_dims if are_heads_known and len({*head_dims}) > 1 else (),
        tokens=max(part.cells.num_cells for part in parts),
        types=tuple(type_names),
        positions=positions,
        layer_positions=layer_positions,
        token_ids=state.token_ids if has_single_text(state, parts[0]) else None,
        dequantised=_list_dequantized_types(parts, options.engine),
        type_bits={
            tensor.type.name: 8 * tensor.type.nbytes / tensor.type.values_per_block
            for layer in layers
            for tensor in layer.tensors
            if tensor.type.is_block_quantized
        },
        altered=altered,
        perhaps_altered=perhaps_altered,
        details={**_build_details(state, parts, options.engine), "architecture": architecture},
    )


def read_model_architecture(options: ReadOptions) -> str | None:
    """Return the architecture of the model that the options name."""
    return None if options.model is None else gguf.read_architecture(options.model)


def _collect_positions(layers: Sequence[_PartLayer]) -> tuple[Positions | None, tuple[Positions, ...] | None]:
    """Return the positions of all layers, or of each if they differ."""
    positions_by_part = {id(layer.part): layer.part.positions for layer in layers}
    first_positions, *other_positions = positions_by_part.values()
    if all(np.array_equal(first_positions, positions) for positions in other_positions):
        return first_positions, None
    return None, tuple(positions_by_part[id(layer.part)] for layer in layers)


_Transforms = tuple[Transform, ...]


def _find_transforms(
    layers: Sequence[_PartLayer], architecture: str | None, options: ReadOptions, *, are_heads_known: bool
) -> tuple[_Transforms, _Transforms]:
    """Return the transforms that were certainly applied to K and V, and those that may have been.

    Both are empty for raw blocks, and if the heads are unknown.
    """
    if not are_heads_known or options.engine.raw_blocks:
        return (), ()
    rotary_dim = None if options.model is None else gguf.read_rotary_dim(options.model)
    rotations_by_layer = [list_possible_rotations(layer.tensors, layer.part.heads.by_layer) for layer in layers]
    possible_transforms = tuple(sorted({transform for rotations in rotations_by_layer for transform in rotations}))
    permutation_flags = {
        is_key_order_permuted(architecture, layer.tensors[0].row_values // layer.kv_heads, rotary_dim)
        for layer in layers
    }
    order_transform: _Transforms = ("k-order",)
    if permutation_flags == {True}:
        return order_transform, possible_transforms
    return (), possible_transforms if permutation_flags == {False} else (*possible_transforms, *order_transform)


def _build_details(state: LlamaState, parts: Sequence[CachePart], options: EngineOptions) -> dict[str, Any]:
    first_part = parts[0]
    streams = state.caches[first_part.cache]
    cells = [[stream.num_cells for stream in state.caches[part.cache]] for part in parts]
    return {
        "version": state.version,
        "architecture": state.architecture,
        "caches": len(state.caches),
        "recurrent_bytes": state.recurrent_bytes,
        "window": options.window_cache,
        "streams": len(streams),
        "cells": cells[0],
        **({"window_cells": cells[1]} if len(cells) > 1 else {}),
        "stream": next(stream_index for stream_index, stream in enumerate(streams) if stream is first_part.stream),
        "sequences": sorted(set(first_part.stream.seq_ids.tolist())),
        **({} if options.sequence is None else {"sequence": options.sequence}),
        "v_transposed": any(tensor.is_transposed for part in parts for tensor in part.stream.tensors),
        "row_values": sorted({tensor.row_values for part in parts for tensor in part.stream.tensors}),
    }


def iter_notes(
    state: LlamaState, parts: Sequence[CachePart], layer_numbers: LayerNumbers | None, options: EngineOptions
) -> Iterator[str]:
    """Return a note for each inferred property, and for each part of the file that the arrays do not contain."""
    first_part = parts[0]
    if state.recurrent_bytes:
        yield (
            f"state of recurrent layers ({pluralize(state.recurrent_bytes, 'byte')}) lies after K and V, and is not "
            "read; layers are counted without these"
        )
    nonempty_streams = list_nonempty_streams(state, first_part.cache)
    if len(nonempty_streams) > 1 and options.stream is None:
        yield f"{len(nonempty_streams)} streams hold cells ({format_numbers(nonempty_streams)}): this is the first"
    if len(sequences := sorted(set(first_part.stream.seq_ids.tolist()))) > 1 and options.sequence is None:
        yield (
            f"cells are of {len(sequences)} sequences ({format_numbers(sequences)}): --part sequence=N takes "
            "those of one"
        )
    if state.token_ids.size and not has_single_text(state, first_part):
        yield (
            f"the {pluralize(state.token_ids.size, 'token id')} of the file may be of any of its texts, and are left "
            "out (--token-ids says those of what is read)"
        )
    elif state.token_ids.size:
        yield from _iter_token_id_notes(state.token_ids.size, parts)
    if layer_numbers is not None and layer_numbers.rule:
        yield f"{layer_numbers.rule} (--model FILE.gguf has those of this model)"
    elif len(state.caches) > len(parts) and layer_numbers is None:
        yield "layers are counted by cache: --model FILE.gguf tells which they are"
    if not all(part.heads.is_known or _stores_only_blocks(part.stream, options) for part in parts):
        yield "kv heads are not in the file: each row is taken as one head (--kv-heads N or --model FILE.gguf)"
    yield from _iter_block_notes(parts, options)


def _iter_token_id_notes(num_ids: int, parts: Sequence[CachePart]) -> Iterator[str]:
    """Yield a note if token ids and cells differ in number: builds write the id of a token not yet evaluated."""
    end = 1 + max(int(part.positions.max(initial=-1)) for part in parts)
    if num_ids > end:
        extra_text = "the last token id" if num_ids - end == 1 else f"the last {num_ids - end:,} token ids"
        verb, pronoun = ("has", "it") if num_ids - end == 1 else ("have", "them")
        yield f"{extra_text} of {num_ids:,} {verb} no cell: no K and V belong to {pronoun}"
    elif num_ids < end:
        yield f"the file has {pluralize(num_ids, 'token id')}, its cells have positions up to {end - 1:,}"


def _iter_block_notes(parts: Sequence[CachePart], options: EngineOptions) -> Iterator[str]:
    """Yield notes about dequantised numbers: the blocks they were made from, and what remains unknown."""
    quantized_tensors = [
        (tensor, part) for part in parts for tensor in part.stream.tensors if tensor.type.is_block_quantized
    ]
    if options.raw_blocks or not quantized_tensors:
        return
    num_values = sum(tensor.row_values * part.cells.num_cells for tensor, part in quantized_tensors)
    block_bytes = sum(
        tensor.row_values // tensor.type.values_per_block * tensor.type.nbytes * part.cells.num_cells
        for tensor, part in quantized_tensors
    )
    dtype = dtypes.parse_dtype(quantized_tensors[0][0].type.dtype)
    yield format_dequantized_note(
        _list_dequantized_types(parts, options), dtype.name, block_bytes, num_values * dtype.itemsize
    )
    possible_rotations = {
        transform
        for tensor, part in quantized_tensors
        for transform in list_possible_rotations([tensor], part.heads.by_layer)
    }
    unresolved_rotations = sorted(possible_rotations) if options.invert is None else ()
    if unresolved_rotations:
        names = " and ".join(transform[0].upper() for transform in unresolved_rotations)
        yield (
            f"newer builds of llama.cpp store quantised {names} rotated by a Hadamard matrix, and the file does not "
            "say so: rotated numbers are not those that other types and engines hold (--invert "
            f"{','.join(unresolved_rotations)} turns them back)"
        )


def _list_dequantized_types(parts: Sequence[CachePart], options: EngineOptions) -> tuple[str, ...]:
    if options.raw_blocks:
        return ()
    return tuple(
        sorted({tensor.type.name for part in parts for tensor in part.stream.tensors if tensor.type.is_block_quantized})
    )


def read(file: FileBytes, options: ReadOptions) -> Source:
    """Return K and V of the used cells of a stream, in cell order, with a description of all other contents.

    Both caches of a file with two are read if the model, or llama.cpp's default for its architecture, determines their
    layers; cells of layers with a sliding window are in the order of their positions.

    Parameters
    ----------
    file
        The whole file.
    options
        `EngineOptions` select the stream, and raw blocks. `PackedOptions` have the kv heads: as geometry, or as a
        ``.gguf`` model.

    Raises
    ------
    SourceError
        When the file is damaged or has an unknown structure.
    OptionError
        When the file has no such stream or second cache, the options and the model differ in geometry, or the stream or
        the kv heads are ambiguous.
    """
    state, layer_numbers = parse_state(file, options)
    caches = choose_caches(state, layer_numbers, options.engine, file.label)
    stream = choose_stream(file.label, state, caches, options.engine)
    counts = count_layers(state)
    parts = [
        _select_part(file.label, state, cache, stream, layer_numbers, options)
        for cache in caches
        if cache == caches[0] or state.caches[cache][min(stream, len(state.caches[cache]) - 1)].num_cells
    ]
    if len(parts) > 1:
        check_row_widths(file.label, [part.stream.keys[0].row_values for part in parts], options)
    arrays = [
        (layer_number, _make_cache_array(file, tensor, layer_number, part, options))
        for part in parts
        for tensor in sorted(part.stream.tensors, key=lambda tensor: (tensor.layer, tensor.part))
        for layer_number in [part.layer_numbers[tensor.layer]]
    ]
    arrays.sort(key=lambda entry: entry[0])
    read_caches = [part.cache for part in parts if counts[part.cache]]
    return Source(
        [array for _, array in arrays],
        notes=list(iter_notes(state, parts, layer_numbers, options.engine)),
        engine_cache=describe_state(state, parts, options),
        completeness=find_completeness(state, layer_numbers, read_caches),
    )


def parse_state(file: FileBytes, options: ReadOptions) -> tuple[LlamaState, LayerNumbers | None]:
    """Return the structure of a file, and its layer numbers if they are known; errors as `read`."""
    model = read_model_architecture(options)
    state = parse_structure(file, model)
    if None not in (state.architecture, model) and state.architecture != model:
        raise OptionError(f"{file.label}: is of architecture {state.architecture!r}, the model of {model!r}")
    check_layer_count(file.label, state, options)
    return state, number_layers(file.label, state, options)


def check_layer_count(label: str, state: LlamaState, options: ReadOptions) -> None:
    """Raise `OptionError` when the model that the options name has another number of layers than the file."""
    layer_counts, model = count_layers(state), options.model
    if model is None or state.recurrent_bytes or not all(layer_counts):
        return
    expected_counts = gguf.list_cache_layer_counts(model)
    if expected_counts and sum(layer_counts) not in expected_counts:
        counts_text = " or ".join(map(str, sorted(expected_counts)))
        raise OptionError(
            f"{label}: has K and V of {pluralize(sum(layer_counts), 'layer')}, a cache of the model in {model} has "
            f"{counts_text}: it is of another model"
        )


def _select_part(
    label: str,
    state: LlamaState,
    cache: int,
    stream_index: int,
    layer_numbers: LayerNumbers | None,
    options: ReadOptions,
) -> CachePart:
    streams = state.caches[cache]
    stream = streams[min(stream_index, len(streams) - 1)]
    cells = choose_cells(label, stream, options.engine.sequence, is_window=cache == 1)
    is_inverting = options.engine.invert not in (None, (), ("none",))
    is_required = is_inverting or not (
        options.engine.allow_unknown_heads or _stores_only_blocks(stream, options.engine)
    )
    heads = find_stream_heads(label, state, cache, stream, layer_numbers, options, is_required=is_required)
    return CachePart(
        cache=cache,
        stream=stream,
        cells=cells,
        layer_numbers=list_layer_numbers(stream, cache, layer_numbers),
        heads=heads,
    )


def list_layer_numbers(stream: CacheStream, cache: int, layer_numbers: LayerNumbers | None) -> tuple[int, ...]:
    """Return the model's layer number of each layer of a stream; its index if the number is unknown."""
    cache_numbers = () if layer_numbers is None else layer_numbers.by_cache[cache]
    return cache_numbers if len(cache_numbers) == len(stream.keys) else tuple(range(len(stream.keys)))


def find_stream_heads(
    label: str,
    state: LlamaState,
    cache: int,
    stream: CacheStream,
    layer_numbers: LayerNumbers | None,
    options: ReadOptions,
    *,
    is_required: bool,
) -> LayerHeads:
    """Return the kv heads of each layer of a stream; errors as `find_heads`."""
    model = None if layer_numbers is None else layer_numbers.model
    layer_ids = list_layer_numbers(stream, cache, layer_numbers)
    recorded_heads, counts = options.engine.recorded_kv_heads, count_layers(state)
    if recorded_heads is not None and len(recorded_heads) == sum(counts):  # of all caches, one after the other
        recorded_heads = recorded_heads[sum(counts[:cache]) : sum(counts[: cache + 1])]
    return find_heads(
        label if len(state.caches) == 1 else f"{label}: {CACHE_NAMES[cache]} cache",
        stream,
        options,
        is_required=is_required,
        model_layers=None if model is None else [model[number] for number in layer_ids],
        recorded_heads=recorded_heads,
    )


def _stores_only_blocks(stream: CacheStream, options: EngineOptions) -> bool:
    """Return whether all arrays are raw blocks of cells, which have no head axis."""
    return options.raw_blocks and all(tensor.type.is_block_quantized for tensor in stream.tensors)


def _make_cache_array(
    file: FileBytes, tensor: CacheTensor, layer_number: int, part: CachePart, options: ReadOptions
) -> LazyArray:
    ggml_type, num_heads = tensor.type, part.heads.by_layer[tensor.layer]
    name = format_array_name(layer_number, tensor.part)
    if ggml_type.is_block_quantized and options.engine.raw_blocks:  # ``[cell, block, byte]``
        return LazyArray(
            name=name,
            dtype="fp16",
            shape=(part.cells.num_cells, tensor.row_values // ggml_type.values_per_block, ggml_type.nbytes),
            array_dtype="|u1",
            reader=partial(iter_cell_chunks, file, tensor, part.cells),
        )
    if options.dtype not in (None, ggml_type.dtype):
        raise UnsupportedArrayError(
            f"{file.label}: {name} holds {ggml_type.name}, read as {ggml_type.dtype}, not {options.dtype}"
        )
    return LazyArray(
        name=name,
        dtype=ggml_type.dtype,
        shape=(num_heads, part.cells.num_cells, tensor.row_values // num_heads),
        array_dtype=dtypes.parse_dtype(ggml_type.dtype).numpy_dtype.str,
        reader=partial(iter_head_chunks, file, tensor, num_heads, part.cells),
    )


FORMAT_NAME = "llama-state"


def capture(file: MappedFile, options: ReadOptions) -> Source:
    """Return all K and V of a file as ``[cell, value]``; transposed V as ``[value, cell]``.

    Blocks are split into their fields.

    With `EngineOptions.split_heads`, known kv heads and one nonempty stream per cache: ``[cell, kv_head, head_dim]``.

    Names are ``layer_<n>.key`` and ``.value``, prefixed by ``stream_<n>.`` if several streams have cells and by
    ``window.`` for the second cache; fields of blocks add ``.scales``, ``.bits`` and ``.codes``. By heads, layers have
    the numbers of the model instead of ``window.``.

    Raises
    ------
    MissingOptionError
        By heads, if the layers of the second cache are unknown.
    SourceError
        The errors of `read`; kv heads need not be known.
    """
    state, layer_numbers = parse_state(file, options)
    parts = list(_iter_parts(file.label, state, layer_numbers, options))
    if not parts:
        raise SourceError(f"{file.label}: no cell is used, there is nothing to encode")
    is_one_text = len(parts) == len({part.cache for _, part in parts})
    by_heads = options.engine.split_heads and is_one_text and all(part.heads.is_known for _, part in parts)
    if by_heads and len(parts) > 1 and layer_numbers is None:
        raise MissingOptionError(
            f"{file.label}: dense streams of two caches need the layers of the model: say --model FILE.gguf (in Python "
            "model=)"
        )
    regions = [
        _make_region(
            file,
            tensor,
            part.stream.num_cells,
            format_array_name(part.layer_numbers[tensor.layer], tensor.part)
            if by_heads
            else f"{prefix}{format_array_name(tensor.layer, tensor.part)}",
            options,
            part.heads.by_layer[tensor.layer] if by_heads else None,
        )
        for prefix, part in parts
        for tensor in part.stream.tensors
    ]
    are_heads_known = all(part.heads.is_known for _, part in parts)
    kv_heads = tuple(count for _, part in parts for count in part.heads.by_layer)
    has_model_numbers = layer_numbers is not None and len(state.caches) > 1 and is_one_text
    source = passthrough.capture(
        file,
        FORMAT_NAME,
        regions,
        kv_heads if are_heads_known and (is_one_text or len({*kv_heads}) == 1) else None,
        layer_numbers=tuple(layer_number for _, part in parts for layer_number in part.layer_numbers)
        if has_model_numbers
        else None,
    )
    nonempty_caches = [cache for cache, num_layers in enumerate(count_layers(state)) if num_layers]
    source.completeness = replace(
        find_completeness(state, layer_numbers, nonempty_caches), other_missing=()
    )  # what K and V lack is in the file
    if by_heads:
        source.token_major = True
        source.engine_cache = describe_state(state, [part for _, part in parts], options)
    return source


def _iter_parts(
    label: str, state: LlamaState, layer_numbers: LayerNumbers | None, options: ReadOptions
) -> Iterator[tuple[str, CachePart]]:
    """Yield the streams that have cells, each with the prefix of its array names."""
    for cache, streams in enumerate(state.caches):
        nonempty_streams = [stream_index for stream_index, stream in enumerate(streams) if stream.num_cells]
        for stream_index in nonempty_streams:
            prefix = f"stream_{stream_index}." if len(nonempty_streams) > 1 else ""
            stream = streams[stream_index]
            heads = find_stream_heads(label, state, cache, stream, layer_numbers, options, is_required=False)
            yield (
                ("window." if cache else "") + prefix,
                CachePart(
                    cache=cache,
                    stream=stream,
                    cells=CellSelection(stream.num_cells),
                    layer_numbers=list_layer_numbers(stream, cache, layer_numbers),
                    heads=heads,
                ),
            )


def _make_region(
    file: MappedFile,
    tensor: CacheTensor,
    num_cells: int,
    name: str,
    options: ReadOptions,
    num_heads: int | None,
) -> Region:
    ggml_type, num_blocks = tensor.type, tensor.row_values // tensor.type.values_per_block
    if options.dtype not in (None, ggml_type.dtype):
        raise UnsupportedArrayError(f"{file.label}: {name} holds {ggml_type.name}, not {options.dtype}")
    if not ggml_type.is_block_quantized:
        shape: tuple[int, ...] = (
            (tensor.row_values, num_cells) if tensor.is_transposed else (num_cells, tensor.row_values)
        )
        if num_heads and not tensor.is_transposed:
            shape = (num_cells, num_heads, tensor.row_values // num_heads)
        numpy_type = dtypes.parse_dtype(ggml_type.dtype).numpy_dtype.str
        reader = partial(file.iter_chunks, tensor.offset, tensor.nbytes)
        array = LazyArray(name=name, dtype=ggml_type.dtype, shape=shape, array_dtype=numpy_type, reader=reader)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    sizes = [size for _, size in ggml_type.fields]
    if not is_smaller_by_fields(file.view(tensor.offset, tensor.nbytes), sizes):
        array = make_byte_array(file, name, (num_cells, num_blocks, ggml_type.nbytes), tensor.offset, tensor.nbytes)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    arrays, field_offset, block_range = [], 0, (tensor.offset, tensor.nbytes)
    for field, size in ggml_type.fields:
        field_itemsize, array_dtype = (2, "<f2") if field == "scales" else (1, "|u1")
        field_shape = (num_cells, num_blocks, size // field_itemsize)
        field_range = (field_offset, size, ggml_type.nbytes)
        array = make_field_array(file, f"{name}.{field}", field_shape, block_range, field_range, array_dtype)
        arrays.append((array, size))
        field_offset += size
    return Region(tensor.offset, tensor.nbytes, tuple(arrays))


LLAMA_STATE = FileFormat(name=FORMAT_NAME, signatures=MAGIC_BYTES, read_file=read, capture=capture, read_original=read)
