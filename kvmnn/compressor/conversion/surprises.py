"""What may surprise in the tensors that were chosen of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ...formats.torch.tensors import Tensor
from ..kvcm.header import PREFIXES, TEXT_PREFIXES, Header
from .semantics import implausible_fields

Blocks = Sequence[tuple[str, Tensor, Tensor | None]]
"""Name, weight and bias of each Linear layer, in file order."""

_SHOWN = 3


def layout_warnings(header: Header, blocks: Blocks, prefixes: Sequence[str], slots: Sequence[int]) -> Iterator[str]:
    """Of shapes and orders that the file cannot say, or that the runtime takes otherwise."""
    if prefixes not in (PREFIXES, TEXT_PREFIXES):
        yield (
            f"prefix order {','.join(prefixes)}: the file has no names, and the runtime takes its blocks as "
            f"{','.join(PREFIXES)}, whatever they are"
        )
    if any(a >= b for a, b in pairwise(slots)):
        yield f"slot order {','.join(map(str, slots))}: the runtime applies the layers in this order"
    rows, columns = blocks[0][1].shape
    if header.compression_factor * rows != columns:
        yield (
            f"compression_factor {header.compression_factor} is not columns / rows of the first weight, "
            f"{columns} / {rows}"
        )
    yield from (f"{finding.text} ({finding.reason})" for finding in implausible_fields(header))
    for number, (name, weight, _) in enumerate(blocks):
        expected = blocks[number % header.weight_count_per_layer][1].shape
        if weight.shape != expected:
            yield f"layers differ in shape: {name}.weight is {list(weight.shape)}, in layer 0 {list(expected)}"
            break
    cut = [
        f"{name}.{part}"
        for name, weight, bias in blocks
        for part, tensor in (("weight", weight), ("bias", bias))
        if tensor is not None and tensor.element.is_complex
    ]
    if cut:
        yield f"left out the imaginary parts of {_listed('complex tensor', 'complex tensors', cut)}"


def describe_misfits(misfits: Mapping[str, tuple[int, int]]) -> str:
    """Name the biases whose length is not the number of rows of their weight, with both numbers of the first."""
    length, rows = next(iter(misfits.values()))
    text = _listed("bias", "biases", list(misfits))
    of_first = " of the first" if len(misfits) > 1 else ""
    return f"{text}: the length{of_first} is {length}, its weight has {rows} rows"


def key_warnings(misfits: Mapping[str, tuple[int, int]], unused: list[str]) -> Iterator[str]:
    """Of the keys of a checkpoint that do not get into the file; `unused` are those that nothing asked for."""
    if misfits:
        yield f"left out {describe_misfits(misfits)}"
    if unused:
        yield f"not used: {_listed('key', 'keys', unused)}"


def _listed(one: str, many: str, names: list[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {one if len(names) == 1 else many} ({shown})"
