"""Prove a weight file: its structure, its sense, and, against the checkpoint, every element of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import Words
from ...errors import WeightsError
from ...formats.torch.tensors import Tensor
from ...text import count
from ...threads.pipeline import Progress
from ..checkpoint import naming
from ..kvcm import metadata
from ..kvcm.header import FIELD_OFFSETS, HEADER_BYTES, PREFIXES, SLOTS, SLOTS_PER_PREFIX, Block
from ..kvcm.weight_file import WeightFile, read
from ..kvcm.words import float32_of
from .convert import prepare
from .rounding import words_of
from .selection import ConvertOptions, Selection
from .semantics import Finding, findings
from .surprises import describe_misfits

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verifying found.

    Attributes
    ----------
    path, against
        The weight file, and the checkpoint that it was compared with, if any.
    file
        The file, which is well-formed; one that is not is refused with an exception.
    findings
        What is wrong in itself.
    differences
        What differs from the checkpoint, the first for each block or header field.
    compared
        Elements compared with the checkpoint; 0 without one.
    notices
        What was unusual about reading the checkpoint.
    rounded
        Whether its elements were rounded to the file's type before they were compared.
    left_out
        Biases of the checkpoint that no weight file holds, because their length is not the number of rows of their
        weight; filled with `as_reference` alone, they are differences otherwise.
    """

    path: str
    against: str | None
    file: WeightFile
    findings: list[Finding]
    differences: Sequence[str] = ()
    compared: int = 0
    notices: Sequence[str] = ()
    rounded: bool = False
    left_out: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings do not count."""
        return not self.differences and not any(finding.is_error for finding in self.findings)

    @property
    def warnings(self) -> list[str]:
        """What is odd but wrong in no loader's eyes."""
        return [f"{finding.text} ({finding.reason})" for finding in self.findings if not finding.is_error]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **_origin(self.path, self.against),
            "verdict": "reject" if not self.ok else "accept_warn" if self.warnings else "accept",
            "reasons": [finding.reason for finding in self.findings],
            "findings": [
                {"reason": finding.reason, "level": "semantic" if finding.is_error else "warning", "text": finding.text}
                for finding in self.findings
            ],
            "differences": list(self.differences),
            "compared_elements": self.compared,
            "left_out": list(self.left_out),
            "notices": list(self.notices),
            "header": self.file.header.to_dict(),
            "bytes": self.file.size,
        }

    def complaints(self) -> list[str]:
        """One line for each thing that is wrong, the first few differences among them; none if `ok`."""
        lines = [f"{self.path}: {finding.text} ({finding.reason})" for finding in self.findings if finding.is_error]
        where = f"{self.path}: DIFFERS from {self.against}"
        lines += [f"{where}: {difference}" for difference in self.differences[:_SHOWN]]
        left = len(self.differences) - _SHOWN
        return lines + ([f"{where} in {left} more places"] if left > 0 else [])

    def __str__(self) -> str:
        if not self.ok:
            return "\n".join(self.complaints())
        header = self.file.header
        how = "VALID (no --against: nothing to compare with)"
        if self.against is not None:
            left = f"; {count(self.file.trailing, 'byte')} behind them not" if self.file.trailing else ""
            if self.left_out:
                left += f"; {len(self.left_out):,} of the checkpoint's biases left out, as the published converter does"
            how = (
                f"EXACT (header and {self.compared:,} elements compared with {self.against}"
                f"{f', rounded to {header.dtype.name}' if self.rounded else ''}{left})"
            )
        return (
            f"{self.path}: {how}, {count(header.num_layers, 'layer')} of "
            f"{count(header.weight_count_per_layer, 'weight')}, {header.dtype.name}, "
            f"factor {header.compression_factor}, {self.file.size:,} bytes"
        )


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A weight file that is not well-formed, for ``--json``; `verify` raises `error`."""

    path: str
    against: str | None
    error: WeightsError

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        error = self.error
        found = {"reason": error.reason, "level": "format", "offset": error.offset, "text": str(error)}
        return {
            **_origin(self.path, self.against),
            "verdict": "reject",
            "reasons": [error.reason],
            "findings": [found],
        }

    def __str__(self) -> str:
        return str(self.error)


def _origin(path: str, against: str | None) -> dict[str, Any]:
    return {"kind": "weights", "input": path, "against": against}


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    options: ConvertOptions | None = None,
    given: Collection[str] = (),
    allow_trailing: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Check a weight file.

    Parameters
    ----------
    path
        The weight file.
    against
        The checkpoint that it was made from.
    options
        What the conversion was told; None takes the defaults. `dtype` and `prefixes` at their defaults are the file's
        own. Without `as_reference` a bias that the conversion left out for its length is a difference.
    given
        Names of options that count at their defaults too.
    allow_trailing
        Take bytes behind the last block.
    progress
        Called with the bytes of each block compared.

    Raises
    ------
    WeightsError
        For a file that is not well-formed.
    CheckpointError
        For a checkpoint that gives no weights.
    """
    file = read(path, allow_trailing=allow_trailing)
    found = list(findings(file))
    if against is None:
        return Verdict(path=os.fspath(path), against=None, file=file, findings=found)
    comparison = _compare(file, against, options or ConvertOptions(), given, progress)
    return Verdict(
        path=os.fspath(path),
        against=os.fspath(against),
        file=file,
        findings=found,
        differences=comparison.differences,
        compared=comparison.elements,
        notices=comparison.notices,
        rounded=comparison.rounded,
        left_out=comparison.left_out,
    )


