"""A checkpoint to the weight file that the runtime loads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...dtypes import Words
from ...files.output import FileOutput, failures
from ...threads.pipeline import Progress
from ..checkpoint.opening import Checkpoint, naming, open_checkpoint
from ..checkpoint.tensors import Tensor
from ..kvcm.header import META_BYTES, Header
from ..kvcm.weight_file import write
from .rounding import check_convertible, count_non_finite, words_of
from .selection import Options, Selection, select

if TYPE_CHECKING:
    from ...formats.sinks import Sink


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes
    ----------
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

    header: Header
    nbytes: int
    sha256: str
    rounded_types: list[str]
    non_finite: int
    warnings: list[str]
    notices: list[str]
    unused: list[str]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint; the output appears whole or not at all, and only after everything has been checked.

    Parameters
    ----------
    source
        ``.pth``, ``.pt`` or ``.safetensors``.
    target
        The weight file; directories above it are made.
    options
        See there.
    force
        Replace what exists.
    progress
        Called with the bytes of each block written.

    Raises
    ------
    CheckpointError, KvmnnError
        For a checkpoint or options that give no weight file.
    OutputError
        When the file exists or cannot be written.
    """
    checkpoint, selection = prepare(source, options or Options())
    return write_file(checkpoint, selection, target, force=force, progress=progress)


def write_file(
    checkpoint: Checkpoint,
    selection: Selection,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write what `prepare` chose; as `convert`."""
    with failures(target):
        os.makedirs(os.path.dirname(os.path.realpath(target)), exist_ok=True)
    with FileOutput(target, force=force, protect=[checkpoint.label]) as output:
        conversion = write_selection(checkpoint, selection, output.file, progress)
        output.commit()
    return conversion


def prepare(source: str | os.PathLike[str], options: Options) -> tuple[Checkpoint, Selection]:
    """Open a checkpoint, choose its tensors, and read what they lie in, checksums included."""
    checkpoint = open_checkpoint(source)
    with naming(checkpoint.label):
        selection = select(checkpoint.root, options)
    for linear in selection.linears:
        for name, tensor in ((f"{linear.name}.weight", linear.weight), (f"{linear.name}.bias", linear.bias)):
            if tensor is not None:
                with naming(checkpoint.label, repr(name)):
                    check_convertible(tensor, selection.header.dtype)
                    tensor.words()
    selection.notices[:0] = checkpoint.notices
    return checkpoint, selection


def write_selection(
    checkpoint: Checkpoint, selection: Selection, sink: Sink, progress: Progress | None = None
) -> Conversion:
    """Round and write the tensors of a selection."""
    hashing = _Hashing(sink)
    rounding = _Rounding(selection, progress)
    with naming(checkpoint.label):
        nbytes = write(hashing, selection.header, rounding.blocks(), allow_empty=True)
    return Conversion(
        selection.header,
        nbytes,
        hashing.digest.hexdigest(),
        selection.rounded_types,
        rounding.non_finite,
        [*selection.warnings, *rounding.warnings()],
        selection.notices,
        selection.unused,
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
