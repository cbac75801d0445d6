"""What ``llm_demo`` leaves: a JSON line for each prompt, and four sums among the lines that it prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ...errors import SourceError
from ...files.json_document import loads_strict

_PRINTED_REGEXES = {
    "prompt_tokens": re.compile(r"prompt tokens num = (\d{1,18})"),
    "decode_tokens": re.compile(r"decode tokens num = (\d{1,18})"),
    "prefill_s": re.compile(r"prefill time = ([\d.]{1,40}) s"),
    "decode_s": re.compile(r"decode time = ([\d.]{1,40}) s"),
}


def parse_printed_values(text: str) -> dict[str, float]:
    """Tokens and seconds that ``llm_demo`` prints at its end, of those that are there."""
    value_by_name = {}
    for name, pattern in _PRINTED_REGEXES.items():
        match = pattern.search(text)
        if match and match[1].count(".") <= 1 and match[1] != ".":
            value_by_name[name] = float(match[1])
    return value_by_name


def has_records(name: str, text: str) -> bool:
    """Whether a log is lines of JSON objects: by its name, or because its first line is one."""
    first_line = text.lstrip().partition("\n")[0].rstrip()
    return name.endswith(".jsonl") or (first_line.startswith("{") and first_line.endswith("}"))


def read_json_records(text: str, where: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; of those with one ``prompt_index`` the last.

    Raises
    ------
    SourceError
        For a line that is no JSON object, which is named, and for a number that is not finite.
    """
    record_by_index: dict[object, dict[str, Any]] = {}
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_json_line(line, f"{where}: line {line_number}")
        index = record.get("prompt_index", 0)
        record_by_index[index if isinstance(index, int | float | str) else str(index)] = record
    return list(record_by_index.values())


def parse_json_line(line: str, where: str) -> dict[str, Any]:
    """The object in a line; `SourceError`, which begins with `where`, where it is none."""
    try:
        value = loads_strict(line)
    except json.JSONDecodeError as error:
        raise SourceError(f"{where}: is not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: is not JSON: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: found a {type(value).__name__}, expected a JSON object")
    for key, entry in value.items():
        if isinstance(entry, float) and not math.isfinite(entry):
            raise SourceError(f"{where}: {key[:60]}: found {entry}, expected a finite number")
    return value


def get_number(record: Mapping[str, Any], key: str) -> float:
    """A number of a record; 0 where it is missing or is none."""
    try:
        number = float(record.get(key, 0.0))
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) else 0.0
