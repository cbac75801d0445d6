"""How sure a difference over a handful of documents is: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE_LEVEL = 0.95

MIN_DOCUMENTS_FOR_INTERVAL = 10
"""Documents from which on an interval may be cited. With fewer the bootstrap's is far too narrow: tried on normal
differences, one of 95 % holds the true mean in 50 % of cases with 2 documents (it is their range), in 83 % with 5, in
90 % with 10, in 94 % with 30 (tests/evaluation/test_statistics.py)."""

_MAX_DRAWS_PER_BATCH = 1 << 20


def compute_paired_interval(
    differences: Sequence[float],
    weights: Sequence[float],
    *,
    seed: int,
    resamples: int = NUM_RESAMPLES,
    level: float = CONFIDENCE_LEVEL,
) -> tuple[float, float | None, float | None]:
    """The mean of differences by document, and the bounds of its bootstrap interval.

    Documents are drawn with replacement, each with its pair; the bounds are percentiles of the weighted means of
    `resamples` draws. The same seed draws the same documents whatever is compared, so intervals of several
    configurations belong to the same draws.
    """
    values, sizes = np.asarray(differences, np.float64), np.asarray(weights, np.float64)
    mean = float((values * sizes).sum() / sizes.sum())
    count = len(values)
    if count < 2:
        return mean, None, None
    generator = np.random.default_rng(seed)
    means = np.empty(resamples, np.float64)
    step = max(1, _MAX_DRAWS_PER_BATCH // count)
    for begin in range(0, resamples, step):
        sample_indices = generator.integers(0, count, size=(min(step, resamples - begin), count))
        means[begin : begin + step] = (values * sizes)[sample_indices].sum(axis=1) / sizes[sample_indices].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return mean, float(low), float(high)
