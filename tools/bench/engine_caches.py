"""The same K and V as files of llama.cpp, MLX, transformers, vLLM, LMCache and SGLang, for engines.py.

Numbers are rounded to the nearest, and quantised as the engines do it: blocks as ggml's reference functions
(`quantize_row_<type>_ref`), groups as `mlx.core.quantize` in its affine mode.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common import ROOT

from kvmnn import dtypes

sys.path.append(str(ROOT / "tools"))
from fixtures.compressor_checkpoint import write_checkpoint

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]
Pair = tuple[Floats, Floats]

BLOCKS = {"q8_0": (8, 34), "q4_0": (2, 18), "q4_1": (3, 20), "q5_0": (6, 22), "q5_1": (7, 24), "iq4_nl": (20, 18)}
"""Numbers of ggml's types, and bytes of a block of 32."""
WORDS = {"f32": (0, "fp32"), "f16": (1, "fp16"), "bf16": (30, "bf16")}
GROUP = 64
MLX_BITS = (8, 6, 5, 4, 3, 2)
_IQ4 = np.float32([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


class Made(NamedTuple):
    """A cache of an engine.

    Parameters
    ----------
    engine, type
        For people.
    path
        The file or folder.
    options
        What has to be said of it: fields of `kvmnn.arrays.AxisSpec`.
    """

    engine: str
    type: str
    path: Path
    options: dict[str, Any]


def caches(folder: Path, pairs: Sequence[Pair]) -> Iterator[Made]:
    """Every cache; K and V of a layer are ``[kv_head, token, head_dim]``."""
    for name in (*WORDS, *BLOCKS):
        yield Made("llama.cpp", name, _written(folder / f"{name}.session", session(pairs, name)), {})
    for name, (_, dtype) in WORDS.items():
        yield Made("MLX", _NAMES[name], _written(folder / f"{name}.safetensors", prompt_cache(pairs, dtype)), {})
    for bits in MLX_BITS:
        file = _written(folder / f"q{bits}.safetensors", quantized_cache(pairs, bits))
        yield Made("MLX", f"{bits} bits in groups of {GROUP}, float16", file, {})
    for name, (_, dtype) in WORDS.items():
        path = folder / f"{name}.pt"
        write_checkpoint(path, [tuple(rounded(part[None], dtype) for part in pair) for pair in pairs], name=path.stem)
        yield Made("Hugging Face", _NAMES[name], path, {})
    for name in ("f16", "bf16"):
        _, dtype = WORDS[name]
        yield Made("vLLM", _NAMES[name], _vllm(folder / f"vllm_{name}", pairs, dtype), {"axes": "2thd"})
        said = {"axes": "2lthd", "shape": (2, len(pairs), -1, *pairs[0][0].shape[::2])}
        words = rounded(
            np.stack([[part.swapaxes(0, 1) for part in parts] for parts in zip(*pairs, strict=True)]), dtype
        )
        key = f"model@1@0@12ab@{'half' if name == 'f16' else 'bfloat16'}.pt"
        yield Made("LMCache, SGLang (pages)", _NAMES[name], _written(folder / key, words.tobytes()), said)


_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def generator(pairs: Sequence[Pair]) -> Any:
    """What a generator of ONNX Runtime GenAI gives of a cache in float16."""
    outputs = {
        f"present.{layer}.{name}": part.astype(np.float16)[None]
        for layer, pair in enumerate(pairs)
        for name, part in zip(("key", "value"), pair, strict=True)
    }

    class Generator:
        def get_output(self, name: str) -> Words:
            return outputs[name]

    return Generator()


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def rounded(values: Floats, dtype: str) -> Words:
    """To the nearest words of a type, ties to even; bf16 as uint16."""
    if dtype != "bf16":
        return values.astype(dtypes.parse_dtype(dtype).numpy_dtype)
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


def session(pairs: Sequence[Pair], name: str) -> bytes:
    """A session file, version 10: one stream, V as K."""
    tokens = pairs[0][0].shape[1]
    head = struct.pack("<II", 0x6767736E, 10) + struct.pack(f"<I{tokens}i", tokens, *range(tokens))
    head += struct.pack("<I", 5) + b"llama" + struct.pack("<II", 1, tokens)
    cells = np.zeros((tokens, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(tokens), 1
    parts = [head, cells.tobytes(), struct.pack("<II", 0, len(pairs))]
    for side in range(2):
        for pair in pairs:
            rows = np.ascontiguousarray(pair[side].swapaxes(0, 1)).reshape(tokens, -1)
            data = blocks(rows, name) if name in BLOCKS else rounded(rows, WORDS[name][1]).tobytes()
            number = BLOCKS[name][0] if name in BLOCKS else WORDS[name][0]
            parts += [struct.pack("<iQ", number, len(data) // tokens), data]
    return b"".join(parts)


def blocks(rows: Floats, name: str) -> bytes:
    """Rows as blocks of 32."""
    made: npt.NDArray[np.uint8] = _QUANTIZERS[name](rows.reshape(-1, 32))
    return made.tobytes()


def _halves(values: Floats) -> npt.NDArray[np.uint8]:
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _over(scale: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scale != 0, np.float32(1) / scale, np.float32(0))


def _nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return (codes[:, :16] & 15) | (codes[:, 16:] & 15) << np.uint8(4)


def _fifths(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _q8_0(x: Floats) -> npt.NDArray[np.uint8]:
    scale = np.abs(x).max(1) / np.float32(127)
    scaled = x * _over(scale)[:, None]
    codes = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))).astype(np.int8)
    return np.concatenate([_halves(scale), codes.view(np.uint8)], axis=1)


def _symmetric(bits: int) -> Callable[[Floats], npt.NDArray[np.uint8]]:
    """q4_0 and q5_0: the value that is largest in size gets the lowest code."""
    half = 1 << (bits - 1)

    def quantise(x: Floats) -> npt.NDArray[np.uint8]:
        largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
        scale = largest / np.float32(-half)
        codes = np.minimum(2 * half - 1, (x * _over(scale)[:, None] + np.float32(half + 0.5)).astype(np.int8))
        return _fields(bits, codes.astype(np.uint8), scale)

    return quantise


def _with_minimum(bits: int) -> Callable[[Floats], npt.NDArray[np.uint8]]:
    """q4_1 and q5_1."""
    most = (1 << bits) - 1

    def quantise(x: Floats) -> npt.NDArray[np.uint8]:
        least = x.min(1)
        scale = (x.max(1) - least) / np.float32(most)
        codes = np.minimum(most, ((x - least[:, None]) * _over(scale)[:, None] + np.float32(0.5)).astype(np.uint8))
        return _fields(bits, codes, scale, least)

    return quantise


def _fields(bits: int, codes: npt.NDArray[np.uint8], *scales: Floats) -> npt.NDArray[np.uint8]:
    return np.concatenate([*map(_halves, scales), *([_fifths(codes)] if bits == 5 else []), _nibbles(codes)], axis=1)


def _iq4_nl(x: Floats) -> npt.NDArray[np.uint8]:
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    first = _over(largest / _IQ4[0])
    between = (_IQ4[1:] + _IQ4[:-1]) / np.float32(2)
    codes = np.searchsorted(between, x * first[:, None], "right").astype(np.uint8)
    named = _IQ4[codes]
    below = (x * x * named * named).sum(1)
    scale = np.where(below > 0, (x * x * named * x).sum(1) / np.where(below > 0, below, 1), 0).astype(np.float32)
    return np.concatenate([_halves(scale), _nibbles(codes)], axis=1)


_QUANTIZERS: dict[str, Callable[[Floats], npt.NDArray[np.uint8]]] = {
    "q8_0": _q8_0,
    "q4_0": _symmetric(4),
    "q4_1": _with_minimum(4),
    "q5_0": _symmetric(5),
    "q5_1": _with_minimum(5),
    "iq4_nl": _iq4_nl,
}


# -- safetensors: MLX and vLLM -----------------------------------------------------------------------------------------


def safetensors(tensors: dict[str, tuple[str, Words]], metadata: dict[str, str] | None = None) -> bytes:
    """A file of tensors: type and words by name."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data: list[bytes] = []
    end = 0
    for name, (kind, words) in tensors.items():
        header[name] = {"dtype": kind, "shape": words.shape, "data_offsets": [end, end + words.nbytes]}
        data.append(words.tobytes())
        end += words.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data)


_KINDS = {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}


def prompt_cache(pairs: Sequence[Pair], dtype: str) -> bytes:
    """A prompt cache without room after its tokens."""
    tensors: dict[str, tuple[str, Words]] = {}
    for layer, pair in enumerate(pairs):
        for side, part in enumerate(pair):
            tensors[f"{layer}.{side}"] = _KINDS[dtype], rounded(part[None], dtype)
        tensors[f"{layer}.2"] = "I32", np.array(pair[0].shape[1], "<i4")
    return safetensors(tensors, {f"1.{layer}": "KVCache" for layer in range(len(pairs))})


def quantized_cache(pairs: Sequence[Pair], bits: int) -> bytes:
    """The same in groups."""
    tensors: dict[str, tuple[str, Words]] = {}
    for layer, pair in enumerate(pairs):
        for side, part in enumerate(pair):
            for place, (kind, words) in enumerate(groups(part[None], bits)):
                tensors[f"{layer}.{side}.{place}"] = kind, words
        for number, state in enumerate((pair[0].shape[1], GROUP, bits)):
            tensors[f"{layer}.{2 + number}"] = "I32", np.array(state, "<i4")
    return safetensors(tensors, {f"1.{layer}": "QuantizedKVCache" for layer in range(len(pairs))})


def groups(values: Floats, bits: int) -> Iterator[tuple[str, Words]]:
    """Codes, scales and biases of groups along the last axis; scales in float16, as the model's words are."""
    x = values.astype(np.float16).astype(np.float32).reshape(-1, GROUP)
    most = np.float32((1 << bits) - 1)
    low, high = x.min(1), x.max(1)
    is_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / most, np.float32(1e-7)) * np.where(is_low, 1, -1).astype(np.float32)
    edge = np.where(is_low, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps != 0, steps, 1), scale).astype(np.float32)
    bias = np.where(steps != 0, edge, 0).astype(np.float32)
    codes = np.clip(np.rint((x - bias[:, None]) / scale[:, None]), 0, most).astype(np.uint8)
    apart = np.unpackbits(codes.reshape(-1, values.shape[-1], 1), axis=2, bitorder="little")[:, :, :bits]
    packed = np.packbits(apart.reshape(len(apart), -1), axis=1, bitorder="little").view("<u4")
    yield "U32", packed.reshape(*values.shape[:-1], -1)
    for words in (scale, bias):
        yield "F16", words.astype("<f2").reshape(*values.shape[:-1], -1)


def _vllm(folder: Path, pairs: Sequence[Pair], dtype: str) -> Path:
    folder.mkdir()
    for layer, pair in enumerate(pairs):
        words = rounded(np.stack([part.swapaxes(0, 1) for part in pair]), dtype)
        data = safetensors({"kv_cache": (_KINDS[dtype], words)})
        (folder / f"model.layers.{layer}.self_attn.attn.safetensors").write_bytes(data)
    return folder
