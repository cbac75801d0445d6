"""Element types and numbers of axes of a graph's tensors, inferred without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...optional import import_optional

_MAX_KEPT_ELEMENTS = 64  # values; constants up to this size may be shapes, which inference has to see


@dataclass(frozen=True)
class TensorTypes:
    """What is known of the tensors of a graph.

    Attributes
    ----------
    elements
        Element type (an ``onnx.TensorProto`` number) of each tensor.
    ranks
        Number of axes, where inference reached it.
    """

    elements: dict[str, int]
    ranks: dict[str, int]


def infer_types(model: Any) -> TensorTypes:
    """Infer types of all tensors of `model`, an ``onnx.ModelProto``.

    The graph is copied with its large weights replaced by inputs of the same type, so that a model of some GB does not
    pass through protobuf again. Where inference fails, less is known; that is no error.
    """
    onnx = import_optional("onnx")
    skeleton = onnx.ModelProto(ir_version=model.ir_version)
    skeleton.opset_import.extend(model.opset_import)
    skeleton.functions.extend(model.functions)
    skeleton.graph.name = "types"
    skeleton.graph.node.extend(model.graph.node)
    skeleton.graph.input.extend(model.graph.input)
    skeleton.graph.value_info.extend(model.graph.value_info)
    input_names = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _MAX_KEPT_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL:
            skeleton.graph.initializer.append(tensor)
        elif tensor.name not in input_names:
            skeleton.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    try:
        typed_graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception:  # of many classes; types that stay unknown are dealt with by the caller
        typed_graph = skeleton.graph
    elements, ranks = {}, {}
    for value in [*typed_graph.input, *typed_graph.value_info, *typed_graph.output, *model.graph.output]:
        tensor_type = value.type.tensor_type
        if tensor_type.elem_type:
            elements[value.name] = tensor_type.elem_type
        if tensor_type.HasField("shape"):
            ranks[value.name] = len(tensor_type.shape.dim)
    return TensorTypes(elements, ranks)
