"""Ratios of offline evaluations (`kvmnn measure`), which the fork's gate takes for the lossless ratio of a run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import read_object
from ..logs.numbers import parse_first_number


@dataclass(frozen=True, kw_only=True)
class OfflineRatio:
    """The document of an offline evaluation: the path as it was given, its ratio, and what lines of a report repeat."""

    path: str
    ratio: float
    num_entries: int
    layers: Any
    raw_bytes: float
    compressed_bytes: float


def read_offline_ratio(path: str | os.PathLike[str]) -> OfflineRatio:
    """The ratio in a document: ``weighted_lossless_ratio``, or ``lossless_ratio`` where that is missing.

    Raises
    ------
    SourceError
        For a file that is not there, is no JSON object, or has no ratio above 0.
    """
    where = os.fspath(path)
    try:
        document = read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"offline lossless json not found: {where}") from None
    ratio = parse_first_number(document.get("weighted_lossless_ratio", document.get("lossless_ratio", 0.0)))
    num_entries, raw_bytes, compressed_bytes = (
        parse_first_number(document.get(key, 0)) for key in ("selected_entries", "raw_bytes", "compressed_bytes")
    )
    if not ratio > 0 or not all(map(math.isfinite, (ratio, num_entries, raw_bytes, compressed_bytes))):
        raise SourceError(f"invalid lossless ratio in {where}: found {ratio}, expected a finite number above 0")
    return OfflineRatio(
        path=where,
        ratio=ratio,
        num_entries=int(num_entries),
        layers=document.get("selected_layers", []),
        raw_bytes=raw_bytes,
        compressed_bytes=compressed_bytes,
    )
