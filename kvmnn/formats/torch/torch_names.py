"""The names that a checkpoint's pickle may use, and the inert function that stands for each.

The list is what ``torch.load(weights_only=True)`` of torch 2.13 allows, plus numpy scalars, which training scripts like
to save beside the weights. torch itself is never imported. What is listed as opaque may be called and gives `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError
from ._pickles import Global, Unknown
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, Storage, Tensor, bytes_of_nothing, tensor, without_values

Arguments = tuple[Any, ...]

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}

STORAGE_TYPES: dict[str, ElementType] = {
    **{f"torch.{name}": ELEMENT_TYPES[kind] for name, kind in _STORAGES.items()},
    **{f"torch.cuda.{name}": ELEMENT_TYPES[kind] for name, kind in _STORAGES.items() if not name.startswith("Q")},
    "torch.storage.UntypedStorage": UNTYPED,
}
"""Element types by the full name of their storage class."""

_TENSORS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_OLD_TENSORS = {
    "torch.Tensor": "float32",
    **{f"torch.{name}Tensor": _STORAGES[f"{name}Storage"] for name in _TENSORS},
}
"""Element types by the name of a tensor class; torch before 0.1.12 made tensors by them and set their state then."""

_DTYPES = {f"torch.{name}": kind for name, kind in ELEMENT_TYPES.items()}

_OPAQUE = (
    "_codecs.encode",
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "__builtin__.set",
    "__builtin__.bytearray",
    "__builtin__.complex",
    "torch.device",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
_NAMES_ONLY = (
    "torch.storage.TypedStorage",
    *(f"torch.{place}.{name}Tensor" for place in ("sparse", "cuda.sparse") for name in _TENSORS if name != "Bool"),
    *(f"torch.{scheme}" for scheme in ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric")),
    *(f"torch.{scheme}" for scheme in ("per_channel_symmetric", "per_channel_affine_float_qparams")),
)
_NUMPY = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


class Names:
    """Resolves the names of one checkpoint; `used_numpy` says afterwards whether it holds numpy scalars."""

    def __init__(self) -> None:
        self.used_numpy = False

    def resolve(self, module: str, name: str) -> Global:
        """The `Global` for a name.

        Raises
        ------
        CheckpointError
            For every name that is not on the list.
        """
        full = f"{module}.{name}"
        try:
            found = _ALLOWED[full]
        except KeyError:
            raise CheckpointError(
                f"the pickle asks for {full[:200]!r}, which is not among the names that checkpoints of plain tensors "
                "need; nothing that a pickle names is ever run"
            ) from None
        self.used_numpy |= full in _NUMPY
        return found

    def set_state(self, value: object, state: object) -> bool:
        """Give a value that a pickle made what the pickle says it is; False if nothing known has a state like that."""
        return set_state(value, state)


def _ordered_dict(arguments: Arguments) -> dict[object, object]:
    if not arguments:
        return {}
    pairs = arguments[0]
    if len(arguments) > 1 or not isinstance(pairs, list):
        raise CheckpointError("an OrderedDict made of something else than a list of pairs")
    items: dict[object, object] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise CheckpointError("an OrderedDict made of something else than a list of pairs")
        items[pair[0] if isinstance(pair[0], str) else Unknown()] = pair[1]
    return items


def _counter(arguments: Arguments) -> object:
    return arguments[0] if arguments and isinstance(arguments[0], dict) else {}


def _size(arguments: Arguments) -> tuple[object, ...]:
    if len(arguments) == 1 and isinstance(arguments[0], list | tuple):
        return tuple(arguments[0])
    raise CheckpointError("a torch.Size made of something else than one sequence")


def _tensor(arguments: Arguments) -> Tensor:
    """``_rebuild_tensor(storage, offset, size, stride)``."""
    if len(arguments) != 4:
        raise CheckpointError(f"a tensor made of {len(arguments)} values: expected 4")
    storage, offset, shape, strides = arguments
    return tensor(storage, offset, shape, strides, None)


def _tensor_v2(arguments: Arguments) -> Tensor:
    """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, flags])``."""
    if not 6 <= len(arguments) <= 7:
        raise CheckpointError(f"a tensor made of {len(arguments)} values: expected 6 or 7")
    return _flagged(_with_gradients(_tensor(arguments[:4]), arguments[4]), arguments[6:])


def _tensor_v3(arguments: Arguments) -> Tensor:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, flags])``."""
    if not 7 <= len(arguments) <= 8:
        raise CheckpointError(f"a tensor made of {len(arguments)} values: expected 7 or 8")
    dtype = arguments[6]
    element = _DTYPES.get(dtype.name) if isinstance(dtype, Global) else None
    if element is None:
        raise CheckpointError("a tensor whose dtype is none of torch's")
    storage, offset, shape, strides = arguments[:4]
    found = tensor(storage, offset, shape, strides, element)
    return _flagged(_with_gradients(found, arguments[4]), arguments[7:])


_WITH_GRADIENTS = ("float", "bfloat", "complex", "sparse", "meta")


def _with_gradients(found: Tensor, wanted: object) -> Tensor:
    if wanted is True and not found.element.name.startswith(_WITH_GRADIENTS):
        raise CheckpointError(f"a tensor of type {found.element.name} with a gradient, which torch refuses")
    return found


