"""Prefix caches of models with linear attention, as MNN writes them: convolution and recurrent state, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import packed_samples


def write_hybrid(
    folder: Path,
    kinds: str,
    *,
    sizes: tuple[int, int] | None = (96 * 3 * 4, 4 * 16 * 16 * 4),
    tokens: int = 50,
    heads: int = 2,
    dims: int = 16,
    hP: int = 4,
    dtype: str = "fp32",
    seed: int = 0,
    name: str = "sys",
) -> dict[int, list[np.ndarray]]:
    """Write a layer for each letter of `kinds`: F has K and V, any other has state.

    Without `sizes` the state has as many bytes as K and V. Returns K and V of the layers that have them.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    full = {}
    for layer, kind in enumerate(kinds):
        pair = packed_samples.arrays(1, heads, tokens, dims, dtype, seed + layer)
        packed = packed_samples.packed(pair[0], pair[1], 1, hP, 64, tokens + 64, b"\0")
        if kind == "F":
            full[layer] = pair
            contents = [each.tobytes() for each in packed]
        else:
            lengths = sizes or tuple(each.nbytes for each in packed)
            contents = [rng.standard_normal(-(-size // 4)).astype("<f4").tobytes()[:size] for size in lengths]
        for part, content in zip("kv", contents, strict=True):
            (folder / f"{name}_{layer}.{part}").write_bytes(content)
            (folder / f"{name}_{layer}_sync.{part}").touch()
    return full


ATTENTION, LINEAR_ATTENTION, RESHAPE, CONSTANT = 299, 305, 73, 11


def build_graph(layers: Sequence[tuple[str, int, int]], *, linear_kind: str = "gated_delta_rule") -> bytes:
    """A graph of MNN's schema with nothing but what tells layers: ``(kind, kv_heads, head_dim)`` of each.

    Kind F is attention, L linear attention, a digit attention with K and V of that layer.
    """
    import flatbuffers

    builder = flatbuffers.Builder(1024)

    def ints(values: Sequence[int]) -> int:
        builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            builder.PrependInt32(value)
        return int(builder.EndVector())

    def op(number: int, inputs: Sequence[int], outputs: Sequence[int], main: int | None) -> int:
        vectors = ints(inputs), ints(outputs)
        builder.StartObject(8)
        builder.PrependUOffsetTRelativeSlot(0, vectors[0], 0)
        if main is not None:
            builder.PrependUOffsetTRelativeSlot(2, main, 0)
        builder.PrependUOffsetTRelativeSlot(4, vectors[1], 0)
        builder.PrependInt32Slot(5, number, 0)
        return int(builder.EndObject())

    ops = []
    for layer, (kind, heads, dims) in enumerate(layers):
        first = 10 * layer
        if kind == "L":
            text = builder.CreateString(linear_kind)
            builder.StartObject(9)
            builder.PrependUOffsetTRelativeSlot(0, text, 0)
            ops.append(
                op(LINEAR_ATTENTION, (first, first + 1, first + 2, first + 3), (first + 9,), builder.EndObject())
            )
            continue
        shape = ints((0, -1, heads, dims))
        builder.StartObject(8)
        builder.PrependUOffsetTRelativeSlot(5, shape, 0)
        ops.append(op(CONSTANT, (), (first + 4,), builder.EndObject()))
        ops.append(op(RESHAPE, (first + 1, first + 4), (first + 5,), None))
        builder.StartObject(7)
        builder.PrependInt32Slot(3, -1 if kind == "F" else int(kind), -1)
        ops.append(op(ATTENTION, (first, first + 5, first + 2), (first + 9,), builder.EndObject()))
    builder.StartVector(4, len(ops), 4)
    for each in reversed(ops):
        builder.PrependUOffsetTRelative(each)
    listed = builder.EndVector()
    builder.StartObject(8)
    builder.PrependUOffsetTRelativeSlot(3, listed, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def read_files(folder: Path | str) -> dict[str, bytes]:
    """The engine's files of a prefix, without kvmnn's document."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.suffix != ".json"}
