"""One document by the definition of a preset's project (`kvmnn.evaluation.setup.presets` says what E1 and E2 are)."""

from __future__ import annotations

import math
import time

from ...lm.documents import Ids
from ...lm.runner import Runner
from ..setup.configurations import ProjectDefinition
from .cells import ProjectCell
from .scoring import compute_nll


def measure_by_definition(
    runner: Runner, ids: Ids, definition: ProjectDefinition, skipped_layers: tuple[int, ...]
) -> ProjectCell:
    """Sums and times of one document.

    Parameters
    ----------
    runner
        Freshly reset.
    ids
        int64 ``[token]``, without bos.
    skipped_layers
        Layers that the policy never cuts; the final cache size is that of the first other layer.
    """
    if definition.evaluation == "E1":
        return _measure_by_token(runner, ids, skipped_layers)
    return _measure_by_chunk(runner, ids, definition.chunk)


def _measure_by_token(runner: Runner, ids: Ids, skipped_layers: tuple[int, ...]) -> ProjectCell:
    nll, hits, seconds = 0.0, 0, []
    for index in range(len(ids) - 1):
        start_time = time.perf_counter()
        logits = runner.step(ids[index : index + 1])
        seconds.append(time.perf_counter() - start_time)
        token_nll, hit = compute_nll(logits, ids[index + 1 : index + 2])
        nll += float(token_nll[0])
        hits += int(hit[0])
    sizes = runner.cache.tokens
    layer = next((layer for layer in range(len(sizes)) if layer not in skipped_layers), 0)
    later_seconds = seconds[1:]
    return ProjectCell(
        weight=len(seconds),
        weighted_nll=nll,
        hits=hits,
        scored_tokens=len(seconds),
        text_tokens=len(ids),
        seconds=sum(seconds),
        ttft_seconds=seconds[0] if seconds else None,
        tpot_seconds=sum(later_seconds) / len(later_seconds) if later_seconds else None,
        final_cache_tokens=sizes[layer],
    )


def _measure_by_chunk(runner: Runner, ids: Ids, chunk: int) -> ProjectCell:
    weighted_nll, weight, num_scored, hits, chunks_left_out = 0.0, 0, 0, 0, 0
    start_time = time.perf_counter()
    for begin in range(0, len(ids), chunk):
        chunk_ids = ids[begin : begin + chunk]
        logits = runner.step(chunk_ids, end_chunk=True)
        nll, hit = compute_nll(logits[:-1], chunk_ids[1:])
        loss = float(nll.mean()) if len(nll) else math.nan
        if not math.isfinite(loss):
            chunks_left_out += 1
            continue
        weighted_nll += loss * len(chunk_ids)
        weight += len(chunk_ids)
        num_scored += len(nll)
        hits += int(hit.sum())
    return ProjectCell(
        weight=weight,
        weighted_nll=weighted_nll,
        hits=hits,
        scored_tokens=num_scored,
        text_tokens=len(ids),
        chunks_left_out=chunks_left_out,
        seconds=time.perf_counter() - start_time,
        final_cache_tokens=max(runner.cache.tokens),
    )
