"""Restore the files of the prefix cache that frames were made from."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.parallel import MAX_IN_FLIGHT_BYTES, Progress, resolve_threads
from ...arrays.array import ArrayInfo, LazyArray
from ...arrays.layers import LayerArray, collect_layer_arrays
from ...bundle.decoder import decode_frames
from ...bundle.frame_set import DecodeOptions, FrameSet
from ...bundle.manifest import PackedFileEntry
from ...bundle.verification import check_packed_record
from ...dtypes import Part
from ...errors import FrameError, LimitError, ManifestError, OptionError, OutputError, UnsuitableOptionError
from ...files.file_names import is_directory_output
from ...files.schema import Record, json_key
from ...packed.cache_info import CacheInfo, TokenIdsFingerprint
from ...packed.inference import PackedGeometry, describe_layout
from ...packed.layout import PackLayout
from ..frames import make_frame_source
from ..options import PackedOptions
from ..restorer import build_array_document
from ..writer import ReadBackError, find_array_format
from .model import compute_fingerprint
from .packer import choose_target_layout, resolve_prefix_name
from .prefix_writer import PackResult, PrefixWriteOptions, build_prefix_info, write_prefix

# Each byte is hashed once, where it proves most. The SHA-256 of an array is compared with what reads back from its
# file, which proves the file, the decoding and the frame; the frame's own hash only tells what is wrong. Words in
# memory (a prefix from the store) are compared directly. Neither is synced to the disk: both can be made again, and
# fsync of every file took longer than everything else. `pack` and `encode`, whose input may be deleted, do it.


def _build_array_documents(arrays: tuple[ArrayInfo, ...]) -> list[dict[str, Any]]:
    return [build_array_document(array) for array in arrays]


@dataclass(frozen=True, kw_only=True)
class RestorePrefixResult(Record):
    """Result of restoring a prefix cache from frames."""

    #: Result of the packing.
    pack_result: PackResult = field(metadata={"inline": True})
    #: Path of the frames.
    input: str
    #: Bytes of all frames.
    stored_bytes: int
    #: Arrays in the frames.
    arrays: tuple[ArrayInfo, ...] = field(metadata={"convert": _build_array_documents})
    #: Differences between the expected properties and the manifest; empty unless ignored.
    warnings: tuple[str, ...] = field(default=(), metadata={"json": False})

    @property
    @json_key(after="input")
    def raw_bytes(self) -> int:
        """Return the number of bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def __str__(self) -> str:
        return str(self.pack_result)


def can_restore_prefix(frames: FrameSet, output: str) -> bool:
    """Return whether frames are of a prefix cache, and `output` is a path for its files rather than for arrays."""
    if frames.cache is None or frames.cache.kind != "prefix":
        return False
    return find_array_format(output) is None or is_directory_output(output)


