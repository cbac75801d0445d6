"""Arrays out of a Zarr store, and the proof that they are what was written."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ...arrays.named_array import Piece
from ...arrays.source import Source
from ...bundle.verifying import Verified
from ...checks import shown
from ...errors import OptionError, SourceError
from ...files.changes import Reading
from ...files.output import Stream, is_device
from ...threads.pipeline import Progress
from ..beside import folder_files
from ..options import ReadOptions
from ..raw import write_raw
from ..restoring import Restored
from ..writing import left_there, lost, metadata_for, write_arrays
from .places import DOCUMENT, Place, consolidated, place_at
from .reading import StoredArray, read, stored

_STEP = 8 << 20


class RestoredStore(Restored):
    """Arrays that were read from a store and written; proved where the store has a hash of each."""

    def __str__(self) -> str:
        return super().__str__().replace("sha256 of the manifest", "sha256 of the store")


class VerifiedStore(Verified):
    """What decoding every chunk of a store has shown."""

    def __str__(self) -> str:
        said = super().__str__().replace("sha256 of the manifest", "sha256 of the store")
        return said.replace("no manifest and no --against", "an array has no sha256")


@dataclass(frozen=True, kw_only=True)
class _Account:
    """How much there is in a store."""

    hashes: list[str | None]
    files: int
    nbytes: int


def _account(path: str, source: Source) -> _Account:
    """Of the arrays of a source; sizes of files, none of which is read."""
    names = set(source)
    arrays: list[StoredArray] = [make() for name, make in stored(path)[0] if name in names]
    sizes = [size for array in arrays for size in array.sizes()]
    by_name = {array.name: array.sha256 for array in arrays}
    return _Account(hashes=[by_name[name] for name in source], files=len(sizes), nbytes=sum(sizes))


def restore_store(
    path: str,
    output: str | os.PathLike[str] | Stream,
    options: ReadOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoredStore:
    """Decode the arrays of a Zarr store and write them; the hashes that kvmnn noted down are compared.

    Parameters
    ----------
    path
        The directory, or a URL that fsspec opens.
    output
        As for `kvmnn.formats.restore`.
    options
        Which arrays, threads.
    force
        Replace files that exist.
    progress
        Called with raw bytes.

    Raises
    ------
    KvmnnError
        As `kvmnn.formats.restore`. No file is left behind then.
    """
    started = time.perf_counter()
    source = read(path, options or ReadOptions(frames=False))
    account = _account(path, source)
    hashes = [sha256 for sha256 in account.hashes if sha256]
    verified = len(hashes) == len(source)
    files: list[str] = []
    name: str | None = None
    if isinstance(output, str | os.PathLike):
        name = os.fspath(output)
        files = write_arrays(
            name,
            source.arrays,
            _runs(source, progress),
            metadata_for(source, name),
            hashes=hashes if verified and not is_device(name) else None,
            force=force,
            protect=source.inputs,
            threads=options.threads if options else None,
        )
    else:
        if len(source) > 1:
            raise OptionError(f"a stream carries one array, not {len(source)}: use -o DIR/ or -o X.npz")
        with Reading():
            write_raw(output, source.arrays, _runs(source, progress), {})
        output.flush()
    return RestoredStore(
        input=source.inputs[0],
        output=name,
        arrays=tuple(source.arrays),
        verified=verified,
        reread=name is not None and not is_device(name),
        files=tuple(files),
        stored_bytes=account.nbytes,
        seconds=time.perf_counter() - started,
        unknown="" if verified else "no sha256 in the store to check them against",
        beside=tuple(folder_files(source.metadata, source.inputs[0])) if files else (),
        notes=(*lost(source, name), *left_there(name, files, source.metadata)) if name is not None else (),
        completeness=source.completeness,
    )


def _runs(source: Source, progress: Progress | None) -> Iterator[tuple[int, Piece]]:
    for index, array in enumerate(source.arrays):
        for piece in array.pieces(_STEP):
            yield index, piece
            if progress:
                progress(piece.size)
            del piece


def verify_store(path: str, options: ReadOptions | None = None, *, progress: Progress | None = None) -> VerifiedStore:
    """Decode every chunk of a store again, and compare the hashes that kvmnn noted down.

    Raises
    ------
    KvmnnError
        When a chunk does not decode, or a hash differs, or the group says other things of an array than its own
        document: which of them is read is up to the reader.
    """
    started = time.perf_counter()
    source = read(path, options or ReadOptions(frames=False))
    account = _account(path, source)
    _check_consolidated(place_at(path))
    with Reading():
        deque((None for _ in _runs(source, progress)), maxlen=0)
    return VerifiedStore(
        input=source.inputs[0],
        against=(),
        proof="sha256" if all(account.hashes) else None,
        difference=None,
        raw_bytes=source.nbytes,
        stored_bytes=account.nbytes,
        arrays=len(source),
        frames=account.files,
        seconds=time.perf_counter() - started,
    )


def _check_consolidated(place: Place) -> None:
    """`SourceError` where the group's document says other things of an array than its own."""
    group = place.document(DOCUMENT)
    for name, entry in (consolidated(group) or {}).items() if group else ():
        own = place.own_document(f"{name}/{DOCUMENT}")
        if isinstance(entry, dict) and entry.get("node_type") == "array" and (own is None or own.value != entry):
            raise SourceError(
                f"{place.of(DOCUMENT)}: its consolidated_metadata says other things of {shown(name)} than "
                f"{shown(name)}/{DOCUMENT}: some readers take the one, others the other"
            )
