"""A checkpoint to the weight file that the runtime loads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dtypes import Words
from ...errors import CheckpointError
from ...files.output import FileOutput, failures
from ...formats.torch.tensors import Tensor
from ...text import LOSSLESS, LOSSY
from ...threads.pipeline import Progress
from .. import kvcm
from ..checkpoint import Checkpoint, naming, open_checkpoint
from ..kvcm.header import META_BYTES, Header
from .noted import noted_in
from .rounding import check_convertible, count_non_finite, words_of
from .selection import ConvertOptions, Selection, select
from .semantics import Planned, faults
from .surprises import describe_misfits

if TYPE_CHECKING:
    from ...formats.sinks import Sink


_STREAM = "-"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did.

    Attributes
    ----------
    source, target
        The checkpoint and the weight file; ``"-"`` for standard input, and for a stream.
    header
        As written.
    nbytes, sha256
        Of the weight file.
    rounded_types
        Element types of the checkpoint that were rounded or cut to their real part; none means LOSSLESS.
    non_finite
        Elements that are infinite or no number after rounding.
    warnings, notices, unused
        See `selection.Selection`.
    """

    source: str
    target: str
    header: Header
    nbytes: int
    sha256: str
    rounded_types: list[str]
    non_finite: int
    warnings: list[str]
    notices: list[str]
    unused: list[str]

    @property
    def label(self) -> str:
        """``"LOSSLESS"``, or ``"LOSSY"`` where elements were rounded."""
        return LOSSY if self.rounded_types else LOSSLESS

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "input": self.source,
            "output": self.target,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "label": self.label,
            "dtype": self.header.dtype.name,
            "rounded_types": self.rounded_types,
            "header": self.header.to_dict(),
            "non_finite": self.non_finite,
            "warnings": self.warnings,
            "notices": self.notices,
            "unused": self.unused,
        }

    def __str__(self) -> str:
        header = self.header
        how = f" ({self._rounded()})" if self.rounded_types else ""
        return (
            f"Wrote {self.target} (layers={header.num_layers}, weights/layer={header.weight_count_per_layer}, "
            f"dtype={header.dtype.name}, factor={header.compression_factor}, hidden_size={header.hidden_size}, "
            f"head_dim={header.head_dim})\nsha256 {self.sha256}, {self.nbytes:,} bytes, {self.label}{how}"
        )

    def _rounded(self) -> str:
        names = [f"the real part of {name}" if name.startswith("complex") else name for name in self.rounded_types]
        return f"{', '.join(names)} rounded to {self.header.dtype.name}"


