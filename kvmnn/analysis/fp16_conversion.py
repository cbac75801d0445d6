"""Convert a folder of fp32 dumps to fp16. LOSSY: each element is rounded to nearest, ties to even."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._util.parallel import Progress
from .._util.text import LOSSY, pluralize
from ..arrays.cast import CastStats, merge_cast_stats
from ..errors import KvmnnError, OutputError, SourceError, build_read_error
from ..files.atomic import FileOutput, wrap_os_errors
from ..files.change_detection import FileState
from ..files.schema import Record, json_key
from ..formats.mnn.dump import parse_positive_int, read_meta, resolve_inside
from .tensor_reader import FileTensor

_CHUNK_BYTES = 4 << 20
_DTYPE_BY_ITEMSIZE = {2: "fp16", 4: "fp32"}


@dataclass
class Fp16ConvertResult(Record):
    """Result of a conversion: dumps converted, copied, skipped and failed."""

    #: The two directories.
    source: str = field(metadata={"json": False})
    target: str = field(metadata={"key": "to_fp16"})
    #: fp32 dumps that were rounded, and fp16 dumps that were copied.
    converted: int = 0
    copied: int = 0
    #: fp16 dumps without `allow_fp16`, and those whose output existed.
    skipped: int = 0
    #: Changes by rounding the converted dumps.
    cast_stats: CastStats = field(default_factory=lambda: CastStats("fp32", "fp16"), metadata={"key": "cast"})
    #: One line for each dump that could not be converted.
    errors: list[str] = field(default_factory=list)
    #: Whether the disk was full; nothing more was tried then.
    disk_full: bool = field(default=False, metadata={"json": False})

    @property
    @json_key(after="target")
    def label(self) -> str:
        """``"LOSSY"``, because elements are rounded."""
        return LOSSY

    @property
    def exit_code(self) -> int:
        """The exit code of the reference's tool: 0 ok, 1 nothing found, 2 some errors, 3 disk full."""
        if self.disk_full:
            return 3
        if self.errors:
            return 2
        return 0 if self.converted + self.copied + self.skipped else 1

    def __str__(self) -> str:
        cast_text = f"; {self.cast_stats}" if self.converted else ""
        return (
            f"{LOSSY}: {pluralize(self.converted, 'dump')} rounded to fp16, {self.copied:,} copied, "
            f"{self.skipped:,} skipped{cast_text}"
        )

    def require_dumps(self) -> None:
        """Raise `SourceError` if there was no dump at all."""
        if self.exit_code == 1:
            if not os.path.isdir(self.source):
                raise SourceError(f"{self.source}: is not a directory")
            raise SourceError(f"{self.source}: has no meta_*.json file below it, so it is not an MNN KV dump")

    def require_no_errors(self) -> None:
        """Raise `SourceError` if any dump could not be converted."""
        if self.errors:
            raise SourceError(f"{pluralize(len(self.errors), 'dump')} not converted, first: {self.errors[0]}")


def convert_to_fp16(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    allow_fp16: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Fp16ConvertResult:
    """Convert every dump below `source` into the same place below `target`.

    Metadata keeps all its keys and gets ``source_bytes_per_elem``, ``bytes_per_elem`` 2, ``dtype`` ``"fp16"`` and,
    where words were rounded, ``converted_from`` ``"fp32"``. It is written last, so none describes files
    that are not there. Binary files outside the dump's directory are refused.

    Raises
    ------
    OutputError
        When `target` is inside `source` or the other way round.
    """
    source_root, target_root = Path(source).resolve(), Path(target).resolve()
    if source_root == target_root or source_root in target_root.parents or target_root in source_root.parents:
        raise OutputError(f"{target_root}: the input and the output must not lie in each other")
    result = Fp16ConvertResult(os.fspath(source), os.fspath(target))
    for meta in sorted(source_root.rglob("meta_*.json")):
        try:
            _convert_dump(source_root, meta, target_root, result, allow_fp16, overwrite, progress)
        except KvmnnError as exc:
            result.errors.append(str(exc))
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.ENOSPC:
                result.disk_full = True
                break
    return result


def _convert_dump(
    source: Path,
    meta: Path,
    target: Path,
    result: Fp16ConvertResult,
    allow_fp16: bool,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    fields = read_meta(meta)
    itemsize = parse_positive_int(meta, fields, "bytes_per_elem")
    if itemsize not in _DTYPE_BY_ITEMSIZE:
        raise SourceError(f"{meta}: bytes_per_elem is {itemsize}, expected 2 (fp16) or 4 (fp32)")
    tensors = [_open_tensor(source, meta, fields, key, itemsize) for key in ("k_file", "v_file")]
    outputs = [target / path.relative_to(source) for path in (*(tensor.path for tensor in tensors), meta)]
    if (itemsize == 2 and not allow_fp16) or (not overwrite and any(path.exists() for path in outputs)):
        result.skipped += 1
        return
    cast = CastStats(_DTYPE_BY_ITEMSIZE[itemsize], "fp16")
    for tensor, path in zip(tensors, outputs, strict=False):
        with _open_output(path, overwrite) as output:
            for chunk in tensor.iter_stored_chunks(max(1, _CHUNK_BYTES // tensor.token_bytes)):
                output.file.write(cast.cast(chunk).data)
                if progress:
                    progress(chunk.size)
            output.commit()
    with _open_output(outputs[-1], overwrite) as output:
        output.file.write(json.dumps(convert_fields(fields, itemsize), indent=2).encode() + b"\n")
        output.commit()
    if itemsize == 4:
        result.converted += 1
        result.cast_stats = merge_cast_stats([result.cast_stats, cast])
    else:
        result.copied += 1


def convert_fields(fields: dict[str, Any], itemsize: int) -> dict[str, Any]:
    """Return the metadata of the fp16 dump for that of a dump of `itemsize`-byte elements."""
    new_fields = {**fields, "source_bytes_per_elem": itemsize, "bytes_per_elem": 2, "dtype": "fp16"}
    return {**new_fields, "converted_from": "fp32"} if itemsize == 4 else new_fields


def _open_tensor(source: Path, meta: Path, fields: dict[str, Any], key: str, itemsize: int) -> FileTensor:
    path = resolve_inside(source, meta, key, fields.get(key))
    tokens, heads, dims = (parse_positive_int(meta, fields, name) for name in ("seq_len", "kv_heads", "head_dim"))
    try:
        file = FileState.from_path(path)
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    tensor = FileTensor(file, (tokens, heads, dims), itemsize)
    if not tensor.is_complete():
        raise SourceError(f"{path}: has {file.size} bytes, its metadata says {tokens} x {heads} x {dims} x {itemsize}")
    return tensor


def _open_output(path: Path, overwrite: bool) -> FileOutput:
    with wrap_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return FileOutput(path, force=overwrite)
