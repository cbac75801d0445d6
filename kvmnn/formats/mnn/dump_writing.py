"""K and V of a cache as the engine's KV dump writes them: plain (`dump` reads it) or packed (`packed_dump`)."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.layers import LayerArray, common_geometry
from ...arrays.named_array import Piece
from ...errors import OutputError
from ...files.output import DirectoryOutput, StagedFile, failures
from ...packed.layout import PackLayout
from ...packed.rows import head_bytes
from ...threads.pipeline import Progress
from .packed_writing import PackedPart, RowOrder, make_room

_STEP = 8 << 20


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
    _, _, dtype = common_geometry(arrays)
    if dtype not in ("fp16", "fp32"):
        raise OutputError(f"a KV dump holds fp16 or fp32, not {dtype}")
    if not re.fullmatch(r"[\w.+-]{1,100}", run_id, re.ASCII) or run_id in (".", ".."):
        raise OutputError(f"{run_id!r:.120}: is not a run id: expected letters, digits and . _ + -")
    for key, value in zip(arrays[::2], arrays[1::2], strict=True):
        heads, _, dims = key.geometry
        about = {"kv_heads": heads, "head_dim": dims, "bytes_per_elem": key.array.word_bytes}
        folder = f"{run_id}/layer_{key.layer}"
        if packed_as is None:
            _plain_layer(key, value, output, folder, about, flash, progress)
        else:
            _packed_layer(key, value, output, folder, about, packed_as, progress)


def _plain_layer(
    key: LayerArray,
    value: LayerArray,
    output: DirectoryOutput,
    folder: str,
    about: dict[str, Any],
    flash: bool,
    progress: Progress | None,
) -> None:
    tokens = key.geometry[1]
    files = {f"{part}_file": f"{part}_t0_{tokens}.bin" for part in "kv"}
    for entry, name in zip((key, value), files.values(), strict=True):
        _write_token_major(entry, output.file(f"{folder}/{name}"), progress)
    meta = {
        "layer_id": key.layer,
        "seq_start": 0,
        "seq_len": tokens,
        "seq_end_exclusive": tokens,
        **about,
        "dtype": key.array.dtype,
        "add": tokens,
        "tensor_seq_len": tokens,
        "quant_key": False,
        "quant_value": False,
        "flash_attention": flash,
        "stage": "decode" if tokens == 1 else "prefill",
        "run_id": folder.split("/")[0],
        **files,
    }
    output.file(f"{folder}/meta_t0_{tokens}.json").write(_json(meta))


def _packed_layer(
    key: LayerArray,
    value: LayerArray,
    output: DirectoryOutput,
    folder: str,
    about: dict[str, Any],
    layout: PackLayout,
    progress: Progress | None,
) -> None:
    tokens = key.geometry[1]
    stem = f"packed_t0_{tokens}"
    files = {f"{part}_file": f"packed_{part}_{stem}.bin" for part in "kv"}
    for entry, name in zip((key, value), files.values(), strict=True):
        file = output.file(f"{folder}/{name}")
        order: RowOrder = "token" if entry.token_major else "head"
        part = PackedPart(file.target, file.path, layout, entry.part, capacity=tokens, tokens=tokens, order=order)
        for run in entry.array.pieces(_STEP):
            part.write(run)
            _done(progress, run)
        part.rewind()
        part.close()
    used = [head_bytes(layout, entry.part, tokens) for entry in (key, value)]
    meta = {
        "layout": "packed",
        "layer_id": key.layer,
        "used_seq_len": tokens,
        "max_seq_len": tokens,
        **about,
        "pack_h": layout.hP,
        "pack_l": layout.lP,
        "flash_upper_kv": layout.value_block(tokens),
        "key_stride_bytes": used[0],
        "value_stride_bytes": used[1],
        "key_used_bytes": used[0],
        "value_used_bytes": used[1],
        "stage": "decode" if tokens == 1 else "prefill",
        "run_id": folder.split("/")[0],
        **files,
    }
    output.file(f"{folder}/packed_meta_{stem}.json").write(_json(meta))


def _write_token_major(entry: LayerArray, file: StagedFile, progress: Progress | None) -> None:
    if entry.token_major:
        for run in entry.array.pieces(_STEP):
            file.write(run.data)
            _done(progress, run)
        return
    heads, tokens, dims = entry.geometry
    row = dims * entry.array.word_bytes
    with failures(file.target), open(file.path, "r+b") as handle:
        make_room(handle.fileno(), heads * tokens * row)
        mapping = mmap.mmap(handle.fileno(), 0)
    table = np.frombuffer(mapping, np.uint8).reshape(tokens, heads, row)
    done, rest = 0, np.empty(0, np.uint8)
    for run in entry.array.pieces(_STEP):
        data = np.concatenate([rest, run]) if rest.size else run
        rows = data.size // row
        rest = data[rows * row :].copy()
        numbers = np.arange(done, done + rows)
        table[numbers % tokens, numbers // tokens] = data[: rows * row].reshape(rows, row)
        done += rows
        _done(progress, run)
    del table


def _done(progress: Progress | None, run: Piece) -> None:
    if progress:
        progress(run.size)


def _json(meta: dict[str, Any]) -> bytes:
    return (json.dumps(meta, indent=2) + "\n").encode()
