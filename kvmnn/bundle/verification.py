"""Verify frames: decode them, and compare with hashes or with the original arrays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

import numpy as np

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from .._util.text import LOSSLESS, LOSSY, compute_ratio, format_rate, pluralize
from ..arrays.array import Chunk, LazyArray
from ..arrays.completeness import Completeness, describe_scope, format_missing
from ..arrays.opaque_state import OpaqueState
from ..arrays.source import DEQUANTIZED_KEY, FILE_KEY, PACKED_FILES_KEY, SIDECAR_KEY, Source, qualify_label
from ..dtypes import PARTS
from ..errors import ManifestError, SourceError
from ..files.change_detection import InputGuard
from ..files.schema import Record, json_key
from ..packed.cache_info import CacheInfo, compute_file_sizes
from .decoder import decode_frames
from .frame_set import DecodeOptions, FrameSet
from .manifest import PackedRecord, count_chunks, describe_unused_arrays, format_ratio, parse_packed_record
from .passthrough import count_valid_bytes, describe_passthrough, find_sidecar_difference, parse_passthrough

_COMPARE_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleDifference(Record):
    """First difference from an original; `array` is None for bytes of a whole file outside its arrays."""

    array: str | None
    description: str = field(metadata={"key": "what"})

    def __str__(self) -> str:
        return self.description if self.array is None else f"array {self.array!r} {self.description}"


def compare_frame_set(
    frames: FrameSet,
    originals: Sequence[LazyArray],
    options: DecodeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> BundleDifference | None:
    """Decode frames and compare them with arrays byte by byte; return the first difference, or None.

    A single array is compared with a single array whatever their names; several are matched by name.

    Raises
    ------
    KvmnnError
        As `decode_frames`; when the frames are damaged; and when the originals are, which may show only in a checksum
        at their end.
    """
    pairs = _match_originals(frames, originals)
    if isinstance(pairs, BundleDifference):
        return pairs
    document = frames.document
    has_shapes = document is not None and FILE_KEY not in document.metadata  # of a file kept whole only bytes count
    for entry, original in zip(frames.arrays, pairs, strict=True):
        if has_shapes and entry.shape != original.shape and not _is_flat(original):
            return BundleDifference(entry.name, f"shape {list(original.shape)} became {list(entry.shape)}")
        if entry.nbytes != original.nbytes:
            other_text = f"{original.name!r} of the original" if original.name != entry.name else "that of the original"
            return BundleDifference(
                entry.name, f"of the frames has {entry.nbytes} bytes, {other_text} {original.nbytes}"
            )
        if entry.order != original.order and not _is_flat(original):
            return BundleDifference(entry.name, f"order {original.order} became {entry.order}")
    current_index, reader = 0, _ComparingReader(pairs[0])
    for index, data in decode_frames(frames, options, progress=progress):
        if index != current_index:
            reader.read_to_end()
            current_index, reader = index, _ComparingReader(pairs[index])
        offset = reader.find_first_difference(data)
        if offset is not None:
            entry = frames.arrays[index]
            return BundleDifference(
                entry.name, f"first differs at element {list(entry.index_at_offset(offset))} (byte {offset})"
            )
        del data  # or it would live on while the next frame is decoded
    reader.read_to_end()
    return None


class _ComparingReader:
    """Reads an array in step with decoded bytes, and compares them."""

    def __init__(self, array: LazyArray) -> None:
        self._chunks = array.iter_chunks(_COMPARE_CHUNK_BYTES)
        self._remainder: Chunk = np.empty(0, np.uint8)
        self._position = 0

    def find_first_difference(self, data: Chunk) -> int | None:
        """Compare the next bytes with `data`; return the offset of the first difference in the array, or None."""
        for start in range(0, data.size, _COMPARE_CHUNK_BYTES):
            block = data[start : start + _COMPARE_CHUNK_BYTES]
            differs = np.flatnonzero(block != self._read(block.size))
            if differs.size:
                return self._position + int(differs[0])
            self._position += block.size
        return None

    def read_to_end(self) -> None:
        """Read to the end of the input, where readers compare checksums and sizes."""
        for _ in self._chunks:
            pass

    def _read(self, nbytes: int) -> Chunk:
        while self._remainder.size < nbytes:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise SourceError("the file to compare with ends early")
            self._remainder = np.concatenate([self._remainder, chunk]) if self._remainder.size else chunk
        block, self._remainder = self._remainder[:nbytes], self._remainder[nbytes:]
        return block


def _is_flat(array: LazyArray) -> bool:
    """Return whether an array has one axis: without a manifest there is no shape, so only bytes are compared."""
    return len(array.shape) == 1


def _match_originals(frames: FrameSet, originals: Sequence[LazyArray]) -> list[LazyArray] | BundleDifference:
    if len(frames.arrays) == len(originals) == 1:
        return list(originals)
    by_name = {original.name: original for original in originals}
    for entry in frames.arrays:
        if entry.name not in by_name:
            has_no_match = not any(array_entry.name in by_name for array_entry in frames.arrays)
            hint = (
                ", as are all: were arrays parted into layers, as by --axes, then part these, too"
                if has_no_match
                else ""
            )
            return BundleDifference(entry.name, f"is in the frames only{hint}")
    unmatched = sorted(set(by_name) - {entry.name for entry in frames.arrays})
    if unmatched:
        return BundleDifference(unmatched[0], "is not in the frames")
    return [by_name[entry.name] for entry in frames.arrays]


DECODED_ONLY = "DECODES"
DIFFERS = "DIFFERS"


@dataclass(frozen=True, kw_only=True)
class VerifyResult(Record):
    """Result of decoding and comparing frames."""

    #: Path of the frames.
    input: str
    #: Files of the original; empty if none was given.
    against: tuple[str, ...]
    #: ``"bytes"``: all bytes were compared; ``"sha256"``: the hashes of the manifest; None: nothing to compare with.
    proof: Literal["bytes", "sha256"] | None
    #: The first difference, or None.
    difference: BundleDifference | None
    #: Sizes of all arrays and of all frames.
    raw_bytes: int
    stored_bytes: int
    #: Lines about what qualifies the ratio.
    notes: tuple[str, ...] = ()
    #: Lines of `notes` about what K and V had lost before.
    losses: tuple[str, ...] = field(default=(), metadata={"json": False})
    #: What was compared with the original, as text.
    compared: str = field(default="every byte", metadata={"json": False})
    #: How much of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: Numbers of arrays and pieces; raw pieces are words stored without a frame.
    arrays: int
    frames: int
    dense_streams: int = 0
    raw_pieces: int = 0
    #: Duration.
    seconds: float
    #: Properties that frames without a manifest do not record, as text; empty for all others.
    unknown_properties: str = field(default="", metadata={"json": False})
    #: Name of the whole file that was reassembled and compared by hash; empty if there is none.
    restored_file_name: str = field(default="", metadata={"json": False})
    #: Sentence about parts of packed files that the frames lack; empty if there are none.
    left_out: str = field(default="", metadata={"json": False})
    #: Whether the words were dequantised from MNN's int8 codes, which the frames lack.
    is_dequantized: bool = field(default=False, metadata={"json": False})
    #: Unused capacity of all arrays after the valid tokens, in bytes.
    unused_bytes: int = field(default=0, metadata={"json": False})

    @property
    @json_key(after="stored_bytes")
    def valid_bytes(self) -> int:
        """Return the number of bytes of all arrays without unused capacity after the valid tokens."""
        return max(self.raw_bytes - self.unused_bytes, 0)

    @property
    @json_key(after="valid_bytes")
    def ratio(self) -> float:
        """Return valid bytes divided by stored bytes."""
        return compute_ratio(self.valid_bytes, self.stored_bytes)

    @property
    def ok(self) -> bool:
        """Return whether there is no difference."""
        return self.difference is None

    @property
    @json_key(after="against")
    def label(self) -> str:
        """Return the label of the result.

        ``LOSSLESS`` if that was verified, ``LOSSY`` if packed files are not stored whole or the words were
        dequantised from int8, ``DIFFERS``, or ``DECODES`` if there is nothing to compare with. ``LOSSLESS copy of LOSSY
        K and V`` where these had lost something before.
        """
        if self.difference is not None:
            return DIFFERS
        if self.left_out or self.is_dequantized:
            return LOSSY
        return qualify_label(LOSSLESS, self.losses) or LOSSLESS if self.proof else DECODED_ONLY

    @property
    def _unproved_reason(self) -> str:
        checksum_text = "the checksum of each stream held; " if self.dense_streams and not self.frames else ""
        return f"{checksum_text}no manifest and no --against: nothing to compare with"

    @property
    @json_key("compared", after="notes")
    def _compared_document(self) -> str | None:
        return self.compared if self.proof == "bytes" else None

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
        if self.is_dequantized and self.proof == "sha256":
            evidence = f"{evidence}, of the words dequantised from int8"
        if self.unknown_properties:
            evidence = f"{evidence}; {self.unknown_properties}"
        missing_texts = format_missing(self.completeness)
        scope = describe_scope(self.arrays) if missing_texts and not self.restored_file_name else ""
        return (
            f"{self.input}: {self.label}{scope} ({evidence}), {pluralize(self.arrays, 'array')}, "
            f"{self.stored_bytes:,} -> {self.raw_bytes:,} bytes, "
            f"{format_ratio(self.raw_bytes, self.raw_bytes - self.unused_bytes, self.stored_bytes)}"
            f"{format_rate(self.raw_bytes, self.seconds)}"
            + "".join(f"\n  {line}" for line in (*missing_texts, *self.notes))
        )


def verify_frame_set(
    frames: FrameSet,
    against: Source | None = None,
    options: DecodeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> VerifyResult:
    """Decode frames, and compare the result with the original or with the manifest.

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
    if record is not None and frames.cache is not None:
        check_packed_record(frames, record, frames.cache)
    stores_states = record is not None and any(entry.is_state for entry in record.files)
    compared_text = "every byte" if frames.cache is None or (record and not record.left_out) else "every live element"
    is_dequantized = DEQUANTIZED_KEY in (frames.document.metadata if frames.document else ())
    is_dequantized |= against is not None and against.lossy
    if is_dequantized:
        compared_text = "every byte of the words dequantised from int8"
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
        losses=frames.losses,
        completeness=_select_less_complete(frames.completeness, against.completeness if against else None),
        notes=(
            *frames.losses,
            *(_describe_unstored_states(against.states) if against and not stores_states else ()),
            *(
                describe_passthrough(frames.document, frames.path) + describe_unused_arrays(frames.document)
                if frames.document
                else ()
            ),
            *_describe_other_name(frames.cache, against),
        ),
        left_out=record.left_out if record else "",
        is_dequantized=is_dequantized,
        unused_bytes=contents.raw_bytes - count_valid_bytes(frames.document) if frames.document else 0,
    )


