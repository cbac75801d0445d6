"""Lists of prompts: which files are taken, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import loads_strict, read_bounded

PROMPT_FILE_KEYS = ("prompt_file", "prompt_path", "file", "path", "filename", "name")
"""Of the objects in a list, the first that is there names the file."""

_MAX_MANIFEST_BYTES = 16 << 20
_MAX_PROMPTS = 10_000


def read_prompt_manifest(manifest: str, texts: Sequence[str]) -> list[str]:
    """The files that a list names, each once.

    Parameters
    ----------
    manifest
        A line for each: an object of JSON with one of `PROMPT_FILE_KEYS`, a text of JSON, or the name itself. Names are
        relative to the first folder of `texts`, or to the list's own where there is none.

    Raises
    ------
    SourceError
        For a list that cannot be read or is empty, a line that names no file, and files that are not there.
    """
    root = next((Path(path) for path in texts if Path(path).is_dir()), Path(manifest).parent)
    try:
        data = read_bounded(Path(manifest), _MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{manifest}: does not exist (prompt_manifest)") from None
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise SourceError(f"{manifest}: is not UTF-8: expected a line for each prompt") from None
    prompt_paths: dict[str, None] = {}
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        path = root / _parse_file_name(line.strip(), f"{manifest}: line {line_number}")
        if not path.is_file():
            raise SourceError(f"{manifest}: line {line_number}: {path}: is no file")
        prompt_paths.setdefault(str(path))
    if not 0 < len(prompt_paths) <= _MAX_PROMPTS:
        raise SourceError(f"{manifest}: names {len(prompt_paths):,} prompts: expected 1 to {_MAX_PROMPTS:,}")
    return list(prompt_paths)


def _parse_file_name(line: str, where: str) -> str:
    try:
        value: Any = loads_strict(line) if line[0] in '{"' else line
    except (ValueError, RecursionError):
        raise SourceError(f"{where}: is not JSON, and begins like it") from None
    if isinstance(value, dict):
        value = next((value[key] for key in PROMPT_FILE_KEYS if key in value), None)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise SourceError(f"{where}: names no file: expected one of {', '.join(PROMPT_FILE_KEYS)}")
    return value
