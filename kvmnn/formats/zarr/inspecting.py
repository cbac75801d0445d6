"""What a Zarr store holds, in arrays, chunks and bytes; nothing is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...arrays.completeness import Completeness, completeness_document
from ...arrays.engine_cache import EngineCache
from ...arrays.held_tokens import held_tokens
from ...arrays.layer_states import list_states, runs_by_layer
from ...packed.cache_info import Ranges
from ...text import count, ratio
from ..listing import LISTED
from ..options import ReadOptions
from .grid import Index, counts
from .reading import read, stored


@dataclass(frozen=True, kw_only=True)
class StoredInfo:
    """An array of a store.

    Parameters
    ----------
    name, dtype, shape
        As for `ArrayInfo`.
    chunk_shape
        Of every chunk.
    chunks, missing
        How many there are, and how many are not there: they read as the fill value.
    codec
        ``"kvmnn.frame"``, ``"bytes"``, ``"bytes, zstd"`` ...
    raw_bytes, stored_bytes
        Of the array, and of its files.
    sha256
        Of its words, as noted down.
    """

    name: str
    dtype: str
    shape: Index
    chunk_shape: Index
    chunks: int
    missing: int
    codec: str
    raw_bytes: int
    stored_bytes: int
    sha256: str | None

    @property
    def ratio(self) -> float | None:
        """Raw over stored bytes; None where chunks are not there."""
        return None if self.missing else ratio(self.raw_bytes, self.stored_bytes)

    def __str__(self) -> str:
        missing = f" ({self.missing:,} not there)" if self.missing else ""
        return (
            f"  {self.name}: {self.dtype} {list(self.shape)}, {count(self.chunks, 'chunk')}{missing} of "
            f"{list(self.chunk_shape)} ({self.codec}), "
            f"{_sizes(self.raw_bytes, self.stored_bytes, self.ratio)}"
        )


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """A store.

    Parameters
    ----------
    path
        The directory, or the URL.
    arrays
        Those that frames can hold.
    skipped
        One line for each other one.
    engine_cache
        What the cache that it was made from said of itself.
    chunks, missing
        Of all arrays, and those of them that are not there.
    left_out
        How many more arrays there are (`first`).
    completeness
        The state of the model that the arrays contain, where that is known.
    positions
        Runs of the positions that each layer has, ``(begin, size)``, where they are known.
    """

    path: str
    arrays: Sequence[StoredInfo]
    skipped: Sequence[str]
    engine_cache: EngineCache | None
    raw_bytes: int
    stored_bytes: int
    chunks: int
    missing: int
    left_out: int = 0
    completeness: Completeness | None = None
    positions: Mapping[int, Ranges] = field(default_factory=dict)

    def first(self, most: int = LISTED) -> StoreInfo:
        """The first arrays: a store may have thousands."""
        return replace(self, arrays=self.arrays[:most], left_out=self.left_out + max(0, len(self.arrays) - most))

    @property
    def ratio(self) -> float | None:
        """Raw over stored bytes; None where chunks are not there, as nothing is stored of them."""
        return None if self.missing else ratio(self.raw_bytes, self.stored_bytes)

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the sizes, in lines."""
        if not self.missing:
            return []
        return [f"{self.missing:,} of {count(self.chunks, 'chunk')} are not there, and read as the fill value"]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        arrays = [
            {**vars(array), "shape": list(array.shape), "chunk_shape": list(array.chunk_shape)} for array in self.arrays
        ]
        return {
            "input": self.path,
            "kind": "zarr",
            "arrays": arrays,
            "arrays_left_out": self.left_out,
            "skipped": list(self.skipped),
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": self.ratio,
            "notes": self.notes,
            **({"engine_cache": self.engine_cache.to_dict()} if self.engine_cache else {}),
            **completeness_document(self.completeness),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.path}: Zarr store of {count(len(self.arrays) + self.left_out, 'array')}, "
            f"{_sizes(self.raw_bytes, self.stored_bytes, self.ratio)}"
        ]
        lines += [f"  {line}" for line in self.notes]
        lines += [f"  {self.engine_cache}"] if self.engine_cache else []
        lines += [f"  {line}" for line in list_states(self.completeness, self.positions)]
        lines += [str(array) for array in self.arrays]
        lines += [f"  and {self.left_out:,} more: -v lists all"] if self.left_out else []
        lines += [f"  not: {line}" for line in self.skipped]
        return "\n".join(lines)


def inspect_store(path: str, options: ReadOptions | None = None) -> StoreInfo:
    """List the arrays of a store, with the sizes of their files.

    Raises
    ------
    KvmnnError
        As `kvmnn.open`.
    """
    source = read(path, options or ReadOptions(frames=False, skip_unsupported=True))
    makers = dict(stored(path)[0])
    arrays = []
    for array in source.arrays:
        found = makers[array.name]()
        document, sizes = found.document, found.sizes()
        chunks = math.prod(counts(document.shape, document.chunks))
        arrays.append(
            StoredInfo(
                name=array.name,
                dtype=array.dtype,
                shape=array.shape,
                chunk_shape=document.chunks,
                chunks=chunks,
                missing=chunks - len(sizes),
                codec=document.codec_name,
                raw_bytes=array.nbytes,
                stored_bytes=sum(sizes),
                sha256=found.sha256,
            )
        )
    return StoreInfo(
        path=source.inputs[0],
        arrays=arrays,
        skipped=tuple(source.skipped),
        engine_cache=source.engine_cache,
        raw_bytes=source.nbytes,
        stored_bytes=sum(array.stored_bytes for array in arrays),
        chunks=sum(array.chunks for array in arrays),
        missing=sum(array.missing for array in arrays),
        completeness=source.completeness,
        positions=runs_by_layer(held_tokens(source)),
    )


def _sizes(raw_bytes: int, stored_bytes: int, times: float | None) -> str:
    return f"{raw_bytes:,} -> {stored_bytes:,} bytes" + ("" if times is None else f", ratio {times:.4f}")
