"""Decoders in all forms that exporters write compute what the same decoder in numpy computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_decoders import Numpy, Tiny

from kvmnn.errors import AttentionNotExposedError
from kvmnn.lm.session import DecoderSession

FORMS = {
    "written": Tiny(),
    "written, no groups": Tiny(groups=1),
    "written, one head": Tiny(kv_heads=1, groups=4),
    "written, own outputs": Tiny(attentions=True),
    "written, sinks": Tiny(sinks=True),
    "rank 3": Tiny(form="rank3"),
    "fp16": Tiny(half=True),
    "fp16, softmax in fp32": Tiny(half=True, softmax32=True),
    "fp16, sinks, softmax in fp32": Tiny(half=True, softmax32=True, sinks=True),
    "standard operator": Tiny(form="standard"),
    "standard operator, fp16": Tiny(form="standard", half=True),
    "standard operator with past": Tiny(form="standard-past"),
    "GroupQueryAttention": Tiny(form="gqa"),
    "MultiHeadAttention": Tiny(form="mha", groups=1),
    "merged": Tiny(merged=True),
    "merged, optimum's mask": Tiny(merged=True, mask="first"),
    "optimum's mask": Tiny(mask="first"),
    "torch's mask": Tiny(mask="whole", layers=3),
    "other inputs": Tiny(extra=("num_logits_to_keep", "cache_position")),
    "one layer": Tiny(layers=1),
    "eleven layers": Tiny(layers=11, kv_heads=1, head_dim=4),
}
IDS, POSITIONS = np.arange(3, 48, 5), np.arange(9)


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.param


def close(got: np.ndarray, expected: np.ndarray, tiny: Tiny) -> None:
    tolerance = 2e-3 if tiny.half else 5e-6
    np.testing.assert_allclose(got, expected, atol=tolerance * max(1.0, np.abs(expected).max()), rtol=0)


def test_decoder_form_equals_numpy_and_masking_equals_removal(tiny: Tiny, tmp_path: Path) -> None:
    session = DecoderSession.open(tiny.save(tmp_path / "model.onnx"), attentions=True, cache=False)
    assert session.has_attentions and session.has_bias
    assert session.query_heads == tiny.heads
    assert (session.interface.layers, session.interface.kv_heads) == (tiny.layers, tiny.kv_heads)
    assert (session.interface.head_dim, session.interface.dtype) == (tiny.head_dim, tiny.dtype)
    reference = Numpy(tiny)

    past, expected_past = session.create_empty_past(), reference.empty()
    for fed in (slice(0, 6), slice(6, 7), slice(7, 9)):
        step = session.run_step(IDS[fed], POSITIONS[fed], past)
        logits, expected_past = reference.step(IDS[fed], POSITIONS[fed], expected_past)
        close(step.logits, logits, tiny)
        for got, expected in zip(step.attentions or [], reference.attentions, strict=True):
            assert got.dtype == np.float32
            close(got, expected, tiny)
        for (keys, values), (expected_keys, expected_values) in zip(step.present_pairs, expected_past, strict=True):
            assert keys.dtype == tiny.dtype and keys.shape == expected_keys.shape
            close(keys, expected_keys, tiny)
            close(values, expected_values, tiny)
        past = step.present_pairs

    alive, new = np.array([0, 2, 3, 5, 6, 8]), np.array([9, 10])
    cut = [(keys[:, :, alive], values[:, :, alive]) for keys, values in expected_past]
    logits, _ = reference.step(IDS[:2], new, cut)
    removed = session.run_step(IDS[:2], new, [(k[:, :, alive].copy(), v[:, :, alive].copy()) for k, v in past])
    close(removed.logits, logits, tiny)
    bias = np.zeros((1, tiny.heads, 1, 11), np.float32)
    bias[..., [1, 4, 7]] = np.finfo(np.float32).min
    for given in (bias, bias[:, :1]):
        masked = session.run_step(IDS[:2], new, past, [given] * tiny.layers)
        close(masked.logits, logits, tiny)
        for got, expected in zip(masked.attentions or [], reference.attentions, strict=True):
            assert not got[..., [1, 4, 7]].any()
            close(got[..., [*alive, 9, 10]], expected, tiny)


def test_decoder_without_attentions_or_bias_keeps_its_graph(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model.onnx")
    session = DecoderSession.open(path, bias=False)
    assert not session.has_attentions and not session.has_bias
    plain = session.run_step(IDS, POSITIONS, session.create_empty_past())
    assert plain.attentions is None
    biased = DecoderSession.open(path, cache=False).run_step(IDS, POSITIONS, session.create_empty_past())
    if tiny.form in ("written", "rank3") and not tiny.half:
        np.testing.assert_array_equal(plain.logits, biased.logits)
    close(plain.logits, biased.logits, tiny)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_decoder_bias_may_differ_between_heads(tmp_path: Path) -> None:
    tiny = Tiny(layers=1)
    session = DecoderSession.open(tiny.save(tmp_path / "model.onnx"), attentions=True, cache=False)
    past = session.run_step(IDS, POSITIONS, session.create_empty_past()).present_pairs
    bias = np.zeros((1, tiny.heads, 1, 10), np.float32)
    bias[0, np.arange(4), 0, np.arange(4)] = np.finfo(np.float32).min
    bias[0, :, 0, 9] = 1.5
    free, step = (
        session.run_step(IDS[:1], POSITIONS[:1] + 9, past),
        session.run_step(IDS[:1], POSITIONS[:1] + 9, past, [bias]),
    )
    assert free.attentions is not None and step.attentions is not None
    powers = free.attentions[0] * np.exp(bias[0].astype(np.float64))
    np.testing.assert_allclose(step.attentions[0], powers / powers.sum(-1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("huge", [1e4, 1e30])
def test_decoder_masked_slot_may_hold_any_finite_value(huge: float, tmp_path: Path) -> None:
    session = DecoderSession.open(Tiny().save(tmp_path / "model.onnx"), cache=False)
    past = session.run_step(IDS, POSITIONS, session.create_empty_past()).present_pairs
    bias = np.zeros((1, 1, 1, 10), np.float32)
    bias[..., 4] = np.finfo(np.float32).min
    expected = session.run_step(IDS[:1], POSITIONS[:1] + 9, past, [bias] * 2)
    for keys, _ in past:
        keys[:, :, 4] = huge
    step = session.run_step(IDS[:1], POSITIONS[:1] + 9, past, [bias] * 2)
    np.testing.assert_array_equal(step.logits, expected.logits)


def test_decoder_without_positions_has_no_bias(tmp_path: Path) -> None:
    session = DecoderSession.open(Tiny(positions=False).save(tmp_path / "model.onnx"), attentions=True, cache=False)
    assert session.has_attentions and not session.has_bias and not session.interface.has_positions
    assert session.probe_unequal_lengths() == "none"


def test_decoder_hidden_attention_is_named(tmp_path: Path) -> None:
    path = Tiny(form="closed").save(tmp_path / "model.onnx")
    with pytest.raises(AttentionNotExposedError, match=r"com\.microsoft::SparseAttention \(2\); export with eager"):
        DecoderSession.open(path, attentions=True)


def test_decoder_router_softmax_is_not_attention(tmp_path: Path) -> None:
    """Every tiny decoder has a router after each layer; its sums over three experts never reach the caller."""
    session = DecoderSession.open(Tiny().save(tmp_path / "model.onnx"), attentions=True, cache=False)
    step = session.run_step(IDS, POSITIONS, session.create_empty_past())
    assert [array.shape for array in step.attentions or []] == [(4, 9, 9)] * 2


def test_decoder_unused_positions_are_ignored(tmp_path: Path) -> None:
    """Such a graph would count the tokens of a cut cache again, whatever positions it gets."""
    path = Tiny(positions=False, extra=("position_ids",)).save(tmp_path / "model.onnx")
    session = DecoderSession.open(path, cache=False)
    assert not session.interface.has_positions and not session.has_bias


def test_decoder_group_query_attention_with_given_positions(tmp_path: Path) -> None:
    """Refused without positions; with them, cutting and masking agree, and steps agree with one step of all tokens."""
    session = DecoderSession.open(
        Tiny(form="gqa", rotary="given", head_dim=16).save(tmp_path / "model.onnx"), attentions=True, cache=False
    )
    assert session.interface.has_positions and session.has_bias
    whole = session.run_step(IDS, POSITIONS, session.create_empty_past())
    past = session.run_step(IDS[:8], POSITIONS[:8], session.create_empty_past()).present_pairs
    step = session.run_step(IDS[8:], POSITIONS[8:], past)
    np.testing.assert_allclose(step.logits, whole.logits[8:], atol=1e-5)
    alive = np.array([0, 2, 3, 7])
    cut = [(keys[:, :, alive].copy(), values[:, :, alive].copy()) for keys, values in past]
    bias = np.zeros((1, 1, 1, 9), np.float32)
    bias[..., [1, 4, 5, 6]] = np.finfo(np.float32).min
    removed, masked = (
        session.run_step(IDS[8:], POSITIONS[8:], cut),
        session.run_step(IDS[8:], POSITIONS[8:], past, [bias] * 2),
    )
    np.testing.assert_allclose(masked.logits, removed.logits, atol=1e-5)
    counted_anew = session.run_step(IDS[8:], np.array([4]), cut)
    assert np.abs(counted_anew.logits - removed.logits).max() > 0.1
