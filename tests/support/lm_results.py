"""A made-up `EvaluationResult`, shaped as `kvmnn.evaluation.evaluate` makes it. Its numbers measure nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kvmnn.evaluation import EvaluationResult
from kvmnn.evaluation.result import BootstrapInfo, EvaluationSettingsInfo
from kvmnn.reports.records import (
    DocumentInfo,
    DocumentRow,
    DocumentTrace,
    EvaluatedModelInfo,
    FrameSizeStats,
    FullCacheDifference,
    KeepMap,
    ProjectStats,
    QualityStats,
    ResultRow,
)

BUDGETS = (128, 256, 512)
_FULL_NLL, _FULL_ACCURACY = 2.311, 0.5148
_TOKENS, _BYTES_A_TOKEN = 2048, 12288
_LOSS = {"streaming": 12.0, "l2_fixed:keep_low": 23.0, "l2_fixed:random": 14.0, "h2o_decayed_heads": 12.5}


def row(label: str, policy: str, **more: Any) -> ResultRow:
    """A row in which nothing is measured, but what `more` says."""
    return ResultRow(label=label, policy=policy, **{"kind": "LOSSY", **more})


def results(rows: Iterable[ResultRow], **more: Any) -> EvaluationResult:
    """These rows of no documents, but what `more` says."""
    empty: dict[str, Any] = {"kvmnn": "0.1.0", "model": _model(), "settings": _settings(), "documents": ()}
    return EvaluationResult(**{**empty, "rows": tuple(rows), **more})


def document() -> EvaluationResult:
    """Full cache, four series of three budgets, a share by ratio, one preset; traces of three of them."""
    rows = [_scored("full", "full", {}, None, 0.0)]
    for budget in BUDGETS:
        for name, loss in _LOSS.items():
            policy, _, strategy = name.partition(":")
            options: dict[str, Any] = {"strategy": strategy, "recent_ratio": 0.5} if strategy else {"sink": 4}
            label = f"{policy} {budget}" + (f" {strategy}" if strategy else "")
            rows.append(_scored(label, policy, options, budget, loss / budget))
    for share in (0.2, 0.3, 0.4):
        for strategy, loss in (("keep_low", 25.0), ("random", 15.0)):
            options = {"strategy": strategy, "recent_ratio": share}
            label = f"l2_fixed 512 {strategy} recent_ratio={share}"
            rows.append(_scored(label, "l2_fixed", options, 512, loss * (1.3 - share) / 512))
    numbers = ProjectStats(
        evaluation="E2",
        label="h2o_8_32_256",
        perplexity=12.5,
        chunk=256,
        tpot_seconds=0.0012,
        new_tokens=64,
    )
    options = {"sink": 8, "recent": 32}
    rows.append(
        _scored("h2o_8_32_256", "h2o_tokens", options, 256, 0.2, preset="streaming-h2o", project_stats=numbers),
    )
    return results(
        rows,
        documents=tuple(
            DocumentInfo(name=name, tokens=_TOKENS, bytes=6200, sha256="0" * 64) for name in ("a.txt", "b.txt")
        ),
        traces=(_trace("full", None), _trace("streaming 256", 256), _trace("h2o_decayed_heads 256", 256)),
    )


def _model() -> EvaluatedModelInfo:
    return EvaluatedModelInfo(
        path="models/tiny",
        name="tiny",
        sha256="0" * 64,
        layers=6,
        kv_heads=4,
        query_heads=4,
        head_dim=64,
        cache_dtype="float32",
        vocab=2048,
        max_positions=2048,
    )


def _settings() -> EvaluationSettingsInfo:
    return EvaluationSettingsInfo(
        tokens=_TOKENS,
        chunk=4,
        deep_from=1024,
        jobs=1,
        numbers_version=1,
        bootstrap=BootstrapInfo(resamples=10_000, level=0.95, over="documents"),
        process_peak="",
        timing_prompt_piece=128,
        timing_decoded=32,
    )


def _scored(
    label: str, policy: str, options: dict[str, Any], budget: int | None, loss: float, **more: Any
) -> ResultRow:
    nll, accuracy = _FULL_NLL + loss, _FULL_ACCURACY - loss / 5
    kept = min(budget or _TOKENS, _TOKENS)
    versus = FullCacheDifference(
        documents=2,
        level=0.95,
        nll=loss,
        low=loss * 0.8,
        high=loss * 1.25,
        accuracy=-loss / 5,
        deep_nll=2 * loss,
        deep_low=1.7 * loss,
        deep_high=2.2 * loss,
        accuracy_low=-loss / 4,
        accuracy_high=-loss / 6,
    )
    return row(
        label,
        policy,
        options=options,
        budget=budget,
        kind="LOSSY" if budget else "LOSSLESS",
        tokens=2 * (_TOKENS - 1),
        nll=nll,
        perplexity=math.exp(nll),
        accuracy=accuracy,
        bits_per_byte=nll / math.log(2) / 3.04,
        deep=QualityStats(begin=1024, tokens=2048, nll=nll, perplexity=math.exp(nll - 0.1), accuracy=accuracy),
        versus_full=versus if budget else None,
        seconds=2.0,
        model_seconds=1.8,
        policy_seconds=0.09,
        ttft_seconds=0.31,
        tpot_seconds=0.00121,
        attention_seconds=0.00043,
        tokens_per_second=826.4,
        cache_bytes_mean=kept * _BYTES_A_TOKEN * 0.9,
        cache_bytes_peak=kept * _BYTES_A_TOKEN,
        tokens_kept=(kept,) * 6,
        lossy_ratio=_TOKENS / kept,
        lossless_ratio=1.3219,
        ratio=1.3219 * _TOKENS / kept,
        lossless_dtype="fp16",
        documents=(_document("a.txt", nll + 0.1, accuracy, kept), _document("b.txt", nll - 0.1, accuracy, kept)),
        **more,
    )


def _document(name: str, nll: float, accuracy: float, kept: int) -> DocumentRow:
    return DocumentRow(
        name=name,
        tokens=_TOKENS - 1,
        nll=nll,
        perplexity=math.exp(nll),
        accuracy=accuracy,
        bits_per_byte=nll / math.log(2) / 3.04,
        deep=QualityStats(tokens=1024, nll=nll, perplexity=math.exp(nll), accuracy=accuracy),
        tokens_kept=(kept,) * 6,
        seconds=1.0,
        model_seconds=0.9,
        policy_seconds=0.045,
        cache_bytes_mean=kept * _BYTES_A_TOKEN * 0.9,
        cache_bytes_peak=kept * _BYTES_A_TOKEN,
        frames=FrameSizeStats(dtype="fp16", rounded=True, full_bytes=4000, kept_bytes=2000, frame_bytes=1500),
    )


def _trace(label: str, budget: int | None) -> DocumentTrace:
    steps = tuple(range(8, _TOKENS + 1, 8))
    kept = []
    for seen in steps:
        positions = list(range(seen))
        if budget is not None and seen > budget:
            heavy = [p for p in range(4, seen - budget // 2) if p % 97 < 9][: budget // 2 - 4] if "h2o" in label else []
            positions = [*range(4), *heavy, *range(seen - budget + 4 + len(heavy), seen)]
        kept.append(tuple(positions))
    return DocumentTrace(
        label=label,
        document="a.txt",
        step_tokens=steps,
        cache_bytes=tuple(len(positions) * _BYTES_A_TOKEN for positions in kept),
        keep_map=KeepMap(layer=3, kv_head=0, steps=steps, kept=tuple(kept)),
    )
