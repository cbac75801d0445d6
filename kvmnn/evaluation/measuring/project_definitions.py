"""One document by the definition of a preset's project (`kvmnn.evaluation.setup.presets` says what E1 and E2 are)."""

from __future__ import annotations

import math
import time

from ...lm.documents import Ids
from ...lm.runner import Runner
from ..setup.configurations import ProjectDefinition
from .cells import ProjectCell
from .scoring import negative_log_probabilities


def measure_by_definition(
    runner: Runner, ids: Ids, definition: ProjectDefinition, skipped: tuple[int, ...]
) -> ProjectCell:
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
    if definition.evaluation == "E1":
        return _token_by_token(runner, ids, skipped)
    return _in_chunks(runner, ids, definition.chunk)


def _token_by_token(runner: Runner, ids: Ids, skipped: tuple[int, ...]) -> ProjectCell:
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
    return ProjectCell(
        weight=len(seconds),
        weighted_nll=nll,
        hits=hits,
        scored_tokens=len(seconds),
        text_tokens=len(ids),
        seconds=sum(seconds),
        ttft_seconds=seconds[0] if seconds else None,
        tpot_seconds=sum(rest) / len(rest) if rest else None,
        final_cache_tokens=sizes[layer],
    )


def _in_chunks(runner: Runner, ids: Ids, chunk: int) -> ProjectCell:
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
    return ProjectCell(
        weight=weight,
        weighted_nll=weighted,
        hits=hits,
        scored_tokens=scored,
        text_tokens=len(ids),
        chunks_left_out=left_out,
        seconds=time.perf_counter() - began,
        final_cache_tokens=max(runner.cache.tokens),
    )
