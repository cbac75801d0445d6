"""evaluate_with_compression, against the rows of the presets that measure the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")

from kvmnn.errors import KvmnnError
from kvmnn.evaluation import EvaluationSettings, evaluate, evaluate_with_compression, expand_preset
from kvmnn.lm import DecoderSession, Tokenizer

MODEL = Path(__file__).parents[2] / "fixtures" / "lm"
TEXT = MODEL / "texts" / "calendar.py.txt"


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        (
            "knorm-ratio:keep_ratios=0.8,prune_after=40,no_baseline",
            {"keep_ratio": 0.8, "prune_after": 40, "max_tokens": 96},
        ),
        (
            "knorm-fixed:fix_kv_sizes=32,strategies=keep_low,keep_ratios=0.5,no_recent_only,no_baseline",
            {"keep_ratio": 0.5, "fix_kv_size": 32, "max_tokens": 96},
        ),
    ],
)
def test_evaluate_with_compression_equals_the_preset(preset: str, options: dict[str, float]) -> None:
    settings = EvaluationSettings(tokens=96, chunk=96, timing=False, threads=1)
    row = evaluate(MODEL, TEXT, expand_preset(preset), settings=settings, jobs=0).rows[-1]
    found = evaluate_with_compression(MODEL, None, TEXT.read_text(), **options)  # type: ignore[arg-type]
    assert row.project_stats is not None
    assert found["perplexity"] == pytest.approx(row.project_stats.perplexity, rel=1e-5)
    assert found["accuracy"] == row.project_stats.accuracy
    assert found["tokens"] == 95
    assert found["lossy_ratio"] > 1.2


def test_evaluate_with_compression_takes_sessions_and_refuses_bad_texts() -> None:
    session, tokenizer = DecoderSession.open(MODEL, threads=1), Tokenizer.open_for_model(MODEL)
    uncut = evaluate_with_compression(session, tokenizer, "def f(x):\n    return x", keep_ratio=0.5)
    assert uncut["lossy_ratio"] == 1
    for arguments, said in (
        ((session, None, "x y"), "a session has no tokenizer"),
        ((session, tokenizer, ""), "has 0 tokens"),
        ((session, tokenizer, "word " * 9000), "expected max_tokens"),
    ):
        with pytest.raises(KvmnnError, match=said):
            evaluate_with_compression(*arguments)
    with pytest.raises(KvmnnError, match="strategy"):
        evaluate_with_compression(session, tokenizer, "x y", fix_kv_size=8, strategy="keep_all")
