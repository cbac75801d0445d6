"""What llama.cpp does to K and V before it stores them, as far as an architecture and the types of a cache say.

`llama_model_rope_type` has an entry for every architecture: two neighbours of a head are turned together (NORM), or two
dimensions half a head apart (NEOX). Of those in `_PERMUTED_ARCHITECTURES` it is certain that others have the halves:
what llama.cpp's converter has for them (`conversion/*.py`) permutes the weights of query and key in every layer. Of
other architectures
with neighbours some were trained so, others are permuted.

What a state file says of the cells that are read: an `EngineCacheInfo`, and lines about what was inferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ... import dtypes
from ..._util.text import pluralize
from ...arrays.engine_cache import EngineCacheInfo
from ...arrays.llama_transforms import Transform, list_possible_transforms
from ...dtypes import Positions
from ..options import EngineOptions, ReadOptions
from ..tensor_selection import format_dequantised_note
from . import gguf
from .cache_selection import CachePart, LayerNumbers, format_numbers, has_single_text, list_nonempty_streams
from .state import CacheTensor, LlamaState

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
"""Architectures of rope type NEOX, and of M-RoPE's, whose pairs are the same."""
_UNROTATED_ARCHITECTURES: Final = frozenset(
    ("bloom", "gpt2", "jais", "jamba", "jina-bert-v2", "mamba", "mamba2", "mpt", "nemotron_h", "refact", "t5")
)


def is_key_order_permuted(architecture: str | None, head_dim: int, rotary_dim: int | None) -> bool | None:
    """Whether K lies in another order than other engines have it; None where nothing says it."""
    if head_dim % 2 or architecture in _HALF_PAIRED_ARCHITECTURES or architecture in _UNROTATED_ARCHITECTURES:
        return False
    return True if architecture in _PERMUTED_ARCHITECTURES and rotary_dim in (None, head_dim) else None


def list_possible_rotations(tensors: Sequence[CacheTensor], heads: Sequence[int]) -> tuple[Transform, ...]:
    """What newer builds rotate: quantised K or V, in heads of a multiple of 64 dimensions."""
    transforms = {
        transform
        for tensor in tensors
        if tensor.type.is_block
        for transform in list_possible_transforms(tensor.part, tensor.row_values // heads[tensor.layer])
        if transform != "k-order"
    }
    return tuple(sorted(transforms))


ENGINE = "llama.cpp"


class _PartLayer(NamedTuple):
    """A layer of the model in the part of the file that has it."""

    layer_number: int
    part: CachePart
    layer_index: int

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.part.heads.by_layer[self.layer_index]

    @property
    def tensors(self) -> list[CacheTensor]:
        """K, and V where there is any."""
        return [tensor for tensor in self.part.stream.tensors if tensor.layer == self.layer_index]


def _list_layers(parts: Sequence[CachePart]) -> list[_PartLayer]:
    layers = [
        _PartLayer(layer_number, part, layer_index)
        for part in parts
        for layer_index, layer_number in enumerate(part.layer_numbers)
    ]
    return sorted(layers, key=lambda layer: layer.layer_number)


def describe_state(state: LlamaState, parts: Sequence[CachePart], options: ReadOptions) -> EngineCacheInfo:
    """Return what a file says of the cells that are read."""
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
        dequantised=_list_dequantised_types(parts, options.engine),
        altered=altered,
        perhaps_altered=perhaps_altered,
        details={**_build_details(state, parts, options.engine), "architecture": architecture},
    )


def read_model_architecture(options: ReadOptions) -> str | None:
    """The architecture of the model that the options name."""
    model_path = options.packed.model if options.packed else None
    return None if model_path is None else gguf.read_architecture(model_path)


def _collect_positions(layers: Sequence[_PartLayer]) -> tuple[Positions | None, tuple[Positions, ...] | None]:
    """Positions of all layers, or of each where they differ."""
    positions_by_part = {id(layer.part): layer.part.positions for layer in layers}
    first_positions, *other_positions = positions_by_part.values()
    if all(np.array_equal(first_positions, positions) for positions in other_positions):
        return first_positions, None
    return None, tuple(positions_by_part[id(layer.part)] for layer in layers)


_Transforms = tuple[Transform, ...]


