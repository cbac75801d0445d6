"""Find the attention in a decoder's graph.

Three forms are supported: a Softmax between the product with the keys and the product with the values (eager exports,
and SDPA if the exporter decomposes it), the standard ``Attention`` operator (opset 23 and later), and two fused
operators of onnxruntime whose schema has an output for scores. A Softmax that mixes no values (a router, a sampling
head) is not attention. The layer is the one whose past values are multiplied.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Literal

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from .model_files import iter_subgraphs

AttentionForm = Literal["softmax", "standard", "GroupQueryAttention", "MultiHeadAttention"]

_PRODUCT_OPERATORS = {"MatMul", "Einsum", "FusedMatMul", "TransposeMatMul", "Gemm"}
# Between the Softmax and the product with the values: operators that hand the probabilities on as they are, and
# operators that only lay them out again.
_VALUE_OPERATORS = {"Cast", "CastLike", "Dropout", "Identity", "Where", "Mul", "Slice"}
_LAYOUT_OPERATORS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze"}
# Between the product with the keys and the Softmax.
_SCORE_OPERATORS = (
    _VALUE_OPERATORS | _LAYOUT_OPERATORS | {"Add", "Sub", "Div", "Max", "Min", "Tanh", "Clip", "Concat", "Softcap"}
)
# The length of the past reaches every layer through these; the past itself does not.
_NON_DATA_OPERATORS = {"Shape", "Size", "Softmax"} | _PRODUCT_OPERATORS
_FUSED_OPERATORS = {
    "Attention",
    "DecoderAttention",
    "DecoderMaskedMultiHeadAttention",
    "DecoderMaskedSelfAttention",
    "GroupQueryAttention",
    "LinearAttention",
    "LongformerAttention",
    "MultiHeadAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
    "PagedAttention",
    "QAttention",
    "QMultiHeadAttention",
    "QOrderedAttention",
    "SparseAttention",
}
_STANDARD_DOMAINS = ("", "ai.onnx")
_MIN_PROBABILITIES_OPSET = 23  # opset of the standard Attention operator


@dataclass(frozen=True)
class AttentionSite:
    """The attention of one layer."""

    #: Determined from its past values, or from the order in the graph if these cannot be traced.
    layer: int
    #: How the graph expresses it.
    form: AttentionForm
    #: The Softmax, or the operator that holds it.
    node: Any
    #: The tensor that multiplies the values, where it is in the graph; empty for operators, whose output is still to be
    #: opened.
    probabilities_tensor: str = ""


@dataclass(frozen=True)
class AttentionInfo:
    """The attention of a graph."""

    #: One for each layer, in order; empty unless every layer was found exactly once.
    sites: tuple[AttentionSite, ...]
    #: Operators that hold attention and cannot be opened, with how many there are.
    hidden_operators: dict[str, int]


def find_attention(model: Any, opset: int, past_values: Iterable[str]) -> AttentionInfo:
    """Find the attention of every layer."""
    return _AttentionFinder(model, opset, tuple(past_values)).find()


def find_attention_nodes(model: Any, past_values: Iterable[str]) -> tuple[tuple[Any, ...], ...]:
    """Return the nodes of each layer's attention, from the product with the keys to that with the values."""
    return _AttentionFinder(model, 0, tuple(past_values)).find_node_spans()


