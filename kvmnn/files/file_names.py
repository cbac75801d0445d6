"""File names for arrays, outputs and inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath, PureWindowsPath
from typing import Final, Literal

from ..errors import OutputError

FRAME_SUFFIX: Final = ".frame"
LAYER_STREAM_SUFFIXES: Final = {"profile": ".kvml", "transform": ".kvmx"}
FRAMES_FOLDER_SUFFIX: Final = ".frames/"
"""Of the folder of several arrays; the slash says that it is one."""
SIDECAR_SUFFIX: Final = ".json"
"""Suffix that turns the name of a frame file into that of its manifest."""
POSITIONS_FILE: Final = "positions.json"
TOKEN_IDS_FILE: Final = "token_ids.json"
SIDECAR_FILES: Final = (POSITIONS_FILE, TOKEN_IDS_FILE)
"""Sidecars that `kvmnn dump-kv` writes next to K and V, and that are read next to arrays."""
COMPLETENESS_FILE: Final = "completeness.json"
"""File of a folder of arrays that records which state of the model they contain."""
LOSS_FILE: Final = "loss.json"
"""File of a folder of arrays that are not exactly those that an engine computed: a sentence about what was lost."""
FOLDER_FILES: Final = (*SIDECAR_FILES, COMPLETENESS_FILE, LOSS_FILE)
"""All files that are read next to the arrays of a folder."""


def make_file_names(names: Iterable[str], suffix: str) -> list[str]:
    """Make plain file names for arrays, distinct even if case is ignored, in the order of `names`."""
    names_in_use: set[str] = set()
    counts: dict[str, int] = {}
    file_name_list = []
    for name in names:
        safe_name = re.sub(r"[^\w.+~-]+", "_", name, flags=re.ASCII).lstrip(".")[:120] or "array"
        candidate, count = safe_name, counts.get(safe_name.lower(), 1)
        while candidate.lower() in names_in_use:
            count += 1
            candidate = f"{safe_name}~{count}"
        counts[safe_name.lower()] = count
        names_in_use.add(candidate.lower())
        file_name_list.append(candidate + suffix)
    return file_name_list


def make_member_names(names: Sequence[str], suffix: str, label: str) -> list[str]:
    """Make names of archive members for arrays, from which the names of the arrays can be restored."""
    all_names = set(names)
    for name in names:
        is_plain = not set("\\\0") & set(name) and not PureWindowsPath(name).is_absolute()
        if name and not (is_plain and all(part not in ("", ".", "..") for part in name.split("/"))):
            problem = "is no plain relative path"
        elif name.endswith(suffix) and name.removesuffix(suffix) in all_names:
            problem = f"would be taken for {name.removesuffix(suffix)!r}, which is there, too"
        else:
            continue
        raise OutputError(f"{label}: the array name {name!r} {problem}: use .safetensors or a directory (-o DIR/)")
    return [name + suffix for name in names]


def describe_renamed_files(
    files: Iterable[tuple[str, str]], kind: Literal["files", "directories"] = "files", max_listed: int = 4
) -> str:
    """List the arrays whose file has another name, given as `(name, file)`; empty if none has."""
    texts = [
        f"{name!r} in {file}" for name, file in files if name != (PurePath(file).stem if kind == "files" else file)
    ]
    more_text = f" and {len(texts) - max_listed:,} more" if len(texts) > max_listed else ""
    return f"{kind} of other names than their arrays: {', '.join(texts[:max_listed])}{more_text}" if texts else ""


def is_directory_output(output: str) -> bool:
    """Return whether an output is a directory: it ends in a slash, or exists as one."""
    return output.endswith(("/", os.sep)) or os.path.isdir(output)


def is_folder_output(output: str, num_arrays: int) -> bool:
    """Return whether as many arrays are written to a folder."""
    return is_directory_output(output) or (num_arrays != 1 and not PurePath(output).suffix)


def list_with_contents(paths: Iterable[str]) -> list[str]:
    """List paths, and the files directly in those that are directories."""
    all_paths = list(paths)
    for path in list(all_paths):
        if os.path.isdir(path):
            all_paths.extend(entry.path for entry in os.scandir(path))
    return all_paths


def has_zarr_suffix(output: object) -> bool:
    """Return whether the name of an output is that of a Zarr store."""
    return isinstance(output, str | os.PathLike) and PurePath(os.fspath(output)).suffix.lower() == ".zarr"