def _find_transforms(
    layers: Sequence[_PartLayer], architecture: str | None, options: ReadOptions, *, are_heads_known: bool
) -> tuple[_Transforms, _Transforms]:
    """What surely was done to K and V, and what may have been; nothing of blocks, or where heads are not known."""
    if not are_heads_known or options.engine.raw_blocks:
        return (), ()
    model = options.packed.model if options.packed else None
    rotary_dim = None if model is None else gguf.read_rotary_dim(model)
    possible_transforms = tuple(
        sorted(
            {
                transform
                for layer in layers
                for transform in list_possible_rotations(layer.tensors, layer.part.heads.by_layer)
            }
        )
    )
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
    """Return a line for each thing that was inferred, or that the arrays do not say."""
    first_part = parts[0]
    if state.recurrent_bytes:
        yield (
            f"state of recurrent layers ({pluralize(state.recurrent_bytes, 'byte')}) lies behind K and V, and is not "
            f"read; "
            "layers are counted without these"
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
            f"out "
            "(--token-ids says those of what is read)"
        )
    elif state.token_ids.size:
        yield from _iter_token_id_notes(state.token_ids.size, parts)
    if layer_numbers is not None and layer_numbers.rule:
        yield f"{layer_numbers.rule} (--model FILE.gguf has those of this model)"
    elif len(state.caches) > len(parts) and layer_numbers is None:
        yield "layers are counted by cache: --model FILE.gguf tells which they are"
    if not all(part.heads.is_known or _has_only_blocks(part, options) for part in parts):
        yield "kv heads are not in the file: each row is taken as one head (--kv-heads N or --model FILE.gguf)"
    yield from _iter_block_notes(parts, options)


def _iter_token_id_notes(num_ids: int, parts: Sequence[CachePart]) -> Iterator[str]:
    """Return a line where token ids and cells are not as many: builds write the id of a token not yet evaluated."""
    end = 1 + max(int(part.positions.max(initial=-1)) for part in parts)
    if num_ids > end:
        extra_text = "the last token id" if num_ids - end == 1 else f"the last {num_ids - end:,} token ids"
        verb, pronoun = ("has", "it") if num_ids - end == 1 else ("have", "them")
        yield f"{extra_text} of {num_ids:,} {verb} no cell: no K and V belong to {pronoun}"
    elif num_ids < end:
        yield f"the file has {pluralize(num_ids, 'token id')}, its cells have positions up to {end - 1:,}"


def _iter_block_notes(parts: Sequence[CachePart], options: EngineOptions) -> Iterator[str]:
    """What numbers that stand for blocks were made from, and what nothing says of them."""
    quantised_tensors = [(tensor, part) for part in parts for tensor in part.stream.tensors if tensor.type.is_block]
    if options.raw_blocks or not quantised_tensors:
        return
    num_values = sum(tensor.row_values * part.cells.num_cells for tensor, part in quantised_tensors)
    block_bytes = sum(
        tensor.row_values // tensor.type.values_per_block * tensor.type.nbytes * part.cells.num_cells
        for tensor, part in quantised_tensors
    )
    dtype = dtypes.parse_dtype(quantised_tensors[0][0].type.dtype)
    yield format_dequantised_note(
        _list_dequantised_types(parts, options), dtype.name, block_bytes, num_values * dtype.itemsize
    )
    possible_rotations = {
        transform
        for tensor, part in quantised_tensors
        for transform in list_possible_rotations([tensor], part.heads.by_layer)
    }
    unresolved_rotations = sorted(possible_rotations) if options.invert is None else ()
    if unresolved_rotations:
        names = " and ".join(transform[0].upper() for transform in unresolved_rotations)
        yield (
            f"newer builds of llama.cpp store quantised {names} rotated by a Hadamard matrix, and the file does not "
            f"say so: rotated numbers are not those that other types and engines hold (--invert "
            f"{','.join(unresolved_rotations)} turns "
            "them back)"
        )


def _list_dequantised_types(parts: Sequence[CachePart], options: EngineOptions) -> tuple[str, ...]:
    if options.raw_blocks:
        return ()
    return tuple(sorted({tensor.type.name for part in parts for tensor in part.stream.tensors if tensor.type.is_block}))


def _has_only_blocks(part: CachePart, options: EngineOptions) -> bool:
    """Whether all arrays are blocks of cells, which are of no head."""
    return options.raw_blocks and all(tensor.type.is_block for tensor in part.stream.tensors)
