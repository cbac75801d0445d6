"""What a case must reach, under the names of the fork's analyser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from ...errors import OptionError
from ...text import suggest

Aggregation = Literal["avg", "median", "p90", "best"]
LimitsMode = Literal["", "probe", "full", "store"]

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LIMITS_MODES: tuple[LimitsMode, ...] = get_args(LimitsMode)


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """The gates of a case; a negative limit of a quantity of the runtime turns its gate off.

    Attributes
    ----------
    lossy_target, lossless_target
        Least ratios.
    decode_baseline
        Tokens a second without compression; 0: no gate.
    decode_baseline_source, decode_baseline_samples
        Where it comes from, and of how many values; repeated in the report.
    decode_gate_aggregation
        Which decode speed of the rows is judged.
    decode_drop_target
        Largest share of the baseline that may be lost.
    runtime_mode, async_threads
        How the runtime was set: what must have been active follows from it.
    max_lossless_queue_peak, max_lossless_fallback, max_lossless_backpressure_skip
        Largest values of any row.
    max_lossless_decomp_us, max_lossless_async_wait_us
        Likewise, microseconds.
    async_wait_headroom_warn_ratio
        Warn where less than this share of the waiting allowed is left; negative: never.
    require_runtime_decomp, require_decode_cache_hit, require_async_queue_activity, require_decode_cache_activity
        Some row must show it.
    require_kv_content_consistency, max_kv_invalid_log_lines
        The gate that the fork calls consistency (docs/gates.md says what it compares), and lines of damage allowed.
    strict_runtime_metric_columns
        Fail where a column of the runtime is missing.
    hard_checks
        Also what the fork's script demands before its analyser runs.
    lossless_block_tokens, store_grouped_step_tokens
        What log lines of encodings must show: of the modes probe and full, of store.
    """

    lossy_target: float = 3.0
    lossless_target: float = 1.3
    decode_baseline: float = 0.0
    decode_baseline_source: str = ""
    decode_baseline_samples: int = 0
    decode_gate_aggregation: Aggregation = "avg"
    decode_drop_target: float = 0.05
    runtime_mode: LimitsMode = ""
    async_threads: int = 0
    max_lossless_queue_peak: float = -1.0
    max_lossless_fallback: float = -1.0
    max_lossless_backpressure_skip: float = -1.0
    max_lossless_decomp_us: float = -1.0
    max_lossless_async_wait_us: float = -1.0
    async_wait_headroom_warn_ratio: float = 0.15
    require_runtime_decomp: bool = False
    require_decode_cache_hit: bool = False
    require_async_queue_activity: bool = False
    require_decode_cache_activity: bool = False
    require_kv_content_consistency: bool = False
    max_kv_invalid_log_lines: int = 0
    strict_runtime_metric_columns: bool = False
    hard_checks: bool = False
    lossless_block_tokens: int = 128
    store_grouped_step_tokens: int = 384

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise OptionError(f"{entry.name}: found {value}, expected a finite number")

    def with_values(self, values: Mapping[str, Any], where: str) -> GateLimits:
        """These limits with others in their place.

        Parameters
        ----------
        values
            By their names; of the types that the fields have.
        where
            Begins the messages of errors.

        Raises
        ------
        OptionError
            For a name that no limit has, and a value of another type.
        """
        return replace(self, **{name: validate_limit(name, value, where) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """By name; what a gate file holds."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


_LIMIT_TYPES = get_type_hints(GateLimits)


def validate_limit(name: str, value: Any, where: str) -> Any:
    """The value of a limit in its own type; `OptionError` where it has another, or no limit is called so."""
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
