"""Where attention happens in a decoder's graph.

Three forms can be opened: a written-out Softmax between the product with the keys and the product with the values
(eager exports, and SDPA where the exporter takes it apart), the standard ``Attention`` operator (opset 23 and later),
and two fused operators of onnxruntime whose schema has an output for it. A Softmax that mixes no values (a router, a
sampling head) is not attention. The layer is the one whose past values are multiplied.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ...optional import package
from .graph_file import subgraphs

Form = Literal["softmax", "standard", "GroupQueryAttention", "MultiHeadAttention"]

_PRODUCTS = {"MatMul", "Einsum", "FusedMatMul", "TransposeMatMul", "Gemm"}
# Between the Softmax and the product with the values: operators that hand the probabilities on as they are, and
# operators that only lay them out anew.
_KEEPING = {"Cast", "CastLike", "Dropout", "Identity", "Where", "Mul", "Slice"}
_LAYING_OUT = {"Reshape", "Transpose", "Squeeze", "Unsqueeze"}
# Between the product with the keys and the Softmax.
_SCORING = _KEEPING | _LAYING_OUT | {"Add", "Sub", "Div", "Max", "Min", "Tanh", "Clip", "Concat", "Softcap"}
# The length of the past reaches every layer through these; the past itself does not.
_NOT_DATA = {"Shape", "Size", "Softmax"} | _PRODUCTS
_FUSED = {
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
_STANDARD = ("", "ai.onnx")
_PROBABILITIES_SINCE = 23  # opset of the standard Attention operator


@dataclass(frozen=True)
class Site:
    """The attention of one layer.

    Attributes
    ----------
    layer
        By the past values that it multiplies; by order in the graph where none of them can be followed.
    form
        How it is written.
    node
        The Softmax, or the operator that holds it.
    probabilities
        The tensor that multiplies the values, where it is in the graph; empty for operators, whose output is still to
        be opened.
    """

    layer: int
    form: Form
    node: Any
    probabilities: str = ""


@dataclass(frozen=True)
class Attentions:
    """The attention of a graph.

    Attributes
    ----------
    sites
        One for each layer, in order; empty unless every layer was found exactly once.
    closed
        Operators that hold attention and cannot be opened, with how many there are.
    """

    sites: tuple[Site, ...]
    closed: dict[str, int]


def find_attention(model: Any, opset: int, past_values: Iterable[str]) -> Attentions:
    """Find the attention of every layer.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``; left as it is.
    opset
        Version of the standard operators it uses.
    past_values
        Names of the inputs that hold the past values of layers 0, 1, ...
    """
    return _Finder(model, opset, tuple(past_values)).find()


def attention_nodes(model: Any, past_values: Iterable[str]) -> tuple[tuple[Any, ...], ...]:
    """The nodes that are the attention of each layer.

    The product with the keys, what lies between it and the Softmax (scale, mask), the Softmax, and what follows up to
    the product with the values; or the operator that does all of it. What makes the mask is none of it.

    Returns
    -------
    In the order of the graph; empty where there are not as many as layers.
    """
    return _Finder(model, 0, tuple(past_values)).spans()


class _Finder:
    def __init__(self, model: Any, opset: int, past_values: tuple[str, ...]) -> None:
        self.model, self.graph, self.opset = model, model.graph, opset
        self.layer_of_input = {name: layer for layer, name in enumerate(past_values)}
        self.producer = {name: node for node in self.graph.node for name in node.output if name}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                if name:
                    self.consumers[name].append(node)

    def find(self) -> Attentions:
        closed: dict[str, int] = defaultdict(int)
        found: list[tuple[int | None, Form, Any, str]] = []
        reporting = _operators_that_report() if self._has_contrib() else set()
        for node in self.graph.node:
            if node.op_type == "Softmax" and node.domain in _STANDARD:
                tensor, values = self._used_by(node)
                if values and self._is_scored(node.input[0]):
                    found.append((self._layer(values), "softmax", node, tensor))
            elif node.op_type == "Attention" and node.domain in _STANDARD:
                if self.opset >= _PROBABILITIES_SINCE and _can_report(node):
                    found.append((self._layer(_operand(node, 5) or node.input[2]), "standard", node, ""))
                else:
                    closed["Attention"] += 1
            elif node.op_type in _FUSED:
                if node.domain == "com.microsoft" and node.op_type in reporting:
                    form: Form = (
                        "GroupQueryAttention" if node.op_type == "GroupQueryAttention" else "MultiHeadAttention"
                    )
                    past = _operand(node, 4 if form == "GroupQueryAttention" else 7)
                    found.append((self._layer(past) if past else None, form, node, ""))
                else:
                    closed[f"{node.domain}::{node.op_type}"] += 1
        self._count_hidden(closed)
        return Attentions(self._number(found), dict(closed))

    def spans(self) -> tuple[tuple[Any, ...], ...]:
        found = []
        for node in self.graph.node:
            if node.op_type in _FUSED:
                found.append((node,))
            elif node.op_type == "Softmax" and node.domain in _STANDARD:
                before, after = self._from_keys(node.input[0], {}), self._to_values(node.output[0], set())
                if before and after:
                    found.append((*before, node, *after))
        return tuple(found) if len(found) == len(self.layer_of_input) else ()

    def _from_keys(self, name: str, known: dict[str, list[Any]], depth: int = 0) -> list[Any]:
        """The product of two computed tensors that becomes this one, and what lies between; empty where none does."""
        node = self.producer.get(name)
        if node is None or depth > 12:
            return []
        if name not in known:
            known[name] = []
            if node.op_type in _PRODUCTS:
                known[name] = [] if any(self._is_weight(operand) for operand in node.input[:2]) else [node]
            elif node.op_type in _SCORING:
                before = [self._from_keys(operand, known, depth + 1) for operand in node.input if operand]
                each = {entry.output[0]: entry for entries in before for entry in entries}
                known[name] = [*each.values(), node] if each else []
        return known[name]

    def _to_values(self, name: str, seen: set[str], depth: int = 0) -> list[Any]:
        """What lies between probabilities and their product with computed values, the product included."""
        found: list[Any] = []
        if name in seen or depth > 8:
            return found
        seen.add(name)
        for node in self.consumers[name]:
            if node.op_type in _PRODUCTS:
                others = [operand for operand in node.input if operand and operand != name]
                if others and not self._is_weight(others[0]):
                    found.append(node)
            elif node.op_type in _KEEPING | _LAYING_OUT:
                further = self._to_values(node.output[0], seen, depth + 1)
                found += [node, *further] if further else []
        return found

    def _number(self, found: list[tuple[int | None, Form, Any, str]]) -> tuple[Site, ...]:
        if len(found) != len(self.layer_of_input):
            return ()
        layers = [layer for layer, *_ in found]
        if all(layer is None for layer in layers):
            layers = list(range(len(found)))  # nodes of a graph are in topological order
        if sorted(layer for layer in layers if layer is not None) != list(range(len(found))):
            return ()
        sites = [
            Site(layer, form, node, tensor)
            for layer, (_, form, node, tensor) in zip(layers, found, strict=True)
            if layer is not None
        ]
        return tuple(sorted(sites, key=lambda site: site.layer))

    def _has_contrib(self) -> bool:
        return any(node.op_type in ("GroupQueryAttention", "MultiHeadAttention") for node in self.graph.node)

    def _count_hidden(self, closed: dict[str, int]) -> None:
        """Attention that the graph's own nodes do not show: in branches, loops and functions."""
        for inner in subgraphs(self.graph):
            for node in inner.node:
                if node.op_type in _FUSED or node.op_type == "Softmax":
                    closed[f"{node.op_type} in a branch or loop"] += 1
        for function in self.model.functions:
            if any(node.op_type in _FUSED or node.op_type == "Softmax" for node in function.node):
                closed[f"function {function.name}"] += 1

    def _used_by(self, softmax: Any) -> tuple[str, str]:
        """The tensor of probabilities that is multiplied, and the values that it multiplies; empty where neither is."""
        queue = deque([(softmax.output[0], softmax.output[0], 0)])
        seen: set[str] = set()
        while queue:
            name, tensor, depth = queue.popleft()
            if name in seen or depth > 8:
                continue
            seen.add(name)
            for node in self.consumers[name]:
                if node.op_type in _PRODUCTS:
                    others = [operand for operand in node.input if operand and operand != name]
                    if others and not self._is_weight(others[0]):
                        return tensor, others[0]
                elif node.op_type in _KEEPING:
                    queue.extend((out, out if tensor == name else tensor, depth + 1) for out in node.output[:1])
                elif node.op_type in _LAYING_OUT:
                    queue.extend((out, tensor, depth + 1) for out in node.output[:1])
        return "", ""

    def _is_weight(self, name: str) -> bool:
        """Whether a tensor is a stored weight, maybe after casts: what a router or a head multiplies."""
        while name in self.producer and self.producer[name].op_type in {"Cast", "Identity", "Transpose"}:
            name = self.producer[name].input[0]
        if name in self.producer:
            return bool(self.producer[name].op_type == "Constant")
        return name not in {value.name for value in self.graph.input}

    def _is_scored(self, name: str) -> bool:
        """Whether a product of two computed tensors reaches this one through nothing but scaling and masking."""
        queue, seen = deque([(name, 0)]), set()
        while queue:
            name, depth = queue.popleft()
            node = self.producer.get(name)
            if node is None or name in seen or depth > 12:
                continue
            seen.add(name)
            if node.op_type in _PRODUCTS:
                if not any(self._is_weight(operand) for operand in node.input[:2]):
                    return True
            elif node.op_type in _SCORING:
                queue.extend((operand, depth + 1) for operand in node.input if operand)
        return False

    def _layer(self, values: str) -> int | None:
        """The layer whose past values flow into `values`, projections not crossed."""
        queue, seen = deque([(values, 0)]), set()
        while queue:
            name, depth = queue.popleft()
            if name in self.layer_of_input:
                return self.layer_of_input[name]
            node = self.producer.get(name)
            if node is None or name in seen or depth > 24 or node.op_type in _NOT_DATA:
                continue
            seen.add(name)
            queue.extend((operand, depth + 1) for operand in node.input if operand)
        return None


def _operand(node: Any, position: int) -> str:
    return str(node.input[position]) if len(node.input) > position else ""


def _can_report(node: Any) -> bool:
    """Whether the fourth output of a standard Attention is free, or holds probabilities already."""
    if len(node.output) < 4 or not node.output[3]:
        return True
    return any(attribute.name == "qk_matmul_output_mode" and attribute.i == 3 for attribute in node.attribute)


def _operators_that_report() -> set[str]:
    """Fused operators whose schema, in the onnxruntime that is installed, has an output for scores."""
    try:
        state = package("onnxruntime.capi.onnxruntime_pybind11_state")
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
