"""Quality gates on the engine's own logs, as the MNN fork judges them or stricter (docs/gates.md)."""

from .case_inputs import MetricRows, read_metric_rows
from .checker import CaseResult, check
from .demo import DemoLimits, DemoResult, DemoRun, check_demo, read_demo_runs
from .limits import RUNTIME_CASES, GateLimits, read_gate_file
from .logs import ParsedLogs, parse_logs
from .slowdown import DecodeBaseline
from .summary import RoundSummary, collect_cases
from .verdict import GateResult

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
