"""Files of other engines kept whole: cut into arrays for frames and the bytes around them, and put together again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from ..arrays.completeness import Completeness
from ..arrays.named_array import NamedArray, Piece
from ..arrays.source import FILE_KEY, Source
from ..arrays.valid_names import escaped_name
from ..bundle.kept_file import MAX_BYTES, KeptFile, Part, check_fits, kept_file, to_json
from ..dtypes import Bytes
from ..errors import SourceError
from ..files.mapped import STDIN, MappedFile
from ..frames import encode
from .options import ReadOptions

_STEP = 8 << 20
_MOST_LITERAL = 1 << 20
"""Bytes in a row that are kept as such; longer runs become an array of their own."""
_SAMPLE = 128 << 10


class Region(NamedTuple):
    """Bytes of a file that become arrays.

    Parameters
    ----------
    offset, nbytes
        Where they lie.
    arrays
        The arrays, and how many bytes each gives by turns.
    """

    offset: int
    nbytes: int
    arrays: tuple[tuple[NamedArray, int], ...]


def keep(
    file: MappedFile,
    kind: str,
    regions: Sequence[Region],
    kv_heads: tuple[int, ...] | None,
    *,
    array_room: Mapping[str, int] | None = None,
    layer_numbers: tuple[int, ...] | None = None,
) -> Source:
    """A source with the arrays of all regions, whose metadata has all else that the file holds.

    Parameters
    ----------
    file
        The whole file.
    kind
        The name of its format in `ENGINE_FILES`.
    regions
        Without overlaps.
    kv_heads
        Of each layer, where they were said.
    array_room
        Bytes of arrays that are room behind the valid tokens, by the names of those that have any.
    layer_numbers
        The layer of the model that each layer of the file is, where the file does not say it.
    """
    parts: list[Part] = []
    notes: list[str] = []
    arrays: list[NamedArray] = []
    position = 0
    for region in sorted(regions):
        _fill(file, position, region.offset, parts, arrays)
        parts.append(Part(region.nbytes, arrays=tuple((array.name, turn) for array, turn in region.arrays)))
        arrays += [array for array, _ in region.arrays]
        position = region.offset + region.nbytes
    _fill(file, position, file.size, parts, arrays)
    if sum(len(part.literal) for part in parts) > MAX_BYTES:
        raise SourceError(f"{file.label}: has more than {MAX_BYTES} bytes between its arrays")
    found = PurePath(file.path).name
    name = "stdin" if file.path == STDIN else escaped_name(found)
    if file.path != STDIN and name != found:
        notes.append(f"the manifest calls the file {name}: no name in a manifest has all that the file's has")
    kept = KeptFile(
        format=kind,
        name=name,
        nbytes=file.size,
        sha256=_hash(file),
        parts=tuple(parts),
        kv_heads=kv_heads,
        room_bytes=sum((array_room or {}).values()),
        array_room=array_room or {},
        layer_numbers=layer_numbers,
    )
    return Source(arrays, {FILE_KEY: to_json(kept)}, notes=notes)


def _fill(file: MappedFile, begin: int, end: int, parts: list[Part], arrays: list[NamedArray]) -> None:
    """The bytes between two regions: literal, or an array of words and what is left of them."""
    length = (end - begin) // 4 * 4 if end - begin > _MOST_LITERAL else 0
    if length:
        array = byte_array(file, f"around_{begin}", (length,), begin, length, dtype="fp32")
        parts.append(Part(length, arrays=((array.name, length),)))
        arrays.append(array)
    if begin + length < end:
        parts.append(Part(end - begin - length, file.view(begin + length, end - begin - length).tobytes()))


def byte_array(
    file: MappedFile, name: str, shape: tuple[int, ...], offset: int, nbytes: int, *, dtype: str = "fp16"
) -> NamedArray:
    """Bytes of a file as they are."""
    runs = partial(file.runs, offset, nbytes)
    return NamedArray(name=name, dtype=dtype, shape=shape, array_dtype="|u1", reader=runs)


def field_array(
    file: MappedFile,
    name: str,
    shape: tuple[int, ...],
    where: tuple[int, int],
    field: tuple[int, int, int],
    array_dtype: str = "|u1",
) -> NamedArray:
    """A field of every block: `where` has offset and bytes of the blocks, `field` its place, its size and a block's."""
    return NamedArray(
        name=name, dtype="fp16", shape=shape, array_dtype=array_dtype, reader=partial(_field_runs, file, where, field)
    )


