"""Quality gates: of the engine's own logs, as the MNN fork judges them or soundly (docs/gates.md)."""

from .checking.baselines import DecodeBaseline
from .checking.cases import RUNTIME_CASES
from .checking.checking import CaseResult, check
from .checking.gate_file import read_gate_file
from .checking.limits import GateLimits
from .checking.metric_rows import MetricRows, read_metric_rows
from .checking.verdicts import GateResult
from .demo.judging import DemoLimits, DemoResult, check_demo
from .demo.runs import DemoRun, read_demo_runs
from .logs.parsing import ParsedLogs, parse_logs
from .summary.collecting import collect_cases
from .summary.writing import RoundSummary

__all__ = [
    "RUNTIME_CASES",
    "CaseResult",
    "DecodeBaseline",
    "DemoLimits",
    "DemoResult",
    "DemoRun",
    "GateLimits",
    "GateResult",
    "MetricRows",
    "ParsedLogs",
    "RoundSummary",
    "check",
    "check_demo",
    "collect_cases",
    "parse_logs",
    "read_demo_runs",
    "read_gate_file",
    "read_metric_rows",
]
