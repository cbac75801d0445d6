"""The ONNX graph of a decoder whose KV cache comes in and goes out.

Inputs and outputs have optimum's names: ``input_ids``, ``attention_mask``, ``position_ids``,
``past_key_values.{i}.key`` and ``.value`` ``[1, kv_head, past, head_dim]``; ``logits``, ``present.{i}.key`` and
``.value``. Added are:

* outputs ``attentions.{i}`` ``[1, query_head, token, past + token]`` and ``queries.{i}`` ``[1, query_head, token,
  head_dim]`` (rotated, not scaled), which cost nothing unless they are requested;
* inputs ``attention_bias.{i}``, float32 ``[1, 1 or query_head, 1, past + token]``, added to the scores;
* for layers with a window, inputs ``key_positions.{i}``, int64 ``[1, 1 or query_head, past + token]``: the window is
  one of true positions, whatever of the past is still there.

Layers may contain pasts of unequal length.

Activations are ``[token, feature]``, and weights lie ``[out, in]`` as in checkpoints, so that Gemm reads them without a
transposed copy and the embedding serves as output matrix as well. Matrices in int8 are read by onnxruntime's
MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..._util.packages import import_optional
from .config import DecoderConfig, LayerConfig

OPSET: Final = 18
INT8_BLOCK: Final = 32
"""Elements of a row that share a scale."""

_INT8_ACCURACY_LEVEL: Final = 4
"""Activations are rounded to int8 as well, by rows: with float32 ones onnxruntime 1.32 takes 10 to 40 times as long."""

_MASKED: Final = float(np.finfo(np.float32).min)


class GraphBuilder:
    """Nodes and constants of a graph."""

    def __init__(self) -> None:
        self._onnx = import_optional("onnx")
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._num_names = 0

    def add_node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node with one output; its name."""
        if not output:
            self._num_names += 1
            output = f"{operator}_{self._num_names}"
        self._nodes.append(self._onnx.helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def add_constant(self, values: npt.ArrayLike, dtype: type[np.generic] = np.float32) -> str:
        """A small constant; equal ones are stored once."""
        array = np.asarray(values, dtype)
        key = f"const_{array.dtype}_{'x'.join(map(str, array.shape))}_{array.tobytes().hex()[:64]}"
        if array.nbytes > 32:
            key = f"const_{len(self._constants)}"
        if key not in self._constants:
            self._constants[key] = self._onnx.numpy_helper.from_array(array, key)
        return key

    def build_model(self, inputs: list[Any], outputs: list[Any], weights: list[Any], producer_version: str) -> Any:
        """Put the graph together."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes, "decoder", inputs, outputs, initializer=[*weights, *self._constants.values()]
        )
        domains = [("", OPSET), *([("com.microsoft", 1)] if any(node.domain for node in self._nodes) else [])]
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(*domain) for domain in domains],
            producer_name="kvmnn",
            ir_version=9,
        )
        model.producer_version = producer_version
        return model


def build_decoder_graph(
    config: DecoderConfig,
    builder: GraphBuilder,
    weight_names: frozenset[str],
    int8_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Add all nodes; inputs and outputs of the graph.

    Parameters
    ----------
    config
        The decoder.
    weight_names
        Names of the weights that there are (`weights.py` lists them): biases and the output matrix may be absent.
    int8_shapes
        ``[out, in]`` of the matrices that are products with int8 weights, ``NAME.int8`` and ``NAME.scales``.
    """
    decoder = _DecoderGraph(config, builder, weight_names, int8_shapes or {})
    return decoder.build()


class _DecoderGraph:
    def __init__(
        self,
        config: DecoderConfig,
        builder: GraphBuilder,
        weight_names: frozenset[str],
        int8_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.config, self.b, self.weight_names, self.int8_shapes = config, builder, weight_names, int8_shapes
        onnx = import_optional("onnx")
        self._float, self._int64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        self._make_info = onnx.helper.make_tensor_value_info

    def build(self) -> tuple[list[Any], list[Any]]:
        config, b = self.config, self.b
        inputs = [
            self._make_info("input_ids", self._int64, [1, "tokens"]),
            self._make_info("attention_mask", self._int64, [1, "total"]),
            self._make_info("position_ids", self._int64, [1, "tokens"]),
        ]
        outputs = [self._make_info("logits", self._float, [1, "tokens", config.vocab_size])]
        ids = b.add_node("Squeeze", "input_ids", b.add_constant([0], np.int64))
        if self.int8_shapes:
            hidden = b.add_node("Cast", b.add_node("Gather", "embed_tokens.weight.fp16", ids), to=self._float)
        else:
            hidden = b.add_node("Gather", "embed_tokens.weight", ids)
        if config.embedding_scale != 1:
            hidden = b.add_node("Mul", hidden, b.add_constant(np.float32(config.embedding_scale)))
        positions = b.add_node("Cast", "position_ids", to=self._float)
        self.positions_column = b.add_node("Unsqueeze", positions, b.add_constant([2], np.int64))  # [1, token, 1]
        self.num_tokens = b.add_node("Shape", ids)
        self.rotations: dict[tuple[bytes, float], tuple[str, str]] = {}
        for index, layer in enumerate(config.layers):
            past_dims = [1, config.kv_heads, f"past_{index}", config.head_dim]
            present_dims = [1, config.kv_heads, f"total_{index}", config.head_dim]
            for part in ("key", "value"):
                inputs.append(self._make_info(f"past_key_values.{index}.{part}", self._float, past_dims))
                outputs.append(self._make_info(f"present.{index}.{part}", self._float, present_dims))
            for name, last in (("attentions", f"total_{index}"), ("queries", config.head_dim)):
                outputs.append(self._make_info(f"{name}.{index}", self._float, [1, config.num_heads, "tokens", last]))
            inputs.append(
                self._make_info(f"attention_bias.{index}", self._float, [1, f"bias_heads_{index}", 1, f"total_{index}"])
            )
            if layer.window:
                inputs.append(
                    self._make_info(f"key_positions.{index}", self._int64, [1, f"heads_{index}", f"total_{index}"])
                )
            hidden = self._add_block(index, layer, hidden)
        hidden = self._add_norm(hidden, "norm.weight")
        output_matrix = "lm_head.weight" if "lm_head.weight" in self.weight_names else "embed_tokens.weight"
        logits = self._add_linear(hidden, output_matrix)
        if config.logit_divisor != 1:
            logits = b.add_node("Div", logits, b.add_constant(np.float32(config.logit_divisor)))
        b.add_node("Unsqueeze", logits, b.add_constant([0], np.int64), output="logits")
        return inputs, outputs

    def _add_linear(self, values: str, weight: str) -> str:
        bias = weight.removesuffix("weight") + "bias"
        if weight in self.int8_shapes:
            num_rows, num_columns = self.int8_shapes[weight]
            product = self.b.add_node(
                "MatMulNBits", values, f"{weight}.int8", f"{weight}.scales", domain="com.microsoft",
                N=num_rows, K=num_columns, bits=8, block_size=INT8_BLOCK, accuracy_level=_INT8_ACCURACY_LEVEL,
            )  # fmt: skip
            return self.b.add_node("Add", product, bias) if bias in self.weight_names else product
        terms = (values, weight, bias) if bias in self.weight_names else (values, weight)
        return self.b.add_node("Gemm", *terms, transB=1)

    def _add_norm(self, values: str, weight: str) -> str:
        b = self.b
        square = b.add_node("Mul", values, values)
        mean = b.add_node("ReduceMean", square, b.add_constant([-1], np.int64), keepdims=1)
        root = b.add_node("Sqrt", b.add_node("Add", mean, b.add_constant(np.float32(self.config.norm_epsilon))))
        return b.add_node("Mul", b.add_node("Div", values, root), weight)

    def _add_block(self, index: int, layer: LayerConfig, hidden: str) -> str:
        features, prefix = self.config.features, f"layers.{index}"
        attended = self._add_attention(index, layer, self._add_norm(hidden, f"{prefix}.input_norm.weight"))
        if features.has_post_norms:
            attended = self._add_norm(attended, f"{prefix}.post_attention_norm.weight")
        hidden = self._add_residual(hidden, attended)
        values = self._add_norm(hidden, f"{prefix}.mlp_norm.weight")
        gate = self._add_linear(values, f"{prefix}.mlp.gate.weight")
        activated = self._add_activation(gate)
        product = self.b.add_node("Mul", activated, self._add_linear(values, f"{prefix}.mlp.up.weight"))
        values = self._add_linear(product, f"{prefix}.mlp.down.weight")
        if features.has_post_norms:
            values = self._add_norm(values, f"{prefix}.post_mlp_norm.weight")
        return self._add_residual(hidden, values)

    def _add_residual(self, hidden: str, values: str) -> str:
        if self.config.residual_scale != 1:
            values = self.b.add_node("Mul", values, self.b.add_constant(np.float32(self.config.residual_scale)))
        return self.b.add_node("Add", hidden, values)

    def _add_activation(self, gate: str) -> str:
        b = self.b
        if self.config.features.activation == "silu":
            return b.add_node("Mul", gate, b.add_node("Sigmoid", gate))
        cube = b.add_node("Mul", b.add_node("Mul", gate, gate), gate)
        inner = b.add_node("Add", gate, b.add_node("Mul", cube, b.add_constant(np.float32(0.044715))))
        tanh = b.add_node("Tanh", b.add_node("Mul", inner, b.add_constant(np.float32(np.sqrt(2 / np.pi)))))
        half = b.add_node("Mul", gate, b.add_constant(np.float32(0.5)))
        return b.add_node("Mul", half, b.add_node("Add", tanh, b.add_constant(np.float32(1))))

    def _add_attention(self, index: int, layer: LayerConfig, values: str) -> str:
        config, b, prefix = self.config, self.b, f"layers.{index}.attention"
        group = config.num_heads // config.kv_heads
        query = self._split_heads(self._add_linear(values, f"{prefix}.q.weight"), config.num_heads)
        key = self._split_heads(self._add_linear(values, f"{prefix}.k.weight"), config.kv_heads)
        value = self._split_heads(self._add_linear(values, f"{prefix}.v.weight"), config.kv_heads)
        if config.features.has_qk_norm:
            query = self._add_norm(query, f"{prefix}.q_norm.weight")
            key = self._add_norm(key, f"{prefix}.k_norm.weight")
        query, key = self._rotate(query, layer, output=f"queries.{index}"), self._rotate(key, layer)
        keys = b.add_node("Concat", f"past_key_values.{index}.key", key, axis=2, output=f"present.{index}.key")
        present = f"present.{index}.value"
        values_all = b.add_node("Concat", f"past_key_values.{index}.value", value, axis=2, output=present)
        # Heads of a group are rows of one product: K and V are not repeated.
        query = b.add_node("Mul", query, b.add_constant(np.float32(config.attention_scale)))
        grouped = b.add_constant([1, config.kv_heads, -1, config.head_dim], np.int64)
        query = b.add_node("Reshape", query, grouped)
        scores = b.add_node("MatMul", query, b.add_node("Transpose", keys, perm=[0, 1, 3, 2]))
        total = b.add_node("Shape", keys, start=2, end=3)
        by_head = b.add_node("Concat", b.add_constant([1, config.num_heads], np.int64), self.num_tokens, total, axis=0)
        scores = b.add_node("Reshape", scores, by_head)
        scores = b.add_node(
            "Where", self._add_visibility(index, layer, total), scores, b.add_constant(np.float32(_MASKED))
        )
        scores = b.add_node("Add", scores, f"attention_bias.{index}")
        probabilities = b.add_node("Softmax", scores, axis=-1, output=f"attentions.{index}")
        by_group = b.add_node(
            "Concat",
            b.add_constant([1, config.kv_heads], np.int64),
            b.add_node("Mul", self.num_tokens, b.add_constant([group], np.int64)),
            total,
            axis=0,
        )
        context = b.add_node("MatMul", b.add_node("Reshape", probabilities, by_group), values_all)
        context = b.add_node("Reshape", context, b.add_constant([config.num_heads, -1, config.head_dim], np.int64))
        context = b.add_node("Transpose", context, perm=[1, 0, 2])
        context = b.add_node("Reshape", context, b.add_constant([-1, config.num_heads * config.head_dim], np.int64))
        return self._add_linear(context, f"{prefix}.o.weight")

    def _split_heads(self, values: str, heads: int) -> str:
        """``[token, head * dim]`` as ``[1, head, token, dim]``."""
        shape = self.b.add_constant([1, -1, heads, self.config.head_dim], np.int64)
        return self.b.add_node("Transpose", self.b.add_node("Reshape", values, shape), perm=[0, 2, 1, 3])

    def _rotate(self, values: str, layer: LayerConfig, output: str = "") -> str:
        b, pairs = self.b, len(layer.frequencies)
        cos, sin = self._add_angles(layer)
        bounds = [b.add_constant([edge], np.int64) for edge in (0, pairs, 2 * pairs, self.config.head_dim)]
        axis = b.add_constant([3], np.int64)
        first = b.add_node("Slice", values, bounds[0], bounds[1], axis)
        second = b.add_node("Slice", values, bounds[1], bounds[2], axis)
        parts = [
            b.add_node("Sub", b.add_node("Mul", first, cos), b.add_node("Mul", second, sin)),
            b.add_node("Add", b.add_node("Mul", second, cos), b.add_node("Mul", first, sin)),
        ]
        if 2 * pairs < self.config.head_dim:
            parts.append(b.add_node("Slice", values, bounds[2], bounds[3], axis))
        return b.add_node("Concat", *parts, axis=3, output=output)

    def _add_angles(self, layer: LayerConfig) -> tuple[str, str]:
        """Cosines and sines ``[1, token, pair]``, which broadcast over heads; of layers that are rotated alike once."""
        key = layer.frequencies.tobytes(), layer.rope_scale
        if key not in self.rotations:
            b = self.b
            angles = b.add_node("Mul", self.positions_column, b.add_constant(layer.frequencies))
            parts = [b.add_node(operator, angles) for operator in ("Cos", "Sin")]
            if layer.rope_scale != 1:
                parts = [b.add_node("Mul", part, b.add_constant(np.float32(layer.rope_scale))) for part in parts]
            self.rotations[key] = parts[0], parts[1]
        return self.rotations[key]

    def _add_visibility(self, index: int, layer: LayerConfig, total: str) -> str:
        """Which keys a token sees, bool ``[1, 1 or head, token, total]``: the past, and new ones up to itself."""
        b, column_axis = self.b, self.b.add_constant([1], np.int64)
        num_past = b.add_node("Sub", total, self.num_tokens)
        zero, step = b.add_constant(0, np.int64), b.add_constant(1, np.int64)
        slots = b.add_node("Range", zero, b.add_node("Squeeze", total), step)
        new = b.add_node("Range", zero, b.add_node("Squeeze", self.num_tokens), step)
        last = b.add_node("Unsqueeze", b.add_node("Add", new, num_past), column_axis)
        visible = b.add_node("LessOrEqual", slots, last)
        if not layer.window:
            return visible
        distance = b.add_node(
            "Sub",
            b.add_node("Unsqueeze", "position_ids", b.add_constant([1, 3], np.int64)),
            b.add_node("Unsqueeze", f"key_positions.{index}", b.add_constant([2], np.int64)),
        )
        inside = b.add_node("Less", distance, b.add_constant(layer.window, np.int64))
        return b.add_node("And", visible, inside)
