"""Arrays back into the formats they came from, streamed: raw words, ``.npy``, ``.npz``, ``.safetensors``."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import PurePath
from typing import Protocol

from ..errors import OutputError
from . import npy, safetensors
from .base import ArrayInfo, Piece, swap_words

Runs = Iterable[tuple[int, Piece]]
"""``(array index, little-endian bytes in memory order)``, array after array."""


class Sink(Protocol):
    """Where bytes go: an `output.StagedFile`, or standard output."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class SeekableSink(Sink, Protocol):
    """A sink whose position can be set; devices and pipes have none."""

    def seek(self, position: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


Writer = Callable[[SeekableSink, Sequence[ArrayInfo], Runs, dict[str, str]], None]


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


def write_raw(sink: Sink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """The words alone, in memory order, in the array's own byte order."""
    for index, data in runs:
        sink.write(_own_bytes(arrays[index], data).data)
        del data  # or it would live on while the next run is decoded


def write_npy(sink: Sink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """One array as ``numpy.save`` writes it."""
    npy.write_header(sink, arrays[0])
    write_raw(sink, arrays, runs, metadata)


def write_npz(sink: SeekableSink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """All arrays as ``numpy.savez`` writes them, uncompressed and with a fixed date."""
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive, ExitStack() as open_member:
        for index, data, begins in _beginnings(runs):
            if begins:
                open_member.close()
                info = zipfile.ZipInfo(arrays[index].name + ".npy")
                member = open_member.enter_context(archive.open(info, "w", force_zip64=True))
                npy.write_header(member, arrays[index])
            member.write(_own_bytes(arrays[index], data).data)
            del data


def write_safetensors(sink: SeekableSink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """All arrays as tensors; big-endian ones become little-endian, the only order the format has."""
    header, begins_at = safetensors.layout(arrays, metadata)
    sink.write(header)
    for index, data, begins in _beginnings(runs):
        if begins:
            sink.seek(begins_at[arrays[index].name])
        sink.write(data.data)
        del data


def _beginnings(runs: Runs) -> Iterator[tuple[int, Piece, bool]]:
    current = -1
    for index, data in runs:
        yield index, data, index != current
        current = index
        del data


def _own_bytes(array: ArrayInfo, data: Piece) -> Piece:
    return swap_words(data, array.itemsize) if array.swapped else data


_ONE: dict[str, Writer] = {".npy": write_npy}
_MANY: dict[str, Writer] = {".npz": write_npz, ".safetensors": write_safetensors}
