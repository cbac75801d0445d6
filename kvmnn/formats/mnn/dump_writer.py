"""Write KV dumps as the engine does, plain or packed; restore one from frames byte for byte."""

from __future__ import annotations

import json
import mmap
import re
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from ..._util.parallel import Progress
from ...arrays.array import Chunk
from ...arrays.layers import LayerArray, require_common_geometry
from ...arrays.source import DUMP_KEY
from ...bundle.decoder import decode_frames
from ...bundle.frame_set import DecodeOptions, FrameSet
from ...bundle.manifest import ArrayEntry
from ...errors import ManifestError, OutputError, SourceError
from ...files.atomic import DirectoryOutput, StagedFile, wrap_os_errors
from ...files.schema import parse_object, read_bounded
from ...packed.layout import PackLayout, get_head_bytes
from ..base import mark_first_chunks
from ..readback import WrittenFile, verify_written
from ..restorer import RestoreResult
from ..sidecars import write_sidecars
from . import dump
from .dump import MAX_META_BYTES, META_GLOB, escapes_root, iter_meta_tensors
from .packed_io import PackedPartWriter, RowOrder, reserve_file_size

_READ_CHUNK_BYTES = 8 << 20


def write_dump(
    arrays: Sequence[LayerArray],
    output: DirectoryOutput,
    run_id: str,
    *,
    packed_as: PackLayout | None = None,
    flash: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write ``<run_id>/layer_<n>/`` with K, V and metadata of every layer; the caller commits `output`.

    Parameters
    ----------
    packed_as
        The layout of a packed dump; None writes ``[token, kv_head, head_dim]``.
    """
    _, _, dtype = require_common_geometry(arrays)
    if dtype not in ("fp16", "fp32"):
        raise OutputError(f"a KV dump holds fp16 or fp32, not {dtype}")
    if not re.fullmatch(r"[\w.+-]{1,100}", run_id, re.ASCII) or run_id in (".", ".."):
        raise OutputError(f"{run_id!r:.120}: is not a run id: expected letters, digits and . _ + -")
    for key, value in zip(arrays[::2], arrays[1::2], strict=True):
        num_heads, _, head_dim = key.geometry
        meta_fields = {"kv_heads": num_heads, "head_dim": head_dim, "bytes_per_elem": key.array.coded_itemsize}
        folder = f"{run_id}/layer_{key.layer}"
        if packed_as is None:
            _write_plain_layer(key, value, output, folder, meta_fields, flash, progress)
        else:
            _write_packed_layer(key, value, output, folder, meta_fields, packed_as, progress)


def _write_plain_layer(
    key: LayerArray,
    value: LayerArray,
    output: DirectoryOutput,
    folder: str,
    meta_fields: dict[str, Any],
    flash: bool,
    progress: Progress | None,
) -> None:
    num_tokens = key.geometry[1]
    files = {f"{part}_file": f"{part}_t0_{num_tokens}.bin" for part in "kv"}
    for entry, name in zip((key, value), files.values(), strict=True):
        _write_token_major(entry, output.open_file(f"{folder}/{name}"), progress)
    meta = {
        "layer_id": key.layer,
        "seq_start": 0,
        "seq_len": num_tokens,
        "seq_end_exclusive": num_tokens,
        **meta_fields,
        "dtype": key.array.dtype,
        "add": num_tokens,
        "tensor_seq_len": num_tokens,
        "quant_key": False,
        "quant_value": False,
        "flash_attention": flash,
        "stage": "decode" if num_tokens == 1 else "prefill",
        "run_id": folder.split("/")[0],
        **files,
    }
    output.open_file(f"{folder}/meta_t0_{num_tokens}.json").write(_dump_meta(meta))


def _write_packed_layer(
    key: LayerArray,
    value: LayerArray,
    output: DirectoryOutput,
    folder: str,
    meta_fields: dict[str, Any],
    layout: PackLayout,
    progress: Progress | None,
) -> None:
    num_tokens = key.geometry[1]
    stem = f"packed_t0_{num_tokens}"
    files = {f"{packed_writer}_file": f"packed_{packed_writer}_{stem}.bin" for packed_writer in "kv"}
    for entry, name in zip((key, value), files.values(), strict=True):
        file = output.open_file(f"{folder}/{name}")
        order: RowOrder = "token" if entry.token_major else "head"
        packed_writer = PackedPartWriter(
            file.target, file.path, layout, entry.part, capacity=num_tokens, num_tokens=num_tokens, order=order
        )
        for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
            packed_writer.write_rows(chunk)
            _report_progress(progress, chunk)
        packed_writer.rewind()
        packed_writer.close()
    used_bytes = [get_head_bytes(layout, entry.part, num_tokens) for entry in (key, value)]
    meta = {
        "layout": "packed",
        "layer_id": key.layer,
        "used_seq_len": num_tokens,
        "max_seq_len": num_tokens,
        **meta_fields,
        "pack_h": layout.hP,
        "pack_l": layout.lP,
        "flash_upper_kv": layout.value_block(num_tokens),
        "key_stride_bytes": used_bytes[0],
        "value_stride_bytes": used_bytes[1],
        "key_used_bytes": used_bytes[0],
        "value_used_bytes": used_bytes[1],
        "stage": "decode" if num_tokens == 1 else "prefill",
        "run_id": folder.split("/")[0],
        **files,
    }
    output.open_file(f"{folder}/packed_meta_{stem}.json").write(_dump_meta(meta))


def _write_token_major(entry: LayerArray, file: StagedFile, progress: Progress | None) -> None:
    if entry.token_major:
        for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
            file.write(chunk.data)
            _report_progress(progress, chunk)
        return
    num_heads, num_tokens, head_dim = entry.geometry
    row_bytes = head_dim * entry.array.coded_itemsize
    with wrap_os_errors(file.target), open(file.path, "r+b") as handle:
        reserve_file_size(handle.fileno(), num_heads * num_tokens * row_bytes)
        mapping = mmap.mmap(handle.fileno(), 0)
    table = np.frombuffer(mapping, np.uint8).reshape(num_tokens, num_heads, row_bytes)
    num_written, remainder = 0, np.empty(0, np.uint8)
    for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
        data = np.concatenate([remainder, chunk]) if remainder.size else chunk
        num_rows = data.size // row_bytes
        remainder = data[num_rows * row_bytes :].copy()
        row_numbers = np.arange(num_written, num_written + num_rows)
        table[row_numbers % num_tokens, row_numbers // num_tokens] = data[: num_rows * row_bytes].reshape(
            num_rows, row_bytes
        )
        num_written += num_rows
        _report_progress(progress, chunk)
    del table


def _report_progress(progress: Progress | None, chunk: Chunk) -> None:
    if progress:
        progress(chunk.size)


def _dump_meta(meta: dict[str, Any]) -> bytes:
    return (json.dumps(meta, indent=2) + "\n").encode()


class _DumpPlan(NamedTuple):
    """The files of a dump: one for each array, in their order, and the bytes of the metadata files, by name."""

    files: list[str]
    metadata_by_name: dict[str, bytes]


def restore_dump(
    frames: FrameSet,
    output: str,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode frames into the files of the KV dump that they were made from, byte for byte; all are read back.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`, of one whole KV dump.
    output
        The directory.
    options
        Limits, codecs, threads.
    force
        Replace files that exist; the frames are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    SourceError
        When the frames are not of a whole KV dump.
    ManifestError
        When the metadata files do not fit the arrays, or name files outside the directory.
    KvmnnError
        As `kvmnn.formats.restore`. Nothing is left behind then.
    """
    start_time = time.perf_counter()
    options = options or DecodeOptions()
    frames.check_size(options)
    plan = _plan_dump(frames, Path(output))
    with DirectoryOutput(output, force=force, exclude=frames.files) as directory:
        directory.check_names([*plan.files, *plan.metadata_by_name])
        _write_dump_files(frames, plan, directory, options, progress)
        sidecar_names = write_sidecars(directory, frames.document.metadata if frames.document else None)
        directory.commit()
    return RestoreResult(
        input=frames.path,
        output=output,
        arrays=frames.arrays,
        is_verified=True,
        is_read_back=True,
        files=tuple(plan.files),
        metadata_files=(*plan.metadata_by_name, *sidecar_names),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
    )


def _plan_dump(frames: FrameSet, root: Path) -> _DumpPlan:
    document_text = frames.document.metadata.get(DUMP_KEY) if frames.document else None
    if document_text is None:
        raise SourceError(
            f"{frames.path}: was not made from a whole KV dump, or by a kvmnn that did not keep its metadata "
            "(kvmnn mnn unpack --output-kind dump makes a dump of any K and V)"
        )
    label = f"{frames.path}: metadata {DUMP_KEY!r}"
    metadata_by_name = dump.load_metadata_files(document_text, label)
    arrays = {array.name: array for array in frames.arrays}
    files: dict[str, str] = {}
    for name, content in metadata_by_name.items():
        if (
            not fnmatchcase(PurePath(name).name, META_GLOB)
            or len(content) > MAX_META_BYTES
            or escapes_root(root, root / name)
        ):
            raise ManifestError(f"{label}: {name!r:.200} is no metadata file of a dump")
        try:
            for tensor in iter_meta_tensors(root, root / name, parse_object(content, f"{name!r:.200}")):
                if tensor.name in files:
                    raise SourceError(f"{name!r:.200}: {tensor.name!r} is of another metadata file, too")
                _check_tensor_matches(label, tensor.name, arrays.get(tensor.name), tensor.shape, tensor.dtype.itemsize)
                files[tensor.name] = tensor.file.relative_to(root).as_posix()
        except SourceError as error:
            raise ManifestError(f"{label}: {error}") from None
    for array in arrays:
        if array not in files:
            raise ManifestError(f"{label}: no metadata file says in which file the array {array!r} lay")
    return _DumpPlan([files[array.name] for array in frames.arrays], metadata_by_name)


def _check_tensor_matches(label: str, name: str, array: ArrayEntry | None, shape: Sequence[int], itemsize: int) -> None:
    actual_form = (array.shape, array.itemsize, array.order) if array else None
    if actual_form != (tuple(shape), itemsize, "C"):
        actual_text = f"has shape {list(array.shape)}, {array.itemsize} bytes each" if array else "is not there"
        raise ManifestError(
            f"{label}: does not fit the arrays: {name!r:.200} {actual_text}, expected {list(shape)}, {itemsize} bytes "
            f"each"
        )


def _write_dump_files(
    frames: FrameSet, plan: _DumpPlan, directory: DirectoryOutput, options: DecodeOptions, progress: Progress | None
) -> None:
    files: list[StagedFile] = []
    for index, data, is_first in mark_first_chunks(decode_frames(frames, options, progress=progress)):
        if is_first:
            files.append(directory.open_file(plan.files[index]))
        files[-1].write(data.data)
        del data
    metadata_files = []
    for name, content in plan.metadata_by_name.items():
        metadata_files.append(directory.open_file(name))
        metadata_files[-1].write(content)
        metadata_files[-1].close()
    written_files = [
        WrittenFile(file.path, file.target, None, [array]) for file, array in zip(files, frames.arrays, strict=True)
    ]
    verify_written(written_files, [array.sha256 or "" for array in frames.arrays], options.threads)
    for file, content in zip(metadata_files, plan.metadata_by_name.values(), strict=True):
        if read_bounded(file.path, MAX_META_BYTES) != content:
            raise OutputError(f"{file.target}: does not read back as it was written")
