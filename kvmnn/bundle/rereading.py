"""Frames and their manifest read again after they were written, before anything is said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from ..errors import ManifestError, OutputError
from ..files.mapped import MappedFile
from ..files.output import StagedFile
from ..threads.pool import parallel_map, resolve_threads
from . import manifest_reading
from .manifest import FrameEntry, Manifest

_READBACK_CHUNK_BYTES = 8 << 20
_MAX_OPEN_FILES = 16


def verify_written(
    document: Manifest, manifest_file: StagedFile, files: Mapping[str, StagedFile], threads: int | None
) -> None:
    """Compare what files hold with what was to be written.

    Parameters
    ----------
    document
        The manifest, and so the frames, by their hashes.
    manifest_file
        The file of the manifest.
    files
        The files of frames, by the names that the manifest has for them.
    threads
        None for all processors.

    Raises
    ------
    OutputError
        For the first difference.
    """
    for file in (manifest_file, *files.values()):
        file.close()
    try:
        is_equal = manifest_reading.load_manifest(manifest_file.path) == document
    except ManifestError as error:
        raise OutputError(f"{manifest_file.target}: does not read back: {error}") from None
    if not is_equal:
        raise OutputError(f"{manifest_file.target}: does not read back as it was written")

    @lru_cache(maxsize=_MAX_OPEN_FILES)
    def open_file(name: str) -> MappedFile:
        return MappedFile(files[name].path)

    def verify_frame(frame: FrameEntry) -> None:
        digest = hashlib.sha256()
        for block in open_file(frame.file).iter_chunks(frame.offset, frame.bytes, _READBACK_CHUNK_BYTES):
            digest.update(block.data)
        if digest.hexdigest() != frame.sha256:
            target = files[frame.file].target
            raise OutputError(
                f"{target}: {frame.description} at offset {frame.offset} does not read back as it was written"
            )

    parallel_map(verify_frame, [frame for array in document.arrays for frame in array.frames], resolve_threads(threads))
