"""Convert a checkpoint to the KVCM weight file that the runtime loads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress
from .._util.text import LOSSLESS, LOSSY
from ..dtypes import Elements
from ..errors import CheckpointError
from ..files.atomic import FileOutput, wrap_os_errors
from ..files.schema import Record, json_key
from ..formats.torch.tensors import TorchTensor
from . import kvcm
from .checkpoint import (
    Checkpoint,
    check_convertible,
    convert_elements,
    count_non_finite,
    open_checkpoint,
    prefix_errors,
)
from .kvcm import BLOCK_HEADER_BYTES, DTYPES, MAGIC, MAX_U32, WeightFileHeader
from .lint import WeightFilePlan, check_semantics, describe_mismatched_biases
from .select import ConvertOptions, TensorSelection, select_tensors

if TYPE_CHECKING:
    from ..formats.base import Sink

#: Keys of the weight file's own metadata: as text, or as hexadecimal digits where it is no UTF-8.
TEXT_KEY, HEX_KEY = "metadata", "metadata_hex"

_HEADER_FIELDS = tuple(field.name for field in fields(WeightFileHeader))
_INHERITED_FIELDS = ("compression_factor", "min_seq_len", "num_heads", "head_dim")


class ExportedMetadata(NamedTuple):
    """Header and metadata of the weight file that was exported."""

    header: WeightFileHeader
    metadata: bytes

    def fill_defaults(self, options: ConvertOptions, specified_options: Collection[str]) -> ConvertOptions:
        """Replace every default in `options`, except `specified_options`, by the exported value."""
        exported: dict[str, Any] = {name: getattr(self.header, name) for name in _INHERITED_FIELDS}
        exported |= {"dtype": self.header.dtype.name, "metadata": self.metadata}
        defaults = ConvertOptions()
        inherited = {
            name: value
            for name, value in exported.items()
            if name not in specified_options and getattr(options, name) == getattr(defaults, name)
        }
        return replace(options, **inherited)

    def iter_notices(self, written_header: WeightFileHeader, metadata: bytes) -> Iterator[str]:
        """Yield notes on what a conversion adopted from an export, and what it did not."""
        yield "header fields and metadata that were not said are those that the checkpoint's own metadata notes"
        for name in _HEADER_FIELDS:
            exported_value, written_value = getattr(self.header, name), getattr(written_header, name)
            if exported_value != written_value:
                yield f"header field {name} is {written_value}, the checkpoint's metadata notes {exported_value}"
        if metadata != self.metadata:
            yield "the metadata is another than the checkpoint's own metadata notes"


def read_exported_metadata(texts: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the metadata that an export recorded; None if `texts` contain none, or invalid metadata."""
    field_texts = {name: texts.get(name, "") for name in _HEADER_FIELDS}
    if field_texts["magic"] != str(MAGIC) or not all(re.fullmatch(r"\d{1,10}", text) for text in field_texts.values()):
        return None
    header = WeightFileHeader(**{name: int(text) for name, text in field_texts.items()})
    if header.dtype_code >= len(DTYPES) or max(map(int, field_texts.values())) > MAX_U32:
        return None
    try:
        metadata = texts.get(TEXT_KEY, "").encode() or bytes.fromhex(texts.get(HEX_KEY, ""))
    except ValueError:
        return None
    return ExportedMetadata(header, metadata)


_STREAM_NAME = "-"


@dataclass(frozen=True, kw_only=True)
class ConvertResult(Record):
    """Result of a conversion."""

    #: The checkpoint and the weight file; ``"-"`` for standard input, and for a stream.
    source: str = field(metadata={"key": "input"})
    target: str = field(metadata={"key": "output"})
    #: Size and hash of the weight file.
    nbytes: int = field(metadata={"key": "bytes"})
    sha256: str
    #: Element types of the checkpoint that were rounded or reduced to their real part; empty for LOSSLESS.
    rounded_types: list[str]
    #: The written header.
    header: WeightFileHeader
    #: Elements that are infinite or no number after rounding.
    non_finite: int
    #: As in `TensorSelection`.
    warnings: list[str]
    notices: list[str]
    unused: list[str]

    @property
    @json_key(after="sha256")
    def label(self) -> str:
        """``"LOSSLESS"``, or ``"LOSSY"`` if elements were rounded."""
        return LOSSY if self.rounded_types else LOSSLESS

    @property
    @json_key(after="label")
    def dtype(self) -> str:
        """Element type of the weights."""
        return self.header.dtype.name

    def __str__(self) -> str:
        header = self.header
        rounding_text = f" ({self._format_rounded()})" if self.rounded_types else ""
        return (
            f"Wrote {self.target} (layers={header.num_layers}, weights/layer={header.weight_count_per_layer}, "
            f"dtype={header.dtype.name}, factor={header.compression_factor}, hidden_size={header.hidden_size}, "
            f"head_dim={header.head_dim})\nsha256 {self.sha256}, {self.nbytes:,} bytes, {self.label}{rounding_text}"
        )

    def _format_rounded(self) -> str:
        names = [f"the real part of {name}" if name.startswith("complex") else name for name in self.rounded_types]
        return f"{', '.join(names)} rounded to {self.header.dtype.name}"


