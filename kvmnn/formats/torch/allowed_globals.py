"""The names that a checkpoint's pickle may use, and the inert function for each.

The list is that of ``torch.load(weights_only=True)`` in torch 2.13, plus numpy scalars, which training scripts save
next to the weights. torch itself is never imported. Names listed as opaque may be called and return an `OpaqueValue`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError
from ._pickles import AllowedGlobal, OpaqueValue
from .tensors import (
    ELEMENT_TYPES,
    UNTYPED,
    ElementType,
    TorchStorage,
    TorchTensor,
    make_tensor,
    make_valueless_tensor,
    read_empty_storage,
)

PickleArguments = tuple[Any, ...]

_TYPE_NAME_BY_STORAGE = {
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

ELEMENT_TYPE_BY_STORAGE: dict[str, ElementType] = {
    **{f"torch.{name}": ELEMENT_TYPES[kind] for name, kind in _TYPE_NAME_BY_STORAGE.items()},
    **{
        f"torch.cuda.{name}": ELEMENT_TYPES[kind]
        for name, kind in _TYPE_NAME_BY_STORAGE.items()
        if not name.startswith("Q")
    },
    "torch.storage.UntypedStorage": UNTYPED,
}
"""Element types by the full name of their storage class."""

_TENSOR_CLASS_NAMES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TYPE_NAME_BY_OLD_TENSOR = {
    "torch.Tensor": "float32",
    **{f"torch.{name}Tensor": _TYPE_NAME_BY_STORAGE[f"{name}Storage"] for name in _TENSOR_CLASS_NAMES},
}
"""Element types by the name of a tensor class; torch before 0.1.12 pickled tensors by class, with a state."""

_ELEMENT_TYPE_BY_DTYPE = {f"torch.{name}": kind for name, kind in ELEMENT_TYPES.items()}

_OPAQUE_GLOBALS = (
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
_UNCALLABLE_GLOBALS = (
    "torch.storage.TypedStorage",
    *(
        f"torch.{place}.{name}Tensor"
        for place in ("sparse", "cuda.sparse")
        for name in _TENSOR_CLASS_NAMES
        if name != "Bool"
    ),
    *(f"torch.{scheme}" for scheme in ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric")),
    *(f"torch.{scheme}" for scheme in ("per_channel_symmetric", "per_channel_affine_float_qparams")),
)
_NUMPY_GLOBALS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


class AllowedGlobals:
    """Resolver of the names in one checkpoint; `used_numpy` is true afterwards if it contains numpy scalars."""

    def __init__(self) -> None:
        self.used_numpy = False

    def resolve(self, module: str, name: str) -> AllowedGlobal:
        """Return the `AllowedGlobal` for a name."""
        full_name = f"{module}.{name}"
        try:
            allowed_global = _ALLOWED_GLOBALS[full_name]
        except KeyError:
            raise CheckpointError(
                f"the pickle asks for {full_name[:200]!r}, which is not among the names that checkpoints of plain "
                "tensors need; nothing that a pickle names is ever run"
            ) from None
        self.used_numpy |= full_name in _NUMPY_GLOBALS
        return allowed_global

    def set_state(self, value: object, state: object) -> bool:
        """Apply a pickled state to a value; return False if no known class has such a state."""
        return set_tensor_state(value, state)


def _build_ordered_dict(arguments: PickleArguments) -> dict[object, object]:
    pairs = arguments[0] if arguments else []
    is_list = len(arguments) <= 1 and isinstance(pairs, list)
    if not is_list or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise CheckpointError("an OrderedDict made of something else than a list of pairs")
    return {key if isinstance(key, str) else OpaqueValue(): value for key, value in pairs}


def _build_counter(arguments: PickleArguments) -> object:
    return arguments[0] if arguments and isinstance(arguments[0], dict) else {}


def _build_size(arguments: PickleArguments) -> tuple[object, ...]:
    if len(arguments) == 1 and isinstance(arguments[0], list | tuple):
        return tuple(arguments[0])
    raise CheckpointError("a torch.Size made of something else than one sequence")


def _check_count(arguments: PickleArguments, kind: str, *counts: int) -> None:
    if len(arguments) not in counts:
        raise CheckpointError(f"{kind} made of {len(arguments)} values: expected {' or '.join(map(str, counts))}")


def _build_tensor(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_tensor(storage, offset, size, stride)``."""
    _check_count(arguments, "a tensor", 4)
    return make_tensor(*arguments)