class _AttentionFinder:
    def __init__(self, model: Any, opset: int, past_values: tuple[str, ...]) -> None:
        self.model, self.graph, self.opset = model, model.graph, opset
        self.layer_of_input = {name: layer for layer, name in enumerate(past_values)}
        self.producer = {name: node for node in self.graph.node for name in node.output if name}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                if name:
                    self.consumers[name].append(node)

    def find(self) -> AttentionInfo:
        hidden_operators: dict[str, int] = defaultdict(int)
        sites: list[tuple[int | None, AttentionForm, Any, str]] = []
        has_openable = any(node.op_type in ("GroupQueryAttention", "MultiHeadAttention") for node in self.graph.node)
        reporting_operators = _list_reporting_operators() if has_openable else set()
        for node in self.graph.node:
            if node.op_type == "Softmax" and node.domain in _STANDARD_DOMAINS:
                tensor, values = self._find_value_matmul(node)
                if values and self._is_scored(node.input[0]):
                    sites.append((self._find_layer(values), "softmax", node, tensor))
            elif node.op_type == "Attention" and node.domain in _STANDARD_DOMAINS:
                if self.opset >= _MIN_PROBABILITIES_OPSET and _can_report(node):
                    sites.append((self._find_layer(_get_operand(node, 5) or node.input[2]), "standard", node, ""))
                else:
                    hidden_operators["Attention"] += 1
            elif node.op_type in _FUSED_OPERATORS:
                if node.domain == "com.microsoft" and node.op_type in reporting_operators:
                    form: AttentionForm = (
                        "GroupQueryAttention" if node.op_type == "GroupQueryAttention" else "MultiHeadAttention"
                    )
                    past_values = _get_operand(node, 4 if form == "GroupQueryAttention" else 7)
                    sites.append((self._find_layer(past_values) if past_values else None, form, node, ""))
                else:
                    hidden_operators[f"{node.domain}::{node.op_type}"] += 1
        # Attention that the graph's own nodes do not show: in branches, loops and functions.
        for inner in iter_subgraphs(self.graph):
            for node in inner.node:
                if _may_be_attention(node):
                    hidden_operators[f"{node.op_type} in a branch or loop"] += 1
        for function in self.model.functions:
            if any(map(_may_be_attention, function.node)):
                hidden_operators[f"function {function.name}"] += 1
        return AttentionInfo(self._number_sites(sites), dict(hidden_operators))

    def find_node_spans(self) -> tuple[tuple[Any, ...], ...]:
        spans = []
        for node in self.graph.node:
            if node.op_type in _FUSED_OPERATORS:
                spans.append((node,))
            elif node.op_type == "Softmax" and node.domain in _STANDARD_DOMAINS:
                score_nodes = self._trace_to_keys(node.input[0], {})
                value_nodes = self._trace_to_values(node.output[0], set())
                if score_nodes and value_nodes:
                    spans.append((*score_nodes, node, *value_nodes))
        return tuple(spans) if len(spans) == len(self.layer_of_input) else ()

    def _trace_to_keys(self, name: str, nodes_by_tensor: dict[str, list[Any]], depth: int = 0) -> list[Any]:
        """Trace scores back to the product of queries and keys; return the nodes up to it, or none if there is no
        product.
        """
        node = self.producer.get(name)
        if node is None or depth > 12:
            return []
        if name not in nodes_by_tensor:
            nodes_by_tensor[name] = []
            if node.op_type in _PRODUCT_OPERATORS:
                nodes_by_tensor[name] = [] if any(self._is_weight(operand) for operand in node.input[:2]) else [node]
            elif node.op_type in _SCORE_OPERATORS:
                operand_nodes = [
                    self._trace_to_keys(operand, nodes_by_tensor, depth + 1) for operand in node.input if operand
                ]
                nodes_by_output = {entry.output[0]: entry for entries in operand_nodes for entry in entries}
                nodes_by_tensor[name] = [*nodes_by_output.values(), node] if nodes_by_output else []
        return nodes_by_tensor[name]

    def _trace_to_values(self, name: str, visited: set[str], depth: int = 0) -> list[Any]:
        """Trace probabilities forward to their product with values; return the nodes up to it, the product included."""
        nodes: list[Any] = []
        if name in visited or depth > 8:
            return nodes
        visited.add(name)
        for node in self.consumers[name]:
            if node.op_type in _PRODUCT_OPERATORS:
                other_operands = [operand for operand in node.input if operand and operand != name]
                if other_operands and not self._is_weight(other_operands[0]):
                    nodes.append(node)
            elif node.op_type in _VALUE_OPERATORS | _LAYOUT_OPERATORS:
                later_nodes = self._trace_to_values(node.output[0], visited, depth + 1)
                nodes += [node, *later_nodes] if later_nodes else []
        return nodes

    def _number_sites(self, sites_found: list[tuple[int | None, AttentionForm, Any, str]]) -> tuple[AttentionSite, ...]:
        if len(sites_found) != len(self.layer_of_input):
            return ()
        layers = [layer for layer, *_ in sites_found]
        if all(layer is None for layer in layers):
            layers = list(range(len(sites_found)))  # nodes of a graph are in topological order
        if sorted(layer for layer in layers if layer is not None) != list(range(len(sites_found))):
            return ()
        sites = [
            AttentionSite(layer, form, node, tensor)
            for layer, (_, form, node, tensor) in zip(layers, sites_found, strict=True)
            if layer is not None
        ]
        return tuple(sorted(sites, key=lambda site: site.layer))

    def _find_value_matmul(self, softmax: Any) -> tuple[str, str]:
        """Return the tensor of probabilities and the values that it multiplies; empty names if there is no product."""
        queue = deque([(softmax.output[0], softmax.output[0], 0)])
        visited: set[str] = set()
        while queue:
            name, tensor, depth = queue.popleft()
            if name in visited or depth > 8:
                continue
            visited.add(name)
            for node in self.consumers[name]:
                if node.op_type in _PRODUCT_OPERATORS:
                    other_operands = [operand for operand in node.input if operand and operand != name]
                    if other_operands and not self._is_weight(other_operands[0]):
                        return tensor, other_operands[0]
                elif node.op_type in _VALUE_OPERATORS | _LAYOUT_OPERATORS:
                    keeps_layout = node.op_type in _VALUE_OPERATORS and tensor == name
                    queue.extend((output, output if keeps_layout else tensor, depth + 1) for output in node.output[:1])
        return "", ""

    def _is_weight(self, name: str) -> bool:
        """Return whether a tensor is a stored weight, possibly after casts, as for the product of a router or head."""
        while name in self.producer and self.producer[name].op_type in {"Cast", "Identity", "Transpose"}:
            name = self.producer[name].input[0]
        if name in self.producer:
            return bool(self.producer[name].op_type == "Constant")
        return name not in {value.name for value in self.graph.input}

    def _is_scored(self, name: str) -> bool:
        """Return whether only scaling and masking lie between this tensor and a product of two computed tensors."""
        queue, visited = deque([(name, 0)]), set()
        while queue:
            name, depth = queue.popleft()
            node = self.producer.get(name)
            if node is None or name in visited or depth > 12:
                continue
            visited.add(name)
            if node.op_type in _PRODUCT_OPERATORS:
                if not any(self._is_weight(operand) for operand in node.input[:2]):
                    return True
            elif node.op_type in _SCORE_OPERATORS:
                queue.extend((operand, depth + 1) for operand in node.input if operand)
        return False

    def _find_layer(self, values: str) -> int | None:
        """Return the layer whose past values flow into `values` without a projection between."""
        queue, visited = deque([(values, 0)]), set()
        while queue:
            name, depth = queue.popleft()
            if name in self.layer_of_input:
                return self.layer_of_input[name]
            node = self.producer.get(name)
            if node is None or name in visited or depth > 24 or node.op_type in _NON_DATA_OPERATORS:
                continue
            visited.add(name)
            queue.extend((operand, depth + 1) for operand in node.input if operand)
        return None


def _may_be_attention(node: Any) -> bool:
    return node.op_type in _FUSED_OPERATORS or node.op_type == "Softmax"


def _get_operand(node: Any, position: int) -> str:
    return str(node.input[position]) if len(node.input) > position else ""


def _can_report(node: Any) -> bool:
    """Return whether the fourth output of a standard Attention is unused, or contains probabilities already."""
    if len(node.output) < 4 or not node.output[3]:
        return True
    return any(attribute.name == "qk_matmul_output_mode" and attribute.i == 3 for attribute in node.attribute)


def _list_reporting_operators() -> set[str]:
    """List the fused operators that have an output for scores in the installed onnxruntime."""
    try:
        state = import_optional("onnxruntime.capi.onnxruntime_pybind11_state")
        schemas = state.get_all_operator_schema()
    except (ImportError, AttributeError):  # a build without the schemas
        return set()
    return {
        schema.name
        for schema in schemas
        if schema.domain == "com.microsoft"
        and schema.name in ("GroupQueryAttention", "MultiHeadAttention")
        and any("qk" in output.name for output in schema.outputs)
    }