class PreparedConversion(NamedTuple):
    """A checkpoint and the tensors that a conversion selects."""

    checkpoint: Checkpoint
    selection: TensorSelection

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the weight file."""
        return self.selection.nbytes

    def write_weight_file(
        self, target: str | os.PathLike[str] | Sink, *, overwrite: bool = False, progress: Progress | None = None
    ) -> ConvertResult:
        """Write the weight file; the second half of `convert_checkpoint`."""
        if not isinstance(target, str | os.PathLike):
            return _write_to_sink(self, _STREAM_NAME, target, progress)
        with wrap_os_errors(target):
            os.makedirs(os.path.dirname(os.path.realpath(target)), exist_ok=True)
        with FileOutput(target, force=overwrite, exclude=[self.checkpoint.path]) as output:
            conversion = _write_to_sink(self, os.fspath(target), output.file, progress)
            output.commit()
        return conversion


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | Sink,
    options: ConvertOptions | None = None,
    *,
    specified_options: Collection[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert a checkpoint to a weight file.

    For a ``.safetensors`` file that `export_weights` wrote, options default to those of the exported weight file, so
    that it is reproduced.

    Parameters
    ----------
    source
        ``.pth``, ``.pt`` or ``.safetensors``; ``"-"`` for standard input.
    target
        The weight file, which appears complete or not at all, with its directories; or a stream to write to.
    options
        Options of the conversion.
    specified_options
        Names of options that count at their defaults too.
    overwrite
        Replace an existing file.
    progress
        Called with the bytes of each block written.

    Raises
    ------
    CheckpointError, KvmnnError
        For a checkpoint or options that give no weight file, or one that `verify` refuses (`as_reference` writes it).
    OutputError
        If the file exists or cannot be written.
    """
    return prepare_conversion(source, options, specified_options=specified_options).write_weight_file(
        target, overwrite=overwrite, progress=progress
    )


def prepare_conversion(
    source: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    specified_options: Collection[str] = (),
    max_bytes: int | None = None,
) -> PreparedConversion:
    """Open a checkpoint, select its tensors, and read their storages; raise as `convert_checkpoint` does.

    One whose storages contain more than `max_bytes` is a `LimitError`.
    """
    options = options or ConvertOptions()
    checkpoint = open_checkpoint(source, max_bytes=max_bytes)
    exported = read_exported_metadata(checkpoint.metadata)
    if exported is not None:
        options = exported.fill_defaults(options, specified_options)
    with prefix_errors(checkpoint.label):
        selection = select_tensors(checkpoint.root, options)
        if not options.as_reference:
            _check_semantics(selection)
    if exported is not None:
        selection.notices += exported.iter_notices(selection.header, selection.metadata)
    for linear in selection.linears:
        for name, tensor in ((f"{linear.name}.weight", linear.weight), (f"{linear.name}.bias", linear.bias)):
            if tensor is not None:
                with prefix_errors(checkpoint.label, repr(name)):
                    check_convertible(tensor, selection.header.dtype)
                    tensor.read_elements()
    selection.notices[:0] = checkpoint.notices
    return PreparedConversion(checkpoint, selection)


def _check_semantics(selection: TensorSelection) -> None:
    """Raise an error for a file that `verify` would reject."""
    blocks = []
    for linear in selection.linears:
        rows, cols = linear.weight.shape
        blocks.append((rows, cols, linear.bias is not None))
    for fault in check_semantics(WeightFilePlan(selection.header, blocks)):
        raise CheckpointError(
            f"gives a weight file that kvmnn verify refuses: {fault.text} ({fault.reason}); --as-reference writes it"
        )
    if selection.mismatched_biases:
        # The layer would compute without the bias that was trained with it, and no loader would notice.
        raise CheckpointError(
            f"gives a weight file without {describe_mismatched_biases(selection.mismatched_biases)}; "
            "--as-reference leaves it out, as the published converter does"
        )


def _write_to_sink(prepared: PreparedConversion, target: str, sink: Sink, progress: Progress | None) -> ConvertResult:
    checkpoint, selection = prepared
    hashing_sink = _HashingSink(sink)
    rounder = _BlockRounder(selection, progress)
    with prefix_errors(checkpoint.label):
        nbytes = kvcm.write_weight_file(
            hashing_sink, selection.header, rounder.iter_blocks(), metadata=selection.metadata, allow_empty=True
        )
    warnings = list(selection.warnings)
    if rounder.non_finite:
        warnings.append(
            f"{rounder.non_finite} elements are infinite or no number as {selection.header.dtype.name}, the first in "
            f"{rounder.first_name!r}"
        )
    return ConvertResult(
        source=checkpoint.path,
        target=target,
        header=selection.header,
        nbytes=nbytes,
        sha256=hashing_sink.digest.hexdigest(),
        rounded_types=selection.rounded_types,
        non_finite=rounder.non_finite,
        warnings=warnings,
        notices=selection.notices,
        unused=selection.unused_keys,
    )


class _BlockRounder:
    """Creates blocks one by one, and counts elements that are not finite."""

    def __init__(self, selection: TensorSelection, progress: Progress | None) -> None:
        self._selection = selection
        self._progress = progress
        self.first_name = ""
        self.non_finite = 0

    def iter_blocks(self) -> Iterator[tuple[Elements, Elements | None]]:
        for linear in self._selection.linears:
            weight = self._round_tensor(f"{linear.name}.weight", linear.weight)
            bias = None if linear.bias is None else self._round_tensor(f"{linear.name}.bias", linear.bias).reshape(-1)
            yield weight, bias
            if self._progress is not None:
                self._progress(BLOCK_HEADER_BYTES + weight.nbytes + (0 if bias is None else bias.nbytes))

    def _round_tensor(self, name: str, tensor: TorchTensor) -> Elements:
        elements = convert_elements(tensor, self._selection.header.dtype)
        if num_non_finite := count_non_finite(elements, self._selection.header.dtype):
            self.first_name = self.first_name or name
            self.non_finite += num_non_finite
        return elements


class _HashingSink:
    """A sink that hashes the data that passes through it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> int:
        self.digest.update(data)
        return self._sink.write(data)
