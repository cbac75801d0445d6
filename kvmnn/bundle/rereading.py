"""Frames and their manifest read again after they were written, before anything is said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from ..errors import ManifestError, OutputError
from ..files.mapped import MappedFile
from ..files.output import StagedFile
from ..threads.pool import map_pulled, resolve_threads
from . import manifest_reading
from .manifest import FrameEntry, Manifest

_STEP = 8 << 20
_OPEN_FILES = 16


def read_back(document: Manifest, index: StagedFile, files: Mapping[str, StagedFile], threads: int | None) -> None:
    """Compare what files hold with what was to be written.

    Parameters
    ----------
    document
        The manifest, and so the frames, by their hashes.
    index
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
    for file in (index, *files.values()):
        file.close()
    try:
        same = manifest_reading.load(index.path) == document
    except ManifestError as error:
        raise OutputError(f"{index.target}: does not read back: {error}") from None
    if not same:
        raise OutputError(f"{index.target}: does not read back as it was written")

    @lru_cache(maxsize=_OPEN_FILES)
    def opened(name: str) -> MappedFile:
        return MappedFile(files[name].path)

    def compare(frame: FrameEntry) -> None:
        digest = hashlib.sha256()
        for run in opened(frame.file).runs(frame.offset, frame.bytes, _STEP):
            digest.update(run.data)
        if digest.hexdigest() != frame.sha256:
            target = files[frame.file].target
            raise OutputError(f"{target}: {frame.kind} at offset {frame.offset} does not read back as it was written")

    map_pulled(compare, [frame for array in document.arrays for frame in array.frames], resolve_threads(threads))