def _select_less_complete(*completeness: Completeness | None) -> Completeness | None:
    """Return the first that lacks state, else the first: frames need not record what an original does."""
    # What only names show says less than a record of the layers.
    entries = [entry for entry in completeness if entry is not None]
    return max(entries, key=lambda entry: (not entry.is_complete, bool(entry.layers)), default=None)


def _describe_unstored_states(states: Sequence[OpaqueState]) -> list[str]:
    """Describe in one sentence the original's state that is not K and V, which frames of arrays cannot contain."""
    if not states:
        return []
    layers_text = pluralize(len({state.layer for state in states}), "layer")
    names_text = ", ".join(dict.fromkeys(state.name for state in states))
    return [
        f"not compared: {sum(state.nbytes for state in states):,} bytes of state of {layers_text} of the original "
        f"({names_text}), which the frames do not contain"
    ]


def _describe_other_name(cache: CacheInfo | None, against: Source | None) -> list[str]:
    """Describe in one sentence that the original's prefix has another name, as only contents are compared."""
    other_name = against.cache.name if against is not None and against.cache is not None else ""
    if cache is None or not cache.name or not other_name or cache.name == other_name:
        return []
    return [f"the names of the files differ: the prefix is {cache.name!r} here and {other_name!r} in the original"]


def check_packed_record(frames: FrameSet, record: PackedRecord, info: CacheInfo) -> None:
    """Raise `ManifestError` if the record does not match the files that the manifest describes."""
    label = f"{frames.path}: metadata {PACKED_FILES_KEY!r}"
    expected_sizes = {
        (layer.layer, part): size
        for layer in info.layers
        for part, size in zip(PARTS, compute_file_sizes(info, layer), strict=True)
    }
    state_sizes = {state.layer: (state.key_bytes, state.value_bytes) for state in info.states}
    expected_sizes |= {(layer, part): sizes[part == "value"] for layer, sizes in state_sizes.items() for part in PARTS}
    listed_files = [(entry.layer, entry.part) for entry in record.files]
    mismatched_entries = [entry for entry in record.files if entry.is_state != (entry.layer in state_sizes)]
    if mismatched_entries or listed_files != [(layer_number, part) for layer_number in info.numbers for part in PARTS]:
        raise ManifestError(f"{label}: expected K and V of each layer by turns")
    sizes = {array.name: array.nbytes for array in frames.arrays}
    for entry in record.files:
        expected_size = expected_sizes[entry.layer, entry.part]
        unused_size = entry.nbytes if entry.unused_array is None else sizes[entry.unused_array]
        if entry.nbytes != expected_size or unused_size != expected_size:
            actual_size = entry.nbytes if entry.nbytes != expected_size else unused_size
            raise ManifestError(
                f"{label}: layer {entry.layer}: expected {expected_size} bytes of its {entry.part}s, found "
                f"{actual_size}"
            )


def _find_metadata_difference(frames: FrameSet, against: Source) -> BundleDifference | None:
    """Return the first difference from the original outside the arrays: in a whole file, or in a sidecar."""
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
