"""Merged decoders reduced to their branch with a past, which takes an empty past as well."""

from __future__ import annotations

from typing import Any

from ...optional import import_optional


def split_merged_decoder(model: Any, branch_input: str) -> bool:
    """Replace the ``If`` that chooses a branch by the nodes of the branch with a past, in place.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``.
    branch_input
        The input that chooses; it goes.

    Returns
    -------
    False, and nothing is changed, where the graph is not made of exactly one such ``If``.
    """
    candidates = [if_index for if_index, node in enumerate(model.graph.node) if branch_input in node.input]
    if len(candidates) != 1 or model.graph.node[candidates[0]].op_type != "If":
        return False
    if_index = candidates[0]
    if_node = model.graph.node[if_index]
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
    later_nodes = list(model.graph.node[if_index + 1 :])
    earlier_nodes = list(model.graph.node[:if_index])
    new_graph = type(model.graph)()
    new_graph.node.extend([*earlier_nodes, *nodes, *copies, *later_nodes])
    model.graph.ClearField("node")
    model.graph.node.extend(new_graph.node)
    for position, value in enumerate(model.graph.input):
        if value.name == branch_input:
            del model.graph.input[position]
            break
    return True


def _rename_tensors(node: Any, names: dict[str, str]) -> None:
    """Rename tensors of a node, also where its own subgraphs use them."""
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