def _field_runs(file: MappedFile, where: tuple[int, int], field: tuple[int, int, int], step: int) -> Iterator[Piece]:
    (offset, nbytes), (begin, size, block) = where, field
    count = nbytes // block
    if step % size:  # the last of all, or a limit that cuts blocks
        made = np.concatenate(list(_field_runs(file, where, field, count * size)))
        yield from (made[start : start + step] for start in range(0, made.size, step))
        return
    for start in range(0, count, step // size):
        amount = min(step // size, count - start)
        blocks = file.view(offset + start * block, amount * block).reshape(amount, block)
        yield np.ascontiguousarray(blocks[:, begin : begin + size]).reshape(-1)
        file.drop(offset + start * block, amount * block)


def gains_by_fields(blocks: Bytes, fields: Sequence[int]) -> bool:
    """Whether frames of the fields of blocks, each by itself, are smaller than a frame of the blocks; by a sample.

    Parameters
    ----------
    blocks
        Bytes of whole blocks.
    fields
        Bytes of each field of a block, in order.
    """
    size = sum(fields)
    sample = blocks[: max(1, _SAMPLE // size) * size].reshape(-1, size)
    begins = np.cumsum([0, *fields[:-1]])
    parts = [np.ascontiguousarray(sample[:, b : b + n]).reshape(-1) for b, n in zip(begins, fields, strict=True)]
    apart, together = (
        sum(len(encode(data, dtype="fp16", effort="fast")) for data in several)
        for several in (parts, [np.ascontiguousarray(sample).reshape(-1)])
    )
    return apart < together


def _hash(file: MappedFile) -> str:
    digest = hashlib.sha256()
    for run in file.runs(0, file.size, _STEP):
        digest.update(run.data)
    return digest.hexdigest()


@dataclass
class KeptBytes:
    """The bytes of a kept file, put together from arrays as they are asked for.

    Parameters
    ----------
    source
        The arrays, as frames decode to them.
    kept
        How they make up the file.
    label
        What messages call it.
    """

    source: Source
    kept: KeptFile
    label: str

    def __post_init__(self) -> None:
        sizes = {array.name: array.nbytes for array in self.source.arrays}
        check_fits(self.kept, sizes, self.label)
        self._last: tuple[int, Bytes] | None = None

    @property
    def path(self) -> str:
        """The name that the file had."""
        return self.kept.name

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.kept.nbytes

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer."""
        return self.view(0, min(nbytes, self.size)).tobytes()

    def view(self, offset: int, nbytes: int, /) -> Bytes:
        """`nbytes` bytes from `offset`; an array is decoded whole, and kept until another is asked for."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size}")
        found: list[Bytes] = []
        while nbytes:
            part, begin = self.kept.part_at(offset)
            run = self._bytes(part, begin)[offset - begin : offset - begin + nbytes]
            found.append(run)
            offset, nbytes = offset + run.size, nbytes - run.size
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint8), *found])

    def drop(self, offset: int, nbytes: int, /) -> None:
        """Let go of what was decoded."""
        self._last = None

    def runs(self, offset: int, nbytes: int, step: int) -> Iterator[Bytes]:
        """Views of `step` bytes each."""
        for start in range(offset, offset + nbytes, step):
            yield self.view(start, min(step, offset + nbytes - start))
        self.drop(offset, nbytes)

    def _bytes(self, part: Part, begin: int) -> Bytes:
        if not part.arrays:
            return np.frombuffer(part.literal, np.uint8)
        if self._last is None or self._last[0] != begin:
            self._last = None
            made, done = np.empty(part.nbytes, np.uint8), 0
            for run in part_runs(self.source, part):
                made[done : done + run.size] = run
                done += run.size
            self._last = begin, made
        return self._last[1]


def part_runs(source: Source, part: Part) -> Iterator[Piece]:
    """The bytes of a part, in order."""
    if not part.arrays:
        yield np.frombuffer(part.literal, np.uint8)
    elif len(part.arrays) == 1:
        yield from source[part.arrays[0][0]].pieces(_STEP)
    else:
        yield from _by_turns(source, part)


def _by_turns(source: Source, part: Part) -> Iterator[Piece]:
    turns = [turn for _, turn in part.arrays]
    rows = max(1, _STEP // sum(turns))
    readers = [source[name].reader(rows * turn) for name, turn in part.arrays]
    for runs in zip(*readers, strict=True):
        yield np.concatenate([run.reshape(-1, turn) for run, turn in zip(runs, turns, strict=True)], axis=1).reshape(-1)


def reopened(source: Source, where: str) -> KeptBytes | None:
    """The file that frames were made from, where it was kept whole: `source` is what they decode to."""
    kept = kept_file(source.metadata, where)
    return None if kept is None else KeptBytes(source, kept, where)


def as_noted(options: ReadOptions, kept: KeptFile, completeness: Completeness | None = None) -> ReadOptions:
    """The options, with the kv heads and the layers that were noted down where they say none."""
    engine = replace(
        options.engine,
        noted_heads=kept.kv_heads,
        noted_layers=kept.layer_numbers,
        noted_completeness=completeness,
    )
    return replace(options, engine=engine)
