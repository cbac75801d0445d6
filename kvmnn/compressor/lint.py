"""Lint weight files that the runtime accepts but would run differently from their training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Protocol

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..formats.torch.tensors import TorchTensor
from .checkpoint import count_non_finite
from .kvcm import (
    BLOCK_HEADER_BYTES,
    DEFAULT_PREFIXES,
    FIELD_OFFSETS,
    HEADER_BYTES,
    SLOTS_PER_PREFIX,
    TEXT_PREFIXES,
    BlockPlacement,
    WeightFile,
    WeightFileHeader,
)

#: The runtime compares ``min_seq_len`` with a signed count of groups, so larger values are read as negative ones.
MAX_MIN_SEQ_LEN = 2**31 - 1
#: Falcon-180B has 232 query heads, the most of all published models; kv heads are fewer.
MAX_NUM_HEADS = 512


class LintFinding(NamedTuple):
    """A finding about a weight file."""

    #: Code; docs/compressor-weights.md lists them.
    reason: str
    #: What and where, what was found, what was expected.
    text: str
    #: False for what a verifier only warns of.
    is_error: bool = True


class HasShape(Protocol):
    """Header and shapes of a weight file, or of a planned one."""

    @property
    def header(self) -> WeightFileHeader: ...

    def get_placement(self, layer: int, index: int, /) -> BlockPlacement: ...

    def iter_placements(self) -> Iterator[BlockPlacement]: ...


@dataclass(frozen=True)
class WeightFilePlan:
    """A weight file that has not been written yet."""

    #: What it will begin with.
    header: WeightFileHeader
    #: Of each block in file order: rows, columns, and whether it has a bias.
    blocks: Sequence[tuple[int, int, bool]]

    def get_placement(self, layer: int, index: int, /) -> BlockPlacement:
        return next(islice(self.iter_placements(), layer * self.header.weight_count_per_layer + index, None))

    def iter_placements(self) -> Iterator[BlockPlacement]:
        offset, itemsize = HEADER_BYTES + self.header.metadata_size_bytes, self.header.dtype.itemsize
        for rows, cols, has_bias in self.blocks:
            yield BlockPlacement(offset, rows, cols, has_bias)
            offset += BLOCK_HEADER_BYTES + itemsize * rows * (cols + has_bias)


def check_weight_file(file: WeightFile) -> Iterator[LintFinding]:
    """Report all findings on a well-formed file, errors first, then warnings."""
    yield from check_semantics(file)
    yield from check_plausible_fields(file.header)
    for reason, text in file.warnings:
        yield LintFinding(reason, text, is_error=False)
    if file.trailing_bytes:
        text = (
            f"offset {file.size - file.trailing_bytes}: {file.trailing_bytes} bytes follow the last block, which "
            f"loaders pass over"
        )
        yield LintFinding("trailing_bytes", text, is_error=False)
    yield from _check_finite(file)


def check_semantics(file: HasShape) -> Iterator[LintFinding]:
    """Report inconsistencies of header and shapes."""
    yield from _check_counts(file.header.weight_count_per_layer)
    if file.header.weight_count_per_layer % SLOTS_PER_PREFIX == 0:
        yield from _check_shapes(file)


def check_plausible_fields(header: WeightFileHeader) -> Iterator[LintFinding]:
    """Report header fields that loaders accept although no model or runtime has such a value."""
    if not 1 <= header.min_seq_len <= MAX_MIN_SEQ_LEN:
        expected = f"1 to {MAX_MIN_SEQ_LEN}"
        yield _build_field_finding(header, "min_seq_len_implausible", "min_seq_len", expected, is_error=False)
    if header.num_heads > MAX_NUM_HEADS:
        expected = f"0 (not given) to {MAX_NUM_HEADS}"
        yield _build_field_finding(header, "num_heads_implausible", "num_heads", expected, is_error=False)


def _check_counts(count: int) -> Iterator[LintFinding]:
    location = f"offset {FIELD_OFFSETS['weight_count_per_layer']}: field weight_count_per_layer is {count}"
    complete_counts = [len(TEXT_PREFIXES) * SLOTS_PER_PREFIX, len(DEFAULT_PREFIXES) * SLOTS_PER_PREFIX]
    expected = f"expected {complete_counts[0]} (text) or {complete_counts[1]} (text and image)"
    if count % SLOTS_PER_PREFIX:
        yield LintFinding("weight_count_not_multiple_of_3", f"{location}: {expected}, three for each compressor")
    elif count < complete_counts[0]:
        yield LintFinding(
            "missing_text_mlp", f"{location}: text V is missing, so the runtime never compresses: {expected}"
        )
    elif count not in complete_counts:
        yield LintFinding("odd_prefix_count", f"{location}, {count // SLOTS_PER_PREFIX} compressors: {expected}")
        if count < complete_counts[1]:
            yield LintFinding("missing_image_mlp", f"{location}: image V is missing, so image tokens stay as they are")


def _check_shapes(file: HasShape) -> Iterator[LintFinding]:
    header = file.header
    first_weight, third_weight = file.get_placement(0, 0), file.get_placement(0, SLOTS_PER_PREFIX - 1)
    factor, hidden_size = header.compression_factor, first_weight.cols
    is_stated = header.head_dim and header.head_dim * factor == hidden_size
    head_dim = header.head_dim if is_stated else third_weight.rows
    if factor < 2:
        yield _build_field_finding(header, "factor_invalid", "compression_factor", "2 or more")
    if header.hidden_size not in (0, hidden_size):
        expected = f"{hidden_size}, the columns of the first weight"
        yield _build_field_finding(header, "hidden_size_mismatch", "hidden_size", expected)
    if header.head_dim not in (0, head_dim):
        yield _build_field_finding(header, "head_dim_mismatch", "head_dim", f"{head_dim}, the rows of the third weight")
    stated_size, stated_dim = header.hidden_size or hidden_size, header.head_dim or head_dim
    if factor >= 2 and stated_size != stated_dim * factor:
        expected = f"hidden_size {stated_size} / head_dim {stated_dim}"
        yield _build_field_finding(header, "factor_mismatch", "compression_factor", expected)
    yield from _check_chains(file, hidden_size, head_dim)


def _check_chains(file: HasShape, hidden_size: int, head_dim: int) -> Iterator[LintFinding]:
    """Report the first weight whose widths do not fit its compressor, or differ from layer 0."""
    count = file.header.weight_count_per_layer
    first_layer = [file.get_placement(0, index) for index in range(count)]
    previous_rows = 0
    for number, placement in enumerate(file.iter_placements()):
        layer, index = divmod(number, count)
        slot = index % SLOTS_PER_PREFIX
        rows, cols, first = placement.rows, placement.cols, first_layer[index]
        expected_cols = previous_rows if slot else hidden_size
        previous_rows = rows
        if cols != expected_cols:
            source = "the rows of the weight before it" if slot else "the columns of the first weight"
            problem = f"{cols} columns: expected {expected_cols}, {source}"
        elif slot == SLOTS_PER_PREFIX - 1 and rows != head_dim:
            problem = f"{rows} rows: expected {head_dim}, the head_dim"
        elif (rows, cols) != (first.rows, first.cols):
            problem = f"{rows} x {cols}: expected {first.rows} x {first.cols} as in layer 0"
        else:
            continue
        location = f"offset {placement.offset}: layer {layer}, block {index}"
        yield LintFinding("shape_chain", f"{location}: the weight has {problem}")
        return


def _check_finite(file: WeightFile) -> Iterator[LintFinding]:
    total, location = 0, ""
    for block in file.iter_blocks():
        for part, elements in (("weight", block.weight), ("bias", block.bias)):
            if elements is not None and (num_non_finite := count_non_finite(elements, file.header.dtype)):
                if not total:
                    location = f"the {part} of layer {block.layer}, block {block.index} at offset {block.offset}"
                total += num_non_finite
    if total:
        text = f"{total} elements are infinite or no number, the first in {location}"
        yield LintFinding("non_finite", text, is_error=False)


def _build_field_finding(
    header: WeightFileHeader, reason: str, name: str, expected: str, *, is_error: bool = True
) -> LintFinding:
    value = getattr(header, name)
    text = f"offset {FIELD_OFFSETS[name]}: field {name} is {value}: expected {expected}"
    return LintFinding(reason, text, is_error=is_error)


#: Name, weight and bias of each Linear layer, in file order.
NamedBlocks = Sequence[tuple[str, TorchTensor, TorchTensor | None]]

_MAX_SHOWN_NAMES = 3


def check_layout(
    header: WeightFileHeader, blocks: NamedBlocks, prefixes: Sequence[str], slots: Sequence[int]
) -> Iterator[str]:
    """Warn of shapes and orders that the file cannot express, or that the runtime interprets differently."""
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
    """Warn of keys of a checkpoint that are not written to the file."""
    if mismatched_biases:
        yield f"left out {describe_mismatched_biases(mismatched_biases)}"
    if unused_keys:
        yield f"not used: {_format_list('key', 'keys', unused_keys)}"


def _format_list(singular: str, plural: str, names: list[str]) -> str:
    names_text = ", ".join(repr(name[:80]) for name in names[:_MAX_SHOWN_NAMES]) + (
        ", ..." if len(names) > _MAX_SHOWN_NAMES else ""
    )
    return f"{len(names)} {singular if len(names) == 1 else plural} ({names_text})"
