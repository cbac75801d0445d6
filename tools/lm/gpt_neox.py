"""The ONNX graph of a GPT-NeoX decoder (the Pythia family) with its KV cache as inputs and outputs.

Names are those of optimum's exports. What is different from them, on purpose:

* every layer may have its own number of past tokens: the mask is as long as the longest layer, and each layer takes the
  last columns of it that it needs;
* keys are rotated before they enter the cache and `position_ids` serve rotation alone, so tokens can be dropped from
  the cache and the rest stays valid, as long as positions stay true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from graph_writer import GraphWriter
from onnx import TensorProto, helper

from kvmnn.errors import KvmnnError

OPSET = 20  # the first with Gelu
IR_VERSION = 9
PRODUCER = "export_onnx.py"
GELU_FORMS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
HEADS_OF_OUTPUT = ("embed_out.weight", "lm_head.weight", "gpt_neox.embed_in.weight")  # the last where they are tied
TO_THE_END = 2**31 - 1

Weights = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class NeoxConfig:
    """What of a config.json decides the graph. Sizes in elements."""

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    rotary_share: float
    rotary_base: float
    epsilon: float
    gelu: str
    parallel: bool

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads

    @property
    def rotary(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.rotary_share)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> NeoxConfig:
        """Read a config.json of transformers 4 (`rotary_pct`, `rotary_emb_base`) or 5 (`rope_parameters`).

        Raises
        ------
        KvmnnError
            For other families, and for activations and rotations that the graph does not have.
        """
        if config.get("model_type", "gpt_neox") != "gpt_neox":
            raise KvmnnError(f"config.json: model_type is {config['model_type']!r}: expected 'gpt_neox'")
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise KvmnnError(f"config.json: rope_type is {rope['rope_type']!r}: expected 'default'")
        activation = config.get("hidden_act", "gelu")
        if activation not in GELU_FORMS:
            raise KvmnnError(f"config.json: hidden_act is {activation!r}: expected one of {', '.join(GELU_FORMS)}")
        try:
            return cls(
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                hidden=config["hidden_size"],
                vocabulary=config["vocab_size"],
                rotary_share=float(rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))),
                rotary_base=float(rope.get("rope_theta", config.get("rotary_emb_base", 10000.0))),
                epsilon=config.get("layer_norm_eps", 1e-5),
                gelu=GELU_FORMS[activation],
                parallel=config.get("use_parallel_residual", True),
            )
        except KeyError as exc:
            raise KvmnnError(f"config.json: {exc.args[0]} is missing") from None


def build(config: NeoxConfig, weights: Weights, *, attentions: bool = False) -> onnx.ModelProto:
    """The model.

    Parameters
    ----------
    config
        Its sizes.
    weights
        Tensors by the names that transformers stores them under, float16 or float32.
    attentions
        Also give attention probabilities, ``attentions.{i}``, float32 ``[batch, head, seq, past_i + seq]``.

    Raises
    ------
    KvmnnError
        Where a tensor is missing.
    """
    writer = GraphWriter()
    decoder = _Decoder(writer, config, weights, attentions)
    decoder.write()
    graph = helper.make_graph(
        writer.nodes, "gpt_neox_with_past", _inputs(config), _outputs(config, attentions), writer.initializers
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name=PRODUCER)
    onnx.checker.check_model(model, full_check=True)
    return model


def _inputs(config: NeoxConfig) -> list[onnx.ValueInfoProto]:
    tokens = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])
        for name, length in (("input_ids", "seq"), ("attention_mask", "kv"), ("position_ids", "seq"))
    ]
    return tokens + [
        _floats(f"past_key_values.{layer}.{kind}", "batch", config.heads, f"past_{layer}", config.head_dim)
        for layer in range(config.layers)
        for kind in ("key", "value")
    ]


def _outputs(config: NeoxConfig, attentions: bool) -> list[onnx.ValueInfoProto]:
    caches = [
        _floats(f"present.{layer}.{kind}", "batch", config.heads, f"total_{layer}", config.head_dim)
        for layer in range(config.layers)
        for kind in ("key", "value")
    ]
    weights = [
        _floats(f"attentions.{layer}", "batch", config.heads, "seq", f"total_{layer}")
        for layer in range(config.layers if attentions else 0)
    ]
    return [_floats("logits", "batch", "seq", config.vocabulary), *caches, *weights]


def _floats(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


class _Decoder:
    """Writes the operators from the token ids to the logits, in the order in which they are computed."""

    def __init__(self, writer: GraphWriter, config: NeoxConfig, weights: Weights, attentions: bool) -> None:
        self.writer = writer
        self.config = config
        self.weights = weights
        self.attentions = attentions
        self.cosines = self.sines = self.mask = self.scale = ""

    def write(self) -> None:
        self._rotation_tables()
        self._mask()
        node = self.writer.node
        stream = node("Gather", [self._weight("gpt_neox.embed_in.weight", "embed_in.weight"), "input_ids"], "embed_in")
        self.scale = self.writer.constant("c_scale", np.float32(self.config.head_dim**-0.5))
        for layer in range(self.config.layers):
            stream = self._layer(stream, layer)
        stream = self._layer_norm(stream, "gpt_neox.final_layer_norm", "final_layer_norm")
        name = next((name for name in HEADS_OF_OUTPUT if name in self.weights), HEADS_OF_OUTPUT[0])
        head = self._weight(name, "embed_out.weight.T", transposed=True)
        node("MatMul", [stream, head], "embed_out", "logits")

    def _rotation_tables(self) -> None:
        """Cosines and sines of the true positions, ``[batch, 1, seq, rotary]``."""
        node, constant = self.writer.node, self.writer.constant
        size = self.config.rotary
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        inverse = (1.0 / (self.config.rotary_base**exponents)).astype(np.float32)
        positions = node("Cast", ["position_ids"], "rope/pos", to=TensorProto.FLOAT)
        positions = node("Unsqueeze", [positions, self.writer.integers(1, 3)], "rope/pos4")
        angles = node("Mul", [positions, constant("rope.inv_freq", inverse)], "rope/freqs")
        angles = node("Concat", [angles, angles], "rope/emb", axis=-1)
        self.cosines = node("Cos", [angles], "rope/cos")
        self.sines = node("Sin", [angles], "rope/sin")

    def _mask(self) -> None:
        """What is added to the scores, ``[batch, 1, seq, kv]``: the new tokens are the last columns."""
        node, constant, integers = self.writer.node, self.writer.constant, self.writer.integers
        columns = node("Shape", ["attention_mask"], "mask/kv", start=1, end=2)
        rows = node("Shape", ["input_ids"], "mask/seq", start=1, end=2)
        columns, rows = node("Squeeze", [columns], "mask/kv0"), node("Squeeze", [rows], "mask/seq0")
        zero, one = constant("c_zero", np.int64(0)), constant("c_one", np.int64(1))
        column = node("Range", [zero, columns, one], "mask/col")
        row = node("Range", [node("Sub", [columns, rows], "mask/first"), columns, one], "mask/row")
        row = node("Unsqueeze", [row, integers(1)], "mask/row2")
        causal = node("LessOrEqual", [column, row], "mask/causal")
        live = node("Cast", ["attention_mask"], "mask/live", to=TensorProto.BOOL)
        live = node("Unsqueeze", [live, integers(1, 2)], "mask/live4")
        allowed = node("And", [causal, live], "mask/allow")
        nothing = constant("c_f0", np.float32(0))
        self.mask = node("Where", [allowed, nothing, constant("c_fmin", np.finfo(np.float32).min)], "mask/bias")

    def _layer(self, stream: str, layer: int) -> str:
        node = self.writer.node
        prefix, tag = f"gpt_neox.layers.{layer}", f"layers.{layer}"
        attended = self._attention(stream, layer)
        if not self.config.parallel:
            stream = node("Add", [stream, attended], tag + "/res_attn")
        normed = self._layer_norm(stream, prefix + ".post_attention_layernorm", tag + "/post_layernorm")
        inner = self._linear(normed, prefix + ".mlp.dense_h_to_4h", tag + "/mlp_up")
        inner = node("Gelu", [inner], tag + "/gelu", approximate=self.config.gelu)
        change = self._linear(inner, prefix + ".mlp.dense_4h_to_h", tag + "/mlp_down")
        if self.config.parallel:
            change = node("Add", [change, attended], tag + "/res_both")
        return node("Add", [change, stream], tag + "/res")

    def _attention(self, stream: str, layer: int) -> str:
        node, integers = self.writer.node, self.writer.integers
        prefix, tag = f"gpt_neox.layers.{layer}", f"layers.{layer}"
        query, key, value = self._query_key_value(stream, prefix, tag)
        keys, values = f"present.{layer}.key", f"present.{layer}.value"
        node("Concat", [f"past_key_values.{layer}.key", key], tag + "/cat_k", keys, axis=2)
        node("Concat", [f"past_key_values.{layer}.value", value], tag + "/cat_v", values, axis=2)
        turned = node("Transpose", [keys], tag + "/kT", perm=[0, 1, 3, 2])
        scores = node("Mul", [node("MatMul", [query, turned], tag + "/qk"), self.scale], tag + "/scores")
        length = node("Shape", [keys], tag + "/own_kv", start=2, end=3)
        start = node("Neg", [length], tag + "/own_kv_neg")
        own_mask = node("Slice", [self.mask, start, integers(TO_THE_END), integers(3)], tag + "/own_mask")
        scores = node("Add", [scores, own_mask], tag + "/masked")
        weights = f"attentions.{layer}" if self.attentions else tag + "/probs"
        node("Softmax", [scores], tag + "/softmax", weights, axis=-1)
        context = node("MatMul", [weights, values], tag + "/ctx")
        context = node("Transpose", [context], tag + "/ctxT", perm=[0, 2, 1, 3])
        context = node("Reshape", [context, integers(0, 0, self.config.hidden)], tag + "/ctx3")
        return self._linear(context, prefix + ".attention.dense", tag + "/dense")

    def _query_key_value(self, stream: str, prefix: str, tag: str) -> tuple[str, str, str]:
        """Query and key rotated, each ``[batch, head, seq, head_dim]``; the weights hold them head by head."""
        node, size = self.writer.node, self.config.head_dim
        normed = self._layer_norm(stream, prefix + ".input_layernorm", tag + "/input_layernorm")
        joint = self._linear(normed, prefix + ".attention.query_key_value", tag + "/qkv")
        joint = node("Reshape", [joint, self.writer.integers(0, 0, self.config.heads, 3 * size)], tag + "/qkv4")
        joint = node("Transpose", [joint], tag + "/qkvT", perm=[0, 2, 1, 3])
        parts = (tag + "/q", tag + "/k", tag + "/v")
        query, key, value = self.writer.split(joint, (size, size, size), tag + "/qkv_split", parts)
        return self._rotated(query, tag + "/q_rope"), self._rotated(key, tag + "/k_rope"), value

    def _rotated(self, tensor: str, tag: str) -> str:
        node, split, size = self.writer.node, self.writer.split, self.config.rotary
        turning, rest = split(tensor, (size, self.config.head_dim - size), tag + "/split", (tag + "/r", tag + "/p"))
        first, second = split(turning, (size // 2, size // 2), tag + "/halves", (tag + "/a", tag + "/b"))
        turned = node("Concat", [node("Neg", [second], tag + "/neg"), first], tag + "/turned", axis=-1)
        straight = node("Mul", [turning, self.cosines], tag + "/rc")
        turned = node("Mul", [turned, self.sines], tag + "/rs")
        return node("Concat", [node("Add", [straight, turned], tag + "/rot"), rest], tag, axis=-1)

    def _linear(self, stream: str, prefix: str, tag: str) -> str:
        weight = self._weight(prefix + ".weight", prefix + ".weight.T", transposed=True)
        result = self.writer.node("MatMul", [stream, weight], tag + "/MatMul")
        if prefix + ".bias" not in self.weights:
            return result
        return self.writer.node("Add", [result, self._weight(prefix + ".bias")], tag + "/Add")

    def _layer_norm(self, stream: str, prefix: str, tag: str) -> str:
        inputs = [stream, self._weight(prefix + ".weight"), self._weight(prefix + ".bias")]
        return self.writer.node("LayerNormalization", inputs, tag, axis=-1, epsilon=self.config.epsilon)

    def _weight(self, source: str, name: str | None = None, *, transposed: bool = False) -> str:
        if source not in self.weights:
            raise KvmnnError(f"tensor {source!r} is missing")
        value = self.weights[source]
        return self.writer.weight(name or source, value.T if transposed else value)
