"""The shipped model step by step: bit-equal to the original graph, quiet, with arguments checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError, ModelError
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

LM = FIXTURES / "lm"
LOWEST = np.finfo(np.float32).min


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    tokenizer = Tokenizer.open_for_model(LM / "model.onnx")
    text = sorted((LM / "texts").iterdir())[0].read_text(encoding="utf-8")
    return np.concatenate([[tokenizer.bos], tokenizer.encode(text)])[:160].astype(np.int64)


@pytest.fixture(scope="module")
def plain() -> DecoderSession:
    return DecoderSession.open(LM, bias=False)


@pytest.fixture(scope="module")
def session() -> DecoderSession:
    return DecoderSession.open(LM, attentions=True, cache=False)


def test_session_interface_of_the_shipped_model(session: DecoderSession, plain: DecoderSession) -> None:
    interface = session.interface
    assert (interface.layers, interface.kv_heads, interface.head_dim, interface.vocab_size) == (6, 4, 64, 2048)
    assert (interface.dtype, interface.max_positions, interface.has_positions) == (np.float32, 4096, True)
    assert session.query_heads == 4 and not interface.is_merged
    assert (session.has_attentions, session.has_bias) == (True, True)
    assert (plain.has_attentions, plain.has_bias) == (False, False)


def test_session_bias_and_attentions_change_no_bit(
    session: DecoderSession, plain: DecoderSession, ids: np.ndarray
) -> None:
    past, plain_past = session.create_empty_past(), plain.create_empty_past()
    for start, stop in ((0, 100), (100, 101), (101, 108), (108, 109)):
        at = np.arange(start, stop)
        step, expected = session.run_step(ids[at], at, past), plain.run_step(ids[at], at, plain_past)
        np.testing.assert_array_equal(step.logits, expected.logits)
        past, plain_past = step.present_pairs, expected.present_pairs
        for got, wanted in zip(past, plain_past, strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert step.logits.dtype == np.float32 and step.logits.shape == (1, 2048) and step.seconds > 0


def test_session_attentions_are_probabilities(session: DecoderSession, ids: np.ndarray) -> None:
    past = session.run_step(ids[:50], np.arange(50), session.create_empty_past()).present_pairs
    step = session.run_step(ids[50:60], np.arange(50, 60), past)
    assert step.attentions is not None and len(step.attentions) == 6
    for probabilities in step.attentions:
        assert probabilities.shape == (4, 10, 60) and probabilities.dtype == np.float32
        np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
        assert not probabilities[:, np.triu(np.ones((10, 60), bool), 51)].any()


@pytest.mark.parametrize("factor", [1.0, 1e6])
@pytest.mark.parametrize("tokens", [1, 8])
def test_session_masked_slot_equals_removed_slot(
    session: DecoderSession, ids: np.ndarray, tokens: int, factor: float
) -> None:
    past = session.run_step(ids[:120], np.arange(120), session.create_empty_past()).present_pairs
    dead = np.r_[0, 5:40, 119]
    alive = np.setdiff1d(np.arange(120), dead)
    removed = [(keys[:, :, alive].copy(), values[:, :, alive].copy()) for keys, values in past]
    at = np.arange(120, 120 + tokens)
    expected = session.run_step(ids[at], at, removed)
    for keys, _ in past:
        keys[:, :, dead] *= factor
    bias = np.zeros((1, 1, 1, 120 + tokens), np.float32)
    bias[..., dead] = LOWEST
    step = session.run_step(ids[at], at, past, [bias] * 6)
    np.testing.assert_allclose(step.logits, expected.logits, atol=3e-5)
    for got, wanted in zip(step.attentions or [], expected.attentions or [], strict=True):
        assert not got[..., dead].any()
        np.testing.assert_allclose(np.delete(got, dead, -1), wanted, atol=5e-6)


def test_session_masks_may_differ_between_layers_and_heads(session: DecoderSession, ids: np.ndarray) -> None:
    """Heads with sets of their own: what is dead in one head is alive in another."""
    past = session.run_step(ids[:60], np.arange(60), session.create_empty_past()).present_pairs
    sets = [[np.sort((np.arange(30) * 7 + 3 * head + layer) % 60) for head in range(4)] for layer in range(6)]
    removed = [
        tuple(np.stack([array[0, head, slots] for head, slots in enumerate(heads)])[None] for array in pair)
        for pair, heads in zip(past, sets, strict=True)
    ]
    biases = []
    for heads in sets:
        bias = np.full((1, 4, 1, 61), LOWEST, np.float32)
        for head, slots in enumerate(heads):
            bias[0, head, 0, [*slots, 60]] = 0
        biases.append(bias)
    expected = session.run_step(ids[60:61], np.array([60]), removed)
    step = session.run_step(ids[60:61], np.array([60]), past, biases)
    np.testing.assert_allclose(step.logits, expected.logits, atol=3e-5)


def test_session_present_is_writable_and_read_once(session: DecoderSession, ids: np.ndarray) -> None:
    step = session.run_step(ids[:20], np.arange(20), session.create_empty_past())
    before = session.run_step(ids[20:21], np.array([20]), step.present_pairs)
    copies = [(keys.copy(), values.copy()) for keys, values in step.present_pairs]
    for keys, values in step.present_pairs:
        keys[...], values[...] = 0, 0
    after = session.run_step(ids[20:21], np.array([20]), copies)
    np.testing.assert_array_equal(before.logits, after.logits)


def test_session_threads_change_no_bit(plain: DecoderSession, ids: np.ndarray) -> None:
    two = DecoderSession.open(LM, bias=False, threads=2)
    runs = [two.run_step(ids, np.arange(160), two.create_empty_past()).logits for _ in range(2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_allclose(
        runs[0], plain.run_step(ids, np.arange(160), plain.create_empty_past()).logits, atol=1e-4
    )


def test_session_invalid_arguments_are_refused(session: DecoderSession, plain: DecoderSession, ids: np.ndarray) -> None:
    empty, none = session.create_empty_past(), np.zeros(0, np.int64)
    for tokens, positions in ((none, none), (ids[:2], np.arange(3)), (ids[None, :2], np.arange(2)[None])):
        with pytest.raises(KvmnnError, match="expected tokens and their positions, one row each, not empty"):
            session.run_step(tokens, positions, empty)
    with pytest.raises(KvmnnError, match="expected the past of 6 layers, found 5"):
        session.run_step(ids[:2], np.arange(2), empty[1:])
    with pytest.raises(KvmnnError, match="no bias can be added to the scores inside this graph"):
        plain.run_step(ids[:2], np.arange(2), empty, [np.zeros((1, 1, 1, 2), np.float32)] * 6)


def test_session_onnxruntime_error_is_one_line(
    session: DecoderSession, ids: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = [(keys.astype(np.float16), values) for keys, values in session.create_empty_past()]
    with pytest.raises(ModelError, match=r"model\.onnx: onnxruntime failed: .*float16") as caught:
        session.run_step(ids[:2], np.arange(2), wrong)
    with pytest.raises(ModelError, match=r"onnxruntime failed: .*bounds"):
        session.run_step(np.array([99_999]), np.arange(1), session.create_empty_past())
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


# Where models lie


@pytest.mark.parametrize(
    "name", ["model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "onnx/model.onnx", "own.onnx"]
)
def test_session_open_finds_model_in_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    tiny = Tiny(merged="merged" in name)
    path = tiny.save(tmp_path / name)
    if name != "own.onnx":
        (path.parent / "decoder_model.onnx").touch()
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "max_position_embeddings": 256}))
    session = DecoderSession.open(tmp_path)
    assert session.interface.label == str(path)
    assert (session.query_heads, session.interface.max_positions) == (4, 256)


def test_session_input_names_from_genai_config(tmp_path: Path) -> None:
    tiny = Tiny(past="kv_in_{i}_{kind}", present="kv_out_{i}_{kind}")
    tiny.save(tmp_path / "decoder.onnx")
    inputs = {"past_key_names": "kv_in_%d_key", "past_value_names": "kv_in_%d_value"}
    outputs = {"present_key_names": "kv_out_%d_key", "present_value_names": "kv_out_%d_value"}
    decoder = {"filename": "decoder.onnx", "inputs": inputs, "outputs": outputs, "num_attention_heads": 4}
    settings = {"model": {"decoder": decoder, "context_length": 256, "vocab_size": 48}}
    (tmp_path / "genai_config.json").write_text(json.dumps(settings))
    for path in (tmp_path, tmp_path / "decoder.onnx"):
        session = DecoderSession.open(path, attentions=True)
        assert session.has_bias and session.interface.past_inputs[1] == ("kv_in_1_key", "kv_in_1_value")
        assert (session.query_heads, session.interface.max_positions) == (4, 256)
        assert len(session.run_step(np.arange(3), np.arange(3), session.create_empty_past()).present_pairs) == 2


def test_session_max_positions_of_text_config(tmp_path: Path) -> None:
    Tiny().save(tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 99}}))
    assert DecoderSession.open(tmp_path, cache=False).interface.max_positions == 99


def test_session_constructor_names_open() -> None:
    with pytest.raises(TypeError, match=r"DecoderSession\.open\(path\), found a str"):
        DecoderSession("model/")  # type: ignore[arg-type]
