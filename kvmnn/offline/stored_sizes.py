"""Sizes of frames that exist: what is measured is encoded as MNN would store it, decoded and compared."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import Part
from ..errors import KvmnnError
from ..frames import encode, verify_roundtrip
from ..threads.pipeline import Progress
from .token_runs import TokenReader
from .units import CompressionUnit

MAX_FRAME_BYTES = 64 << 20
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


def measure_stored_size(unit: CompressionUnit, part: Part, progress: Progress | None = None) -> StoredSize:
    """Encode every piece of K or V of `unit`, decode it again and count its bytes.

    Raises
    ------
    KvmnnError
        If a frame does not decode to its input, which would be a defect of kvmnn or of the machine.
    SourceError
        When a file cannot be read.
    """
    heads, dims = unit.get_geometry(part)
    itemsize = unit.get_itemsize(part)
    dtype = "fp32" if itemsize == 4 else "fp16"  # a frame of bf16 words has the same bytes as one of fp16 words
    tokens_per_frame = max(1, MAX_FRAME_BYTES // (itemsize * heads * dims))
    reader = TokenReader(unit.list_tensors(part))
    total = StoredSize(0, 0)
    for num_tokens in unit.iter_chunk_tokens():
        for start in range(0, num_tokens, tokens_per_frame):
            elements = reader.read_tokens(min(tokens_per_frame, num_tokens - start))
            frame = encode(elements, dtype=dtype, threads=1)
            if not verify_roundtrip(frame, elements, dtype=dtype, threads=1):
                raise KvmnnError("a frame did not decode to its own input (please report this)")
            total += StoredSize(len(frame), 1)
            if progress:
                progress(elements.size)
    return total
