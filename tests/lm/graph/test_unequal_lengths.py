"""Layers of different lengths: probed on every graph, refused where results would be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES
from tiny_decoders import Numpy, Tiny

from kvmnn.errors import ModelError
from kvmnn.lm.session import DecoderSession

IDS, POSITIONS = np.arange(3, 48, 4), np.arange(12)
SHIPPED = FIXTURES / "lm" / "model.onnx"


def opened(tiny: Tiny, folder: Path) -> DecoderSession:
    return DecoderSession.open(tiny.save(folder / "model.onnx"), bias=False)


def test_unequal_lengths_shipped_model_supports_chunks() -> None:
    session = DecoderSession.open(SHIPPED, bias=False)
    assert session.probe_unequal_lengths() == "chunks" and session.can_chunk_unequal_lengths()


@pytest.mark.parametrize(
    ("tiny", "expected"),
    [
        (Tiny(), "chunks"),
        (Tiny(layers=1, mask="first"), "chunks"),
        (Tiny(half=True), "chunks"),
        (Tiny(form="standard-past"), "chunks"),
        (Tiny(form="mha", groups=1), "chunks"),
        (Tiny(merged=True), "chunks"),
        (Tiny(mask="first"), "single"),
        (Tiny(mask="first", layers=5), "single"),
        (Tiny(mask="first", merged=True), "single"),
        (Tiny(mask="whole"), "none"),
        (Tiny(form="gqa"), "none"),
        (Tiny(positions=False), "none"),
    ],
)
def test_probe_unequal_lengths_classifies_graphs(tiny: Tiny, expected: str, tmp_path: Path) -> None:
    session = opened(tiny, tmp_path)
    assert session.probe_unequal_lengths() == expected
    assert session.can_chunk_unequal_lengths() == (expected == "chunks")


@pytest.mark.parametrize("longer", [0, 1])
def test_unequal_lengths_chunks_equal_numpy(longer: int, tmp_path: Path) -> None:
    tiny = Tiny()
    session, reference = opened(tiny, tmp_path), Numpy(tiny)
    past = session.run_step(IDS[:8], POSITIONS[:8], session.create_empty_past()).present_pairs
    _, expected = reference.step(IDS[:8], POSITIONS[:8], reference.empty())
    past[1 - longer] = tuple(array[:, :, [1, 4, 6]].copy() for array in past[1 - longer])
    expected[1 - longer] = tuple(array[:, :, [1, 4, 6]] for array in expected[1 - longer])
    step = session.run_step(IDS[8:], POSITIONS[8:], past)
    logits, _ = reference.step(IDS[8:], POSITIONS[8:], expected)
    np.testing.assert_allclose(step.logits, logits, atol=5e-6)


def test_unequal_lengths_optimum_mask_is_refused(tmp_path: Path) -> None:
    """What is refused is really wrong, without an error of onnxruntime; one token at a time is right."""
    tiny = Tiny(mask="first")
    session, reference = opened(tiny, tmp_path), Numpy(tiny)
    past = session.run_step(IDS[:8], POSITIONS[:8], session.create_empty_past()).present_pairs
    _, expected_past = reference.step(IDS[:8], POSITIONS[:8], reference.empty())
    past[1] = tuple(array[:, :, [1, 4, 6]].copy() for array in past[1])
    expected_past[1] = tuple(array[:, :, [1, 4, 6]] for array in expected_past[1])
    expected, _ = reference.step(IDS[8:], POSITIONS[8:], expected_past)

    with pytest.raises(ModelError, match="one token at a time while its layers hold different numbers of tokens"):
        session.run_step(IDS[8:10], POSITIONS[8:10], past)
    wrong = session._decoder.run_step(IDS[8:], POSITIONS[8:], past)
    assert np.abs(wrong.logits - expected).max() > 0.1
    for place in range(8, 12):
        step = session.run_step(IDS[place : place + 1], POSITIONS[place : place + 1], past)
        np.testing.assert_allclose(step.logits[0], expected[place - 8], atol=5e-6)
        past = step.present_pairs


@pytest.mark.parametrize("tiny", [Tiny(mask="whole"), Tiny(form="gqa")])
def test_unequal_lengths_unsupported_graph_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    session = opened(tiny, tmp_path)
    past = session.run_step(IDS[:8], POSITIONS[:8], session.create_empty_past()).present_pairs
    past[1] = tuple(array[:, :, 2:].copy() for array in past[1])
    with pytest.raises(ModelError, match="its layers must hold equally many tokens; evict in all layers alike"):
        session.run_step(IDS[8:9], POSITIONS[8:9], past)


def test_unequal_lengths_are_not_probed_while_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(Tiny(mask="whole"), tmp_path)
    monkeypatch.setattr("kvmnn.lm.session.try_unequal_lengths", lambda decoder: pytest.fail("tried"))
    past = session.run_step(IDS[:8], POSITIONS[:8], session.create_empty_past()).present_pairs
    session.run_step(IDS[8:], POSITIONS[8:], past)
