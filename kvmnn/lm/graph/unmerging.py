"""Merged decoders reduced to their branch with a past, which takes an empty past as well."""

from __future__ import annotations

from typing import Any

from ...optional import package


def unmerge(model: Any, branch: str) -> bool:
    """Replace the ``If`` that chooses a branch by the nodes of the branch with a past, in place.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``.
    branch
        The input that chooses; it goes.

    Returns
    -------
    False, and nothing is changed, where the graph is not made of exactly one such ``If``.
    """
    choices = [place for place, node in enumerate(model.graph.node) if branch in node.input]
    if len(choices) != 1 or model.graph.node[choices[0]].op_type != "If":
        return False
    place = choices[0]
    choice = model.graph.node[place]
    inner = next((attribute.g for attribute in choice.attribute if attribute.name == "then_branch"), None)
    if inner is None or len(inner.output) != len(choice.output):
        return False
    nodes = list(inner.node)
    made = {name for node in nodes for name in node.output}
    names: dict[str, str] = {}
    copies = []
    for value, outer in zip(inner.output, choice.output, strict=True):
        if value.name in made and value.name not in names:
            names[value.name] = outer
        else:  # handed through from outside, or given out twice
            source = names.get(value.name, value.name)
            copies.append(package("onnx").helper.make_node("Identity", [source], [outer], name=f"{outer}/unmerged"))
    for node in nodes:
        _rename(node, names)
    stored = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(tensor for tensor in inner.initializer if tensor.name not in stored)
    model.graph.value_info.extend(value for value in inner.value_info if value.name not in names)
    after = list(model.graph.node[place + 1 :])
    before = list(model.graph.node[:place])
    rebuilt = type(model.graph)()
    rebuilt.node.extend([*before, *nodes, *copies, *after])
    model.graph.ClearField("node")
    model.graph.node.extend(rebuilt.node)
    for position, value in enumerate(model.graph.input):
        if value.name == branch:
            del model.graph.input[position]
            break
    return True


def _rename(node: Any, names: dict[str, str]) -> None:
    """Rename tensors of a node, also where its own subgraphs use them."""
    for operands in (node.input, node.output):
        for position, name in enumerate(operands):
            if name in names:
                operands[position] = names[name]
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in graph.node:
                _rename(inner, names)
            for value in graph.output:
                value.name = names.get(value.name, value.name)
