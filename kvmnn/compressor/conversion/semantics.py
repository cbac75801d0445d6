"""What a well-formed weight file must also satisfy for the runtime to compress with it as it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from ..kvcm.header import (
    FIELD_OFFSETS,
    HEADER_BYTES,
    META_BYTES,
    PREFIXES,
    SLOTS_PER_PREFIX,
    TEXT_PREFIXES,
    BlockPlace,
    Header,
)
from ..kvcm.weight_file import WeightFile
from .rounding import count_non_finite

MAX_MIN_SEQ_LEN = 2**31 - 1
"""The runtime compares ``min_seq_len`` with a signed count of groups, so larger values are read as negative ones."""

MAX_NUM_HEADS = 512
"""Falcon-180B has 232 query heads, the most of all published models; kv heads are fewer."""


class Finding(NamedTuple):
    """Something about a weight file.

    Attributes
    ----------
    reason
        Code; docs/compressor-weights.md lists them.
    text
        What and where, what was found, what was expected.
    is_error
        False for what a verifier only warns of.
    """

    reason: str
    text: str
    is_error: bool = True


class Shaped(Protocol):
    """A weight file, or what is about to become one, as far as its sense is concerned."""

    @property
    def header(self) -> Header:
        """Its header."""

    def place(self, layer: int, index: int, /) -> BlockPlace:
        """Offset and shape of a block."""

    def places(self) -> Iterator[BlockPlace]:
        """All of them in file order."""


@dataclass(frozen=True)
class Planned:
    """A weight file that is not written yet.

    Parameters
    ----------
    header
        What it will begin with.
    blocks
        Of each block in file order: rows, columns, and whether it has a bias.
    """

    header: Header
    blocks: Sequence[tuple[int, int, bool]]

    def place(self, layer: int, index: int, /) -> BlockPlace:
        """As `Shaped` has it."""
        return next(islice(self.places(), layer * self.header.weight_count_per_layer + index, None))

    def places(self) -> Iterator[BlockPlace]:
        """As `Shaped` has it."""
        offset, word = HEADER_BYTES + self.header.metadata_size_bytes, self.header.dtype.itemsize
        for rows, cols, has_bias in self.blocks:
            yield BlockPlace(offset, rows, cols, has_bias)
            offset += META_BYTES + word * rows * (cols + has_bias)


def findings(file: WeightFile) -> Iterator[Finding]:
    """Everything that is wrong with a well-formed file, errors first, then warnings."""
    yield from faults(file)
    yield from implausible_fields(file.header)
    for reason, text in file.warnings:
        yield Finding(reason, text, is_error=False)
    if file.trailing:
        text = (
            f"offset {file.size - file.trailing}: {file.trailing} bytes follow the last block, which loaders pass over"
        )
        yield Finding("trailing_bytes", text, is_error=False)
    yield from _non_finite(file)


def faults(file: Shaped) -> Iterator[Finding]:
    """What is wrong with header and shapes."""
    yield from _counts(file)
    if file.header.weight_count_per_layer % SLOTS_PER_PREFIX == 0:
        yield from _shapes(file)


def implausible_fields(header: Header) -> Iterator[Finding]:
    """Yield a warning for each header field that loaders take although no model or runtime has such a value."""
    if not 1 <= header.min_seq_len <= MAX_MIN_SEQ_LEN:
        yield _field(header, "min_seq_len_implausible", "min_seq_len", f"1 to {MAX_MIN_SEQ_LEN}", is_error=False)
    if header.num_heads > MAX_NUM_HEADS:
        expected = f"0 (not given) to {MAX_NUM_HEADS}"
        yield _field(header, "num_heads_implausible", "num_heads", expected, is_error=False)


def _counts(file: Shaped) -> Iterator[Finding]:
    count = file.header.weight_count_per_layer
    where = f"offset {FIELD_OFFSETS['weight_count_per_layer']}: field weight_count_per_layer is {count}"
    complete = [len(TEXT_PREFIXES) * SLOTS_PER_PREFIX, len(PREFIXES) * SLOTS_PER_PREFIX]
    expected = f"expected {complete[0]} (text) or {complete[1]} (text and image)"
    if count % SLOTS_PER_PREFIX:
        yield Finding("weight_count_not_multiple_of_3", f"{where}: {expected}, three for each compressor")
    elif count < complete[0]:
        yield Finding("missing_text_mlp", f"{where}: text V is missing, so the runtime never compresses: {expected}")
    elif count not in complete:
        yield Finding("odd_prefix_count", f"{where}, {count // SLOTS_PER_PREFIX} compressors: {expected}")
        if count < complete[1]:
            yield Finding("missing_image_mlp", f"{where}: image V is missing, so image tokens stay as they are")


def _shapes(file: Shaped) -> Iterator[Finding]:
    header = file.header
    first, third = file.place(0, 0), file.place(0, SLOTS_PER_PREFIX - 1)
    factor, hidden_size = header.compression_factor, first.cols
    stated = header.head_dim and header.head_dim * factor == hidden_size
    head_dim = header.head_dim if stated else third.rows
    if factor < 2:
        yield _field(header, "factor_invalid", "compression_factor", "2 or more")
    if header.hidden_size not in (0, hidden_size):
        yield _field(header, "hidden_size_mismatch", "hidden_size", f"{hidden_size}, the columns of the first weight")
    if header.head_dim not in (0, head_dim):
        yield _field(header, "head_dim_mismatch", "head_dim", f"{head_dim}, the rows of the third weight")
    product = (header.head_dim or head_dim) * factor
    if factor >= 2 and (header.hidden_size or hidden_size) != product:
        yield _field(
            header,
            "factor_mismatch",
            "compression_factor",
            f"hidden_size {header.hidden_size or hidden_size} / head_dim {header.head_dim or head_dim}",
        )
    yield from _chains(file, hidden_size, head_dim)


def _chains(file: Shaped, hidden_size: int, head_dim: int) -> Iterator[Finding]:
    """In every compressor: widths that fit each other, the same in all layers; the first that does not is told."""
    count = file.header.weight_count_per_layer
    model = [file.place(0, index) for index in range(count)]
    rows_before = 0
    for number, place in enumerate(file.places()):
        layer, index = divmod(number, count)
        slot = index % SLOTS_PER_PREFIX
        if slot == 0:
            cols, source = hidden_size, "the columns of the first weight"
        else:
            cols, source = rows_before, "the rows of the weight before it"
        rows_before = place.rows
        if place.cols != cols:
            yield _shape(place, layer, index, f"{place.cols} columns: expected {cols}, {source}")
            return
        if slot == SLOTS_PER_PREFIX - 1 and place.rows != head_dim:
            yield _shape(place, layer, index, f"{place.rows} rows: expected {head_dim}, the head_dim")
            return
        expected = model[index]
        if (place.rows, place.cols) != (expected.rows, expected.cols):
            yield _shape(
                place,
                layer,
                index,
                f"{place.rows} x {place.cols}: expected {expected.rows} x {expected.cols} as in layer 0",
            )
            return


def _non_finite(file: WeightFile) -> Iterator[Finding]:
    total, first = 0, ""
    for block in file.blocks():
        for part, words in (("weight", block.weight), ("bias", block.bias)):
            if words is not None and (found := count_non_finite(words, file.header.dtype)):
                total += found
                first = first or f"the {part} of layer {block.layer}, block {block.index} at offset {block.offset}"
    if total:
        yield Finding("non_finite", f"{total} elements are infinite or no number, the first in {first}", is_error=False)


def _field(header: Header, reason: str, name: str, expected: str, *, is_error: bool = True) -> Finding:
    value = getattr(header, name)
    text = f"offset {FIELD_OFFSETS[name]}: field {name} is {value}: expected {expected}"
    return Finding(reason, text, is_error=is_error)


def _shape(place: BlockPlace, layer: int, index: int, text: str) -> Finding:
    return Finding("shape_chain", f"offset {place.offset}: layer {layer}, block {index}: the weight has {text}")
