"""``kvmnn bench``: speed and ratio of kvmnn and of the rivals that are installed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...text import count
from .. import loading, printing, shared_options

if TYPE_CHECKING:
    from ...bench.benchmark import Report, Result, Timing

_TEXT = """Measure encode and decode speed and ratio on real data: kvmnn's efforts and whatever rivals are installed
(zstandard, lz4, blosc2, pcodec, zipnn; "pip install kvmnn[rivals]").

All codecs take turns in one process; figures are medians over --rounds. Each round trip is checked. Break-even is the
link speed below which compress + send + decompress (on the clock, one after the other) beats sending raw bytes."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "bench", run, "speed and ratio beside the rivals", _TEXT)
    parser.add_argument("inputs", nargs="+", metavar="FILE")
    shared_options.add_source(parser, "what the words are (default: the array's own type; raw words need it)")
    parser.add_argument(
        "--rounds", type=shared_options.positive, default=5, metavar="N", help="turns a codec (default 5)"
    )
    parser.add_argument(
        "--max-bytes",
        type=shared_options.byte_count,
        default=64 << 20,
        metavar="SIZE",
        help="measure the beginning of larger arrays (default 64M; 0: all)",
    )
    parser.add_argument("--max", action="store_true", help="measure effort max on all the data, not on its first MiB")
    parser.add_argument(
        "--threads", type=shared_options.positive, default=1, metavar="N", help="threads to use (default 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...bench.benchmark import measure

    source = loading.load(arguments.inputs, arguments)
    loading.report_skipped(source, arguments)
    reports: list[Report] = []
    for array in source.arrays:
        report = measure(
            array,
            max_bytes=arguments.max_bytes,
            rounds=arguments.rounds,
            threads=arguments.threads,
            with_max=arguments.max,
        )
        reports.append(report)
        printing.say(arguments, ("\n" if len(reports) > 1 else "") + _table(report, arguments.threads))
    if arguments.json:
        printing.print_json({"verb": "bench", "machine": _machine(), "threads": arguments.threads} | _arrays(reports))
    return 0


def _arrays(reports: list[Report]) -> dict[str, Any]:
    return {"arrays": [report.to_dict() for report in reports]}


def _machine() -> dict[str, Any]:
    import platform

    from ...threads.pool import cpu_count

    return {"processor": platform.processor() or platform.machine(), "cpus": cpu_count(), "system": platform.system()}


def _table(report: Report, threads: int) -> str:
    part = "" if report.sample_bytes == report.array_bytes else f", first {report.sample_bytes:,} measured"
    limit = "none" if report.entropy_ratio is None else f"{report.entropy_ratio:.4f}"
    lines = [
        f"{report.name}: {report.dtype}, {report.array_bytes:,} bytes{part}; order-0 limit of the byte streams {limit}"
        f"; {count(threads, 'thread')}, medians of {report.rounds}, every round trip LOSSLESS unless said",
        f"{'':<24} {'':>8} {'encode MB/s':>17} {'decode MB/s':>17} {'break-even':>11}",
        f"{'codec':<24} {'ratio':>8} {'cpu':>8} {'wall':>8} {'cpu':>8} {'wall':>8} {'MB/s':>11}",
    ]
    lines += [_row(result, report.sample_bytes) for result in report.results]
    lines += [f"{name:<24} not installed" for name in report.missing]
    return "\n".join(lines)


def _row(result: Result, sample_bytes: int) -> str:
    if result.encode is None or result.decode is None or result.ratio is None:
        return f"{result.codec:<24} failed: {result.error}"

    def speed(timing: Timing, kind: str) -> str:
        return f"{result.raw_bytes / 1e6 / max(getattr(timing, kind), 1e-9):>8.0f}"

    pays = "never" if result.break_even is None else f"{result.break_even / 1e6:.1f}"
    note = "" if result.raw_bytes == sample_bytes else f"  (first {result.raw_bytes:,} bytes)"
    return (
        f"{result.codec:<24} {result.ratio:>8.4f} {speed(result.encode, 'cpu')} {speed(result.encode, 'wall')} "
        f"{speed(result.decode, 'cpu')} {speed(result.decode, 'wall')} {pays:>11}{note}"
    )
