"""A text on its way in: encoded, written aside, noted down."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays.layer_cache import LayerCache
from ..frames import CodecOptions
from .encoding import Cut, blocks_in_unit, cuts, encode_units
from .lookup import Text
from .space import Space
from .unit import Frame, Unit
from .units import Added, Units
from .updates import NewUnit

_BATCH_BYTES = 256 << 20
"""Raw bytes that are encoded before they are noted down: what a killed process loses of a put."""


def add_text(
    units: Units,
    text: Text,
    layers: Sequence[LayerCache],
    space: Space,
    blocks: int,
    options: CodecOptions,
    threads: int | None,
) -> Added:
    """Store what follows the first `blocks` blocks of a text.

    Raises
    ------
    ParentGoneError
        Where these blocks are not there any more.
    OutputError
        Where files cannot be written; whole batches may have been stored then.
    """
    size = text.block_tokens
    stored = removed = 0
    for batch in _batches(cuts(blocks * size, text.ids.size, size, blocks_in_unit(space, size)), space.token_bytes):
        added = _add_batch(units, text, layers, space, batch, options, threads)
        stored += added.stored_bytes
        removed += added.removed_bytes
    return Added(stored, removed)


def _add_batch(
    units: Units,
    text: Text,
    layers: Sequence[LayerCache],
    space: Space,
    batch: Sequence[Cut],
    options: CodecOptions,
    threads: int | None,
) -> Added:
    new: dict[int, NewUnit] = {}
    with units.stage() as staging:

        def keep(number: int, frames: tuple[Frame, ...]) -> None:
            begin, end = batch[number]
            first, behind = begin // text.block_tokens, end // text.block_tokens
            unit = Unit(text.space, text.key_before(first), begin, text.ids[begin:end], frames)
            path = staging.write(str(number), unit.pieces())
            new[number] = NewUnit(unit.parent, begin, unit.ids, text.keys[first:behind], unit.nbytes, path)

        encode_units(layers, batch, options, keep, threads)
        return units.add(space, text, [new[number] for number in range(len(batch))])


def _batches(found: Sequence[Cut], token_bytes: int) -> list[list[Cut]]:
    batches: list[list[Cut]] = [[]]
    held = 0
    for begin, end in found:
        nbytes = (end - begin) * token_bytes
        if batches[-1] and held + nbytes > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append((begin, end))
        held += nbytes
    return batches
