"""Verify: frames decoded again, and what comes out proved."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from ..arrays.source import SIDECAR_KEY, Source
from ..files.changes import InputGuard
from ..text import LOSSLESS, LOSSY, compute_ratio, format_rate, pluralize
from ..threads.pipeline import Progress
from .beside import find_sidecar_difference
from .comparing import BundleDifference, compare_frame_set
from .decoding import decode_frames
from .frame_set import DecodeOptions, FrameSet
from .kept_file import count_valid_bytes, describe_passthrough, parse_passthrough
from .manifest import count_chunks, describe_unused_arrays, format_ratio
from .packed_record import parse_packed_record

DECODES = "DECODES"
DIFFERS = "DIFFERS"


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What decoding frames again has shown.

    Parameters
    ----------
    input
        The frames.
    against
        The original they were compared with; empty if none was given.
    proof
        ``"bytes"``: all bytes were compared; ``"sha256"``: the hashes of the manifest; None: nothing to compare with.
    difference
        The first one, if there is one.
    raw_bytes, stored_bytes
        Of all arrays and of all frames.
    room_bytes
        Of all arrays, behind the valid tokens.
    arrays, frames, dense_streams, raw_pieces
        How many; raw pieces are words that are stored as they are.
    seconds
        Time that it took.
    unknown_properties
        What nothing says of several frames without a manifest, for people; else empty.
    restored_file_name
        The name of the file that the frames were made from, where it was put together again and its hash compared.
    notes
        What changes the meaning of the ratio, in lines.
    compared
        What was compared with the original, for people.
    left_out
        What of packed files the frames do not keep, as a sentence; empty for nothing.
    """

    input: str
    against: tuple[str, ...]
    proof: Literal["bytes", "sha256"] | None
    difference: BundleDifference | None
    raw_bytes: int
    stored_bytes: int
    arrays: int
    frames: int
    dense_streams: int = 0
    raw_pieces: int = 0
    seconds: float
    unknown_properties: str = ""
    restored_file_name: str = ""
    notes: tuple[str, ...] = ()
    compared: str = "every byte"
    left_out: str = ""
    room_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Valid over stored bytes."""
        return compute_ratio(max(self.raw_bytes - self.room_bytes, 0), self.stored_bytes)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    @property
    def label(self) -> str:
        """What was shown.

        ``LOSSLESS`` if that was proved, ``LOSSY`` where packed files are not kept whole, ``DIFFERS``, or ``DECODES``
        where there is nothing to compare with.
        """
        if self.difference is not None:
            return DIFFERS
        if self.left_out:
            return LOSSY
        return LOSSLESS if self.proof else DECODES

    @property
    def _unproved_reason(self) -> str:
        checksum_text = "the checksum of each stream held; " if self.dense_streams and not self.frames else ""
        return f"{checksum_text}no manifest and no --against: nothing to compare with"

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "input": self.input,
            "against": list(self.against),
            "label": self.label,
            "proof": self.proof,
            "difference": None if self.difference is None else self.difference._asdict(),
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "valid_bytes": max(self.raw_bytes - self.room_bytes, 0),
            "ratio": self.ratio,
            "notes": list(self.notes),
            "compared": self.compared if self.proof == "bytes" else None,
            "arrays": self.arrays,
            "frames": self.frames,
            "dense_streams": self.dense_streams,
            "raw_pieces": self.raw_pieces,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        original = ", ".join(self.against)
        if self.difference is not None:
            return f"{self.input}: {DIFFERS} from {original}: {self.difference}"
        evidence = {
            "bytes": f"{self.compared} compared with {original}",
            "sha256": (
                f"decoded, sha256 of "
                f"{f'all of {self.restored_file_name}' if self.restored_file_name else 'the manifest'}"
            ),
            None: self._unproved_reason,
        }[self.proof]
        if self.unknown_properties:
            evidence = f"{evidence}; {self.unknown_properties}"
        return (
            f"{self.input}: {self.label} ({evidence}), {pluralize(self.arrays, 'array')}, "
            f"{self.stored_bytes:,} -> {self.raw_bytes:,} bytes, "
            f"{format_ratio(self.raw_bytes, self.raw_bytes - self.room_bytes, self.stored_bytes)}"
            f"{format_rate(self.raw_bytes, self.seconds)}" + "".join(f"\n  {line}" for line in self.notes)
        )


def verify_frame_set(
    frames: FrameSet,
    against: Source | None = None,
    options: DecodeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> VerifyResult:
    """Decode frames again, and compare what comes out with the original or with the manifest.

    Parameters
    ----------
    frames
        `open_frames`.
    against
        The original (`kvmnn.open`), whose bytes are then compared; without it the hashes of the manifest are. A frame
        without a manifest can only be shown to decode.
    options
        Limits, codecs, threads.
    progress
        Called with raw bytes.

    Returns
    -------
    Verified
        With `ok` False for arrays that differ from `against`.

    Raises
    ------
    KvmnnError
        When a frame does not decode, or a hash differs from the manifest's.
    """
    start_time = time.perf_counter()
    difference: BundleDifference | None = None
    with InputGuard():
        if against is not None:
            difference = compare_frame_set(
                frames, against.arrays, options, progress=progress
            ) or _find_metadata_difference(frames, against)
        else:
            deque(decode_frames(frames, options, progress=progress), maxlen=0)
    contents, record = frames.without_unused_arrays(), frames.packed_record
    compared_text = "every byte" if frames.cache is None or (record and not record.left_out) else "every live element"
    return VerifyResult(
        input=frames.path,
        compared=compared_text,
        against=() if against is None else against.inputs,
        proof="bytes" if against is not None else "sha256" if frames.document else None,
        difference=difference,
        raw_bytes=contents.raw_bytes,
        stored_bytes=contents.stored_bytes,
        arrays=len(contents.arrays),
        **count_chunks(frames.arrays)._asdict(),
        seconds=time.perf_counter() - start_time,
        unknown_properties=frames.unknown_properties,
        notes=tuple(
            describe_passthrough(frames.document, frames.path) + describe_unused_arrays(frames.document)
            if frames.document
            else ()
        ),
        left_out=record.left_out if record else "",
        room_bytes=contents.raw_bytes - count_valid_bytes(frames.document) if frames.document else 0,
    )


def _find_metadata_difference(frames: FrameSet, against: Source) -> BundleDifference | None:
    """Where what the manifest has besides arrays is not what the original has: in a file kept whole, or beside them."""
    if frames.document is None:
        return None
    metadata, original_name = frames.document.metadata, " ".join(against.inputs)
    passthrough, other_passthrough = (
        parse_passthrough(metadata, frames.path),
        parse_passthrough(against.metadata, original_name),
    )
    difference_text = passthrough.find_difference(other_passthrough) if passthrough and other_passthrough else None
    record, other_record = (
        parse_packed_record(metadata, frames.path),
        parse_packed_record(against.metadata, original_name),
    )
    difference_text = difference_text or (record.find_difference(other_record) if record and other_record else None)
    if record and record.left_out:
        difference_text = f"not all of the packed files is kept: {record.left_out}"
    is_single_file = len(frames.arrays) == 1 and SIDECAR_KEY not in against.metadata  # one file, which may lie anywhere
    if SIDECAR_KEY in metadata and not is_single_file:  # frames of earlier versions have none
        difference_text = difference_text or find_sidecar_difference(
            metadata, frames.path, against.metadata, original_name
        )
    return BundleDifference(None, difference_text) if difference_text else None
