"""Of layers with windows, bytes and ratios count the tokens that these still attend to, of the full cache as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

import tiny_models

from kvmnn.evaluation import EvaluationSettings, evaluate, evaluate_with_compression
from kvmnn.evaluation.result import EvaluationResult
from kvmnn.lm import DecoderSession, Tokenizer, import_model
from kvmnn.lm.documents import Document
from kvmnn.lm.windows import count_outside, list_windows

WINDOW, TOKENS, HEADS, DIM = 12, 60, 2, 16
TOKEN_BYTES = 2 * HEADS * DIM * 2
"""Of K and V of a layer in fp16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers: the first and the third attend to 12 tokens."""
    folder = tmp_path_factory.mktemp("gemma")
    tiny_models.write_checkpoint(folder / "checkpoint", tiny_models.MODELS["gemma3"])
    (folder / "checkpoint" / "tokenizer.json").write_text("{}")
    import_model(folder / "checkpoint", folder / "model")
    return folder / "model"


def run(model: Path, policies: list[str], codecs: list[str] | None = None) -> EvaluationResult:
    ids = np.random.default_rng(4).integers(0, 40, TOKENS + 1)
    document = Document(name="a", ids=ids, nbytes=200, sha256="0" * 64, begins_with_bos=False, requested_tokens=TOKENS)
    settings = EvaluationSettings(tokens=TOKENS, chunk=4, timing=False)
    return evaluate(model, document, policies, codecs=codecs or [], settings=settings, jobs=0)


def test_rows_count_tokens_in_windows(model: Path) -> None:
    assert DecoderSession.open(model).interface.windows == {0: WINDOW, 2: WINDOW}
    result = run(model, ["streaming:sink=4,budget=30", "recent_only:budget=12", "streaming:sink=4,budget=12"])
    full, wide, window, narrow = result.rows
    full_tokens = 2 * WINDOW + 2 * TOKENS
    assert (full.full_bytes, full.kept_bytes, full.lossy_ratio) == (full_tokens * TOKEN_BYTES,) * 2 + (1,)
    # 26 latest tokens and 4 first ones, of which layers with windows attend to the 12 latest alone
    assert wide.kept_bytes == (2 * WINDOW + 2 * 30) * TOKEN_BYTES and wide.lossy_ratio == pytest.approx(144 / 84)
    assert window.kept_bytes == 4 * WINDOW * TOKEN_BYTES and window.lossy_ratio == 3
    assert narrow.kept_bytes == (2 * 8 + 2 * 12) * TOKEN_BYTES
    assert full.bytes_per_token == full_tokens * TOKEN_BYTES / TOKENS
    assert "2 of 4 layers attend to the latest 12 tokens alone: of these layers only such tokens count" in " ".join(
        str(result).split()
    )
    document = result.to_dict()["model"]
    assert (document["windowed_layers"], document["window"]) == (2, WINDOW)


def test_rows_of_quantized_caches_count_tokens_in_windows(model: Path) -> None:
    codec = "kivi:k=4,v=4,group=4,recent=0"
    result = run(model, ["streaming:sink=4,budget=30", "h2o_decayed_heads:budget=30"], [codec])
    full, *rows = result.rows
    plain = next(row for row in rows if row.policy == "full")
    assert plain.quantized_bits is not None
    assert plain.full_bytes == full.full_bytes
    assert plain.kept_bytes == pytest.approx(full.full_bytes * plain.quantized_bits / 16)
    for row in (row for row in rows if row is not plain):
        # groups of four tokens, of which the policy or the window has cut some, still have their scales
        bits = row.kept_bytes * 8 / (2 * HEADS * DIM * (2 * WINDOW + 2 * 30))
        assert plain.quantized_bits <= bits < 1.2 * plain.quantized_bits or "h2o" in row.label
        assert row.kept_bytes < plain.kept_bytes


def test_evaluate_with_compression_counts_tokens_in_windows(model: Path) -> None:
    class Letters(Tokenizer):
        """Every letter is a token, as the model has few."""

        def __init__(self) -> None:
            pass

        def encode(self, text: str) -> list[int]:  # type: ignore[override]
            return [ord(letter) % 40 for letter in text]

    found = evaluate_with_compression(
        DecoderSession.open(model), Letters(), "abcdefghij" * 6, fix_kv_size=30, skip_layers=()
    )
    # of 59 tokens that are fed 30 stay in each layer, the latest among them
    assert found["lossy_ratio"] == pytest.approx((2 * WINDOW + 2 * 59) / (2 * WINDOW + 2 * 30))


def test_list_windows_of_settings_without_any() -> None:
    assert list_windows({}, 2, "x") == [None, None]
    assert list_windows({"sliding_window": 8, "use_sliding_window": False}, 2, "x") == [None, None]
    assert list_windows({"sliding_window": 8, "model_type": "gemma3_text"}, 7, "x") == [8] * 5 + [None, 8]


def test_count_outside_of_heads_apart() -> None:
    positions = np.array([[0, 1, 8, 9], [0, 7, 8, 9]])
    assert count_outside(positions, 10, 3).tolist() == [2, 1]
    assert count_outside(positions[0], 10, None).tolist() == [0]
