"""Loss of decode speed: ratio of means with its interval, and the source of the baseline."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Literal, get_args

from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..errors import SourceError
from ..files.atomic import wrap_os_errors
from ..files.schema import loads_strict, read_bounded
from .case_inputs import MetricRows
from .logs import get_number
from .verdict import FAIL, NOT_MEASURED, PASS, UNCLEAR, GateResult, Verdict, format_distinct

_STUDENT_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, of 1 to 10 degrees of freedom; beyond, 1.96 + 2.5 / n is within 0.02."""


@dataclass(frozen=True, kw_only=True)
class DecodeSlowdown:
    """Decode speeds without and with compression, in tokens per second."""

    #: Number of pairs.
    num_pairs: int
    #: Mean speeds without and with compression.
    baseline_speed: float
    candidate_speed: float
    #: The 95 % interval of `drop_ratio`; None with one pair. Source: the ratio estimator of survey sampling (Cochran,
    #: Sampling Techniques, chapter 6), its error from ``after - ratio * before`` of each pair, Student's t with one
    #: degree of freedom less than pairs.
    interval_low: float | None
    interval_high: float | None

    @property
    def drop_ratio(self) -> float:
        """1 - after / before: at most 1, negative if compression is faster."""
        return 1.0 - self.candidate_speed / self.baseline_speed

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[float, float]]) -> DecodeSlowdown | None:
        """Compute the slowdown of speeds (without, with); None without positive speeds without compression."""
        if not pairs or not sum(baseline_speed for baseline_speed, _ in pairs) > 0:
            return None
        baseline_speed, candidate_speed = (fmean(pair[side] for pair in pairs) for side in (0, 1))
        interval_low = interval_high = None
        degrees_of_freedom = len(pairs) - 1
        if degrees_of_freedom:
            t_value = (
                _STUDENT_T_95[degrees_of_freedom - 1]
                if degrees_of_freedom <= len(_STUDENT_T_95)
                else 1.96 + 2.5 / degrees_of_freedom
            )
            ratio = candidate_speed / baseline_speed
            squared_residuals = sum((candidate - ratio * baseline) ** 2 for baseline, candidate in pairs)
            half_width = t_value * math.sqrt(squared_residuals / degrees_of_freedom / len(pairs)) / baseline_speed
            interval_low, interval_high = 1.0 - ratio - half_width, min(1.0, 1.0 - ratio + half_width)
        return cls(
            num_pairs=len(pairs),
            baseline_speed=baseline_speed,
            candidate_speed=candidate_speed,
            interval_low=interval_low,
            interval_high=interval_high,
        )

    def judge(self, limit: float) -> Verdict:
        """Return pass or fail if the whole interval agrees, otherwise unclear, which is not a pass."""
        if limit >= 1.0:  # no speed is below 0
            return PASS
        if self.interval_low is None or self.interval_high is None:
            return UNCLEAR
        return PASS if self.interval_high <= limit else FAIL if self.interval_low > limit else UNCLEAR

    def __str__(self) -> str:
        if self.interval_low is None or self.interval_high is None:
            return "one pair, no interval"
        return f"95 % {self.interval_low:+.1%} to {self.interval_high:+.1%}"


def build_slowdown_gate(
    slowdown: DecodeSlowdown | None, limit: float, pair_description: str, missing_reason: str = "no run has a speed"
) -> GateResult:
    """Build the gate of a slowdown."""
    name, limit_text = "decode drop", f"<= {limit:.2%}"
    if slowdown is None and limit >= 1.0:
        return GateResult(name=name, verdict=PASS, limit=limit_text, why=f"no speed is below 0; {missing_reason}")
    if slowdown is None:
        return GateResult(name=name, verdict=NOT_MEASURED, limit=limit_text, why=missing_reason)
    verdict = slowdown.judge(limit)
    why = (
        f"{slowdown.candidate_speed:.2f} of {slowdown.baseline_speed:.2f} tok/s, "
        f"{pluralize(slowdown.num_pairs, 'pair')} {pair_description}; {slowdown}"
    )
    if verdict == UNCLEAR:
        why += (
            "; the limit lies in it: more runs make it narrower"
            if slowdown.interval_low is not None
            else ": more runs are needed"
        )
    drop_text, max_drop_text = format_distinct(100 * slowdown.drop_ratio, 100 * limit, 2)
    sign = "" if drop_text.startswith("-") else "+"
    return GateResult(name=name, verdict=verdict, value=f"{sign}{drop_text}%", limit=f"<= {max_drop_text}%", why=why)


