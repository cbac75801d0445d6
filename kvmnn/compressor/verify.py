"""Verify a weight file: its structure, its plausibility, and every element against the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from .._util.text import pluralize
from ..dtypes import Elements
from ..errors import WeightsError
from ..files.schema import Record
from ..formats.torch.tensors import TorchTensor
from . import kvcm
from .checkpoint import convert_elements, prefix_errors
from .convert import prepare_conversion
from .kvcm import (
    DEFAULT_PREFIXES,
    DEFAULT_SLOTS,
    FIELD_OFFSETS,
    HEADER_BYTES,
    SLOTS_PER_PREFIX,
    WeightBlock,
    WeightFile,
    read_weight_file,
    to_float32,
)
from .lint import LintFinding, check_weight_file, describe_mismatched_biases
from .select import ConvertOptions, TensorSelection

_MAX_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, kw_only=True)
class WeightsVerifyResult(Record):
    """Result of verifying a weight file."""

    json_keys = (
        "kind input=path against verdict reasons findings=_finding_documents differences "
        "compared_elements=num_compared left_out=omitted_biases notices header=file.header bytes=file.size"
    )

    kind: ClassVar = "weights"

    #: The weight file, and the checkpoint that it was compared with, if any.
    path: str
    against: str | None
    #: The file, which is well-formed; one that is not is refused with an exception.
    file: WeightFile
    #: What is wrong in itself.
    findings: list[LintFinding]
    #: What differs from the checkpoint, the first for each block or header field.
    differences: Sequence[str] = ()
    #: Elements compared with the checkpoint; 0 without one.
    num_compared: int = 0
    #: What was unusual about reading the checkpoint.
    notices: Sequence[str] = ()
    #: Whether its elements were rounded to the file's type before they were compared.
    is_rounded: bool = False
    #: Biases of the checkpoint that no weight file holds, because their length is not the number of rows of their
    #: weight; filled with `as_reference` alone, they are differences otherwise.
    omitted_biases: Sequence[str] = ()

    @property
    def is_ok(self) -> bool:
        """Return whether there is no error; warnings do not count."""
        return not self.differences and not any(finding.is_error for finding in self.findings)

    @property
    def warnings(self) -> list[str]:
        """Return the unusual properties that every loader accepts."""
        return [f"{finding.text} ({finding.reason})" for finding in self.findings if not finding.is_error]

    @property
    def verdict(self) -> str:
        """``"accept"``, ``"accept_warn"`` or ``"reject"``."""
        return "reject" if not self.is_ok else "accept_warn" if self.warnings else "accept"

    @property
    def reasons(self) -> list[str]:
        """Reason codes of all findings."""
        return [finding.reason for finding in self.findings]

    @property
    def _finding_documents(self) -> list[dict[str, str]]:
        return [
            {"reason": finding.reason, "level": "semantic" if finding.is_error else "warning", "text": finding.text}
            for finding in self.findings
        ]

    def format_complaints(self) -> list[str]:
        """Format one line for each problem and for the first few differences; none if `is_ok`."""
        lines = [f"{self.path}: {finding.text} ({finding.reason})" for finding in self.findings if finding.is_error]
        prefix = f"{self.path}: DIFFERS from {self.against}"
        lines += [f"{prefix}: {difference}" for difference in self.differences[:_MAX_SHOWN_DIFFERENCES]]
        num_hidden = len(self.differences) - _MAX_SHOWN_DIFFERENCES
        return lines + ([f"{prefix} in {num_hidden} more places"] if num_hidden > 0 else [])

    def __str__(self) -> str:
        if not self.is_ok:
            return "\n".join(self.format_complaints())
        header = self.file.header
        verdict_text = "VALID (no --against: nothing to compare with)"
        if self.against is not None:
            omitted_text = (
                f"; {pluralize(self.file.trailing_bytes, 'byte')} after them not" if self.file.trailing_bytes else ""
            )
            if self.omitted_biases:
                omitted_text += (
                    f"; {len(self.omitted_biases):,} of the checkpoint's biases left out, as the published converter "
                    f"does"
                )
            verdict_text = (
                f"EXACT (header and {self.num_compared:,} elements compared with {self.against}"
                f"{f', rounded to {header.dtype.name}' if self.is_rounded else ''}{omitted_text})"
            )
        return (
            f"{self.path}: {verdict_text}, {pluralize(header.num_layers, 'layer')} of "
            f"{pluralize(header.weight_count_per_layer, 'weight')}, {header.dtype.name}, "
            f"factor {header.compression_factor}, {self.file.size:,} bytes"
        )


@dataclass(frozen=True, kw_only=True)
class RejectionReport(Record):
    """Report of a malformed weight file, for ``--json``; `verify_weights` raises `error`."""

    json_keys = "kind input=path against verdict reasons findings"

    kind: ClassVar = "weights"
    verdict: ClassVar = "reject"

    path: str
    against: str | None
    error: WeightsError

    @property
    def reasons(self) -> list[str]:
        """The reason code of `error`."""
        return [self.error.reason]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The error as a finding, in JSON values."""
        error = self.error
        return [{"reason": error.reason, "level": "format", "offset": error.offset, "text": str(error)}]

    def __str__(self) -> str:
        return str(self.error)


