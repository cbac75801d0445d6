"""Arrays into files of the format that their names say, streamed."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays.named_array import ArrayInfo
from ..errors import OutputError
from ..files.names import file_names
from ..files.output import DirectoryOutput, StagedFile
from . import npy
from .opening import array_format
from .raw import own_bytes, write_raw
from .sinks import Runs, Writer, beginnings


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