def default_prefixes(file: WeightFile) -> tuple[str, ...]:
    """The compressors that a file of this many blocks has in the runtime's order."""
    return PREFIXES[: max(file.header.weight_count_per_layer // SLOTS_PER_PREFIX, 1)]


class _Comparison(NamedTuple):
    differences: list[str]
    elements: int
    notices: list[str]
    rounded: bool
    left_out: list[str]


def _compare(
    file: WeightFile,
    against: str | os.PathLike[str],
    options: ConvertOptions,
    given: Collection[str],
    progress: Progress | None,
) -> _Comparison:
    told = replace(options, as_reference=True)
    if "dtype" not in given and options.dtype == ConvertOptions.dtype:
        told = replace(told, dtype=file.header.dtype.name)
    if "prefixes" not in given and options.prefixes == PREFIXES:
        told = replace(told, prefixes=default_prefixes(file))
    checkpoint, selection = prepare(against, told, given={*given, "dtype", "prefixes"})
    notices, rounded = [*selection.notices, *_left_out(selection)], bool(selection.rounded_types)
    left_out = [f"{name}.bias" for name in selection.misfits] if options.as_reference else []
    if left_out:
        notices.append(f"not compared: {describe_misfits(selection.misfits)}")
    differences, elements = list(_header_differences(file, selection)), 0
    if len(selection.linears) != len(file):
        differences.append(f"the file has {len(file)} weights, the checkpoint gives {len(selection.linears)}")
        return _Comparison(differences, 0, notices, rounded, left_out)
    with naming(checkpoint.label):
        for block, linear in zip(file.blocks(), selection.linears, strict=True):
            place = _place(block, selection, told)
            if linear.name in selection.misfits and not options.as_reference:
                length, rows = selection.misfits[linear.name]
                text = f"bias is left out, the checkpoint has one of {length} for {rows} rows (--as-reference takes it)"
                differences.append(f"offset {block.offset}: {place}: {text}")
            parts = (("weight", block.weight, linear.weight), ("bias", block.bias, linear.bias))
            for part, words, tensor in parts:
                difference, compared = _difference(words, tensor, file)
                elements += compared
                if difference:
                    differences.append(f"offset {block.offset}: {place}: {part}{difference}")
            if progress is not None:
                progress(block.nbytes)
    return _Comparison(differences, elements, notices, rounded, left_out)


def _header_differences(file: WeightFile, selection: Selection) -> Iterator[str]:
    """Every header field, and the metadata, that a conversion would write otherwise."""
    expected = selection.header.to_dict()
    for name, found in file.header.to_dict().items():
        if found != expected[name]:
            yield f"offset {FIELD_OFFSETS[name]}: header field {name} is {found}: expected {expected[name]}"
    for difference in metadata.differences(file.metadata, selection.metadata):
        yield f"offset {HEADER_BYTES}: {difference}"


def _left_out(selection: Selection) -> Iterator[str]:
    """Compressors of the checkpoint that a file without them cannot be compared with."""
    left = [name for name in PREFIXES if name not in selection.prefixes and _has(selection.unused, name)]
    if left:
        yield f"the file has {', '.join(selection.prefixes)} only: {', '.join(left)} of the checkpoint not compared"


def _has(keys: list[str], prefix: str) -> bool:
    return any(key.startswith(f"{prefix}.") for key in keys)


def _place(block: Block, selection: Selection, options: ConvertOptions) -> str:
    slot = options.slots[block.slot] if block.slot < len(options.slots) else SLOTS[block.slot]
    prefix = selection.prefixes[block.prefix] if block.prefix < len(selection.prefixes) else f"prefix {block.prefix}"
    return f"layer {block.layer}, {prefix}, slot {slot}"


def _difference(words: Words | None, tensor: Tensor | None, file: WeightFile) -> tuple[str, int]:
    """How the words differ from the tensor, nothing if they do not; and how many elements were compared."""
    if words is None or tensor is None:
        if words is None and tensor is None:
            return "", 0
        here, there = ("is there", "has none") if tensor is None else ("is missing", "has one")
        return f" {here}, the checkpoint {there}", 0
    expected = words_of(tensor, file.header.dtype)
    if words.ndim == 1:
        expected = expected.reshape(-1)
    if words.shape != expected.shape:
        return f" has shape {list(words.shape)}, the checkpoint's {list(expected.shape)}", 0
    bits = np.dtype(f"<u{words.itemsize}")
    unequal = np.ascontiguousarray(words).view(bits) != np.ascontiguousarray(expected).view(bits)
    if unequal.any():
        unequal &= ~(np.isnan(float32_of(words)) & np.isnan(float32_of(expected)))
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return "", words.size
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), words.shape))
    found, wanted = float(float32_of(words[at]).item()), float(float32_of(expected[at]).item())
    return (
        f"{list(at)} is {found!r}, the checkpoint gives {wanted!r} ({differing} of {words.size} elements differ)",
        words.size,
    )
