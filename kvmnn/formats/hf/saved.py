"""Read caches that ``torch.save`` stored: the pickle is parsed as data, so no class of transformers is instantiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...arrays.naming import parse_conventional_name, parse_part
from ...arrays.source import Source
from ...dtypes import PARTS
from ...errors import CheckpointError, KvmnnError, LimitError, SourceError
from ...files.mapped_file import FileHead, MappedFile
from ...files.zip_archive import read_first_member_name
from ..base import FileFormat
from ..options import ReadOptions
from ..tensor_selection import select_tensors
from ..torch._pickles import MAX_INT_KEY, AllowedGlobal
from ..torch.allowed_globals import AllowedGlobals, PickleArguments
from ..torch.tensors import TorchTensor
from ..torch.torch_file import PICKLE_SIGNATURE, ZIP_SIGNATURE, detect_torch_kind, read_torch
from .arrays import make_cache_source, make_tensor_array
from .cache_finder import StubObject, find_cache

_OUTPUT_CLASS_PREFIXES = ("transformers.modeling_outputs.", "transformers.generation.utils.Generate")
_STUBBED_CLASS_SUFFIXES = ("Cache", "Layer")
_IGNORED_GLOBALS = ("functools.partial",)


class AllowedCacheGlobals(AllowedGlobals):
    """Allowed pickle names of a saved cache: those of tensors, and classes that are never instantiated."""

    def resolve(self, module: str, name: str) -> AllowedGlobal:
        """Resolve as `AllowedGlobals.resolve`; caches, their layers and outputs of models become `StubObject`."""
        full_name = f"{module}.{name}"
        if module.partition(".")[0] == "transformers" and name.endswith(_STUBBED_CLASS_SUFFIXES):
            return AllowedGlobal(full_name, partial(_build_stub, full_name))
        if full_name.startswith(_OUTPUT_CLASS_PREFIXES):
            return AllowedGlobal(full_name, _build_output_dict)
        if full_name in _IGNORED_GLOBALS:
            return AllowedGlobal(full_name, partial(_build_stub, full_name))
        return super().resolve(module, name)

    def set_state(self, value: object, state: object) -> bool:
        """Apply a pickled state as `AllowedGlobals.set_state` does, and set the attributes of a `StubObject`."""
        if isinstance(value, StubObject):
            attributes = state[0] if isinstance(state, tuple) and len(state) == 2 else state
            if isinstance(attributes, dict):
                value.state = {name: item for name, item in attributes.items() if isinstance(name, str)}
            return True
        return super().set_state(value, state)


def _build_stub(full_name: str, _: PickleArguments) -> StubObject:
    return StubObject(full_name)


def _build_output_dict(arguments: PickleArguments) -> dict[object, object]:
    """Build the stand-in for a model's output: a dict of the arguments of its class, by index."""
    return {index: value for index, value in enumerate(arguments) if index < MAX_INT_KEY}


def is_torch_head(head: bytes) -> bool:
    """Return whether torch wrote a file that begins with `head` (`HEAD_BYTES`), whatever its name and contents."""
    kind = detect_torch_kind(head)
    return kind == "torch legacy" or (kind == "torch zip" and read_first_member_name(head).endswith(b"/data.pkl"))


def _contains_cache(head: FileHead) -> bool:
    """Return whether torch wrote it, and a file contains K and V, or a cache that `read` rejects by name."""
    if head.file is not None or not is_torch_head(head.data):
        return is_torch_head(head.data)
    try:
        return _contains_known_cache(head.path, _load_root(MappedFile(head.path)))
    except KvmnnError:
        return False


def describe_damage(head: FileHead) -> str | None:
    """Describe what an unreadable torch file may be and what is wrong with it; None for all other files."""
    path = head.path
    if not is_torch_head(head.data):
        return None
    try:
        _load_root(MappedFile(path))
    except KvmnnError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return f"is a file of torch.save, a cache or a checkpoint, that cannot be read: {reason}"
    return None


def _contains_known_cache(path: str, root: object) -> bool:
    try:
        return find_cache(path, root, _is_tensor) is not None or bool(_list_named_tensors(root, ReadOptions()))
    except SourceError:
        return True  # a cache, and one that is not read


