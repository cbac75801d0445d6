"""Documents that the page reads, and figures of the MNN fork's report for comparison.

The fork's figures are those of its round 6 of 2026-02-21, llama2 on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ..._util.dataclass import dataclass
from ...files.schema import Record
from ...gates.verdict import GateResult, Verdict


@dataclass(frozen=True, kw_only=True)
class CommandRecord(Record):
    """The command that made a document, if the document records it."""

    command: str = ""


@dataclass(frozen=True, kw_only=True)
class CaseVerdict(Record):
    """A case in ``gate.json`` or ``llm_demo_report.json``; reports of the fork have no gates."""

    case: str = ""
    mode: str = ""
    overall_pass: bool
    verdict: Verdict | None = None
    failure: str = ""
    strict: bool = False
    stamp: str = field(default="", compare=False)
    gates: tuple[GateResult, ...] = ()
    hard_checks: tuple[GateResult, ...] = ()
    diagnoses: tuple[str, ...] = ()

    @property
    def all_checks(self) -> tuple[GateResult, ...]:
        """All gates and checks of the case."""
        return (*self.gates, *self.hard_checks)


@dataclass(frozen=True, kw_only=True)
class RoundRow(Record):
    """A case in ``summary.json``, under the fork's names; fields that the fork's suite lacks are None."""

    suite: str
    case: str
    mode: str = ""
    overall_pass: bool
    failure_reason: str = ""
    lossy_best: float | None = None
    lossless_selected_value: float | None = None
    decode_gate_tps: float | None = None
    decode_best: float | None = None
    decode_baseline: float | None = None
    decode_drop_ratio: float | None = None
    decode_drop_target: float | None = None
    candidate_decode_tps_avg: float | None = None
    baseline_decode_tps_avg: float | None = None
    candidate_lossy_ratio_avg: float | None = None
    candidate_lossless_ratio_avg: float | None = None
    candidate_runtime_total_ratio_avg: float | None = None
    kv_content_consistency_pass: bool | None = None
    prompts: str = ""


@dataclass(frozen=True, kw_only=True)
class GateRound(Record):
    """``summary.json``."""

    generated_at: str = ""
    overall_pass: bool
    total_cases: int
    rows: tuple[RoundRow, ...]


@dataclass(frozen=True, kw_only=True)
class HistoryCase(Record):
    """A case in a line of ``history.jsonl``."""

    case: str
    passed: bool = field(metadata={"key": "pass"})
    reason: str = ""
    lossy: float | None
    lossless: float | None
    decode_tps: float | None
    drop: float | None


@dataclass(frozen=True, kw_only=True)
class HistoryRound(Record):
    """A line of ``history.jsonl``."""

    generated_at: str
    overall_pass: bool
    cases: tuple[HistoryCase, ...]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunInfo(Record):
    """``run.json``: model, machine and settings of a suite."""

    kvmnn_gate_run: int
    model: str
    model_sha256: str
    kvmnn: str
    python: str
    machine: str
    processors: int | None
    settings: Mapping[str, object]
    cases: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PartSizeStats(Record):
    """Sizes of K or V, or of both; `stored_*` are None without ``--encode``, `limit_ratio` with ``--no-limits``."""

    raw_bytes: int
    simulated_bytes: int
    simulated_ratio: float
    limit_ratio: float | None = None
    stored_bytes: int | None = None
    stored_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSizeStats(PartSizeStats):
    """Sizes of a layer, together and for K and V."""

    tokens: int
    k: PartSizeStats
    v: PartSizeStats


@dataclass(frozen=True, kw_only=True)
class SizeReportRecord(Record):
    """Sizes of a measurement by layer."""

    found_layers: int
    overall: PartSizeStats
    layers: Mapping[str, LayerSizeStats]
    meaning: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReferenceDocument(Record):
    """The document of the reference's tool (``measure --out-json``)."""

    schema_version: int
    dump_dir: object = None
    codec: str
    raw_bytes: int
    compressed_bytes: int
    k_lossless_ratio: float
    v_lossless_ratio: float
    weighted_lossless_ratio: float


@dataclass(frozen=True, kw_only=True)
class MeasurementRecord(Record):
    """Result of ``kvmnn measure``; `breakdown` only with ``--json``."""

    label: str = ""
    evaluation: ReferenceDocument
    breakdown: SizeReportRecord | None = None


REFERENCE_SOURCE = (
    "the fork's report of its round 6 (exp/h2o_final/out_20260221_140027, 2026-02-21): llama2 on a CPU, 4 threads, "
    "6 of 6 passed. Its lossy ratio is the best row of one layer's plans, its lossless ratio an offline simulation, "
    "its total their product, and its change of speed compares the mean of the rows with the fastest row without "
    "compression"
)


@dataclass(frozen=True, kw_only=True)
class ReferenceCase:
    """A case of that report; speeds in tokens per second, `change` relative to the baseline; None if missing."""

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
