"""Changes to a decoder's graph: attention probabilities come out, a bias on the scores goes in.

Nothing else of the graph changes, weights are not touched, and a bias of zeros leaves every logit as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import AttentionNotExposedError
from ...optional import package
from .attention import Attentions, Form, Site
from .tensor_types import TensorTypes

VERSION = 2  # of what this module and attention.py do to a graph; graphs kept by another version are made anew
# Input of an operator that is added to its scores.
_ADDED: dict[Form, int] = {"standard": 3, "GroupQueryAttention": 10, "MultiHeadAttention": 5}


@dataclass(frozen=True)
class Operated:
    """What was added to a graph.

    Attributes
    ----------
    attentions
        Names of the outputs with probabilities, by layer; None where they were not asked for.
    biases
        Names of the inputs that are added to the scores, by layer; None where they could not be inserted.
    unmerged
        Whether a merged decoder was reduced to its branch with a past.
    query_heads
        How many rows of probabilities a token has in a layer, where that was seen.
    """

    attentions: tuple[str, ...] | None = None
    biases: tuple[str, ...] | None = None
    unmerged: bool = False
    query_heads: int | None = None


def expose(model: Any, found: Attentions, types: TensorTypes, label: str) -> tuple[str, ...]:
    """Add outputs ``attentions.{i}`` to `model`, in place.

    Raises
    ------
    AttentionNotExposedError
        When the probabilities of some layer are in no tensor; the message names the operators that hide them.
    """
    if not found.sites:
        raise not_exposed(found, label)
    onnx = package("onnx")
    names = []
    for site in found.sites:
        name = f"attentions.{site.layer}"
        tensor = site.probabilities or _open(model, site, types)
        kind = types.elements.get(tensor) or _cache_type(model, types)
        if tensor != name:
            model.graph.node.append(onnx.helper.make_node("Identity", [tensor], [name], name=f"{name}/expose"))
        if name not in {value.name for value in model.graph.output}:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        names.append(name)
    return tuple(names)


def not_exposed(found: Attentions, label: str) -> AttentionNotExposedError:
    """The refusal of a graph whose attention stays inside its operators."""
    operators = ", ".join(f"{name} ({count})" for name, count in sorted(found.closed.items()))
    return AttentionNotExposedError(
        f"{label}: attention probabilities of some layers are in no tensor of this graph; operators that hide them: "
        f"{operators or 'none that kvmnn knows'}; export with eager attention and without fusion "
        '(attn_implementation="eager"), or choose a policy that needs no scores'
    )


def add_biases(model: Any, found: Attentions, types: TensorTypes) -> tuple[str, ...] | None:
    """Add inputs ``attention_bias.{i}``, float32 ``[1, 1 or heads, 1, past + tokens]``, to `model`, in place.

    They are added to the scores of each layer right before its Softmax.

    Returns
    -------
    Their names, or None where a layer has no place for one; then `model` is as it was.
    """
    if not found.sites or any(value.name.startswith("attention_bias.") for value in model.graph.input):
        return None
    onnx = package("onnx")
    for site in found.sites:
        insert = _bias_scores if site.form == "softmax" else _bias_mask
        insert(model, site, types)
    names = tuple(f"attention_bias.{site.layer}" for site in found.sites)
    for name in names:
        shape = [1, f"{name}_heads", 1, f"{name}_total"]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return names


def _bias_scores(model: Any, site: Site, types: TensorTypes) -> None:
    node, scores = _before_sinks(model, site.node)
    builder = _Before(model, site, node)
    bias = builder.cast(f"attention_bias.{site.layer}", types.elements.get(scores) or _cache_type(model, types))
    if types.ranks.get(scores, 4) == 3:  # [batch * heads, query, key]
        bias = builder.node("Squeeze", [bias, builder.ints(0)])
    biased = builder.node("Add", [scores, bias])
    for position, name in enumerate(node.input):
        if name == scores:
            node.input[position] = biased
    builder.insert()


def _before_sinks(model: Any, softmax: Any) -> tuple[Any, str]:
    """The node that takes the scores of the tokens: the Softmax, or what joins learned sinks to them before it."""
    producer = {name: node for node in model.graph.node for name in node.output}
    node = producer.get(softmax.input[0])
    for _ in range(4):
        if node is None or node.op_type not in ("Cast", "Sub"):
            break
        node = producer.get(node.input[0])
    if node is not None and node.op_type == "Concat":
        return node, node.input[0]
    return softmax, softmax.input[0]


def _bias_mask(model: Any, site: Site, types: TensorTypes) -> None:
    onnx = package("onnx")
    node, position = site.node, _ADDED[site.form]
    query, mask = node.input[0], node.input[position] if len(node.input) > position else ""
    builder = _Before(model, site, node)
    kind = types.elements.get(query) or _cache_type(model, types)
    bias = builder.cast(f"attention_bias.{site.layer}", kind)
    if mask and types.elements.get(mask) == onnx.TensorProto.BOOL:
        joined = builder.node("Where", [mask, bias, builder.lowest(kind)])
    elif mask:
        joined = builder.node("Add", [mask, bias])
    else:  # onnxruntime broadcasts what it adds over heads, but not over queries
        axis = 2 if site.form == "standard" and types.ranks.get(query, 4) == 4 else 1
        queries = builder.node("Shape", [query], start=axis, end=axis + 1)
        shape = builder.node("Concat", [builder.ints(1, 1), queries, builder.ints(1)], axis=0)
        joined = builder.node("Expand", [bias, shape])
    while len(node.input) <= position:
        node.input.append("")
    node.input[position] = joined
    builder.insert()


def _open(model: Any, site: Site, types: TensorTypes) -> str:
    """Let an operator hand out its probabilities; the name of the tensor that holds them."""
    onnx = package("onnx")
    node = site.node
    while len(node.output) < 4:
        node.output.append("")
    opened = node.output[3] or f"kvmnn/attention_{site.layer}/qk"
    node.output[3] = opened
    if site.form == "MultiHeadAttention":
        # It reports masked scores, and its schema leaves their type open.
        kind = types.elements.get(node.output[0]) or _cache_type(model, types)
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(opened, kind, None))
        name = f"kvmnn/attention_{site.layer}/softmax"
        model.graph.node.append(onnx.helper.make_node("Softmax", [opened], [name], name=name, axis=-1))
        types.elements[name] = kind
        return name
    setting, value = ("qk_output", 2) if site.form == "GroupQueryAttention" else ("qk_matmul_output_mode", 3)
    for attribute in [entry for entry in node.attribute if entry.name == setting]:
        node.attribute.remove(attribute)
    node.attribute.append(onnx.helper.make_attribute(setting, value))
    types.elements[opened] = types.elements.get(node.output[0]) or _cache_type(model, types)
    return opened


def _cache_type(model: Any, types: TensorTypes) -> int:
    """The type of the cache, which stands in where inference did not reach a tensor."""
    past = next((value for value in model.graph.input if "past" in value.name), None)
    return int(past.type.tensor_type.elem_type) if past is not None else int(package("onnx").TensorProto.FLOAT)


class _Before:
    """New nodes that go right before a node."""

    def __init__(self, model: Any, site: Site, target: Any) -> None:
        self.model, self.target = model, target
        self.prefix = f"kvmnn/attention_{site.layer}"
        self.nodes: list[Any] = []

    def node(self, kind: str, inputs: list[str], **settings: Any) -> str:
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        self.nodes.append(package("onnx").helper.make_node(kind, inputs, [name], name=name, **settings))
        return name

    def cast(self, name: str, kind: int) -> str:
        onnx = package("onnx")
        if kind == onnx.TensorProto.FLOAT:
            return name
        return self.node("Cast", [name], to=kind)

    def ints(self, *values: int) -> str:
        onnx = package("onnx")
        return self.node(
            "Constant", [], value=onnx.helper.make_tensor("v", onnx.TensorProto.INT64, [len(values)], values)
        )

    def lowest(self, kind: int) -> str:
        onnx = package("onnx")
        lowest = -65504.0 if kind == onnx.TensorProto.FLOAT16 else -3.0e38
        return self.node("Constant", [], value=onnx.helper.make_tensor("v", kind, [], [lowest]))

    def insert(self) -> None:
        output = self.target.output[0]
        place = next(place for place, node in enumerate(self.model.graph.node) if output in node.output)
        for offset, node in enumerate(self.nodes):
            self.model.graph.node.insert(place + offset, node)
