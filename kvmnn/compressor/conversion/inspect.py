"""What a weight file or a checkpoint holds: shapes and values of every Linear layer, and where every byte goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import Floats
from ..checkpoint import Checkpoint, naming, open_checkpoint
from ..kvcm.header import DTYPES, HEADER_BYTES, META_BYTES, SLOTS, SLOTS_PER_PREFIX, Header
from ..kvcm.metadata import shown, unpack
from ..kvcm.weight_file import WeightFile, is_weight_file, read
from ..kvcm.words import float32_of
from .selection import ConvertOptions, Selection, select
from .verify import default_prefixes

_HEAD = 64
"""Bytes of metadata that is no list of entries, in the JSON."""


@dataclass(frozen=True)
class Row:
    """One weight with its bias.

    Attributes
    ----------
    layer, name
        Which: the name is what a checkpoint calls it, in the runtime's order of prefixes and slots.
    shape
        ``(rows, cols)``.
    bias
        Whether it has one.
    dtype
        Type of the elements.
    minimum, maximum, mean, std
        Of the finite elements, bias included; None where there are none.
    non_finite
        Elements that are infinite or no number.
    """

    layer: int
    name: str
    shape: tuple[int, int]
    bias: bool
    dtype: str
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    non_finite: int

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**self.__dict__, "shape": list(self.shape)}


@dataclass(frozen=True, kw_only=True)
class _Account:
    """What both kinds of account have.

    Attributes
    ----------
    path
        The file.
    header, metadata
        As they are, or as `convert` would write them.
    rows
        The weights.
    parts
        Bytes by what they are for; they add up to `size`.
    size
        Bytes of the file.
    """

    path: str
    header: Header
    metadata: bytes
    rows: list[Row]
    parts: dict[str, int]
    size: int

    def _contents(self) -> dict[str, Any]:
        return {
            "header": self.header.to_dict(),
            "metadata": self._metadata_document(),
            "bytes": self.size,
            "parts": self.parts,
            "weights": [row.to_dict() for row in self.rows],
        }

    def _metadata_document(self) -> dict[str, Any]:
        """How many bytes; the entries, or else the first bytes as hexadecimal digits."""
        entries = unpack(self.metadata)
        shown = {"head": self.metadata[:_HEAD].hex()} if entries is None else {"entries": entries}
        return {"bytes": len(self.metadata), **(shown if self.metadata else {})}

    def _metadata_lines(self) -> list[str]:
        if not self.metadata:
            return []
        entries = unpack(self.metadata)
        if entries is None:
            return [f"  metadata, {shown(self.metadata)}"]
        width = max([23, *(len(_line(key)) for key in entries)])
        return ["  metadata"] + [f"    {_line(key):<{width}} {_line(text)}" for key, text in entries.items()]

    def _table(self, title: str) -> list[str]:
        lines = [f"  {title}"]
        lines += [f"    {name:<23} {_value(name, value)}" for name, value in self.header.to_dict().items()]
        lines += self._metadata_lines()
        lines += _table(self.rows)
        lines.append("  bytes")
        lines += [f"    {name:<28} {nbytes:>15,}" for name, nbytes in self.parts.items()]
        lines.append(f"    {'file':<28} {self.size:>15,}")
        return lines


@dataclass(frozen=True, kw_only=True)
class WeightFileAccount(_Account):
    """What a weight file holds.

    Attributes
    ----------
    path, header, metadata, rows, parts, size
        The file, its header and metadata, its weights, and its bytes by what they are for.
    warnings
        What loaders take but no converter writes.
    """

    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.path,
            "kind": "weights",
            "dtype": self.header.dtype.name,
            "warnings": self.warnings,
            **self._contents(),
        }

    def __str__(self) -> str:
        head = [f"{self.path}: compressor weights, {self.header.dtype.name}, {self.size:,} bytes"]
        head += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(head + self._table("header"))


@dataclass(frozen=True, kw_only=True)
class CheckpointAccount(_Account):
    """What a checkpoint holds, and what a conversion would take of it.

    Attributes
    ----------
    path, header, metadata, rows, parts, size
        The file, the header and metadata that `convert` would write, the weights, and bytes by what they are for.
    container
        ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``.
    selection
        What a conversion would take.
    notices
        What was unusual about reading it.
    """

    container: str
    selection: Selection
    notices: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.path,
            "kind": "checkpoint",
            "container": self.container,
            "warnings": self.selection.warnings,
            "notices": self.notices,
            "unused": self.selection.unused,
            **self._contents(),
        }

    def __str__(self) -> str:
        head = [f"{self.path}: checkpoint ({self.container}) with compressor weights, {self.size:,} bytes"]
        head += [f"  note: {text}" for text in self.notices]
        head += [f"  warning: {text}" for text in self.selection.warnings]
        return "\n".join(head + self._table("header as kvmnn convert would write it"))


def inspect(
    path: str | os.PathLike[str], options: ConvertOptions | None = None
) -> WeightFileAccount | CheckpointAccount:
    """Account for a weight file or a checkpoint.

    Parameters
    ----------
    path
        Either.
    options
        What a conversion of the checkpoint would be told.

    Raises
    ------
    WeightsError, CheckpointError
        For a file that is damaged, and for a checkpoint without a compressor.
    SourceError
        When it cannot be read.
    """
    path = os.fspath(path)
    if is_weight_file(path):
        return of_file(read(path, allow_trailing=True))
    return of_checkpoint(open_checkpoint(path), options or ConvertOptions())


def of_file(file: WeightFile) -> WeightFileAccount:
    """Account for a weight file."""
    words = file.header.dtype.itemsize
    weights = biases = 0
    for place in file.places():
        weights += place.rows * place.cols * words
        biases += place.rows * words * place.has_bias
    parts = {
        "header": HEADER_BYTES,
        "metadata": file.header.metadata_size_bytes,
        "block heads": META_BYTES * len(file),
        "weights": weights,
        "biases": biases,
        "trailing": file.trailing,
    }
    warnings = [text for _, text in file.warnings]
    if file.trailing:
        warnings.append(f"{file.trailing} bytes follow the last block: kvmnn verify refuses the file")
    return WeightFileAccount(
        path=file.label,
        header=file.header,
        metadata=file.metadata,
        rows=list(_file_rows(file)),
        parts=parts,
        size=file.size,
        warnings=warnings,
    )


def _file_rows(file: WeightFile) -> Iterator[Row]:
    prefixes = default_prefixes(file)
    for block in file.blocks():
        prefix = prefixes[block.prefix] if block.prefix < len(prefixes) else f"prefix{block.prefix}"
        name = f"{prefix}.{block.layer}.{SLOTS[block.index % SLOTS_PER_PREFIX]}"
        values = [block.weight_float32()] + ([] if block.bias is None else [float32_of(block.bias)])
        shape, has_bias = (block.rows, block.cols), block.bias is not None
        yield _row(block.layer, name, shape, has_bias, file.header.dtype.name, values)


def of_checkpoint(checkpoint: Checkpoint, options: ConvertOptions) -> CheckpointAccount:
    """Account for a checkpoint.

    Raises
    ------
    CheckpointError
        When it holds no compressor.
    """
    with naming(checkpoint.label):
        selection = select(checkpoint.root, options)
        rows = list(_checkpoint_rows(checkpoint.label, selection))
    return CheckpointAccount(
        path=checkpoint.path,
        header=selection.header,
        metadata=selection.metadata,
        rows=rows,
        parts=_checkpoint_parts(checkpoint, selection),
        size=checkpoint.size,
        container=checkpoint.kind,
        selection=selection,
        notices=checkpoint.notices + selection.notices,
    )


def _checkpoint_parts(checkpoint: Checkpoint, selection: Selection) -> dict[str, int]:
    tensors = [part for linear in selection.linears for part in (linear.weight, linear.bias) if part is not None]
    roots = [tensor.storage.root or tensor.storage for tensor in tensors]
    used = {storage.key: storage.nbytes for storage in roots}
    stored = sum(storage.nbytes for storage in checkpoint.storages.values())
    rest = checkpoint.size - checkpoint.pickle_bytes - stored
    return {
        "pickle" if checkpoint.kind != "safetensors" else "header": checkpoint.pickle_bytes,
        "storages of the compressor": sum(used.values()),
        "other storages": stored - sum(used.values()),
        "directory, names, padding" if rest >= 0 else "saved by deflating": rest,
    }


def _checkpoint_rows(label: str, selection: Selection) -> Iterator[Row]:
    count = selection.header.weight_count_per_layer
    for number, linear in enumerate(selection.linears):
        rows, cols = linear.weight.shape
        with naming(label, repr(f"{linear.name}.weight")):
            values = [linear.weight.float32()]
        if linear.bias is not None:
            with naming(label, repr(f"{linear.name}.bias")):
                values.append(linear.bias.float32())
        element = linear.weight.element.name
        yield _row(number // count, linear.name, (rows, cols), linear.bias is not None, element, values)


def _row(layer: int, name: str, shape: tuple[int, int], bias: bool, dtype: str, values: list[Floats]) -> Row:
    flat = np.concatenate([part.reshape(-1) for part in values]).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return Row(layer, name, shape, bias, dtype, None, None, None, None, flat.size)
    return Row(
        layer=layer,
        name=name,
        shape=shape,
        bias=bias,
        dtype=dtype,
        minimum=float(finite.min()),
        maximum=float(finite.max()),
        mean=float(finite.mean()),
        std=float(finite.std()),
        non_finite=int(flat.size - finite.size),
    )


def _table(rows: list[Row]) -> list[str]:
    width = max(len(row.name) for row in rows)
    kind = max(4, *(len(row.dtype) for row in rows))
    lines = [
        f"  {'weight':<{width}} {'shape':>10} bias {'type':<{kind}} {'min':>8} {'max':>8} {'mean':>9} {'std':>8}"
        + ("  non-finite" if any(row.non_finite for row in rows) else "")
    ]
    for row in rows:
        numbers = (row.minimum, row.maximum, row.mean, row.std)
        lines.append(
            f"  {row.name:<{width}} {f'{row.shape[0]}x{row.shape[1]}':>10} {'yes' if row.bias else 'no':<4} "
            f"{row.dtype:<{kind}} {' '.join(map(_number, numbers, (8, 8, 9, 8)))}  {row.non_finite or ''}".rstrip()
        )
    return lines


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.3g}"


def _line(text: str) -> str:
    """A text of the file without control characters."""
    return text if text.isprintable() else ascii(text)


def _value(name: str, value: int) -> str:
    if name == "magic":
        return f"{value:#010x}"
    if name == "dtype_code":
        return f"{value} ({DTYPES[value].name})"
    return str(value) + (" (not given)" if value == 0 and name in ("num_heads", "head_dim", "hidden_size") else "")
