"""The figures that the MNN fork's report gives for the six cases: its round 6 of 2026-02-21, llama2 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_SOURCE = (
    "the fork's report of its round 6 (exp/h2o_final/out_20260221_140027, 2026-02-21): llama2 on a CPU, 4 threads, "
    "6 of 6 passed. Its lossy ratio is the best row of one layer's plans, its lossless ratio an offline simulation, "
    "its total their product, and its change of speed compares the mean of the rows with the fastest row without "
    "compression"
)


@dataclass(frozen=True, kw_only=True)
class ReferenceCase:
    """A case of that report; speeds in tokens a second, `change` as a share of the baseline. None: not given."""

    lossy: float
    lossless: float
    total: float | None
    decode: float
    best: float | None
    baseline: float
    change: float
    consistent: bool | None


REFERENCE_CASES = {
    "runtime_baseline": ReferenceCase(
        lossy=1.0, lossless=1.0, total=None, decode=4.090, best=4.340, baseline=4.810, change=-0.1497, consistent=True
    ),
    "runtime_probe": ReferenceCase(
        lossy=3.114, lossless=1.401, total=4.363, decode=6.570, best=6.600, baseline=5.440, change=0.2077,
        consistent=True,
    ),
    "runtime_full": ReferenceCase(
        lossy=3.109, lossless=1.401, total=4.356, decode=6.195, best=6.230, baseline=4.790, change=0.2933,
        consistent=True,
    ),
    "runtime_store": ReferenceCase(
        lossy=3.114, lossless=1.401, total=4.363, decode=5.905, best=6.000, baseline=5.010, change=0.1786,
        consistent=True,
    ),
    "llm_demo_full": ReferenceCase(
        lossy=2.849, lossless=1.510, total=4.301, decode=6.025, best=None, baseline=4.963, change=0.2140,
        consistent=None,
    ),
    "llm_demo_store": ReferenceCase(
        lossy=2.903, lossless=1.269, total=3.684, decode=5.701, best=None, baseline=4.938, change=0.1545,
        consistent=None,
    ),
}  # fmt: skip
"""By the names of the suite, in its order."""