def _build_tensor_v2(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, flags])``."""
    _check_count(arguments, "a tensor", 6, 7)
    return _apply_flags(_check_gradient(make_tensor(*arguments[:4]), arguments[4]), arguments[6:])


def _build_tensor_v3(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, flags])``."""
    _check_count(arguments, "a tensor", 7, 8)
    dtype = arguments[6]
    element_type = _ELEMENT_TYPE_BY_DTYPE.get(dtype.name) if isinstance(dtype, AllowedGlobal) else None
    if element_type is None:
        raise CheckpointError("a tensor whose dtype is none of torch's")
    storage, offset, shape, strides = arguments[:4]
    tensor = make_tensor(storage, offset, shape, strides, element_type)
    return _apply_flags(_check_gradient(tensor, arguments[4]), arguments[7:])


_DIFFERENTIABLE_PREFIXES = ("float", "bfloat", "complex", "sparse", "meta")


def _check_gradient(tensor: TorchTensor, requires_grad: object) -> TorchTensor:
    if requires_grad is True and not tensor.element_type.name.startswith(_DIFFERENTIABLE_PREFIXES):
        raise CheckpointError(f"a tensor of type {tensor.element_type.name} with a gradient, which torch refuses")
    return tensor


_UNNEGATABLE_TYPES = ("bool", "uint16", "uint32", "uint64")


def _apply_flags(tensor: TorchTensor, flags: PickleArguments) -> TorchTensor:
    """Return a tensor with torch's conjugation or negation bit set for each name in `flags`.

    Conjugation leaves the real part unchanged. Types that torch cannot conjugate become tensors without values.
    """
    if not (flags and flags[0]):
        return tensor
    flag_names = flags[0]
    if not isinstance(flag_names, dict) or not all(isinstance(name, str) for name in flag_names):
        raise CheckpointError("a tensor whose flags are no dict of names")
    name, itemsize = tensor.element_type.name, tensor.element_type.itemsize
    if "conj" in flag_names and not tensor.element_type.is_complex:
        raise CheckpointError(f"a tensor of type {name} with torch's conjugation bit, which only complex ones have")
    tensor.is_negated = "neg" in flag_names
    is_conjugated_complex32 = "conj" in flag_names and name == "complex32"
    if tensor.is_negated and (is_conjugated_complex32 or name in _UNNEGATABLE_TYPES or name.startswith("float8")):
        refusal_text = (
            f"torch cannot negate elements of type {name}{' that are conjugated' if is_conjugated_complex32 else ''}, "
            f"as a bit demands"
        )
        tensor.element_type = ElementType(name, "", itemsize, refusal_text)
    return tensor


def _build_quantized_tensor(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)``."""
    _check_count(arguments, "a quantised tensor", 7)
    tensor = make_tensor(*arguments[:4])
    if tensor.element_type.numpy_code:
        raise CheckpointError(f"a quantised tensor of type {tensor.element_type.name}")
    return tensor


def _build_sparse_tensor(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_sparse_tensor(layout, data)``; the shape is the first tuple in `data`."""
    if len(arguments) != 2 or not isinstance(arguments[1], tuple):
        raise CheckpointError("a sparse tensor that is not put together as torch does")
    shape = next((argument for argument in arguments[1] if isinstance(argument, tuple)), None)
    return make_valueless_tensor("sparse", "a sparse tensor: expected a dense one, which to_dense() gives", shape)


def _build_meta_tensor(arguments: PickleArguments) -> TorchTensor:
    """Build a tensor: ``_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)``."""
    _check_count(arguments, "a meta tensor", 4)
    return make_valueless_tensor("meta", "a tensor of the meta device, saved without its values", arguments[1])


