"""Inspect a weight file or a checkpoint: shape and values of every Linear layer, and the location of every byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Floats
from ..files.schema import Record
from .checkpoint import Checkpoint, open_checkpoint, prefix_errors
from .kvcm import (
    BLOCK_HEADER_BYTES,
    DEFAULT_SLOTS,
    DTYPES,
    HEADER_BYTES,
    SLOTS_PER_PREFIX,
    WeightFile,
    WeightFileHeader,
    format_metadata,
    is_weight_file,
    read_weight_file,
    to_float32,
    unpack_metadata,
)
from .select import ConvertOptions, TensorSelection, select_tensors
from .verify import infer_prefixes

_NUM_HEAD_BYTES = 64  # bytes in the JSON, of metadata without entries


@dataclass(frozen=True)
class WeightInfo(Record):
    """One weight with its bias."""

    #: Layer and checkpoint name, in the runtime's order of prefixes and slots.
    layer: int
    name: str
    #: ``(rows, cols)``.
    shape: tuple[int, int]
    #: Whether the layer has a bias.
    bias: bool
    #: Type of the elements.
    dtype: str
    #: Statistics of the finite elements, bias included; None without any.
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    #: Elements that are infinite or no number.
    non_finite: int


@dataclass(frozen=True, kw_only=True)
class _ContentsInfo(Record):
    """Contents of a weight file or a checkpoint."""

    path: str
    #: Header and metadata of the file, or those that `convert` would write.
    header: WeightFileHeader
    metadata: bytes
    #: The weights.
    rows: list[WeightInfo]
    #: Bytes by purpose; their sum is `size`.
    parts: dict[str, int]
    #: Bytes of the file.
    size: int

    @property
    def _metadata_document(self) -> dict[str, Any]:
        """The number of bytes, and the entries, or the first bytes as hexadecimal digits if they are no entries."""
        entries = unpack_metadata(self.metadata)
        content = {"head": self.metadata[:_NUM_HEAD_BYTES].hex()} if entries is None else {"entries": entries}
        return {"bytes": len(self.metadata), **(content if self.metadata else {})}

    def _format_metadata(self) -> list[str]:
        if not self.metadata:
            return []
        entries = unpack_metadata(self.metadata)
        if entries is None:
            return [f"  metadata, {format_metadata(self.metadata)}"]
        width = max([23, *(len(_escape_text(key)) for key in entries)])
        return ["  metadata"] + [
            f"    {_escape_text(key):<{width}} {_escape_text(text)}" for key, text in entries.items()
        ]

    def _format_table(self, title: str) -> list[str]:
        lines = [f"  {title}"]
        lines += [f"    {name:<23} {_format_field(name, value)}" for name, value in self.header.to_dict().items()]
        lines += self._format_metadata()
        lines += _format_rows(self.rows)
        lines.append("  bytes")
        lines += [f"    {name:<28} {nbytes:>15,}" for name, nbytes in self.parts.items()]
        lines.append(f"    {'file':<28} {self.size:>15,}")
        return lines


@dataclass(frozen=True, kw_only=True)
class WeightFileInfo(_ContentsInfo, Record):
    """Contents of a weight file."""

    json_keys = (
        "input=path kind dtype=header.dtype.name warnings header metadata=_metadata_document bytes=size parts "
        "weights=rows"
    )

    #: Properties that loaders accept but no converter writes.
    warnings: list[str]

    kind: ClassVar = "weights"

    def __str__(self) -> str:
        head = [f"{self.path}: compressor weights, {self.header.dtype.name}, {self.size:,} bytes"]
        head += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(head + self._format_table("header"))


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(_ContentsInfo, Record):
    """Contents of a checkpoint, and the tensors, header and metadata that a conversion would write."""

    json_keys = (
        "input=path kind container warnings=selection.warnings notices unused=selection.unused_keys header "
        "metadata=_metadata_document bytes=size parts weights=rows"
    )

    kind: ClassVar = "checkpoint"

    #: ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``.
    container: str
    #: Tensors that a conversion would select.
    selection: TensorSelection
    #: Unusual properties of the file.
    notices: list[str]

    def __str__(self) -> str:
        head = [f"{self.path}: checkpoint ({self.container}) with compressor weights, {self.size:,} bytes"]
        head += [f"  note: {text}" for text in self.notices]
        head += [f"  warning: {text}" for text in self.selection.warnings]
        return "\n".join(head + self._format_table("header as kvmnn compressor convert would write it"))


def inspect_weights(
    path: str | os.PathLike[str], options: ConvertOptions | None = None
) -> WeightFileInfo | CheckpointInfo:
    """List the contents of a weight file or a checkpoint.

    Parameters
    ----------
    path
        Either.
    options
        Options of a conversion of the checkpoint.

    Raises
    ------
    WeightsError, CheckpointError
        For a damaged file, and for a checkpoint without a compressor.
    SourceError
        If it cannot be read.
    """
    path = os.fspath(path)
    if is_weight_file(path):
        return inspect_weight_file(read_weight_file(path, allow_trailing=True))
    return inspect_checkpoint(open_checkpoint(path), options or ConvertOptions())


def inspect_weight_file(file: WeightFile) -> WeightFileInfo:
    """List the contents of a weight file."""
    itemsize = file.header.dtype.itemsize
    weights = biases = 0
    for placement in file.iter_placements():
        weights += placement.rows * placement.cols * itemsize
        biases += placement.rows * itemsize * placement.has_bias
    parts = {
        "header": HEADER_BYTES,
        "metadata": file.header.metadata_size_bytes,
        "block heads": BLOCK_HEADER_BYTES * len(file),
        "weights": weights,
        "biases": biases,
        "trailing": file.trailing_bytes,
    }
    warnings = [text for _, text in file.warnings]
    if file.trailing_bytes:
        warnings.append(f"{file.trailing_bytes} bytes follow the last block: kvmnn verify refuses the file")
    rows, prefixes = [], infer_prefixes(file)
    for block in file.iter_blocks():
        prefix = prefixes[block.prefix] if block.prefix < len(prefixes) else f"prefix{block.prefix}"
        name = f"{prefix}.{block.layer}.{DEFAULT_SLOTS[block.index % SLOTS_PER_PREFIX]}"
        values = [block.convert_weight_to_float32()] + ([] if block.bias is None else [to_float32(block.bias)])
        shape, has_bias = (block.rows, block.cols), block.bias is not None
        rows.append(_build_row(block.layer, name, shape, has_bias, file.header.dtype.name, values))
    return WeightFileInfo(
        path=file.label,
        header=file.header,
        metadata=file.metadata,
        rows=rows,
        parts=parts,
        size=file.size,
        warnings=warnings,
    )


def inspect_checkpoint(checkpoint: Checkpoint, options: ConvertOptions) -> CheckpointInfo:
    """List the contents of a checkpoint."""
    with prefix_errors(checkpoint.label):
        selection = select_tensors(checkpoint.root, options)
        rows = list(_iter_checkpoint_rows(checkpoint.label, selection))
    return CheckpointInfo(
        path=checkpoint.path,
        header=selection.header,
        metadata=selection.metadata,
        rows=rows,
        parts=_measure_checkpoint_parts(checkpoint, selection),
        size=checkpoint.size,
        container=checkpoint.kind,
        selection=selection,
        notices=checkpoint.notices + selection.notices,
    )


def _measure_checkpoint_parts(checkpoint: Checkpoint, selection: TensorSelection) -> dict[str, int]:
    tensors = [part for linear in selection.linears for part in (linear.weight, linear.bias) if part is not None]
    roots = [tensor.storage.root or tensor.storage for tensor in tensors]
    used_storages = {storage.key: storage.nbytes for storage in roots}
    storage_bytes = sum(storage.nbytes for storage in checkpoint.storages.values())
    other_bytes = checkpoint.size - checkpoint.pickle_bytes - storage_bytes
    return {
        "pickle" if checkpoint.kind != "safetensors" else "header": checkpoint.pickle_bytes,
        "storages of the compressor": sum(used_storages.values()),
        "other storages": storage_bytes - sum(used_storages.values()),
        "directory, names, padding" if other_bytes >= 0 else "saved by deflating": other_bytes,
    }


def _iter_checkpoint_rows(label: str, selection: TensorSelection) -> Iterator[WeightInfo]:
    weights_per_layer = selection.header.weight_count_per_layer
    for number, linear in enumerate(selection.linears):
        rows, cols = linear.weight.shape
        with prefix_errors(label, repr(f"{linear.name}.weight")):
            values = [linear.weight.to_float32()]
        if linear.bias is not None:
            with prefix_errors(label, repr(f"{linear.name}.bias")):
                values.append(linear.bias.to_float32())
        element = linear.weight.element_type.name
        yield _build_row(
            number // weights_per_layer, linear.name, (rows, cols), linear.bias is not None, element, values
        )


def _build_row(
    layer: int, name: str, shape: tuple[int, int], bias: bool, dtype: str, values: list[Floats]
) -> WeightInfo:
    flat = np.concatenate([array.reshape(-1) for array in values]).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    stats: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)
    if finite.size:
        stats = float(finite.min()), float(finite.max()), float(finite.mean()), float(finite.std())
    return WeightInfo(layer, name, shape, bias, dtype, *stats, int(flat.size - finite.size))


def _format_rows(rows: list[WeightInfo]) -> list[str]:
    width = max(len(row.name) for row in rows)
    type_width = max(4, *(len(row.dtype) for row in rows))
    lines = [
        f"  {'weight':<{width}} {'shape':>10} bias {'type':<{type_width}} {'min':>8} {'max':>8} {'mean':>9} {'std':>8}"
        + ("  non-finite" if any(row.non_finite for row in rows) else "")
    ]
    for row in rows:
        numbers = (row.minimum, row.maximum, row.mean, row.std)
        lines.append(
            f"  {row.name:<{width}} {f'{row.shape[0]}x{row.shape[1]}':>10} {'yes' if row.bias else 'no':<4} "
            f"{row.dtype:<{type_width}} {' '.join(map(_format_number, numbers, (8, 8, 9, 8)))}  "
            f"{row.non_finite or ''}".rstrip()
        )
    return lines


def _format_number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.3g}"


def _escape_text(text: str) -> str:
    """Escape a text of the file that has control characters."""
    return text if text.isprintable() else ascii(text)


def _format_field(name: str, value: int) -> str:
    if name == "magic":
        return f"{value:#010x}"
    if name == "dtype_code":
        return f"{value} ({DTYPES[value].name})"
    return str(value) + (" (not given)" if value == 0 and name in ("num_heads", "head_dim", "hidden_size") else "")
