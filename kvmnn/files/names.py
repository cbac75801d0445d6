"""Names of files: for arrays, of outputs, of inputs."""

from __future__ import annotations

import os
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


def is_directory(output: str) -> bool:
    """Whether an output is meant as a directory: it ends in a slash, or there is one."""
    return output.endswith(("/", os.sep)) or os.path.isdir(output)


def with_contents(paths: Iterable[str]) -> list[str]:
    """Paths, and the files directly in those that are directories."""
    found = list(paths)
    for path in list(found):
        if os.path.isdir(path):
            found.extend(entry.path for entry in os.scandir(path))
    return found
