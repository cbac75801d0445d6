"""Quality gates: of the engine's own logs, as the MNN fork judges them or soundly (docs/gates.md)."""

from .checking.baselines import Baseline
from .checking.cases import RUNTIME_CASES
from .checking.checking import Checked, check
from .checking.gate_file import read_gate_file
from .checking.limits import Limits
from .checking.metric_rows import MetricRows, read_rows
from .checking.verdicts import Gate
from .demo.judging import DemoChecked, DemoLimits, check_demo
from .demo.runs import DemoRun, read_runs
from .logs.parsing import ParsedLogs, parse
from .summary.collecting import collect
from .summary.writing import Round

__all__ = [
    "RUNTIME_CASES",
    "Baseline",
    "Checked",
    "DemoChecked",
    "DemoLimits",
    "DemoRun",
    "Gate",
    "Limits",
    "MetricRows",
    "ParsedLogs",
    "Round",
    "check",
    "check_demo",
    "collect",
    "parse",
    "read_gate_file",
    "read_rows",
    "read_runs",
]
