"""Needles in texts: the depths at which the number is hidden."""

from __future__ import annotations

import numpy as np
from repository import FIXTURES

from kvmnn.gates.suite.settings import RunSettings
from kvmnn.gates.suite.workloads import build_needle_workloads
from kvmnn.lm.documents import Document
from kvmnn.lm.tokenizer import Tokenizer

TOKENS = 400


def test_needles_are_at_three_depths_of_each_text() -> None:
    tokenizer = Tokenizer.open_for_model(FIXTURES / "lm")
    settings = RunSettings(prompts_per_bucket=2, generate=16, quality_tokens=TOKENS, quality_prompt=TOKENS // 2)
    filler = tokenizer.encode("a")[0]
    texts = [Document(name=name, ids=np.full(TOKENS, filler), nbytes=1, sha256="0" * 64) for name in ("one", "two")]
    works = build_needle_workloads(texts, tokenizer, settings, None)
    assert [work.bucket for work in works] == ["10%", "50%", "90%"] * 2
    for work, depth in zip(works, (0.1, 0.5, 0.9) * 2, strict=True):
        context, question = work.turns
        hidden = [place for place, token in enumerate(context) if token != filler]
        length = len(context) - (hidden[-1] + 1 - hidden[0])
        assert abs(hidden[0] - depth * length) <= 2
        secret = tokenizer.decode(work.answer)
        assert len(secret) == 6 and secret.isdigit() and secret in tokenizer.decode(context)
        assert tokenizer.decode(question).endswith("number is ") and secret not in tokenizer.decode(question)
        assert len(context) + len(question) + 2 * work.new_tokens <= TOKENS
