"""A weight file back to tensors with names: ``.safetensors`` or ``.npz``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePath

import numpy as np

from ...arrays.named_array import ArrayInfo, Piece
from ...dtypes import Words
from ...errors import KvmnnError
from ...files.output import FileOutput
from ...formats.writing import writer_for
from ..kvcm.header import SLOTS, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile
from .verify import default_prefixes

SUFFIXES = (".safetensors", ".npz")


def names(
    file: WeightFile, prefixes: tuple[str, ...] | None = None, slots: tuple[int, ...] = SLOTS
) -> Iterator[tuple[str, Words]]:
    """``(name, words)`` of every weight and bias, as a checkpoint calls them.

    Parameters
    ----------
    prefixes
        Compressors in the order of the file; None takes the runtime's.
    slots
        The three Linear layers of each.

    Raises
    ------
    KvmnnError
        When the names do not go with the number of blocks.
    """
    count = file.header.weight_count_per_layer
    prefixes = prefixes or default_prefixes(file)
    if count != len(prefixes) * SLOTS_PER_PREFIX or len(set(prefixes)) < len(prefixes) or len(set(slots)) < len(slots):
        raise KvmnnError(
            f"{file.label}: has {count} weights in a layer: expected {len(prefixes) * SLOTS_PER_PREFIX}, three for "
            f"each of {', '.join(prefixes)}, all of different names (--prefix-order and --slot-order give others)"
        )
    for block in file.blocks():
        name = f"{prefixes[block.prefix]}.{block.layer}.{slots[block.slot]}"
        yield f"{name}.weight", block.weight
        if block.bias is not None:
            yield f"{name}.bias", block.bias


def export(
    file: WeightFile,
    target: str | os.PathLike[str],
    *,
    prefixes: tuple[str, ...] | None = None,
    slots: tuple[int, ...] = SLOTS,
    force: bool = False,
) -> int:
    """Write every weight and bias under its name; bf16 becomes BF16 in ``.safetensors`` and uint16 in ``.npz``.

    The header's fields go into the metadata of a ``.safetensors`` file; ``.npz`` has no place for them.

    Returns
    -------
    Number of tensors.

    Raises
    ------
    KvmnnError
        For another kind of target, or names that do not go with the file.
    OutputError
        When the target exists or cannot be written.
    """
    if PurePath(target).suffix.lower() not in SUFFIXES:
        raise KvmnnError(f"{os.fspath(target)}: expected a name that ends in {' or '.join(SUFFIXES)}")
    tensors = list(names(file, prefixes, slots))
    arrays = [
        ArrayInfo(name=name, dtype=file.header.dtype.name, shape=words.shape, array_dtype=words.dtype.str)
        for name, words in tensors
    ]
    metadata = {name: str(value) for name, value in file.header.to_dict().items()}
    with FileOutput(target, force=force, protect=[file.label]) as output:
        runs = ((number, _bytes(words)) for number, (_, words) in enumerate(tensors))
        writer_for(str(target), arrays)(output.file, arrays, runs, metadata)
        output.commit()
    return len(tensors)


def _bytes(words: Words) -> Piece:
    return np.ascontiguousarray(words).reshape(-1).view(np.uint8)