class Prepared(NamedTuple):
    """A checkpoint and what a conversion takes of it."""

    checkpoint: Checkpoint
    selection: Selection

    @property
    def nbytes(self) -> int:
        """Bytes of the weight file."""
        return self.selection.nbytes

    def write(
        self, target: str | os.PathLike[str] | Sink, *, force: bool = False, progress: Progress | None = None
    ) -> Conversion:
        """The second half of `convert`."""
        if not isinstance(target, str | os.PathLike):
            return _write(self, _STREAM, target, progress)
        with failures(target):
            os.makedirs(os.path.dirname(os.path.realpath(target)), exist_ok=True)
        with FileOutput(target, force=force, protect=[self.checkpoint.path]) as output:
            conversion = _write(self, os.fspath(target), output.file, progress)
            output.commit()
        return conversion


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | Sink,
    options: ConvertOptions | None = None,
    *,
    given: Collection[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint to a weight file.

    Of a ``.safetensors`` file that `export` made, options that were not said are what the weight file had, so that the
    same weight file comes back.

    Parameters
    ----------
    source
        ``.pth``, ``.pt`` or ``.safetensors``; ``"-"`` for standard input.
    target
        The weight file, which appears complete or not at all; directories above it are made. Or a stream to write to.
    options
        See there.
    given
        Names of options that count at their defaults too.
    force
        Replace what exists.
    progress
        Called with the bytes of each block written.

    Raises
    ------
    CheckpointError, KvmnnError
        For a checkpoint or options that give no weight file, or one that `verify` refuses (`as_reference` writes it).
    OutputError
        When the file exists or cannot be written.
    """
    return prepare(source, options, given=given).write(target, force=force, progress=progress)


def prepare(
    source: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    given: Collection[str] = (),
    max_bytes: int | None = None,
) -> Prepared:
    """Open a checkpoint, choose its tensors, and read what they lie in, checksums included; errors as for `convert`.

    With `max_bytes` one whose storages hold more bytes is a `LimitError`.
    """
    options = options or ConvertOptions()
    checkpoint = open_checkpoint(source, max_bytes=max_bytes)
    noted = noted_in(checkpoint.metadata)
    if noted is not None:
        options = noted.complete(options, given)
    with naming(checkpoint.label):
        selection = select(checkpoint.root, options)
        if not options.as_reference:
            _check_sense(selection)
    if noted is not None:
        selection.notices += noted.notices(selection.header, selection.metadata)
    for linear in selection.linears:
        for name, tensor in ((f"{linear.name}.weight", linear.weight), (f"{linear.name}.bias", linear.bias)):
            if tensor is not None:
                with naming(checkpoint.label, repr(name)):
                    check_convertible(tensor, selection.header.dtype)
                    tensor.words()
    selection.notices[:0] = checkpoint.notices
    return Prepared(checkpoint, selection)


def _check_sense(selection: Selection) -> None:
    """Refuse to make what `verify` refuses."""
    blocks = [(*_rows_and_cols(linear.weight), linear.bias is not None) for linear in selection.linears]
    for fault in faults(Planned(selection.header, blocks)):
        raise CheckpointError(
            f"gives a weight file that kvmnn verify refuses: {fault.text} ({fault.reason}); --as-reference writes it"
        )
    if selection.misfits:
        # The layer would compute without the bias that was trained with it, and no loader would notice.
        raise CheckpointError(
            f"gives a weight file without {describe_misfits(selection.misfits)}; "
            "--as-reference leaves it out, as the published converter does"
        )


def _rows_and_cols(tensor: Tensor) -> tuple[int, int]:
    rows, cols = tensor.shape
    return rows, cols


def _write(prepared: Prepared, target: str, sink: Sink, progress: Progress | None) -> Conversion:
    checkpoint, selection = prepared
    hashing = _Hashing(sink)
    rounding = _Rounding(selection, progress)
    with naming(checkpoint.label):
        nbytes = kvcm.write(hashing, selection.header, rounding.blocks(), metadata=selection.metadata, allow_empty=True)
    return Conversion(
        source=checkpoint.path,
        target=target,
        header=selection.header,
        nbytes=nbytes,
        sha256=hashing.digest.hexdigest(),
        rounded_types=selection.rounded_types,
        non_finite=rounding.non_finite,
        warnings=[*selection.warnings, *rounding.warnings()],
        notices=selection.notices,
        unused=selection.unused,
    )


class _Rounding:
    """Blocks made one by one, and what became of their elements."""

    def __init__(self, selection: Selection, progress: Progress | None) -> None:
        self._selection = selection
        self._progress = progress
        self._first = ""
        self.non_finite = 0

    def blocks(self) -> Iterator[tuple[Words, Words | None]]:
        for linear in self._selection.linears:
            weight = self._words(f"{linear.name}.weight", linear.weight)
            bias = None if linear.bias is None else self._words(f"{linear.name}.bias", linear.bias).reshape(-1)
            yield weight, bias
            if self._progress is not None:
                self._progress(META_BYTES + weight.nbytes + (0 if bias is None else bias.nbytes))

    def _words(self, name: str, tensor: Tensor) -> Words:
        words = words_of(tensor, self._selection.header.dtype)
        if found := count_non_finite(words, self._selection.header.dtype):
            self._first = self._first or name
            self.non_finite += found
        return words

    def warnings(self) -> Iterator[str]:
        if self.non_finite:
            name = self._selection.header.dtype.name
            yield f"{self.non_finite} elements are infinite or no number as {name}, the first in {self._first!r}"


class _Hashing:
    """A sink in front of a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> int:
        self.digest.update(data)
        return self._sink.write(data)
