"""Limits of gates on the command line, under the names of the fork's analyser."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from . import help
from .printing import UsageError

if TYPE_CHECKING:
    from ..gates.checking.limits import GateLimits

AGGREGATIONS = ("avg", "median", "p90", "best")
RUNTIME_MODES = ("probe", "full", "store")
BASELINE_CHOICES = ("fixed", "rolling", "same_batch")

_OFF_HELP = "negative: no gate"
_NUMBER_HELP = {
    "lossy_target": "least lossy ratio (default: 3.0)",
    "lossless_target": "least lossless ratio (default: 1.3)",
    "decode_baseline": "tokens/s without compression (default: 0, no gate)",
    "decode_drop_target": "largest share of it that may be lost (default: 0.05)",
    "max_lossless_queue_peak": f"largest queue ({_OFF_HELP}, the default)",
    "max_lossless_fallback": f"most fallbacks ({_OFF_HELP}, the default)",
    "max_lossless_backpressure_skip": f"most skips ({_OFF_HELP}, the default)",
    "max_lossless_decomp_us": f"longest decompression ({_OFF_HELP}, the default)",
    "max_lossless_async_wait_us": f"longest wait for threads ({_OFF_HELP}, the default)",
    "async_wait_headroom_warn_ratio": "warn where less of that wait is left (default: 0.15)",
}
_COUNT_HELP = {
    "decode_baseline_samples": "values behind the baseline, for the report",
    "async_threads": "threads of the runtime: above 0 they must have worked (default: 0)",
    "max_kv_invalid_log_lines": "lines of damage allowed in logs (default: 0)",
    "lossless_block_tokens": "tokens of a block, for the hard checks (default: 128)",
    "store_grouped_step_tokens": "tokens of a later block of mode store, likewise (default: 384)",
}
_FLAG_HELP = {
    "require_runtime_decomp": "something must have been decompressed",
    "require_decode_cache_hit": "some decoded block must have been found again",
    "require_async_queue_activity": "threads must have had a queue",
    "require_decode_cache_activity": "decoded blocks must have been looked for",
    "require_kv_content_consistency": "what the fork calls consistency: activity and logs",
    "strict_runtime_metric_columns": "the columns of the runtime must be there",
    "hard_checks": "also what the fork's script demands before its gates",
}
LIMIT_OPTION_NAMES = (
    *_NUMBER_HELP,
    *_COUNT_HELP,
    *_FLAG_HELP,
    "decode_baseline_source",
    "decode_gate_aggregation",
    "runtime_mode",
)
"""All of them, by their names."""


def add_limit_options(parser: Any) -> None:
    """All limits; ``--help-limits`` shows them. What is not said is None."""
    group = parser.add_argument_group("limits", "check: over those of --case and --gates.")
    for name, text in _NUMBER_HELP.items():
        group.add_argument(_make_option_name(name), type=parse_number, metavar="X", help=text)
    for name, text in _COUNT_HELP.items():
        group.add_argument(_make_option_name(name), type=parse_integer, metavar="N", help=text)
    for name, text in _FLAG_HELP.items():
        group.add_argument(_make_option_name(name), action="store_const", const=True, help=text)
    group.add_argument("--decode-baseline-source", metavar="TEXT", help="what the report calls the baseline")
    group.add_argument(
        "--decode-gate-aggregation", choices=AGGREGATIONS, help="which speed of the rows counts (default: avg)"
    )
    group.add_argument(
        "--runtime-mode", choices=("", *RUNTIME_MODES), help="mode of the runtime: what must have been active"
    )
    help.fold_group(parser, group, "--help-limits")


def add_document_options(parser: Any) -> None:
    """Files beside the rows."""
    parser.add_argument(
        "--offline-lossless-online-json", metavar="FILE", help="check: an offline evaluation, chunked as online"
    )
    parser.add_argument("--offline-lossless-json", metavar="FILE", help="check: an offline evaluation, upper bound")
    parser.add_argument("--bench-stdout-log", metavar="FILE", help="check: what the bench printed")
    parser.add_argument("--logs-dir", metavar="DIR", help="check: a folder of its logs")


def collect_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The limits that were given, by name."""
    values = {name: getattr(arguments, name, None) for name in LIMIT_OPTION_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def override_limits(arguments: argparse.Namespace, base: GateLimits) -> GateLimits:
    """Those of `base` with what was given in their place; `UsageError` for one that makes no sense."""
    from ..errors import OptionError

    try:
        return base.with_values(collect_limits(arguments), "limits")
    except OptionError as error:
        raise UsageError(str(error)) from None


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Limits and documents in words of a command line, as the fork's analyser takes them."""
    return _make_words_parser().parse_args(list(words))


@cache
def _make_words_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gate", exit_on_error=False, allow_abbrev=False)
    add_limit_options(parser)
    add_document_options(parser)
    return parser


def parse_number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def parse_integer(text: str) -> int:
    """A whole number, negative ones included."""
    try:
        value = int(text)
    except ValueError:
        value = 10**18
    if abs(value) > 10**15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    return value


def _make_option_name(name: str) -> str:
    return "--" + name.replace("_", "-")
