"""Read rotations and output weights of every layer from a decoder's graph that `kvmnn.lm.importer` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._util.packages import import_optional
from ...dtypes import Floats
from ...policies.layer_parameters import LayerParameters, Rotation
from .interface import DecoderInterface
from .model_files import read_onnx_graph, resolve_dir

# Between the rotated queries and the angles: products, and the two halves put together.
_ROTATION_OPERATORS = {"Concat", "Sub", "Add", "Mul"}
_MAX_DEPTH = 6


def read_layer_parameters(graph: Path, interface: DecoderInterface) -> list[LayerParameters]:
    """Return the parameters of each layer; without outputs of queries no rotation is known."""
    model = read_onnx_graph(graph)
    producers = {name: node for node in model.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = []
    for layer in range(interface.layers):
        name = interface.query_outputs[layer] if interface.query_outputs else ""
        weight_name = f"layers.{layer}.attention.o.weight"
        weights = tensors.get(weight_name, tensors.get(f"{weight_name}.fp16"))
        reader = None if weights is None else _OutputWeights(weights, resolve_dir(graph), interface.head_dim)
        layers.append(LayerParameters(interface.layers, _find_rotation(name, producers, tensors), reader))
    return layers


class _OutputWeights:
    """Reads the weights ``[hidden, query_head * head_dim]`` of one layer when they are needed."""

    def __init__(self, tensor: Any, folder: Path, head_dim: int) -> None:
        self._tensor, self._folder, self._head_dim = tensor, folder, head_dim

    def __call__(self) -> Floats:
        array = import_optional("onnx").numpy_helper.to_array(self._tensor, str(self._folder))
        weights: Floats = array.astype(np.float32).T.reshape(-1, self._head_dim, array.shape[0])
        return weights


def _find_rotation(name: str, producers: Mapping[str, Any], tensors: Mapping[str, Any]) -> Rotation | None:
    """Trace rotated queries to their cosines: the angles are positions times frequencies."""
    to_array = import_optional("onnx").numpy_helper.to_array
    queue, scale = [(name, 0)], 1.0
    while queue:
        name, depth = queue.pop(0)
        node = producers.get(name)
        if node is None or depth > _MAX_DEPTH:
            continue
        if node.op_type == "Cos":
            angles = producers.get(node.input[0])
            constants = [tensors[operand] for operand in (angles.input if angles else ()) if operand in tensors]
            return Rotation(to_array(constants[0]).astype(np.float32).reshape(-1), scale) if constants else None
        if node.op_type == "Mul" and (parts := [part for part in node.input if part in tensors]):
            scale = float(to_array(tensors[parts[0]]))
        if node.op_type in _ROTATION_OPERATORS:
            queue += [(operand, depth + 1) for operand in node.input]
    return None
