"""K and V of a cache as the engine's KV dump writes them: plain (`dump` reads it) or packed (`prefer_packed_dump`)."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.layers import LayerArray, require_common_geometry
from ...arrays.named_array import Chunk
from ...errors import OutputError
from ...files.output import DirectoryOutput, StagedFile, wrap_os_errors
from ...packed.layout import PackLayout
from ...packed.rows import get_head_bytes
from ...threads.pipeline import Progress
from .packed_writing import PackedPartWriter, RowOrder, reserve_file_size

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
    arrays
        K and V of every layer by turns, as `kvmnn.arrays.layers.sort` gives them.
    run_id
        What the engine calls a run: a plain file name.
    packed_as
        The layout of a packed dump; None writes ``[token, kv_head, head_dim]``.
    flash
        Whether the engine used flash attention, for the metadata.

    Raises
    ------
    OutputError
        For bf16, which dumps do not have, and for a run id that is no file name.
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
