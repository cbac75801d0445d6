"""The three files of a round: ``summary.json``, ``summary.md`` and ``cases.jsonl``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...text import escape_markdown, pluralize
from ...text.folding import wrap_lines

_NOT_MEASURED_TEXT = "-"
"""Of what a run on a model has not measured."""

NOT_FINISHED_REASON = "not measured: the round was not finished"
"""Reason of a case of a round that was begun, whose files are still those of another round, or not there."""


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """Cases that were judged together.

    Attributes
    ----------
    directory
        Where its files lie.
    rows
        `build_runtime_row` and `build_demo_row`, in order.
    generated_at
        Local time, to the second.
    """

    directory: str
    rows: tuple[Mapping[str, Any], ...]
    generated_at: str

    @classmethod
    def from_rows(cls, directory: str, rows: Sequence[Mapping[str, Any]]) -> RoundSummary:
        """Of now."""
        return cls(directory=directory, rows=tuple(rows), generated_at=datetime.now().isoformat(timespec="seconds"))

    @property
    def has_passed(self) -> bool:
        """Whether there are cases, and all passed."""
        return bool(self.rows) and all(row.get("overall_pass") is True for row in self.rows)

    @property
    def num_unfinished(self) -> int:
        """Cases that the round should have, and has not measured."""
        return sum(row.get("failure_reason") == NOT_FINISHED_REASON for row in self.rows)

    def select_suite(self, suite: str) -> list[Mapping[str, Any]]:
        """Cases of ``"runtime"`` or ``"llm_demo"``."""
        return [row for row in self.rows if row.get("suite") == suite]

    def to_dict(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        return {
            "generated_at": self.generated_at,
            "overall_pass": self.has_passed,
            "total_cases": len(self.rows),
            "runtime_cases": len(self.select_suite("runtime")),
            "llm_demo_cases": len(self.select_suite("llm_demo")),
            "rows": [dict(row) for row in self.rows],
        }

    def render_files(self) -> dict[str, str]:
        """The texts of the three files by their names."""
        return {
            "summary.json": json.dumps(self.to_dict(), indent=2),
            "summary.md": self.to_markdown(),
            "cases.jsonl": "".join(json.dumps(dict(row)) + "\n" for row in self.rows),
        }

    def to_markdown(self) -> str:
        """What ``summary.md`` holds."""
        runtime, demo = self.select_suite("runtime"), self.select_suite("llm_demo")
        lines = [
            "# H2O final Summary",
            "",
            f"- overall_pass: {_format_flag(self.has_passed)}",
            f"- total_cases: {len(self.rows)}",
            f"- runtime_cases: {len(runtime)}",
            f"- llm_demo_cases: {len(demo)}",
            "",
        ]
        for heading, rows, format_line in (
            ("Runtime", runtime, _format_runtime_row),
            ("llm_demo", demo, _format_demo_row),
        ):
            if rows:
                lines += [f"## {heading}", ""]
                numbered_lines = (f"{line_number}. {format_line(row)}" for line_number, row in enumerate(rows, start=1))
                lines += [escape_markdown(text.replace("\n", " ")) for text in numbered_lines]
                lines.append("")
        lines += [f"- {name.replace('.', '_')}: `{self.directory}/{name}`" for name in ("summary.json", "cases.jsonl")]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return "\n".join(self.format_lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def format_lines(self, width: int) -> list[str]:
        """The cases and why they do not pass, in `width` columns."""
        num_passed = sum(row.get("overall_pass") is True for row in self.rows)
        lines = [f"{'PASS' if self.has_passed else 'FAIL'}: {num_passed} of {pluralize(len(self.rows), 'case')} passed"]
        if self.num_unfinished:
            num_measured = len(self.rows) - self.num_unfinished
            lines = [
                f"NOT FINISHED: {num_measured} of {pluralize(len(self.rows), 'case')} measured, {num_passed} passed"
            ]
        case_width = max([len(str(row.get("case", ""))) for row in self.rows], default=0)
        for row in self.rows:
            reason = str(row.get("failure_reason", ""))
            status = "pass" if row.get("overall_pass") is True else "-" if reason == NOT_FINISHED_REASON else "fail"
            lines.append(f"  {status:<4}  {row.get('case', '')!s:<{case_width}}  {reason}".rstrip())
        return wrap_lines(lines, width)


def _format_runtime_row(row: Mapping[str, Any]) -> str:
    gate_speed, baseline_speed = _format_number(row["decode_gate_tps"]), _format_number(row["decode_baseline"])
    speeds_text = f"{gate_speed}/{baseline_speed}({row['decode_aggregation']})"
    drop_text = f"{_format_number(row['decode_drop_ratio'], 6)}/{_format_number(row['decode_drop_target'], 6)}"
    is_consistent = row["kv_content_consistency_pass"]
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
        f"case={row['case']}, mode={row['mode']}, pass={_format_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={speeds_text}, drop={drop_text}, "
        f"{', '.join(f'{name}={_format_number(value)}' for name, value in figures.items())}, "
        f"kv_consistency={_NOT_MEASURED_TEXT if is_consistent is None else _format_flag(is_consistent)}, "
        f"kv_invalid_logs={_format_number(row['kv_invalid_log_count'], 0)}, "
        f"summary=`{row['summary']}`{_format_reason(row)}"
    )


def _format_number(value: float | None, digits: int = 4) -> str:
    return _NOT_MEASURED_TEXT if value is None else f"{value:.{digits}f}"


def _format_demo_row(row: Mapping[str, Any]) -> str:
    return (
        f"case={row['case']}, mode={row['mode']}, pass={_format_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={_format_number(row['baseline_decode_tps_avg'])}->{_format_number(row['candidate_decode_tps_avg'])}, "
        f"drop={_format_number(row['decode_drop_ratio'], 6)}/{_format_number(row['decode_drop_target'], 6)}, "
        f"lossy={_format_number(row['candidate_lossy_ratio_avg'])}, "
        f"lossless={_format_number(row['candidate_lossless_ratio_avg'])}, "
        f"total={_format_number(row['candidate_runtime_total_ratio_avg'])}, "
        f"decomp_us={_format_number(row['runtime_decomp_best_us'])}, "
        f"cache_hit={_format_number(row['decode_cache_hit_best'])}, run_order={row['run_order']}, "
        f"summary=`{row['summary']}`{_format_reason(row)}"
    )


def _format_reason(row: Mapping[str, Any]) -> str:
    return f", reason={row['failure_reason']}" if row.get("failure_reason") else ""


def _format_flag(value: object) -> str:
    return "true" if value is True else "false"
