"""A weight file back to tensors with names: ``.safetensors`` or ``.npz``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from ...arrays.named_array import ArrayInfo, Chunk
from ...dtypes import Elements
from ...errors import KvmnnError, OptionError
from ...files.output import FileOutput
from ...formats.writing import write_file
from ...text import LOSSLESS, UNCHANGED, pluralize
from ..kvcm.header import DEFAULT_SLOTS, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile, read_weight_file
from .noted import HEX_KEY, TEXT_KEY
from .verify import infer_prefixes

EXPORT_SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True, kw_only=True)
class WeightsExportResult:
    """Tensors that were written.

    Attributes
    ----------
    source, target
        The weight file and the file with names.
    num_tensors
        How many.
    dtype
        Their type.
    is_verified
        Whether the file was read again and compared with what was written; a device cannot be.
    """

    source: str
    target: str
    num_tensors: int
    dtype: str
    is_verified: bool

    @property
    def label(self) -> str:
        """``LOSSLESS`` of what was read again and compared, else ``UNCHANGED``."""
        return LOSSLESS if self.is_verified else UNCHANGED

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.source,
            "output": self.target,
            "label": self.label,
            "tensors": self.num_tensors,
            "dtype": self.dtype,
        }

    def __str__(self) -> str:
        how_text = "read back" if self.is_verified else "copied"
        return f"{self.target}: {pluralize(self.num_tensors, 'tensor')} of {self.dtype}, {self.label} ({how_text})"


def iter_named_tensors(
    file: WeightFile, prefixes: tuple[str, ...] | None = None, slots: tuple[int, ...] | None = None
) -> Iterator[tuple[str, Elements]]:
    """``(name, words)`` of every weight and bias, as a checkpoint calls them.

    Parameters
    ----------
    prefixes
        Compressors in the order of the file; None takes the runtime's.
    slots
        The three Linear layers of each; None takes 0, 3 and 6.

    Raises
    ------
    KvmnnError
        When the names do not go with the number of blocks.
    """
    blocks = file.header.weight_count_per_layer
    prefixes, slots = prefixes or infer_prefixes(file), slots or DEFAULT_SLOTS
    if blocks != len(prefixes) * SLOTS_PER_PREFIX or len(set(prefixes)) < len(prefixes) or len(set(slots)) < len(slots):
        raise KvmnnError(
            f"{file.label}: has {blocks} weights in a layer: expected {len(prefixes) * SLOTS_PER_PREFIX}, three for "
            f"each of {', '.join(prefixes)}, all of different names (--prefix-order and --slot-order give others)"
        )
    for block in file.iter_blocks():
        name = f"{prefixes[block.prefix]}.{block.layer}.{slots[block.slot]}"
        yield f"{name}.weight", block.weight
        if block.bias is not None:
            yield f"{name}.bias", block.bias


def export_weights(
    weights: WeightFile | str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    prefixes: tuple[str, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    overwrite: bool = False,
) -> WeightsExportResult:
    """Write every weight and bias under its name, and read them back.

    bf16 becomes BF16 in ``.safetensors`` and uint16 in ``.npz``.

    The header's fields and the metadata (key ``metadata``; as hexadecimal digits under ``metadata_hex`` where it is no
    UTF-8) go into the metadata of a ``.safetensors`` file; ``.npz`` has no place for them.

    Parameters
    ----------
    weights
        A weight file, or its path; ``"-"`` for standard input.
    target
        A ``.safetensors`` or ``.npz`` file.
    prefixes, slots
        As for `iter_named_tensors`.
    overwrite
        Replace what exists.

    Raises
    ------
    OptionError
        For another kind of target.
    KvmnnError
        For names that do not go with the file.
    OutputError
        When the target exists, cannot be written, or does not read back.
    """
    if PurePath(target).suffix.lower() not in EXPORT_SUFFIXES:
        raise OptionError(f"{os.fspath(target)}: expected a name that ends in {' or '.join(EXPORT_SUFFIXES)}")
    file = weights if isinstance(weights, WeightFile) else read_weight_file(weights)
    tensors = list(iter_named_tensors(file, prefixes, slots))
    arrays = [
        ArrayInfo(name=name, dtype=file.header.dtype.name, shape=words.shape, array_dtype=words.dtype.str)
        for name, words in tensors
    ]
    metadata = export_metadata(file)
    with FileOutput(target, force=overwrite, exclude=[file.label]) as output:
        runs = ((number, _to_bytes(words)) for number, (_, words) in enumerate(tensors))
        write_file(output, os.fspath(target), arrays, runs, metadata)
        output.commit()
        is_verified = not output.is_device
    source = file.label if isinstance(weights, WeightFile) else os.fspath(weights)
    return WeightsExportResult(
        source=source,
        target=os.fspath(target),
        num_tensors=len(tensors),
        dtype=file.header.dtype.name,
        is_verified=is_verified,
    )


def export_metadata(file: WeightFile) -> dict[str, str]:
    """Header and metadata of a weight file as texts."""
    return {name: str(value) for name, value in file.header.to_dict().items()} | _encode_metadata(file.metadata)


def _encode_metadata(data: bytes) -> dict[str, str]:
    if not data:
        return {}
    try:
        return {TEXT_KEY: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {HEX_KEY: data.hex()}


def _to_bytes(elements: Elements) -> Chunk:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
