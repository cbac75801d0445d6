"""Weight files made on the spot, and the forward pass of a compressor in plain Python loops, written from its rules."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmnn.compressor import kvcm

DTYPE_CODES = {"fp16": 0, "bf16": 1, "fp32": 2}


def to_words(values: Any, dtype: str) -> np.ndarray:
    """float values as words of fp16, fp32, or bf16 (cut off: any bf16 will do)."""
    array = np.asarray(values, np.float32)
    if dtype == "fp32":
        return array
    return array.astype(np.float16) if dtype == "fp16" else (array.view(np.uint32) >> 16).astype(np.uint16)


def to_floats(words: np.ndarray) -> np.ndarray:
    if words.dtype == np.uint16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float32)


def weight_file(
    random: np.random.Generator,
    *,
    layers: int = 1,
    prefixes: int = 4,
    factor: int = 3,
    head_dim: int = 4,
    widths: tuple[int, int] | None = None,
    dtype: str = "fp32",
    min_seq_len: int = 2,
    header_factor: int | None = None,
    bias: Callable[[], bool] = lambda: True,
    change: Callable[[int, int, np.ndarray], np.ndarray] | None = None,
    extra: int = 0,
) -> kvcm.WeightFile:
    """A weight file in memory; `change` may replace the weight of a (layer, block), `extra` adds blocks to a layer."""
    wide, narrow = widths or (head_dim, head_dim)
    shapes = [(wide, factor * head_dim), (narrow, wide), (head_dim, narrow)]
    count = 3 * prefixes + extra

    def blocks():
        for layer in range(layers):
            for index in range(count):
                rows, cols = shapes[index % 3]
                weight = random.standard_normal((rows, cols)) / np.sqrt(cols)
                if change:
                    weight = change(layer, index, weight)
                rows = len(weight)
                yield to_words(weight, dtype), to_words(random.standard_normal(rows), dtype) if bias() else None

    header = kvcm.WeightFileHeader(
        dtype_code=DTYPE_CODES[dtype],
        num_layers=layers,
        compression_factor=factor if header_factor is None else header_factor,
        min_seq_len=min_seq_len,
        weight_count_per_layer=count,
    )
    sink = io.BytesIO()
    kvcm.write_weight_file(sink, header, blocks())
    return kvcm.parse_weight_file(sink.getvalue(), label="made.bin")


@dataclass
class Model:
    """The rules with nothing clever in them: Python lists and Python floats.

    `half` rounds to fp16 what an fp16 runtime rounds.
    """

    weights: kvcm.WeightFile
    factor: int
    min_seq_len: int
    image_len: int
    half: bool = False

    def __post_init__(self) -> None:
        header = self.weights.header
        if self.factor <= 1:
            self.factor = header.compression_factor
        if self.min_seq_len == 0:
            self.min_seq_len = header.min_seq_len

    def run(self, keys: np.ndarray, values: np.ndarray) -> tuple[list[Any], list[Any], list[tuple[int, int]]]:
        """New K and V ``[layers][batch][kv_heads][tokens][head_dim]`` of float32 input, and the spans of the tokens."""
        tokens = keys.shape[3]
        image = min(self.image_len, tokens)
        spans: list[tuple[int, int]] = []
        results: list[list[Any]] = [[], []]
        for side, array in enumerate((keys, values)):
            for layer in range(array.shape[0]):
                rows = []
                for batch in array[layer]:
                    heads = []
                    for head in batch.tolist():
                        first, first_spans = self._segment(head[:image], layer, 2 + side)
                        second, second_spans = self._segment(head[image:], layer, side)
                        heads.append(first + second)
                        spans = first_spans + [(begin + image, end + image) for begin, end in second_spans]
                    rows.append(heads)
                results[side].append(rows)
        return results[0], results[1], spans

    def _segment(self, tokens: list[list[float]], layer: int, prefix: int) -> tuple[list[Any], list[tuple[int, int]]]:
        count = self.weights.header.weight_count_per_layer
        blocks = range(3 * prefix, 3 * prefix + 3)
        usable = count >= 6 if prefix < 2 else count >= 12
        groups = len(tokens) // self.factor if self.factor > 1 else 0
        if count < 6 or not usable or groups == 0 or groups < self.min_seq_len:
            return [self._round(token) for token in tokens], [(i, i + 1) for i in range(len(tokens))]
        if self.weights.get_block(0, 0).cols != self.factor * len(tokens[0]):
            return [self._round(token) for token in tokens], [(i, i + 1) for i in range(len(tokens))]
        made, spans = [], []
        for group in range(groups):
            row: list[float] = []
            for token in tokens[group * self.factor : (group + 1) * self.factor]:
                row += self._round(token)
            for index in blocks:
                row = self._linear(row, layer, index)
                if index < blocks[-1]:
                    row = [max(value, 0.0) for value in row]
            made.append(row)
            spans.append((group * self.factor, (group + 1) * self.factor))
        for position in range(groups * self.factor, len(tokens)):
            made.append(self._round(tokens[position]))
            spans.append((position, position + 1))
        return made, spans

    def _linear(self, row: list[float], layer: int, index: int) -> list[float]:
        block = self.weights.get_block(layer, index)
        weight = to_floats(block.weight)
        bias = np.zeros(block.rows) if block.bias is None else to_floats(block.bias)
        outputs = []
        for out in range(block.rows):
            total = sum(w * x for w, x in zip(self._round(weight[out].tolist()), row, strict=True))
            outputs.append(total + self._round([float(bias[out])])[0])
        return self._round(outputs)

    def _round(self, numbers: Sequence[float]) -> list[float]:
        return [float(np.float16(number)) for number in numbers] if self.half else list(numbers)
