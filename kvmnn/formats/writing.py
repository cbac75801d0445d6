"""Arrays back into the formats they came from, streamed: raw words, ``.npy``, ``.npz``, ``.safetensors``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from ..arrays.named_array import ArrayInfo
from ..errors import OutputError
from . import npy
from .npy import write_npy
from .npz import write_npz
from .raw import write_raw
from .safetensors import write_safetensors
from .sinks import Writer

if TYPE_CHECKING:
    from ..files.output import DirectoryOutput
    from .sinks import Runs


def writer_for(name: str, arrays: Sequence[ArrayInfo]) -> Writer:
    """The writer for a file called `name`: by its extension, raw words for all that are not known.

    Raises
    ------
    OutputError
        When there are several arrays and the format holds one.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix in _MANY:
        return _MANY[suffix]
    if len(arrays) != 1:
        raise OutputError(
            f"{name}: cannot hold {len(arrays)} arrays: use a .npz or .safetensors file or a directory (-o DIR/)"
        )
    return _ONE.get(suffix, write_raw)


_ONE: dict[str, Writer] = {".npy": write_npy}
_MANY: dict[str, Writer] = {".npz": write_npz, ".safetensors": write_safetensors}


def write_directory(directory: DirectoryOutput, arrays: Sequence[ArrayInfo], runs: Runs) -> None:
    """One ``.npy`` file for each array."""
    from ..files.names import file_names
    from .raw import write_raw

    names = file_names([array.name for array in arrays], ".npy")
    directory.check_names(names)
    current, file = -1, None
    for index, data in runs:
        if index != current:
            current, file = index, directory.file(names[index])
            npy.write_header(file, arrays[index])
        write_raw(file, arrays, [(index, data)], {})  # type: ignore[arg-type]
        del data
