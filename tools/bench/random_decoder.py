"""A decoder of a real small LLM's geometry with random weights: `python tools/bench/random_decoder.py OUT.onnx`.

That of Qwen2-0.5B: 24 layers, 14 query and 2 KV heads of 64, hidden size 896, a gated MLP of 4864, biases on Q, K and
V, rotary positions; only its vocabulary is cut to 256. All float32; the weights (1.4 GB) lie next to the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, MOST_TOKENS = 24, 14, 2, 64, 4864, 256, 4096
HIDDEN = HEADS * HEAD_DIM
MICROSOFT = "com.microsoft"


class Writer:
    """Nodes of the graph, and weights written to a file of their own as they come."""

    def __init__(self, path: Path) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self._path = path.with_suffix(".data")
        self._file = self._path.open("wb")
        self._rng = np.random.default_rng(1)

    def op(self, kind: str, inputs: list[str], output: str, domain: str = "", **settings: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **settings))
        return output

    def array(self, name: str, values: npt.NDArray[np.float32]) -> str:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=values.shape, data_location=1)
        place = {"location": self._path.name, "offset": self._file.tell(), "length": values.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(np.ascontiguousarray(values))
        self.stored.append(tensor)
        return name

    def random(self, name: str, *shape: int, scale: float) -> str:
        return self.array(name, self._rng.standard_normal(shape, np.float32) * np.float32(scale))

    def integers(self, name: str, values: npt.ArrayLike) -> str:
        self.stored.append(onnx.numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def close(self) -> None:
        self._file.close()


def save(path: Path) -> Path:
    """Write the decoder."""
    writer = Writer(path)
    op, random = writer.op, writer.random
    writer.integers("axis", [1])
    writer.integers("one", [1])
    ones = writer.array("norm", np.ones(HIDDEN, np.float32))
    angles = np.outer(np.arange(MOST_TOKENS), 1e6 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    turns = [writer.array("cos", np.cos(angles).astype("f4")), writer.array("sin", np.sin(angles).astype("f4"))]
    kinds = {"to": TensorProto.INT32}
    total = op(
        "Cast", [op("Squeeze", [op("Shape", ["attention_mask"], "length", start=1), "axis0"], "t0")], "t", **kinds
    )
    counted = op("Sub", [op("ReduceSum", ["attention_mask", "axis"], "count", keepdims=0), "one"], "last0")
    writer.integers("axis0", [0])
    last = op("Cast", [counted], "last", to=TensorProto.INT32)
    x = op("Gather", [random("embed", VOCAB, HIDDEN, scale=1.0), "input_ids"], "x")
    for layer in range(LAYERS):
        tag = f"{layer}."

        def linear(source: str, name: str, rows: int, columns: int, tag: str = tag) -> str:
            return op("MatMul", [source, random(f"{tag}{name}.w", rows, columns, scale=rows**-0.5)], f"{tag}{name}")

        normed = op("SimplifiedLayerNormalization", [x, ones], tag + "n1", axis=-1, epsilon=1e-6)
        parts = []
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            width = heads * HEAD_DIM
            bias = random(f"{tag}{name}.b", width, scale=1.0)
            parts.append(op("Add", [linear(normed, name, HIDDEN, width), bias], f"{tag}{name}+"))
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        writer.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*parts, *past, last, total, *turns, "position_ids"],
                [tag + "mixed", *(name.replace("past_key_values", "present") for name in past)],
                name=tag + "attention",
                domain=MICROSOFT,
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=1,
            )
        )
        x = op("Add", [x, linear(tag + "mixed", "o", HIDDEN, HIDDEN)], tag + "x1")
        normed = op("SimplifiedLayerNormalization", [x, ones], tag + "n2", axis=-1, epsilon=1e-6)
        gate = linear(normed, "gate", HIDDEN, INNER)
        gate = op("Mul", [gate, op("Sigmoid", [gate], tag + "s")], tag + "silu")
        inner = op("Mul", [gate, linear(normed, "up", HIDDEN, INNER)], tag + "inner")
        x = op("Add", [x, linear(inner, "down", INNER, HIDDEN)], tag + "x2")
    normed = op("SimplifiedLayerNormalization", [x, ones], "n", axis=-1, epsilon=1e-6)
    op("MatMul", [normed, random("head", HIDDEN, VOCAB, scale=HIDDEN**-0.5)], "logits")
    writer.close()
    graph = helper.make_graph(writer.nodes, "random_decoder", _inputs(), _outputs(), writer.stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return path


def _inputs() -> list[onnx.ValueInfoProto]:
    value, whole = helper.make_tensor_value_info, TensorProto.INT64
    tokens = [value("input_ids", whole, ["batch", "seq"]), value("attention_mask", whole, ["batch", "kv"])]
    tokens.append(value("position_ids", whole, ["batch", "seq"]))
    return [*tokens, *_caches("past_key_values", "past")]


def _outputs() -> list[onnx.ValueInfoProto]:
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", VOCAB])
    return [logits, *_caches("present", "kv")]


def _caches(prefix: str, length: str) -> list[onnx.ValueInfoProto]:
    shape = ["batch", KV_HEADS, length, HEAD_DIM]
    names = [f"{prefix}.{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUT.onnx", help="the file to write; its weights go to OUT.data")
    print(save(parser.parse_args().output))
