"""Limits of the six cases under the names of the MNN fork's analyser, with its defaults, and JSON files of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from .._util.dataclass import dataclass
from .._util.option_fields import option
from .._util.text import suggest
from ..errors import MissingFileError, OptionError, SourceError
from ..files.schema import Record, read_object

Aggregation = Literal["avg", "median", "p90", "best"]
LimitsMode = Literal["", "probe", "full", "store"]

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LIMITS_MODES: tuple[LimitsMode, ...] = get_args(LimitsMode)


_OFF = "negative: no gate"


@dataclass(frozen=True, kw_only=True)
class GateLimits(Record):
    """The gates of a case; a negative limit of a quantity of the runtime turns its gate off.

    Each field is an option of ``kvmnn gate``, whose help explains it.
    """

    lossy_target: float = field(default=3.0, metadata=option("least lossy ratio (default: 3.0)"))
    lossless_target: float = field(default=1.3, metadata=option("least lossless ratio (default: 1.3)"))
    total_target: float = field(
        default=-1.0,
        metadata=option("run: least ratio of all bytes to those held at the end (negative: no gate, the default)"),
    )
    decode_baseline: float = field(default=0.0, metadata=option("tokens/s without compression (default: 0, no gate)"))
    decode_baseline_source: str = field(default="", metadata=option("what the report calls the baseline"))
    decode_baseline_samples: int = field(default=0, metadata=option("values after the baseline, for the report"))
    decode_gate_aggregation: Aggregation = field(
        default="avg", metadata=option("which speed of the rows counts (default: avg)")
    )
    decode_drop_target: float = field(
        default=0.05, metadata=option("largest share of it that may be lost (default: 0.05)")
    )
    runtime_mode: LimitsMode = field(default="", metadata=option("mode of the runtime: what must have been active"))
    async_threads: int = field(
        default=0, metadata=option("threads of the runtime: above 0 they must have worked (default: 0)")
    )
    max_lossless_queue_peak: float = field(default=-1.0, metadata=option(f"largest queue ({_OFF}, the default)"))
    max_lossless_fallback: float = field(default=-1.0, metadata=option(f"most fallbacks ({_OFF}, the default)"))
    max_lossless_backpressure_skip: float = field(default=-1.0, metadata=option(f"most skips ({_OFF}, the default)"))
    max_lossless_decomp_us: float = field(default=-1.0, metadata=option(f"longest decompression ({_OFF}, the default)"))
    max_lossless_async_wait_us: float = field(
        default=-1.0, metadata=option(f"longest wait for threads ({_OFF}, the default)")
    )
    max_lossless_decomp_p50_us: float = field(default=-1.0, metadata=option(f"run: median of single ones ({_OFF})"))
    max_lossless_decomp_p95_us: float = field(default=-1.0, metadata=option(f"run: 95th percentile of them ({_OFF})"))
    max_lossless_decomp_p99_us: float = field(default=-1.0, metadata=option(f"run: 99th percentile of them ({_OFF})"))
    max_lossless_async_wait_p50_us: float = field(default=-1.0, metadata=option(f"run: median of waits ({_OFF})"))
    max_lossless_async_wait_p95_us: float = field(
        default=-1.0, metadata=option(f"run: 95th percentile of waits ({_OFF})")
    )
    max_lossless_async_wait_p99_us: float = field(
        default=-1.0, metadata=option(f"run: 99th percentile of waits ({_OFF})")
    )
    async_wait_headroom_warn_ratio: float = field(
        default=0.15, metadata=option("warn where less of that wait is left (default: 0.15)")
    )
    require_runtime_decomp: bool = field(default=False, metadata=option("something must have been decompressed"))
    require_decode_cache_hit: bool = field(
        default=False, metadata=option("some decoded block must have been found again")
    )
    require_async_queue_activity: bool = field(default=False, metadata=option("threads must have had a queue"))
    require_decode_cache_activity: bool = field(
        default=False, metadata=option("decoded blocks must have been looked for")
    )
    require_kv_content_consistency: bool = field(
        default=False, metadata=option("what the fork calls consistency: activity and logs")
    )
    max_kv_invalid_log_lines: int = field(default=0, metadata=option("lines of damage allowed in logs (default: 0)"))
    strict_runtime_metric_columns: bool = field(
        default=False, metadata=option("the columns of the runtime must be there")
    )
    hard_checks: bool = field(default=False, metadata=option("also what the fork's script demands before its gates"))
    lossless_block_tokens: int = field(
        default=128, metadata=option("tokens of a block, for the hard checks (default: 128)")
    )
    store_grouped_step_tokens: int = field(
        default=384, metadata=option("tokens of a later block of mode store, likewise (default: 384)")
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise OptionError(f"{entry.name}: found {value}, expected a finite number")

    def with_values(self, values: Mapping[str, Any], where: str) -> GateLimits:
        """Return a copy with other values.

        Parameters
        ----------
        values
            Values by limit name, of the types of the fields.
        where
            Prefix of error messages.

        Raises
        ------
        OptionError
            For a name that no limit has, and a value of another type.
        """
        return replace(self, **{name: validate_limit(name, value, where) for name, value in values.items()})


_LIMIT_TYPES = get_type_hints(GateLimits)


def validate_limit(name: str, value: Any, where: str) -> Any:
    """Convert the value of a limit to its type; raise `OptionError` for a wrong value or an unknown limit."""
    if name not in _LIMIT_TYPES:
        raise OptionError(f"{where}: {name[:60]!r} is no limit{suggest(name, list(_LIMIT_TYPES))}")
    value_type = _LIMIT_TYPES[name]
    choices = get_args(value_type)
    if choices:
        if not isinstance(value, str) or value not in choices:
            raise OptionError(f"{where}: {name}: found {_repr_short(value)}, expected one of {', '.join(choices)}")
    elif value_type is float and type(value) in (int, float):
        if not abs(value) <= 1e15:
            raise OptionError(f"{where}: {name}: found {_repr_short(value)}, expected a number below 1e15")
        return float(value)
    elif type(value) is not value_type or (value_type is int and abs(value) > 10**15):
        type_names = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
        raise OptionError(f"{where}: {name}: found {_repr_short(value)}, expected {type_names[value_type]}")
    return value


def _repr_short(value: object) -> str:
    return repr(value)[:60]


_RUNTIME_LIMITS = GateLimits(
    async_threads=2,
    max_lossless_queue_peak=8.0,
    max_lossless_fallback=0.0,
    strict_runtime_metric_columns=True,
    hard_checks=True,
)

RUNTIME_CASES: dict[str, GateLimits] = {
    "runtime_baseline": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "full",
            "lossy_target": 1.0,
            "lossless_target": 1.0,
            "decode_drop_target": 1.0,
            "strict_runtime_metric_columns": False,
            "hard_checks": False,
        },
        "runtime_baseline",
    ),
    "runtime_probe": _RUNTIME_LIMITS.with_values(
        {"runtime_mode": "probe", "max_lossless_async_wait_us": 20000.0}, "runtime_probe"
    ),
    "runtime_full": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "full",
            "require_runtime_decomp": True,
            "require_kv_content_consistency": True,
            "max_lossless_decomp_us": 30000.0,
            "max_lossless_async_wait_us": 20000.0,
        },
        "runtime_full",
    ),
    "runtime_store": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "store",
            "require_runtime_decomp": True,
            "require_kv_content_consistency": True,
            "max_lossless_decomp_us": 70000.0,
            "max_lossless_async_wait_us": 40000.0,
        },
        "runtime_store",
    ),
}
"""Cases of ``llm_bench`` by their names."""

DEMO_CASES = {"llm_demo_full": "full", "llm_demo_store": "store"}
"""Cases of ``llm_demo``, and the mode of the runtime in each."""

FIXED_BASELINE_TOKENS_PER_SECOND = 6.60
"""Tokens a second that the fork's script takes where no other baseline is to be had."""


