"""llama.cpp: its sessions are read according to their types, and it continues from a restored file.

The models are made here, with random weights. Without llama-cpp-python these tests are skipped: it is compiled when it
is installed, which takes half an hour, so it is no part of the extra `peers` (make test-peers LLAMA=llama-cpp-python).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_engine import TYPES, Engine

import kvmnn
from kvmnn.formats import EngineOptions, PackedOptions, ReadOptions

gguf = pytest.importorskip("gguf")

LAYERS, WIDTH, HEADS, KV_HEADS, DIMS, WORDS = 2, 64, 4, 2, 32, 256


def made_model(path: Path, architecture: str = "llama") -> Path:
    rng = np.random.default_rng(1)

    def weights(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIMS)
    writer.add_value_length(DIMS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("none")
    writer.add_rope_dimension_count(DIMS)
    if architecture == "gemma2":
        writer.add_sliding_window(16)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    writer.add_tensor("token_embd.weight", weights(WORDS, WIDTH))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    norms = ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if architecture == "gemma2" else ()))
    shapes = {
        "attn_q": (HEADS * DIMS, WIDTH),
        "attn_k": (KV_HEADS * DIMS, WIDTH),
        "attn_v": (KV_HEADS * DIMS, WIDTH),
        "attn_output": (WIDTH, HEADS * DIMS),
        **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH)),
    }
    for layer in range(LAYERS):
        for name in norms:
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drawn(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, WORDS, count).tolist()


def restored(run: Any, path: Path) -> Path:
    """The same file from its frames, byte for byte."""
    run("encode", path, "-o", f"{path}.frames/", "-q")
    back = path.with_name(f"back.{path.name}")
    run("decode", f"{path}.frames", "-o", back, "-q")
    assert back.read_bytes() == path.read_bytes()
    return back


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("seq", [None, 0])
def test_restored_session_continues_with_equal_logits(
    tmp_path: Path, run: Any, model: Path, kind: str, seq: int | None
) -> None:
    ids = drawn(60)
    with Engine(model, kind) as engine:
        engine.feed(ids[:50])
        path = engine.save(tmp_path / "x.session", ids[:50], seq)
        expected = engine.feed(ids[50:], 50)
    with Engine(model, kind) as engine:
        assert engine.load(restored(run, path), seq) == ids[:50]
        assert np.array_equal(engine.feed(ids[50:], 50), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("flash", [False, True])
def test_restored_session_keeps_gaps_and_sliding_windows(
    tmp_path: Path, run: Any, architecture: str, flash: bool
) -> None:
    ids, model = drawn(60), made_model(tmp_path / "m.gguf", architecture)
    with Engine(model, flash=flash) as engine:
        engine.feed(ids[:50])
        if architecture == "llama":
            engine.erase(10, 20)
        path = engine.save(tmp_path / "x.session", ids[:50])
        expected = engine.feed(ids[50:], 50)
    source = kvmnn.open(path, ReadOptions(packed=PackedOptions(model=str(model))))
    cache = source.engine_cache
    assert cache is not None
    assert cache.position_runs == (((0, 10), (20, 30)) if architecture == "llama" else ((0, 50),))
    assert cache.details["caches"] == (2 if architecture == "gemma2" else 1)
    assert cache.details["v_transposed"] is not flash
    found = []
    for file in (path, restored(run, path)):
        with Engine(model, flash=flash) as engine:
            engine.load(file)
            found.append(engine.feed(ids[50:], 50))
    assert np.array_equal(*found)
    # The engine that went on had its cells in another order, and so added up in another.
    assert np.allclose(found[0], expected, atol=0.02)


def test_open_every_type_is_close_to_f32(tmp_path: Path, model: Path) -> None:
    """The same text in f32 and in each type; a block contains 32 values of one token."""
    ids, options = drawn(40), ReadOptions(packed=PackedOptions(model=str(model)))
    found = {}
    for kind in TYPES:
        with Engine(model, kind) as engine:
            engine.feed(ids)
            found[kind] = kvmnn.open(engine.save(tmp_path / f"{kind}.session", ids), options)
    exact = found["f32"]["layer_0.value"].to_numpy()
    for kind, most in (("q8_0", 0.01), ("q5_0", 0.08), ("q5_1", 0.08), ("q4_0", 0.2), ("q4_1", 0.2), ("iq4_nl", 0.2)):
        values = found[kind]["layer_0.value"].to_numpy()
        assert values.shape == exact.shape
        assert np.abs(values - exact).max() < most * np.abs(exact).max()


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.startswith(("q", "iq"))])
def test_raw_blocks_dequantize_as_gguf(tmp_path: Path, model: Path, kind: str) -> None:
    with Engine(model, kind) as engine:
        engine.feed(drawn(30))
        path = engine.save(tmp_path / "x.session", drawn(30))
    said = PackedOptions(model=str(model))
    blocks = kvmnn.open(path, ReadOptions(packed=said, engine=EngineOptions(raw_blocks=True)))["layer_1.key"].to_numpy()
    rows = blocks.reshape(len(blocks), -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.upper()])
    found = kvmnn.open(path, ReadOptions(packed=said))["layer_1.key"].to_numpy()
    assert np.array_equal(found.transpose(1, 0, 2).reshape(len(rows), -1), expected)


@pytest.mark.parametrize("unified", [False, True])
def test_restored_session_keeps_several_sequences(tmp_path: Path, run: Any, model: Path, unified: bool) -> None:
    one, two = drawn(20), drawn(12, 2)
    with Engine(model, seqs=2, unified=unified) as engine:
        engine.feed(one[:15], seq=0)
        engine.feed(two[:10], seq=1)
        path = engine.save(tmp_path / "x.session", one)
        expected = engine.feed(one[15:], 15, 0), engine.feed(two[10:], 10, 1)
    with Engine(model, seqs=2, unified=unified) as engine:
        engine.load(restored(run, path))
        assert np.array_equal(engine.feed(one[15:], 15, 0), expected[0])
        assert np.array_equal(engine.feed(two[10:], 10, 1), expected[1])
    said = json.loads(run("inspect", path, "--json").out)["inputs"][0]["engine_cache"]
    assert said["streams"] == (1 if unified else 2)
    assert said["tokens"] == (25 if unified else 15)


def test_changed_keys_change_logits(tmp_path: Path, run: Any, model: Path) -> None:
    """The control: other K give other logits."""
    ids = drawn(60)
    with Engine(model) as engine:
        engine.feed(ids[:50])
        path = engine.save(tmp_path / "x.session", ids[:50])
        expected = engine.feed(ids[50:], 50)
    data = bytearray(path.read_bytes())
    data[-400:] = struct.pack("<200e", *([3.0] * 200))
    path.write_bytes(bytes(data))
    with Engine(model) as engine:
        engine.load(restored(run, path))
        assert not np.array_equal(engine.feed(ids[50:], 50), expected)
