"""Export compressors as ONNX graphs: one for each kind of compressor, with the weights of all its layers.

A kind is a prefix (text K, text V, image K, image V) with the shapes of its three Linear layers; a usual file has four
kinds, and more only if layers differ in shape. A graph has the inputs ``layer`` (int64, index among the kind's layers)
and ``rows`` (float32 ``[n, factor x head_dim]``) and the output ``tokens`` (float32 ``[n, head_dim]``). Weights have
the bits of the weight file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import field
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ..._util.text import LOSSY, UNCHANGED
from ...dtypes import Elements
from ...errors import KvmnnError
from ...files.atomic import DirectoryOutput
from ...files.schema import Record, json_key
from ..kvcm import DEFAULT_PREFIXES, SLOTS_PER_PREFIX, WeightFile, read_weight_file
from .plan import Precision

OPSET = 17
_IR_VERSION = 8
_MAX_PROTOBUF_BYTES = (1 << 31) - (1 << 20)
_ELEMENT_TYPES = {"fp32": 1, "fp16": 10, "bf16": 16}  # ONNX's codes (TensorProto.DataType)

LinearShapes = tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True)
class CompressorKind:
    """The compressors that one graph contains."""

    #: Their position within a layer.
    prefix: int
    #: The layers of the file that have it, in order; the graph's input ``layer`` counts within them.
    layers: tuple[int, ...]
    #: ``(outputs, inputs, has bias)`` of the three Linear layers.
    shapes: LinearShapes
    #: Name for display and files: the prefix, and the first layer if a prefix has several kinds.
    name: str


def list_compressor_kinds(weights: WeightFile) -> list[CompressorKind]:
    """List the kinds of compressors in a file, ordered by prefix and first layer."""
    count = weights.header.weight_count_per_layer
    if count % SLOTS_PER_PREFIX:
        raise KvmnnError(f"{weights.label}: has {count} weights in a layer: expected a multiple of {SLOTS_PER_PREFIX}")
    return [kind for prefix in range(count // SLOTS_PER_PREFIX) for kind in list_prefix_kinds(weights, prefix)]


def list_prefix_kinds(weights: WeightFile, prefix: int) -> list[CompressorKind]:
    """List the kinds of one prefix, which the file must contain."""
    by_shapes: dict[LinearShapes, list[int]] = {}
    for layer in range(weights.header.num_layers):
        placements = (
            weights.get_placement(layer, prefix * SLOTS_PER_PREFIX + slot) for slot in range(SLOTS_PER_PREFIX)
        )
        shapes = tuple((placement.rows, placement.cols, placement.has_bias) for placement in placements)
        by_shapes.setdefault(shapes, []).append(layer)
    name = DEFAULT_PREFIXES[prefix] if prefix < len(DEFAULT_PREFIXES) else f"prefix_{prefix}"
    return [
        CompressorKind(prefix, tuple(layers), shapes, name if len(by_shapes) == 1 else f"{name}.layer_{layers[0]}")
        for shapes, layers in by_shapes.items()
    ]


def build_graph(weights: WeightFile, kind: CompressorKind, precision: Precision = "fp32") -> bytes:
    """Build the graph of one kind, as the bytes of an ONNX model."""
    for slot in range(1, SLOTS_PER_PREFIX):
        outputs_before, num_inputs = kind.shapes[slot - 1][0], kind.shapes[slot][1]
        if outputs_before != num_inputs:
            raise KvmnnError(
                f"{weights.label}: {kind.name}: linear {slot} takes {num_inputs} inputs, expected {outputs_before} "
                f"(the outputs of linear {slot - 1})"
            )
    onnx: Any = import_optional("onnx")
    helper = onnx.helper
    weight_bytes = (
        len(kind.layers) * weights.header.dtype.itemsize * sum(rows * (cols + 1) for rows, cols, _ in kind.shapes)
    )
    if weight_bytes > _MAX_PROTOBUF_BYTES:
        raise KvmnnError(
            f"{weights.label}: {kind.name} has {weight_bytes} bytes of weights, an ONNX model holds less than 2 GiB"
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
    """Nodes and weights of one graph; values are identified by name."""

    def __init__(self, helper: Any, weights: WeightFile, kind: CompressorKind, *, half: bool) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._helper = helper
        self._weights = weights
        self._kind = kind
        self._rounds_to_fp16 = half
        value = "rows"
        if half:
            value = self._add_rounding(value)
        for slot in range(SLOTS_PER_PREFIX):
            value = self._add_linear(slot, value)
            if slot < SLOTS_PER_PREFIX - 1:
                value = self._add_node("Relu", [value], f"relu{slot}")
        self._add_node("Identity", [value], "tokens")

    def _add_linear(self, slot: int, value: str) -> str:
        blocks = [
            self._weights.get_block(layer, self._kind.prefix * SLOTS_PER_PREFIX + slot) for layer in self._kind.layers
        ]
        inputs = [value, self._add_layer_tensor(f"weight{slot}", [block.weight for block in blocks])]
        biases = [block.bias for block in blocks if block.bias is not None]
        if biases:
            inputs.append(self._add_layer_tensor(f"bias{slot}", biases))
        value = self._add_node("Gemm", inputs, f"linear{slot}", transB=1)
        return self._add_rounding(value) if self._rounds_to_fp16 else value

    def _add_layer_tensor(self, name: str, arrays: list[Elements]) -> str:
        """Add all layers' elements as one tensor, and return the name of the float32 values of the requested layer."""
        dtype = self._weights.header.dtype.name
        all_layers = np.stack(arrays)
        self.initializers.append(
            self._helper.make_tensor(name, _ELEMENT_TYPES[dtype], all_layers.shape, all_layers.tobytes(), raw=True)
        )
        value = self._add_node("Gather", [name, "layer"], f"{name}_of_layer", axis=0)
        if dtype != "fp32":
            value = self._add_cast(value, "fp32")
        return self._add_rounding(value) if self._rounds_to_fp16 and dtype != "fp16" else value

    def _add_rounding(self, value: str) -> str:
        return self._add_cast(self._add_cast(value, "fp16"), "fp32")

    def _add_cast(self, value: str, dtype: str) -> str:
        return self._add_node("Cast", [value], f"{value}_{dtype}", to=_ELEMENT_TYPES[dtype])

    def _add_node(self, operator: str, inputs: list[str], output: str, **attributes: int) -> str:
        self.nodes.append(self._helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


@dataclass(frozen=True, kw_only=True)
class OnnxExportResult(Record):
    """Result of exporting graphs."""

    #: The weight file and the directory.
    source: str = field(metadata={"key": "input"})
    target: str = field(metadata={"key": "output"})
    #: Names in the directory.
    files: list[str]
    #: Requested precision.
    precision: Precision
    #: Type of the weights.
    dtype: str

    @property
    @json_key(after="target")
    def label(self) -> str:
        """Return ``UNCHANGED``, or ``LOSSY`` if weights were rounded."""
        return UNCHANGED if self.precision == "fp32" else LOSSY

    def __str__(self) -> str:
        label = f"{UNCHANGED} (copied)" if self.precision == "fp32" else f"{LOSSY} (fp16 arithmetic)"
        return f"{self.target}: {', '.join(self.files)}; weights of {self.dtype}, {label}"


def export_onnx(
    weights: WeightFile | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    precision: Precision = "fp32",
    overwrite: bool = False,
    protect: Iterable[str] = (),
) -> OnnxExportResult:
    """Write every kind's graph as ``<name>.onnx`` into a directory, all of them or none.

    Parameters
    ----------
    weights
        A weight file, or its path, which is then never overwritten; ``"-"`` for standard input.
    path
        The directory; created if it does not exist.
    precision
        ``"fp16"`` adds the roundings of an fp16 runtime to the graphs.
    overwrite, protect
        Replace existing files; paths that are never overwritten.

    Raises
    ------
    MissingDependencyError, KvmnnError
        If onnx is not installed; for weights that do not fit together or are too large for a graph.
    OutputError
        If the directory cannot be written to or a file exists already.
    """
    file = weights if isinstance(weights, WeightFile) else read_weight_file(weights)
    source = file.label if isinstance(weights, WeightFile) else os.fspath(weights)
    kinds = list_compressor_kinds(file)
    names = [f"{kind.name}.onnx" for kind in kinds]
    import_optional("onnx")
    with DirectoryOutput(path, force=overwrite, exclude=[source, *protect]) as directory:
        directory.check_names(names)
        for kind, name in zip(kinds, names, strict=True):
            directory.open_file(name).write(build_graph(file, kind, precision))
        directory.commit()
    return OnnxExportResult(
        source=source,
        target=os.fspath(path),
        files=names,
        precision=precision,
        dtype=file.header.dtype.name,
    )