def verify_weights(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    options: ConvertOptions | None = None,
    specified_options: Collection[str] = (),
    allow_trailing: bool = False,
    progress: Progress | None = None,
) -> WeightsVerifyResult:
    """Verify a weight file.

    Parameters
    ----------
    path
        The weight file.
    against
        The checkpoint that it was made from.
    options
        Options of the conversion. `dtype` and `prefixes` at their defaults are the file's own. Without `as_reference` a
        bias that the conversion left out for its length is a difference.
    specified_options
        Names of options that count at their defaults too.
    allow_trailing
        Accept bytes after the last block.
    progress
        Called with the bytes of each block compared.

    Raises
    ------
    WeightsError
        For a file that is not well-formed.
    CheckpointError
        For a checkpoint that gives no weights.
    """
    file = read_weight_file(path, allow_trailing=allow_trailing)
    file_findings = list(check_weight_file(file))
    if against is None:
        return WeightsVerifyResult(path=os.fspath(path), against=None, file=file, findings=file_findings)
    options = options or ConvertOptions()
    compare_options = replace(options, as_reference=True)
    if "dtype" not in specified_options and options.dtype == ConvertOptions.dtype:
        compare_options = replace(compare_options, dtype=file.header.dtype.name)
    if "prefixes" not in specified_options and options.prefixes == DEFAULT_PREFIXES:
        compare_options = replace(compare_options, prefixes=infer_prefixes(file))
    checkpoint, selection = prepare_conversion(
        against, compare_options, specified_options={*specified_options, "dtype", "prefixes"}
    )
    notices = list(selection.notices)
    omitted_prefixes = [
        name
        for name in DEFAULT_PREFIXES
        if name not in selection.prefixes and any(key.startswith(f"{name}.") for key in selection.unused_keys)
    ]
    if omitted_prefixes:
        notices.append(
            f"the file has {', '.join(selection.prefixes)} only: {', '.join(omitted_prefixes)} of the checkpoint not "
            "compared"
        )
    omitted_biases = [f"{name}.bias" for name in selection.mismatched_biases] if options.as_reference else []
    if omitted_biases:
        notices.append(f"not compared: {describe_mismatched_biases(selection.mismatched_biases)}")
    differences, num_compared = list(_iter_header_differences(file, selection)), 0
    if len(selection.linears) != len(file):
        differences.append(f"the file has {len(file)} weights, the checkpoint gives {len(selection.linears)}")
    else:
        with prefix_errors(checkpoint.label):
            for block, linear in zip(file.iter_blocks(), selection.linears, strict=True):
                location = f"offset {block.offset}: {_describe_location(block, selection, compare_options)}"
                if linear.name in selection.mismatched_biases and not options.as_reference:
                    length, rows = selection.mismatched_biases[linear.name]
                    text = f"the checkpoint has one of {length} for {rows} rows (--as-reference takes it)"
                    differences.append(f"{location}: bias is left out, {text}")
                parts = (("weight", block.weight, linear.weight), ("bias", block.bias, linear.bias))
                for part, elements, tensor in parts:
                    difference, num_elements = _compare_tensor(elements, tensor, file)
                    num_compared += num_elements
                    if difference:
                        differences.append(f"{location}: {part}{difference}")
                if progress is not None:
                    progress(block.nbytes)
    return WeightsVerifyResult(
        path=os.fspath(path),
        against=os.fspath(against),
        file=file,
        findings=file_findings,
        differences=differences,
        num_compared=num_compared,
        notices=notices,
        is_rounded=bool(selection.rounded_types),
        omitted_biases=omitted_biases,
    )


def infer_prefixes(file: WeightFile) -> tuple[str, ...]:
    """Infer the compressors of a file with this many blocks, in the runtime's order."""
    return DEFAULT_PREFIXES[: max(file.header.weight_count_per_layer // SLOTS_PER_PREFIX, 1)]


def _iter_header_differences(file: WeightFile, selection: TensorSelection) -> Iterator[str]:
    """Describe every header field, and the metadata, that a conversion would write differently."""
    expected = selection.header.to_dict()
    for name, value in file.header.to_dict().items():
        if value != expected[name]:
            yield f"offset {FIELD_OFFSETS[name]}: header field {name} is {value}: expected {expected[name]}"
    for difference in kvcm.describe_metadata_differences(file.metadata, selection.metadata):
        yield f"offset {HEADER_BYTES}: {difference}"


def _describe_location(block: WeightBlock, selection: TensorSelection, options: ConvertOptions) -> str:
    slot = options.slots[block.slot] if block.slot < len(options.slots) else DEFAULT_SLOTS[block.slot]
    prefix = selection.prefixes[block.prefix] if block.prefix < len(selection.prefixes) else f"prefix {block.prefix}"
    return f"layer {block.layer}, {prefix}, slot {slot}"


def _compare_tensor(elements: Elements | None, tensor: TorchTensor | None, file: WeightFile) -> tuple[str, int]:
    """Describe how elements differ from the tensor (empty if equal), and return the number of compared elements."""
    if elements is None or tensor is None:
        if elements is None and tensor is None:
            return "", 0
        file_text, checkpoint_text = ("is there", "has none") if tensor is None else ("is missing", "has one")
        return f" {file_text}, the checkpoint {checkpoint_text}", 0
    expected = convert_elements(tensor, file.header.dtype)
    if elements.ndim == 1:
        expected = expected.reshape(-1)
    if elements.shape != expected.shape:
        return f" has shape {list(elements.shape)}, the checkpoint's {list(expected.shape)}", 0
    bits = np.dtype(f"<u{elements.itemsize}")
    is_different = np.ascontiguousarray(elements).view(bits) != np.ascontiguousarray(expected).view(bits)
    if is_different.any():
        is_different &= ~(np.isnan(to_float32(elements)) & np.isnan(to_float32(expected)))
    num_different = int(np.count_nonzero(is_different))
    if not num_different:
        return "", elements.size
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_different)), elements.shape))
    file_value, checkpoint_value = float(to_float32(elements[index]).item()), float(to_float32(expected[index]).item())
    count_text = f"{num_different} of {elements.size} elements differ"
    return f"{list(index)} is {file_value!r}, the checkpoint gives {checkpoint_value!r} ({count_text})", elements.size