def _unwrap_parameter(arguments: PickleArguments) -> object:
    if not arguments:
        raise CheckpointError("a parameter made of nothing")
    if isinstance(arguments[0], TorchTensor):
        _check_gradient(arguments[0], arguments[1] if len(arguments) > 1 else True)
    return arguments[0]


def _make_old_tensor_builder(element_type: ElementType) -> Callable[[PickleArguments], TorchTensor]:
    def build(arguments: PickleArguments) -> TorchTensor:
        if arguments:
            raise CheckpointError(f"a {element_type.name} tensor made of {len(arguments)} values: expected none")
        return make_tensor(TorchStorage("", element_type, 0, read_empty_storage), 0, (0,), (1,), None)

    return build


def _refuse_cuda_tensor(arguments: PickleArguments) -> TorchTensor:
    raise CheckpointError("a tensor made by a class of torch.cuda, which torch.load cannot place on the CPU")


def set_tensor_state(value: object, state: object) -> bool:
    """Apply a pickled state to a tensor; return False if the state has an unknown form.

    Old tensors have a state of four values: storage, offset, shape and strides. Parameters have three, about gradients
    only, which are ignored.
    """
    if not isinstance(value, TorchTensor) or not isinstance(state, tuple):
        return False
    if len(state) != 4:
        return len(state) == 3 and isinstance(state[0], bool)
    tensor = make_tensor(*state, None)
    if tensor.element_type is not value.element_type:
        raise CheckpointError(f"a {value.element_type.name} tensor over a storage of {tensor.element_type.name}")
    value.storage, value.offset, value.shape, value.strides = (
        tensor.storage,
        tensor.offset,
        tensor.shape,
        tensor.strides,
    )
    return True


def _build_from_type(arguments: PickleArguments) -> object:
    """Return the result of the function in ``_rebuild_from_type_v2(function, type, arguments, state)``."""
    if len(arguments) != 4 or not isinstance(arguments[0], AllowedGlobal) or not isinstance(arguments[2], tuple):
        raise CheckpointError("a tensor of a class of its own that is not put together as torch does")
    function = arguments[0]
    if function.constructor is None or not function.name.startswith("torch._utils._rebuild_"):
        raise CheckpointError(f"a tensor of a class of its own, made by {function.name}")
    return function.constructor(arguments[2])


def _make_opaque_value(arguments: PickleArguments) -> OpaqueValue:
    return OpaqueValue()


_BUILDER_BY_GLOBAL: dict[str, Callable[[PickleArguments], object]] = {
    "collections.OrderedDict": _build_ordered_dict,
    "collections.Counter": _build_counter,
    "torch.Size": _build_size,
    "torch._utils._rebuild_tensor": _build_tensor,
    "torch._utils._rebuild_tensor_v2": _build_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _build_tensor_v3,
    "torch._utils._rebuild_qtensor": _build_quantized_tensor,
    "torch._utils._rebuild_sparse_tensor": _build_sparse_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _build_meta_tensor,
    **dict.fromkeys((f"torch.cuda.{name}Tensor" for name in _TENSOR_CLASS_NAMES), _refuse_cuda_tensor),
    **{name: _make_old_tensor_builder(ELEMENT_TYPES[kind]) for name, kind in _TYPE_NAME_BY_OLD_TENSOR.items()},
    "torch.nn.parameter.Parameter": _unwrap_parameter,
    "torch._utils._rebuild_parameter": _unwrap_parameter,
    "torch._utils._rebuild_parameter_with_state": _unwrap_parameter,
    "torch._tensor._rebuild_from_type_v2": _build_from_type,
    **dict.fromkeys((*_OPAQUE_GLOBALS, *_NUMPY_GLOBALS), _make_opaque_value),
}

_ALLOWED_GLOBALS: dict[str, AllowedGlobal] = {
    name: AllowedGlobal(name, _BUILDER_BY_GLOBAL.get(name))
    for name in (*_BUILDER_BY_GLOBAL, *ELEMENT_TYPE_BY_STORAGE, *_ELEMENT_TYPE_BY_DTYPE, *_UNCALLABLE_GLOBALS)
}
