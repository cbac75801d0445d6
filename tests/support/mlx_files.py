"""An independent writer of mlx-lm's prompt caches, and what readers must find in them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random

import numpy as np

KINDS = {"fp16": ("F16", 2), "bf16": ("BF16", 2), "fp32": ("F32", 4)}


@dataclass
class Shape:
    """What a file is made as."""

    layers: int = 2
    heads: int = 2
    dims: int = 64
    value_dims: int = 64
    tokens: int = 5
    capacity: int = 8
    dtype: str = "fp16"
    bits: int = 0
    group: int = 32
    batch: int = 1
    new: bool = True
    kind: str = ""
    settings: int = 4
    """Of older quantised caches: with the rows that buffers grow by, or 3."""
    by_layer: tuple[Shape, ...] = ()
    """What differs between layers: heads and dimensions."""


def cache(rng: Random, shape: Shape) -> tuple[bytes, dict[str, np.ndarray]]:
    """A file, and K and V of its layers: ``[batch, kv_head, token, head_dim]``, bf16 as uint16 words."""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    expected: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    capacity = shape.capacity if shape.new or shape.bits else shape.tokens
    name = shape.kind or ("QuantizedKVCache" if shape.bits else "KVCache")
    for layer in range(shape.layers):
        own = shape.by_layer[layer] if shape.by_layer else shape
        for side, part, dims in ((0, "key", own.dims), (1, "value", own.value_dims)):
            made, values = (quantised if shape.bits else plain)(rng, own, capacity, dims)
            for suffix, tensor in made.items():
                tensors[f"{layer}.{side}{suffix}"] = tensor
            expected[f"layer_{layer}.{part}"] = values[:, :, : shape.tokens]
        if shape.new:
            states = [shape.tokens, *([shape.group, shape.bits] if shape.bits else [])]
            if name == "RotatingKVCache":  # a window that is not full: tokens kept at its beginning, its size, the next
                states += [0, shape.capacity, shape.tokens]
            for number, state in enumerate(states):
                tensors[f"{layer}.{2 + number}"] = ("I32", [], struct.pack("<i", state))
            metadata[f"1.{layer}"] = name
        else:
            if shape.bits:
                settings = [256, shape.tokens, shape.group, shape.bits][-shape.settings :]
                metadata |= {f"0.{layer}.{number}": str(value) for number, value in enumerate(settings)}
            else:
                metadata[f"0.{layer}"] = ""
            metadata[f"2.{layer}"] = name
    metadata |= {"0.model": "tiny", "2.0": ""} if shape.new else {"1.model": "tiny"}
    return safetensors(rng, tensors, metadata), expected


def safetensors(rng: Random, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str]) -> bytes:
    """A file whose data lie in any order."""
    names = list(tensors)
    rng.shuffle(names)
    header: dict[str, object] = {"__metadata__": metadata}
    data = b""
    for name in names:
        kind, shape, content = tensors[name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, sort_keys=True).encode()
    return struct.pack("<Q", len(text)) + text + data


def plain(rng: Random, shape: Shape, capacity: int, dims: int) -> tuple[dict[str, object], np.ndarray]:
    kind, size = KINDS[shape.dtype]
    axes = [shape.batch, shape.heads, capacity, dims]
    data = rng.randbytes(int(np.prod(axes)) * size)
    return {"": (kind, axes, data)}, np.frombuffer(data, f"<u{size}").reshape(axes)


def quantised(rng: Random, shape: Shape, capacity: int, dims: int) -> tuple[dict[str, object], np.ndarray]:
    """Codes as one number of all bits of a row, lowest first; numbers one by one."""
    kind, _ = KINDS[shape.dtype]
    rows, groups = shape.batch * shape.heads * capacity, dims // shape.group
    words = dims * shape.bits // 32
    packed, scales, biases, values = b"", [], [], []
    for _ in range(rows):
        codes = [rng.randrange(1 << shape.bits) for _ in range(dims)]
        packed += sum(code << (number * shape.bits) for number, code in enumerate(codes)).to_bytes(4 * words, "little")
        own = [(_rounded(rng.uniform(-0.1, 0.1), kind), _rounded(rng.uniform(-2, 2), kind)) for _ in range(groups)]
        scales += [scale for scale, _ in own]
        biases += [bias for _, bias in own]
        for number, code in enumerate(codes):
            scale, bias = own[number // shape.group]
            values.append(_rounded(float(np.float32(_rounded(code * scale, kind)) + np.float32(bias)), kind))
    axes = [shape.batch, shape.heads, capacity]
    found = {
        ".0": ("U32", [*axes, words], packed),
        ".1": (kind, [*axes, groups], _packed(scales, kind)),
        ".2": (kind, [*axes, groups], _packed(biases, kind)),
    }
    size = 4 if kind == "F32" else 2
    return found, np.frombuffer(_packed(values, kind), f"<u{size}").reshape([*axes, dims])


def _rounded(value: float, kind: str) -> float:
    """To the nearest number of a type, ties to even."""
    return struct.unpack("<f", _float32(value, kind))[0]


def _float32(value: float, kind: str) -> bytes:
    if kind == "F16":
        return struct.pack("<f", struct.unpack("<e", struct.pack("<e", value))[0])
    if kind == "F32":
        return struct.pack("<f", value)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low = bits & 0xFFFF
    up = low > 0x8000 or (low == 0x8000 and bits >> 16 & 1)
    return struct.pack("<I", ((bits >> 16) + up) << 16)


def _packed(values: list[float], kind: str) -> bytes:
    if kind == "BF16":
        return b"".join(_float32(value, kind)[2:] for value in values)
    return b"".join(struct.pack("<e" if kind == "F16" else "<f", value) for value in values)