_RUN_KEYS = ("prompts", "gens", "repeat", "threads", "backend")
"""Keys of the engine's runs; like its ``h2o_`` and ``kv_`` keys they describe the run and are not limits."""

_LIMIT_BY_ENGINE_KEY = {
    "kv_lossless_runtime_mode": "runtime_mode",
    "kv_lossless_async_threads": "async_threads",
    "kv_lossless_block_tokens": "lossless_block_tokens",
    "kv_lossless_store_grouped_step_tokens": "store_grouped_step_tokens",
}


def read_gate_file(path: str | os.PathLike[str], case: str | None, base: GateLimits) -> tuple[GateLimits, list[str]]:
    """Read limits from a file, over those of `base`; return notes on its other contents as well.

    The file is an object of limits by name (`GateLimits`). Its ``cases`` is an object of such objects by case name,
    which override the limits outside. The fork's own files (``target_core_gate_v6.json``) contain settings of runs:
    mode, threads and block sizes are used, the others limit nothing.

    Raises
    ------
    SourceError
        For a file that is not there.
    OptionError
        For a file that contains no JSON object, a key that nothing knows, a value of another type, and a case that the
        file does not have.
    """
    where = os.fspath(path)
    try:
        document = read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{where}: does not exist") from None
    except SourceError as error:
        raise OptionError(str(error)) from None
    cases = document.pop("cases", {})
    if not isinstance(cases, dict) or not all(isinstance(entry, dict) for entry in cases.values()):
        raise OptionError(f"{where}: cases: expected an object of objects, by the names of cases")
    limit_values, run_keys = _split_limits(document, where)
    for name, entry in cases.items():
        case_values, _ = _split_limits(entry, f"{where}: cases.{name[:60]}")
        if name == case:
            limit_values |= case_values
    if case is not None and cases and case not in cases:
        raise OptionError(f"{where}: has no case {case}{suggest(case, list(cases))}: {', '.join(cases)[:160]}")
    notes = [f"{where}: {', '.join(run_keys[:4])}{' ...' if len(run_keys) > 4 else ''} say what ran, and limit nothing"]
    limits = base.with_values(limit_values, where)
    return limits, [*(notes if run_keys else []), *_warn_ineffective(limits, where)]


def _warn_ineffective(limits: GateLimits, where: str) -> Iterator[str]:
    for name in ("lossy_target", "lossless_target"):
        if getattr(limits, name) <= 0:
            yield f"{where}: {name} {getattr(limits, name):g} limits nothing: ratios are above 0"
    if limits.decode_drop_target > 1:
        yield f"{where}: decode_drop_target {limits.decode_drop_target:g} limits nothing: no more than 1 can be lost"


def _split_limits(document: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Split a document into validated limits, and keys that only describe a run."""
    limit_values, run_keys = {}, []
    for key, value in document.items():
        if key in _LIMIT_BY_ENGINE_KEY:
            limit_values[_LIMIT_BY_ENGINE_KEY[key]] = validate_limit(_LIMIT_BY_ENGINE_KEY[key], value, where)
        elif key in _RUN_KEYS or key.startswith(("h2o_", "kv_")):
            run_keys.append(key)
        else:
            limit_values[key] = validate_limit(key, value, where)
    return limit_values, run_keys
