"""Export a weight file to named tensors (``.safetensors``, ``.npz``), or view it as arrays for comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import PurePath

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSLESS, UNCHANGED, pluralize
from ..arrays.array import ArrayInfo, Chunk, LazyArray
from ..arrays.source import Source
from ..dtypes import Elements
from ..errors import KvmnnError, OptionError
from ..files.atomic import FileOutput
from ..files.schema import Record, json_key
from ..formats.writer import write_file
from .convert import HEX_KEY, TEXT_KEY, read_exported_metadata
from .kvcm import DEFAULT_SLOTS, SLOTS_PER_PREFIX, WeightFile, read_weight_file
from .verify import infer_prefixes

EXPORT_SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True, kw_only=True)
class WeightsExportResult(Record):
    """Result of exporting tensors."""

    #: The weight file and the file with names.
    source: str = field(metadata={"key": "input"})
    target: str = field(metadata={"key": "output"})
    num_tensors: int = field(metadata={"key": "tensors"})
    #: Element type of the tensors.
    dtype: str
    #: Whether the file was read back and compared, which is impossible for a device.
    is_verified: bool = field(metadata={"json": False})

    @property
    @json_key(after="target")
    def label(self) -> str:
        """Return ``LOSSLESS`` if the output was read back and compared, else ``UNCHANGED``."""
        return LOSSLESS if self.is_verified else UNCHANGED

    def __str__(self) -> str:
        how_text = "read back" if self.is_verified else "copied"
        return f"{self.target}: {pluralize(self.num_tensors, 'tensor')} of {self.dtype}, {self.label} ({how_text})"


def iter_named_tensors(
    file: WeightFile, prefixes: tuple[str, ...] | None = None, slots: tuple[int, ...] | None = None
) -> Iterator[tuple[str, Elements]]:
    """Iterate over name and elements of every weight and bias, named as in a checkpoint."""
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

    bf16 becomes BF16 in ``.safetensors`` and uint16 in ``.npz``. The header's fields and the metadata (key
    ``metadata``; as hexadecimal digits under ``metadata_hex`` where it is no UTF-8) go into the metadata of a
    ``.safetensors`` file; ``.npz`` cannot store them.

    Parameters
    ----------
    weights
        A weight file, or its path; ``"-"`` for standard input.
    target
        A ``.safetensors`` or ``.npz`` file.
    prefixes, slots
        Names of the compressors, and positions of their Linear layers.
    overwrite
        Replace an existing file.

    Raises
    ------
    OptionError
        For another kind of target.
    KvmnnError
        For names that do not fit the file.
    OutputError
        If the target exists, cannot be written, or does not read back.
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
        chunks = ((number, chunk) for number, (_, words) in enumerate(tensors) for chunk in _read_elements(words))
        write_file(output, os.fspath(target), arrays, chunks, metadata)
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
    """Return header and metadata of a weight file as texts."""
    texts = {name: str(value) for name, value in file.header.to_dict().items()}
    if file.metadata:
        try:
            texts[TEXT_KEY] = file.metadata.decode("utf-8")
        except UnicodeDecodeError:
            texts[HEX_KEY] = file.metadata.hex()
    return texts


def to_source(path: str | os.PathLike[str]) -> Source:
    """Open every weight and bias under its exported name, with metadata; raise `WeightsError` for a damaged file."""
    file = read_weight_file(path)
    arrays = [
        LazyArray(
            name=name,
            dtype=file.header.dtype.name,
            shape=words.shape,
            array_dtype=words.dtype.str,
            reader=partial(_read_elements, words),
        )
        for name, words in iter_named_tensors(file)
    ]
    return Source(arrays, export_metadata(file), inputs=(os.fspath(path),))


def describe_header_differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """Describe how header fields and metadata differ between two exports."""
    first_metadata, second_metadata = read_exported_metadata(first), read_exported_metadata(second)
    if first_metadata is None or second_metadata is None:
        return
    for name, value in first_metadata.header.to_dict().items():
        if (second_value := getattr(second_metadata.header, name)) != value:
            yield f"header field {name}: {value} and {second_value}"
    if first_metadata.metadata != second_metadata.metadata:
        yield "metadata: other bytes"


def _read_elements(elements: Elements, _: int = 0) -> Iterator[Chunk]:
    yield np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
