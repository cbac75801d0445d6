"""Rewrite a decoder's graph: attention probabilities become outputs, a bias on the scores becomes an input.

Nothing else of the graph changes, weights are not touched, and a bias of zeros leaves every logit as it was.
"""

from __future__ import annotations

import math
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ...errors import AttentionNotExposedError
from .attention import AttentionForm, AttentionInfo, AttentionSite

_MAX_KEPT_ELEMENTS = 64  # values; constants up to this size may be shapes, which inference has to see


@dataclass(frozen=True)
class TensorTypes:
    """Types and shapes of the tensors of a graph, as far as known."""

    #: Element type (an ``onnx.TensorProto`` number) of each tensor.
    elements: dict[str, int]
    #: Number of axes, where inference reached it.
    ranks: dict[str, int]


def infer_types(model: Any) -> TensorTypes:
    """Infer the types of all tensors of a model, an ``onnx.ModelProto``, as far as inference succeeds."""
    # The graph is copied with its large weights replaced by inputs of the same type, so that a model of some GB does
    # not pass through protobuf again.
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


def split_merged_decoder(model: Any, branch_input: str) -> bool:
    """Replace the ``If`` that chooses a branch by the nodes of the branch with a past, in place."""
    candidates = [if_index for if_index, node in enumerate(model.graph.node) if branch_input in node.input]
    if len(candidates) != 1 or model.graph.node[candidates[0]].op_type != "If":
        return False
    if_node = model.graph.node[candidates[0]]
    branch_graph = next((attribute.g for attribute in if_node.attribute if attribute.name == "then_branch"), None)
    if branch_graph is None or len(branch_graph.output) != len(if_node.output):
        return False
    nodes = list(branch_graph.node)
    produced_names = {name for node in nodes for name in node.output}
    names: dict[str, str] = {}
    copies = []
    for value, outer in zip(branch_graph.output, if_node.output, strict=True):
        if value.name in produced_names and value.name not in names:
            names[value.name] = outer
        else:  # handed through from outside, or given out twice
            source = names.get(value.name, value.name)
            copies.append(
                import_optional("onnx").helper.make_node("Identity", [source], [outer], name=f"{outer}/unmerged")
            )
    for node in nodes:
        _rename_tensors(node, names)
    initializer_names = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        tensor for tensor in branch_graph.initializer if tensor.name not in initializer_names
    )
    model.graph.value_info.extend(value for value in branch_graph.value_info if value.name not in names)
    earlier_nodes, later_nodes = list(model.graph.node[: candidates[0]]), list(model.graph.node[candidates[0] + 1 :])
    new_graph = type(model.graph)()
    new_graph.node.extend([*earlier_nodes, *nodes, *copies, *later_nodes])
    model.graph.ClearField("node")
    model.graph.node.extend(new_graph.node)
    branch_position = next((i for i, value in enumerate(model.graph.input) if value.name == branch_input), None)
    if branch_position is not None:
        del model.graph.input[branch_position]
    return True


def _rename_tensors(node: Any, names: dict[str, str]) -> None:
    """Rename tensors of a node, in its subgraphs as well."""
    for operands in (node.input, node.output):
        for position, name in enumerate(operands):
            if name in names:
                operands[position] = names[name]
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in graph.node:
                _rename_tensors(inner, names)
            for value in graph.output:
                value.name = names.get(value.name, value.name)


REWRITE_VERSION = 2  # of what this module and attention.py do to a graph; graphs kept by another version are made again
# Input of an operator that is added to its scores.
_MASK_INPUT_INDEX: dict[AttentionForm, int] = {"standard": 3, "GroupQueryAttention": 10, "MultiHeadAttention": 5}


@dataclass(frozen=True)
class RewrittenGraph:
    """Tensors that were added to a graph."""

    #: Names of the outputs with probabilities, by layer; None where they were not asked for.
    attentions: tuple[str, ...] | None = None
    #: Names of the inputs that are added to the scores, by layer; None where they could not be inserted.
    biases: tuple[str, ...] | None = None
    #: Whether a merged decoder was reduced to its branch with a past.
    unmerged: bool = False
    #: How many rows of probabilities a token has in a layer, where that was seen.
    query_heads: int | None = None


