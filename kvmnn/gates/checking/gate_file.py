"""Limits frozen in a JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import OptionError, SourceError
from ...files.json_document import read_object
from ...text import did_you_mean
from .limits import Limits, checked

_KNOBS = ("prompts", "gens", "repeat", "threads", "backend")
"""Of the engine's runs; with its ``h2o_`` and ``kv_`` keys they say what ran, not what it must reach."""

_TAKEN = {
    "kv_lossless_runtime_mode": "runtime_mode",
    "kv_lossless_async_threads": "async_threads",
    "kv_lossless_block_tokens": "lossless_block_tokens",
    "kv_lossless_store_grouped_step_tokens": "store_grouped_step_tokens",
}


def read_gate_file(path: str | os.PathLike[str], case: str | None, base: Limits) -> tuple[Limits, list[str]]:
    """The limits in a file, over those of `base`, and notes on what it says besides.

    The file is an object with limits by their names (`Limits`), and under ``cases`` an object of such objects, by the
    names of cases, each over what stands outside. The fork's own files (``target_core_gate_v6.json``) hold settings of
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
    found, knobs = _sorted_out(document, where)
    for name, entry in cases.items():
        more, _ = _sorted_out(entry, f"{where}: cases.{name[:60]}")
        if name == case:
            found |= more
    if case is not None and cases and case not in cases:
        raise OptionError(f"{where}: has no case {case}{did_you_mean(case, list(cases))}: {', '.join(cases)[:160]}")
    notes = [f"{where}: {', '.join(knobs[:4])}{' ...' if len(knobs) > 4 else ''} say what ran, and limit nothing"]
    limits = base.changed(found, where)
    return limits, [*(notes if knobs else []), *_of_no_effect(limits, where)]


def _of_no_effect(limits: Limits, where: str) -> Iterator[str]:
    for name in ("lossy_target", "lossless_target"):
        if getattr(limits, name) <= 0:
            yield f"{where}: {name} {getattr(limits, name):g} limits nothing: ratios are above 0"
    if limits.decode_drop_target > 1:
        yield f"{where}: decode_drop_target {limits.decode_drop_target:g} limits nothing: no more than 1 can be lost"


def _sorted_out(document: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Limits by name, checked, and the keys that only describe a run."""
    found, knobs = {}, []
    for key, value in document.items():
        if key in _TAKEN:
            found[_TAKEN[key]] = checked(_TAKEN[key], value, where)
        elif key in _KNOBS or key.startswith(("h2o_", "kv_")):
            knobs.append(key)
        else:
            found[key] = checked(key, value, where)
    return found, knobs
