"""The names that a checkpoint's pickle may use, and the inert function that stands for each.

The list follows what ``torch.load(weights_only=True)`` allows, plus numpy scalars, which training scripts like to save
beside the weights. torch itself is never imported. What is listed as opaque may be called and gives `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pickles import Global, Unknown
from ..errors import CheckpointError
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, Tensor, tensor

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
    **{
        f"{module}.{name}": ELEMENT_TYPES[kind]
        for module in ("torch", "torch.cuda")
        for name, kind in _STORAGES.items()
    },
    "torch.UntypedStorage": UNTYPED,
    "torch.storage.UntypedStorage": UNTYPED,
}
"""Element types by the full name of their storage class."""

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
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
_NAMES_ONLY = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.TypedStorage",
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
    """``_rebuild_tensor(storage, offset, size, stride)``, with requires_grad, hooks and flags in the second version."""
    if not 4 <= len(arguments) <= 7:
        raise CheckpointError(f"a tensor made of {len(arguments)} values: expected 4 to 7")
    _refuse_flags(arguments[6:])
    storage, offset, shape, strides = arguments[:4]
    return tensor(storage, offset, shape, strides, None)


def _tensor_v3(arguments: Arguments) -> Tensor:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, flags])``."""
    if not 7 <= len(arguments) <= 8:
        raise CheckpointError(f"a tensor made of {len(arguments)} values: expected 7 or 8")
    dtype = arguments[6]
    element = _DTYPES.get(dtype.name) if isinstance(dtype, Global) else None
    if element is None:
        raise CheckpointError("a tensor whose dtype is none of torch's")
    _refuse_flags(arguments[7:])
    storage, offset, shape, strides = arguments[:4]
    return tensor(storage, offset, shape, strides, element)


def _refuse_flags(flags: Arguments) -> None:
    """Lazily conjugated or negated tensors hold other values than their storage."""
    if any(isinstance(flag, dict) and any(flag.values()) for flag in flags):
        raise CheckpointError("a tensor with torch's conjugation or negation bit set is not supported")


def _parameter(arguments: Arguments) -> object:
    if not arguments:
        raise CheckpointError("a parameter made of nothing")
    return arguments[0]


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
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    **dict.fromkeys((*_OPAQUE, *_NUMPY), _opaque),
}

_ALLOWED: dict[str, Global] = {
    name: Global(name, _BUILDERS.get(name)) for name in (*_BUILDERS, *STORAGE_TYPES, *_DTYPES, *_NAMES_ONLY)
}
