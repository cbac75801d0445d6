"""A tree of fp32 dumps as fp16 dumps: LOSSY, each word to the nearest fp16, ties to even."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arrays.casting import Cast, sum_of
from ..errors import KvmnnError, OutputError, SourceError
from ..files.changes import FileState
from ..files.output import FileOutput, failures
from ..formats.mnn.dump import inside, load_meta, positive
from ..text import LOSSY, count
from ..threads.pipeline import Progress
from .token_runs import FileTensor

_RUN_BYTES = 4 << 20
_WIDTHS = {2: "fp16", 4: "fp32"}


@dataclass
class Converted:
    """What became of the dumps.

    Parameters
    ----------
    source, target
        The two directories.
    converted, copied
        fp32 dumps that were rounded, and fp16 dumps that were taken over.
    skipped
        fp16 dumps without `allow_fp16`, and those whose output existed.
    errors
        One line for each dump that could not be converted.
    disk_full
        Whether the disk was full; nothing more was tried then.
    cast
        What rounding changed in the dumps that were converted.
    """

    source: str
    target: str
    converted: int = 0
    copied: int = 0
    skipped: int = 0
    errors: list[str] = field(default_factory=list)
    disk_full: bool = False
    cast: Cast = field(default_factory=lambda: Cast("fp32", "fp16"))

    @property
    def status(self) -> int:
        """The exit code of the reference's tool: 0 ok, 1 nothing found, 2 some errors, 3 disk full."""
        if self.disk_full:
            return 3
        if self.errors:
            return 2
        return 0 if self.converted + self.copied + self.skipped else 1

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "to_fp16": self.target,
            "label": LOSSY,
            "converted": self.converted,
            "copied": self.copied,
            "skipped": self.skipped,
            "cast": self.cast.to_dict(),
            "errors": self.errors,
        }

    def __str__(self) -> str:
        changed = f"; {self.cast}" if self.converted else ""
        return (
            f"{LOSSY}: {count(self.converted, 'dump')} rounded to fp16, {self.copied:,} copied, "
            f"{self.skipped:,} skipped{changed}"
        )

    def check_found(self) -> None:
        """Raise `SourceError` if there was no dump at all."""
        if self.status == 1:
            if not os.path.isdir(self.source):
                raise SourceError(f"{self.source}: is not a directory")
            raise SourceError(f"{self.source}: has no meta_*.json file below it, so it is not an MNN KV dump")

    def check_complete(self) -> None:
        """Raise `SourceError` if any dump could not be converted."""
        if self.errors:
            raise SourceError(f"{count(len(self.errors), 'dump')} not converted, first: {self.errors[0]}")


def to_fp16(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    allow_fp16: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Convert every dump below `source` into the same place below `target`.

    Metadata keeps all its keys and gets ``source_bytes_per_elem``, ``bytes_per_elem`` 2, ``dtype`` ``"fp16"`` and,
    where words were rounded, ``converted_from`` ``"fp32"``. It is written last, so none describes files
    that are not there. Binary files outside the dump's directory are refused.

    Raises
    ------
    OutputError
        When `target` is inside `source` or the other way round.
    """
    tree, made = Path(source).resolve(), Path(target).resolve()
    if tree == made or tree in made.parents or made in tree.parents:
        raise OutputError(f"{made}: the input and the output must not lie in each other")
    found = Converted(os.fspath(source), os.fspath(target))
    for meta in sorted(tree.rglob("meta_*.json")):
        try:
            _convert(tree, meta, made, found, allow_fp16, overwrite, progress)
        except KvmnnError as exc:
            found.errors.append(str(exc))
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.ENOSPC:
                found.disk_full = True
                break
    return found


def _convert(
    source: Path,
    meta: Path,
    target: Path,
    found: Converted,
    allow_fp16: bool,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    fields = load_meta(meta)
    width = positive(meta, fields, "bytes_per_elem")
    if width not in _WIDTHS:
        raise SourceError(f"{meta}: bytes_per_elem is {width}, expected 2 (fp16) or 4 (fp32)")
    tensors = [_tensor(source, meta, fields, key, width) for key in ("k_file", "v_file")]
    outputs = [target / path.relative_to(source) for path in (*(tensor.path for tensor in tensors), meta)]
    if (width == 2 and not allow_fp16) or (not overwrite and any(path.exists() for path in outputs)):
        found.skipped += 1
        return
    cast = Cast(_WIDTHS[width], "fp16")
    for tensor, path in zip(tensors, outputs, strict=False):
        with _file(path, overwrite) as output:
            for run in tensor.stored_runs(max(1, _RUN_BYTES // tensor.token_bytes)):
                output.file.write(cast.run(run).data)
                if progress:
                    progress(run.size)
            output.commit()
    with _file(outputs[-1], overwrite) as output:
        output.file.write(json.dumps(new_fields(fields, width), indent=2).encode() + b"\n")
        output.commit()
    if width == 4:
        found.converted += 1
        found.cast = sum_of([found.cast, cast])
    else:
        found.copied += 1


def new_fields(fields: dict[str, Any], width: int) -> dict[str, Any]:
    """The metadata of the fp16 dump made of one of `width`-byte words."""
    made = {**fields, "source_bytes_per_elem": width, "bytes_per_elem": 2, "dtype": "fp16"}
    return {**made, "converted_from": "fp32"} if width == 4 else made


def _tensor(source: Path, meta: Path, fields: dict[str, Any], key: str, width: int) -> FileTensor:
    path = inside(source, meta, key, fields.get(key))
    tokens, heads, dims = (positive(meta, fields, name) for name in ("seq_len", "kv_heads", "head_dim"))
    try:
        file = FileState.of(path)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror}") from exc
    tensor = FileTensor(file, (tokens, heads, dims), width)
    if not tensor.is_complete():
        raise SourceError(f"{path}: has {file.size} bytes, its metadata says {tokens} x {heads} x {dims} x {width}")
    return tensor


def _file(path: Path, overwrite: bool) -> FileOutput:
    with failures(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return FileOutput(path, force=overwrite)
