"""Decode the arrays of a Zarr store, and verify them by their hashes."""

from __future__ import annotations

import os
import time
from collections import deque

from ..._util.named_tuple import NamedTuple
from ..._util.parallel import Progress
from ..._util.validation import repr_short
from ...arrays.source import Source, list_losses
from ...bundle.verification import VerifyResult
from ...errors import SourceError
from ...files.atomic import BinaryStream, is_device
from ...files.change_detection import InputGuard
from ..options import ReadOptions
from ..restorer import RestoreResult, write_to_stream
from ..sidecars import collect_folder_sidecars
from ..writer import build_output_metadata, iter_source_chunks, list_lost_information, list_stale_files, write_arrays
from .reader import ZarrArray, list_zarr_arrays, read
from .stores import DOCUMENT_NAME, ZarrStore, get_consolidated_metadata, open_zarr_store


class VerifyStoreResult(VerifyResult):
    """Result of decoding every chunk of a store."""

    def __str__(self) -> str:
        text = super().__str__().replace("sha256 of the manifest", "sha256 of the store")
        return text.replace("no manifest and no --against", "an array has no sha256")


class _StoreStats(NamedTuple):
    """Sizes and counts of a store."""

    hashes: list[str | None]
    num_files: int
    stored_bytes: int


def _collect_store_stats(path: str, source: Source) -> _StoreStats:
    """Return the totals of the arrays of a source, by the sizes of files, without reading them."""
    names = set(source)
    arrays: list[ZarrArray] = [make_array() for name, make_array in list_zarr_arrays(path)[0] if name in names]
    sizes = [size for array in arrays for size in array.list_chunk_sizes()]
    hash_by_name = {array.name: array.sha256 for array in arrays}
    return _StoreStats(hashes=[hash_by_name[name] for name in source], num_files=len(sizes), stored_bytes=sum(sizes))


def restore_store(
    path: str,
    output: str | os.PathLike[str] | BinaryStream,
    options: ReadOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode the arrays of a Zarr store and write them; the recorded hashes are compared.

    `path` is the directory, or a URL that fsspec opens; `options` select arrays and threads. Other parameters and
    errors are those of `restore_arrays`.
    """
    start_time = time.perf_counter()
    source = read(path, options or ReadOptions(decode_frames=False))
    stats = _collect_store_stats(path, source)
    hashes = [sha256 for sha256 in stats.hashes if sha256]
    is_verified = len(hashes) == len(source)
    files: list[str] = []
    output_path: str | None = None
    metadata = source.metadata
    if isinstance(output, str | os.PathLike):
        output_path = os.fspath(output)
        metadata = build_output_metadata(source, output_path)
        files = write_arrays(
            output_path,
            source.arrays,
            iter_source_chunks(source, progress),
            metadata,
            hashes=hashes if is_verified and not is_device(output_path) else None,
            force=force,
            exclude=source.inputs,
            threads=options.threads if options else None,
        )
    else:
        write_to_stream(output, source.arrays, iter_source_chunks(source, progress))
    losses = tuple(list_losses(source.metadata))
    return RestoreResult(
        input=source.inputs[0],
        output=output_path,
        arrays=tuple(source.arrays),
        is_verified=is_verified,
        hash_source="store",
        is_read_back=output_path is not None and not is_device(output_path),
        files=tuple(files),
        stored_bytes=stats.stored_bytes,
        seconds=time.perf_counter() - start_time,
        unknown_properties="" if is_verified else "no sha256 in the store to check them against",
        sidecars=tuple(collect_folder_sidecars(metadata, source.inputs[0])) if files else (),
        losses=losses,
        notes=(
            *losses,
            *list_lost_information(source, output_path),
            *list_stale_files(output_path, files, metadata),
        )
        if output_path is not None
        else losses,
        completeness=source.completeness,
        is_dequantized=source.lossy,
    )


def verify_store(
    path: str, options: ReadOptions | None = None, *, progress: Progress | None = None
) -> VerifyStoreResult:
    """Decode every chunk of a store, and compare the recorded hashes.

    Raises
    ------
    KvmnnError
        When a chunk does not decode, a hash differs, or the group's metadata of an array differs from its own document,
        so that readers may differ.
    """
    start_time = time.perf_counter()
    source = read(path, options or ReadOptions(decode_frames=False))
    stats = _collect_store_stats(path, source)
    _check_consolidated(open_zarr_store(path))
    with InputGuard():
        deque((None for _ in iter_source_chunks(source, progress)), maxlen=0)
    losses = tuple(list_losses(source.metadata))
    return VerifyStoreResult(
        input=source.inputs[0],
        against=(),
        proof="sha256" if all(stats.hashes) else None,
        difference=None,
        raw_bytes=source.nbytes,
        stored_bytes=stats.stored_bytes,
        arrays=len(source),
        frames=stats.num_files,
        is_dequantized=source.lossy,
        losses=losses,
        completeness=source.completeness,
        notes=losses,
        seconds=time.perf_counter() - start_time,
    )


def _check_consolidated(store: ZarrStore) -> None:
    """Raise `SourceError` if the group's document and an array's own document differ."""
    group = store.read_document(DOCUMENT_NAME)
    for name, entry in (get_consolidated_metadata(group) or {}).items() if group else ():
        own_document = store.read_own_document(f"{name}/{DOCUMENT_NAME}")
        is_array = isinstance(entry, dict) and entry.get("node_type") == "array"
        if is_array and (own_document is None or own_document.value != entry):
            raise SourceError(
                f"{store.get_path(DOCUMENT_NAME)}: its consolidated_metadata says other things of {repr_short(name)} "
                f"than {repr_short(name)}/{DOCUMENT_NAME}: some readers take the one, others the other"
            )