_NOT_NEGATED = ("bool", "uint16", "uint32", "uint64")


def _flagged(found: Tensor, flags: Arguments) -> Tensor:
    """A tensor with torch's conjugation or negation bit, which are set by the names in `flags` whatever their values.

    Conjugating leaves the real part as it is. What torch has no operation for is made a type without values.
    """
    if not (flags and flags[0]):
        return found
    names = flags[0]
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
        raise CheckpointError("a tensor whose flags are no dict of names")
    name, step = found.element.name, found.element.itemsize
    if "conj" in names and not found.element.is_complex:
        raise CheckpointError(f"a tensor of type {name} with torch's conjugation bit, which only complex ones have")
    found.negated = "neg" in names
    both = "conj" in names and name == "complex32"
    if found.negated and (both or name in _NOT_NEGATED or name.startswith("float8")):
        refusal = (
            f"torch cannot negate elements of type {name}{' that are conjugated' if both else ''}, as a bit demands"
        )
        found.element = ElementType(name, "", step, refusal)
    return found


def _quantised(arguments: Arguments) -> Tensor:
    """``_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)``."""
    if len(arguments) != 7:
        raise CheckpointError(f"a quantised tensor made of {len(arguments)} values: expected 7")
    storage, offset, shape, strides = arguments[:4]
    found = tensor(storage, offset, shape, strides, None)
    if found.element.code:
        raise CheckpointError(f"a quantised tensor of type {found.element.name}")
    return found


def _sparse(arguments: Arguments) -> Tensor:
    """``_rebuild_sparse_tensor(layout, data)``: the shape is the first tuple in `data`."""
    if len(arguments) != 2 or not isinstance(arguments[1], tuple):
        raise CheckpointError("a sparse tensor that is not put together as torch does")
    shape = next((part for part in arguments[1] if isinstance(part, tuple)), None)
    return without_values("sparse", "a sparse tensor: expected a dense one, which to_dense() gives", shape)


def _meta(arguments: Arguments) -> Tensor:
    """``_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)``."""
    if len(arguments) != 4:
        raise CheckpointError(f"a meta tensor made of {len(arguments)} values: expected 4")
    return without_values("meta", "a tensor of the meta device, saved without its values", arguments[1])


def _parameter(arguments: Arguments) -> object:
    if not arguments:
        raise CheckpointError("a parameter made of nothing")
    if isinstance(arguments[0], Tensor):
        _with_gradients(arguments[0], arguments[1] if len(arguments) > 1 else True)
    return arguments[0]


def _old_tensor(element: ElementType) -> Callable[[Arguments], Tensor]:
    def build(arguments: Arguments) -> Tensor:
        if arguments:
            raise CheckpointError(f"a {element.name} tensor made of {len(arguments)} values: expected none")
        return tensor(Storage("", element, 0, bytes_of_nothing), 0, (0,), (1,), None)

    return build


def _cuda_tensor(arguments: Arguments) -> Tensor:
    raise CheckpointError("a tensor made by a class of torch.cuda, which torch.load cannot place on the CPU")


def set_state(value: object, state: object) -> bool:
    """Give a tensor what a pickle says it is; False if nothing known has a state like that.

    Old tensors are put together so, from four values; parameters are told of gradients in three, which say nothing.

    Raises
    ------
    CheckpointError
        For four values that make no tensor.
    """
    if not isinstance(value, Tensor) or not isinstance(state, tuple):
        return False
    if len(state) != 4:
        return len(state) == 3 and isinstance(state[0], bool)
    found = tensor(*state, None)
    if found.element is not value.element:
        raise CheckpointError(f"a {value.element.name} tensor over a storage of {found.element.name}")
    value.storage, value.offset, value.shape, value.strides = found.storage, found.offset, found.shape, found.strides
    return True


def _from_type(arguments: Arguments) -> object:
    """``_rebuild_from_type_v2(function, type, arguments, state)``: what the function makes, as it is."""
    if len(arguments) != 4 or not isinstance(arguments[0], Global) or not isinstance(arguments[2], tuple):
        raise CheckpointError("a tensor of a class of its own that is not put together as torch does")
    function = arguments[0]
    if function.build is None or not function.name.startswith("torch._utils._rebuild_"):
        raise CheckpointError(f"a tensor of a class of its own, made by {function.name}")
    return function.build(arguments[2])


def _opaque(arguments: Arguments) -> Unknown:
    return Unknown()


_BUILDERS: dict[str, Callable[[Arguments], object]] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    **dict.fromkeys((f"torch.cuda.{name}Tensor" for name in _TENSORS), _cuda_tensor),
    **{name: _old_tensor(ELEMENT_TYPES[kind]) for name, kind in _OLD_TENSORS.items()},
    "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    **dict.fromkeys((*_OPAQUE, *_NUMPY), _opaque),
}

_ALLOWED: dict[str, Global] = {
    name: Global(name, _BUILDERS.get(name)) for name in (*_BUILDERS, *STORAGE_TYPES, *_DTYPES, *_NAMES_ONLY)
}
