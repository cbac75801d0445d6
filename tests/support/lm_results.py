"""A made-up results document, shaped as `kvmnn.evaluation.evaluating` makes it. Its numbers measure nothing."""

from __future__ import annotations

import math
from typing import Any

BUDGETS = (128, 256, 512)
_FULL_NLL, _FULL_ACCURACY = 2.311, 0.5148
_TOKENS, _BYTES_A_TOKEN = 2048, 12288
_LOSS = {"streaming": 12.0, "l2_fixed:keep_low": 23.0, "l2_fixed:random": 14.0, "h2o_decayed_heads": 12.5}


def row(label: str, policy: str, **more: Any) -> dict[str, Any]:
    """A row in which nothing is measured, but what `more` says."""
    empty: dict[str, Any] = {"label": label, "policy": policy, "options": {}, "budget": None, "keep_ratio": None}
    names = (  # noqa: SIM905
        "preset kind tokens nll perplexity accuracy bits_per_byte deep versus_full seconds model_seconds "
        "policy_seconds ttft_seconds tpot_seconds tokens_per_second cache_bytes_mean cache_bytes_peak "
        "process_peak_bytes tokens_kept lossy_ratio lossless_ratio ratio lossless_dtype as_seed"
    ).split()
    return {**empty, **dict.fromkeys(names), "kind": "LOSSY", "documents": [], **more}


def document() -> dict[str, Any]:
    """Full cache, four series of three budgets, a share by ratio, one preset; traces of three of them."""
    rows = [_scored("full", "full", {}, None, 0.0)]
    for budget in BUDGETS:
        for name, loss in _LOSS.items():
            policy, _, strategy = name.partition(":")
            options = {"strategy": strategy, "recent_ratio": 0.5} if strategy else {"sink": 4}
            label = f"{policy} {budget}" + (f" {strategy}" if strategy else "")
            rows.append(_scored(label, policy, options, budget, loss / budget))
    for share in (0.2, 0.3, 0.4):
        for strategy, loss in (("keep_low", 25.0), ("random", 15.0)):
            options = {"strategy": strategy, "recent_ratio": share}
            label = f"l2_fixed 512 {strategy} recent_ratio={share}"
            rows.append(_scored(label, "l2_fixed", options, 512, loss * (1.3 - share) / 512))
    preset = _scored("h2o_8_32_256", "h2o_tokens", {"sink": 8, "recent": 32}, 256, 0.2)
    preset |= {"preset": "streaming-h2o", "as_seed": {"perplexity": 12.5, "chunk": 256, "tpot_seconds": 0.0012}}
    rows.append(preset)
    return {
        "kvmnn": "0.1.0",
        "model": {"label": "tiny"},
        "settings": {"tokens": _TOKENS, "chunk": 4, "deep_from": 1024, "seed": 0, "threads": 1},
        "documents": [
            {"name": name, "tokens": _TOKENS, "bytes": 6200, "sha256": "0" * 64} for name in ("a.txt", "b.txt")
        ],
        "rows": rows,
        "traces": [_trace("full", None), _trace("streaming 256", 256), _trace("h2o_decayed_heads 256", 256)],
    }


def _scored(label: str, policy: str, options: dict[str, Any], budget: int | None, loss: float) -> dict[str, Any]:
    nll, accuracy = _FULL_NLL + loss, _FULL_ACCURACY - loss / 5
    kept = min(budget or _TOKENS, _TOKENS)
    versus = {"nll": loss, "low": loss * 0.8, "high": loss * 1.25, "accuracy": -loss / 5}
    versus |= {"deep_nll": 2 * loss, "deep_low": 1.7 * loss, "deep_high": 2.2 * loss}
    versus |= {"accuracy_low": -loss / 4, "accuracy_high": -loss / 6}
    documents = [
        {"name": name, "nll": nll + shift, "accuracy": accuracy, "tokens": _TOKENS - 1}
        for name, shift in (("a.txt", 0.1), ("b.txt", -0.1))
    ]
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
        deep={"from": 1024, "tokens": 2048, "nll": nll, "perplexity": math.exp(nll - 0.1), "accuracy": accuracy},
        versus_full=versus if budget else None,
        seconds=2.0,
        model_seconds=1.8,
        policy_seconds=0.09,
        ttft_seconds=0.31,
        tpot_seconds=0.00121,
        tokens_per_second=826.4,
        cache_bytes_mean=kept * _BYTES_A_TOKEN * 0.9,
        cache_bytes_peak=kept * _BYTES_A_TOKEN,
        tokens_kept=[kept] * 6,
        lossy_ratio=_TOKENS / kept,
        lossless_ratio=1.3219,
        ratio=1.3219 * _TOKENS / kept,
        lossless_dtype="fp16",
        documents=documents,
    )


def _trace(label: str, budget: int | None) -> dict[str, Any]:
    steps = list(range(8, _TOKENS + 1, 8))
    kept = []
    for seen in steps:
        positions = list(range(seen))
        if budget is not None and seen > budget:
            heavy = [p for p in range(4, seen - budget // 2) if p % 97 < 9][: budget // 2 - 4] if "h2o" in label else []
            positions = [*range(4), *heavy, *range(seen - budget + 4 + len(heavy), seen)]
        kept.append(positions)
    sizes = [len(positions) * _BYTES_A_TOKEN for positions in kept]
    keep_map = {"layer": 3, "kv_head": 0, "steps": steps, "kept": kept}
    return {"label": label, "document": "a.txt", "step_tokens": steps, "cache_bytes": sizes, "keep_map": keep_map}
