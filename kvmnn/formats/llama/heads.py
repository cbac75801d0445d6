"""How many kv heads the rows of each layer of a state file are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import MissingOptionError, OptionError
from ...text import pluralize
from ..options import ReadOptions
from . import gguf
from .model_layers import ModelLayer
from .state import CacheStream, CacheTensor


@dataclass(frozen=True)
class LayerHeads:
    """Kv heads of each layer, and whether anything says so; one each where nothing does and nobody needs them."""

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
    """Return how many kv heads the rows of each layer are of.

    Parameters
    ----------
    is_required
        Whether somebody looks at heads.
    model_layers
        Of each layer of the stream, that of the model which the options name; None where its number is not known.
    recorded_heads
        Kv heads of each layer as they were noted down, where nothing else says them.

    Raises
    ------
    MissingOptionError
        Where nothing says them, and they are `is_required`.
    OptionError
        Where the rows, the options and the model contradict each other.
    SourceError
        For a model that cannot be read.
    """
    key_tensors = [tensor for tensor in stream.tensors if tensor.part == "key"]
    geometry = options.packed.geometry if options.packed else None
    model = options.packed.model if options.packed else None
    kv_heads: tuple[int, ...] | None = None
    if geometry and geometry.kv_heads:
        kv_heads = (geometry.kv_heads,) * len(key_tensors)
    elif geometry and geometry.head_dim:
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
            f"kv heads: say "
            "--kv-heads N, or --model FILE.gguf (in Python kv_heads=N, or model=)"
        )
    for tensor in stream.tensors:
        num_heads = kv_heads[tensor.layer]
        has_wrong_dims = (
            geometry
            and geometry.head_dim
            and tensor.part == "key"
            and tensor.row_values != num_heads * geometry.head_dim
        )
        if not num_heads or tensor.row_values % num_heads or has_wrong_dims:
            dims_text = f" of {geometry.head_dim}" if geometry and geometry.head_dim else ""
            raise OptionError(
                f"{label}: {tensor.part[0].upper()} of layer {tensor.layer} has {tensor.row_values:,} values a cell, "
                f"which "
                f"are not {pluralize(num_heads, 'kv head')}{dims_text}"
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