def read(file: MappedFile, options: ReadOptions) -> Source:
    """Read K and V of every layer, ``[batch, kv_head, token, head_dim]``; or one tensor, or a dict of named K and V.

    Raises
    ------
    SourceError
        For a file that is damaged, contains no cache, or uses names that no cache needs, and for an unsupported cache.
    """
    root = _load_root(file)
    cache = find_cache(file.label, root, _is_tensor)
    if cache is not None:
        layers = [*cache.layers, *(cache.cross_attention.layers if cache.cross_attention else ())]
        _check_expanded_size(file.label, [part for layer in layers for part in (layer.keys, layer.values)])
        return make_cache_source(file.label, cache, options)
    named_tensors = _list_named_tensors(root, options)
    if not named_tensors:
        raise SourceError(f"{file.label}: holds no cache: expected (K, V) of layers, or a dict of tensors named so")
    _check_expanded_size(file.label, [tensor for _, tensor in named_tensors])
    entries = [(name, partial(make_tensor_array, file.label, name, tensor, options)) for name, tensor in named_tensors]
    arrays, skipped = select_tensors(file.label, entries, options)
    return Source(arrays, skipped_arrays=skipped)


def _load_root(file: MappedFile) -> object:
    """Load the object that was saved."""
    kind = detect_torch_kind(file.read_head(512))
    if kind is None:
        raise SourceError(f"{file.label}: is no file that torch.save wrote")
    try:
        return read_torch(file, kind, AllowedCacheGlobals()).root
    except (CheckpointError, LimitError) as error:
        raise type(error)(f"{file.label}: {error}") from None


def _is_tensor(value: object) -> bool:
    return isinstance(value, TorchTensor)


def _list_named_tensors(root: object, options: ReadOptions) -> list[tuple[str, TorchTensor]]:
    """List one tensor, or the tensors of a list or dict: the requested ones, or all that are named K or V.

    Next to K and V a dict may have token ids, masks and lengths: whole numbers of fewer than three axes.
    """
    if isinstance(root, TorchTensor):
        return [("tensor", root)]
    if isinstance(root, list | tuple):
        tensors = [tensor for tensor in root if isinstance(tensor, TorchTensor) and len(tensor.shape) > 2]
        names = PARTS if len(root) == 2 else [f"layer_{layer_number}" for layer_number in range(len(root))]
        return list(zip(names, tensors, strict=True)) if len(tensors) == len(root) else []
    if not isinstance(root, Mapping):
        return []
    named_tensors = [
        (name, value) for name, value in root.items() if isinstance(name, str) and isinstance(value, TorchTensor)
    ]
    if options.tensors:
        return [(name, tensor) for name, tensor in named_tensors if name in options.tensors]
    named_tensors = [
        (name, tensor) for name, tensor in named_tensors if len(tensor.shape) > 2 or "float" in tensor.type_name
    ]
    return named_tensors if all(_is_kv_tensor(name, tensor) for name, tensor in named_tensors) else []


def _is_kv_tensor(name: str, tensor: TorchTensor) -> bool:
    """Return whether a tensor is K or V by its name; a name that weights may have needs more than two axes."""
    if parse_conventional_name(name):
        return True
    try:
        parse_part("", name)
    except SourceError:
        return False
    return len(tensor.shape) > 2


def _check_expanded_size(label: str, tensors: Sequence[Any]) -> None:
    """Refuse tensors that have far more bytes than are stored: a small file must not become a large cache.

    Layers may share a tensor, and tensors may be expanded, within the bound that deflated files have.
    """
    stored_bytes = sum({id(tensor.storage): tensor.storage.nbytes for tensor in tensors}.values())
    tensor_bytes = sum(tensor.numel * tensor.element_type.itemsize for tensor in tensors)
    if tensor_bytes > stored_bytes * _MAX_EXPANSION_RATIO:
        raise SourceError(
            f"{label}: its tensors have {tensor_bytes:,} bytes, and {stored_bytes:,} are stored: expected at most "
            f"{_MAX_EXPANSION_RATIO:,} times as many (.contiguous() before torch.save stores expanded tensors in full)"
        )


_MAX_EXPANSION_RATIO = 1032  # as of deflated members


TORCH_CACHE = FileFormat(
    name="torch-cache", signatures=(ZIP_SIGNATURE, PICKLE_SIGNATURE), check=_contains_cache, read_file=read
)
