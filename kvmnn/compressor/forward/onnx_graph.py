"""Compressors as ONNX graphs: one for each kind of compressor, with the weights of all its layers.

A kind is a prefix (text K, text V, image K, image V) together with the shapes of its three Linear layers; a usual file
has four kinds, and more only where layers differ in shape. A graph takes ``layer`` (int64, which of the kind's layers)
and ``rows`` (float32 ``[n, factor x head_dim]``) and makes ``tokens`` (float32 ``[n, head_dim]``). Weights are stored
with the words of the file they came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import Words
from ...errors import KvmnnError
from ...files.output import DirectoryOutput
from ...optional import package
from ...text import LOSSY, UNCHANGED
from ..kvcm.header import PREFIXES, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile, read
from .options import Precision

OPSET = 17
_IR_VERSION = 8
_MAX_PROTOBUF = (1 << 31) - (1 << 20)
_ELEMENT_TYPES = {"fp32": 1, "fp16": 10, "bf16": 16}
"""ONNX's codes (TensorProto.DataType) by kvmnn's names."""

Shapes = tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True)
class LayerKind:
    """Compressors that one graph can hold.

    Parameters
    ----------
    prefix
        Their position within a layer.
    layers
        The layers of the file that have it, in order; the graph's input ``layer`` counts within them.
    shapes
        ``(outputs, inputs, has bias)`` of the three Linear layers.
    name
        For people and files: the prefix, and the first layer where a prefix has several kinds.
    """

    prefix: int
    layers: tuple[int, ...]
    shapes: Shapes
    name: str


def layer_kinds(weights: WeightFile) -> list[LayerKind]:
    """The kinds of compressors in a file, by prefix and first layer.

    Raises
    ------
    KvmnnError
        When the blocks of a layer are not complete compressors.
    """
    count = weights.header.weight_count_per_layer
    if count % SLOTS_PER_PREFIX:
        raise KvmnnError(f"{weights.label}: has {count} weights in a layer: expected a multiple of {SLOTS_PER_PREFIX}")
    return [kind for prefix in range(count // SLOTS_PER_PREFIX) for kind in kinds_of(weights, prefix)]


def kinds_of(weights: WeightFile, prefix: int) -> list[LayerKind]:
    """The kinds of one prefix, which the file must have."""
    by_shapes: dict[Shapes, list[int]] = {}
    for layer in range(weights.header.num_layers):
        places = (weights.place(layer, prefix * SLOTS_PER_PREFIX + slot) for slot in range(SLOTS_PER_PREFIX))
        shapes = tuple((place.rows, place.cols, place.has_bias) for place in places)
        by_shapes.setdefault(shapes, []).append(layer)
    name = PREFIXES[prefix] if prefix < len(PREFIXES) else f"prefix_{prefix}"
    return [
        LayerKind(prefix, tuple(layers), shapes, name if len(by_shapes) == 1 else f"{name}.layer_{layers[0]}")
        for shapes, layers in by_shapes.items()
    ]


def build(weights: WeightFile, kind: LayerKind, precision: Precision = "fp32") -> bytes:
    """The graph of one kind, as the bytes of an ONNX model.

    Raises
    ------
    MissingDependencyError
        Where onnx is not installed.
    KvmnnError
        For Linear layers that do not take what the one before them makes, and for weights of 2 GiB and more, which a
        model cannot hold.
    """
    for slot in range(1, SLOTS_PER_PREFIX):
        made, taken = kind.shapes[slot - 1][0], kind.shapes[slot][1]
        if made != taken:
            raise KvmnnError(
                f"{weights.label}: {kind.name}: linear {slot} takes {taken} inputs, expected {made} "
                f"(the outputs of linear {slot - 1})"
            )
    onnx: Any = package("onnx")
    helper = onnx.helper
    size = len(kind.layers) * weights.header.dtype.itemsize * sum(rows * (cols + 1) for rows, cols, _ in kind.shapes)
    if size > _MAX_PROTOBUF:
        raise KvmnnError(
            f"{weights.label}: {kind.name} has {size} bytes of weights, an ONNX model holds less than 2 GiB"
        )
    graph = _GraphBuilder(helper, weights, kind, half=precision == "fp16")
    outputs, inputs = kind.shapes[-1][0], kind.shapes[0][1]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            kind.name,
            [
                helper.make_tensor_value_info("layer", onnx.TensorProto.INT64, []),
                helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["n", inputs]),
            ],
            [helper.make_tensor_value_info("tokens", onnx.TensorProto.FLOAT, ["n", outputs])],
            graph.initializers,
        ),
        producer_name="kvmnn",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
    )
    header = weights.header
    helper.set_model_props(
        model,
        {
            "kvmnn.prefix": kind.name.partition(".")[0],
            "kvmnn.layers": ",".join(map(str, kind.layers)),
            "kvmnn.compression_factor": str(header.compression_factor),
            "kvmnn.min_seq_len": str(header.min_seq_len),
            "kvmnn.precision": precision,
        },
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


class _GraphBuilder:
    """Nodes and weights of one graph; a value is known by its name."""

    def __init__(self, helper: Any, weights: WeightFile, kind: LayerKind, *, half: bool) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._helper = helper
        self._weights = weights
        self._kind = kind
        self._half = half
        value = "rows"
        if half:
            value = self._rounded(value)
        for slot in range(SLOTS_PER_PREFIX):
            value = self._linear(slot, value)
            if slot < SLOTS_PER_PREFIX - 1:
                value = self._node("Relu", [value], f"relu{slot}")
        self._node("Identity", [value], "tokens")

    def _linear(self, slot: int, value: str) -> str:
        blocks = [
            self._weights.block(layer, self._kind.prefix * SLOTS_PER_PREFIX + slot) for layer in self._kind.layers
        ]
        inputs = [value, self._of_layer(f"weight{slot}", [block.weight for block in blocks])]
        biases = [block.bias for block in blocks if block.bias is not None]
        if biases:
            inputs.append(self._of_layer(f"bias{slot}", biases))
        value = self._node("Gemm", inputs, f"linear{slot}", transB=1)
        return self._rounded(value) if self._half else value

    def _of_layer(self, name: str, words: list[Words]) -> str:
        """All layers' words as one tensor, and the float32 values of the layer that is asked for."""
        dtype = self._weights.header.dtype.name
        stacked = np.stack(words)
        self.initializers.append(
            self._helper.make_tensor(name, _ELEMENT_TYPES[dtype], stacked.shape, stacked.tobytes(), raw=True)
        )
        value = self._node("Gather", [name, "layer"], f"{name}_of_layer", axis=0)
        if dtype != "fp32":
            value = self._cast(value, "fp32")
        return self._rounded(value) if self._half and dtype != "fp16" else value

    def _rounded(self, value: str) -> str:
        return self._cast(self._cast(value, "fp16"), "fp32")

    def _cast(self, value: str, dtype: str) -> str:
        return self._node("Cast", [value], f"{value}_{dtype}", to=_ELEMENT_TYPES[dtype])

    def _node(self, operator: str, inputs: list[str], output: str, **attributes: int) -> str:
        self.nodes.append(self._helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """Graphs that were written.

    Attributes
    ----------
    source, target
        The weight file and the directory.
    files
        Names in the directory.
    precision
        As was asked for.
    dtype
        Type of the weights.
    """

    source: str
    target: str
    files: list[str]
    precision: Precision
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.source,
            "output": self.target,
            "label": UNCHANGED if self.precision == "fp32" else LOSSY,
            "files": self.files,
            "precision": self.precision,
            "dtype": self.dtype,
        }

    def __str__(self) -> str:
        label = f"{UNCHANGED} (copied)" if self.precision == "fp32" else f"{LOSSY} (fp16 arithmetic)"
        return f"{self.target}: {', '.join(self.files)}; weights of {self.dtype}, {label}"