def expose_attention(model: Any, attention_info: AttentionInfo, types: TensorTypes, label: str) -> tuple[str, ...]:
    """Add outputs ``attentions.{i}`` to `model`, in place."""
    if not attention_info.sites:
        raise build_not_exposed_error(attention_info, label)
    onnx = import_optional("onnx")
    names = []
    for site in attention_info.sites:
        name = f"attentions.{site.layer}"
        tensor = site.probabilities_tensor or _open_probabilities(model, site, types)
        element_type = types.elements.get(tensor) or _infer_cache_type(model, types)
        if tensor != name:
            model.graph.node.append(onnx.helper.make_node("Identity", [tensor], [name], name=f"{name}/expose"))
        if name not in {value.name for value in model.graph.output}:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, element_type, None))
        names.append(name)
    return tuple(names)


def build_not_exposed_error(attention_info: AttentionInfo, label: str) -> AttentionNotExposedError:
    """Build the error for a graph whose operators hide attention probabilities."""
    operators = ", ".join(f"{name} ({count})" for name, count in sorted(attention_info.hidden_operators.items()))
    return AttentionNotExposedError(
        f"{label}: attention probabilities of some layers are in no tensor of this graph; operators that hide them: "
        f"{operators or 'none that kvmnn knows'}; export with eager attention and without fusion "
        '(attn_implementation="eager"), or choose a policy that needs no scores'
    )


def add_biases(model: Any, attention_info: AttentionInfo, types: TensorTypes) -> tuple[str, ...] | None:
    """Add inputs ``attention_bias.{i}``, float32 ``[1, 1 or heads, 1, past + tokens]``, to the scores, in place."""
    if not attention_info.sites or any(value.name.startswith("attention_bias.") for value in model.graph.input):
        return None
    onnx = import_optional("onnx")
    for site in attention_info.sites:
        insert_bias = _add_bias_to_scores if site.form == "softmax" else _add_bias_to_mask
        insert_bias(model, site, types)
    names = tuple(f"attention_bias.{site.layer}" for site in attention_info.sites)
    for name in names:
        shape = [1, f"{name}_heads", 1, f"{name}_total"]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return names


def _add_bias_to_scores(model: Any, site: AttentionSite, types: TensorTypes) -> None:
    node, scores = _find_score_consumer(model, site.node)
    builder = _NodeInserter(model, site, node)
    bias = builder.add_cast(
        f"attention_bias.{site.layer}", types.elements.get(scores) or _infer_cache_type(model, types)
    )
    if types.ranks.get(scores, 4) == 3:  # [batch * heads, query, key]
        bias = builder.add_node("Squeeze", [bias, builder.add_ints(0)])
    biased_scores = builder.add_node("Add", [scores, bias])
    for position, name in enumerate(node.input):
        if name == scores:
            node.input[position] = biased_scores
    builder.insert_nodes()


def _find_score_consumer(model: Any, softmax: Any) -> tuple[Any, str]:
    """Return the node that takes the scores: the Softmax, or a Concat before it that adds learned sinks."""
    producer = {name: node for node in model.graph.node for name in node.output}
    node = producer.get(softmax.input[0])
    for _ in range(4):
        if node is None or node.op_type not in ("Cast", "Sub"):
            break
        node = producer.get(node.input[0])
    if node is not None and node.op_type == "Concat":
        return node, node.input[0]
    return softmax, softmax.input[0]


