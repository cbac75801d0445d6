"""How many kv heads the rows of each layer of a state file are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import MissingOptionError, OptionError
from ...text import count
from ..options import ReadOptions
from . import gguf
from .model_layers import ModelLayer
from .state import Stream, Tensor


@dataclass(frozen=True)
class Heads:
    """Kv heads of each layer, and whether anything says so; one each where nothing does and nobody needs them."""

    of: tuple[int, ...]
    known: bool = True


def find_heads(
    where: str,
    stream: Stream,
    options: ReadOptions,
    *,
    needed: bool,
    model_layers: Sequence[ModelLayer] | None = None,
    noted: Sequence[int] | None = None,
) -> Heads:
    """Return how many kv heads the rows of each layer are of.

    Parameters
    ----------
    needed
        Whether somebody looks at heads.
    model_layers
        Of each layer of the stream, that of the model which the options name; None where its number is not known.
    noted
        Kv heads of each layer as they were noted down, where nothing else says them.

    Raises
    ------
    MissingOptionError
        Where nothing says them, and they are `needed`.
    OptionError
        Where the rows, the options and the model contradict each other.
    SourceError
        For a model that cannot be read.
    """
    keys = [tensor for tensor in stream.tensors if tensor.part == "key"]
    said = options.packed.geometry if options.packed else None
    model = options.packed.model if options.packed else None
    found: tuple[int, ...] | None = None
    if said and said.kv_heads:
        found = (said.kv_heads,) * len(keys)
    elif said and said.head_dim:
        found = tuple(tensor.row // said.head_dim for tensor in keys)
    if model is not None:
        of_model, dims = _heads_of_model(model, len(keys), model_layers)
        if found is not None and found != of_model:
            raise OptionError(f"kv heads: {found[0]} for the cache, but the model in {model} has {of_model[0]}")
        found = of_model
        _check_model(where, model, keys, of_model, dims)
    if found is None and len(noted or ()) == len(keys):
        found = tuple(noted or ())
    if found is None:
        if not needed:
            return Heads((1,) * len(keys), known=False)
        raise MissingOptionError(
            f"{where}: a row of K has {keys[0].row:,} values, and nothing in the file says of how many kv heads: say "
            "--kv-heads N, or --model FILE.gguf (in Python kv_heads=N, or model=)"
        )
    for tensor in stream.tensors:
        heads = found[tensor.layer]
        wrong_dims = said and said.head_dim and tensor.part == "key" and tensor.row != heads * said.head_dim
        if not heads or tensor.row % heads or wrong_dims:
            dims_said = f" of {said.head_dim}" if said and said.head_dim else ""
            raise OptionError(
                f"{where}: {tensor.part[0].upper()} of layer {tensor.layer} has {tensor.row:,} values a cell, which "
                f"are not {count(heads, 'kv head')}{dims_said}"
            )
    return Heads(found)


def _heads_of_model(
    model: str, layers: int, model_layers: Sequence[ModelLayer] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return kv heads and head_dim of each layer."""
    if model_layers is not None:
        return tuple(each.kv_heads for each in model_layers), tuple(each.head_dim for each in model_layers)
    geometry = gguf.read_geometry(model, layers)
    return geometry.kv_heads, (geometry.head_dim,) * layers


def _check_model(where: str, model: str, keys: Sequence[Tensor], heads: Sequence[int], dims: Sequence[int]) -> None:
    for tensor in keys:
        expected = heads[tensor.layer] * dims[tensor.layer]
        if tensor.row != expected:
            raise OptionError(
                f"{where}: K of layer {tensor.layer} has {tensor.row:,} values a cell, in {model} it has "
                f"{expected:,}: it is of another model"
            )
