"""Where the decode speed without compression comes from: a constant, earlier runs, or the same batch."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from ...errors import OutputError, SourceError
from ...files.json_document import loads_strict, read_bounded
from ..logs.demo_records import get_number
from .metric_rows import MetricRows

BaselineMode = Literal["fixed", "rolling", "same_batch"]
BASELINE_MODES: tuple[BaselineMode, ...] = get_args(BaselineMode)

ROLLING_WINDOW_RUNS, MIN_ROLLING_SAMPLES = 8, 3
"""Of earlier runs: how many count, and how many there must be."""

MAX_HISTORY_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DecodeBaseline:
    """Tokens a second, where from, and the median or largest of how many values."""

    speed: float
    source: str
    num_samples: int
    warnings: tuple[str, ...] = ()


def make_fixed_baseline(speed: float) -> DecodeBaseline:
    """A constant."""
    return DecodeBaseline(speed=speed, source="fixed", num_samples=1)


def find_same_batch_baseline(rows: MetricRows, fallback_speed: float) -> DecodeBaseline:
    """The fastest row of a run without compression; `fallback_speed` where no row has a speed.

    The fork takes the fastest row here and the mean of the candidate's, so its gate is stricter than its limit says.
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
    """The median of the newest runs with one key; `fallback_speed` where there are too few.

    Parameters
    ----------
    history
        A file of JSON lines (`append_to_history`); none yet is an empty one. Lines that are no JSON are passed over and
        counted.
    key
        Of the machine and the work (`build_baseline_key`).
    window, min_samples
        How many of the newest count, and how many there must be.

    Raises
    ------
    SourceError
        Where the file cannot be read or is larger than 16 MiB.
    """
    values, num_damaged = _read_speeds(Path(history), key)
    warnings = (f"{os.fspath(history)}: {num_damaged} lines are no JSON objects",) if num_damaged else ()
    values = values[-max(1, window) :]
    if len(values) >= max(1, min_samples):
        return DecodeBaseline(speed=median(values), source="rolling_median", num_samples=len(values), warnings=warnings)
    return DecodeBaseline(speed=fallback_speed, source="fixed_fallback", num_samples=len(values), warnings=warnings)


def _read_speeds(path: Path, key: str) -> tuple[list[float], int]:
    """Speeds above 0 of lines with a key, and how many lines are damaged."""
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
    """Add a run to a history, whether it passed or not; False where it has no speed.

    Raises
    ------
    OutputError
        Where the file cannot be written.
    """
    if not decode_best > 0:
        return False
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    entry = {"ts_utc": now, "key": key, "decode_best": decode_best, "overall_pass": has_passed, "summary": summary}
    try:
        with open(history, "a", encoding="utf-8") as history_file:
            history_file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise OutputError(f"{os.fspath(history)}: cannot be written: {error.strerror or error}") from error
    return True


def build_baseline_key(rows: MetricRows, repeats: int) -> str:
    """``host_backend_tT_pP,P_gG_repR`` of a table, as the fork's script calls its machine and its work.

    Raises
    ------
    SourceError
        Where the table does not say backend, threads, prompts and tokens to generate.
    """
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
