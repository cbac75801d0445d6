"""Files of other engines encoded whole: split into arrays and other bytes, and restored byte for byte from frames."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

import numpy as np

from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress
from ..arrays.array import Chunk, LazyArray
from ..arrays.completeness import Completeness
from ..arrays.naming import sanitize_name
from ..arrays.source import FILE_KEY, Source
from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.manifest import count_chunks
from ..bundle.passthrough import (
    MAX_PASSTHROUGH_BYTES,
    FilePart,
    PassthroughFile,
    check_covers_arrays,
    count_bundle_bytes,
    describe_passthrough,
    dump_passthrough,
    parse_passthrough,
)
from ..bundle.verification import VerifyResult
from ..dtypes import Bytes
from ..errors import LimitError, OptionError, OutputError, SourceError
from ..files.atomic import BinaryStream, FileOutput, is_device
from ..files.change_detection import InputGuard
from ..files.file_names import is_directory_output
from ..files.mapped_file import STDIN, MappedFile
from ..frames import encode
from .base import Sink
from .frames import make_frame_source
from .options import ReadOptions
from .restorer import RestoreResult
from .writer import find_array_format

_READ_CHUNK_BYTES = 8 << 20
_MAX_RAW_RUN_BYTES = 1 << 20
"""Maximum length of literal bytes; longer runs become an array of their own."""
_SAMPLE_BYTES = 128 << 10


class Region(NamedTuple):
    """A byte range of a file that is encoded as arrays."""

    #: Byte range in the file.
    offset: int
    nbytes: int
    #: The arrays, and the bytes of their alternating rows.
    arrays: tuple[tuple[LazyArray, int], ...]


def capture(
    file: MappedFile,
    format_name: str,
    regions: Sequence[Region],
    kv_heads: tuple[int, ...] | None,
    *,
    unused_bytes_by_array: Mapping[str, int] | None = None,
    layer_numbers: tuple[int, ...] | None = None,
) -> Source:
    """Return a source with the arrays of all regions, and all other bytes of the file in its metadata.

    Parameters
    ----------
    file
        The whole file.
    format_name
        The name of its format in `ENGINE_FORMATS`.
    regions
        Byte ranges of the file that become arrays, without overlaps.
    kv_heads
        Number of kv heads of each layer, if specified.
    unused_bytes_by_array
        Unused capacity after the valid tokens in bytes, by the names of the arrays that have any.
    layer_numbers
        Number in the model of each layer of the file, if the file does not record it.
    """
    parts: list[FilePart] = []
    notes: list[str] = []
    arrays: list[LazyArray] = []
    position = 0
    for region in sorted(regions):
        _append_gap(file, position, region.offset, parts, arrays)
        parts.append(
            FilePart(region.nbytes, arrays=tuple((array.name, turn_bytes) for array, turn_bytes in region.arrays))
        )
        arrays += [array for array, _ in region.arrays]
        position = region.offset + region.nbytes
    _append_gap(file, position, file.size, parts, arrays)
    if sum(len(part.raw) for part in parts) > MAX_PASSTHROUGH_BYTES:
        raise SourceError(f"{file.label}: has more than {MAX_PASSTHROUGH_BYTES} bytes between its arrays")
    file_name = PurePath(file.path).name
    name = "stdin" if file.path == STDIN else sanitize_name(file_name)
    if file.path != STDIN and name != file_name:
        notes.append(f"the manifest calls the file {name}: no name in a manifest has all that the file's has")
    passthrough = PassthroughFile(
        format=format_name,
        name=name,
        nbytes=file.size,
        sha256=file.compute_sha256(),
        parts=tuple(parts),
        kv_heads=kv_heads,
        unused_bytes=sum((unused_bytes_by_array or {}).values()),
        unused_bytes_by_array=unused_bytes_by_array or {},
        layer_numbers=layer_numbers,
    )
    return Source(arrays, {FILE_KEY: dump_passthrough(passthrough)}, notes=notes)


def _append_gap(file: MappedFile, begin: int, end: int, parts: list[FilePart], arrays: list[LazyArray]) -> None:
    """Append the bytes between two regions: literal, or as an array of words and a literal remainder."""
    length = (end - begin) // 4 * 4 if end - begin > _MAX_RAW_RUN_BYTES else 0
    if length:
        array = make_byte_array(file, f"around_{begin}", (length,), begin, length, dtype="fp32")
        parts.append(FilePart(length, arrays=((array.name, length),)))
        arrays.append(array)
    if begin + length < end:
        parts.append(FilePart(end - begin - length, file.view(begin + length, end - begin - length).tobytes()))


def make_byte_array(
    file: MappedFile, name: str, shape: tuple[int, ...], offset: int, nbytes: int, *, dtype: str = "fp16"
) -> LazyArray:
    """Return bytes of a file as an array."""
    reader = partial(file.iter_chunks, offset, nbytes)
    return LazyArray(name=name, dtype=dtype, shape=shape, array_dtype="|u1", reader=reader)


def make_field_array(
    file: MappedFile,
    name: str,
    shape: tuple[int, ...],
    block_range: tuple[int, int],
    field_range: tuple[int, int, int],
    array_dtype: str = "|u1",
) -> LazyArray:
    """Return one field of all blocks as an array: `block_range` is (offset, bytes) of the blocks, `field_range` (offset
    in the block, field bytes, block bytes).
    """
    reader = partial(_iter_field_chunks, file, block_range, field_range)
    return LazyArray(name=name, dtype="fp16", shape=shape, array_dtype=array_dtype, reader=reader)


def _iter_field_chunks(
    file: MappedFile, block_range: tuple[int, int], field_range: tuple[int, int, int], chunk_bytes: int
) -> Iterator[Chunk]:
    (offset, nbytes), (begin, field_bytes_per_block, block_bytes) = block_range, field_range
    total_blocks = nbytes // block_bytes
    if chunk_bytes % field_bytes_per_block:  # the last of all, or a limit that cuts blocks
        field_bytes = np.concatenate(
            list(_iter_field_chunks(file, block_range, field_range, total_blocks * field_bytes_per_block))
        )
        yield from (field_bytes[start : start + chunk_bytes] for start in range(0, field_bytes.size, chunk_bytes))
        return
    for start in range(0, total_blocks, chunk_bytes // field_bytes_per_block):
        num_blocks = min(chunk_bytes // field_bytes_per_block, total_blocks - start)
        blocks = file.view(offset + start * block_bytes, num_blocks * block_bytes).reshape(num_blocks, block_bytes)
        yield np.ascontiguousarray(blocks[:, begin : begin + field_bytes_per_block]).reshape(-1)
        file.release_pages(offset + start * block_bytes, num_blocks * block_bytes)


def is_smaller_by_fields(blocks: Bytes, field_sizes: Sequence[int]) -> bool:
    """Return whether separate frames of the block fields are smaller than one frame of the blocks, by a sample."""
    block_bytes = sum(field_sizes)
    sample = blocks[: max(1, _SAMPLE_BYTES // block_bytes) * block_bytes].reshape(-1, block_bytes)
    fields = np.split(sample, np.cumsum(field_sizes)[:-1], axis=1)
    separate_bytes, joint_bytes = (
        sum(len(encode(np.ascontiguousarray(table).reshape(-1), dtype="fp16", effort="fast")) for table in tables)
        for tables in (fields, [sample])
    )
    return separate_bytes < joint_bytes


@dataclass
class PassthroughBytes:
    """The bytes of a whole file, reassembled from its arrays on demand."""

    #: The decoded arrays.
    source: Source
    #: The record of how they form the file.
    passthrough: PassthroughFile
    #: Name for messages.
    label: str

    def __post_init__(self) -> None:
        sizes = {array.name: array.nbytes for array in self.source.arrays}
        check_covers_arrays(self.passthrough, sizes, self.label)
        self._decoded_part: tuple[int, Bytes] | None = None

    @property
    def path(self) -> str:
        """Return the original name of the file."""
        return self.passthrough.name

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.passthrough.nbytes

    def read_head(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, or all if there are fewer."""
        return self.view(0, min(nbytes, self.size)).tobytes()

    def view(self, offset: int, nbytes: int, /) -> Bytes:
        """Return `nbytes` bytes from `offset`; an array is decoded whole and cached until another is needed."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size}")
        chunks: list[Bytes] = []
        while nbytes:
            part, begin = self.passthrough.find_part(offset)
            chunk = self._get_part_bytes(part, begin)[offset - begin : offset - begin + nbytes]
            chunks.append(chunk)
            offset, nbytes = offset + chunk.size, nbytes - chunk.size
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])

    def release_pages(self, offset: int, nbytes: int, /) -> None:
        """Release the decoded array."""
        self._decoded_part = None

    def iter_chunks(self, offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]:
        """Yield views of `chunk_bytes` bytes each."""
        for start in range(offset, offset + nbytes, chunk_bytes):
            yield self.view(start, min(chunk_bytes, offset + nbytes - start))
        self.release_pages(offset, nbytes)

    def _get_part_bytes(self, part: FilePart, begin: int) -> Bytes:
        if not part.arrays:
            return np.frombuffer(part.raw, np.uint8)
        if self._decoded_part is None or self._decoded_part[0] != begin:
            self._decoded_part = None
            part_bytes, num_filled = np.empty(part.nbytes, np.uint8), 0
            for chunk in iter_part_chunks(self.source, part):
                part_bytes[num_filled : num_filled + chunk.size] = chunk
                num_filled += chunk.size
            self._decoded_part = begin, part_bytes
        return self._decoded_part[1]


def iter_part_chunks(source: Source, part: FilePart) -> Iterator[Chunk]:
    """Yield the bytes of a part, in order."""
    if not part.arrays:
        yield np.frombuffer(part.raw, np.uint8)
    elif len(part.arrays) == 1:
        yield from source[part.arrays[0][0]].iter_chunks(_READ_CHUNK_BYTES)
    else:
        yield from _iter_interleaved_chunks(source, part)


def _iter_interleaved_chunks(source: Source, part: FilePart) -> Iterator[Chunk]:
    turn_sizes = [turn_size for _, turn_size in part.arrays]
    num_rows = max(1, _READ_CHUNK_BYTES // sum(turn_sizes))
    readers = [source[name].reader(num_rows * turn_size) for name, turn_size in part.arrays]
    for chunks in zip(*readers, strict=True):
        yield np.concatenate(
            [chunk.reshape(-1, turn_size) for chunk, turn_size in zip(chunks, turn_sizes, strict=True)], axis=1
        ).reshape(-1)


def reopen_original(source: Source, label: str) -> PassthroughBytes | None:
    """Return the whole file that `source`, decoded frames, was made from; None if it was not stored whole."""
    passthrough = parse_passthrough(source.metadata, label)
    return None if passthrough is None else PassthroughBytes(source, passthrough, label)


def apply_recorded_options(
    options: ReadOptions, passthrough: PassthroughFile, completeness: Completeness | None = None
) -> ReadOptions:
    """Return the options, completed by the recorded kv heads and layers."""
    engine = replace(
        options.engine,
        recorded_kv_heads=passthrough.kv_heads,
        recorded_layers=passthrough.layer_numbers,
        recorded_completeness=completeness,
    )
    return replace(options, engine=engine)


def can_restore_file(frames: FrameSet, output: str | None = None) -> bool:
    """Return whether frames store a whole file, and `output` is a path for it rather than for arrays."""
    if frames.document is None:
        return False
    passthrough = parse_passthrough(frames.document.metadata, frames.path)
    if passthrough is None or output is None:
        return passthrough is not None
    has_own_suffix = PurePath(output).suffix.lower() == PurePath(passthrough.name).suffix.lower()
    return (has_own_suffix or find_array_format(output) is None) and not is_directory_output(output)


def restore_file(
    frames: FrameSet,
    output: str | os.PathLike[str] | BinaryStream,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode frames and write the file that they were made from; the output is read back and its hash compared.

    Parameters and errors are those of `restore_arrays`; `OptionError` where the frames are not of a file that was kept
    whole, and `ManifestError` where the manifest's account of it does not fit the arrays.
    """
    start_time = time.perf_counter()
    options = options or DecodeOptions()
    passthrough = parse_passthrough(frames.document.metadata, frames.path) if frames.document else None
    if passthrough is None or frames.document is None:
        raise OptionError(f"{frames.path}: was not made from a file that is kept whole")
    frames.check_size(options)
    if options.max_bytes is not None and passthrough.nbytes > options.max_bytes:
        raise LimitError(
            f"{frames.path}: its file has {passthrough.nbytes} bytes, above the limit of {options.max_bytes}"
        )
    file = PassthroughBytes(make_frame_source(frames, options), passthrough, frames.path)
    if isinstance(output, str | os.PathLike):
        path, is_read_back = os.fspath(output), not is_device(output)
        with FileOutput(path, force=force, exclude=frames.files) as output_file:
            _write_parts(file, output_file.file, progress)
            output_file.file.close()
            if is_read_back and MappedFile(output_file.file.path).compute_sha256() != passthrough.sha256:
                raise OutputError(f"{output_file.target}: does not read back as it was written")
            output_file.commit()
    else:
        path, is_read_back = None, False
        with InputGuard():
            _write_parts(file, output, progress)
        output.flush()
    return RestoreResult(
        input=frames.path,
        output=path,
        arrays=frames.arrays,
        is_verified=True,
        is_read_back=is_read_back,
        files=(),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
        hash_source="file",
        passthrough=passthrough,
        bundle_bytes=count_bundle_bytes(frames.document),
        losses=frames.losses,
        notes=frames.losses,
    )


