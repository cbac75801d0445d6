"""An ONNX graph written operator by operator: nodes in order, constants once, weights in fp16 where that is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

HALF_SUFFIX = "_f16"
"""What the name of a weight stored in fp16 ends with; the weight itself is the Cast of it."""


class GraphWriter:
    """Collects the nodes and initializers of a graph. Names given are names of tensors and of the nodes making them."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._known: set[str] = set()

    def node(self, kind: str, inputs: Sequence[str], name: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the output's name, which is the node's unless given."""
        self.nodes.append(helper.make_node(kind, inputs, [output or name], name=name, **attributes))
        return output or name

    def split(self, tensor: str, sizes: Sequence[int], name: str, parts: Sequence[str]) -> list[str]:
        """Cut the last axis of `tensor` into pieces of `sizes`."""
        outputs = list(parts)
        self.nodes.append(helper.make_node("Split", [tensor, self.integers(*sizes)], outputs, name=name, axis=-1))
        return outputs

    def constant(self, name: str, value: npt.ArrayLike) -> str:
        """Add an initializer, unless one of that name is there already. A number becomes a vector of one."""
        if name not in self._known:
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
            self._known.add(name)
        return name

    def integers(self, *values: int) -> str:
        """A constant int64 vector, named after its values."""
        name = "c_" + "_".join(str(value).replace("-", "m") for value in values)
        return self.constant(name, np.array(values, np.int64))

    def weight(self, name: str, value: npt.NDArray[Any]) -> str:
        """A float32 tensor, stored as fp16 with a Cast after it where no bit is lost by that."""
        exact = value.astype(np.float32)
        with np.errstate(over="ignore"):
            half = exact.astype(np.float16)
        if value.size < 2 or not np.array_equal(half.astype(np.float32), exact):
            return self.constant(name, exact)
        return self.node("Cast", [self.constant(name + HALF_SUFFIX, half)], name, to=TensorProto.FLOAT)