BaselineMode = Literal["fixed", "rolling", "same_batch"]
BASELINE_MODES: tuple[BaselineMode, ...] = get_args(BaselineMode)

ROLLING_WINDOW_RUNS, MIN_ROLLING_SAMPLES = 8, 3
"""Number of earlier runs that count, and the minimum number of them."""

MAX_HISTORY_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DecodeBaseline:
    """A speed in tokens per second, its source, and the number of values behind it."""

    speed: float
    source: str
    num_samples: int
    warnings: tuple[str, ...] = ()


def make_fixed_baseline(speed: float) -> DecodeBaseline:
    """Make a baseline of a constant speed."""
    return DecodeBaseline(speed=speed, source="fixed", num_samples=1)


def find_same_batch_baseline(rows: MetricRows, fallback_speed: float) -> DecodeBaseline:
    """Return the fastest row of a run without compression; `fallback_speed` if no row has a speed.

    The MNN fork compares the fastest row here with the mean of the candidate's rows, so its gate is stricter than its
    limit states.
    """
    best_speed = max(row.decode_speed for row in rows.rows)
    if best_speed > 0:
        return DecodeBaseline(speed=best_speed, source="same_batch", num_samples=1)
    warning = f"[WARN] same_batch baseline decode is invalid ({best_speed:g}); fallback to fixed {fallback_speed:g}"
    return DecodeBaseline(speed=fallback_speed, source="same_batch_fallback_fixed", num_samples=0, warnings=(warning,))


def compute_rolling_baseline(
    history: str | os.PathLike[str],
    key: str,
    fallback_speed: float,
    *,
    window: int = ROLLING_WINDOW_RUNS,
    min_samples: int = MIN_ROLLING_SAMPLES,
) -> DecodeBaseline:
    """Return the median of the newest runs with one key; `fallback_speed` if there are too few."""
    values, num_damaged = _read_speeds(Path(history), key)
    warnings = (f"{os.fspath(history)}: {num_damaged} lines are no JSON objects",) if num_damaged else ()
    values = values[-max(1, window) :]
    if len(values) >= max(1, min_samples):
        return DecodeBaseline(speed=median(values), source="rolling_median", num_samples=len(values), warnings=warnings)
    return DecodeBaseline(speed=fallback_speed, source="fixed_fallback", num_samples=len(values), warnings=warnings)


def _read_speeds(path: Path, key: str) -> tuple[list[float], int]:
    """Return the positive speeds of lines with a key, and the number of damaged lines."""
    try:
        text = read_bounded(path, MAX_HISTORY_BYTES).decode("utf-8", "ignore")
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    values, num_damaged = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            entry = loads_strict(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            num_damaged += 1
        elif str(entry.get("key", "")) == key and (speed := get_number(entry, "decode_best")) > 0:
            values.append(speed)
    return values, num_damaged


def append_to_history(
    history: str | os.PathLike[str], key: str, decode_best: float, has_passed: bool, summary: str
) -> bool:
    """Append a run, passed or not, to a history; return False if it has no speed."""
    if not decode_best > 0:
        return False
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    entry = {"ts_utc": now, "key": key, "decode_best": decode_best, "overall_pass": has_passed, "summary": summary}
    with wrap_os_errors(history), open(history, "a", encoding="utf-8") as history_file:
        history_file.write(json.dumps(entry) + "\n")
    return True


def build_baseline_key(rows: MetricRows, repeats: int) -> str:
    """Build ``host_backend_tT_pP,P_gG_repR``, the fork's key of machine and workload, from a table."""
    backends, threads = (_list_distinct_cells(rows, name) for name in ("backend", "threads"))
    matches = [re.search(r"prompt=(\d+)<br>decode=(\d+)", text) for text in _list_distinct_cells(rows, "llm_demo")]
    if not backends or not threads or not matches or not all(matches):
        raise SourceError(
            f"{', '.join(rows.files)[:120]}: does not say backend, threads and work: expected --baseline-key"
        )
    prompt_counts, decode_counts = (list(dict.fromkeys(match[i] for match in matches if match)) for i in (1, 2))
    host = socket.gethostname()
    fields = {"": backends, "t": threads, "p": prompt_counts, "g": decode_counts}
    return "_".join([host, *(prefix + ",".join(values) for prefix, values in fields.items()), f"rep{repeats}"])


def _list_distinct_cells(rows: MetricRows, column: str) -> Sequence[str]:
    return list(dict.fromkeys(cell for row in rows.rows if not row.is_header and (cell := row.cells.get(column))))
