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
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...dtypes import PARTS, Part
from ...errors import SourceError
from ...packed.cache_info import LayerInfo
from ...packed.layout import PackLayout
from ...packed.rows import head_bytes
from ..options import ReadOptions
from ..reading import select
from .dump import inside, load_meta, positive, word_type
from .packed_files import size_of
from .packed_reading import packed_runs

GLOB = "packed_meta_*.json"


def has_packed_dump(path: str) -> bool:
    """Whether a packed dump lies below a directory."""
    return os.path.isdir(path) and next(Path(path).rglob(GLOB), None) is not None


def read(path: str, options: ReadOptions) -> Source:
    """K and V of every packed dump below the directory, each ``[kv_head, token, head_dim]``, by metadata path."""
    root = Path(path)
    entries: list[tuple[str, Callable[[], NamedArray]]] = []
    opened: list[str] = []
    for meta in sorted(root.rglob(GLOB)):
        opened.append(str(meta))
        for name, file, make in _tensors(root, meta, options):
            opened.append(str(file))
            entries.append((name, make))
    if not entries:
        raise SourceError(f"{path}: has no {GLOB} file below it, so it is not a packed MNN KV dump")
    arrays, skipped = select(path, entries, options)
    return Source(arrays, skipped=skipped, opened=tuple(opened))


def _tensors(root: Path, meta: Path, options: ReadOptions) -> Iterator[tuple[str, Path, Callable[[], NamedArray]]]:
    fields = load_meta(meta)
    if fields.get("layout") != "packed":
        raise SourceError(f"{meta}: layout is {fields.get('layout')!r:.80}, expected 'packed'")
    layout = PackLayout(
        positive(meta, fields, "kv_heads"),
        positive(meta, fields, "head_dim"),
        word_type(meta, fields).name,
        positive(meta, fields, "pack_l"),
        positive(meta, fields, "pack_h"),
        positive(meta, fields, "flash_upper_kv"),
    )
    for part in PARTS:
        file = inside(root, meta, f"{part[0]}_file", fields.get(f"{part[0]}_file"))
        name = PurePath(file.relative_to(root)).with_suffix("").as_posix()
        yield name, file, partial(_array, file, name, meta, fields, layout, part, options)


def _array(
    file: Path, name: str, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part, options: ReadOptions
) -> NamedArray:
    if options.dtype not in (None, layout.dtype):
        raise UnsupportedArrayError(f"{file}: holds {layout.dtype} words, not {options.dtype}")
    tokens = positive(meta, fields, "used_seq_len")
    layer = LayerInfo(
        layer=0, tokens=tokens, capacity=_capacity(file, meta, fields, layout, part), positions=((0, tokens),)
    )
    return NamedArray(
        name=name,
        dtype=layout.dtype,
        shape=(layout.kv_heads, tokens, layout.head_dim),
        array_dtype=dtypes.by_name(layout.dtype).numpy.str,
        reader=partial(packed_runs, str(file), layout, part, layer),
    )


def _capacity(file: Path, meta: Path, fields: dict[str, Any], layout: PackLayout, part: Part) -> int:
    """Tokens that the file has room for: the tiles in use, or all of the buffer."""
    used, most = positive(meta, fields, "used_seq_len"), positive(meta, fields, "max_seq_len")
    if used > most:
        raise SourceError(f"{meta}: used_seq_len is {used}, above max_seq_len, {most}")
    said, stride = positive(meta, fields, f"{part}_used_bytes"), positive(meta, fields, f"{part}_stride_bytes")
    if stride != head_bytes(layout, part, most):
        raise SourceError(
            f"{meta}: {part}_stride_bytes is {stride}, expected {head_bytes(layout, part, most)} for {most} tokens"
        )
    for capacity in (used, most):
        if said == head_bytes(layout, part, capacity):
            found, expected = size_of(str(file)), said * layout.kv_heads
            if found != expected:
                raise SourceError(f"{file}: has {found} bytes, its metadata says {expected}")
            return capacity
    raise SourceError(
        f"{meta}: {part}_used_bytes is {said}, expected {head_bytes(layout, part, used)} for {used} tokens"
    )
