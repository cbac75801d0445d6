"""Attention that is found in a graph, and attention that stays hidden."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper
from tiny_decoders import Tiny

from kvmnn.lm.onnx.attention import find_attention
from kvmnn.lm.onnx.graph_rewrite import TensorTypes, expose_attention


def test_attention_in_branches_and_functions_is_counted() -> None:
    softmax = helper.make_node("Softmax", ["x"], ["y"])
    fused = helper.make_node("GroupQueryAttention", ["x"], ["z"], domain="com.microsoft")
    copied = helper.make_node("Identity", ["x"], ["y"])
    branches = {
        "then_branch": helper.make_graph([softmax, fused, copied], "then", [], []),
        "else_branch": helper.make_graph([copied], "else", [], []),
    }
    model = helper.make_model(helper.make_graph([helper.make_node("If", ["c"], ["o"], **branches)], "g", [], []))
    for name, node in (("mixes", softmax), ("copies", copied)):
        model.functions.append(helper.make_function("own", name, ["x"], ["y"], [node], []))
    assert find_attention(model, 21, []).hidden_operators == {
        "Softmax in a branch or loop": 1,
        "GroupQueryAttention in a branch or loop": 1,
        "function mixes": 1,
    }


@pytest.mark.parametrize(("output", "mode", "found"), [("", 0, 1), ("scores", 3, 1), ("scores", 0, 0)])
def test_an_output_of_scores_that_is_taken_cannot_report_probabilities(output: str, mode: int, found: int) -> None:
    names = ["q", "k", "v", "", "past_keys", "past_values"], ["y", "keys", "values", output]
    node = helper.make_node("Attention", *names, qk_matmul_output_mode=mode)
    attention = find_attention(helper.make_model(helper.make_graph([node], "g", [], [])), 23, ["past_values"])
    assert len(attention.sites) == found
    assert attention.hidden_operators == ({} if found else {"Attention": 1})


@pytest.mark.parametrize("half", [False, True])
def test_where_types_are_not_known_the_caches_type_stands_in(half: bool) -> None:
    model = Tiny(half=half).model()
    values = [f"past_key_values.{layer}.value" for layer in range(2)]
    names = expose_attention(model, find_attention(model, 21, values), TensorTypes({}, {}), "model.onnx")
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    assert [kinds[name] for name in names] == [TensorProto.FLOAT16 if half else TensorProto.FLOAT] * 2
