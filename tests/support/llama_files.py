"""An independent writer of llama.cpp state files, value by value in plain Python, and what readers must find in them.

Nothing here is shared with kvmnn: types, blocks and structure are written down a second time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

import numpy as np

NUMBERS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
PLAIN = ("f32", "f16", "bf16")
BLOCKS = tuple(name for name in NUMBERS if name not in PLAIN)
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "iq4_nl": 18}
SESSION, SEQUENCE = b"nsgg", b"qsgg"
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass
class Cells:
    """One stream: what is written, and what readers must find by layer: ``[kv_head, cell, head_dim]``."""

    positions: list[int] = field(default_factory=list)
    seqs: list[list[int]] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    data: bytes = b""


@dataclass
class Shape:
    """What a file is made as."""

    layers: int = 2
    heads: int = 2
    dims: int = 32
    value_dims: int = 32
    k_type: str = "f16"
    v_type: str = "f16"
    transposed: bool = False
    extra: int = 0
    has_v: bool = True
    layer_heads: tuple[int, ...] = ()
    layer_types: tuple[tuple[str, str], ...] = ()

    def heads_of(self, layer: int) -> int:
        """Of a layer, where they differ."""
        return self.layer_heads[layer] if self.layer_heads else self.heads

    def types_of(self, layer: int) -> tuple[str, str]:
        """Of K and V of a layer, where they differ."""
        return self.layer_types[layer] if self.layer_types else (self.k_type, self.v_type)


def state(
    rng: Random,
    shape: Shape,
    cells: list[int],
    *,
    kind: bytes = SESSION,
    version: int | None = None,
    tokens: int | None = None,
    streams_said: bool = True,
    outputs: tuple[int, int, int] | None = None,
    second: list[int] | None = None,
    second_shape: Shape | None = None,
    second_cells: list[int] | None = None,
    gaps: bool = False,
    sequences: int = 1,
    architecture: str = "llama",
    recurrent: int = 0,
) -> tuple[bytes, list[list[Cells]]]:
    """A file whose streams have so many cells each, and its caches: lists of streams.

    recurrent: layers whose state lies after the caches. outputs: their number, of logits and of embeddings, as
    version 9 has them. second: cells of a second cache, which is of another shape, or has cells of these positions.
    """
    newest = 10 if kind == SESSION else 3
    count = sum(cells) if tokens is None else tokens
    data = kind + struct.pack("<II", newest if version is None else version, count)
    data += b"".join(struct.pack("<i", rng.randrange(32000)) for _ in range(count))
    if kind == SESSION:
        data += struct.pack("<I", len(architecture)) + architecture.encode()
        if outputs is not None:
            n, logits, embeddings = outputs
            data += struct.pack("<I", n) + struct.pack(f"<{n}i", *range(n))
            data += struct.pack("<Q", logits) + rng.randbytes(4 * logits)
            data += struct.pack("<Q", embeddings) + rng.randbytes(4 * embeddings)
    caches = []
    for place, each in enumerate([cells] if second is None else [cells, second]):
        own, said = (second_shape or shape, second_cells) if place else (shape, None)
        streams = [stream(rng, own, number, gaps=gaps, sequences=sequences, positions=said) for number in each]
        data += struct.pack("<I", len(each)) if streams_said else b""
        data += b"".join(found.data for found in streams)
        caches.append(streams)
    return data + (recurrent_state(rng, recurrent) if recurrent else b""), caches


def recurrent_state(rng: Random, layers: int) -> bytes:
    """One cell of one sequence; for each layer rows of 12 values of the one kind, then none of the other."""
    data = struct.pack("<I", 1) + struct.pack("<iIi", 7, 1, 0) + struct.pack("<II", 0, layers + 2)
    data += b"".join(struct.pack("<iQ", 0, 48) + rng.randbytes(48) for _ in range(layers))
    return data + b"".join(struct.pack("<iQ", 0, 0) for _ in range(layers))


def stream(
    rng: Random, shape: Shape, cells: int, *, gaps: bool, sequences: int, positions: list[int] | None = None
) -> Cells:
    found = Cells()
    found.data = struct.pack("<I", cells)
    if not cells:
        return found
    position = 0
    for number in range(cells):
        position = positions[number] if positions else position + (rng.randrange(4) if gaps else 0)
        ids = sorted(rng.sample(range(sequences), rng.randint(1, sequences)))
        found.positions.append(position)
        found.seqs.append(ids)
        found.data += struct.pack("<iI", position, len(ids)) + rng.randbytes(shape.extra)
        found.data += struct.pack(f"<{len(ids)}i", *ids)
        position += 1
    found.data += struct.pack("<II", shape.transposed, shape.layers)
    for name, arrays, dims in (("k", found.keys, shape.dims), ("v", found.values, shape.value_dims)):
        if name == "v" and not shape.has_v:
            continue
        across = shape.transposed and name == "v"
        for layer in range(shape.layers):
            kind, heads = shape.types_of(layer)["kv".index(name)], shape.heads_of(layer)
            row = heads * dims
            words, logical = rows(rng, kind, cells, row)
            if across:
                size = {"f32": 4, "f16": 2, "bf16": 2}[kind]
                found.data += struct.pack("<iII", NUMBERS[kind], size, row)
                found.data += b"".join(
                    words[cell][c * size : (c + 1) * size] for c in range(row) for cell in range(cells)
                )
            else:
                found.data += struct.pack("<iQ", NUMBERS[kind], len(words[0])) + b"".join(words)
            arrays.append(np.array(logical).reshape(cells, heads, dims).transpose(1, 0, 2))
    return found


def rows(rng: Random, kind: str, cells: int, row: int) -> tuple[list[bytes], np.ndarray]:
    """The bytes of each cell's row, and the values: words of plain types, float32 of blocks."""
    if kind in PLAIN:
        size = 4 if kind == "f32" else 2
        words = [rng.randbytes(row * size) for _ in range(cells)]
        dtype = {"f32": "<f4", "f16": "<u2", "bf16": "<u2"}[kind]
        return words, np.frombuffer(b"".join(words), dtype)
    data, values = [], []
    for _ in range(cells):
        blocks = [block(rng, kind) for _ in range(row // 32)]
        data.append(b"".join(made for made, _ in blocks))
        values += [value for _, numbers in blocks for value in numbers]
    return data, np.array(values, np.float32)


def half(rng: Random) -> bytes:
    return struct.pack("<e", rng.uniform(-2, 2))


def block(rng: Random, kind: str) -> tuple[bytes, list[np.float32]]:
    """A block, and the 32 numbers that it stands for in float32."""
    head = half(rng) + (half(rng) if kind in ("q4_1", "q5_1") else b"")
    scale = np.float32(struct.unpack_from("<e", head)[0])
    least = np.float32(struct.unpack_from("<e", head, 2)[0]) if len(head) == 4 else None
    if kind == "q8_0":
        codes = [rng.randrange(-128, 128) for _ in range(32)]
        return head + struct.pack("<32b", *codes), [np.float32(code) * scale for code in codes]
    high = [rng.randrange(2) for _ in range(32)] if kind.startswith("q5") else [0] * 32
    low = [rng.randrange(16) for _ in range(32)]
    data = head
    if kind.startswith("q5"):
        data += struct.pack("<I", sum(bit << number for number, bit in enumerate(high)))
    data += bytes(low[j] | low[j + 16] << 4 for j in range(16))
    codes = [a + 16 * b for a, b in zip(low, high, strict=True)]
    assert len(data) == BLOCK_BYTES[kind]
    if kind == "iq4_nl":
        return data, [np.float32(_IQ4[code]) * scale for code in codes]
    if least is not None:
        return data, [np.float32(code) * scale + least for code in codes]
    shift = {"q4_0": 8, "q5_0": 16}[kind]
    return data, [np.float32(code - shift) * scale for code in codes]


def gguf(architecture: str = "llama", **fields: int | float | str | list[int] | list[bool]) -> bytes:
    """The header of a model with fields of the architecture; dots of their names are written as two underscores."""
    named = {"general.architecture": architecture, "general.tags": ["a", "b"]}
    named |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()}
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(named))
    for name, value in named.items():
        data += _text(name) + _value(value)
    return data


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list)
    if isinstance(value[0], bool):
        return struct.pack("<IIQ", 9, 7, len(value)) + bytes(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
