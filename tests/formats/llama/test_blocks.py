"""Numbers of blocks at every SIMD level against plain float32: all types, all scales, heads that lie across blocks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import llama_files
import numpy as np
import pytest
from llama_files import BLOCK_BYTES, BLOCKS, Shape

import kvmnn
from kvmnn import _simd
from kvmnn.formats import PackedOptions, ReadOptions
from kvmnn.formats.llama import _blocks
from kvmnn.formats.llama.state import GGML_TYPES, dequantize
from kvmnn.packed.inference import PackedGeometry

KINDS = {kind.name: kind for kind in GGML_TYPES.values() if kind.is_block_quantized}


def bits(values: np.ndarray) -> np.ndarray:
    """Of float32, with one NaN for all."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@pytest.mark.parametrize("name", BLOCKS)
def test_dequantize_ggml_blocks_equal_the_model(level: str, name: str) -> None:
    assert _blocks.get_level() == min(level, "avx2", key=_simd.LEVEL_NAMES.index)  # the most it has loops of
    rng = Random(name)
    made = [[llama_files.block(rng, name) for _ in range(7)] for _ in range(5)]
    blocks = np.frombuffer(b"".join(data for row in made for data, _ in row), np.uint8).reshape(5, 7, -1)
    found = np.empty((5, 7 * 32), np.float32)
    dequantize(KINDS[name], blocks, found)
    assert np.array_equal(bits(found), bits(np.array([[v for _, each in row for v in each] for row in made])))


def test_dequantize_every_fp16_scale(level: str) -> None:
    """All 65,536 halves: subnormal ones, infinities, no numbers."""
    blocks = np.zeros((1 << 16, 1, 34), np.uint8)
    blocks[:, 0, :2] = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    blocks[:, 0, 2:] = np.random.default_rng(1).integers(0, 256, (1 << 16, 32), np.uint8)
    found = np.empty((1 << 16, 32), np.float32)
    dequantize(KINDS["q8_0"], blocks, found)
    with np.errstate(invalid="ignore"):
        scales = np.arange(1 << 16, dtype="<u2").view("<f2").astype(np.float32)
        expected = blocks[:, 0, 2:].view(np.int8).astype(np.float32) * scales[:, None]
    assert np.array_equal(bits(found), bits(expected))


@pytest.mark.parametrize(("heads", "dims"), [(2, 16), (4, 8), (2, 48), (4, 24), (8, 4), (2, 80)])
@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_dequantize_heads_across_blocks(tmp_path: Path, heads: int, dims: int, name: str, monkeypatch) -> None:
    monkeypatch.setattr("kvmnn.formats.llama.cache_selection._VALUES_PER_BATCH", 200)
    shape = Shape(layers=1, heads=heads, dims=dims, value_dims=dims, k_type=name, v_type=name)
    data, ((made,),) = llama_files.state(Random(dims), shape, [13])
    (tmp_path / "x.session").write_bytes(data)
    options = ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=heads)))
    source = kvmnn.open(tmp_path / "x.session", options)
    for part, expected in (("key", made.keys[0]), ("value", made.values[0])):
        for limit in (0, 4 * dims, 4 * dims * 5, 4 * dims * 20):
            words = np.concatenate(list(source[f"layer_0.{part}"].iter_chunks(limit))).view("<f4")
            assert np.array_equal(words.reshape(expected.shape), expected)


def test_dequantize_mismatched_buffers_are_refused() -> None:
    out = np.empty((2, 64), np.float32)
    for kind, shape in ((0, (2, 2, 20)), (6, (2, 2, 18)), (-1, (2, 2, 18)), (0, (3, 2, 18)), (0, (2, 3, 18))):
        with pytest.raises(ValueError, match=r"are not of type|other numbers"):
            _blocks.dequantize(kind, np.zeros(shape, np.uint8), out)
    with pytest.raises(ValueError, match="do not lie together"):
        _blocks.dequantize(0, np.zeros((2, 4, 18), np.uint8)[:, ::2], out)
    assert {name: KINDS[name].nbytes for name in BLOCKS} == BLOCK_BYTES
    _blocks.dequantize(0, np.zeros((2, 0, 18), np.uint8), np.empty((2, 0), np.float32))
