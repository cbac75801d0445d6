"""Small generated decoders in the forms that exporters write, and the same decoder in numpy.

Two layers by default, random weights, learned positions, no normalisation; every form computes the same function, so
one reference serves all. A router with a Softmax of its own stands after each layer, because a Softmax is not always
attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SHAPES = {"cache_position": ["seq"], "position_ids": ["batch", "seq"]}


@dataclass(frozen=True)
class Tiny:
    """What a decoder is like.

    form: ``written`` (Softmax between two MatMuls), ``rank3`` (the same on ``[heads, query, key]``), ``standard``
    (Attention, opset 23, with a bool mask), ``standard-past`` (Attention that holds the past itself), ``gqa``, ``mha``
    and ``closed`` (operators of onnxruntime). mask: ``own`` (the last columns, for each layer), ``first`` (optimum's:
    one mask by the length of layer 0, cut to the first columns), ``whole`` (torch's: that mask as it is). rotary: of
    ``gqa``, ``counted`` (by the operator) or ``given`` (by position_ids); not in the reference.
    """

    form: str = "written"
    mask: str = "own"
    layers: int = 2
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 8
    vocab: int = 48
    half: bool = False
    softmax32: bool = False
    positions: bool = True
    merged: bool = False
    rotary: str = ""
    attentions: bool = False
    queries: bool = False
    sinks: bool = False
    past: str = "past_key_values.{i}.{kind}"
    present: str = "present.{i}.{kind}"
    extra: tuple[str, ...] = ()
    opset: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def dtype(self) -> type[np.generic]:
        return np.float16 if self.half else np.float32

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        width, narrow = self.width, self.kv_heads * self.head_dim

        def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * scale).astype(self.dtype)

        found = {"embed": matrix(self.vocab, width, 1.0), "place": matrix(256, width, 0.5)}
        for i in range(self.layers):
            found |= {
                f"{i}.q": matrix(width, width, 2 * width**-0.5),
                f"{i}.k": matrix(width, narrow, width**-0.5),
                f"{i}.v": matrix(width, narrow, width**-0.5),
                f"{i}.o": matrix(width, width, width**-0.5),
                f"{i}.route": matrix(width, 3, width**-0.5),
                f"{i}.experts": matrix(3, width, 0.5),
            }
        found["head"] = matrix(width, self.vocab, width**-0.5)
        return found

    def model(self) -> onnx.ModelProto:
        return _Builder(self).build()

    def save(self, path: Path, **external: object) -> Path:
        model = self.model()
        if external:
            onnx.save(model, str(path), save_as_external_data=True, size_threshold=256, **external)
        else:
            onnx.save(model, str(path))
        return path


@dataclass
class Numpy:
    """The decoder `tiny` in numpy, float64: one call is one step on layers of any lengths."""

    tiny: Tiny
    attentions: list[np.ndarray] = field(default_factory=list)

    def empty(self) -> list[tuple[np.ndarray, np.ndarray]]:
        shape = (1, self.tiny.kv_heads, 0, self.tiny.head_dim)
        return [(np.zeros(shape), np.zeros(shape)) for _ in range(self.tiny.layers)]

    def step(self, ids: np.ndarray, positions: np.ndarray, past: list[tuple[np.ndarray, np.ndarray]]):
        tiny, w = self.tiny, {name: array.astype(np.float64) for name, array in self.tiny.weights.items()}
        x = w["embed"][ids] + (w["place"][positions] if tiny.positions else 0)
        present, self.attentions = [], []
        for i, (keys, values) in enumerate(past):
            q, k, v = (self._split(x @ w[f"{i}.{name}"]) for name in "qkv")
            keys, values = np.concatenate([keys[0], k], 1), np.concatenate([values[0], v], 1)
            scores = q @ np.repeat(keys, tiny.groups, 0).transpose(0, 2, 1) * tiny.head_dim**-0.5
            held, tokens = keys.shape[1] - len(ids), len(ids)
            scores[:, np.triu(np.ones((tokens, held + tokens), bool), held + 1)] = -np.inf
            p = softmax(np.concatenate([scores, np.ones((*scores.shape[:2], 1))], -1) if tiny.sinks else scores)
            p = p[..., : held + tokens]
            self.attentions.append(p)
            mixed = (p @ np.repeat(values, tiny.groups, 0)).transpose(1, 0, 2).reshape(len(ids), -1)
            x = x + mixed @ w[f"{i}.o"]
            x = x + softmax(x @ w[f"{i}.route"]) @ w[f"{i}.experts"]
            present.append((keys[None], values[None]))
        return x @ w["head"], present

    def _split(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, self.tiny.head_dim).transpose(1, 0, 2)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


class _Builder:
    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.kind = TensorProto.FLOAT16 if tiny.half else TensorProto.FLOAT
        self.stored: dict[str, onnx.TensorProto] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.prefix = ""
        self.has_past = True

    def build(self) -> onnx.ModelProto:
        tiny = self.tiny
        for name, array in tiny.weights.items():
            self.stored[name] = numpy_helper.from_array(array, name)
        if tiny.merged:
            self._merge()
        else:
            self._body()
        value = helper.make_tensor_value_info
        ints = TensorProto.INT64
        inputs = [value("input_ids", ints, ["batch", "seq"]), value("attention_mask", ints, ["batch", "kv"])]
        if tiny.positions:
            inputs.append(value("position_ids", ints, ["batch", "seq"]))
        inputs += [value(name, ints, _SHAPES.get(name, [1])) for name in tiny.extra]
        cache = ["batch", tiny.kv_heads, "past", tiny.head_dim]
        kinds = [(i, kind) for i in range(tiny.layers) for kind in ("key", "value")]
        inputs += [value(tiny.past.format(i=i, kind=kind), self.kind, cache) for i, kind in kinds]
        if tiny.merged:
            inputs.append(value("use_cache_branch", TensorProto.BOOL, [1]))
        graph = helper.make_graph(self.nodes, "tiny", inputs, self._outputs(), list(self.stored.values()))
        opset = tiny.opset or (23 if tiny.form.startswith("standard") else 18)
        domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=11 if opset >= 23 else 9)

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        tiny, value = self.tiny, helper.make_tensor_value_info
        found = [value("logits", self.kind, ["batch", "seq", tiny.vocab])]
        for i in range(tiny.layers):
            for kind in ("key", "value"):
                shape = ["batch", tiny.kv_heads, "total", tiny.head_dim]
                found.append(value(tiny.present.format(i=i, kind=kind), self.kind, shape))
        if tiny.attentions:
            found += [value(f"attentions.{i}", self.kind, None) for i in range(tiny.layers)]
        if tiny.queries:
            found += [value(f"queries.{i}", self.kind, None) for i in range(tiny.layers)]
        return found

    def _merge(self) -> None:
        branches = []
        names = [value.name for value in self._outputs()]
        for past in (True, False):
            self.nodes, self.prefix, self.has_past = [], "past/" if past else "prompt/", past
            self._body()
            outputs = [helper.make_tensor_value_info(self.prefix + name, self.kind, None) for name in names]
            branches.append(helper.make_graph(self.nodes, self.prefix, [], outputs))
        self.nodes = [
            helper.make_node(
                "If", ["use_cache_branch"], names, name="choice", then_branch=branches[0], else_branch=branches[1]
            )
        ]

    def op(self, kind: str, inputs: list[str], outputs: list[str] | None = None, domain: str = "", **settings) -> str:
        outputs = outputs or [f"{self.prefix}{kind}_{len(self.nodes)}"]
        node = helper.make_node(kind, inputs, outputs, name=outputs[0] + "/node", domain=domain, **settings)
        self.nodes.append(node)
        return outputs[0]

    def const(self, value: np.ndarray) -> str:
        name = f"const_{value.dtype}_{'x'.join(map(str, value.shape))}_{value.tobytes().hex()}"
        self.stored.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def real(self, value: float, kind: type[np.generic] | None = None) -> str:
        return self.const(np.array(value, kind or self.tiny.dtype))

    def axis(self, name: str, axis: int) -> str:
        return self.op("Shape", [name], start=axis, end=axis + 1)

    def matmul(self, x: str, weight: str) -> str:
        return self.op("MatMul", [x, weight])

    def _body(self) -> None:
        tiny = self.tiny
        x = self.op("Gather", ["embed", "input_ids"])
        if tiny.positions:
            x = self.op("Add", [x, self.op("Gather", ["place", "position_ids"])])
        self.causal = self._causal()
        for i in range(tiny.layers):
            x = self.op("Add", [x, self.matmul(self._attention(x, i), f"{i}.o")])
            routes = self.op("Softmax", [self.matmul(x, f"{i}.route")], axis=-1)
            x = self.op("Add", [x, self.matmul(routes, f"{i}.experts")])
        self.op("MatMul", [x, "head"], [self.prefix + "logits"])

    def _causal(self) -> str:
        """Which column each query sees, bool ``[seq, total]``; ``own`` right-aligned by the mask, else by layer 0."""
        seq = self.axis("input_ids", 1)
        if self.tiny.mask == "own" or not self.has_past:
            total = self.axis("attention_mask", 1)
        else:
            total = self.op("Add", [self.axis(self.tiny.past.format(i=0, kind="key"), 2), seq])
        zero, one = self.const(np.array(0, np.int64)), self.const(np.array(1, np.int64))
        total, first = self.op("Squeeze", [total]), self.op("Squeeze", [self.op("Sub", [total, seq])])
        columns = self.op("Range", [zero, total, one])
        rows = self.op("Unsqueeze", [self.op("Range", [first, total, one]), self.ints(1)])
        return self.op("LessOrEqual", [columns, rows])

    def _mask(self, keys: str) -> str:
        if self.tiny.mask == "whole":
            return self.causal
        length = self.axis(keys, 2)
        if self.tiny.mask == "first":
            return self.op("Slice", [self.causal, self.ints(0), length, self.ints(1)])
        return self.op("Slice", [self.causal, self.op("Neg", [length]), self.ints(2**31), self.ints(1)])

    def _heads(self, x: str, heads: int) -> str:
        x = self.op("Reshape", [x, self.ints(0, 0, heads, self.tiny.head_dim)])
        return self.op("Transpose", [x], perm=[0, 2, 1, 3])

    def _attention(self, x: str, i: int) -> str:
        tiny = self.tiny
        q, k, v = (self.matmul(x, f"{i}.{name}") for name in "qkv")
        if tiny.queries:
            self.op("Identity", [self._heads(q, tiny.heads)], [f"{self.prefix}queries.{i}"])
        past = [tiny.past.format(i=i, kind=kind) for kind in ("key", "value")]
        present = [self.prefix + tiny.present.format(i=i, kind=kind) for kind in ("key", "value")]
        if tiny.form in ("gqa", "mha", "closed"):
            return self._fused(q, k, v, past, present, i)
        q, k, v = self._heads(q, tiny.heads), self._heads(k, tiny.kv_heads), self._heads(v, tiny.kv_heads)
        if tiny.form == "standard-past":
            name = f"{self.prefix}mixed_{i}"
            self.op("Attention", [q, k, v, "", *past], [name, *present], is_causal=1, scale=tiny.head_dim**-0.5)
            return self._merge_heads(name)
        for new, old, out in zip((k, v), past, present, strict=True):
            self.op("Concat", [old, new], [out], axis=2) if self.has_past else self.op("Identity", [new], [out])
        if tiny.form == "standard":
            mixed = self.op("Attention", [q, *present, self._mask(present[0])], scale=tiny.head_dim**-0.5)
            return self._merge_heads(mixed)
        keys, values = (self._repeat(name) for name in present)
        if tiny.form == "rank3":
            q, keys, values = (self._flat(name) for name in (q, keys, values))
        swapped = self.op("Transpose", [keys], perm=[0, 2, 1] if tiny.form == "rank3" else [0, 1, 3, 2])
        scores = self.op("Mul", [self.matmul(q, swapped), self.real(tiny.head_dim**-0.5)])
        lowest = -65504.0 if tiny.half else float(np.finfo(np.float32).min)
        bias = self.op("Where", [self._mask(present[0]), self.real(0.0), self.real(lowest)])
        scores = self.op("Add", [scores, bias])
        mixed = self.matmul(self._probabilities(scores, i), values)
        if tiny.form == "rank3":
            mixed = self.op("Reshape", [mixed, self.ints(1, tiny.heads, -1, tiny.head_dim)])
        return self._merge_heads(mixed)

    def _probabilities(self, scores: str, i: int) -> str:
        if self.tiny.softmax32:
            scores = self.op("Cast", [scores], to=TensorProto.FLOAT)
        length = self.axis(scores, 3) if self.tiny.sinks else ""
        if self.tiny.sinks:
            shape = self.op("Concat", [self.ints(1, self.tiny.heads), self.axis(scores, 2), self.ints(1)], axis=0)
            one = self.real(1.0, np.float32 if self.tiny.softmax32 else None)
            scores = self.op("Concat", [scores, self.op("Expand", [one, shape])], axis=-1)
        named = [f"attentions.{i}"] if self.tiny.attentions else None
        found = self.op("Softmax", [scores], named, axis=-1)
        if self.tiny.sinks:
            found = self.op("Slice", [found, self.ints(0), length, self.ints(3)])
        return self.op("Cast", [found], to=self.kind) if self.tiny.softmax32 else found

    def _repeat(self, name: str) -> str:
        """Key and value heads repeated for their groups, as transformers' repeat_kv is exported."""
        tiny = self.tiny
        if tiny.groups == 1:
            return name
        head = self.ints(1, tiny.kv_heads, tiny.groups)
        shape = self.op("Concat", [head, self.axis(name, 2), self.ints(tiny.head_dim)], axis=0)
        wide = self.op("Expand", [self.op("Unsqueeze", [name, self.ints(2)]), shape])
        return self.op("Reshape", [wide, self.ints(1, tiny.heads, -1, tiny.head_dim)])

    def _flat(self, name: str) -> str:
        return self.op("Squeeze", [name, self.ints(0)])

    def _merge_heads(self, x: str) -> str:
        return self.op("Reshape", [self.op("Transpose", [x], perm=[0, 2, 1, 3]), self.ints(0, 0, self.tiny.width)])

    def _fused(self, q: str, k: str, v: str, past: list[str], present: list[str], i: int) -> str:
        tiny, name = self.tiny, f"{self.prefix}mixed_{i}"
        if tiny.form == "closed":
            self.op("SparseAttention", [q, k, v, *past], [name, *present], "com.microsoft", num_heads=tiny.heads)
        elif tiny.form == "mha":
            inputs = [q, k, v, "", "", "", *past]
            self.op(
                "MultiHeadAttention", inputs, [name, *present], "com.microsoft", num_heads=tiny.heads, unidirectional=1
            )
        else:
            total = self.op("Cast", [self.op("Squeeze", [self.axis("attention_mask", 1)])], to=TensorProto.INT32)
            counted = self.op("ReduceSum", ["attention_mask", self.ints(1)], keepdims=0)
            last = self.op("Cast", [self.op("Sub", [counted, self.ints(1)])], to=TensorProto.INT32)
            settings = {"num_heads": tiny.heads, "kv_num_heads": tiny.kv_heads}
            inputs = [q, k, v, *past, last, total]
            if tiny.rotary:
                angles = np.outer(np.arange(64), np.ones(tiny.head_dim // 2)).astype(tiny.dtype)
                inputs += [self.const(np.cos(angles)), self.const(np.sin(angles))]
                settings["do_rotary"] = 1
                if tiny.rotary == "given":
                    inputs.append("position_ids")
            self.op("GroupQueryAttention", inputs, [name, *present], "com.microsoft", **settings)
        return name
