"""What may surprise in the tensors that were chosen of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ...formats.torch.tensors import TorchTensor
from ..kvcm.header import DEFAULT_PREFIXES, TEXT_PREFIXES, WeightFileHeader
from .semantics import check_plausible_fields

NamedBlocks = Sequence[tuple[str, TorchTensor, TorchTensor | None]]
"""Name, weight and bias of each Linear layer, in file order."""

_MAX_SHOWN_NAMES = 3


def check_layout(
    header: WeightFileHeader, blocks: NamedBlocks, prefixes: Sequence[str], slots: Sequence[int]
) -> Iterator[str]:
    """Of shapes and orders that the file cannot say, or that the runtime takes otherwise."""
    if prefixes not in (DEFAULT_PREFIXES, TEXT_PREFIXES):
        yield (
            f"prefix order {','.join(prefixes)}: the file has no names, and the runtime takes its blocks as "
            f"{','.join(DEFAULT_PREFIXES)}, whatever they are"
        )
    if any(a >= b for a, b in pairwise(slots)):
        yield f"slot order {','.join(map(str, slots))}: the runtime applies the layers in this order"
    rows, columns = blocks[0][1].shape
    if header.compression_factor * rows != columns:
        yield (
            f"compression_factor {header.compression_factor} is not columns / rows of the first weight, "
            f"{columns} / {rows}"
        )
    yield from (f"{finding.text} ({finding.reason})" for finding in check_plausible_fields(header))
    for number, (name, weight, _) in enumerate(blocks):
        expected = blocks[number % header.weight_count_per_layer][1].shape
        if weight.shape != expected:
            yield f"layers differ in shape: {name}.weight is {list(weight.shape)}, in layer 0 {list(expected)}"
            break
    complex_names = [
        f"{name}.{part}"
        for name, weight, bias in blocks
        for part, tensor in (("weight", weight), ("bias", bias))
        if tensor is not None and tensor.element_type.is_complex
    ]
    if complex_names:
        yield f"left out the imaginary parts of {_format_list('complex tensor', 'complex tensors', complex_names)}"


def describe_mismatched_biases(mismatched_biases: Mapping[str, tuple[int, int]]) -> str:
    """Name the biases whose length is not the number of rows of their weight, with both numbers of the first."""
    length, rows = next(iter(mismatched_biases.values()))
    text = _format_list("bias", "biases", list(mismatched_biases))
    suffix = " of the first" if len(mismatched_biases) > 1 else ""
    return f"{text}: the length{suffix} is {length}, its weight has {rows} rows"


def check_keys(mismatched_biases: Mapping[str, tuple[int, int]], unused_keys: list[str]) -> Iterator[str]:
    """Of the keys of a checkpoint that do not get into the file; `unused_keys` are those that nothing asked for."""
    if mismatched_biases:
        yield f"left out {describe_mismatched_biases(mismatched_biases)}"
    if unused_keys:
        yield f"not used: {_format_list('key', 'keys', unused_keys)}"


def _format_list(singular: str, plural: str, names: list[str]) -> str:
    names_text = ", ".join(repr(name[:80]) for name in names[:_MAX_SHOWN_NAMES]) + (
        ", ..." if len(names) > _MAX_SHOWN_NAMES else ""
    )
    return f"{len(names)} {singular if len(names) == 1 else plural} ({names_text})"
