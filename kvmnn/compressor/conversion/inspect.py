"""What a weight file or a checkpoint holds: shapes and values of every Linear layer, and where every byte goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import Floats
from ..checkpoint.opening import Checkpoint, naming
from ..kvcm.header import HEADER_BYTES, META_BYTES, SLOTS, SLOTS_PER_PREFIX, Header
from ..kvcm.weight_file import WeightFile
from ..kvcm.words import float32_of
from .selection import Options, Selection, select
from .verify import default_prefixes


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


@dataclass(frozen=True)
class Account:
    """A file's header as it is or would be, its weights, and its bytes by what they are for.

    The values of `parts` add up to `size`.
    """

    header: Header
    rows: list[Row]
    parts: dict[str, int]
    size: int


def of_file(file: WeightFile) -> Account:
    """Account for a weight file."""
    words = file.header.dtype.itemsize
    weights = biases = 0
    for place in file.places():
        weights += place.rows * place.cols * words
        biases += place.rows * words * place.has_bias
    parts = {
        "header": HEADER_BYTES,
        "metadata": len(file.metadata),
        "block heads": META_BYTES * len(file),
        "weights": weights,
        "biases": biases,
        "trailing": file.trailing,
    }
    return Account(file.header, list(_file_rows(file)), parts, file.size)


def _file_rows(file: WeightFile) -> Iterator[Row]:
    prefixes = default_prefixes(file)
    for block in file.blocks():
        prefix = prefixes[block.prefix] if block.prefix < len(prefixes) else f"prefix{block.prefix}"
        name = f"{prefix}.{block.layer}.{SLOTS[block.index % SLOTS_PER_PREFIX]}"
        values = [block.weight_float32()] + ([] if block.bias is None else [float32_of(block.bias)])
        shape, has_bias = (block.rows, block.cols), block.bias is not None
        yield _row(block.layer, name, shape, has_bias, file.header.dtype.name, values)


def of_checkpoint(checkpoint: Checkpoint, options: Options) -> tuple[Account, Selection]:
    """Account for a checkpoint, and say which of its tensors a conversion would take.

    Raises
    ------
    CheckpointError
        When it holds no compressor.
    """
    with naming(checkpoint.label):
        selection = select(checkpoint.root, options)
        rows = list(_checkpoint_rows(checkpoint.label, selection))
    tensors = [part for linear in selection.linears for part in (linear.weight, linear.bias) if part is not None]
    roots = [tensor.storage.root or tensor.storage for tensor in tensors]
    used = {storage.key: storage.nbytes for storage in roots}
    stored = sum(storage.nbytes for storage in checkpoint.storages.values())
    rest = checkpoint.size - checkpoint.pickle_bytes - stored
    parts = {
        "pickle" if checkpoint.kind != "safetensors" else "header": checkpoint.pickle_bytes,
        "storages of the compressor": sum(used.values()),
        "other storages": stored - sum(used.values()),
        "directory, names, padding" if rest >= 0 else "saved by deflating": rest,
    }
    return Account(selection.header, rows, parts, checkpoint.size), selection


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
