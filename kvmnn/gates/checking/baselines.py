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
from ...files.json_document import loads, read_bounded
from ..logs.demo_records import quantity
from .metric_rows import MetricRows

BaselineMode = Literal["fixed", "rolling", "same_batch"]
BASELINE_MODES: tuple[BaselineMode, ...] = get_args(BaselineMode)

WINDOW, LEAST_SAMPLES = 8, 3
"""Of earlier runs: how many count, and how many there must be."""

MAX_HISTORY_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Tokens a second, where from, and the median or largest of how many values."""

    speed: float
    source: str
    samples: int
    warnings: tuple[str, ...] = ()


def fixed(speed: float) -> Baseline:
    """A constant."""
    return Baseline(speed=speed, source="fixed", samples=1)


def same_batch(rows: MetricRows, otherwise: float) -> Baseline:
    """The fastest row of a run without compression; `otherwise` where no row has a speed.

    The fork takes the fastest row here and the mean of the candidate's, so its gate is stricter than its limit says.
    """
    best = max(row.decode for row in rows.rows)
    if best > 0:
        return Baseline(speed=best, source="same_batch", samples=1)
    said = f"[WARN] same_batch baseline decode is invalid ({best:g}); fallback to fixed {otherwise:g}"
    return Baseline(speed=otherwise, source="same_batch_fallback_fixed", samples=0, warnings=(said,))


def rolling(
    history: str | os.PathLike[str],
    key: str,
    otherwise: float,
    *,
    window: int = WINDOW,
    least: int = LEAST_SAMPLES,
) -> Baseline:
    """The median of the newest runs with one key; `otherwise` where there are too few.

    Parameters
    ----------
    history
        A file of JSON lines (`append`); none yet is an empty one. Lines that are no JSON are passed over and counted.
    key
        Of the machine and the work (`key_of`).
    window, least
        How many of the newest count, and how many there must be.

    Raises
    ------
    SourceError
        Where the file cannot be read or is larger than 16 MiB.
    """
    values, damaged = _speeds(Path(history), key)
    warnings = (f"{os.fspath(history)}: {damaged} lines are no JSON objects",) if damaged else ()
    values = values[-max(1, window) :]
    if len(values) >= max(1, least):
        return Baseline(speed=median(values), source="rolling_median", samples=len(values), warnings=warnings)
    return Baseline(speed=otherwise, source="fixed_fallback", samples=len(values), warnings=warnings)


def _speeds(path: Path, key: str) -> tuple[list[float], int]:
    """Speeds above 0 of lines with a key, and how many lines are damaged."""
    try:
        text = read_bounded(path, MAX_HISTORY_BYTES).decode("utf-8", "ignore")
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    values, damaged = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            entry = loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            damaged += 1
        elif str(entry.get("key", "")) == key and (speed := quantity(entry, "decode_best")) > 0:
            values.append(speed)
    return values, damaged


def append(history: str | os.PathLike[str], key: str, decode_best: float, passed: bool, summary: str) -> bool:
    """Add a run to a history, whether it passed or not; False where it has no speed.

    Raises
    ------
    OutputError
        Where the file cannot be written.
    """
    if not decode_best > 0:
        return False
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    entry = {"ts_utc": now, "key": key, "decode_best": decode_best, "overall_pass": passed, "summary": summary}
    try:
        with open(history, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise OutputError(f"{os.fspath(history)}: cannot be written: {error.strerror or error}") from error
    return True


def key_of(rows: MetricRows, repeats: int) -> str:
    """``host_backend_tT_pP,P_gG_repR`` of a table, as the fork's script calls its machine and its work.

    Raises
    ------
    SourceError
        Where the table does not say backend, threads, prompts and tokens to generate.
    """
    backends, threads = (_values(rows, name) for name in ("backend", "threads"))
    works = [re.search(r"prompt=(\d+)<br>decode=(\d+)", text) for text in _values(rows, "llm_demo")]
    if not backends or not threads or not works or not all(works):
        raise SourceError(
            f"{', '.join(rows.files)[:120]}: does not say backend, threads and work: expected --baseline-key"
        )
    prompts, new = (list(dict.fromkeys(found[i] for found in works if found)) for i in (1, 2))
    host = socket.gethostname()
    return f"{host}_{','.join(backends)}_t{','.join(threads)}_p{','.join(prompts)}_g{','.join(new)}_rep{repeats}"


def _values(rows: MetricRows, name: str) -> Sequence[str]:
    return list(dict.fromkeys(cell for row in rows.rows if not row.is_header and (cell := row.cells.get(name))))
