"""How ``.gguf`` models rotate each layer: fields, factor tensors, and unsupported scalings."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from rope_model import plain_frequencies

from kvmnn.errors import SourceError
from kvmnn.formats.llama.gguf import read_gguf_layer_ropes
from kvmnn.formats.mnn.rope import read_model_rope

Value = int | float | str


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write(path: Path, architecture: str, tensors: dict[str, np.ndarray] | None = None, **fields: Value) -> str:
    """A model: fields with their dots as two underscores, a vocabulary, and float32 tensors."""
    tensors = tensors or {}
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) + 1, len(fields) + 2)
    data += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    for name, value in fields.items():
        data += text(f"{architecture}.{name.replace('__', '.')}")
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        else:
            data += struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)
    data += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    infos, content = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0), bytes(32)
    for name, values in tensors.items():
        infos += text(name) + struct.pack("<IQIQ", 1, values.size, 0, len(content))
        content += values.astype("<f4").tobytes() + bytes(-4 * values.size % 32)
    data += infos
    path.write_bytes(data + bytes(-len(data) % 32) + content)
    return str(path)


def radians(path: str, layers: int = 1, length: int = 1000) -> list[np.ndarray]:
    ropes = read_gguf_layer_ropes(path, layers, 64, length)
    assert ropes is not None
    return [rope.turns * (2 * np.pi / 2.0**64) for rope in ropes if rope is not None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_gguf_rope_theta_dims_and_pairing(path: Path) -> None:
    model = write(path, "llama", rope__freq_base=500000.0, rope__dimension_count=64)
    (rope,) = read_gguf_layer_ropes(model, 1, 64, 10) or [None]
    assert rope is not None and rope.label == "theta=500000,dims=64,pairing=interleaved"
    found = read_model_rope(model, 1, 64, 10, is_k_reordered=True)
    assert found is not None and found.layers[0] is not None and found.layers[0].pairing == "half"
    model = write(path, "qwen2", rope__freq_base=1e6, rope__dimension_count=32)
    (rope,) = read_gguf_layer_ropes(model, 1, 64, 10) or [None]
    assert rope is not None and (rope.dims, rope.pairing) == (32, "half")
    write(path, "llama", rope__dimension_count=32)
    with pytest.raises(SourceError, match="rotates a part of each head"):
        read_model_rope(model, 1, 64, 10, is_k_reordered=True)
    assert read_gguf_layer_ropes(write(path, "gpt2", block_count=2), 1, 64, 10) is None


def test_gguf_rope_factor_tensor_divides_frequencies(path: Path) -> None:
    """Llama 3 has such a tensor instead of a scaling in its configuration."""
    factors = np.linspace(1, 8, 32).astype(np.float32)
    model = write(path, "llama", {"rope_freqs.weight": factors}, rope__freq_base=500000.0, rope__dimension_count=64)
    np.testing.assert_allclose(radians(model)[0], plain_frequencies(5e5, 64) / factors, rtol=1e-7)
    short = {"rope_factors_short.weight": factors}
    fields = {"rope__freq_base": 10000.0, "rope__dimension_count": 64, "rope__scaling__original_context_length": 4096}
    model = write(path, "phi3", short, **fields)
    np.testing.assert_allclose(radians(model, length=4096)[0], plain_frequencies(1e4, 64) / factors, rtol=1e-7)
    with pytest.raises(SourceError, match="above 4096 tokens is rotated by their length"):
        radians(model, length=4097)


def test_gguf_rope_gemma3_windows_have_other_theta(path: Path) -> None:
    sizes = {"block_count": 12, "embedding_length": 256, "attention__head_count": 4, "attention__head_count_kv": 1}
    model = write(path, "gemma3", rope__freq_base=1e6, attention__sliding_window=512, attention__key_length=64, **sizes)
    found = radians(model, 12)
    for layer, frequencies in enumerate(found):
        theta = 1e6 if layer % 6 == 5 else 1e4
        np.testing.assert_allclose(frequencies, plain_frequencies(theta, 64), rtol=1e-7)


def test_gguf_rope_linear_and_yarn_scaling(path: Path) -> None:
    fields = {
        "rope__freq_base": 10000.0,
        "rope__dimension_count": 64,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 4.0,
    }
    np.testing.assert_allclose(radians(write(path, "llama", **fields))[0], plain_frequencies(1e4, 64) / 4, rtol=1e-7)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 4096}
    found = radians(write(path, "qwen2", **fields | yarn))[0]
    np.testing.assert_allclose(found[[0, -1]], plain_frequencies(1e4, 64)[[0, -1]] / [1, 4], rtol=1e-7)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("llama", {"rope__scaling__type": "odd"}, "its scaling of the rotation is unknown"),
        ("smollm3", {}, "layers of the architecture 'smollm3' are rotated in different ways"),
        ("newone", {"attention__sliding_window": 512}, "layers of the architecture 'newone'"),
        ("llama", {"rope__dimension_count": 128}, "128 elements of a head are rotated, the cache has heads of 64"),
        ("llama", {"rope__freq_base": -1.0}, "theta is -1.0"),
    ],
)
def test_gguf_rope_unknown_scaling_is_refused(path: Path, architecture, fields, message) -> None:
    model = write(path, architecture, **{"rope__freq_base": 10000.0, "rope__dimension_count": 64} | fields)
    with pytest.raises(SourceError, match=message):
        read_gguf_layer_ropes(model, 1, 64, 10)


@pytest.mark.parametrize("factors", [np.ones(31), np.zeros(32), np.full(32, np.nan)])
def test_gguf_rope_invalid_factors_are_refused(path: Path, factors: np.ndarray) -> None:
    model = write(path, "llama", {"rope_freqs.weight": factors}, rope__freq_base=10000.0, rope__dimension_count=64)
    with pytest.raises(SourceError, match=r"rope_freqs\.weight: expected"):
        read_gguf_layer_ropes(model, 1, 64, 10)


@pytest.mark.slow
def test_gguf_rope_damaged_model_is_refused(path: Path) -> None:
    model = write(path, "llama", {"rope_freqs.weight": np.ones(32)}, rope__freq_base=10000.0, rope__dimension_count=64)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError):
            read_gguf_layer_ropes(model, 1, 64, 10)
    for place in range(4, len(data) - 160):
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        try:
            read_gguf_layer_ropes(model, 1, 64, 10)
        except SourceError as error:
            assert len(str(error)) < 400
