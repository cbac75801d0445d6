"""Hashes of live rows, by which the document of a prefix shows that it was written for the files next to it.

When MNN computes a prefix of the same name again, kvmnn's document stays next to it, and files of equal size do not
show that its tokens, positions and losses are those of other rows. The document therefore has a list of SHA-256 under
`ROW_HASHES_KEY`, one for each of its layers. Each is over the elements of up to `MAX_SAMPLED_ROWS` live rows of every
KV head, first of K, then of V. The rows are evenly spaced: row ``i * (tokens - 1) // (num_rows - 1)`` for ``i`` from 0
to ``num_rows - 1``. So few are enough: in another text, and after the first evicted token, every row differs.
Documents of earlier versions have no hashes and are believed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import numpy as np

from ...dtypes import PART_LETTERS, PARTS
from ...files.mapped_file import MappedFile
from ...files.schema import parse_document
from ...packed.cache_info import MAX_CACHE_INFO_BYTES, CacheInfo, LayerInfo, cache_info_to_dict
from ...packed.layout import HeadRowAccessor, get_head_bytes, get_row_bytes
from .packed_files import PackedFiles, format_data_name

ROW_HASHES_KEY: Final = "row_hashes"
MAX_SAMPLED_ROWS: Final = 8
"""Number of rows of a head that are read, so that opening a prefix costs little, whatever its size."""


def dump_prefix_document(info: CacheInfo, folder: Path) -> bytes:
    """Return the document that is written next to the complete files of a prefix, which are in `folder`."""
    hashes = [
        _hash_rows(
            info, layer, *(folder / format_data_name(info.name, layer.layer, PART_LETTERS[part]) for part in PARTS)
        )
        for layer in info.layers
    ]
    return (json.dumps({**cache_info_to_dict(info), ROW_HASHES_KEY: hashes}) + "\n").encode()


def find_changed_layer(files: PackedFiles, info: CacheInfo) -> int | None:
    """Return the first layer whose rows are not those that the document of `files` was written for; None for none.

    `info` is what the document says of the layers of `files`; `ManifestError` if its hashes are malformed.
    """
    text, label = files.sidecar_document or (b"", "")
    if ROW_HASHES_KEY.encode() not in text:
        return None
    root = parse_document(text, label, MAX_CACHE_INFO_BYTES)
    if ROW_HASHES_KEY not in root.value:
        return None
    layers = root.get("layers").read_list()
    hashes = root.get(ROW_HASHES_KEY).read_list(min_len=len(layers), max_len=len(layers))
    hash_by_layer = {
        layer.get("layer").read_int(0): row_hash.read_sha256() for layer, row_hash in zip(layers, hashes, strict=True)
    }
    for packed_layer, layer in zip(files.layers, info.layers, strict=True):
        if _hash_rows(info, layer, packed_layer.key, packed_layer.value) != hash_by_layer[layer.layer]:
            return layer.layer
    return None


def _hash_rows(info: CacheInfo, layer: LayerInfo, key_path: str | Path, value_path: str | Path) -> str:
    layout, hasher = info.get_layer_layout(layer), hashlib.sha256()
    num_rows = min(layer.tokens, MAX_SAMPLED_ROWS)
    rows = [index * (layer.tokens - 1) // max(num_rows - 1, 1) for index in range(num_rows)]
    for part, path in zip(PARTS, (key_path, value_path), strict=True):
        file, head_bytes = MappedFile(path), get_head_bytes(layout, part, layer.capacity)
        accessor = HeadRowAccessor(layout, part, layer.capacity)
        elements = np.empty(get_row_bytes(layout, part), np.uint8)
        for head in range(layout.kv_heads):
            head_buffer = file.view(head * head_bytes, head_bytes)
            for row in rows:
                accessor.read_rows(head_buffer, row, elements)
                hasher.update(elements.data)
    return hasher.hexdigest()