def export_onnx(
    weights: WeightFile | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    precision: Precision = "fp32",
    force: bool = False,
    protect: Iterable[str] = (),
) -> OnnxExport:
    """Write every kind's graph as ``<name>.onnx`` into a directory, all of them or none.

    Parameters
    ----------
    weights
        A weight file, or its path, which is then protected; ``"-"`` for standard input.
    path
        The directory; made if it does not exist.
    precision
        ``"fp16"`` adds the roundings of an fp16 runtime to the graphs.
    force, protect
        As for `kvmnn.files.output.DirectoryOutput`.

    Raises
    ------
    MissingDependencyError, KvmnnError
        As for `layer_kinds` and `build`.
    OutputError
        When the directory cannot be written to or a file exists already.
    """
    file = weights if isinstance(weights, WeightFile) else read(weights)
    source = file.label if isinstance(weights, WeightFile) else os.fspath(weights)
    kinds = layer_kinds(file)
    names = [f"{kind.name}.onnx" for kind in kinds]
    package("onnx")
    with DirectoryOutput(path, force=force, protect=[source, *protect]) as directory:
        directory.check_names(names)
        for kind, name in zip(kinds, names, strict=True):
            directory.file(name).write(build(file, kind, precision))
        directory.commit()
    return OnnxExport(
        source=source,
        target=os.fspath(path),
        files=names,
        precision=precision,
        dtype=file.header.dtype.name,
    )
