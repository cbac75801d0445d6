"""Sizes of frames that exist: what is measured is encoded as MNN would store it, decoded and compared."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import Part
from ..errors import KvmnnError
from ..frames import encode, matches
from ..threads.pipeline import Progress
from .token_runs import RowReader
from .units import Unit

FRAME_BYTES = 64 << 20
"""Raw bytes of a frame, at most; longer pieces take several."""


@dataclass(frozen=True)
class StoredSize:
    """Frames of K or V.

    Parameters
    ----------
    bytes, frames
        Their total length, and how many there are.
    """

    bytes: int
    frames: int

    def __add__(self, other: StoredSize) -> StoredSize:
        return StoredSize(self.bytes + other.bytes, self.frames + other.frames)


def stored_size(unit: Unit, part: Part, progress: Progress | None = None) -> StoredSize:
    """Encode every piece of K or V of `unit`, decode it again and count its bytes.

    Raises
    ------
    KvmnnError
        If a frame does not decode to its input, which would be a defect of kvmnn or of the machine.
    SourceError
        When a file cannot be read.
    """
    heads, dims = unit.geometry(part)
    word_bytes = unit.word_bytes(part)
    dtype = "fp32" if word_bytes == 4 else "fp16"  # a frame of bf16 words has the same bytes as one of fp16 words
    step = max(1, FRAME_BYTES // (word_bytes * heads * dims))
    reader = RowReader(unit.tensors(part))
    found = StoredSize(0, 0)
    for piece in unit.pieces():
        for start in range(0, piece, step):
            words = reader.take_run(min(step, piece - start))
            made = encode(words, dtype=dtype, threads=1)
            if not matches(made, words, dtype=dtype, threads=1):
                raise KvmnnError("a frame did not decode to its own input (please report this)")
            found += StoredSize(len(made), 1)
            if progress:
                progress(words.size)
    return found
