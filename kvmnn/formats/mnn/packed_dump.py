"""The packed variant of MNN KV dumps: ``packed_meta_*.json``, each naming the used part of a layer's packed buffers.

Head after head, a binary file holds the tiles of the tokens in use; the metadata tells the pack numbers, which no other
file of MNN does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from ... import dtypes
from ...arrays.named_array import LazyArray, UnsupportedArrayError
from ...arrays.source import Source
from ...dtypes import PARTS, Part
from ...errors import SourceError
from ...packed.cache_info import LayerInfo
from ...packed.layout import PackLayout
from ...packed.rows import get_head_bytes
from ..options import ReadOptions
from ..reading import select_tensors
from .dump import parse_element_type, parse_positive_int, read_meta, resolve_inside
from .packed_files import get_file_size
from .packed_reading import iter_packed_chunks

PACKED_META_GLOB = "packed_meta_*.json"


def has_packed_dump(path: str) -> bool:
    """Whether a packed dump lies below a directory."""
    return os.path.isdir(path) and next(Path(path).rglob(PACKED_META_GLOB), None) is not None


def read_packed_dump(path: str, options: ReadOptions) -> Source:
    """K and V of every packed dump below the directory, each ``[kv_head, token, head_dim]``, by metadata path."""
    root = Path(path)
    entries: list[tuple[str, Callable[[], LazyArray]]] = []
    opened: list[str] = []
    for meta in sorted(root.rglob(PACKED_META_GLOB)):
        opened.append(str(meta))
        for name, file, make_array in _iter_packed_tensors(root, meta, options):
            opened.append(str(file))
            entries.append((name, make_array))
    if not entries:
        raise SourceError(f"{path}: has no {PACKED_META_GLOB} file below it, so it is not a packed MNN KV dump")
    arrays, skipped = select_tensors(path, entries, options)
    return Source(arrays, skipped_arrays=skipped, opened_files=tuple(opened))


def _iter_packed_tensors(
    root: Path, meta: Path, options: ReadOptions
) -> Iterator[tuple[str, Path, Callable[[], LazyArray]]]:
    fields = read_meta(meta)
    if fields.get("layout") != "packed":
        raise SourceError(f"{meta}: layout is {fields.get('layout')!r:.80}, expected 'packed'")
    layout = PackLayout(
        parse_positive_int(meta, fields, "kv_heads"),
        parse_positive_int(meta, fields, "head_dim"),
        parse_element_type(meta, fields).name,
        parse_positive_int(meta, fields, "pack_l"),
        parse_positive_int(meta, fields, "pack_h"),
        parse_positive_int(meta, fields, "flash_upper_kv"),
    )
    for part in PARTS:
        file = resolve_inside(root, meta, f"{part[0]}_file", fields.get(f"{part[0]}_file"))
        name = PurePath(file.relative_to(root)).with_suffix("").as_posix()
        yield name, file, partial(_make_packed_array, file, name, meta, fields, layout, part, options)


def _make_packed_array(
    file: Path, name: str, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part, options: ReadOptions
) -> LazyArray:
    if options.dtype not in (None, layout.dtype):
        raise UnsupportedArrayError(f"{file}: holds {layout.dtype} words, not {options.dtype}")
    num_tokens = parse_positive_int(meta, fields, "used_seq_len")
    layer = LayerInfo(
        layer=0,
        tokens=num_tokens,
        capacity=_resolve_capacity(file, meta, fields, layout, part),
        positions=((0, num_tokens),),
    )
    return LazyArray(
        name=name,
        dtype=layout.dtype,
        shape=(layout.kv_heads, num_tokens, layout.head_dim),
        array_dtype=dtypes.parse_dtype(layout.dtype).numpy_dtype.str,
        reader=partial(iter_packed_chunks, str(file), layout, part, layer),
    )


def _resolve_capacity(file: Path, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part) -> int:
    """Tokens that the file has room for: the tiles in use, or all of the buffer."""
    used_tokens, max_tokens = (
        parse_positive_int(meta, fields, "used_seq_len"),
        parse_positive_int(meta, fields, "max_seq_len"),
    )
    if used_tokens > max_tokens:
        raise SourceError(f"{meta}: used_seq_len is {used_tokens}, above max_seq_len, {max_tokens}")
    used_bytes, stride_bytes = (
        parse_positive_int(meta, fields, f"{part}_used_bytes"),
        parse_positive_int(meta, fields, f"{part}_stride_bytes"),
    )
    if stride_bytes != get_head_bytes(layout, part, max_tokens):
        raise SourceError(
            f"{meta}: {part}_stride_bytes is {stride_bytes}, expected {get_head_bytes(layout, part, max_tokens)} for "
            f"{max_tokens} tokens"
        )
    for capacity in (used_tokens, max_tokens):
        if used_bytes == get_head_bytes(layout, part, capacity):
            file_bytes, expected_bytes = get_file_size(str(file)), used_bytes * layout.kv_heads
            if file_bytes != expected_bytes:
                raise SourceError(f"{file}: has {file_bytes} bytes, its metadata says {expected_bytes}")
            return capacity
    raise SourceError(
        f"{meta}: {part}_used_bytes is {used_bytes}, expected {get_head_bytes(layout, part, used_tokens)} for "
        f"{used_tokens} tokens"
    )
