"""Runs of ``llm_demo``, one for each prompt: what its JSON line says, and what it printed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ..logs.demo_records import json_line, printed_sums, quantity, read_records
from ..logs.log_files import log_files, read_log

_BUCKET = re.compile(r"prompt_(\d{1,12})_\d+(?:\.\w+)?$", re.IGNORECASE)
_NO_MODEL = "LLM init error"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One prompt.

    Attributes
    ----------
    name, bucket
        Of the prompt: its file without the suffix, and the digits of ``prompt_<bucket>_<i>``, else ``"other"``.
    return_code, reason
        0 and ``"ok"`` where the run counts: it ended well and told tokens and times.
    prompt_tokens, decode_tokens, prefill_s, decode_s
        From the JSON line, where it has them, else as printed.
    record
        The JSON line; empty where there was none.
    """

    name: str
    bucket: str
    return_code: int
    reason: str
    prompt_tokens: float
    decode_tokens: float
    prefill_s: float
    decode_s: float
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decode_speed(self) -> float:
        """Tokens a second; 0 where no time was told."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def figure(self, key: str) -> float:
        """A number of the JSON line; 0 where it has none."""
        return quantity(self.record, key)


def bucket_of(name: str) -> str:
    """The bucket in the name of a prompt's file."""
    found = _BUCKET.search(name)
    return found[1] if found else "other"


def demo_run(name: str, record: Mapping[str, Any], printed: str, return_code: int = 0) -> DemoRun:
    """A run from its JSON line and from what it printed."""
    sums = printed_sums(printed)
    told = quantity(record, "prompt_tokens") > 0 and quantity(record, "prefill_us") > 0
    told = told or (sums.get("prompt_tokens", 0) > 0 and sums.get("prefill_s", 0) > 0)
    reason = "ok" if return_code == 0 else f"rc_{return_code}" if return_code > 0 else f"signal_{-return_code}"
    if _NO_MODEL in printed:
        return_code, reason = 1, "llm_init_error"
    elif return_code == 0 and not told:
        return_code, reason = 2, "missing_summary_metrics"

    def preferred(key: str, printed_key: str, scale: float = 1.0) -> float:
        found = quantity(record, key) * scale
        return found if found > 0 else sums.get(printed_key, 0.0)

    return DemoRun(
        name=name,
        bucket=bucket_of(name),
        return_code=return_code,
        reason=reason,
        prompt_tokens=preferred("prompt_tokens", "prompt_tokens"),
        decode_tokens=preferred("decode_tokens", "decode_tokens"),
        prefill_s=preferred("prefill_us", "prefill_s", 1e-6),
        decode_s=preferred("decode_us", "decode_s", 1e-6),
        record=dict(record),
    )


def read_runs(path: str | os.PathLike[str]) -> list[DemoRun]:
    """Runs of a file or folder.

    Parameters
    ----------
    path
        A file of JSON lines: what the fork's runner notes of its runs (``*_runs.jsonl``), or what ``llm_demo`` writes
        itself. Or a folder: one file ``*_runs.jsonl`` in it, else each ``*.jsonl`` in it or in its ``metrics/`` is a
        prompt, with ``<name>.stdout.log`` and ``<name>.stderr.log`` beside it or in ``logs/``.

    Raises
    ------
    SourceError
        For what is not there, cannot be read, or holds no runs.
    """
    place = Path(path)
    if not place.is_dir():
        found = _of_file(place)
    else:
        noted = sorted(place.glob("*_runs.jsonl"))
        if len(noted) > 1:
            raise SourceError(
                f"{place}: has {noted[0].name} and {noted[1].name}: expected one of them, or its own path"
            )
        found = _of_file(noted[0]) if noted else _of_folder(place)
    if not found:
        raise SourceError(f"{place}: holds no runs of llm_demo: expected JSON lines with prompt_tokens and prefill_us")
    return found


def _of_file(path: Path) -> list[DemoRun]:
    text = read_log(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        return []
    if "h2o_metrics" in json_line(lines[0][1], f"{path}: line {lines[0][0]}"):
        return [_noted(json_line(line, f"{path}: line {i}")) for i, line in lines]
    records = read_records(text, str(path))
    if len(records) == 1:
        return [demo_run(path.stem, records[0], _printed(path))]
    return [demo_run(f"{path.stem}:{record.get('prompt_index')}", record, "") for record in records]


def _noted(row: Mapping[str, Any]) -> DemoRun:
    """A run as the fork's runner notes it."""
    record = row.get("h2o_metrics")
    name = Path(str(row.get("prompt_file", ""))[:400]).stem
    return_code = quantity(row, "effective_returncode") if "effective_returncode" in row else 1.0
    return DemoRun(
        name=name,
        bucket=str(row.get("prompt_bucket", bucket_of(name)))[:40],
        return_code=int(return_code),
        reason=str(row.get("status_reason", ""))[:80],
        prompt_tokens=quantity(row, "prompt_tokens"),
        decode_tokens=quantity(row, "decode_tokens"),
        prefill_s=quantity(row, "prefill_s"),
        decode_s=quantity(row, "decode_s"),
        record=record if isinstance(record, dict) else {},
    )


def _of_folder(folder: Path) -> list[DemoRun]:
    metrics = folder / "metrics" if (folder / "metrics").is_dir() else folder
    found = []
    for path in log_files([metrics], (".jsonl",)):
        records = read_records(read_log(path), str(path))
        found.append(demo_run(path.stem, records[-1] if records else {}, _printed(path)))
    return found


def _printed(path: Path) -> str:
    """What a run printed, where its logs lie beside its JSON lines."""
    folders = (path.parent, path.parent.parent / "logs")
    logs = [folder / f"{path.stem}.{stream}.log" for folder in folders for stream in ("stdout", "stderr")]
    return "\n".join(read_log(log) for log in logs if log.is_file())
