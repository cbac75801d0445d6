"""Inspect a Zarr store: arrays, chunks and sizes, without decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from ..._util.dataclass import dataclass
from ..._util.text import compute_ratio, pluralize
from ...arrays.completeness import Completeness
from ...arrays.engine_cache import EngineCacheInfo
from ...arrays.positions import describe_layer_states, position_runs_by_layer, read_token_positions
from ...arrays.source import list_losses
from ...files.schema import Record, json_key
from ...packed.cache_info import PositionRuns
from ..inspection import MAX_LISTED_ARRAYS
from ..options import ReadOptions
from .metadata import ChunkIndex, count_chunks
from .reader import list_zarr_arrays, read


@dataclass(frozen=True, kw_only=True)
class ZarrArrayInfo(Record):
    """An array of a store."""

    #: As for `ArrayInfo`.
    name: str
    dtype: str
    shape: ChunkIndex
    #: Shape of every chunk.
    chunk_shape: ChunkIndex
    #: Numbers of all chunks and of missing ones, which read as the fill value.
    chunks: int
    missing: int
    #: ``"kvmnn.frame"``, ``"bytes"``, ``"bytes, zstd"`` ...
    codec: str
    #: Sizes of the array and of its files.
    raw_bytes: int
    stored_bytes: int
    #: Recorded SHA-256 of its words.
    sha256: str | None

    @property
    def ratio(self) -> float | None:
        """Return raw bytes divided by stored bytes; None if chunks are missing."""
        return None if self.missing else compute_ratio(self.raw_bytes, self.stored_bytes)

    def __str__(self) -> str:
        missing_text = f" ({self.missing:,} not there)" if self.missing else ""
        return (
            f"  {self.name}: {self.dtype} {list(self.shape)}, {pluralize(self.chunks, 'chunk')}{missing_text} of "
            f"{list(self.chunk_shape)} ({self.codec}), {_format_sizes(self.raw_bytes, self.stored_bytes, self.ratio)}"
        )


@dataclass(frozen=True, kw_only=True)
class ZarrStoreInfo(Record):
    """Arrays and totals of a store."""

    #: Path or URL of the store.
    path: str = field(metadata={"key": "input"})
    kind: Literal["zarr"] = field(default="zarr", init=False)
    #: Arrays that frames can store.
    arrays: Sequence[ZarrArrayInfo]
    #: Number of arrays that `truncate` removed.
    arrays_left_out: int = 0
    #: One line for each other array.
    skipped: Sequence[str]
    raw_bytes: int
    stored_bytes: int
    #: Description of the engine's cache that it was made from.
    engine_cache: EngineCacheInfo | None = field(metadata={"omit": True})
    #: How much of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: Known positions of each layer as ``(begin, size)`` runs.
    positions: Mapping[int, PositionRuns] = field(default_factory=dict, metadata={"json": False})
    #: Lines of `notes` about what K and V had lost before.
    losses: tuple[str, ...] = field(default=(), metadata={"json": False})
    #: Numbers of chunks of all arrays and of missing ones.
    chunks: int = field(metadata={"json": False})
    missing: int = field(metadata={"json": False})

    def truncate(self, max_listed: int = MAX_LISTED_ARRAYS) -> ZarrStoreInfo:
        """Return only the first arrays: a store may have thousands."""
        return replace(
            self,
            arrays=self.arrays[:max_listed],
            arrays_left_out=self.arrays_left_out + max(0, len(self.arrays) - max_listed),
        )

    @property
    @json_key(after="stored_bytes")
    def ratio(self) -> float | None:
        """Return raw bytes divided by stored bytes; None if chunks are missing, which store nothing."""
        return None if self.missing else compute_ratio(self.raw_bytes, self.stored_bytes)

    @property
    @json_key(after="ratio")
    def notes(self) -> list[str]:
        """Return lines about what K and V had lost before, and about what qualifies the sizes."""
        if not self.missing:
            return [*self.losses]
        missing_text = (
            f"{self.missing:,} of {pluralize(self.chunks, 'chunk')} are not there, and read as the fill value"
        )
        return [*self.losses, missing_text]

    def __str__(self) -> str:
        lines = [
            f"{self.path}: Zarr store of {pluralize(len(self.arrays) + self.arrays_left_out, 'array')}, "
            f"{_format_sizes(self.raw_bytes, self.stored_bytes, self.ratio)}"
        ]
        lines += [f"  {line}" for line in self.notes]
        lines += [f"  {self.engine_cache}"] if self.engine_cache else []
        lines += [f"  {line}" for line in describe_layer_states(self.completeness, self.positions)]
        lines += [str(array) for array in self.arrays]
        lines += [f"  and {self.arrays_left_out:,} more: -v lists all"] if self.arrays_left_out else []
        lines += [f"  not: {line}" for line in self.skipped]
        return "\n".join(lines)


def inspect_store(path: str, options: ReadOptions | None = None) -> ZarrStoreInfo:
    """List the arrays of a store, with the sizes of their files.

    Raises
    ------
    KvmnnError
        As `kvmnn.open`.
    """
    source = read(path, options or ReadOptions(decode_frames=False, skip_unsupported=True))
    maker_by_name = dict(list_zarr_arrays(path)[0])
    arrays = []
    for array in source.arrays:
        zarr_array = maker_by_name[array.name]()
        metadata, chunk_sizes = zarr_array.metadata, zarr_array.list_chunk_sizes()
        num_chunks = math.prod(count_chunks(metadata.shape, metadata.chunk_shape))
        arrays.append(
            ZarrArrayInfo(
                name=array.name,
                dtype=array.dtype,
                shape=array.shape,
                chunk_shape=metadata.chunk_shape,
                chunks=num_chunks,
                missing=num_chunks - len(chunk_sizes),
                codec=metadata.codec_name,
                raw_bytes=array.nbytes,
                stored_bytes=sum(chunk_sizes),
                sha256=zarr_array.sha256,
            )
        )
    return ZarrStoreInfo(
        path=source.inputs[0],
        arrays=arrays,
        skipped=tuple(source.skipped_arrays),
        engine_cache=source.engine_cache,
        raw_bytes=source.nbytes,
        stored_bytes=sum(array.stored_bytes for array in arrays),
        chunks=sum(array.chunks for array in arrays),
        missing=sum(array.missing for array in arrays),
        completeness=source.completeness,
        losses=tuple(list_losses(source.metadata)),
        positions=position_runs_by_layer(read_token_positions(source)),
    )


def _format_sizes(raw_bytes: int, stored_bytes: int, size_ratio: float | None) -> str:
    return f"{raw_bytes:,} -> {stored_bytes:,} bytes" + ("" if size_ratio is None else f", ratio {size_ratio:.4f}")