def verify_file(
    frames: FrameSet, options: DecodeOptions | None = None, *, progress: Progress | None = None
) -> VerifyResult:
    """Reassemble the file that frames were made from, without writing it, and compare its hash.

    Parameters and errors are those of `restore_file`; a different hash is an error.
    """
    restore_result = restore_file(frames, _NullStream(), options, progress=progress)
    passthrough = restore_result.passthrough
    assert passthrough is not None
    return VerifyResult(
        input=frames.path,
        against=(),
        proof="sha256",
        difference=None,
        raw_bytes=frames.raw_bytes,
        stored_bytes=frames.stored_bytes,
        arrays=len(frames.arrays),
        **count_chunks(frames.arrays)._asdict(),
        seconds=restore_result.seconds,
        restored_file_name=passthrough.name,
        completeness=frames.completeness,
        losses=frames.losses,
        notes=(*frames.losses, *(describe_passthrough(frames.document, frames.path) if frames.document else ())),
        unused_bytes=passthrough.unused_bytes,
    )


class _NullStream:
    """A stream that discards its input."""

    def write(self, data: bytes | memoryview, /) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _write_parts(file: PassthroughBytes, sink: Sink, progress: Progress | None) -> None:
    """Write all parts in order; `OutputError` if the result differs from the recorded hash."""
    digest = hashlib.sha256()
    for part in file.passthrough.parts:
        for chunk in iter_part_chunks(file.source, part):
            digest.update(chunk.data)
            sink.write(chunk.data)
            if progress and part.arrays:
                progress(chunk.size)
            del chunk
    if digest.hexdigest() != file.passthrough.sha256:
        raise OutputError(f"{file.label}: what its parts make up does not match the sha256 of the file")
