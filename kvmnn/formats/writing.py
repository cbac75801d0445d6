"""Arrays into files of the format that their names say, streamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..arrays.named_array import ArrayInfo
from ..errors import OutputError
from ..files.names import file_names, is_directory
from ..files.output import DirectoryOutput, FileOutput, StagedFile
from . import npy
from .array_formats import array_format
from .raw import own_bytes, write_raw
from .sinks import Runs, Writer, beginnings


def write_arrays(
    output: str,
    arrays: Sequence[ArrayInfo],
    runs: Runs,
    metadata: dict[str, str] | None = None,
    *,
    force: bool = False,
    protect: Iterable[str] = (),
) -> None:
    """Write arrays into one file, or into a directory as one ``.npy`` file each; complete or not at all.

    Parameters
    ----------
    output
        A directory (ends in a slash, or is one), or a file in the format that its suffix says: ``.npy``, ``.npz``,
        ``.safetensors``, else the raw words of one array.
    arrays
        What they are.
    runs
        Their bytes, array after array: ``(array index, little-endian bytes in memory order)``.
    metadata
        For the formats that have a place for it (``.safetensors``).
    force
        Replace files that exist.
    protect
        Inputs, which are never replaced.

    Raises
    ------
    OutputError
        When the format cannot hold the arrays, a file exists, or it cannot be written.
    """
    if is_directory(output):
        with DirectoryOutput(output, force=force, protect=protect) as directory:
            write_directory(directory, arrays, runs)
            directory.commit()
        return
    writer = writer_for(output, arrays)
    with FileOutput(output, force=force, protect=protect) as file:
        writer(file.file, arrays, runs, metadata or {})
        file.commit()


def writer_for(name: str, arrays: Sequence[ArrayInfo]) -> Writer:
    """The writer for a file called `name`: by its suffix, raw words for all that are not known.

    Raises
    ------
    OutputError
        When there are several arrays and the format holds one.
    """
    known = array_format(name)
    if len(arrays) != 1 and not (known and known.holds_many):
        raise OutputError(
            f"{name}: cannot hold {len(arrays)} arrays: use a .npz or .safetensors file or a directory (-o DIR/)"
        )
    return known.write if known else write_raw


def write_directory(directory: DirectoryOutput, arrays: Sequence[ArrayInfo], runs: Runs) -> None:
    """Write one ``.npy`` file for each array; the caller commits `directory`."""
    names = file_names([array.name for array in arrays], ".npy")
    directory.check_names(names)
    file: StagedFile | None = None
    for index, data, begins in beginnings(runs):
        if begins or file is None:
            file = directory.file(names[index])
            npy.write_header(file, arrays[index])
        file.write(own_bytes(arrays[index], data).data)
        del data