def _add_bias_to_mask(model: Any, site: AttentionSite, types: TensorTypes) -> None:
    onnx = import_optional("onnx")
    node, position = site.node, _MASK_INPUT_INDEX[site.form]
    query, mask = node.input[0], node.input[position] if len(node.input) > position else ""
    builder = _NodeInserter(model, site, node)
    element_type = types.elements.get(query) or _infer_cache_type(model, types)
    bias = builder.add_cast(f"attention_bias.{site.layer}", element_type)
    if mask and types.elements.get(mask) == onnx.TensorProto.BOOL:
        combined_mask = builder.add_node("Where", [mask, bias, builder.add_lowest(element_type)])
    elif mask:
        combined_mask = builder.add_node("Add", [mask, bias])
    else:  # onnxruntime broadcasts what it adds over heads, but not over queries
        axis = 2 if site.form == "standard" and types.ranks.get(query, 4) == 4 else 1
        queries = builder.add_node("Shape", [query], start=axis, end=axis + 1)
        shape = builder.add_node("Concat", [builder.add_ints(1, 1), queries, builder.add_ints(1)], axis=0)
        combined_mask = builder.add_node("Expand", [bias, shape])
    while len(node.input) <= position:
        node.input.append("")
    node.input[position] = combined_mask
    builder.insert_nodes()


def _open_probabilities(model: Any, site: AttentionSite, types: TensorTypes) -> str:
    """Make an operator output its probabilities; return the name of their tensor."""
    onnx = import_optional("onnx")
    node = site.node
    while len(node.output) < 4:
        node.output.append("")
    tensor_name = node.output[3] or f"kvmnn/attention_{site.layer}/qk"
    node.output[3] = tensor_name
    if site.form == "MultiHeadAttention":
        # It reports masked scores, and its schema leaves their type open.
        element_type = types.elements.get(node.output[0]) or _infer_cache_type(model, types)
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(tensor_name, element_type, None))
        name = f"kvmnn/attention_{site.layer}/softmax"
        model.graph.node.append(onnx.helper.make_node("Softmax", [tensor_name], [name], name=name, axis=-1))
        types.elements[name] = element_type
        return name
    attribute_name, value = ("qk_output", 2) if site.form == "GroupQueryAttention" else ("qk_matmul_output_mode", 3)
    for attribute in [entry for entry in node.attribute if entry.name == attribute_name]:
        node.attribute.remove(attribute)
    node.attribute.append(onnx.helper.make_attribute(attribute_name, value))
    types.elements[tensor_name] = types.elements.get(node.output[0]) or _infer_cache_type(model, types)
    return tensor_name


def _infer_cache_type(model: Any, types: TensorTypes) -> int:
    """Return the type of the cache, the default for tensors whose type could not be inferred."""
    past = next((value for value in model.graph.input if "past" in value.name), None)
    return int(past.type.tensor_type.elem_type) if past is not None else int(import_optional("onnx").TensorProto.FLOAT)


class _NodeInserter:
    """Inserts new nodes right before a node."""

    def __init__(self, model: Any, site: AttentionSite, target: Any) -> None:
        self.model, self.target = model, target
        self.prefix = f"kvmnn/attention_{site.layer}"
        self.nodes: list[Any] = []

    def add_node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{self.prefix}/{operator}_{len(self.nodes)}"
        self.nodes.append(import_optional("onnx").helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def add_cast(self, name: str, element_type: int) -> str:
        onnx = import_optional("onnx")
        if element_type == onnx.TensorProto.FLOAT:
            return name
        return self.add_node("Cast", [name], to=element_type)

    def add_ints(self, *values: int) -> str:
        onnx = import_optional("onnx")
        return self.add_node(
            "Constant", [], value=onnx.helper.make_tensor("v", onnx.TensorProto.INT64, [len(values)], values)
        )

    def add_lowest(self, element_type: int) -> str:
        onnx = import_optional("onnx")
        value = -65504.0 if element_type == onnx.TensorProto.FLOAT16 else -3.0e38
        return self.add_node("Constant", [], value=onnx.helper.make_tensor("v", element_type, [], [value]))

    def insert_nodes(self) -> None:
        output = self.target.output[0]
        position = next(position for position, node in enumerate(self.model.graph.node) if output in node.output)
        for offset, node in enumerate(self.nodes):
            self.model.graph.node.insert(position + offset, node)
