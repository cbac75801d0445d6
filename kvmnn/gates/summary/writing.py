"""The three files of a round: ``summary.json``, ``summary.md`` and ``cases.jsonl``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...text import count, escape_markdown
from ...text.folding import folded_lines

_NONE = "-"
"""Of what a run on a model has not measured."""

NOT_FINISHED = "not measured: the round was not finished"
"""Reason of a case of a round that was begun, whose files are still those of another round, or not there."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Cases that were judged together.

    Attributes
    ----------
    directory
        Where its files lie.
    rows
        `runtime_row` and `demo_row`, in order.
    generated_at
        Local time, to the second.
    """

    directory: str
    rows: tuple[Mapping[str, Any], ...]
    generated_at: str

    @classmethod
    def of(cls, directory: str, rows: Sequence[Mapping[str, Any]]) -> Round:
        """Of now."""
        return cls(directory=directory, rows=tuple(rows), generated_at=datetime.now().isoformat(timespec="seconds"))

    @property
    def passed(self) -> bool:
        """Whether there are cases, and all passed."""
        return bool(self.rows) and all(row.get("overall_pass") is True for row in self.rows)

    @property
    def unfinished(self) -> int:
        """Cases that the round should have, and has not measured."""
        return sum(row.get("failure_reason") == NOT_FINISHED for row in self.rows)

    def of_suite(self, suite: str) -> list[Mapping[str, Any]]:
        """Cases of ``"runtime"`` or ``"llm_demo"``."""
        return [row for row in self.rows if row.get("suite") == suite]

    def to_dict(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        return {
            "generated_at": self.generated_at,
            "overall_pass": self.passed,
            "total_cases": len(self.rows),
            "runtime_cases": len(self.of_suite("runtime")),
            "llm_demo_cases": len(self.of_suite("llm_demo")),
            "rows": [dict(row) for row in self.rows],
        }

    def files(self) -> dict[str, str]:
        """The texts of the three files by their names."""
        return {
            "summary.json": json.dumps(self.to_dict(), indent=2),
            "summary.md": self.to_markdown(),
            "cases.jsonl": "".join(json.dumps(dict(row)) + "\n" for row in self.rows),
        }

    def to_markdown(self) -> str:
        """What ``summary.md`` holds."""
        runtime, demo = self.of_suite("runtime"), self.of_suite("llm_demo")
        lines = [
            "# H2O final Summary",
            "",
            f"- overall_pass: {_flag(self.passed)}",
            f"- total_cases: {len(self.rows)}",
            f"- runtime_cases: {len(runtime)}",
            f"- llm_demo_cases: {len(demo)}",
            "",
        ]
        for heading, rows, line in (("Runtime", runtime, _runtime_line), ("llm_demo", demo, _demo_line)):
            if rows:
                lines += [f"## {heading}", ""]
                numbered = (f"{place}. {line(row)}" for place, row in enumerate(rows, start=1))
                lines += [escape_markdown(text.replace("\n", " ")) for text in numbered]
                lines.append("")
        lines += [f"- {name.replace('.', '_')}: `{self.directory}/{name}`" for name in ("summary.json", "cases.jsonl")]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return "\n".join(self.lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def lines(self, width: int) -> list[str]:
        """The cases and why they do not pass, in `width` columns."""
        passed = sum(row.get("overall_pass") is True for row in self.rows)
        lines = [f"{'PASS' if self.passed else 'FAIL'}: {passed} of {count(len(self.rows), 'case')} passed"]
        if self.unfinished:
            measured = len(self.rows) - self.unfinished
            lines = [f"NOT FINISHED: {measured} of {count(len(self.rows), 'case')} measured, {passed} passed"]
        size = max([len(str(row.get("case", ""))) for row in self.rows], default=0)
        for row in self.rows:
            reason = str(row.get("failure_reason", ""))
            said = "pass" if row.get("overall_pass") is True else "-" if reason == NOT_FINISHED else "fail"
            lines.append(f"  {said:<4}  {row.get('case', '')!s:<{size}}  {reason}".rstrip())
        return folded_lines(lines, width)


def _runtime_line(row: Mapping[str, Any]) -> str:
    speeds = f"{_number(row['decode_gate_tps'])}/{_number(row['decode_baseline'])}({row['decode_aggregation']})"
    drop = f"{_number(row['decode_drop_ratio'], 6)}/{_number(row['decode_drop_target'], 6)}"
    same = row["kv_content_consistency_pass"]
    figures = {
        "lossy": row["lossy_best"],
        "lossless": row["lossless_selected_value"],
        "decomp_us": row["runtime_decomp_best_us"],
        "async_wait_us": row["runtime_async_wait_best_us"],
        "async_wait_headroom": row["runtime_async_wait_headroom_ratio"],
        "queue": row["runtime_queue_peak_best"],
        "fallback": row["runtime_fallback_best"],
        "cache_hit": row["runtime_decode_cache_hit_best"],
        "cache_miss": row["runtime_decode_cache_miss_best"],
    }
    return (
        f"case={row['case']}, mode={row['mode']}, pass={_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={speeds}, drop={drop}, {', '.join(f'{name}={_number(value)}' for name, value in figures.items())}, "
        f"kv_consistency={_NONE if same is None else _flag(same)}, "
        f"kv_invalid_logs={_number(row['kv_invalid_log_count'], 0)}, summary=`{row['summary']}`{_reason(row)}"
    )


def _number(value: float | None, digits: int = 4) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _demo_line(row: Mapping[str, Any]) -> str:
    return (
        f"case={row['case']}, mode={row['mode']}, pass={_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={_number(row['baseline_decode_tps_avg'])}->{_number(row['candidate_decode_tps_avg'])}, "
        f"drop={_number(row['decode_drop_ratio'], 6)}/{_number(row['decode_drop_target'], 6)}, "
        f"lossy={_number(row['candidate_lossy_ratio_avg'])}, lossless={_number(row['candidate_lossless_ratio_avg'])}, "
        f"total={_number(row['candidate_runtime_total_ratio_avg'])}, "
        f"decomp_us={_number(row['runtime_decomp_best_us'])}, "
        f"cache_hit={_number(row['decode_cache_hit_best'])}, run_order={row['run_order']}, "
        f"summary=`{row['summary']}`{_reason(row)}"
    )


def _reason(row: Mapping[str, Any]) -> str:
    return f", reason={row['failure_reason']}" if row.get("failure_reason") else ""


def _flag(value: object) -> str:
    return "true" if value is True else "false"
