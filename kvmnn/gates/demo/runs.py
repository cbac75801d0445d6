"""Runs of ``llm_demo``, one for each prompt: what its JSON line says, and what it printed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ..logs.demo_records import get_number, parse_json_line, parse_printed_values, read_json_records
from ..logs.log_files import find_log_files, read_log

_BUCKET_REGEX = re.compile(r"prompt_(\d{1,12})_\d+(?:\.\w+)?$", re.IGNORECASE)
_NO_MODEL_MESSAGE = "LLM init error"


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
    metrics
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
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decode_speed(self) -> float:
        """Tokens a second; 0 where no time was told."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def get_metric(self, key: str) -> float:
        """A number of the JSON line; 0 where it has none."""
        return get_number(self.metrics, key)


def parse_bucket(name: str) -> str:
    """The bucket in the name of a prompt's file."""
    match = _BUCKET_REGEX.search(name)
    return match[1] if match else "other"


def build_demo_run(name: str, metrics: Mapping[str, Any], printed_text: str, return_code: int = 0) -> DemoRun:
    """A run from its JSON line and from what it printed."""
    printed_values = parse_printed_values(printed_text)
    has_metrics = get_number(metrics, "prompt_tokens") > 0 and get_number(metrics, "prefill_us") > 0
    has_metrics = has_metrics or (printed_values.get("prompt_tokens", 0) > 0 and printed_values.get("prefill_s", 0) > 0)
    reason = "ok" if return_code == 0 else f"rc_{return_code}" if return_code > 0 else f"signal_{-return_code}"
    if _NO_MODEL_MESSAGE in printed_text:
        return_code, reason = 1, "llm_init_error"
    elif return_code == 0 and not has_metrics:
        return_code, reason = 2, "missing_summary_metrics"

    def get_preferred(key: str, printed_key: str, scale: float = 1.0) -> float:
        record_value = get_number(metrics, key) * scale
        return record_value if record_value > 0 else printed_values.get(printed_key, 0.0)

    return DemoRun(
        name=name,
        bucket=parse_bucket(name),
        return_code=return_code,
        reason=reason,
        prompt_tokens=get_preferred("prompt_tokens", "prompt_tokens"),
        decode_tokens=get_preferred("decode_tokens", "decode_tokens"),
        prefill_s=get_preferred("prefill_us", "prefill_s", 1e-6),
        decode_s=get_preferred("decode_us", "decode_s", 1e-6),
        metrics=dict(metrics),
    )


def read_demo_runs(path: str | os.PathLike[str]) -> list[DemoRun]:
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
    source = Path(path)
    if not source.is_dir():
        runs = _read_run_file(source)
    else:
        run_files = sorted(source.glob("*_runs.jsonl"))
        if len(run_files) > 1:
            raise SourceError(
                f"{source}: has {run_files[0].name} and {run_files[1].name}: expected one of them, or its own path"
            )
        runs = _read_run_file(run_files[0]) if run_files else _read_run_folder(source)
    if not runs:
        raise SourceError(f"{source}: holds no runs of llm_demo: expected JSON lines with prompt_tokens and prefill_us")
    return runs


def _read_run_file(path: Path) -> list[DemoRun]:
    text = read_log(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        return []
    if "h2o_metrics" in parse_json_line(lines[0][1], f"{path}: line {lines[0][0]}"):
        return [_parse_run_line(parse_json_line(line, f"{path}: line {i}")) for i, line in lines]
    records = read_json_records(text, str(path))
    if len(records) == 1:
        return [build_demo_run(path.stem, records[0], _read_printed_text(path))]
    return [build_demo_run(f"{path.stem}:{record.get('prompt_index')}", record, "") for record in records]


def _parse_run_line(row: Mapping[str, Any]) -> DemoRun:
    """A run as the fork's runner notes it."""
    metrics = row.get("h2o_metrics")
    name = Path(str(row.get("prompt_file", ""))[:400]).stem
    return_code = get_number(row, "effective_returncode") if "effective_returncode" in row else 1.0
    return DemoRun(
        name=name,
        bucket=str(row.get("prompt_bucket", parse_bucket(name)))[:40],
        return_code=int(return_code),
        reason=str(row.get("status_reason", ""))[:80],
        prompt_tokens=get_number(row, "prompt_tokens"),
        decode_tokens=get_number(row, "decode_tokens"),
        prefill_s=get_number(row, "prefill_s"),
        decode_s=get_number(row, "decode_s"),
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _read_run_folder(folder: Path) -> list[DemoRun]:
    metrics = folder / "metrics" if (folder / "metrics").is_dir() else folder
    runs = []
    for path in find_log_files([metrics], (".jsonl",)):
        records = read_json_records(read_log(path), str(path))
        runs.append(build_demo_run(path.stem, records[-1] if records else {}, _read_printed_text(path)))
    return runs


def _read_printed_text(path: Path) -> str:
    """What a run printed, where its logs lie beside its JSON lines."""
    folders = (path.parent, path.parent.parent / "logs")
    logs = [folder / f"{path.stem}.{stream}.log" for folder in folders for stream in ("stdout", "stderr")]
    return "\n".join(read_log(log) for log in logs if log.is_file())
