"""Attention operators in a graph: those that are found, and those that hide their probabilities."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper
from tiny_decoders import Tiny

from kvmnn.lm.onnx.attention import find_attention
from kvmnn.lm.onnx.graph_rewrite import TensorTypes, expose_attention


def test_find_attention_counts_branches_and_functions() -> None:
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
def test_find_attention_used_scores_output_is_not_exposed(output: str, mode: int, found: int) -> None:
    names = ["q", "k", "v", "", "past_keys", "past_values"], ["y", "keys", "values", output]
    node = helper.make_node("Attention", *names, qk_matmul_output_mode=mode)
    attention = find_attention(helper.make_model(helper.make_graph([node], "g", [], [])), 23, ["past_values"])
    assert len(attention.sites) == found
    assert attention.hidden_operators == ({} if found else {"Attention": 1})


@pytest.mark.parametrize("half", [False, True])
def test_expose_attention_unknown_types_use_cache_type(half: bool) -> None:
    model = Tiny(half=half).model()
    values = [f"past_key_values.{layer}.value" for layer in range(2)]
    names = expose_attention(model, find_attention(model, 21, values), TensorTypes({}, {}), "model.onnx")
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    assert [kinds[name] for name in names] == [TensorProto.FLOAT16 if half else TensorProto.FLOAT] * 2
