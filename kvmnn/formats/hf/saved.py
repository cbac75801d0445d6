"""Caches that ``torch.save`` stored: the pickle is read as data, so no class of transformers is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...arrays.names import conventional, part_of
from ...arrays.source import Source
from ...dtypes import PARTS
from ...errors import CheckpointError, KvmnnError, LimitError, SourceError
from ...files.mapped import MappedFile, head_of
from ...files.zip_archive import first_member
from ..options import ReadOptions
from ..reading import select
from ..torch._pickles import MAX_KEY, Global
from ..torch.opening import kind_of, read_torch
from ..torch.tensors import Tensor
from ..torch.torch_names import Arguments, Names
from .arrays import cache_source, tensor_array
from .layers import find_cache
from .objects import Made

_OUTPUTS = ("transformers.modeling_outputs.", "transformers.generation.utils.Generate")
_OBJECTS = ("Cache", "Layer")
_NEVER_LOOKED_AT = ("functools.partial",)


class CacheNames(Names):
    """The names that a saved cache may use: those of tensors, and classes of transformers that are never made."""

    def resolve(self, module: str, name: str) -> Global:
        """As `Names.resolve`; caches, their layers and outputs of models become `Made`."""
        full = f"{module}.{name}"
        if module.partition(".")[0] == "transformers" and name.endswith(_OBJECTS):
            return Global(full, partial(_made, full))
        if full.startswith(_OUTPUTS):
            return Global(full, _output)
        if full in _NEVER_LOOKED_AT:
            return Global(full, partial(_made, full))
        return super().resolve(module, name)

    def set_state(self, value: object, state: object) -> bool:
        """As `Names.set_state`; the attributes of what is `Made` besides."""
        if isinstance(value, Made):
            attributes = state[0] if isinstance(state, tuple) and len(state) == 2 else state
            if isinstance(attributes, dict):
                value.state = {name: item for name, item in attributes.items() if isinstance(name, str)}
            return True
        return super().set_state(value, state)


def _made(name: str, _: Arguments) -> Made:
    return Made(name)


def _output(arguments: Arguments) -> dict[object, object]:
    """An output of a model: a dict whose values are the arguments of its class as well."""
    return {number: value for number, value in enumerate(arguments) if number < MAX_KEY}


HEAD_BYTES = 4096
"""Of a file, that tell whether torch wrote it."""


def is_saved(head: bytes) -> bool:
    """Whether torch wrote a file that begins with `head` (`HEAD_BYTES`), whatever its name and whatever it holds."""
    kind = kind_of(head)
    return kind == "torch legacy" or (kind == "torch zip" and first_member(head).endswith(b"/data.pkl"))


def is_file(path: str) -> bool:
    """`is_saved` of the file at a path."""
    return is_saved(head_of(path, HEAD_BYTES))


def holds_cache(path: str) -> bool:
    """Whether torch wrote the file at a path, and K and V are in it, or a cache that `read` refuses by its name."""
    if not is_file(path):
        return False
    try:
        return _is_known(path, _root(MappedFile(path)))
    except KvmnnError:
        return False


def damage(path: str) -> str | None:
    """What a file of torch's that cannot be read at all may be, and what is wrong with it; None for all others."""
    if not is_file(path):
        return None
    try:
        _root(MappedFile(path))
    except KvmnnError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return f"is a file of torch.save, a cache or a checkpoint, that cannot be read: {reason}"
    return None


def _is_known(path: str, root: object) -> bool:
    try:
        return find_cache(path, root, _is_tensor) is not None or bool(_named(root, ReadOptions()))
    except SourceError:
        return True  # a cache, and one that is not read


def read(file: MappedFile, options: ReadOptions) -> Source:
    """K and V of every layer, ``[batch, kv_head, token, head_dim]``; or one tensor, or a dict of named K and V.

    Raises
    ------
    SourceError
        For a file that is damaged, asks for what no cache needs, or holds none, and for a cache that is not understood.
    """
    root = _root(file)
    cache = find_cache(file.label, root, _is_tensor)
    if cache is not None:
        layers = [*cache.layers, *(cache.cross.layers if cache.cross else ())]
        _check_size(file.label, [part for layer in layers for part in (layer.keys, layer.values)])
        return cache_source(file.label, cache, options)
    named = _named(root, options)
    if not named:
        raise SourceError(f"{file.label}: holds no cache: expected (K, V) of layers, or a dict of tensors named so")
    _check_size(file.label, [tensor for _, tensor in named])
    entries = [(name, partial(tensor_array, file.label, name, tensor, options)) for name, tensor in named]
    arrays, skipped = select(file.label, entries, options)
    return Source(arrays, skipped=skipped)


def _root(file: MappedFile) -> object:
    """The object that was saved."""
    kind = kind_of(file.head(512))
    if kind is None:
        raise SourceError(f"{file.label}: is no file that torch.save wrote")
    try:
        return read_torch(file, kind, CacheNames()).root
    except (CheckpointError, LimitError) as error:
        raise type(error)(f"{file.label}: {error}") from None


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _named(root: object, options: ReadOptions) -> list[tuple[str, Tensor]]:
    """A tensor alone, tensors of a list, or those of a dict: what is asked for, or all where their names say K or V.

    Beside K and V a dict may have token ids, masks and lengths: whole numbers of fewer than three axes.
    """
    if isinstance(root, Tensor):
        return [("tensor", root)]
    if isinstance(root, list | tuple):
        tensors = [tensor for tensor in root if isinstance(tensor, Tensor) and len(tensor.shape) > 2]
        names = PARTS if len(root) == 2 else [f"layer_{number}" for number in range(len(root))]
        return list(zip(names, tensors, strict=True)) if len(tensors) == len(root) else []
    if not isinstance(root, Mapping):
        return []
    named = [(name, value) for name, value in root.items() if isinstance(name, str) and isinstance(value, Tensor)]
    if options.tensors:
        return [(name, tensor) for name, tensor in named if name in options.tensors]
    named = [(name, tensor) for name, tensor in named if len(tensor.shape) > 2 or "float" in tensor.type_name]
    return named if all(_is_kv(name, tensor) for name, tensor in named) else []


def _is_kv(name: str, tensor: Tensor) -> bool:
    """Whether a name says K or V; weights may be called so, too, and have one or two axes."""
    if conventional(name):
        return True
    try:
        part_of("", name)
    except SourceError:
        return False
    return len(tensor.shape) > 2


def _check_size(where: str, tensors: Sequence[Any]) -> None:
    """Refuse tensors that have far more bytes than are stored: a small file must not become a large cache.

    Layers may share a tensor, and tensors may be expanded, within the bound that deflated files have.
    """
    stored = sum({id(tensor.storage): tensor.storage.nbytes for tensor in tensors}.values())
    held = sum(tensor.numel * tensor.element.itemsize for tensor in tensors)
    if held > stored * _MAX_RATIO:
        raise SourceError(
            f"{where}: its tensors have {held:,} bytes, and {stored:,} are stored: expected at most {_MAX_RATIO:,} "
            "times as many (.contiguous() before torch.save stores expanded tensors in full)"
        )


_MAX_RATIO = 1032  # as of deflated members
