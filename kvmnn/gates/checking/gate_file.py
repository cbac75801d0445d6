"""Limits frozen in a JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import OptionError, SourceError
from ...files.json_document import read_object
from ...text import suggest
from .limits import GateLimits, validate_limit

_RUN_KEYS = ("prompts", "gens", "repeat", "threads", "backend")
"""Of the engine's runs; with its ``h2o_`` and ``kv_`` keys they say what ran, not what it must reach."""

_LIMIT_BY_ENGINE_KEY = {
    "kv_lossless_runtime_mode": "runtime_mode",
    "kv_lossless_async_threads": "async_threads",
    "kv_lossless_block_tokens": "lossless_block_tokens",
    "kv_lossless_store_grouped_step_tokens": "store_grouped_step_tokens",
}


def read_gate_file(path: str | os.PathLike[str], case: str | None, base: GateLimits) -> tuple[GateLimits, list[str]]:
    """The limits in a file, over those of `base`, and notes on what it says besides.

    The file is an object with limits by their names (`GateLimits`), and under ``cases`` an object of such objects, by
    the names of cases, each over what stands outside. The fork's own files (``target_core_gate_v6.json``) hold
    settings of
    runs: mode, threads and block sizes are taken from them, the others limit nothing.

    Raises
    ------
    SourceError
        For a file that is not there.
    OptionError
        For a file that holds no JSON object, a key that nothing knows, a value of another type, and a case that the
        file does not have.
    """
    where = os.fspath(path)
    try:
        document = read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{where}: does not exist") from None
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
    """Limits by name, checked, and the keys that only describe a run."""
    limit_values, run_keys = {}, []
    for key, value in document.items():
        if key in _LIMIT_BY_ENGINE_KEY:
            limit_values[_LIMIT_BY_ENGINE_KEY[key]] = validate_limit(_LIMIT_BY_ENGINE_KEY[key], value, where)
        elif key in _RUN_KEYS or key.startswith(("h2o_", "kv_")):
            run_keys.append(key)
        else:
            limit_values[key] = validate_limit(key, value, where)
    return limit_values, run_keys
