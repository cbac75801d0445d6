"""One document measured as the seeds did (`kvmnn.evaluation.setup.presets` says what E1 and E2 are)."""

from __future__ import annotations

import math
import time
from typing import Any

from ...lm.documents import Ids
from ...lm.runner import Runner
from ..setup.configurations import SeedMethod
from .scoring import negative_log_probabilities


def measure_as_seed(runner: Runner, ids: Ids, method: SeedMethod, skipped: tuple[int, ...]) -> dict[str, Any]:
    """Sums and times of one document.

    Parameters
    ----------
    runner
        Freshly reset.
    ids
        int64 ``[token]``, without bos.
    skipped
        Layers that the policy never cuts; the final cache size is that of the first other layer.
    """
    return _token_by_token(runner, ids, skipped) if method.evaluation == "E1" else _in_chunks(runner, ids, method.chunk)


def _token_by_token(runner: Runner, ids: Ids, skipped: tuple[int, ...]) -> dict[str, Any]:
    nll, hits, seconds = 0.0, 0, []
    for index in range(len(ids) - 1):
        began = time.perf_counter()
        logits = runner.feed(ids[index : index + 1])
        seconds.append(time.perf_counter() - began)
        found, hit = negative_log_probabilities(logits, ids[index + 1 : index + 2])
        nll += float(found[0])
        hits += int(hit[0])
    sizes = runner.cache.tokens
    layer = next((layer for layer in range(len(sizes)) if layer not in skipped), 0)
    rest = seconds[1:]
    return {
        "weight": len(seconds),
        "weighted_nll": nll,
        "hits": hits,
        "scored_tokens": len(seconds),
        "text_tokens": len(ids),
        "seconds": sum(seconds),
        "ttft_seconds": seconds[0] if seconds else None,
        "tpot_seconds": sum(rest) / len(rest) if rest else None,
        "final_cache_tokens": sizes[layer],
    }


def _in_chunks(runner: Runner, ids: Ids, chunk: int) -> dict[str, Any]:
    weighted, weight, scored, hits, left_out = 0.0, 0, 0, 0, 0
    began = time.perf_counter()
    for begin in range(0, len(ids), chunk):
        some = ids[begin : begin + chunk]
        logits = runner.feed(some, end_chunk=True)
        nll, hit = negative_log_probabilities(logits[:-1], some[1:])
        loss = float(nll.mean()) if len(nll) else math.nan
        if not math.isfinite(loss):
            left_out += 1
            continue
        weighted += loss * len(some)
        weight += len(some)
        scored += len(nll)
        hits += int(hit.sum())
    return {
        "weight": weight,
        "weighted_nll": weighted,
        "hits": hits,
        "scored_tokens": scored,
        "text_tokens": len(ids),
        "chunks_left_out": left_out,
        "seconds": time.perf_counter() - began,
        "final_cache_tokens": max(runner.cache.tokens),
    }
