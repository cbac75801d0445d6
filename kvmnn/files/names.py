"""File names for arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable


def file_names(names: Iterable[str], suffix: str) -> list[str]:
    """Plain file names for arrays, distinct even where case does not count, in the order of `names`."""
    taken: set[str] = set()
    found = []
    for name in names:
        plain = re.sub(r"[^\w.+~-]+", "_", name, flags=re.ASCII).lstrip(".")[:120] or "array"
        candidate, count = plain, 1
        while candidate.lower() in taken:
            count += 1
            candidate = f"{plain}~{count}"
        taken.add(candidate.lower())
        found.append(candidate + suffix)
    return found
