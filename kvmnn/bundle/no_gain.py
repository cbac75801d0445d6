"""Arrays whose frames do not gain are stored raw: each by itself, or K and V of a layer together as the engine does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..arrays.named_array import NamedArray
from ..arrays.names import layer_of, part_of
from ..dtypes import PARTS, Part
from ..errors import OptionError, SourceError
from ..files.output import StagedFile
from .manifest import ArrayEntry, FrameEntry


def blocks_of(arrays: Sequence[NamedArray]) -> list[tuple[int, ...]]:
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
            part, rest = part_of("--block", array.name)
        except SourceError as error:
            raise OptionError(str(error)) from None
        if len(array.shape) == 4 and array.shape[0] > 1 and layer_of(rest) is None:
            raise OptionError(
                f"--block: array {array.name!r} of shape {list(array.shape)} holds {array.shape[0]} layers: "
                "expected one K and one V of each layer, such as 'layer_0.key' and 'layer_0.value'"
            )
        same = pairs.setdefault(rest, {})
        if part in same:
            names = f"{arrays[same[part]].name!r} and {array.name!r}"
            raise OptionError(f"--block: {names} are both the {part}s of one layer")
        same[part] = index
    return [_both(arrays, pair) for pair in pairs.values()]


def _both(arrays: Sequence[NamedArray], pair: dict[Part, int]) -> tuple[int, ...]:
    for part, other in (PARTS, PARTS[::-1]):
        if part not in pair:
            raise OptionError(
                f"--block: array {arrays[pair[other]].name!r} has no partner: expected an array with its {part}s that "
                "is called the same but for the word that says K or V"
            )
    key, value = (arrays[pair[part]] for part in PARTS)
    if key.dtype != value.dtype:
        raise SourceError(
            f"--block: {key.name!r} is {key.dtype}, {value.name!r} is {value.dtype}: K and V of a block have one type"
        )
    return tuple(pair[part] for part in PARTS)


def keep_raw(
    arrays: Sequence[NamedArray],
    entries: Sequence[ArrayEntry],
    groups: Sequence[tuple[int, ...]],
    limit: int,
    rewrite: Callable[[int], StagedFile],
) -> list[ArrayEntry]:
    """The same arrays; those of a group whose frames together are no smaller than its words are stored raw instead.

    Parameters
    ----------
    groups
        Indices of arrays that are judged together.
    limit
        Most bytes of a piece, as for `NamedArray.pieces`.
    rewrite
        Gives the file of an array, emptied.
    """
    found = list(entries)
    for group in groups:
        if sum(entries[index].stored_bytes for index in group) >= sum(entries[index].nbytes for index in group):
            for index in group:
                found[index] = _stored_raw(arrays[index], entries[index], limit, rewrite(index))
    return found


def _stored_raw(array: NamedArray, entry: ArrayEntry, limit: int, file: StagedFile) -> ArrayEntry:
    whole = hashlib.sha256()
    frames = tuple(_written(array, entry.frames[0].file, limit, file, whole))
    file.close()
    if whole.hexdigest() != entry.sha256:
        raise SourceError(f"array {array.name!r}: changed while it was read")
    return replace(entry, frames=frames)


def _written(array: NamedArray, name: str, limit: int, file: StagedFile, whole: hashlib._Hash) -> Iterator[FrameEntry]:
    offset = 0
    for piece in array.pieces(limit):
        file.write(piece.data)
        whole.update(piece.data)
        yield FrameEntry(
            file=name,
            offset=offset,
            bytes=piece.size,
            raw_bytes=piece.size,
            sha256=hashlib.sha256(piece.data).hexdigest(),
            stored="raw",
        )
        offset += piece.size
        del piece  # or an inflated piece would live on while the next is inflated
