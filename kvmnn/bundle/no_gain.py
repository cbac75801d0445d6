"""Arrays whose frames do not gain are stored raw: each by itself, or K and V of a layer together as the engine does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..arrays.named_array import LazyArray
from ..arrays.names import parse_layer, parse_part
from ..dtypes import PARTS, Part
from ..errors import OptionError, SourceError
from ..files.output import StagedFile
from .manifest import ArrayEntry, FrameEntry


def pair_kv_blocks(arrays: Sequence[LazyArray]) -> list[tuple[int, ...]]:
    """Indices of K and V of each layer, or of each token range of one, paired by their names.

    Raises
    ------
    OptionError
        When an array has no partner, or holds several layers.
    SourceError
        When K and V of a layer differ in type.
    """
    pairs: dict[str, dict[Part, int]] = {}
    for index, array in enumerate(arrays):
        try:
            part, role = parse_part("--block", array.name)
        except SourceError as error:
            raise OptionError(str(error)) from None
        if len(array.shape) == 4 and array.shape[0] > 1 and parse_layer(role) is None:
            raise OptionError(
                f"--block: array {array.name!r} of shape {list(array.shape)} holds {array.shape[0]} layers: "
                "expected one K and one V of each layer, such as 'layer_0.key' and 'layer_0.value'"
            )
        indices_by_part = pairs.setdefault(role, {})
        if part in indices_by_part:
            names = f"{arrays[indices_by_part[part]].name!r} and {array.name!r}"
            raise OptionError(f"--block: {names} are both the {part}s of one layer")
        indices_by_part[part] = index
    return [_require_pair(arrays, pair) for pair in pairs.values()]


def _require_pair(arrays: Sequence[LazyArray], pair: dict[Part, int]) -> tuple[int, ...]:
    for part, other_part in (PARTS, PARTS[::-1]):
        if part not in pair:
            raise OptionError(
                f"--block: array {arrays[pair[other_part]].name!r} has no partner: expected an array with its {part}s "
                f"that "
                "is called the same but for the word that says K or V"
            )
    key, value = (arrays[pair[part]] for part in PARTS)
    if key.dtype != value.dtype:
        raise SourceError(
            f"--block: {key.name!r} is {key.dtype}, {value.name!r} is {value.dtype}: K and V of a block have one type"
        )
    return tuple(pair[part] for part in PARTS)


def store_incompressible_raw(
    arrays: Sequence[LazyArray],
    entries: Sequence[ArrayEntry],
    groups: Sequence[tuple[int, ...]],
    max_chunk_bytes: int,
    rewrite: Callable[[int], StagedFile],
) -> list[ArrayEntry]:
    """The same arrays; those of a group whose frames together are no smaller than its words are stored raw instead.

    Parameters
    ----------
    groups
        Indices of arrays that are judged together.
    max_chunk_bytes
        Most bytes of a piece, as for `LazyArray.iter_chunks`.
    rewrite
        Gives the file of an array, emptied.
    """
    stored_entries = list(entries)
    for group in groups:
        if sum(entries[index].stored_bytes for index in group) >= sum(entries[index].nbytes for index in group):
            for index in group:
                stored_entries[index] = _rewrite_raw(arrays[index], entries[index], max_chunk_bytes, rewrite(index))
    return stored_entries


def _rewrite_raw(array: LazyArray, entry: ArrayEntry, max_chunk_bytes: int, file: StagedFile) -> ArrayEntry:
    digest = hashlib.sha256()
    frames = tuple(_write_raw_frames(array, entry.frames[0].file, max_chunk_bytes, file, digest))
    file.close()
    if digest.hexdigest() != entry.sha256:
        raise SourceError(f"array {array.name!r}: changed while it was read")
    return replace(entry, frames=frames)


def _write_raw_frames(
    array: LazyArray, name: str, max_chunk_bytes: int, file: StagedFile, digest: hashlib._Hash
) -> Iterator[FrameEntry]:
    offset = 0
    for chunk in array.iter_chunks(max_chunk_bytes):
        file.write(chunk.data)
        digest.update(chunk.data)
        yield FrameEntry(
            file=name,
            offset=offset,
            bytes=chunk.size,
            raw_bytes=chunk.size,
            sha256=hashlib.sha256(chunk.data).hexdigest(),
            stored="raw",
        )
        offset += chunk.size
        del chunk  # or an inflated piece would live on while the next is inflated
