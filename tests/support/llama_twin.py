"""One small Llama with random weights, twice: as ``.gguf`` for llama.cpp, and as the ONNX folder that kvmnn runs.

In the ``.gguf`` rows of query and key weights are permuted as llama.cpp's converter permutes those of Llama models; the
ONNX graph has them as transformers has. The shipped GPT-NeoX becomes a ``.gguf``, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_writer import GraphWriter
from onnx import TensorProto, helper

EPSILON, BASE = 1e-5, 10000.0


@dataclass(frozen=True)
class Llama:
    """Sizes; grouped queries where there are fewer kv heads than heads."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dims: int = 64
    width: int = 64
    words: int = 256
    seed: int = 1
    scale: float = 0.15

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """By llama.cpp's names, ``[out, in]`` float32, in the order of transformers."""
        rng = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * self.scale).astype(np.float32)

        found = {"token_embd.weight": matrix(self.words, self.width) / np.float32(self.scale)}
        for layer in range(self.layers):
            shapes = {
                "attn_q": (self.heads * self.dims, self.width),
                "attn_k": (self.kv_heads * self.dims, self.width),
                "attn_v": (self.kv_heads * self.dims, self.width),
                "attn_output": (self.width, self.heads * self.dims),
                **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (self.width, self.width)),
            }
            for name in ("attn_norm", "ffn_norm"):
                found[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, self.width).astype(np.float32)
            found |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found["output_norm.weight"] = np.ones(self.width, np.float32)
        return found

    def gguf(self, path: Path) -> Path:
        writer = pytest.importorskip("gguf").GGUFWriter(str(path), "llama")
        writer.add_context_length(512)
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.width)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.dims)
        writer.add_value_length(self.dims)
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_vocab_size(self.words)
        writer.add_tokenizer_model("none")
        writer.add_rope_dimension_count(self.dims)
        writer.add_rope_freq_base(BASE)
        for name, value in self.weights.items():
            writer.add_tensor(
                name, self._permuted(value) if name.endswith(("attn_q.weight", "attn_k.weight")) else value
            )
        return _written(writer, path)

    def _permuted(self, rows: np.ndarray) -> np.ndarray:
        """Of each head rows i and i + half lie side by side (`permute` of llama.cpp's convert_hf_to_gguf.py)."""
        halves = rows.reshape(-1, 2, self.dims // 2, rows.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)

    def onnx(self, folder: Path) -> Path:
        """A folder with ``model.onnx`` and a tokenizer of the words w0, w1 ..."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(_Graph(self).model(), str(folder / "model.onnx"))
        tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(self.words)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder


def text_of(ids: list[int]) -> str:
    """A text of which that tokenizer makes these ids."""
    return " ".join(f"w{token}" for token in ids)


class _Graph:
    """Names of inputs and outputs as optimum has them; each layer takes the last columns of the mask that it needs."""

    def __init__(self, llama: Llama) -> None:
        self.llama, self.writer = llama, GraphWriter()

    def model(self) -> onnx.ModelProto:
        llama, node, constant = self.llama, self.writer.node, self.writer.constant
        inverse = (BASE ** -(np.arange(0, llama.dims, 2) / llama.dims)).astype(np.float32)
        positions = node("Cast", ["position_ids"], "pos", to=TensorProto.FLOAT)
        positions = node("Unsqueeze", [positions, self.writer.integers(1, 3)], "pos4")
        angles = node("Mul", [positions, constant("inverse", inverse)], "angles")
        angles = node("Concat", [angles, angles], "angles2", axis=-1)
        self.cosines, self.sines = node("Cos", [angles], "cos"), node("Sin", [angles], "sin")
        self._mask()
        x = node("Gather", [self._weight("token_embd", turned=False), "input_ids"], "embedded")
        for layer in range(llama.layers):
            x = self._layer(x, layer)
        x = self._norm(x, "output_norm")
        node("MatMul", [x, constant("head", self.llama.weights["token_embd.weight"].T)], "logits_node", "logits")
        return helper.make_model(self._graph(), opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def _graph(self) -> onnx.GraphProto:
        llama, value = self.llama, helper.make_tensor_value_info
        kinds = [(layer, kind) for layer in range(llama.layers) for kind in ("key", "value")]
        ints = {"input_ids": "seq", "attention_mask": "kv", "position_ids": "seq"}
        inputs = [value(name, TensorProto.INT64, ["batch", axis]) for name, axis in ints.items()]
        outputs = [value("logits", TensorProto.FLOAT, ["batch", "seq", llama.words])]
        for layer, kind in kinds:
            shapes = (["batch", llama.kv_heads, f"{axis}_{layer}", llama.dims] for axis in ("past", "total"))
            past, total = (list(shape) for shape in shapes)
            inputs.append(value(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, past))
            outputs.append(value(f"present.{layer}.{kind}", TensorProto.FLOAT, total))
        return helper.make_graph(self.writer.nodes, "llama_twin", inputs, outputs, self.writer.initializers)

    def _mask(self) -> None:
        node, constant = self.writer.node, self.writer.constant
        columns = node("Squeeze", [node("Shape", ["attention_mask"], "kv", start=1, end=2)], "kv0")
        rows = node("Squeeze", [node("Shape", ["input_ids"], "seq", start=1, end=2)], "seq0")
        zero, one = constant("zero", np.int64(0)), constant("one", np.int64(1))
        column = node("Range", [zero, columns, one], "column")
        row = node("Range", [node("Sub", [columns, rows], "first"), columns, one], "row")
        seen = node("LessOrEqual", [column, node("Unsqueeze", [row, self.writer.integers(1)], "row2")], "seen")
        lowest = constant("lowest", np.finfo(np.float32).min)
        self.mask = node("Where", [seen, constant("nothing", np.float32(0)), lowest], "mask")

    def _weight(self, name: str, *, turned: bool = True) -> str:
        value = self.llama.weights[f"{name}.weight"]
        return self.writer.constant(name + ".T" * turned, value.T if turned else value)

    def _norm(self, x: str, name: str) -> str:
        node, constant = self.writer.node, self.writer.constant
        squares = node("Mul", [x, x], f"{name}/squares")
        mean = node("ReduceMean", [squares, self.writer.integers(-1)], f"{name}/mean", keepdims=1)
        root = node(
            "Sqrt", [node("Add", [mean, constant("epsilon", np.float32(EPSILON))], f"{name}/sum")], f"{name}/root"
        )
        scaled = node("Div", [x, root], f"{name}/scaled")
        return node("Mul", [scaled, self._weight(name, turned=False)], f"{name}/out")

    def _heads(self, x: str, name: str, layer: int, heads: int) -> str:
        tag, node = f"{layer}/{name}", self.writer.node
        made = node("MatMul", [x, self._weight(f"blk.{layer}.{name}")], tag)
        made = node("Reshape", [made, self.writer.integers(0, 0, heads, self.llama.dims)], f"{tag}/4")
        return node("Transpose", [made], f"{tag}/heads", perm=[0, 2, 1, 3])

    def _rotated(self, x: str, tag: str) -> str:
        node, half = self.writer.node, self.llama.dims // 2
        first, second = self.writer.split(x, (half, half), f"{tag}/halves", (f"{tag}/a", f"{tag}/b"))
        turned = node("Concat", [node("Neg", [second], f"{tag}/neg"), first], f"{tag}/turned", axis=-1)
        straight = node("Mul", [x, self.cosines], f"{tag}/straight")
        return node("Add", [straight, node("Mul", [turned, self.sines], f"{tag}/across")], f"{tag}/rope")

    def _repeated(self, x: str, tag: str) -> str:
        """Each kv head for the heads that share it."""
        llama, node, integers = self.llama, self.writer.node, self.writer.integers
        groups = llama.heads // llama.kv_heads
        length = node("Shape", [x], f"{tag}/length", start=2, end=3)
        shape = [integers(1, llama.kv_heads, groups), length, integers(llama.dims)]
        wide = node("Unsqueeze", [x, integers(2)], f"{tag}/wide")
        wide = node("Expand", [wide, node("Concat", shape, f"{tag}/shape", axis=0)], f"{tag}/expanded")
        return node("Reshape", [wide, integers(1, llama.heads, -1, llama.dims)], f"{tag}/repeated")

    def _layer(self, x: str, layer: int) -> str:
        llama, node, integers = self.llama, self.writer.node, self.writer.integers
        normed = self._norm(x, f"blk.{layer}.attn_norm")
        query = self._rotated(self._heads(normed, "attn_q", layer, llama.heads), f"{layer}/q")
        key = self._rotated(self._heads(normed, "attn_k", layer, llama.kv_heads), f"{layer}/k")
        value = self._heads(normed, "attn_v", layer, llama.kv_heads)
        keys, values = (f"present.{layer}.{kind}" for kind in ("key", "value"))
        node("Concat", [f"past_key_values.{layer}.key", key], f"{layer}/keys", keys, axis=2)
        node("Concat", [f"past_key_values.{layer}.value", value], f"{layer}/values", values, axis=2)
        across = node("Transpose", [self._repeated(keys, f"{layer}/rk")], f"{layer}/kT", perm=[0, 1, 3, 2])
        scores = node("MatMul", [query, across], f"{layer}/qk")
        scores = node("Mul", [scores, self.writer.constant("scale", np.float32(llama.dims**-0.5))], f"{layer}/scores")
        own = node("Neg", [node("Shape", [keys], f"{layer}/held", start=2, end=3)], f"{layer}/begin")
        own = node("Slice", [self.mask, own, integers(2**31 - 1), integers(-1)], f"{layer}/mask")
        shares = node("Softmax", [node("Add", [scores, own], f"{layer}/masked")], f"{layer}/softmax", axis=-1)
        mixed = node("MatMul", [shares, self._repeated(values, f"{layer}/rv")], f"{layer}/mixed")
        mixed = node("Transpose", [mixed], f"{layer}/mixedT", perm=[0, 2, 1, 3])
        mixed = node("Reshape", [mixed, integers(0, 0, llama.heads * llama.dims)], f"{layer}/mixed3")
        x = node(
            "Add", [x, node("MatMul", [mixed, self._weight(f"blk.{layer}.attn_output")], f"{layer}/o")], f"{layer}/x"
        )
        normed = self._norm(x, f"blk.{layer}.ffn_norm")
        gate = node("MatMul", [normed, self._weight(f"blk.{layer}.ffn_gate")], f"{layer}/gate")
        gate = node("Mul", [gate, node("Sigmoid", [gate], f"{layer}/sigmoid")], f"{layer}/silu")
        up = node("MatMul", [normed, self._weight(f"blk.{layer}.ffn_up")], f"{layer}/up")
        inner = node("Mul", [gate, up], f"{layer}/inner")
        return node(
            "Add", [x, node("MatMul", [inner, self._weight(f"blk.{layer}.ffn_down")], f"{layer}/down")], f"{layer}/out"
        )


def neox_gguf(folder: Path, path: Path) -> Path:
    """The GPT-NeoX of an exported folder (`tools/lm/export_onnx.py`), as llama.cpp's converter names and orders it."""
    from export_onnx import read_config
    from gpt_neox import NeoxConfig
    from unexport import weights_of

    config = NeoxConfig.of(read_config(folder / "config.json"))
    weights = {name: value.astype(np.float32) for name, value in weights_of(folder / "model.onnx", config).items()}
    width, heads, dims = config.hidden, config.heads, config.head_dim
    writer = pytest.importorskip("gguf").GGUFWriter(str(path), "gptneox")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(weights["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"].shape[0])
    writer.add_head_count(heads)
    writer.add_rope_dimension_count(config.rotary)
    writer.add_rope_freq_base(config.rotary_base)
    writer.add_parallel_residual(config.parallel)
    writer.add_layer_norm_eps(config.epsilon)
    writer.add_vocab_size(config.vocabulary)
    writer.add_tokenizer_model("none")
    writer.add_tensor("token_embd.weight", weights["gpt_neox.embed_in.weight"])
    writer.add_tensor("output.weight", weights["embed_out.weight"])
    for part in ("weight", "bias"):
        writer.add_tensor(f"output_norm.{part}", weights[f"gpt_neox.final_layer_norm.{part}"])
    names = {
        "input_layernorm": "attn_norm",
        "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    }
    for layer in range(config.layers):
        prefix = f"gpt_neox.layers.{layer}."
        for theirs, ours in names.items():
            for part in ("weight", "bias"):
                writer.add_tensor(f"blk.{layer}.{ours}.{part}", weights[f"{prefix}{theirs}.{part}"])
        for part in ("weight", "bias"):  # head by head in transformers; all queries, all keys, all values here
            joint = weights[f"{prefix}attention.query_key_value.{part}"]
            apart = joint.reshape(heads, 3, dims, -1).swapaxes(0, 1)
            writer.add_tensor(f"blk.{layer}.attn_qkv.{part}", np.ascontiguousarray(apart).reshape(joint.shape))
    return _written(writer, path)


def _written(writer: object, path: Path) -> Path:
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path
