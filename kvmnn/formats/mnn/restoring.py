"""Frames back into the files of the prefix cache that they were made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.layers import LayerArray, sort
from ...arrays.named_array import ArrayInfo, NamedArray
from ...arrays.source import PACKED_FILES_KEY
from ...bundle.decoding import decode_frames
from ...bundle.frame_set import DecodeOptions, FrameSet
from ...bundle.packed_record import PackedFileEntry, PackedRecord
from ...dtypes import PARTS, Part
from ...errors import FrameError, LimitError, ManifestError, OptionError, SourceError
from ...files.names import is_directory
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIds
from ...packed.fitting import Geometry, describe
from ...packed.layout import PackLayout
from ...threads.pipeline import IN_FLIGHT, Progress
from ...threads.pool import resolve_threads
from ..array_formats import array_format
from ..frames import of_frames
from ..rereading import ReadBackError
from ..restoring import array_document
from .model import fingerprint
from .packing import chosen_layout, prefix_name
from .prefix_writing import Making, Packed, prefix_info, write_prefix


@dataclass(frozen=True, kw_only=True)
class RestoredPrefix:
    """A prefix cache that was written from frames.

    Parameters
    ----------
    input
        The frames.
    packed
        What was written.
    arrays
        What the frames hold.
    stored_bytes
        Of all frames.
    warnings
        How what was asked for differs from what the manifest says; empty unless that was forced.
    """

    input: str
    packed: Packed
    arrays: tuple[ArrayInfo, ...]
    stored_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            **self.packed.to_dict(),
            "input": self.input,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "arrays": [array_document(array) for array in self.arrays],
        }

    def __str__(self) -> str:
        return str(self.packed)


def is_prefix(frames: FrameSet, output: str) -> bool:
    """Whether frames are of a prefix cache, and `output` is a place for its files: no file of arrays."""
    if frames.cache is None or frames.cache.kind != "prefix":
        return False
    return array_format(output) is None or is_directory(output)


def restore_prefix(
    frames: FrameSet,
    output: str,
    geometry: Geometry | None = None,
    *,
    name: str | None = None,
    model: str | None = None,
    token_ids: TokenIds | None = None,
    options: DecodeOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoredPrefix:
    """Decode frames into the files of the prefix cache that they were made from, byte for byte in live elements.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`, of a prefix cache.
    output
        The directory.
    geometry, model, token_ids
        The layout, the directory of the model and the ids of the text that are expected, where they are.
    name
        Of the prefix; by default as before.
    options
        Limits, codecs, threads.
    force
        Replace files that exist, and write the files although something expected differs.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        When the frames are not of a packed cache.
    SourceError
        When the manifest says another layout, model or text than is expected.
    LimitError
        When the files would be larger than the options allow.
    KvmnnError
        As `restore` and `write_prefix`.
    """
    info, options = frames.cache, options or DecodeOptions()
    if info is None:
        raise OptionError(f"{frames.path}: does not describe a packed cache")
    record = frames.packed_record
    if record is not None:
        _check_record(frames, record, info)
    elif info.states:
        raise ManifestError(f"{frames.path}: has no state of layer {info.states[0].layer}, which has no K and V")
    contents = frames.without_room()
    arrays = sort(of_frames(contents, options).arrays)
    if not info.is_uniform:
        if geometry not in (None, Geometry()):
            raise OptionError(f"{frames.path}: heads differ by layer: its files are restored as they were alone")
        layout = info.layout
        found = {entry.layer: (entry.geometry[0], entry.geometry[2]) for entry in arrays}
        for layer in info.layers:
            own = info.layout_of(layer)
            if found.get(layer.layer) != (own.kv_heads, own.head_dim):
                raise ManifestError(
                    f"{frames.path}: layer {layer.layer}: expected {own.kv_heads} kv heads x {own.head_dim} dims, "
                    f"found {found.get(layer.layer)}"
                )
    else:
        layout = chosen_layout(geometry or Geometry(), arrays, info.layout, info.layout.dtype)
    warnings = _differences(info, layout, model, token_ids)
    if warnings and not force:
        raise SourceError(f"{frames.path}: {warnings[0]} (--force restores it anyway)")
    target = prefix_info(arrays, layout, prefix_name(name, info), like=info)
    if options.max_bytes is not None and target.file_bytes > options.max_bytes:
        raise LimitError(
            f"{frames.path}: its files have {target.file_bytes} bytes, above the limit of {options.max_bytes}"
        )
    hashes = _hashes(contents, arrays, layout)
    parallel = _side_by_side(arrays, options)
    if hashes:
        alone = replace(options, threads=1) if parallel else options
        arrays = sort(of_frames(contents, alone, check=False).arrays)
    same = record if record and not record.left_out and layout == info.layout else None
    kept = same.files if same else [entry for entry in record.files if entry.is_state] if record else []
    making = Making(
        durable=False,
        hashes=hashes,
        rooms=_rooms(frames, kept, options),
        file_hashes={(entry.layer, entry.part): entry.sha256 for entry in kept},
        threads=options.threads if parallel else 1,
    )
    try:
        packed = write_prefix(
            arrays, target, output, force=force, protect=frames.files, progress=progress, making=making
        )
    except (FrameError, ReadBackError):
        deque(decode_frames(frames, options), maxlen=0)  # where frames are not what they were, this says it
        raise
    proof = _SAME_FILES if same else _LIVE_ELEMENTS
    return RestoredPrefix(
        input=frames.path,
        packed=replace(packed, proof=proof, left_out=record.left_out if record else ""),
        arrays=contents.arrays,
        stored_bytes=contents.stored_bytes,
        warnings=tuple(warnings),
    )


_SAME_FILES = "every file read back, sha256 of the files that were encoded"
_LIVE_ELEMENTS = "live elements of every file read back and compared"


def _rooms(
    frames: FrameSet, kept: Sequence[PackedFileEntry], options: DecodeOptions
) -> dict[tuple[int, Part], NamedArray]:
    """What files hold besides rows of tokens."""
    rooms = {entry.room: (entry.layer, entry.part) for entry in kept if entry.room is not None}
    if not rooms:
        return {}
    found = of_frames(frames, replace(options, threads=1)).arrays
    return {rooms[array.name]: array for array in found if array.name in rooms}


def _check_record(frames: FrameSet, record: PackedRecord, info: CacheInfo) -> None:
    """`ManifestError` where the record is not of the files that the manifest describes."""
    where = f"{frames.path}: metadata {PACKED_FILES_KEY!r}"
    expected = {(layer.layer, part): _size(info, layer, part) for layer in info.layers for part in PARTS}
    states = {state.layer: (state.key_bytes, state.value_bytes) for state in info.states}
    expected |= {(layer, part): sizes[part == "value"] for layer, sizes in states.items() for part in PARTS}
    listed = [(entry.layer, entry.part) for entry in record.files]
    unlike = [entry for entry in record.files if entry.is_state != (entry.layer in states)]
    if unlike or listed != [(number, part) for number in info.numbers for part in PARTS]:
        raise ManifestError(f"{where}: expected K and V of each layer by turns")
    sizes = {array.name: array.nbytes for array in frames.arrays}
    for entry in record.files:
        size = expected[entry.layer, entry.part]
        room = entry.nbytes if entry.room is None else sizes[entry.room]
        if entry.nbytes != size or room != size:
            found = entry.nbytes if entry.nbytes != size else room
            raise ManifestError(
                f"{where}: layer {entry.layer}: expected {size} bytes of its {entry.part}s, found {found}"
            )


def _size(info: CacheInfo, layer: LayerInfo, part: Part) -> int:
    layout = info.layout_of(layer)
    return layout.key_bytes(layer.capacity) if part == "key" else layout.value_bytes(layer.capacity)


def _hashes(frames: FrameSet, arrays: Sequence[LayerArray], layout: PackLayout) -> dict[str, str]:
    """The hashes of the manifest, where what reads back of the files has to have them; else none.

    Then they are all that is compared: they prove the files, the frames and everything between them.
    """
    said = {array.name: array for array in frames.arrays}
    found = {}
    for entry in arrays:
        array = said.get(entry.array.name)
        lies = (entry.array.shape, entry.array.order)
        if array and array.sha256 and (array.shape, array.order) == lies and not entry.token_major:
            found[array.name] = array.sha256
    return found if len(found) == len(arrays) and layout.dtype == arrays[0].array.dtype else {}


def _side_by_side(arrays: Sequence[LayerArray], options: DecodeOptions) -> bool:
    """Whether arrays are small enough to be worked on at once, as many as there are threads."""
    return max(entry.array.nbytes for entry in arrays) * resolve_threads(options.threads) <= IN_FLIGHT


def _differences(info: CacheInfo, layout: PackLayout, model: str | None, token_ids: TokenIds | None) -> list[str]:
    """How the layout, model or text that is expected differs from what the cache was made with."""
    found = []
    if layout != info.layout:
        found.append(f"the cache has {describe(info.layout)}; asked for was {describe(layout)}")
    return found + origin_differences(info, model, token_ids)


def origin_differences(info: CacheInfo, model: str | None, token_ids: TokenIds | None) -> list[str]:
    """How the model (its directory) or the text that is expected differs from what a cache was made with, in words."""
    found = []
    if model and info.model is None:
        found.append("the manifest does not say which model the cache is of")
    elif model and fingerprint(model) != info.model:
        found.append(f"the cache is of another model than the one in {model}")
    if token_ids and info.token_ids is None:
        found.append("the manifest does not say which token ids the cache was made from")
    elif token_ids and token_ids != info.token_ids:
        found.append(f"the cache was made from other token ids than those in {token_ids.where}")
    return found
