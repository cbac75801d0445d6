"""Names of files: for arrays, of outputs, of inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath, PureWindowsPath
from typing import Final

from ..errors import OutputError

FRAME_SUFFIX: Final = ".frame"
SIDE_SUFFIX: Final = ".json"
"""What is appended to a frame file's name to give its manifest's."""
POSITIONS: Final = "positions.json"
TOKEN_IDS: Final = "token_ids.json"
BESIDE: Final = (POSITIONS, TOKEN_IDS)
"""What `kvmnn dump-kv` writes beside K and V, and what is read beside arrays."""
COMPLETENESS: Final = "completeness.json"
"""File of a folder of arrays that records which state of the model they contain."""


def file_names(names: Iterable[str], suffix: str) -> list[str]:
    """Plain file names for arrays, distinct even where case does not count, in the order of `names`."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    found = []
    for name in names:
        plain = re.sub(r"[^\w.+~-]+", "_", name, flags=re.ASCII).lstrip(".")[:120] or "array"
        candidate, count = plain, counts.get(plain.lower(), 1)
        while candidate.lower() in taken:
            count += 1
            candidate = f"{plain}~{count}"
        counts[plain.lower()] = count
        taken.add(candidate.lower())
        found.append(candidate + suffix)
    return found


def member_names(names: Sequence[str], suffix: str, where: str) -> list[str]:
    """The names of members of an archive for arrays, from which the arrays' own can be told again.

    Raises
    ------
    OutputError
        For a name that is no plain relative path, or that readers of such archives would take for another one.
    """
    all_names = set(names)
    for name in names:
        plain = not set("\\\0") & set(name) and not PureWindowsPath(name).is_absolute()
        if name and not (plain and all(part not in ("", ".", "..") for part in name.split("/"))):
            wrong = "is no plain relative path"
        elif name.endswith(suffix) and name.removesuffix(suffix) in all_names:
            wrong = f"would be taken for {name.removesuffix(suffix)!r}, which is there, too"
        else:
            continue
        raise OutputError(f"{where}: the array name {name!r} {wrong}: use .safetensors or a directory (-o DIR/)")
    return [name + suffix for name in names]


def renamed(files: Iterable[tuple[str, str]], most: int = 4) -> str:
    """For people: which arrays, of those whose `(name, file)` is given, lie in files of other names; empty if none."""
    changed = [f"{name!r} in {file}" for name, file in files if PurePath(file).stem != name]
    more = f" and {len(changed) - most:,} more" if len(changed) > most else ""
    return f"files of other names than their arrays: {', '.join(changed[:most])}{more}" if changed else ""


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


def is_named_zarr(output: object) -> bool:
    """Whether the name of an output says a Zarr store."""
    return isinstance(output, str | os.PathLike) and PurePath(os.fspath(output)).suffix.lower() == ".zarr"
