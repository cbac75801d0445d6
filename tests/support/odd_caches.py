"""Caches of other engines in shapes that are hardly ever met, drawn from a seed, and what readers must find in them.

One token, one head, one layer; heads that are no whole blocks, layers that are unlike each other, batches, gaps,
several streams and sequences, buffers with room after the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import hf_files
import llama_files
import mlx_files
import numpy as np
from llama_files import NUMBERS, PLAIN, SEQUENCE, SESSION

from kvmnn.formats import EngineOptions, PackedOptions, ReadOptions
from kvmnn.packed.inference import PackedGeometry


@dataclass(frozen=True)
class Odd:
    """A file.

    Parameters
    ----------
    path
        Where it lies.
    arrays
        K and V by their names, in the order of the layers; bf16 as uint16 words.
    options
        What the file does not say of itself.
    whole
        Whether the same file is written again from its frames.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    options: ReadOptions
    whole: bool


def llama(rng: Random, folder: Path) -> Odd:
    """A state file; the model next to it where layers have different heads."""
    transposed, layers, dims = rng.random() < 0.4, rng.randint(1, 4), rng.choice((32, 64, 96))
    kinds, of_v = sorted(NUMBERS), PLAIN if transposed else sorted(NUMBERS)
    types = tuple((rng.choice(kinds), rng.choice(of_v)) for _ in range(layers))
    if all(kind in PLAIN for pair in types for kind in pair):
        dims = rng.choice((1, 2, 7, 33, 80))
    elif rng.random() < 0.3:
        dims = rng.choice((16, 48, 80))  # blocks lie across two heads
    least = 1 if dims % 32 == 0 or not _has_blocks(types) else 2
    heads = tuple(least * rng.randint(1, 3) for _ in range(layers)) if rng.random() < 0.4 else ()
    shape = llama_files.Shape(
        layers=layers,
        heads=least * rng.choice((1, 1, 3)),
        dims=dims,
        value_dims=dims,
        transposed=transposed,
        extra=rng.choice((0, 0, 12)),
        layer_heads=heads,
        layer_types=types,
    )
    cells = [rng.choice((0, 1, 2, 9)) for _ in range(rng.choice((0, 0, 1, 3)))] + [rng.choice((1, 1, 2, 31, 33, 70))]
    kind, sequences = rng.choice((SESSION, SEQUENCE)), rng.choice((1, 1, 3))
    data, (streams,) = llama_files.state(rng, shape, cells, kind=kind, gaps=rng.random() < 0.5, sequences=sequences)
    path = _put(folder / "odd.session", data)
    packed = PackedOptions(geometry=PackedGeometry(kv_heads=shape.heads))
    if heads:
        fields = {"attention__head_count_kv": list(heads), "attention__key_length": dims, "block_count": layers}
        packed = PackedOptions(model=str(_put(folder / "odd.gguf", llama_files.gguf(**fields))))
    last = streams[-1]
    arrays = {
        f"layer_{layer}.{part}": found[layer]
        for layer in range(layers)
        for part, found in (("key", last.keys), ("value", last.values))
    }
    return Odd(path, arrays, ReadOptions(packed=packed, engine=EngineOptions(stream=len(cells) - 1)), whole=True)


def _has_blocks(types: tuple[tuple[str, str], ...]) -> bool:
    return any(kind not in PLAIN for pair in types for kind in pair)


def mlx(rng: Random, folder: Path) -> Odd:
    """A prompt cache."""
    bits = rng.choice((0, 0, 2, 3, 4, 5, 6, 8))
    capacity = rng.choice((1, 2, 9, 40))
    shape = mlx_files.Shape(
        layers=rng.randint(1, 4),
        tokens=rng.randint(1, capacity),
        capacity=capacity,
        dtype=rng.choice(("fp16", "bf16", "fp32")),
        bits=bits,
        batch=rng.choice((1, 1, 3)),
        new=rng.random() < 0.6,
    )
    sizes = (32, 64, 96) if bits else (1, 3, 8, 33, 80)

    def own() -> mlx_files.Shape:
        return replace(shape, heads=rng.choice((1, 1, 2, 5)), dims=rng.choice(sizes), value_dims=rng.choice(sizes))

    like = own()
    unlike = rng.random() < 0.4
    by_layer = tuple(own() if unlike else like for _ in range(shape.layers))
    data, arrays = mlx_files.cache(rng, replace(shape, by_layer=by_layer))
    arrays = {name: words[0] if shape.batch == 1 else words for name, words in arrays.items()}
    return Odd(_put(folder / "odd.safetensors", data), arrays, ReadOptions(), whole=True)


def hf(rng: Random, folder: Path) -> Odd:
    """A file of torch.save."""
    dtype, batch, tokens = rng.choice(sorted(hf_files.TYPES)), rng.choice((1, 1, 2, 5)), rng.choice((1, 1, 2, 33, 70))
    draws, words = np.random.default_rng(rng.randrange(1 << 32)), np.dtype(hf_files.TYPES[dtype])

    def part(heads: int, dims: int) -> np.ndarray:
        data = draws.integers(0, 256, batch * heads * tokens * dims * words.itemsize, np.uint8)
        return data.view(words).reshape(batch, heads, tokens, dims)

    like = rng.choice((1, 1, 2, 7)), rng.choice((1, 3, 32, 33, 80))
    pairs = []
    for _ in range(rng.randint(1, 4)):
        heads, dims = (rng.choice((1, 2, 7)), rng.choice((1, 3, 32, 33))) if rng.random() < 0.4 else like
        pairs.append((part(heads, dims), part(heads, rng.choice((dims, dims, 5)))))
    static = hf_files.static_cache(pairs, tokens + rng.choice((0, 1, 300)))
    value = rng.choice((hf_files.dynamic_cache(pairs), static, pairs, tuple(pairs), {"past_key_values": tuple(pairs)}))
    arrays = {f"layer_{n}.{name}": pair[k] for n, pair in enumerate(pairs) for k, name in enumerate(("key", "value"))}
    return Odd(hf_files.save(folder / "odd.pt", value), arrays, ReadOptions(), whole=False)


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


ENGINES: dict[str, Callable[[Random, Path], Odd]] = {"hf": hf, "llama": llama, "mlx": mlx}