def restore_prefix(
    frames: FrameSet,
    output: str,
    options: DecodeOptions | None = None,
    *,
    expected: PackedOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RestorePrefixResult:
    """Decode frames into the files of the prefix cache that they were made from, byte for byte in live elements.

    Parameters
    ----------
    frames, output, options, progress
        As for `restore_arrays`; `output` is the directory.
    expected
        The expected layout, model directory and token ids, if any, and the name of the prefix (default: the recorded
        one).
    force
        Replace files that exist, and write the files although something expected differs.

    Raises
    ------
    OptionError
        When the frames are not of a packed cache.
    UnsuitableOptionError
        When the manifest has another layout, model or text than expected.
    LimitError
        When the files would be larger than the options allow.
    KvmnnError
        As `restore_arrays` and `write_prefix`.
    """
    expected = expected or PackedOptions()
    geometry = expected.geometry
    info, options = frames.cache, options or DecodeOptions()
    if info is None:
        raise OptionError(f"{frames.path}: does not describe a packed cache")
    if os.path.realpath(output) == os.path.realpath(frames.path):  # later reads would take the files for a part of it
        raise OutputError(f"{output}: is the input itself; choose another output")
    record = frames.packed_record
    if record is not None:
        check_packed_record(frames, record, info)
    elif info.states:
        raise ManifestError(f"{frames.path}: has no state of layer {info.states[0].layer}, which has no K and V")
    array_frames = frames.without_unused_arrays()
    arrays = collect_layer_arrays(make_frame_source(array_frames, options).arrays)
    layout = info.layout
    if info.is_uniform:
        layout = choose_target_layout(geometry, arrays, info.layout, info.layout.dtype)
    elif geometry != PackedGeometry():
        raise OptionError(f"{frames.path}: heads differ by layer: its files are restored as they were alone")
    else:
        _check_layer_geometry(frames.path, arrays, info)
    provenance_warnings = list_provenance_mismatches(info, expected.model, expected.token_ids)
    if layout != info.layout:
        mismatch = f"the cache has {describe_layout(info.layout)}; asked for was {describe_layout(layout)}"
        provenance_warnings.insert(0, mismatch)
    if provenance_warnings and not expected.ignore_contradictions:
        raise UnsuitableOptionError(
            f"{frames.path}: {provenance_warnings[0]} (--ignore contradictions restores it anyway)"
        )
    name = resolve_prefix_name(expected.prefix_name, info)
    target_info = build_prefix_info(arrays, layout, name, reference_info=info)
    if options.max_bytes is not None and target_info.file_bytes > options.max_bytes:
        raise LimitError(
            f"{frames.path}: its files have {target_info.file_bytes} bytes, above the limit of {options.max_bytes}"
        )
    hashes = _collect_array_hashes(array_frames, arrays, layout)
    # as many arrays as there are threads are in memory at once
    max_bytes_in_flight = max(entry.array.nbytes for entry in arrays) * resolve_threads(options.threads)
    is_parallel = max_bytes_in_flight <= MAX_IN_FLIGHT_BYTES
    if hashes:
        single_thread_options = replace(options, threads=1) if is_parallel else options
        arrays = collect_layer_arrays(make_frame_source(array_frames, single_thread_options, check=False).arrays)
    is_whole = record is not None and not record.left_out and layout == info.layout
    recorded_files = [entry for entry in record.files if is_whole or entry.is_state] if record else []
    write_options = PrefixWriteOptions(
        is_durable=False,
        array_hashes=hashes,
        unused_arrays=_read_unused_arrays(frames, recorded_files, options),
        file_hashes={(entry.layer, entry.part): entry.sha256 for entry in recorded_files},
        threads=options.threads if is_parallel else 1,
    )
    try:
        pack_result = write_prefix(
            arrays,
            target_info,
            output,
            force=force,
            exclude=frames.files,
            progress=progress,
            write_options=write_options,
        )
    except (FrameError, ReadBackError):
        deque(decode_frames(frames, options), maxlen=0)  # reports damaged frames
        raise
    proof = _FILE_HASH_PROOF if is_whole else _VALID_ELEMENT_PROOF
    return RestorePrefixResult(
        input=frames.path,
        pack_result=replace(pack_result, proof=proof, left_out=record.left_out if record else ""),
        arrays=array_frames.arrays,
        stored_bytes=array_frames.stored_bytes,
        warnings=tuple(provenance_warnings),
    )


_FILE_HASH_PROOF = "every file read back, sha256 of the files that were encoded"
_VALID_ELEMENT_PROOF = "live elements of every file read back and compared"


def _check_layer_geometry(label: str, arrays: Sequence[LayerArray], info: CacheInfo) -> None:
    heads_by_layer = {entry.layer: (entry.geometry[0], entry.geometry[2]) for entry in arrays}
    for layer in info.layers:
        layout = info.get_layer_layout(layer)
        if heads_by_layer.get(layer.layer) != (layout.kv_heads, layout.head_dim):
            raise ManifestError(
                f"{label}: layer {layer.layer}: expected {layout.kv_heads} kv heads x {layout.head_dim} dims, found "
                f"{heads_by_layer.get(layer.layer)}"
            )


def _read_unused_arrays(
    frames: FrameSet, recorded_files: Sequence[PackedFileEntry], options: DecodeOptions
) -> dict[tuple[int, Part], LazyArray]:
    """Return the unused bytes of the files, outside the rows of tokens."""
    file_key_by_name = {
        entry.unused_array: (entry.layer, entry.part) for entry in recorded_files if entry.unused_array is not None
    }
    if not file_key_by_name:
        return {}
    all_arrays = make_frame_source(frames, replace(options, threads=1)).arrays
    return {file_key_by_name[array.name]: array for array in all_arrays if array.name in file_key_by_name}


def _collect_array_hashes(frames: FrameSet, arrays: Sequence[LayerArray], layout: PackLayout) -> dict[str, str]:
    """Return the manifest's hashes if the restored files must match them; else empty.

    Then only they are compared: they prove the files, the frames and everything between them.
    """
    entry_by_name = {array.name: array for array in frames.arrays}
    hash_by_name = {}
    for entry in arrays:
        array = entry_by_name.get(entry.array.name)
        shape_and_order = (entry.array.shape, entry.array.order)
        if array and array.sha256 and (array.shape, array.order) == shape_and_order and not entry.token_major:
            hash_by_name[array.name] = array.sha256
    return hash_by_name if len(hash_by_name) == len(arrays) and layout.dtype == arrays[0].array.dtype else {}


def list_provenance_mismatches(info: CacheInfo, model: str | None, token_ids: TokenIdsFingerprint | None) -> list[str]:
    """Describe how the expected model (its directory) or text differs from those of a cache."""
    mismatches = []
    if model and info.model is None:
        mismatches.append("the manifest does not say which model the cache is of")
    elif model and compute_fingerprint(model) != info.model:
        mismatches.append(f"the cache is of another model than the one in {model}")
    if token_ids and info.token_ids is None:
        mismatches.append("the manifest does not say which token ids the cache was made from")
    elif token_ids and token_ids != info.token_ids:
        mismatches.append(f"the cache was made from other token ids than those in {token_ids.where}")
    return mismatches
